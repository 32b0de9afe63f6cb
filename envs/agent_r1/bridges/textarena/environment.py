"""TextArena: games for one player and for two, in words."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import math
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from agent_r1.arguments import ArgumentError, integer
from agent_r1.baselines import ONLY_EXPERTS
from agent_r1.bridges.bridge import FinalRewardEnv, World, call_schema, call_seconds, check_version
from agent_r1.bridges.textarena.players import MOVES, SOLVED, base, solve
from agent_r1.dialects import Call
from agent_r1.tool_env import End, Task
from agent_r1.users import find_user
from agent_r1_tools import ToolFault, ToolResult
from agent_r1_tools.running import is_strict

MAX_CHARS = 1_000  # maximum length of an action, as in the package's own wrapper
SPLITS = {"train": 1_000_000, "test": 10_000}  # tasks; the seeds of test follow those of train
TRIES = 300  # maximum number of games that the expert plays to win one
JUDGED = ("Debate", "GuessWho", "ScenarioPlanning", "TwentyQuestions")
"""Games that ask a model over the network who has won."""
BROKEN = ("Countdown", "Cryptarithm", "PublicGoodsGame", "Slitherlink")
"""Games that confuse the order of the package's own arguments, so that no move can be made, and one that searches for
the next player for ever when all are out."""

Opponent = Callable[[str, random.Random], str]

TOOLS = [
    call_schema(
        "play",
        "Do something in the game: write it as the rules ask, a move in square brackets.",
        action={"type": "string", "maxLength": MAX_CHARS},
    )
]


LEFT_OUT = {
    "KuhnPoker": "some deals can't be won",
    "UltimateTicTacToe": "its boards may fill a context of 32,768 bytes",
    "Battleship": "its boards may fill a context of 32,768 bytes",
}
"""Games that "all" excludes although there is a scripted player, with the reason."""
GAMES = tuple(f"{name}-v0" for name in (*SOLVED, *MOVES) if name not in LEFT_OUT)
"""The games of "all": the expert can play them, and games for two have a scripted player."""


class TextArenaEnv(FinalRewardEnv):
    """Games in words, alone or against another player (TextArena, arXiv 2504.11442).

    ## Description
    The games are those of [TextArena](https://github.com/LeonGuertler/TextArena) (MIT,
    [arXiv 2504.11442](https://arxiv.org/abs/2504.11442)). The first message has the rules, in the game's own words. The
    agent makes one move per call and reads the replies of the game and of the other player. An `<answer>` gives up.

    The environment needs the extra `textarena`. It was checked with textarena 0.7.4.

    ## Tools
    `play(action)` makes a move in the form that the rules describe, mostly in square brackets. In some games the move
    is free text. An action has at most 1,000 characters.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `"train"` or `"test"` |
    | `game` | `"all"` | an id such as `"TicTacToe-v0"`, ids that come in turn, or `"all"` |
    | `opponent` | `None` | a function that plays the other side, or `"module:function"`; `None`: a scripted player |
    | `player` | `None` | the side of the policy, 0 or 1; `None`: both in turn |
    | `timeout` | `math.inf` | the maximum number of seconds of a call, for an opponent that blocks |
    | `max_turns` | `100` | the maximum number of turns |

    `opponent(observation, rng)` returns an action for all that it has read so far. `rng` is a `random.Random` that
    depends on the task and its turn. The scripted player draws from the moves that the rules allow. When a game was
    lost and all calls are repeated, `timeout` covers the repeated calls too. The other arguments are those of
    `ToolEnv`. A game that cannot be played raises ArgumentError. A missing package raises ImportError.

    Rewards and baselines: docs/environments/textarena.md.
    """

    instructions = (
        "Play the game to win it. Make each move with the tool play, and read what happens. Answer with <answer>I give "
        "up</answer> only to give up."
    )
    floor = 0.02  # a word of the rules may be a move

    def __init__(
        self,
        *,
        game: str | Sequence[str] = "all",
        opponent: Opponent | str | None = None,
        player: int | None = None,
        timeout: float = math.inf,
        **kwargs: Any,
    ) -> None:
        if player is not None and (player := integer("player", player)) not in (0, 1):
            raise ArgumentError(f"player must be None, 0 or 1, got {player!r}")
        chosen = GAMES if game == "all" else (game,) if isinstance(game, str) else game
        if not isinstance(chosen, Sequence) or not chosen or not all(isinstance(name, str) for name in chosen):
            raise ArgumentError(f"game must be a name or a list of names, got {game!r}")
        self.games, self.timeout = tuple(chosen), call_seconds(timeout)
        self.opponent, self.player = find_user(opponent, "opponent"), player
        for name in self.games:
            if find_players(name) == 2 and opponent is None and base(name) not in MOVES:
                raise ArgumentError(f"there is no scripted player of {name}; pass opponent=, a callable")
        kwargs.setdefault("max_turns", 100)
        super().__init__(TOOLS, **kwargs)
        self._first: dict[str, Task] = {}

    @property
    def num_tasks(self) -> int:
        """The number of seeds of the split."""
        return SPLITS[self.split]

    def make_task(self, index: int) -> Task:
        """Return task `index`: of n games, seed s has game `s % n`; the seeds of `test` follow those of `train`."""
        seed = index + (SPLITS["train"] if self.split == "test" else 0)
        turn, place = divmod(seed, len(self.games))
        game = self.games[place]
        players = find_players(game)
        side = 0 if players == 1 else turn % 2 if self.player is None else self.player
        name = f"{game}-{seed}" + f"-player{side}" * (players == 2)
        if name not in self._first:  # only the last view is kept: episodes of a group and snapshots need it again
            match = Match(game, seed, side, self.opponent, [], self.strict)
            about = {"game": game, "seed": seed, "player": side, "players": players, "opening": match.replies}
            self._first = {name: Task(name, match.news(), [], about)}
        return self._first[name]

    def make_world(self, task: Task) -> World:
        """Make the game at its beginning; the texts of the other player are repeated."""
        about = task.metadata
        replies = self.memory.setdefault("replies", list(about["opening"]))
        match = Match(about["game"], about["seed"], about["player"], self.opponent, replies, self.strict)
        match.news()
        return match

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float] | End:
        """End the episode with the game."""
        if not result.done:
            return {}
        self.memory["reward"] = reward = result.data["reward"]
        score = 1.0 if result.data["won"] else min(max(reward, 0.0), 0.99)
        return End(score, metrics={"reward": self.final_reward()})

    def final_reward(self) -> float:
        """Return TextArena's reward; an unfinished game counts as lost."""
        return float(self.memory.get("reward", 1 - self.task.metadata["players"]))

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return the moves of a won game: from a known solution, or found by repeated games against the same player.

        Raises ValueError if no game is won, for a game with unknown moves, and with `rng`: there is only the expert.
        """
        if rng is not None:
            raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
        about = self.task.metadata
        moves = win(about["game"], about["seed"], about["player"], self.opponent)
        return [self.dialect.tool_call("play", {"action": move}) for move in moves]


class Match:
    """A running game, up to the moves of one player; the other side moves by itself.

    `replies`: the texts of the other side so far. They are repeated, and new ones are appended.
    """

    def __init__(
        self, game: str, seed: int, player: int, opponent: Opponent | None, replies: list[str],
        strict: bool | None = None,
    ) -> None:  # fmt: skip
        self.game, self.seed, self.player, self.opponent, self.replies = game, seed, player, opponent, replies
        self.read: dict[int, list[tuple[int, str, Any]]] = {0: [], 1: []}
        self.shown, self.said, self.over, self.strict = 0, 0, False, strict
        rng = random.Random(f"{game} {seed}")
        self.random: Any = rng.getstate(), rng.getrandbits(32)
        with self.fenced():
            self.env = make(game)
            self.inner = inner(self.env)
            self.inner.reset(num_players=find_players(game), seed=seed)
        self._listen()
        self._play_other()

    def act(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        self._step(arguments["action"])
        self._play_other()
        allowed = self.over or not any(kind.name == "GAME_ADMIN" for _, _, kind in self._new())
        news = self.news()
        if not self.over:
            return ToolResult(news or "Done.", ok=allowed)
        rewards = self.inner.state.rewards or {}
        reward, other = (_number(rewards.get(player, 0)) for player in (self.player, 1 - self.player))
        alone = find_players(self.game) == 1
        won = reward >= 1 if alone else reward > max(0.0, other)
        reason = str(self.inner.state.game_info.get(self.player, {}).get("reason") or "The game is over.")
        return ToolResult(f"{news}\n{reason}".strip(), data={"reward": reward, "won": won}, done=True)

    def news(self) -> str:
        """Return the texts of the game and the other player since the last call; of boards only the last."""
        new, self.shown = self._new(), len(self.read[self.player])
        boards = [place for place, (_, _, kind) in enumerate(new) if kind.name == "GAME_BOARD"]
        lines = []
        for place, (sender, text, kind) in enumerate(new):
            own = kind.name == "PLAYER_ACTION" and sender == self.player
            if not own and (place not in boards or place == boards[-1]):
                lines.append(text if sender == -1 else f"[Player {sender}] {text}")
        return "\n".join(lines)

    def close(self) -> None:
        pass

    def _new(self) -> list[tuple[int, str, Any]]:
        return self.read[self.player][self.shown :]

    def _step(self, action: str) -> None:
        with self.fenced():
            self.over = bool(self.env.step(action)[0])
        self._listen()

    def _listen(self) -> None:
        for player, messages in self.inner.state.observations.items():
            self.read.setdefault(player, []).extend(messages)
            self.inner.state.observations[player] = []

    def _play_other(self) -> None:
        while not self.over and self.inner.state.current_player_id != self.player:
            if self.said == len(self.replies):
                self.replies.append(self._ask_other())
            self.said += 1
            self._step(self.replies[self.said - 1])

    def _ask_other(self) -> str:
        rng = random.Random(f"{self.game} {self.seed} {self.said}")
        if self.opponent is None:
            return self.draw_move(rng)
        other = self.inner.state.current_player_id
        seen = "\n".join(text if who == -1 else f"[Player {who}] {text}" for who, text, _ in self.read[other])
        try:
            return str(self.opponent(seen, rng))[:MAX_CHARS]
        except Exception as error:
            if is_strict(self.strict):
                raise
            raise ToolFault(f"the opponent failed: {error!r}") from error

    def draw_move(self, rng: random.Random) -> str:
        """Draw an allowed move of the player whose turn it is."""
        moves = MOVES[base(self.game)](self.inner)
        for move in rng.sample(moves, len(moves)):
            if self.allows(move):
                return move
        return "[pass]"

    def allows(self, move: str) -> bool:
        """Return whether the rules allow a move now, tried on a copy."""
        with self.fenced(keep=False):
            tried = copy.deepcopy(self.inner)
            before = tried.state.current_player_id
            try:
                tried.step(move)
            except Exception:
                return False
            info = tried.state.game_info.get(before, {})
            return not info.get("invalid_move") and not any(
                kind.name == "GAME_ADMIN" for messages in tried.state.observations.values() for _, _, kind in messages
            )

    @contextlib.contextmanager
    def fenced(self, keep: bool = True) -> Iterator[None]:
        """Set the global random state to the game's own, and print nothing, while the context is open."""
        with fence(), contextlib.redirect_stdout(io.StringIO()):  # some print
            random.setstate(self.random[0])
            np.random.seed(self.random[1])
            yield
            if keep:
                self.random = random.getstate(), int(np.random.randint(2**31))


def _number(reward: Any) -> float:
    """Return a reward; 0 if it is not a number: `ThreeCardMonte` gives a text after forbidden moves."""
    return float(reward) if isinstance(reward, int | float) else 0.0


_lock = threading.RLock()
LONGEST = 60.0  # maximum seconds to wait for moves of other games, which take milliseconds


@contextlib.contextmanager
def fence() -> Iterator[None]:
    """Restore the global random state, from which the package draws, after the context; one thread at a time."""
    if not _lock.acquire(timeout=LONGEST):
        raise ToolFault(f"another game has not ended its move in {LONGEST:.0f} seconds")
    try:
        before, before_numpy = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(before_numpy)
    finally:
        _lock.release()


# ---------------------------------------------------------------------------------------------------------- the expert


def win(game: str, seed: int, player: int, opponent: Opponent | None) -> list[str]:
    """Return the moves of a won game. Raises ValueError if none is found."""
    name = base(game)
    if name not in SOLVED and name not in MOVES:
        raise ValueError(f"the moves of {game} are not known")
    for attempt in range(1 if name in SOLVED else TRIES):
        match, moves, rng = Match(game, seed, player, opponent, []), [], random.Random(f"{game} {seed} try {attempt}")
        while not match.over:
            moves.append(solve(name, match.inner) if name in SOLVED else match.draw_move(rng))
            result = match.act("play", {"action": moves[-1]})
        if result.data["won"]:
            return moves
    raise ValueError(f"no game of {game} with seed {seed} was won as player {player}")


# --------------------------------------------------------------------------------------------------------- the package


def inner(env: Any) -> Any:
    """Return a game without its wrappers."""
    while hasattr(env, "env") and hasattr(env, "is_wrapped_with"):
        env = env.env
    return env


@cache
def load() -> ModuleType:
    """Import the package. Raises ImportError without it; warns about a version that was not checked."""
    try:
        with warnings.catch_warnings():  # it changes the filters
            package = importlib.import_module("textarena")
    except ImportError as error:
        raise ImportError(f'TextArena needs textarena ({error}): pip install "agent-r1[textarena]"') from error
    check_version("textarena", "0.7")
    return package


def make(game: str) -> Any:
    """Make a game of the package, with its default wrappers."""
    package = load()
    nltk: Any = importlib.import_module("nltk")
    download = nltk.download
    nltk.download = lambda *names, **kwargs: False  # some games fetch words when they are imported
    try:
        return package.make(game)
    finally:
        nltk.download = download


@cache
def find_players(game: str) -> int:
    """Return the number of players of a game, 1 or 2.

    Raises ArgumentError for a game that is unknown or not supported; ImportError if a dependency is missing.
    """
    games = importlib.import_module(f"{load().__name__}.envs.registration").ENV_REGISTRY
    if game not in games:
        names = sorted({name for name in games if name.endswith("-v0")})  # the others are variants of these
        raise ArgumentError(f"TextArena has no game {game!r}; it has {', '.join(names)}, and variants of them")
    if base(game) in JUDGED:
        raise ArgumentError(f"{game} asks a model over the network who has won")
    if base(game) in BROKEN:
        raise ArgumentError(f"{game} is broken in textarena 0.7: no move in it can be made, or it never ends")
    for players in (2, 1):
        try:
            with fence(), contextlib.redirect_stdout(io.StringIO()):
                env = inner(make(game))
                env.reset(num_players=players, seed=0)
                state = env.state
        except (AssertionError, ValueError):  # another number of players
            continue
        except LookupError as error:
            words = "python -m nltk.downloader words averaged_perceptron_tagger_eng"
            raise ImportError(f"{game} needs words of nltk: {words}") from error
        except SyntaxError as error:
            version = ".".join(map(str, sys.version_info[:2]))
            raise ArgumentError(f"{game} is written for a Python newer than {version}") from error
        except OSError as error:
            raise ArgumentError(f"{game} lacks files that the package doesn't ship: {error}") from error
        except ImportError as error:
            raise ImportError(f"{game} needs a dependency that the package does not declare: {error}") from error
        if state.num_players == players:
            return players
    raise ArgumentError(f"{game} is not for one or two players")
