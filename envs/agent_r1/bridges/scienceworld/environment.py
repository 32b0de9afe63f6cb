"""ScienceWorld: thirty tasks of an elementary science class, in a simulated house, in text."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from agent_r1.arguments import ArgumentError, some_of
from agent_r1.baselines import ONLY_EXPERTS
from agent_r1.bridges.bridge import World, check_version
from agent_r1.bridges.pool import Pool
from agent_r1.bridges.scienceworld.java_random import JAVA_OPTIONS, patched_random, seed_java, watched
from agent_r1.bridges.text_game import TextGameEnv
from agent_r1.tool_env import Task
from agent_r1_tools import ToolFault, ToolResult

TASKS: Mapping[str, int] = {
    "boil": 30, "melt": 30, "freeze": 30, "change-the-state-of-matter-of": 30,
    "use-thermometer": 540, "measure-melting-point-known-substance": 436,
    "measure-melting-point-unknown-substance": 300,
    "power-component": 20, "power-component-renewable-vs-nonrenewable-energy": 20, "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600,
    "find-living-thing": 300, "find-non-living-thing": 300, "find-plant": 300, "find-animal": 300,
    "grow-plant": 126, "grow-fruit": 126,
    "chemistry-mix": 32, "chemistry-mix-paint-secondary-color": 36, "chemistry-mix-paint-tertiary-color": 36,
    "lifespan-longest-lived": 125, "lifespan-shortest-lived": 125, "lifespan-longest-lived-then-shortest-lived": 125,
    "identify-life-stages-1": 14, "identify-life-stages-2": 10,
    "inclined-plane-determine-angle": 168, "inclined-plane-friction-named-surfaces": 1386,
    "inclined-plane-friction-unnamed-surfaces": 162,
    "mendelian-genetics-known-plant": 120, "mendelian-genetics-unknown-plant": 480,
}  # fmt: skip
"""The tasks in the order of ScienceWorld's numbers, with their numbers of variations."""
SIMPLIFICATIONS = (
    "easy", "teleportAction", "selfWateringFlowerPots", "openContainers", "openDoors", "noElectricalAction",
)  # fmt: skip
MOST_COMMAND = 150  # characters
MOST_IDLE = 8  # maximum number of idle simulators; each is a Java process of .2 to .5 GB
CALL_TIMEOUT = 120.0  # seconds; most calls take milliseconds
LONGEST = 900.0  # seconds for any request to Java, in calls, at reset, for a gold path; then it is killed
SEED = 8682522807148012  # seed of Java's random numbers in every episode
NEEDS_JAVA = (
    'ScienceWorld needs Java 17, beside pip install "agent-r1[scienceworld]": apt-get install openjdk-17-jre-headless, '
    "or another one whose java is on the PATH"
)
_ONE_AT_A_TIME = threading.Lock()  # for starts, which temporarily change the package's way to start Java


class ScienceWorldEnv(TextGameEnv):
    """Tasks of an elementary science class in a simulated house (ScienceWorld, arXiv 2203.07540).

    ## Description
    [ScienceWorld](https://arxiv.org/abs/2203.07540) (Apache-2.0) has thirty tasks, such as to boil water, to find out
    if a substance conducts, or to grow a fruit. A task has 10 to 1,386 variations. The agent walks through ten places.
    It opens, mixes, heats, connects and measures things, and focuses on the things that the task asks for. An
    `<answer>` gives up.

    The environment needs the extra `scienceworld` and Java (for example `apt-get install openjdk-17-jre-headless`). It
    was checked with scienceworld 1.2.3 and Java 17.

    ## Tools
    `act(command)` runs a command of ScienceWorld, such as `go to kitchen`, `move egg to red box` or `focus on
    thermometer`.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `"train"`, `"dev"` or `"test"` |
    | `tasks` | `None` | names of tasks, of `agent_r1.bridges.scienceworld.environment.TASKS`; `None`: all |
    | `simplifications` | `""` | `"easy"`, or some of ScienceWorld's simplifications, separated by commas |
    | `max_turns` | `200` | the maximum number of turns |
    | `max_action_tokens` | `512` | the maximum number of tokens in a turn |
    | `max_context_tokens` | `65_536` | the default with the byte tokenizer; else that of `ToolEnv` |

    The simplifications are `teleportAction`, `selfWateringFlowerPots`, `openContainers`, `openDoors` and
    `noElectricalAction`. The other arguments are those of `ToolEnv`.

    Rewards and baselines: docs/environments/scienceworld.md.
    """

    instructions = (
        "You do a task in a simulated house: give one command at a time with the tool act, and read what happens. "
        "Commands: look around, look at OBJ, look in OBJ, inventory, task, go to LOC, open OBJ, close OBJ, "
        "pick up OBJ, put down OBJ, move OBJ to OBJ, pour OBJ in OBJ, dunk OBJ in OBJ, mix OBJ, activate OBJ, "
        "deactivate OBJ, use OBJ on OBJ, connect OBJ to OBJ, disconnect OBJ, read OBJ, eat OBJ, flush OBJ, "
        "focus on OBJ (only on what the task asks for), wait, wait1. Where a command is ambiguous, answer with the "
        "number. Answer with <answer>I give up</answer> only to give up."
    )
    command = "such as: open door to kitchen"
    timeout = CALL_TIMEOUT
    splits: ClassVar[Mapping[str, str]] = {"train": "train", "dev": "dev", "test": "test", "validation": "dev"}

    def __init__(self, *, tasks: Sequence[str] | None = None, simplifications: str = "", **kwargs: Any) -> None:
        kwargs.setdefault("max_turns", 200)
        kwargs.setdefault("max_action_tokens", 512)
        if kwargs.get("tokenizer") is None:  # a token is a byte
            kwargs.setdefault("max_context_tokens", 65_536)
        self.names = some_of("tasks", tasks, TASKS)
        if not isinstance(simplifications, str):
            raise ArgumentError(f"simplifications must be a text, separated by commas, got {simplifications!r}")
        if unknown := [name for name in simplifications.split(",") if name and name not in SIMPLIFICATIONS]:
            raise ArgumentError(f"simplifications are {', '.join(SIMPLIFICATIONS)}, got {', '.join(unknown)}")
        self.simplifications = simplifications
        find_scienceworld()
        super().__init__(**kwargs)
        self._order = order(self.names, self.split)

    @property
    def num_tasks(self) -> int:
        """The number of variations of all tasks in the split."""
        return len(self._order)

    def make_task(self, index: int) -> Task:
        """Return task `index`: variation by variation, each task in turn."""
        name, variation = self._order[index]
        metadata = {"task": name, "variation": variation, "simplifications": self.simplifications}
        return Task(f"{name}-{variation}", first_view(name, variation, self.simplifications), [], metadata)

    def make_world(self, task: Task) -> World:
        """Make the house at its beginning."""
        house = House()
        house.begin(**task.metadata)
        return house

    def full_score(self) -> float:
        """Return the maximum score of ScienceWorld, 100."""
        return 100.0

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return ScienceWorld's gold path, one command a turn.

        Raises: ValueError with `rng`: there is only the expert.
        """
        if rng is not None:
            raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
        return self.act(*gold_path(**self.task.metadata))


def variations(name: str, split: str) -> range:
    """Return the variations of a split, as ScienceWorld splits them: half, a quarter, the rest."""
    quarter = TASKS[name] // 4
    ends = list(accumulate([0, 2 * quarter, quarter, TASKS[name] - 3 * quarter]))
    number = ("train", "dev", "test").index(split)
    return range(ends[number], ends[number + 1])


@lru_cache(maxsize=16)
def order(names: tuple[str, ...], split: str) -> tuple[tuple[str, int], ...]:
    """Return the tasks of a split: the first variation of each, then the second, and so on to the last."""
    ranks = [(rank, number, name) for number, name in enumerate(names) for rank in range(len(variations(name, split)))]
    return tuple((name, variations(name, split)[rank]) for rank, _, name in sorted(ranks))


# --------------------------------------------------------------------------------------------------------- the house


class House:
    """A running task in its own Java process."""

    def __init__(self) -> None:
        self.loan = SIMULATORS.lend()
        self.score = 0

    def begin(self, task: str, variation: int, simplifications: str, gold: bool = False) -> str:
        """Load a task, and return the first view."""
        with self._java() as simulator:
            simulator.seed()
            simulator.env.load(task, variation, simplifications, gold)
            view: str = simulator.env.server.step("look around")  # as its own reset does
            return view

    def act(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Run a command, and return its text. `data["reward"]` is the change of the score, from -100 to 100."""
        command = " ".join(arguments["command"].split())
        if len(command) > MOST_COMMAND or not re.fullmatch(r"[A-Za-z0-9 ,.'()/_-]+", command):
            return ToolResult(f"A command is one line of at most {MOST_COMMAND} letters and digits.", ok=False)
        with self._java() as simulator:  # as its own step does, which also lists thousands of possible commands
            text = str(simulator.env.server.step(command))
            score = int(round(100 * simulator.env.server.getScore()))
            done = bool(simulator.env.server.getCompleted()) or score < 0
        reward, self.score = score - self.score, score
        return ToolResult(text.strip(), data={"reward": float(reward)}, done=done)

    def gold(self) -> tuple[str, ...]:
        """Return the commands that `begin(gold=True)` has found."""
        with self._java() as simulator:
            return tuple(simulator.env.get_gold_action_sequence())

    def description(self) -> str:
        """Return the task description."""
        with self._java() as simulator:
            return str(simulator.env.get_task_description())

    def close(self) -> None:
        self.loan.close()

    @contextlib.contextmanager
    def _java(self) -> Iterator[Simulator]:
        from py4j.protocol import Py4JError, Py4JJavaError

        with self.loan.at_work(Py4JError, OSError) as simulator:
            timer = threading.Timer(LONGEST, simulator.env._gateway.java_process.kill)
            timer.daemon = True
            timer.start()
            try:
                yield simulator
            except Py4JJavaError:  # the house couldn't do what was asked
                raise ValueError("the simulator can't do that") from None
            finally:
                timer.cancel()


class Simulator:
    """A Java process with ScienceWorld and seeded random numbers."""

    def __init__(self) -> None:
        package = find_scienceworld()
        from py4j.protocol import Py4JError

        self.env: Any = None
        try:
            with _ONE_AT_A_TIME, watched(CALL_TIMEOUT):
                patch = ["--patch-module", f"java.base={patched_random()}"]
                plain = package.launch_gateway
                package.launch_gateway = partial(plain, javaopts=[*JAVA_OPTIONS, *patch])
                try:
                    self.env = package.ScienceWorldEnv("", envStepLimit=2**30)
                finally:
                    package.launch_gateway = plain
                self.seed = seed_java(self.env._gateway, SEED)
        except BaseException as error:
            if self.env is not None:
                self.end()
            if isinstance(error, ValueError | OSError | Py4JError):  # ValueError: py4j reads a port from what Java says
                raise ToolFault(f"Java didn't start: {error!r:.300}") from error
            raise

    def alive(self) -> bool:
        """Return True if the process runs."""
        return self.env._gateway.java_process.poll() is None

    def end(self) -> None:
        """Kill the process in any state."""
        process = self.env._gateway.java_process
        process.kill()
        process.wait()
        with contextlib.suppress(Exception):  # what talks to it notices
            self.env.close()
        process.stdin.close()
        self.env._obj_tree_tempdir.cleanup()


SIMULATORS = Pool(Simulator, MOST_IDLE)


# ------------------------------------------------------------------------------------------------------- ScienceWorld


@lru_cache(maxsize=1024)  # the episodes of a group have the same task
def first_view(task: str, variation: int, simplifications: str) -> str:
    """Return the task description and the first view."""
    house = House()
    seen = house.begin(task, variation, simplifications)
    description = house.description()
    house.close()
    return f"{description.strip()}\n\n{seen.strip()}"


@lru_cache(maxsize=1024)
def gold_path(task: str, variation: int, simplifications: str) -> tuple[str, ...]:
    """Return the commands that ScienceWorld itself finds, up to the end of the task.

    This takes seconds, for the genetics of plants half a minute or more.
    """
    house = House()
    house.begin(task, variation, simplifications, gold=True)
    commands = house.gold()
    house.begin(task, variation, simplifications)
    steps = enumerate(commands, 1)
    needed = next((n for n, command in steps if house.act("act", {"command": command}).done), len(commands))
    house.close()
    return commands[:needed]


@cache
def find_scienceworld() -> Any:
    """Import ScienceWorld. Raises ImportError without package or Java, or for a Java that rejects its options.

    Warns about a version that was not checked.
    """
    try:
        import scienceworld.scienceworld as package
    except ImportError as error:
        raise ImportError('ScienceWorld needs scienceworld: pip install "agent-r1[scienceworld]"') from error
    java = shutil.which("java")
    if java is None:
        raise ImportError(NEEDS_JAVA)
    try:
        options = [*JAVA_OPTIONS, "--patch-module", f"java.base={os.devnull}", "-version"]
        subprocess.run([java, *options], check=True, capture_output=True, timeout=CALL_TIMEOUT)
    except subprocess.TimeoutExpired:
        pass  # on a busy machine; starting it reports the error
    except (OSError, subprocess.CalledProcessError) as error:
        printed = (getattr(error, "stderr", None) or b"") + (getattr(error, "stdout", None) or b"")
        output = printed.decode(errors="replace").strip()
        raise ImportError(f"{NEEDS_JAVA}; {java} does not accept its options: {output[-200:] or error}") from error
    check_version("scienceworld", "1.2")
    return package
