"""Programming: HumanEval and MBPP as iterative debugging over turns.

The policy is asked for a function. It may try code (`python`) and run its program against the tests of the prompt
(`run_tests`), reads what fails, repairs, and answers with the whole program. The official tests decide; the policy
never sees them.

They run in a process of their own: the candidate lives in one sandbox, the test in another, and what the test calls
there is a proxy. Arguments and results cross as built-in literals, so an object whose `__eq__` is always true, or a
candidate that looks for the test in its own process, gains nothing.
"""

from __future__ import annotations

import ast
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

from agent_r1.dialects import Call
from agent_r1.task_data import Program, load_questions
from agent_r1.tool_env import Task, ToolEnv
from agent_r1_tools import Tool, ToolFault, ToolResult
from agent_r1_tools.running import describe
from agent_r1_tools.tool import is_fault

if TYPE_CHECKING:
    from agent_r1_tools.python import CallError, Run, Sandbox, Session

PROGRAM_SECONDS = 5.0  # of processor time, for the program to load and for each call
_lanes = threading.BoundedSemaphore(os.cpu_count() or 1)  # more programs at a time would take time from each other


def _renew_lanes() -> None:
    """In a fork of this process: whoever holds a lane is in the parent."""
    global _lanes
    _lanes = threading.BoundedSemaphore(os.cpu_count() or 1)


os.register_at_fork(after_in_child=_renew_lanes)


@dataclass(frozen=True)
class Suite:
    """Tests and what they need.

    Attributes:
        names: functions (or classes) of the candidate that the tests call.
        setup: code that runs before the tests.
        tests: each a piece of code that raises where it fails.
        one_process: the tests hand over objects or types, which cannot cross from sandbox to sandbox; they run in the
            candidate's process and are not proof against a candidate that cheats (MBPP 367, 533, 601 and 927).
    """

    names: tuple[str, ...]
    setup: str
    tests: tuple[str, ...]
    one_process: bool = False


@dataclass(frozen=True)
class Outcome:
    """What tests say about a program: `load_error` if it does not even run, else an error (None: passed) for each.

    `died` says that a process ended on the way: by the program's doing, or because something outside killed it.
    """

    load_error: str | None
    errors: tuple[str | None, ...]
    died: bool = False

    @property
    def passed(self) -> bool:
        return self.load_error is None and not any(self.errors)


def check_program(sandbox: Sandbox, program: str, tests: Suite, explain: bool = False) -> Outcome:
    """Run tests against a program, up to the first that fails; those after it count as failed with it.

    With `explain` all are run, until one runs out of time, and a failed `assert f(x) == y` says what f(x) was. Where a
    process died all is done once more: what dies twice dies of the program.

    Raises ToolFault or an OSError that is one (see `is_fault`) where the sandbox is at fault.
    """
    try:
        outcome = _check_once(sandbox, program, tests, explain)
        return _check_once(sandbox, program, tests, explain) if outcome.died else outcome
    except OSError as error:  # the sandbox's, whatever it is: a program names no path out here
        raise error if is_fault(error) else ToolFault(describe(error)) from error


def _check_once(sandbox: Sandbox, program: str, tests: Suite, explain: bool) -> Outcome:
    with ExitStack() as stack:
        candidate = stack.enter_context(sandbox.session())
        loaded = candidate.run(program)
        if not loaded.ok:
            return Outcome(loaded.output.strip() or loaded.error or loaded.status, (), loaded.status == "died")
        tester: Session = candidate
        functions: dict[str, Callable[..., Any]] = {}
        faults: list[Exception] = []  # of the candidate's sandbox, while a test called it
        deaths: list[CallError] = []  # of its process
        if not tests.one_process:
            tester = stack.enter_context(sandbox.session())
            functions = {name: _proxy(candidate, name, faults, deaths) for name in tests.names}

        def run_in_tester(code: str) -> Run:
            run = tester.run(code, functions)
            if faults:
                raise faults[0]
            return run

        died = run_in_tester(tests.setup).status == "died"
        errors: list[str | None] = []
        for test in tests.tests:
            run = run_in_tester(test)
            error = None if run.ok else run.error or run.status
            died = died or run.status == "died"
            if error and explain and error.startswith("AssertionError") and (left := _left_side(test)):
                error = f"{left} is {run_in_tester(left).output.strip()}"
            errors.append(error)
            if error and (not explain or run.status in ("timeout", "died") or "Timeout" in error):
                break
        not_run = len(tests.tests) - len(errors)
        return Outcome(None, (*errors, *errors[-1:] * not_run), died or bool(deaths))


def _proxy(
    candidate: Session, name: str, faults: list[Exception], deaths: list[CallError]
) -> Callable[..., Any]:
    """The candidate's function, for a test. A fault or a death would only be an exception inside, so it is noted."""
    from agent_r1_tools.python import CallError

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return candidate.call(name, args, kwargs)
        except (ToolFault, OSError) as error:
            faults.append(error)
            raise
        except CallError as error:
            if error.kind == "Died":
                deaths.append(error)
            raise

    return call


def _left_side(test: str) -> str | None:
    """f(x) of `assert f(x) == y`. Tests come from the data set, never from a policy."""
    match ast.parse(test).body:
        case [ast.Assert(test=ast.Compare(left=left))]:
            try:
                return ast.unparse(left)
            except RecursionError:  # nested too deeply to be written out
                return None
    return None


class RunTests(Tool):
    """Runs a program against the tests of the prompt.

    `ToolResult.data` is `{"passed": [indexes], "error": str | None}`; the error is why the program did not even load.
    """

    name = "run_tests"
    description = "Run a whole program against the tests of the task and report which of them fail."
    parameters = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The whole program."}},
        "required": ["code"],
        "additionalProperties": False,
    }
    timeout = 3600.0  # without waiting for other programs; the sandbox bounds every run
    timeout_is_fault = True
    concurrency_safe = False  # each episode has tests of its own

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.tests = Suite((), "", ())
        self.complete: Callable[[str], str] = str

    def lane(self) -> AbstractContextManager[Any]:
        return _lanes

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        outcome = check_program(self.sandbox, self.complete(arguments["code"]), self.tests, explain=True)
        if outcome.load_error is not None:
            return ToolResult(
                f"The program does not run:\n{outcome.load_error}",
                ok=False,
                data={"passed": [], "error": outcome.load_error},
            )
        passed = [index for index, error in enumerate(outcome.errors) if error is None]
        if not self.tests.tests:
            return ToolResult("The program runs. The prompt has no tests.", data={"passed": [], "error": None})
        lines = [f"{len(passed)} of {len(outcome.errors)} tests pass."]
        lines += [
            f"Failed: {test}\n  {error}"
            for test, error in zip(self.tests.tests, outcome.errors, strict=True)
            if error is not None
        ]
        return ToolResult("\n".join(lines), data={"passed": passed, "error": None})


class ProgrammingEnv(ToolEnv):
    """Functions that are to be written; the base of the environments of this kind.

    A subclass gives `num_tasks` and `make_task`. What `Task.metadata` holds: `prefix` (code that stands before every
    program), `entry_point`, `shown` (the tests of the prompt) and `hidden` (the official ones), both `Suite`.

    Args:
        tools: "python", "run_tests", or both.
        sandbox: where code runs, see `agent_r1_tools.python.open_sandbox`. With "auto" programs are judged where all of
            CPython is: in bubblewrap or the fork server, if one of them is there.
        corpus, top_k: taken because every environment takes them; there is nothing to search here.
        kwargs: the arguments of `ToolEnv`.

    Raises: SandboxError for a sandbox that does not work here.
    """

    instructions: ClassVar[str] = (
        "Write the Python function that is asked for. You may reason inside <think></think> first. Try code with the "
        "tools, read what fails and repair it. When the program works, give the whole of it as <answer>your "
        "program</answer>."
    )
    outcome_term: ClassVar[str] = "outcome/tests_passed"
    slow_judge: ClassVar[bool] = True
    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = {
        **ToolEnv.PROCESS_WEIGHTS,
        "tests_passed": 0.3,  # times newly passed tests of the prompt / all of them
        "error_removed": 0.05,  # what failed_call took when the error came
    }

    def __init__(
        self,
        *,
        tools: Sequence[str] = ("python", "run_tests"),
        sandbox: str = "auto",
        corpus: str = "own",
        top_k: int = 5,
        **kwargs: Any,
    ) -> None:
        from agent_r1_tools.python import PythonTool

        if isinstance(tools, str) or not tools or not {"python", "run_tests"}.issuperset(tools):
            raise ValueError(f"tools are any of 'python' and 'run_tests', as a tuple; got {tools!r}")
        if corpus != "own":
            raise ValueError(f"{type(self).__name__} searches nothing: corpus can only be 'own'")
        self._judge_sandbox = judge_sandbox(sandbox)
        self._run_tests = RunTests(self._judge_sandbox)
        made: dict[str, Callable[[], Tool]] = {
            "python": lambda: PythonTool(backend=sandbox),
            "run_tests": lambda: self._run_tests,
        }
        super().__init__([made[name]() for name in tools], **kwargs)

    def start_episode(self, task: Task) -> None:
        """Give `run_tests` the tests of the prompt."""
        self._run_tests.tests = task.metadata["shown"]
        self._run_tests.complete = partial(complete_program, task)

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float]:
        """`tests_passed`: newly passed tests of the prompt / all; `error_removed`: the program runs again."""
        if call.name != "run_tests" or not isinstance(result.data, dict) or "passed" not in result.data:
            return {}
        terms: dict[str, float] = {}
        seen: list[int] = self.memory.setdefault("tests_passed", [])
        new = [index for index in result.data["passed"] if index not in seen]
        seen.extend(new)
        if new:
            terms["tests_passed"] = len(new) / len(self._run_tests.tests.tests)
        if self.memory.get("broken") and result.ok:
            terms["error_removed"] = 1
        self.memory["broken"] = not result.ok
        return terms

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """1 if the program passes all official tests; the metrics are em (the same) and shown_tests_passed."""
        correct = 0.0
        if answer:
            program = complete_program(self.task, answer)
            with _lanes:
                correct = float(check_program(self._judge_sandbox, program, self.task.metadata["hidden"]).passed)
        shown = len(self.task.metadata["shown"].tests)
        return correct, {"em": correct, "shown_tests_passed": len(self.memory.get("tests_passed", ())) / max(1, shown)}


def complete_program(task: Task, code: str) -> str:
    """What the policy wrote as a whole program: without a Markdown fence, after the code that the task begins with.

    A function's body alone continues the prompt, as the completions of HumanEval do.
    """
    prefix, name = task.metadata["prefix"], task.metadata["entry_point"]
    fenced = re.search(r"```(?:python|py)?[ \t]*\n(.*?)```", code, re.DOTALL)
    code = fenced[1] if fenced else code
    if not prefix or re.search(rf"^(?:def\s+{name}\b|{name}\s*=)", code, re.MULTILINE):
        return f"{prefix}\n{code}"
    return prefix + ("" if code[:1].isspace() else "    ") + code


@lru_cache(maxsize=8)
def judge_sandbox(backend: str) -> Sandbox:
    """The sandbox that programs are judged in: for "auto" the first that is there and has all of CPython."""
    from agent_r1_tools.python import Limits, SandboxError, open_sandbox
    from agent_r1_tools.python.choose import LOCAL

    limits = Limits(wall_seconds=2 * PROGRAM_SECONDS, cpu_seconds=PROGRAM_SECONDS)
    for full in [name for name, local in LOCAL.items() if local.all_of_python] if backend == "auto" else []:
        try:
            return open_sandbox(full, limits)
        except SandboxError:
            pass
    return open_sandbox(backend, limits)


# ---------------------------------------------------------------------- the data sets


class HumanEvalEnv(ProgrammingEnv):
    """Python functions from a signature and a docstring (arXiv 2107.03374).

    ## Description
    164 problems. The prompt is the beginning of a program; the examples of its docstring are the tests that
    `run_tests` runs. The answer is the whole program, the function, or its body.

    ## Action space
    `TokenSpan(vocab_size, max_action_tokens)`: one assistant turn. Calls of `python(code)` (state is kept within the
    episode) and `run_tests(code)` are run, at most eight in one turn; else an `<answer>...</answer>` ends the episode.

    ## Observation space
    `TokenSpan(vocab_size, max_context_tokens)`: the whole conversation so far, as the model's family writes it.

    ## Rewards
    At the end equation 6 of Agent-R1, with 1 for a program that passes all official tests as the score
    (`outcome/tests_passed`, `outcome/format`, `outcome/unfinished`). On the way, unless `process_reward=False`:
    `process/tests_passed` 0.3 x newly passed tests of the prompt / all of them, `process/error_removed` +0.05,
    `process/malformed_call` -0.1, `process/failed_call` -0.05, `process/repeated_call` -0.05.

    ## Episode end
    Terminated by an answer; truncated when turns (`max_turns`) or context (`max_context_tokens`) run out.
    `info["metrics"]` then has em (all official tests pass) and shown_tests_passed; `info["is_success"]` is em = 1.

    ## Arguments
    `data_dir`, `split` ("test"), `tools` (("python", "run_tests")), `sandbox` ("auto"), and those of `ToolEnv`.

    ## Version history
    v0: first version.
    """

    splits: ClassVar[Mapping[str, str]] = {"test": "test"}

    def __init__(self, *, split: str = "test", data_dir: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        self.programs: list[Program] = load_questions("humaneval", split, data_dir)
        super().__init__(split=split, **kwargs)

    @property
    def num_tasks(self) -> int:
        """The problems of the set."""
        return len(self.programs)

    def make_task(self, index: int) -> Task:
        """Problem `index` in the order of the file."""
        return humaneval_task(self.programs[index])


class MBPPEnv(ProgrammingEnv):
    """Mostly basic Python problems: a function from one sentence (arXiv 2108.07732).

    ## Description
    974 problems in four splits. The prompt has the sentence and the first `shown_tests` (1) asserts of the official
    test, which name the function; `run_tests` runs these. All asserts decide.

    ## Action space, observation space, rewards, episode end
    As in `HumanEvalEnv`.

    ## Arguments
    `shown_tests` (1); `split` is "train", "validation", "test" or "prompt"; the rest as in `HumanEvalEnv`.

    ## Version history
    v0: first version.
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
            raise ValueError(f"shown_tests must be at least 1 (a test names the function), got {shown_tests}")
        self.programs: list[Program] = load_questions("mbpp", split, data_dir)
        self.shown_tests = shown_tests
        super().__init__(split=split, **kwargs)

    @property
    def num_tasks(self) -> int:
        """The problems of the split."""
        return len(self.programs)

    def make_task(self, index: int) -> Task:
        """Problem `index` in the order of the file."""
        return mbpp_task(self.programs[index], self.shown_tests)


@lru_cache(maxsize=2048)
def humaneval_task(program: Program) -> Task:
    """The task of a row of HumanEval. The test's process has the prompt too: some tests use its helpers."""
    names = (program.entry_point,)
    shown = Suite(names, program.text, tuple(_examples(program.text, program.entry_point)))
    hidden = Suite(names, program.text + "\n" + program.tests[0], (f"check({program.entry_point})",))
    question = f"Complete this program.\n\n```python\n{program.text.strip()}\n```"
    metadata = {"prefix": program.text, "entry_point": program.entry_point, "shown": shown, "hidden": hidden}
    return Task(program.id, question, [program.solution], metadata)


def _examples(prompt: str, name: str) -> list[str]:
    """The examples of a docstring whose result is a literal, as asserts.

    HumanEval writes them in many ways: `>>> f(2)` with the result below, `f(2) == 4`, `f(2) => 4`, `f(2) returns 4`.
    """
    pattern = rf"\b({name}\(.*\))(?:\s*(?:==?>?|->|➞|should return|should be|returns)|[ ]*\n)\s*(\S.*)"
    asserts = []
    for call, result in re.findall(pattern, prompt):
        result = result.split('"""')[0].split("'''")[0].split(" #")[0].strip().rstrip(".;")
        try:
            used = {node.id for node in ast.walk(ast.parse(call, mode="eval")) if isinstance(node, ast.Name)}
            ast.literal_eval(result)
        except (SyntaxError, ValueError):  # prose, or a result that is no literal
            continue
        if used == {name}:
            asserts.append(f"assert {call} == {result}")
    return asserts


@lru_cache(maxsize=2048)
def mbpp_task(program: Program, shown_tests: int) -> Task:
    """The task of a row of MBPP. What the asserts call, and whether that can cross, is read off the official code."""
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
    given = "\n".join(filter(None, [program.setup, *shown.tests]))
    question = f"{program.text.strip()}\n\nIts tests begin with:\n\n{given}"
    metadata = {"prefix": "", "entry_point": names[0], "shown": shown, "hidden": hidden}
    return Task(program.id, question, [program.solution], metadata)


def _called(call: ast.Call) -> str | None:
    return call.func.id if isinstance(call.func, ast.Name) else None


def _takes_an_object(call: ast.Call, defined: set[str]) -> bool:
    """Whether an argument is more than a literal: an object of the candidate's class, a variable, a type."""
    arguments = [node for argument in [*call.args, *call.keywords] for node in ast.walk(argument)]
    functions = {id(node.func) for node in arguments if isinstance(node, ast.Call)}
    return any(isinstance(node, ast.Name) and (id(node) not in functions or node.id in defined) for node in arguments)
