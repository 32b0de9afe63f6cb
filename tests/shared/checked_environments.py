"""Small environments for `python -m agent_r1.validate`: one that is right, and others that are wrong in one thing."""

import random
import time
from dataclasses import replace

import gymnasium as gym
import numpy as np

from agent_r1 import End, Task, Tool, ToolEnv


class Right(ToolEnv):
    """A number is to be read and said."""

    PROCESS_WEIGHTS = {**ToolEnv.PROCESS_WEIGHTS, "read": 0.2}
    num_tasks = 50
    floor = 0.2  # a word that was read may be the number

    def __init__(self, **kwargs):
        super().__init__([Tool.from_function(self.read)], **kwargs)

    def read(self, place: int) -> str:
        """Read what stands at a place."""
        return f"{self.task.metadata['number']}" if place == 1 else "nothing"

    def make_task(self, index):
        return Task(f"t{index}", "Which number stands at place 1?", [str(700 + index)], {"number": 700 + index})

    def judge_result(self, call, result):
        first = result.content != "nothing" and not self.memory.get("read")
        self.memory["read"] = self.memory.get("read") or first
        return {"read": 1.0} if first else {}

    def judge_answer(self, answer):
        return float(answer in self.task.answers), {}

    def demonstration(self, rng=None, teacher=None):
        return [self.dialect.tool_call("read", {"place": 1}), f"<answer>{self.task.answers[0]}</answer>"]


class HoldsNothingOut(Right):
    splits = {"train": "training", "test": "testing"}  # noqa: RUF012

    @property
    def num_tasks(self):
        return 50 if self.split == "training" else 15

    def make_task(self, index):
        task = super().make_task(index)
        return replace(task, id=f"{self.split}{index}", metadata={("no", "text"): 1, **task.metadata})


class HoldsSomeOut(HoldsNothingOut):
    """Also under another name; and the first task is the same."""

    splits = {"train": "training", "test": "testing", "dev": "testing"}  # noqa: RUF012

    def make_task(self, index):
        return super().make_task(index + 60 * bool(index) * (self.split == "testing"))


class HoldsShiftedOut(HoldsNothingOut):
    def make_task(self, index):
        return super().make_task(index + 5 * (self.split == "testing"))


class HoldsTheLastOut(HoldsNothingOut):
    """The last tasks of a large train, backwards."""

    @property
    def num_tasks(self):
        return 1_000_000 if self.split == "training" else 15

    def make_task(self, index):
        return super().make_task(999_999 - index if self.split == "testing" else index)


class HoldsMostlyNothingOut(HoldsNothingOut):
    """The first seven of 15 tasks are others."""

    def make_task(self, index):
        return super().make_task(index + 100 * (self.split == "testing" and index < 7))


class HoldsArraysOut(HoldsNothingOut):
    """Tasks that differ in the middle of an array only, which numpy doesn't show."""

    def make_task(self, index):
        shown = np.zeros(2_000)
        shown[1_000] = index + 1e-12 * (self.split == "testing")
        return Task(f"{self.split}{index}", "Which number?", ["1"], {"number": 1, "array": shown})


class HoldsNoArraysOut(HoldsArraysOut):
    """The same arrays, three tasks later."""

    def make_task(self, index):
        shown = np.zeros(2_000)
        shown[1_000] = index + 3 * (self.split == "testing")
        return Task(f"{self.split}{index}", "Which number?", ["1"], {"number": 1, "array": shown})


class FloorOfNoTrick(Right):
    floors = {"reeding": 1.0}  # noqa: RUF012


class Farmable(Right):
    def judge_result(self, call, result):
        return {"read": 1.0}


class FarmableInPairs(Right):
    """Only two calls in turn pay again."""

    def judge_result(self, call, result):
        new = self.memory.get("last") != result.content
        self.memory["last"] = result.content
        return {"read": 1.0} if new else {}


class ListensToTools(Right):
    def judge_result(self, call, result):
        return End(1.0) if "<answer>" in result.content else {}


class ListensToToolsOfAnEpisode(ListensToTools):
    def start_episode(self, task):
        self.tools["read"] = Tool.from_function(self.read)


class FailsOnOtherPlaces(Right):
    """Right; all but the expert's calls fail."""

    def read(self, place: int) -> str:
        """Read what stands at a place."""
        return {1: str(self.task.metadata["number"])}[place]

    def judge_result(self, call, result):
        return super().judge_result(call, result) if result.ok else {}


class ExpertFails(Right):
    """Its tool always raises; its expert knows the answer without."""

    def read(self, place: int) -> str:
        """Read what stands at a place."""
        raise KeyError(place)

    def judge_result(self, call, result):
        return {}


class FailsOnMostWords(Right):
    """Right, but for an expert."""

    def read(self, place: str) -> str:
        """Read what stands at a place."""
        return {"place": str(self.task.metadata["number"])}[place]

    def judge_result(self, call, result):
        return super().judge_result(call, result) if result.ok else {}

    def demonstration(self, rng=None, teacher=None):
        raise NotImplementedError


class KeepsResultsBack(FailsOnOtherPlaces):
    """What its tool says doesn't reach the policy."""

    def _end_turn(self, turn, results):
        return super()._end_turn(turn, [replace(result, content="done") for result in results])


class WithoutTools(Right):
    """Only asks."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tools.clear()
        self._schemas = []

    def demonstration(self, rng=None, teacher=None):
        return [f"<answer>{self.task.answers[0]}</answer>"]


class WithoutSuper(Right):
    def __init__(self, **kwargs):
        pass


class HasATrick(Right):
    def shortcut_reading(self, rng):
        return self.demonstration()


class ListensToQuestions(Right):
    @property
    def schemas(self):
        return super().schemas if "<answer>" not in self.task.question else []


class DependsOnHashes(Right):
    def make_task(self, index):
        return Task(f"t{index}", f"Which number stands at place 1? {hash('x')}", ["7"], {"number": 7})


class DependsOnTheClock(Right):
    def make_task(self, index):
        return Task(f"t{index}", f"In {time.gmtime(time.time()).tm_year}, which number?", ["7"], {"number": 7})


class DependsOnGlobalRandomNumbers(Right):
    def read(self, place: int) -> str:
        """Read what stands at a place."""
        return str(np.random.random())


class DrawsGlobalRandomNumbers(Right):
    def read(self, place: int) -> str:
        """Read what stands at a place."""
        random.random()
        return "nothing"


class ForgetsInSnapshots(Right):
    count = 0

    def start_episode(self, task):
        self.count = 0

    def read(self, place: int) -> str:
        """Read what stands at a place."""
        self.count += 1
        return f"time {self.count}"


class Breaks(Right):
    def judge_result(self, call, result):
        raise KeyError("x")


class NeedsItsArguments(Right):
    """As many write it first: what a failed call has for arguments may be anything."""

    def judge_result(self, call, result):
        return {} if call.arguments["place"] else {}


class NeedsANumber(Right):
    def judge_result(self, call, result):
        return {} if abs(call.arguments.get("place", 0)) else {}


class Unjson(Right):
    def step(self, action):
        *rest, info = super().step(action)
        return *rest, info | {"x": float("nan")}


class Unspeakable(Right):
    """Not what gymnasium takes for an environment."""

    def reset(self, *, seed=None, options=None):
        state, info = super().reset(seed=None, options=options)
        return state, info


class Unsolvable(Right):
    def judge_answer(self, answer):
        return 0.0, {}


class TakesAnything(Right):
    def judge_answer(self, answer):
        return 1.0, {}


class TakesWhatContainsIt(Right):
    def read(self, place: int) -> str:
        """Read what stands at a place."""
        return f"{self.task.metadata['number']}"

    def judge_answer(self, answer):
        return float(self.task.answers[0] in answer), {}


class TakesTheQuestion(Right):
    def judge_answer(self, answer):
        return float(answer in (self.task.question, *self.task.answers)), {}


class TeachesTooWell(Right):
    teachers = ("expert", "fallible_25")


class Stumbles(Right):
    def demonstration(self, rng=None, teacher=None):
        if rng is not None:
            rng.shuffled()
        return super().demonstration()


class RefusesAll(Right):
    def demonstration(self, rng=None, teacher=None):
        if rng is not None:
            raise ValueError("there is only the expert")
        return super().demonstration()


class HasOnlyAnExpert(Right):
    def demonstration(self):
        return super().demonstration()


class ShowsNothing(Right):
    def demonstration(self, rng=None, teacher=None):
        raise NotImplementedError


class RefusesSome(Right):
    def demonstration(self, rng=None, teacher=None):
        if rng is not None and self.task.metadata["number"] % 2:
            raise ValueError("not here")
        return super().demonstration()


class ShowsSome(Right):
    def demonstration(self, rng=None, teacher=None):
        if self.task.metadata["number"] % 2 == 0:
            raise ValueError("not here")
        return super().demonstration()


class Closed(Right):
    def __init__(self, low=1):
        super().__init__()


for _one in [one for one in vars().copy().values() if isinstance(one, type) and issubclass(one, ToolEnv)]:
    if _one.__module__ == __name__:
        gym.register(f"Checked/{_one.__name__}-v0", entry_point=_one)
