"""Programming: HumanEval and MBPP as iterative debugging over turns.

The policy writes a function. It may try code (`python`) and run its program against the tests of the prompt
(`run_tests`). It reads the failures, repairs the program, and answers with the whole program. The official tests
decide, and the policy never sees them. `judges.programs` runs both.
"""

from __future__ import annotations

import ast
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from agent_r1.arguments import ArgumentError
from agent_r1.baselines import ONLY_EXPERTS, Baselines
from agent_r1.dialects import Call
from agent_r1.judges.programs import RunTests, Suite, check_program, judge_sandbox
from agent_r1.task_data import Program, load_questions
from agent_r1.text.fences import PYTHON, find_code
from agent_r1.tool_env import Task, ToolEnv
from agent_r1_tools import Tool, ToolResult


class ProgrammingEnv(Baselines, ToolEnv):
    """Functions that are to be written; the base of the environments of this kind.

    A subclass gives `num_tasks` and `make_task`. `Task.metadata` holds `prefix` (code before every program),
    `entry_point`, and three of `Suite`: `shown` (the tests of the prompt), `hidden` (the official ones) and `progress`
    (those that `tests_passed` pays; without it the shown ones).

    Args:
        tools: "python", "run_tests", or both.
        sandbox: where code runs, see `agent_r1_tools.python.open_sandbox`. With "auto" programs are judged where all of
            CPython is: in bubblewrap or the fork server, if one of them is there.
        kwargs: the arguments of `ToolEnv`.

    Raises: SandboxError for a sandbox that does not work here.
    """

    instructions = (
        "Write the Python function that is asked for. You may reason inside <think></think> first. Try code with the "
        "tools, read what fails and repair it. When the program works, give the whole of it as <answer>your "
        "program</answer>."
    )
    outcome_term: ClassVar[str] = "outcome/tests_passed"
    slow_judge: bool = True
    floors: ClassVar[Mapping[str, float]] = {"lookup_table": 0.05}
    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = {
        **ToolEnv.PROCESS_WEIGHTS,
        "tests_passed": 0.3,  # times newly passed tests of `progress` / all of them
        "error_removed": 0.05,  # equal to the earlier failed_call
    }

    def __init__(
        self,
        *,
        tools: Sequence[str] = ("python", "run_tests"),
        sandbox: str = "auto",
        **kwargs: Any,
    ) -> None:
        from agent_r1_tools.python import PythonTool

        if isinstance(tools, str) or not tools or not {"python", "run_tests"}.issuperset(tools):
            raise ArgumentError(f"tools must be a tuple of 'python' or 'run_tests' or both, got {tools!r}")
        self._judge_sandbox = judge_sandbox(sandbox)
        self._run_tests = RunTests(self._judge_sandbox)
        makers: dict[str, Callable[[], Tool]] = {
            "python": lambda: PythonTool(backend=sandbox),
            "run_tests": lambda: self._run_tests,
        }
        super().__init__([makers[name]() for name in tools], **kwargs)

    def start_episode(self, task: Task) -> None:
        """Give `run_tests` its tests."""
        self._run_tests.tests = task.metadata["shown"]
        self._run_tests.progress = task.metadata.get("progress")
        self._run_tests.complete = partial(complete_program, task)

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float]:
        """Return `tests_passed` (newly passed tests of `progress` / all) and `error_removed` (it runs again)."""
        if call.name != "run_tests" or not isinstance(result.data, dict) or "passed" not in result.data:
            return {}
        terms: dict[str, float] = {}
        if new := self._note_passed("progress", result.data["progress"]):
            terms["tests_passed"] = new / len((self._run_tests.progress or self._run_tests.tests).tests)
        self._note_passed("tests_passed", result.data["passed"])
        if self.memory.get("broken") and result.ok:
            terms["error_removed"] = 1
        self.memory["broken"] = not result.ok
        return terms

    def _note_passed(self, kind: str, passed: list[int]) -> int:
        """Record the passed tests of a kind. Return the number of new ones."""
        seen: list[int] = self.memory.setdefault(kind, [])
        new = [index for index in passed if index not in seen]
        seen.extend(new)
        return len(new)

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Score 1 if the program passes all official tests; the metrics are em (the same) and shown_tests_passed."""
        correct = 0.0
        if answer:
            program = complete_program(self.task, answer)
            with self._run_tests.lane():
                correct = float(check_program(self._judge_sandbox, program, self.task.metadata["hidden"]).passed)
        shown = len(self.task.metadata["shown"].tests)
        return correct, {"em": correct, "shown_tests_passed": len(self.memory.get("tests_passed", ())) / max(1, shown)}

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return the official solution, run through `run_tests` (if that is a tool) and given as the answer.

        Raises: ValueError with `rng`: no demonstrator makes mistakes here, there is only the expert.
        """
        if rng is not None:
            raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
        program = complete_program(self.task, self.task.answers[0])
        test = [self.dialect.tool_call("run_tests", {"code": program})] if "run_tests" in self.tools else []
        return [*test[: self.max_turns - 1], f"<answer>\n{program}\n</answer>"]

    def shortcut_lookup_table(self, rng: np.random.Generator) -> list[str]:
        """Answer with a program that returns the results of the shown tests and knows nothing else."""
        known, result = [], "None"
        for node in (node for test in self.task.metadata["shown"].tests for node in ast.parse(test).body):
            match node:
                case ast.Assert(test=ast.Compare(left=ast.Call(args=given), comparators=[value])):
                    result = ast.unparse(value)
                    arguments = "".join(f"{ast.unparse(argument)}, " for argument in given)
                    known.append(f"    if a == ({arguments}): return {result}\n")
        code = f"def {self.task.metadata['entry_point']}(*a):\n{''.join(known)}    return {result}"
        test = [self.dialect.tool_call("run_tests", {"code": code})] if "run_tests" in self.tools else []
        return [*test[: self.max_turns - 1], f"<answer>\n{code}\n</answer>"]


def complete_program(task: Task, code: str) -> str:
    """Complete the policy's code to a program: remove a Markdown fence, and put the task's first code before it.

    A function's body alone continues the prompt, like the completions of HumanEval.
    """
    prefix, name = task.metadata["prefix"], task.metadata["entry_point"]
    definition = re.compile(rf"^(?:(?:async\s+)?def|class)\s+{name}\b", re.MULTILINE)
    assignment = re.compile(rf"^{name}[ \t]*(?::[^=\n]*)?=(?!=)", re.MULTILINE)

    def defines(text: str) -> bool:
        if definition.search(text):
            return True
        # A body, which returns outside all functions, may have a variable of this name.
        is_body = re.search(r"^[ \t]*return\b", text, re.M) and not re.search(r"^(?:def|class)\b", text, re.M)
        return assignment.search(text) is not None and not is_body

    code = find_code(code, PYTHON, defines)
    if not prefix or defines(code):
        future = _FUTURE.search(code)  # such imports are the first statements of a program
        end = future.end() if future else 0
        return f"{code[:end]}\n{prefix}\n{code[end:]}" if end else f"{prefix}\n{code}"
    if not code[:1].isspace() and re.search(r"\n\S", code) and not re.search("\"\"\"|'''", code):
        return prefix + textwrap.indent(code, "    ")  # a body at the margin
    return prefix + ("" if code[:1].isspace() else "    ") + code


_FUTURE = re.compile(
    r"(?:^from[ \t]+__future__[ \t]+import\b(?:\\\n|\([^()]*\)|[^\n(\\])*(?:\s|\#[^\n]*)*)+", re.MULTILINE
)


# ---------------------------------------------------------------------- the data sets


class HumanEvalEnv(ProgrammingEnv):
    """Python functions from a signature and a docstring (HumanEval, arXiv 2107.03374).

    ## Description
    [HumanEval](https://github.com/openai/human-eval) (Chen et al. 2021,
    [arXiv 2107.03374](https://arxiv.org/abs/2107.03374)) has 164 problems. The prompt is the beginning of a program: a
    signature and a docstring. The policy tries code, runs its program against the examples of the docstring, and
    repairs it over several turns. The answer is the whole program, the function, or the body of the function. The
    official tests decide.

    The data is under the MIT licence and is not part of this package. The environment needs a sandbox. Most Linux
    systems have one; bubblewrap runs all of Python. Elsewhere the extra `python` provides a sandbox.

    ## Tools

    - `python(code)` runs code like a cell of a notebook. Names are kept until the episode ends.
    - `run_tests(code)` runs a whole program against the tests of the prompt.

    At most eight calls of one turn are run.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"test"` | the only split |
    | `data_dir` | `None` | the folder with `HumanEval.jsonl.gz` (or unpacked) |
    | `tools` | `("python", "run_tests")` | one or both of these tools |
    | `sandbox` | `"auto"` | the sandbox in which code runs |
    | `process_reward` | `True` | `False`: no process terms; a dict: new weights, such as `{"tests_passed": 0.5}` |

    The other arguments are those of `ToolEnv`.

    Rewards and baselines: docs/environments/humaneval.md.
    """

    splits: ClassVar[Mapping[str, str]] = {"test": "test"}

    def __init__(self, *, split: str = "test", data_dir: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        self.programs: list[Program] = load_questions("humaneval", split, data_dir)
        super().__init__(split=split, **kwargs)

    @property
    def num_tasks(self) -> int:
        """The number of problems of the set."""
        return len(self.programs)

    def make_task(self, index: int) -> Task:
        """Return problem `index` in the order of the file."""
        return humaneval_task(self.programs[index])


class MBPPEnv(ProgrammingEnv):
    """Mostly basic Python problems: a function from one sentence (MBPP, arXiv 2108.07732).

    ## Description
    [MBPP](https://github.com/google-research/google-research/tree/master/mbpp) (Austin et al. 2021,
    [arXiv 2108.07732](https://arxiv.org/abs/2108.07732)) has 974 problems. The prompt has one sentence and the first
    `shown_tests` asserts of the official test, because an assert names the function. The policy runs its program
    against these asserts and repairs it over several turns. The answer is the whole program. All official asserts
    decide.

    The data is under CC BY 4.0 and is not part of this package. The environment needs a sandbox. Most Linux systems
    have one; bubblewrap runs all of Python. Elsewhere the extra `python` provides a sandbox.

    ## Tools

    - `python(code)` runs code like a cell of a notebook. Names are kept until the episode ends.
    - `run_tests(code)` runs a whole program against the asserts of the prompt.

    At most eight calls of one turn are run.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `"train"`, `"validation"`, `"test"` or `"prompt"` |
    | `data_dir` | `None` | the folder with `mbpp.jsonl` |
    | `shown_tests` | `1` | the number of official asserts in the prompt, at least 1 |
    | `tools` | `("python", "run_tests")` | one or both of these tools |
    | `sandbox` | `"auto"` | the sandbox in which code runs |
    | `process_reward` | `True` | `False`: no process terms; a dict: new weights |

    The other arguments are those of `ToolEnv`.

    Rewards and baselines: docs/environments/mbpp.md.
    """

    splits: ClassVar[Mapping[str, str]] = {name: name for name in ("train", "validation", "test", "prompt")}

    def __init__(
        self,
        *,
        split: str = "train",
        data_dir: str | os.PathLike[str] | None = None,
        shown_tests: int = 1,
        **kwargs: Any,
    ) -> None:
        if shown_tests < 1:
            raise ArgumentError(f"shown_tests must be at least 1 (a test names the function), got {shown_tests}")
        self.programs: list[Program] = load_questions("mbpp", split, data_dir)
        self.shown_tests = shown_tests
        super().__init__(split=split, **kwargs)

    @property
    def num_tasks(self) -> int:
        """The number of problems of the split."""
        return len(self.programs)

    def make_task(self, index: int) -> Task:
        """Return problem `index` in the order of the file."""
        return mbpp_task(self.programs[index], self.shown_tests)


@lru_cache(maxsize=2048)
def humaneval_task(program: Program) -> Task:
    """Make the task of a row of HumanEval. The test's process has the prompt too: some tests use its helpers."""
    names = (program.entry_point,)
    shown = Suite(names, program.text, tuple(_examples(program.text, program.entry_point)))
    hidden = Suite(names, program.text + "\n" + program.tests[0], (f"check({program.entry_point})",))
    checks = _checks(program)
    progress = replace(hidden, tests=checks) if checks else shown
    question = f"Complete this program.\n\n```python\n{program.text.strip()}\n```"
    suites = {"shown": shown, "hidden": hidden, "progress": progress}
    metadata = {"prefix": program.text, "entry_point": program.entry_point, **suites}
    return Task(program.id, question, [program.solution], metadata)


def _checks(program: Program) -> tuple[str, ...]:
    """Return the statements of the official `check` that test calls outside the prompt.

    If the statements cannot run separately, it is the whole `check`.
    """
    functions = [node for node in ast.parse(program.tests[0]).body if isinstance(node, ast.FunctionDef)]
    check = next((node for node in functions if node.name == "check"), None)
    if check is None or any(isinstance(node, ast.Return | ast.Nonlocal) for node in ast.walk(check)):
        return (f"check({program.entry_point})",)
    prompt, tests, before = _letters(program.text), [], ""
    for statement in check.body:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        called = [name for name in names if check.args.args and name.id == check.args.args[0].arg]
        for name in called:
            name.id = program.entry_point
        code = f"{before}{ast.unparse(statement)}"
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and node.func in called]
        if not called:
            before = code + "\n"
        elif not any(_letters(ast.unparse(call)) in prompt for call in calls):
            tests.append(code)
            before = ""
    return tuple(tests)


def _letters(code: str) -> str:
    """Return code without blanks and with one kind of quotes, for comparison."""
    return "".join(code.split()).replace('"', "'")


def _examples(prompt: str, name: str) -> list[str]:
    """Return the examples of a docstring with a literal result, as asserts.

    HumanEval writes them in many ways: `>>> f(2)` with the result below, `f(2) == 4`, `f(2) => 4`, `f(2) returns 4`.
    """
    pattern = rf"\b({name}\(.*\))(?:\s*(?:==?>?|->|➞|should return|should be|returns)|[ ]*\n)\s*(\S.*)"
    asserts = []
    for call, result in re.findall(pattern, prompt):
        result = result.split('"""')[0].split("'''")[0].split(" #")[0].strip().rstrip(".;")
        try:
            used = {node.id for node in ast.walk(ast.parse(call, mode="eval")) if isinstance(node, ast.Name)}
            ast.literal_eval(result)
        except (SyntaxError, ValueError):  # prose, or a result that is not a literal
            continue
        if used == {name}:
            asserts.append(f"assert {call} == {result}")
    return asserts


@lru_cache(maxsize=2048)
def mbpp_task(program: Program, shown_tests: int) -> Task:
    """Make the task of a row of MBPP. The official code shows the called names, and whether arguments can cross."""
    code = ast.parse(program.solution)
    defined = {node.name for node in code.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    tests = [node for test in program.tests for node in ast.walk(ast.parse(test))]
    calls = [node for node in tests if isinstance(node, ast.Call) and _called(node) in defined]
    names = tuple(dict.fromkeys(name for call in calls if (name := _called(call))))
    imports = [ast.unparse(node) for node in code.body if isinstance(node, ast.Import | ast.ImportFrom)]
    setup = "\n".join([*imports, program.setup])
    one_process = any(_takes_an_object(call, defined) for call in calls)
    hidden = Suite(names, setup, program.tests, one_process)
    shown = Suite(names, setup, program.tests[:shown_tests], one_process)
    others = tuple(test for test in program.tests[shown_tests:] if test not in shown.tests)
    progress = replace(hidden, tests=others) if others else shown
    given = "\n".join(filter(None, [program.setup, *shown.tests]))
    question = f"{program.text.strip()}\n\nIts tests begin with:\n\n{given}"
    metadata = {"prefix": "", "entry_point": names[0], "shown": shown, "hidden": hidden, "progress": progress}
    return Task(program.id, question, [program.solution], metadata)


def _called(call: ast.Call) -> str | None:
    return call.func.id if isinstance(call.func, ast.Name) else None


def _takes_an_object(call: ast.Call, defined: set[str]) -> bool:
    """Return whether an argument is not a literal: an object of the candidate's class, a variable, a type."""
    arguments = [node for argument in [*call.args, *call.keywords] for node in ast.walk(argument)]
    functions = {id(node.func) for node in arguments if isinstance(node, ast.Call)}
    return any(isinstance(node, ast.Name) and (id(node) not in functions or node.id in defined) for node in arguments)
