"""The environment ALFWorld: household tasks in text, in generated rooms or in the official games."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from agent_r1.arguments import ArgumentError, some_of
from agent_r1.baselines import ONLY_EXPERTS
from agent_r1.bridges.alfworld.rooms import KINDS, SPELLING, draw_game, find_alfworld
from agent_r1.bridges.bridge import World
from agent_r1.bridges.text_game import TextGameEnv
from agent_r1.tool_env import Task
from agent_r1_tools import ToolResult

SPLITS = {"train": 1_000_000, "valid_seen": 10_000, "valid_unseen": 10_000}  # generated tasks
MOST_COMMAND = 150  # characters
_ONE_AT_A_TIME = threading.Lock()  # Fast Downward's translator works with globals
_LIBRARIES: list[Any] = []  # Fast Downward, a copy for each game at work: unloading one crashes the process


class ALFWorldEnv(TextGameEnv):
    """Household tasks in a room that is described in text (ALFWorld, arXiv 2010.03768).

    ## Description
    A task of [ALFWorld](https://arxiv.org/abs/2010.03768) (MIT) is, for example, "put a clean mug in coffeemachine".
    The agent goes to pieces of furniture and opens them. It takes, moves, cleans, heats and cools things until the task
    is done. There are six types of tasks. ALFWorld's PDDL domain and grammar define the game.

    ALFWorld's wheel has the domain and the grammar, but no games. So by default the rooms are generated from the floor
    plans in the wheel. If the official games are there, the environment uses them.

    The environment needs the extra `alfworld` (Linux and macOS). It was checked with alfworld 0.4.2, textworld 1.7 and
    fast-downward-textworld 20.6.

    ## Tools
    `act(command)` runs one of ALFWorld's commands: `go to cabinet 2`, `open cabinet 2`, `take mug 1 from cabinet 2`,
    `clean mug 1 with sinkbasin 1`, `move mug 1 to coffeemachine 1`, `use desklamp 1`. This version of ALFWorld has
    `move ... to ...` where older prompts have `put ... in/on ...`.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `"train"`, `"valid_seen"` or `"valid_unseen"` (also `"test"`) |
    | `games` | `"auto"` | `"generated"`, `"official"`, or `"auto"`: official games if there are some |
    | `data_dir` | `None` | the folder with `json_2.1.1`, which `alfworld-download` makes |
    | `kinds` | `None` | some of the six types of tasks; `None`: all |
    | `max_turns` | `50` | the maximum number of turns |
    | `max_action_tokens` | `512` | the maximum number of tokens in a turn |

    Without `data_dir` the folder is that of the variable ALFWORLD_DATA, or else `~/.cache/alfworld`. If ALFWORLD_DATA
    or `data_dir` is given and has no games, the constructor raises an error. With `games="generated"` it reads no
    folder. The other arguments are those of `ToolEnv`.

    Rewards and baselines: docs/environments/alfworld.md.
    """

    instructions = (
        "You do a task in a room: give one command at a time with the tool act, and read what happens. Commands: look, "
        "inventory, go to (receptacle), open (receptacle), close (receptacle), take (object) from (receptacle), "
        "move (object) to (receptacle), examine (something), use (object), heat (object) with (receptacle), "
        "clean (object) with (receptacle), cool (object) with (receptacle), slice (object) with (object). Name things "
        "with their number, such as: go to cabinet 2. Answer with <answer>I give up</answer> only to give up."
    )
    command = "such as: go to cabinet 2"
    splits: ClassVar[Mapping[str, str]] = {
        "train": "train", "valid_seen": "valid_seen", "valid_unseen": "valid_unseen",
        "valid": "valid_seen", "validation": "valid_seen", "test": "valid_unseen",
    }  # fmt: skip

    def __init__(
        self,
        *,
        games: str = "auto",
        data_dir: str | os.PathLike[str] | None = None,
        kinds: tuple[str, ...] | list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("max_turns", 50)
        kwargs.setdefault("max_action_tokens", 512)
        if games not in ("auto", "generated", "official"):
            raise ArgumentError(f"games must be 'auto', 'generated' or 'official', got {games!r}")
        self.kinds = some_of("kinds", kinds, KINDS)
        if games == "generated" and data_dir is not None:
            raise ArgumentError(f'games="generated" reads no data_dir, got {data_dir!r}')
        if not isinstance(data_dir, str | os.PathLike | None):
            raise ArgumentError(f"data_dir must be a folder, got {data_dir!r}")
        usual = Path("~/.cache/alfworld").expanduser()  # alfworld sets this at import
        given = Path(data_dir or os.environ.get("ALFWORLD_DATA") or usual).expanduser()
        folder = given / "json_2.1.1"
        exists = folder.is_dir()
        if not exists and (games == "official" or games == "auto" and (given != usual or data_dir is not None)):
            raise FileNotFoundError(
                f"no official games of ALFWorld in {folder}: run alfworld-download, and give its folder as data_dir= "
                'or in ALFWORLD_DATA; games="generated" needs none'
            )
        find_alfworld()
        self.folder = str(folder) if exists and games != "generated" else None
        super().__init__(**kwargs)
        if self.folder and not self._files():
            raise FileNotFoundError(f"{self.folder} has no solvable game.tw-pddl of {self.kinds} in {self.split}")

    @property
    def num_tasks(self) -> int:
        """The number of official games, or of generated tasks."""
        return len(self._files()) if self.folder else SPLITS[self.split]

    def make_task(self, index: int) -> Task:
        """Return official game `index`, in the order of the paths; or the room of a seed, each type in turn.

        Raises OSError for an official game that cannot be read.
        """
        if self.folder:
            path = self._files()[index]
            name = str(Path(path).parent.relative_to(Path(self.folder)))
            kind = next(kind for kind in KINDS if Path(name).parts[1].startswith(kind))
            return Task(name, begin("", path).beginning, [], {"kind": kind, "file": path, "game": ""})
        offset = sum(list(SPLITS.values())[: list(SPLITS).index(self.split)])
        game = json.dumps({"kind": self.kinds[index % len(self.kinds)], "seed": index + offset, "split": self.split})
        metadata = {**json.loads(game), "file": "", "game": game}
        return Task(f"{metadata['kind']}-{metadata['seed']}", begin(game, "").beginning, [], metadata)

    def make_world(self, task: Task) -> World:
        """Make the room at its beginning."""
        return Room(begin(task.metadata["game"], task.metadata["file"]))

    def full_score(self) -> float:
        """Return the score of a solved task."""
        return 1.0

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return the shortest solution with all positions known, one command a turn; or an official game's walkthrough.

        Raises: ValueError for an official game without one, and with `rng`: there is only the expert.
        """
        if rng is not None:
            raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
        way = begin(self.task.metadata["game"], self.task.metadata["file"]).walkthrough
        if not way:
            raise ValueError(f"the official game {self.task.id} has no walkthrough")
        return self.act(*way)

    def _files(self) -> tuple[str, ...]:
        return official_games(str(self.folder), self.split, self.kinds)


class Game(NamedTuple):
    """A game in the form of ALFWorld's files, and its metadata."""

    data: dict[str, Any]
    beginning: str
    walkthrough: tuple[str, ...]


class Room:
    """A running game."""

    def __init__(self, game: Game) -> None:
        self.env: Any = start(game.data)
        with _alone():
            self.state = self.env.reset()

    def act(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        command = " ".join(arguments["command"].split()).lower()
        if len(command) > MOST_COMMAND or not command:
            return ToolResult(f"A command has 1 to {MOST_COMMAND} characters.", ok=False)
        # Only ALFWorld's own commands of this state count, letter by letter; any other does nothing.
        command = next((valid for valid in self.state["_valid_commands"] if valid.strip() == command), "")
        self.state, _, _ = self.env.step(command) if command else (self.state, 0, False)
        done = bool(command and self.state["won"])
        text = self.state.feedback.strip() if command else "Nothing happens."
        return ToolResult(text, data={"reward": float(done)}, done=done)

    def close(self) -> None:
        env, self.env = self.env, None
        if env is not None:
            stop(env)


def start(data: dict[str, Any]) -> Any:
    """Start TextWorld's environment of a game, with ALFWorld's names for things."""
    find_alfworld()
    import textworld
    from alfworld.agents.utils.misc import Demangler
    from textworld.envs import PddlEnv

    with _alone():
        env = PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True))
        env.give_back = weakref.finalize(env, _LIBRARIES.append, env.downward_lib)
        env.load(data)
    env._logic.grammar = Remembering(env._logic.grammar, known_commands(data["pddl_problem"]))
    names = Demangler(game_infos=env._entity_infos, shuffle=False)
    for info in env._entity_infos.values():
        info.name = names.demangle_alfred_name(info.id)
    return env


def stop(env: Any) -> None:
    """Stop an environment, and release its copy of Fast Downward for another game."""
    env.give_back()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold the exclusive right to work with Fast Downward: its translator writes to `sys.argv` and `sys.stdout`.

    Its last translation is cached, because every episode needs it twice. Copies of the library are cached, too.
    """
    import fast_downward

    def borrow() -> Any:
        return _LIBRARIES.pop() if _LIBRARIES else load()

    with _ONE_AT_A_TIME:
        arguments, output, translate, load = sys.argv, sys.stdout, fast_downward.pddl2sas, fast_downward.load_lib
        fast_downward.pddl2sas, fast_downward.load_lib = translated, borrow
        try:
            yield
        finally:
            fast_downward.pddl2sas, fast_downward.load_lib = translate, load
            sys.argv, sys.stdout = arguments, output


class Remembering:
    """A game's grammar. The text of a command never changes in a game, so it is computed once, not at every step."""

    def __init__(self, grammar: Any, known: dict[Any, str]) -> None:
        self.grammar, self.known = grammar, known

    def derive(self, start: str, context: dict[str, Any]) -> str:
        query = start.partition("|")[2]
        if "#" in start or (query and not query.startswith(" receptacleatlocation(")):  # furniture never moves
            return self.grammar.derive(start, context)
        key = start, tuple((one.name, other.name) for one, other in context["mapping"].items())
        if key not in self.known:
            self.known[key] = self.grammar.derive(start, context)
        return self.known[key]


@lru_cache(maxsize=64)
def known_commands(problem: str) -> dict[Any, str]:
    """Return the texts of a game's commands, by their action and things."""
    return {}


@lru_cache(maxsize=64)
def translated(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> Any:
    """Run Fast Downward's `pddl2sas`."""
    from fast_downward.interface import pddl2sas

    return pddl2sas(domain, problem, False, optimize)


@lru_cache(maxsize=256)  # the episodes of a group play the same game
def begin(game: str, path: str) -> Game:
    """Return a game with its first text and a winning solution: from a file, or drawn (`game` is JSON)."""
    data = json.loads(Path(path).read_text()) if path else draw_game(**json.loads(game))
    env = start(data)
    try:
        with _alone():
            text = env.reset().feedback.strip()
        way = data.get("walkthrough") or ()
        names = {name: info.name for name, info in env._entity_infos.items()}
    finally:
        stop(env)
    if not path:  # with the ids of things
        way = [verb.format(*(names[one.translate(SPELLING).lower()] for one in things)) for verb, *things in way]
    return Game(data, text, tuple(command.strip() for command in way))


@lru_cache(maxsize=16)
def official_games(folder: str, split: str, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the sorted paths of the solvable games that ALFWorld uses: none with slices or movable receptacles."""
    paths = []
    for path in sorted(Path(folder, split).glob("*/*/game.tw-pddl")):
        name = path.parent.parent.name
        if "movable" in name or "Sliced" in name or not name.startswith(kinds):
            continue
        if json.loads(path.read_text()).get("solvable"):
            paths.append(str(path))
    return tuple(paths)
