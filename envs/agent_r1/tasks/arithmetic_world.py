"""ArithmeticWorld: word problems with new numbers in every task.

Each problem changes a number of things on two or three days in a row. Each day is one calculation on the result of the
day before. The problems are generated, so nothing has to be downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from agent_r1.arguments import integer
from agent_r1.tasks.draw import pick
from agent_r1.tasks.mathematics import MathematicsEnv
from agent_r1.tool_env import Task
from agent_r1_tools.calculator import Calculator

# Words. The unseen ones occur in training as a remark, never in a question.
NAMES = "Ada Bela Cora Dina Edda Fara Gita Hana Ines Juna Kira Lena Mira Nora Olga Pina Rosa Sara Tilda Vera".split()
UNSEEN_NAMES = "Wanda Xenia Yara Zita".split()
ITEMS = "shells coins beads cards stamps stones buttons marbles tickets corks seeds pearls badges pins".split()
UNSEEN_ITEMS = "ribbons feathers candles acorns".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
VERBS = {
    "+": ["finds", "buys", "wins", "gets"],
    "-": ["sells", "loses", "mails", "spends"],
    "*": ["swaps each for", "trades each for"],
    "/": ["keeps one in", "saves one in"],
}

PHRASING = "{name} has {start} {items}; {events}.{remark} How many {items} does she have then?"
OTHER_PHRASINGS = (
    "How many {items} does {name} have in the end? She has {start}; {events}.{remark}",
    "In the box of {name} are {start} {items}; {events}.{remark} Count the {items}.",
    "{name} had {start} {items} last week; {events}.{remark} Say how many there are now.",
)
NUM_TASKS = {"train": 1_000_000, "test": 10_000}


@lru_cache(maxsize=256)  # the episodes of a group have the same task
def generate_task(seed: int, split: str, index: int) -> Task:
    """Generate task `index` of a split of the world family `seed`. The result is cached: do not change it.

    Splits: train and test (2 or 3 steps, numbers of two digits), and the zero-shot variants more_steps (4),
    larger_numbers (three digits), unseen_words, other_phrasings. `metadata`: steps ([day, expression] pairs) and values
    (what each step gives; the last is the answer).
    """
    rng = np.random.default_rng([seed, list(ArithmeticWorldEnv.splits).index(split), index])
    unseen = split == "unseen_words"
    name = pick(rng, UNSEEN_NAMES if unseen else NAMES)
    items = pick(rng, UNSEEN_ITEMS if unseen else ITEMS)
    low, high = (100, 1000) if split == "larger_numbers" else (10, 100)
    num_steps = 4 if split == "more_steps" else int(rng.integers(2, 4))
    first_day = int(rng.integers(len(DAYS)))
    start = value = int(rng.integers(low, high))
    events, steps, values = [], [], []
    operators = "++++---**/"  # repeated by frequency; at most one product or quotient per task
    for day in range(first_day, first_day + num_steps):
        divisors = [number for number in range(2, 10) if value % number == 0 and value // number >= low]
        possible = {"+": True, "-": value >= 2 * low, "*": value < 10 * low, "/": bool(divisors)}
        operator = pick(rng, [o for o in operators if possible[o]])
        if operator in "*/":
            operators = operators.replace(operator, "")
        if operator == "/":
            number = pick(rng, divisors)
        elif operator == "*":
            number = int(rng.integers(2, 10))
        else:
            number = int(rng.integers(low, high if operator == "+" else min(high, value - low + 1)))
        name_of_day = DAYS[day % len(DAYS)]
        events.append(f"on {name_of_day} she {pick(rng, VERBS[operator])} {number}")
        steps.append([name_of_day, f"{value} {operator} {number}"])
        value = {"+": value + number, "-": value - number, "*": value * number, "/": value // number}[operator]
        values.append(value)
    remark = ""
    if rng.random() < 0.2:
        remark = f" {pick(rng, UNSEEN_NAMES)} only has {pick(rng, UNSEEN_ITEMS)}."
    phrasing = pick(rng, OTHER_PHRASINGS) if split == "other_phrasings" else PHRASING
    return Task(
        id=f"{split}-{seed}-{index}",
        question=phrasing.format(name=name, start=start, items=items, events="; ".join(events), remark=remark),
        answers=[str(value)],
        metadata={"steps": steps, "values": values},
    )


class ArithmeticWorldEnv(MathematicsEnv):
    """Generated word problems with new numbers in every task.

    ## Description
    Someone has a number of things. On two or three days in a row the number changes, for example "on Friday she sells
    24". Each day is one calculation on the result of the day before. The policy calculates with a tool, one day at a
    time, and answers with the last result.

    The numbers are drawn in every task, so they cannot be learned by heart. A small model cannot calculate. It learns
    to let a tool do it, one step at a time, and to stop after the last day. Nothing has to be downloaded.

    ## Tools
    `calculator(expression)` returns the value of an expression. `tools=("python",)` gives `python(code)` instead, and
    `tools=("calculator", "python")` gives both.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `train`, `test`, `more_steps`, `larger_numbers`, `unseen_words`, `other_phrasings` |
    | `world_seed` | `0` | the family of worlds |
    | `tools` | `("calculator",)` | `"calculator"`, `"python"` or both |
    | `max_action_tokens` | `512` | the maximum number of tokens in a turn |

    A task is a function of `world_seed`, split and index. The calculator needs no extra of the package. The other
    arguments are those of `GSM8KEnv` without `data_dir`.

    Rewards and baselines: docs/environments/arithmetic_world.md.
    """

    instructions = (
        "Solve the problem. Calculate with the tools, one step at a time. "
        "When you know the answer, give it as <answer>your answer</answer>."
    )
    slow_judge: bool = False
    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = {
        **MathematicsEnv.PROCESS_WEIGHTS,
        "step_found": 0.3,  # times newly found results of steps / all steps
    }
    floor = 0.002  # a number that was read may be the answer: in 1 of 1,000 tasks
    splits: ClassVar[Mapping[str, str]] = {
        name: name for name in ("train", "test", "more_steps", "larger_numbers", "unseen_words", "other_phrasings")
    }

    def __init__(self, *, world_seed: int = 0, tools: Sequence[str] = ("calculator",), **kwargs: Any) -> None:
        kwargs.setdefault("max_action_tokens", 512)  # a turn is short here, and a policy that babbles should not stall
        super().__init__(tools=tools, **kwargs)
        self.world_seed = integer("world_seed", world_seed, least=0)

    @property
    def num_tasks(self) -> int:
        """The number of tasks: a million in train, ten thousand in every other split."""
        return NUM_TASKS.get(self.split, NUM_TASKS["test"])

    def make_task(self, index: int) -> Task:
        """Generate task `index`; nothing is stored."""
        return generate_task(self.world_seed, self.split, index)

    def solution_steps(self, task: Task) -> list[tuple[str, float]]:
        """Return the calculation of each day."""
        steps, values = task.metadata["steps"], task.metadata["values"]
        return [(expression, value) for (_, expression), value in zip(steps, values, strict=True)]

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Score numerical equality; the metrics are em (the same) and step_recall."""
        correct = float(_as_number(answer) == self.task.metadata["values"][-1])
        return correct, {"em": correct} | self._step_recall()

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return the turns of the scripted expert on the current task as text; with `rng`, of a sloppy demonstrator.

        The sloppy demonstrator (mostly) answers with the first result, omits a day, swaps the numbers of a subtraction
        or division, or guesses without a calculation.
        """
        steps, values = self.task.metadata["steps"], self.task.metadata["values"]
        answer = values[-1]
        if rng is not None:
            kind, first = rng.random(), steps[0][1]
            steps, answer = steps[:1], values[0]
            if kind < 0.1:
                steps, answer = [], int(first.split()[2])
            elif kind < 0.2:
                day, expression = self.task.metadata["steps"][-1]
                start, (_, operator, number) = first.split()[0], expression.split()
                steps = [[day, f"{start} {operator} {number}"]]
                answer = calculated(steps[0][1])
            elif kind < 0.3 and first.split()[1] in "-/":
                left, operator, right = first.split()
                steps = [[steps[0][0], f"{right} {operator} {left}"]]
                answer = calculated(steps[0][1])
        name, argument = ("calculator", "expression") if "calculator" in self.tools else ("python", "code")
        turns = [f"<think>{day}</think>" + self.dialect.tool_call(name, {argument: text}) for day, text in steps]
        return [*turns, f"<answer>{answer}</answer>"]

    @staticmethod
    def vocabulary() -> list[str]:
        """Return every word of the worlds, and the digits, which a small tokenizer should keep whole."""
        verbs = [verb for group in VERBS.values() for verb in group]
        return NAMES + UNSEEN_NAMES + ITEMS + UNSEEN_ITEMS + DAYS + verbs + list("0123456789")


def calculated(expression: str) -> str:
    """Return the calculator's text for an expression."""
    return Calculator().execute({"expression": expression}).content


def _as_number(text: str) -> float | None:
    """Return a text as a number, with or without thousands separators; None if it is not a number."""
    try:
        return float(text.strip().replace(",", ""))
    except ValueError:
        return None
