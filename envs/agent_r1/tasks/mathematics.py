"""Mathematics with a calculator and Python: GSM8K and MATH.

The policy calculates as often as it wants, within its turns, and answers in `<answer>...</answer>`. `MathematicsEnv`
has the tools, the process terms and the judge. A data set only adds its problems.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from agent_r1.arguments import ArgumentError
from agent_r1.baselines import ONLY_EXPERTS, Baselines
from agent_r1.dialects import Call
from agent_r1.judges.mathematics import judge, require_math_verify
from agent_r1.rewards import paper_outcome
from agent_r1.task_data import has_questions, load_questions
from agent_r1.tool_env import Outcome, Task, ToolEnv
from agent_r1_tools import Tool, ToolResult
from agent_r1_tools.calculator import Calculator

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_ONE_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_WRITTEN = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
_ANNOTATION = re.compile(r"<<([^<>=]+)=([^<>]*)>>")  # GSM8K writes 48/2 = <<48/2=24>>24


class MathematicsEnv(Baselines, ToolEnv):
    """Problems with one right answer; the base of the environments of this kind.

    A subclass gives `num_tasks` and `make_task`; `Task.answers` holds the gold answer, as LaTeX or plain.

    Args:
        tools: "calculator", "python", or both.
        sandbox: where the code of `python` runs, see `agent_r1_tools.python.open_sandbox`.
        kwargs: the arguments of `ToolEnv`.

    Raises: ImportError where math-verify is not installed; SandboxError for a sandbox that does not work here.
    """

    instructions = (
        "Solve the problem. You may reason inside <think></think> first. Calculate with the tools, as often as you "
        "need. When you know the answer, give it alone, without a unit or an explanation, as <answer>your "
        "answer</answer>."
    )
    outcome_term: ClassVar[str] = "outcome/correct"
    slow_judge: bool = True
    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = {
        **ToolEnv.PROCESS_WEIGHTS,
        "code_ran": 0.05,  # the first program that ran; later ones pay nothing
        "code_failed": -0.05,  # on top of failed_call
        "unused_result": -0.02,
    }

    def __init__(
        self,
        *,
        tools: Sequence[str] = ("python", "calculator"),
        sandbox: str = "auto",
        **kwargs: Any,
    ) -> None:
        if isinstance(tools, str) or not tools or not {"calculator", "python"}.issuperset(tools):
            raise ArgumentError(f"tools must be a tuple of 'calculator' or 'python' or both, got {tools!r}")
        super().__init__([Calculator() if name == "calculator" else _python(sandbox) for name in tools], **kwargs)

    def solution_steps(self, task: Task) -> list[tuple[str, float]]:
        """Return expression and result of each step of the solution, if finding steps is paid (`step_found`)."""
        return []

    def start_episode(self, task: Task) -> None:
        """Note the results of the steps, except numbers in the question or in the step's own expression."""
        super().start_episode(task)
        steps, given = self.solution_steps(task), _written(task.question)
        results = (value for expression, value in steps if abs(value) not in given | _written(expression))
        self._steps, self._results_that_count = list(dict.fromkeys(results)), 2 * len(steps)

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float]:
        """Return `code_ran` for the first program that ran, `code_failed` for every failed one, and `step_found`.

        `step_found` is newly found results of steps / all of them. A result finds a step if it is one number that the
        call does not contain. Only the first results of an episode count, twice as many as there are steps.
        """
        terms: dict[str, float] = {}
        if call.name == "python" and not result.ok:
            terms["code_failed"] = 1
        elif call.name == "python" and not self.memory.get("code_ran"):
            self.memory["code_ran"] = True
            terms["code_ran"] = 1
        written = json.dumps(call.arguments, ensure_ascii=False)  # × stays one character, without digits
        self._note_use(written)
        if not result.ok:
            return terms
        self.memory["results"] = self.memory.get("results", 0) + 1
        if numbers := " ".join(map(repr, _numbers(result.content))):  # one text: each turn copies the memory
            self.memory.setdefault("unused", []).append((self.episode.turn, numbers))
        value = _value(result.content)
        if value is None or self.memory["results"] > self._results_that_count:
            return terms
        step = next((step for step in self._steps if math.isclose(step, value, rel_tol=1e-9)), None)
        steps_found: list[float] = self.memory.setdefault("steps_found", [])
        if step is not None and step not in steps_found and abs(step) not in _written(written):
            steps_found.append(step)
            terms["step_found"] = 1 / len(self._steps)
        return terms

    def _note_use(self, text: str) -> None:
        """Mark results of earlier turns as used if they share a number with a call or an answer."""
        used = _numbers(text)
        self.memory["unused"] = [
            (turn, numbers)
            for turn, numbers in self.memory.get("unused", ())
            if turn == self.episode.turn or used.isdisjoint(map(float, numbers.split()))
        ]

    def judge_end(self, score: float, *, answer: str, answer_ok: bool, calls_ok: bool) -> Outcome:
        """Compute equation 6, and `unused_result`: results without a number in a later call or in the answer."""
        self._note_use(answer)
        unused = len(self.memory["unused"])
        value = paper_outcome(score, answer_ok=answer_ok, calls_ok=calls_ok)
        return Outcome(value, {"unused_result": unused} if unused else {})

    def _step_recall(self) -> dict[str, float]:
        """Return the metric of an episode, the share of found steps; empty if no step counts."""
        return {"step_recall": len(self.memory.get("steps_found", ())) / len(self._steps)} if self._steps else {}

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Score 1 if math-verify finds the answer equal to the gold one; the metric is em (the same).

        An answer that occurs in the question scores 0, unless it is written like the gold answer. An answer that cannot
        be compared scores 0, too; the reason is in `memory["unreadable"]`.
        """
        if not answer:
            return 0.0, {"em": 0.0}
        correct, reason = judge(self.task.answers[0], answer, self.task.question)
        if reason:
            self.memory["unreadable"] = reason
        return float(correct), {"em": float(correct)}


def _python(sandbox: str) -> Tool:
    from agent_r1_tools.python import PythonTool

    return PythonTool(backend=sandbox)


def _thought(text: str) -> str:
    text = " ".join(text.split())
    return f"<think>{text}</think>" if text else ""


def _numbers(text: str) -> set[float]:
    """Return the numbers in a text: plain digits, and numbers as people read them (`1,000`)."""
    return {float(number) for number in _NUMBER.findall(text)} | _written(text)


def _annotated_steps(solution: object) -> list[tuple[str, float]]:
    """Return expression and result of each annotated step."""
    if not isinstance(solution, str):
        return []
    steps = [(step[1], _value(_plain(step[2]))) for step in _ANNOTATION.finditer(solution)]
    return [(expression, value) for expression, value in steps if value is not None]


def _plain(text: str) -> str:
    return text.replace(",", "").replace("$", "").strip()


def _value(text: str) -> float | None:
    """Return the text as one number in digits; None for anything else."""
    value = float(text) if _ONE_NUMBER.fullmatch(text) else math.inf
    return value if math.isfinite(value) else None


def _written(text: str) -> set[float]:
    """Return the numbers in a text as people read them: `.5`, `1,000`, and two numbers in `5,6`."""
    return {float(number.replace(",", "")) for number in _WRITTEN.findall(text)}


# ---------------------------------------------------------------------- the data sets


class GSM8KEnv(MathematicsEnv):
    """Word problems of grade school mathematics, each with a number as the answer (GSM8K, arXiv 2110.14168).

    ## Description
    [GSM8K](https://github.com/openai/grade-school-math) (Cobbe et al. 2021, [arXiv
    2110.14168](https://arxiv.org/abs/2110.14168)) has problems of two to eight steps of arithmetic. The policy may
    calculate and run Python in every turn. It ends the episode with `<answer>...</answer>`.

    The data is under the MIT licence and is not part of this package. The environment needs the extra `math`. The tool
    `python` also needs a sandbox. Most Linux systems have one. Elsewhere the extra `python` provides one.

    ## Tools

    - `python(code)` runs code like a cell of a notebook. Names are kept until the episode ends.
    - `calculator(expression)` returns the value of an expression.

    At most eight calls of one turn are run.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `"train"` or `"test"` |
    | `data_dir` | `None` | the folder with `train.jsonl` and `test.jsonl` |
    | `tools` | `("python", "calculator")` | one or both of these tools |
    | `sandbox` | `"auto"` | the sandbox of `python` |
    | `process_reward` | `True` | `False`: no process terms; a dict: new weights, such as `{"code_ran": 0}` |

    The other arguments are those of `ToolEnv`.

    Rewards and baselines: docs/environments/gsm8k.md.
    """

    splits: ClassVar[Mapping[str, str]] = {"train": "train", "test": "test"}
    data_sets: ClassVar[Mapping[str, str]] = {"train": "gsm8k", "test": "gsm8k"}
    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = {**MathematicsEnv.PROCESS_WEIGHTS, "step_found": 0.0}

    def __init__(self, *, split: str = "train", data_dir: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        require_math_verify()
        self.problems = load_questions(self.data_sets.get(split, self.data_sets["train"]), split, data_dir)
        super().__init__(split=split, **kwargs)

    @classmethod
    def has_split(cls, split: str, **kwargs: Any) -> bool:
        """Return whether the folder, if one is given, has the file of a split."""
        return super().has_split(split) and has_questions(
            cls.data_sets.get(split, cls.data_sets["train"]), split, kwargs.get("data_dir")
        )

    @property
    def num_tasks(self) -> int:
        """The number of problems of the split."""
        return len(self.problems)

    def make_task(self, index: int) -> Task:
        """Return problem `index` in the order of the file."""
        problem = self.problems[index]
        return Task(problem.id, problem.question, [problem.answer], dict(problem.metadata))

    def solution_steps(self, task: Task) -> list[tuple[str, float]]:
        """Return the annotated steps, if they are paid."""
        paid = self.process_weights.get("step_found", 0.0) != 0
        return _annotated_steps(task.metadata.get("solution")) if paid else []

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Score as the base class does; the metrics are em and, if annotated steps are paid, step_recall."""
        score, metrics = super().judge_answer(answer)
        return score, metrics | self._step_recall()

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return the official solution as turns: each annotated step is a calculator call, text before it a thought.

        The tool returns the number, and the next thought continues after it. Without a calculator or annotations, the
        whole solution is the thought of one turn. Raises ValueError with `rng`: there is only the expert.
        """
        if rng is not None:
            raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
        solution = self.task.metadata["solution"].split("####")[0]
        if "calculator" not in self.tools:
            solution = _ANNOTATION.sub("", solution)
        steps, position = list(_ANNOTATION.finditer(solution)) if self.max_turns > 1 else [], 0
        turns: list[str] = []
        while steps:  # if there are few turns, the last one before the answer makes all remaining calls
            count = len(steps) if len(turns) + 2 >= self.max_turns else 1
            now, steps = steps[:count], steps[count:]
            calls = [("calculator", {"expression": step[1].strip()}) for step in now]
            turns.append(_thought(solution[position : now[0].start()]) + self.dialect.write_turn(calls=calls))
            position = now[-1].end()
        return [*turns, f"{_thought(solution[position:])}<answer>{self.task.answers[0]}</answer>"]


class MATHEnv(GSM8KEnv):
    r"""Problems of mathematics competitions, with an expression as the answer (MATH, arXiv 2103.03874).

    ## Description
    [MATH](https://github.com/hendrycks/math) (Hendrycks et al. 2021,
    [arXiv 2103.03874](https://arxiv.org/abs/2103.03874)) has problems of seven subjects and five levels. The gold
    answer is the content of the last `\boxed{}` (or `\fbox{}`) of the official solution, as in the official code. An
    answer is right if it is the same expression, for example `14/3` for `\frac{14}{3}`.

    The data is under the MIT licence and is not part of this package. The environment needs the extra `math`. The tool
    `python` also needs a sandbox. Most Linux systems have one. Elsewhere the extra `python` provides one.

    ## Tools
    `python(code)` and `calculator(expression)`, as in `GSM8KEnv`.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `"train"`, `"test"` or `"math500"` |
    | `data_dir` | `None` | the folder with the files of the splits |
    | `tools` | `("python", "calculator")` | one or both of these tools |
    | `sandbox` | `"auto"` | the sandbox of `python` |
    | `process_reward` | `True` | `False`: no process terms; a dict: new weights |

    The other arguments are those of `ToolEnv`.

    Rewards and baselines: docs/environments/math.md.
    """

    splits: ClassVar[Mapping[str, str]] = {"train": "train", "test": "test", "math500": "math500"}
    data_sets: ClassVar[Mapping[str, str]] = {"train": "math", "test": "math", "math500": "math500"}
    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = MathematicsEnv.PROCESS_WEIGHTS
