"""reasoning-gym: a hundred data sets of generated problems, each with its own scoring rule."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import IO, Any, ClassVar

import numpy as np

from agent_r1.arguments import ArgumentError, integer
from agent_r1.baselines import ONLY_EXPERTS, Baselines
from agent_r1.bridges.bridge import check_version
from agent_r1.bridges.reasoning_gym import server as program
from agent_r1.dialects import Call
from agent_r1.tool_env import End, Task, ToolEnv
from agent_r1_tools import Tool, ToolResult
from agent_r1_tools.child_process import ChildProcess

MAX_CHARS = 50_000  # maximum length of an answer
SPLITS = {"train": 1_000_000, "test": 10_000}  # tasks; the items of test follow those of train
LEFT_OUT = {
    "boxnet": "no answer is known",
    "rush_hour": "no answer is known",
    "game_of_life_halting": "every answer scores 1",
    "coin_flip": "the answer 0 scores 1",
    "codeio": "it runs code that a language model wrote",
}
"""Sets that "all" excludes, with the reason; they are available by name."""


class ReasoningGymEnv(Baselines, ToolEnv):
    """Generated problems of reasoning-gym: algebra, algorithms, games, graphs, logic, and more.

    ## Description
    [reasoning-gym](https://github.com/open-thought/reasoning-gym) (Apache-2.0, [arXiv
    2505.24760](https://arxiv.org/abs/2505.24760)) has 105 data sets of generated problems, from algebra to games. Each
    data set has its own scoring rule. By default a task is one turn with an `<answer>`. A turn without an answer costs
    nothing; with `max_turns=1` it ends the episode.

    The environment needs the extra `reasoning_gym`. It was checked with reasoning-gym 0.1.25.

    ## Tools
    With `attempts` above 1 there is one tool. `submit(answer)` returns the score of an answer and the number of
    attempts that are left. A right answer or the last attempt ends the episode. With one attempt there is no tool.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `"train"` or `"test"` |
    | `dataset` | `"all"` | a name; names, whose items come in turn; a dict from names to configs; or `"all"` |
    | `config` | `None` | settings of the data set, such as `{"min_terms": 3}`; not with several data sets |
    | `level` | `None` | a level of the data set's curriculum, from 0; `None`: its own defaults |
    | `attempts` | `1` | the number of attempts |
    | `max_turns` | `6` | the maximum number of turns; twice the attempts if this is more |
    | `max_action_tokens` | `16_384` | the maximum number of tokens in a turn |

    A wrong setting raises ArgumentError, which lists the settings. A level above the last one is the last one. `config`
    overrides the level. The other arguments are those of `ToolEnv`.

    Rewards and baselines: docs/environments/reasoning_gym.md.
    """

    instructions = (  # the package's own default
        "Given a problem, your task is to answer the question by thinking step-by-step in a clear and specific "
        "manner.\nOnce you have thought about the reasoning process, provide the answer in the following format:\n"
        "<answer>answer here</answer>\nDo not explain your reasoning inside the answer tags, provide only the final "
        "answer. When an example is provided, you should strictly follow the format of the output/answer in that "
        "example.\n"
    )
    slow_judge: bool = True
    splits: ClassVar[Mapping[str, str]] = {"train": "train", "test": "test"}
    floor = 0.05  # some ask for True or False, or for one of a few

    def __init__(
        self,
        *,
        dataset: str | Sequence[str] | Mapping[str, Mapping[str, Any]] = "all",
        config: Mapping[str, Any] | None = None,
        level: int | None = None,
        attempts: int = 1,
        **kwargs: Any,
    ) -> None:
        integer("attempts", attempts, least=1)
        if level is not None:
            level = integer("level", level, least=0)
        self.sets, self.level, self.attempts = choose(dataset, config, level), level, attempts
        kwargs.setdefault("max_turns", max(6, 2 * attempts))
        kwargs.setdefault("max_action_tokens", 16_384)  # some answers are long
        submit = Tool.from_function(
            self.submit,
            timeout=600.0,
            concurrency_safe=False,
            timeout_is_fault=True,
            max_result_chars=200,
            repeatable=True,  # the score is noted last
        )
        super().__init__([submit] if attempts > 1 else [], **kwargs)

    @property
    def num_tasks(self) -> int:
        """The number of items of the split."""
        return SPLITS[self.split]

    def make_task(self, index: int) -> Task:
        """Return task `index`: of n sets, seed s has item `s // n` of set `s % n`; `test` follows `train`."""
        seed = index + (SPLITS["train"] if self.split == "test" else 0)
        name, config = self.sets[seed % len(self.sets)]
        return make_item(name, config, self.level, seed // len(self.sets), seed)

    def submit(self, answer: str) -> ToolResult:
        """Submit an answer and read what it scores, from 0 to 1.

        Args:
            answer: the final answer only.
        """
        tried = self.memory.get("tried", 0) + 1
        if tried > self.attempts or self.memory.get("score") == 1:
            return ToolResult("This is over.", ok=False)
        score = self._score(answer)
        self.memory.update(tried=tried, score=score)
        left = self.attempts - tried
        said = f"That scores {score:.2f}. " + (f"Attempts left: {left}." if left and score < 1 else "This is the end.")
        return ToolResult(said, data=score, done=not left or score == 1)

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float] | End:
        """End the episode after a right answer, or the last one."""
        return End(result.data, metrics={"score": result.data}) if result.done else {}

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Return the data set's score; without an answer the score of the last submission."""
        score = self._score(answer) if answer else self.memory.get("score", 0.0)
        return score, {"score": score}

    def judge_end(self, score: float, *, answer: str, answer_ok: bool, calls_ok: bool) -> float:
        """Pay the score of one answer."""
        return score if answer_ok else 0.0

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return the item's own answer.

        Raises ValueError for an item without an answer, and with `rng`: there is only the expert.
        """
        if rng is not None:
            raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
        if not self.task.answers:
            raise ValueError(f"reasoning-gym knows no answer to {self.task.id}")
        answer = self.task.answers[0]
        return [self.dialect.tool_call("submit", {"answer": answer}) if self.tools else f"<answer>{answer}</answer>"]

    def _score(self, answer: str) -> float:
        if len(answer) > MAX_CHARS:
            return 0.0
        about = self.task.metadata
        asked = {key: about[key] for key in ("name", "config", "level", "index")}
        return float(server.ask(**asked, answer=answer)["score"])


def choose(dataset: Any, config: Mapping[str, Any] | None, level: int | None) -> tuple[tuple[str, str], ...]:
    """Return the chosen sets, each with its settings as JSON. Raises ArgumentError for an unknown set."""
    available = names()
    if dataset == "all":
        some = available["names" if level is None else "levels"]
        dataset = [name for name in some if name not in LEFT_OUT]
    elif isinstance(dataset, str):
        dataset = {dataset: config or {}}
        config = None
    if config is not None:
        raise ArgumentError("config is for one data set; give each of several its own: dataset={name: config, ...}")
    if not isinstance(dataset, Mapping | Sequence) or not all(isinstance(name, str) for name in dataset):
        raise ArgumentError(f"dataset must be a name, a list of names or a dict with their settings, got {dataset!r}")
    if not isinstance(dataset, Mapping):
        dataset = dict.fromkeys(dataset, {})
    if not dataset or not all(dataset):
        raise ArgumentError("dataset names no data set")
    try:
        chosen = tuple((name, json.dumps(dict(settings), sort_keys=True)) for name, settings in dataset.items())
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"settings of a data set must be a dict of JSON values: {error}") from error
    if level is not None or len(chosen) < len(available["names"]) - len(LEFT_OUT):
        for name, settings in chosen:
            check_set(name, settings, level)
    return chosen


@cache
def names() -> dict[str, list[str]]:
    """Return the data sets: "names" are all, "levels" those with levels. Raises ImportError without reasoning-gym."""
    needed = 'ReasoningGym needs reasoning-gym: pip install "agent-r1[reasoning_gym]"'
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ImportError(needed)
    check_version("reasoning-gym", "0.1")
    try:
        sets: dict[str, list[str]] = server.ask()
    except ValueError as error:
        raise ImportError(f"{needed}; it says: {error}") from error
    return sets


@lru_cache(maxsize=1024)
def check_set(name: str, config: str, level: int | None) -> None:
    """Raise ArgumentError for a data set that cannot be made."""
    try:
        server.ask(name=name, config=json.loads(config), level=level)
    except ValueError as error:
        raise ArgumentError(str(error)) from None


@lru_cache(maxsize=1024)  # the episodes of a group have the same task
def make_item(name: str, config: str, level: int | None, index: int, seed: int) -> Task:
    """Return an item of a data set. The result is cached: do not change it."""
    about = {"name": name, "config": json.loads(config), "level": level, "index": index}
    item = server.ask(**about)
    answers = [item["gold"]] if item["gold"] is not None else []
    return Task(f"{name}-{index}", item["question"], answers, about | {"seed": seed})


class _Server(ChildProcess):
    """The process in which the package runs."""

    def command(self) -> list[str]:
        # -P: modules of this folder must not be on the path.
        return [sys.executable, "-P", program.__file__]

    def ask(self, **request: Any) -> dict[str, Any]:
        """Return a reply. Raises ConnectionError if the process fails or is killed, ValueError for a bad request."""
        line = json.dumps(request).encode() + b"\n"
        for _ in range(2):  # a process that was killed from outside is started again
            try:
                reply: dict[str, Any] = json.loads(self.exchange(line, _read))
            except OSError:
                continue
            if "fault" in reply:
                raise ConnectionError(reply["fault"])
            if "error" in reply:
                raise ValueError(reply["error"])
            return reply
        raise ConnectionError("the process of reasoning-gym does not run")


def _read(pipe: IO[bytes]) -> bytes:
    data = b""
    for count in (8, 0):
        count = count or int.from_bytes(data[:8], "big") + 8
        while len(data) < count:
            more = pipe.read(count - len(data))
            if not more:
                raise EOFError
            data += more
    return data[8:]


server = _Server()
