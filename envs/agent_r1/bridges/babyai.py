"""BabyAI through minigrid: missions in a grid of rooms, described in words."""

from __future__ import annotations

import contextlib
import io
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from itertools import groupby
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from agent_r1.arguments import ArgumentError
from agent_r1.baselines import ONLY_EXPERTS
from agent_r1.bridges.bridge import FinalRewardEnv, World, call_schema, check_version
from agent_r1.dialects import Call
from agent_r1.tasks.draw import pick
from agent_r1.tool_env import End, Task
from agent_r1_tools import ToolResult

LEFT, RIGHT, FORWARD, PICK_UP, DROP, TOGGLE = range(6)
CHECKED = "3.2"
MOST_STEPS = 20
MOST_SEARCHES = 200  # maximum number of the bot's searches for one action
SPLITS = {"train": 1_000_000, "test": 10_000}  # tasks; the seeds of test follow those of train
LEVELS = (
    "GoToRedBallGrey", "GoToRedBall", "GoToRedBallNoDists", "GoToObjS6", "GoToLocalS8N7", "GoToObjMazeS7",
    "GoToImpUnlock", "GoToSeqS5R2", "GoToRedBlueBall", "GoToDoor", "GoToObjDoor", "Open", "OpenRedDoor", "OpenDoor",
    "OpenDoorColor", "OpenDoorLoc", "OpenTwoDoors", "OpenRedBlueDoors", "OpenDoorsOrderN4", "Pickup", "UnblockPickup",
    "PickupLoc",
    "PickupDist", "PickupAbove", "PutNextLocalS6N4", "PutNextS7N4", "Unlock", "UnlockLocal", "KeyInBox", "UnlockPickup",
    "UnlockPickupDist", "BlockedUnlockPickup", "UnlockToUnlock", "ActionObjDoor", "FindObjS7", "KeyCorridorS6R3",
    "OneRoomS20", "MoveTwoAcrossS8N9", "SynthS5R2", "MiniBossLevel",
)  # fmt: skip
"""Forty levels, the largest of each kind except the mazes; `level` also takes any other level of BabyAI."""


TOOLS = [
    call_schema("turn", "Turn where you stand.", direction={"type": "string", "enum": ["left", "right"]}),
    call_schema("forward", "Walk ahead.", steps={"type": "integer", "minimum": 1, "maximum": MOST_STEPS}),
    call_schema(
        "go_to",
        "Walk up to a thing that you see, so that it is right ahead.",
        thing={"type": "string", "description": "its name as you read it, such as: red ball, or: red ball 2"},
    ),
    call_schema("pick_up", "Pick up the thing right ahead."),
    call_schema("drop", "Put what you carry on the free place right ahead."),
    call_schema("toggle", "Open or close the door right ahead (a locked one with its key), or open the box."),
]


class BabyAIEnv(FinalRewardEnv):
    """BabyAI missions in a grid of rooms that the policy sees as text.

    ## Description
    [BabyAI](https://arxiv.org/abs/1810.08272) has missions such as "put the red ball next to the green key". It runs
    through [minigrid](https://minigrid.farama.org) (Apache-2.0), checked with minigrid 3.2. The environment needs the
    extra `babyai`.

    The agent sees minigrid's view of 7 by 7 cells, described in words. The text lists each thing with its distance in
    steps, ahead and to the side. It also names the wall ahead and the thing that the agent carries. The view ends at
    walls and closed doors. The nearest thing comes first, and the second thing of one name is "red ball 2".

    The episode ends when the mission is done. An `<answer>` gives up.

    ## Tools

    | tool | action |
    |---|---|
    | `turn(direction)` | turns left or right |
    | `forward(steps)` | walks 1 to 20 steps; stops if something is in the way |
    | `go_to(thing)` | walks up to a visible thing, by its name, until it is right ahead |
    | `pick_up()` | picks up the thing right ahead |
    | `drop()` | puts the carried thing on the free cell right ahead |
    | `toggle()` | opens or closes the door right ahead, or opens the box |

    A locked door needs its key in hand. `go_to` takes the shortest way over free cells and open doors in view.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `"train"` or `"test"` |
    | `level` | `"GoToLocal"` | a level of BabyAI, or several: `"GoToLocal,PickupLoc"` |
    | `max_turns` | `128` | the maximum number of turns |
    | `max_action_tokens` | `512` | the maximum number of tokens in a turn |

    A level is the name of one of minigrid's 96 BabyAI ids, without "BabyAI-" and the version. Several levels take
    turns: task i has the level with number i modulo their count. The other arguments are those of `ToolEnv`.

    Rewards and baselines: docs/environments/babyai.md.
    """

    instructions = (
        "You are in a world of rooms and carry out the mission. Distances are in steps. After each call you read what "
        "you see then. Answer with <answer>I give up</answer> only to give up."
    )
    floor = 0.12  # calls at random, in the easiest levels
    floors: ClassVar[Mapping[str, float]] = {"try_all": 1.0}  # it needs no mission in most levels; rewards tell

    def __init__(self, *, level: str = "GoToLocal", **kwargs: Any) -> None:
        kwargs.setdefault("max_turns", 128)
        kwargs.setdefault("max_action_tokens", 512)
        names = level.split(",") if isinstance(level, str) else [repr(level)]
        self.level, self._env_ids = level, [find_level(name.strip()) for name in names]
        super().__init__(TOOLS, **kwargs)

    @property
    def num_tasks(self) -> int:
        """The number of seeds of the split."""
        return SPLITS[self.split]

    def make_task(self, index: int) -> Task:
        """Return a level with seed `index`; the seeds of `test` follow those of `train`."""
        seed = index + (SPLITS["train"] if self.split == "test" else 0)
        return first_view(self._env_ids[index % len(self._env_ids)], seed)

    def make_world(self, task: Task) -> World:
        """Make the level at its beginning."""
        return Rooms(task.metadata["env_id"], task.metadata["seed"])

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float] | End:
        """End the episode if the mission is done, or no action is left."""
        if not result.done:
            return {}
        self.memory["reward"] = result.data["reward"]
        cut = "game" if result.data["truncated"] else None
        return End(float(result.data["reward"] > 0), metrics={"reward": self.final_reward()}, truncation_reason=cut)

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return the turns of BabyAI's own bot, one call a turn; consecutive steps ahead are one call.

        Raises: ValueError if it finds no way, and with `rng`: there is only the expert.
        """
        if rng is not None:
            raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
        names = {PICK_UP: "pick_up", DROP: "drop", TOGGLE: "toggle"}
        turns = []
        for action, group in groupby(plan(self.task.metadata["env_id"], self.task.metadata["seed"])):
            count = len(list(group))
            if action == FORWARD:
                steps = [MOST_STEPS] * (count // MOST_STEPS) + [count % MOST_STEPS] * (count % MOST_STEPS > 0)
                turns += [self.dialect.tool_call("forward", {"steps": some}) for some in steps]
            elif action in names:
                turns += [self.dialect.tool_call(names[action], {})] * count
            else:
                turns += [self.dialect.tool_call("turn", {"direction": "right" if action else "left"})] * count
        return turns

    def shortcut_try_all(self, rng: np.random.Generator) -> Iterator[str]:
        """Go to every visible object and try every action with it, without reading the mission.

        After a visit it looks elsewhere.
        """
        call, visited = self.dialect.tool_call, set[str]()
        while True:
            world: Any = self.world
            names = [name for name, _, _ in seen(world.env) if name not in visited]
            if names:
                visited.add(names[0])
                yield call("go_to", {"thing": names[0]})
                yield call("toggle", {})
                yield call("pick_up", {})
            else:
                visited.clear()
                yield call("drop", {})
                yield call("turn", {"direction": pick(rng, ["left", "right"])})
                yield call("forward", {"steps": int(rng.integers(1, 7))})

    @staticmethod
    def vocabulary() -> list[str]:
        """Return every word of missions and views, which a small tokenizer should keep whole."""
        views = "You see nothing of note wall ahead left right door open closed locked carry right here steps"
        missions = "go to the a pick up put next open your on in front of behind you then and after first room"
        things = "red green blue purple yellow grey ball box key"
        return list(dict.fromkeys(f"{views} {missions} {things}".split())) + list("0123456789")


# ---------------------------------------------------------------------------------------------------------- the world


_printing = threading.Lock()  # standard output belongs to the whole process


class Rooms:
    """A running level. One call may be several of minigrid's actions."""

    def __init__(self, env_id: str, seed: int) -> None:
        self.env: Any = gym.make(env_id, disable_env_checker=True).unwrapped
        with _printing, contextlib.redirect_stdout(io.StringIO()):  # it prints its rejected samples
            self.env.reset(seed=seed)
        self.reward, self.over, self.truncated = 0.0, False, False

    def act(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        what, ok = "", True
        if name == "go_to":
            path = way_to(self.env, arguments["thing"])
            what, ok = ("", True) if path is not None else (f"You see no way to {arguments['thing'][:40]!r}. ", False)
            self._do(path or [])
        elif name == "forward":
            steps = int(arguments["steps"])  # 3.0 is an integer, too
            walked = self._do([FORWARD] * steps)
            blocked = not self.over and walked < steps
            what = f"Something is in the way after {walked} steps. " if blocked else ""
        else:
            turn = LEFT if arguments.get("direction") == "left" else RIGHT
            action = {"turn": turn, "pick_up": PICK_UP, "drop": DROP, "toggle": TOGGLE}[name]
            before = state(self.env)
            self._do([action])
            if not self.over and state(self.env) == before:
                what = "Nothing happens. "
        if self.over:
            what = "The mission is fulfilled." if self.reward > 0 else "The mission failed, or no action is left."
            return ToolResult(what, data={"reward": self.reward, "truncated": self.truncated}, done=True)
        return ToolResult(what + view(self.env), ok=ok)

    def _do(self, actions: list[int]) -> int:
        """Do the actions until the end, or until a step ahead is blocked. Return the number of actions done."""
        for count, action in enumerate(actions):
            place = tuple(self.env.agent_pos)
            _, reward, terminated, truncated, _ = self.env.step(action)
            self.reward, self.over = float(reward), bool(terminated or truncated)
            self.truncated = bool(truncated and not terminated)
            if self.over:
                return count + 1
            if action == FORWARD and tuple(self.env.agent_pos) == place:
                return count
        return len(actions)

    def close(self) -> None:
        self.env.close()


def state(env: Any) -> tuple[Any, ...]:
    """Return the state that an action may change."""
    return tuple(env.agent_pos), env.agent_dir, env.carrying, env.grid.encode().tobytes()


def seen(env: Any) -> list[tuple[str, int, int]]:
    """Return the visible things with their distances ahead and to the right, the nearest first.

    The second of two equal things has a number.
    """
    grid, visible = env.gen_obs_grid()
    width, height = grid.width, grid.height
    things = []
    for column in range(width):
        for row in range(height):
            thing = grid.get(column, row)
            ahead, right = height - 1 - row, column - width // 2
            own = (ahead, right) == (0, 0)  # there lies what is carried
            if thing is not None and visible[column, row] and thing.type not in ("wall", "floor") and not own:
                things.append((name_of(thing), ahead, right))
    things.sort(key=lambda seen_thing: (seen_thing[1] + abs(seen_thing[2]), seen_thing))
    counts: dict[str, int] = {}
    named = []
    for name, ahead, right in things:
        counts[name] = counts.get(name, 0) + 1
        named.append((name if counts[name] == 1 else f"{name} {counts[name]}", ahead, right))
    return named


def name_of(thing: Any) -> str:
    """Return the name of a thing, such as "red ball" or "green door"."""
    return f"{thing.color} {thing.type}"


def view(env: Any) -> str:
    """Describe in words what the agent sees and carries."""
    grid, _ = env.gen_obs_grid()
    lines = []
    for name, ahead, right in seen(env):
        side = f"{abs(right)} {'right' if right > 0 else 'left'}" if right else ""
        place = ", ".join(part for part in (f"{ahead} ahead" if ahead else "", side) if part)
        thing = grid.get(right + grid.width // 2, grid.height - 1 - ahead)
        if thing.type == "door":
            place += ", locked" if thing.is_locked else ", open" if thing.is_open else ", closed"
        lines.append(f"{name}: {place}")
    before = [grid.get(grid.width // 2, grid.height - 1 - steps) for steps in range(grid.height)]
    walls = [steps for steps, cell in enumerate(before) if cell is not None and cell.type == "wall"]
    lines += [f"wall: {steps} ahead" for steps in walls[:1]]
    lines += [f"You carry a {name_of(env.carrying)}."] if env.carrying else []
    return "\n".join(lines) or "You see nothing of note."


def way_to(env: Any, thing: str) -> list[int] | None:
    """Return the shortest actions after which a visible thing is right ahead; None if no way is visible.

    Ways lead over visible free cells and open doors.
    """
    wanted = " ".join(thing.lower().split())
    goal = next(((ahead, right) for name, ahead, right in seen(env) if name == wanted), None)
    if goal is None:
        return None
    grid, visible = env.gen_obs_grid()

    def free(ahead: int, right: int) -> bool:
        column, row = right + grid.width // 2, grid.height - 1 - ahead
        if not (0 <= column < grid.width and 0 <= row < grid.height and visible[column, row]):
            return False
        cell = grid.get(column, row)
        return (ahead, right) == (0, 0) or cell is None or cell.can_overlap()

    start = (0, 0, 0)  # ahead, right, quarter turns to the right
    came: dict[tuple[int, int, int], tuple[tuple[int, int, int], int] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        at = waiting.popleft()
        ahead, right, turned = at
        step = ((1, 0), (0, 1), (-1, 0), (0, -1))[turned]
        front = ahead + step[0], right + step[1]
        if front == goal:
            return list(_back(came, at))[::-1]
        for action, then in (
            (FORWARD, (*front, turned)),
            (LEFT, (ahead, right, (turned - 1) % 4)),
            (RIGHT, (ahead, right, (turned + 1) % 4)),
        ):
            if then not in came and (action != FORWARD or free(*front)):
                came[then] = at, action
                waiting.append(then)
    return None


def _back(came: Mapping[Any, Any], at: Any) -> Iterator[int]:
    while came[at] is not None:
        at, action = came[at]
        yield action


# ---------------------------------------------------------------------------------------------------------- minigrid


@cache
def find_level(level: str) -> str:
    """Return the id of a level. Raises ImportError without minigrid, ArgumentError for an unknown level."""
    try:
        import minigrid  # noqa: F401  (registers its ids)
    except ImportError as error:
        raise ImportError('BabyAI needs minigrid: pip install "agent-r1[babyai]"') from error
    check_version("minigrid", CHECKED)
    ids = [name for name in gym.registry if name.startswith("BabyAI-")]
    levels = {name.removeprefix("BabyAI-").rpartition("-v")[0]: name for name in ids}
    if level not in levels:
        raise ArgumentError(f"BabyAI has no level {level!r}; it has {', '.join(sorted(levels))}")
    return levels[level]


@lru_cache(maxsize=1024)  # the episodes of a group have the same task
def first_view(env_id: str, seed: int) -> Task:
    """Return a level with a seed: its mission and the first view. The result is cached: do not change it."""
    world = Rooms(env_id, seed)
    env, level = world.env, env_id.removeprefix("BabyAI-").rpartition("-v")[0]
    question = f"Mission: {env.mission}.\n\n{view(env)}"
    return Task(f"{level}-{seed}", question, [], {"env_id": env_id, "seed": seed, "mission": env.mission})


@lru_cache(maxsize=64)
def plan(env_id: str, seed: int) -> tuple[int, ...]:
    """Return the actions of BabyAI's bot. Raises ValueError if it finds no way."""
    from minigrid.utils.baby_ai_bot import BabyAIBot

    class Bot(BabyAIBot):
        def _breadth_first_search(self, *args: Any, **kwargs: Any) -> Any:
            if self.bfs_counter >= self.most:  # in some levels it plans for ever
                raise RuntimeError(f"no action after {MOST_SEARCHES} searches for a way")
            return super()._breadth_first_search(*args, **kwargs)

    env = Rooms(env_id, seed).env
    bot, actions, action = Bot(env), [], None
    try:
        while True:
            bot.most = bot.bfs_counter + MOST_SEARCHES
            action = bot.replan(action)
            _, reward, terminated, truncated, _ = env.step(action)
            actions.append(int(action))
            if terminated or truncated:
                break
    except Exception as error:  # assertions, and its own errors
        raise ValueError(f"BabyAI's bot fails in {env_id} with seed {seed}: {error!r}") from error
    if not float(reward) > 0:
        raise ValueError(f"BabyAI's bot does not complete the mission of {env_id} with seed {seed}")
    return tuple(actions)
