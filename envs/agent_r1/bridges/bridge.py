"""The shared part of bridges: a simulator for each episode, and snapshots that repeat the calls made so far."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from importlib import metadata
from typing import Any, ClassVar, Protocol

from agent_r1.arguments import ArgumentError, duration
from agent_r1.baselines import Baselines
from agent_r1.tool_env import Task, ToolEnv
from agent_r1_tools import Tool, ToolFault, ToolResult
from agent_r1_tools.running import is_strict
from agent_r1_tools.tool import is_fault

MOST_BREAKS = 5  # maximum number of times that the policy may break the simulator of an episode


_one_at_a_time = threading.Lock()  # never held while a simulator is made


class World(Protocol):
    """A simulator that runs one episode."""

    def act(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Make a call in bounded time. Raise ToolFault, or an OSError that `is_fault`, if the simulator is lost.

        An error of the policy is a result with `ok=False`. `done=True` means that the simulator has ended.
        """

    def close(self) -> None:
        """Release its resources: processes, files, pages."""


class BridgeEnv(Baselines, ToolEnv):
    """An episode in somebody else's simulator.

    A subclass says how one is made (`make_world`) and which calls it takes (`schemas` of the constructor). A simulator
    can rarely be copied. So `memory["log"]` keeps all calls with what came of them, and where a snapshot continues they
    are made again, in a new simulator; the same must come of them, or it is a fault. One that is lost in the middle of
    an episode is replaced in the same way; one that raises, too, at most `MOST_BREAKS` times.

    Args:
        schemas: name, description and parameters (a JSON schema) of each call.
    """

    timeout: float = math.inf
    """Seconds of a call that blocks, more than `World.act` ever takes; infinite for plain Python that is quick."""

    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = {
        **ToolEnv.PROCESS_WEIGHTS,
        "repeated_call": 0.0,  # a step forward may be right twice
    }
    splits: ClassVar[Mapping[str, str]] = {"train": "train", "test": "test"}

    def __init__(self, schemas: Iterable[Mapping[str, Any]] = (), /, **kwargs: Any) -> None:
        self._world: World | None = None
        super().__init__([self.make_tool(schema) for schema in schemas], **kwargs)

    def make_world(self, task: Task) -> World:
        """Make a simulator at the beginning of a task."""
        raise NotImplementedError(f"{type(self).__name__} must define make_world(task), which returns a simulator")

    @property
    def world(self) -> World:
        """The episode's simulator, made again if it was lost.

        Raises ToolFault if it cannot be made; with `strict` the original exception.
        """
        if self._world is not None:
            return self._world
        try:
            return self._make()
        except Exception as error:  # it worked before, so the policy is not the cause
            if is_fault(error) or is_strict(self.strict):
                raise
            raise ToolFault(f"the simulator cannot be made again: {error!r:.300}") from error

    def _make(self) -> World:
        memory = self.memory  # of this episode: a call that runs past its time may end in the next one
        with no_exit():
            world = self.make_world(self.task)
        try:
            for name, arguments, seen in memory.get("log", ()):
                if digest(self._call(world, name, arguments)) != seen:
                    raise ToolFault(f"the simulator answered differently when {name} was called again for a snapshot")
            with _one_at_a_time:
                if self.memory is not memory:
                    raise ToolFault("the episode was over before its simulator was made again")
                self._world = world
        except BaseException as error:
            close(world, error)
            raise
        return world

    def drop_world(self) -> None:
        """Close the simulator. The next call makes another one."""
        world, self._world = self._world, None
        if world is not None:
            world.close()

    def make_tool(self, schema: Mapping[str, Any]) -> Tool:
        """Make a tool from a call of the simulator."""
        return Tool.from_function(
            partial(self._act, schema["name"]),
            name=schema["name"],
            description=schema.get("description", ""),
            parameters=schema.get("parameters") or {"type": "object", "properties": {}},
            timeout=self.timeout,
            timeout_is_fault=True,
            concurrency_safe=False,
            repeatable=True,  # in a new simulator
        )

    def _act(self, tool_name: str, /, **arguments: Any) -> ToolResult:
        memory = self.memory  # of this episode: a call that runs past its time may end in the next one
        if memory.get("over"):  # calls of a turn are all made, and those after the end don't count
            return ToolResult("This is over.", ok=False)
        if memory.get("broken", 0) >= MOST_BREAKS:  # after each break all earlier calls are made again
            return ToolResult("The simulator broke too often; nothing more can be done.", ok=False)
        world = self.world
        try:
            result = self._call(world, tool_name, arguments)
        except Exception as error:
            if not is_fault(error):  # faults are retried elsewhere
                memory["broken"] = memory.get("broken", 0) + 1
            raise
        memory.setdefault("log", []).append([tool_name, arguments, digest(result)])
        memory["over"] = result.done
        return result

    def _call(self, world: World, name: str, arguments: dict[str, Any]) -> ToolResult:
        try:
            with no_exit():
                result = world.act(name, copy.deepcopy(arguments))
            if not isinstance(result, ToolResult):
                raise ToolFault(f"{type(world).__name__}.act returned {result!r:.100}; it must return a ToolResult")
            return result
        except BaseException as error:
            if self._world is world:  # its state is unknown
                self._world = None
                close(world, error)
            raise

    def start_episode(self, task: Task) -> None:
        """Make a new simulator; if a snapshot continues, repeat all of its calls."""
        try:
            self.drop_world()
        except (Exception, SystemExit) as error:  # not caused by this episode
            warnings.warn(f"the last episode's simulator didn't close: {error!r:.300}", RuntimeWarning, stacklevel=2)
        if self.memory.keys() & {"log", "broken"}:
            self.world  # noqa: B018  (made now, too)
        else:
            self._make()  # raises the original error

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_world": None}  # the copy makes the calls again

    def close(self) -> None:
        """End the simulator."""
        super().close()
        self.drop_world()


class FinalRewardEnv(BridgeEnv):
    """A simulator that pays once, at its end: `judge_result` puts that into `memory["reward"]`. An answer gives up."""

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Score an answer, which gives up, with 0."""
        return 0.0, {"reward": self.final_reward()}

    def judge_end(self, score: float, *, answer: str, answer_ok: bool, calls_ok: bool) -> float:
        """Pay the simulator's reward."""
        return self.final_reward()

    def final_reward(self) -> float:
        """Return the simulator's reward; 0 before its end."""
        return float(self.memory.get("reward", 0.0))


def call_schema(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call whose arguments are all required; `properties` are their JSON schemas."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": description, "parameters": parameters | {"additionalProperties": False}}


@contextlib.contextmanager
def no_exit() -> Iterator[None]:
    """Raise RuntimeError instead of SystemExit, so that a simulator cannot end the training process."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError("the simulator wanted to end the process") from error


def close(world: World, error: BaseException) -> None:
    """Close a simulator after an error, and keep the error as the one that is reported."""
    try:
        world.close()
    except (Exception, SystemExit) as closing:
        error.add_note(f"closing the simulator failed, too: {closing!r:.200}")


def digest(result: ToolResult) -> str:
    """Return a digest of a call's result: its text, and the data for rewards."""
    text = json.dumps([result.content, result.ok, result.done, result.data], sort_keys=True, default=lambda value: "")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def call_seconds(timeout: Any) -> float:
    """Return `timeout` as a float. Raises ArgumentError if it is not above 0."""
    if (seconds := duration("timeout", timeout)) == 0:
        raise ArgumentError("timeout must be above 0 seconds, got 0")
    return seconds


@cache
def check_version(package: str, *series: str) -> None:
    """Warn, once, about an installed package whose series (such as "3.2") was not checked."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = "of an unknown version"
    if not any(version == name or version.startswith(f"{name}.") for name in series):
        warnings.warn(f"{package} {version} wasn't checked; {', '.join(series)} was", stacklevel=3)
