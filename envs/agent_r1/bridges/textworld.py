"""TextWorld: text adventures by Microsoft's generator, a new one for each seed."""

from __future__ import annotations

import json
import re
import tempfile
import threading
import warnings
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from agent_r1.arguments import ArgumentError
from agent_r1.baselines import ONLY_EXPERTS
from agent_r1.bridges.bridge import World, check_version
from agent_r1.bridges.text_game import TextGameEnv
from agent_r1.tool_env import Task
from agent_r1_tools import ToolResult

GAMES: Mapping[str, Mapping[str, Any]] = {
    "cooking": {"recipe": 1, "take": 1, "go": 6, "open": True, "cook": True, "cut": True, "drop": False},
    "coin_collector": {"level": 5},
    "treasure_hunter": {"level": 10},
    "simple": {"rewards": "balanced", "goal": "detailed"},
    "custom": {"rooms": 5, "objects": 10, "quest_length": 5},
}
"""Kinds of games and their settings, by TextWorld's names (`tw-make --help`)."""
SPLITS = {"train": 1_000_000, "valid": 10_000, "test": 10_000}  # tasks; their seeds follow each other
MOST_COMMAND = 150  # characters
TRIES = 50  # maximum number of seeds until the generator can make a game
VERBS = frozenset(
    "look l goal inventory i go n s e w north south east west examine x eat open close drop take get pick put insert "
    "lock unlock cook slice chop dice prepare drink wait z help".split()
)
# Commands of a story's interpreter for files and for itself. Inform knows a word by its first nine letters.
KEPT_OUT = frozenset(
    "save restore script unscript noscript transcrip restart quit q undo verify version recording replay restrict then"
    .split()
)  # fmt: skip
_ONE_AT_A_TIME = threading.Lock()  # the generator keeps a random state for its process


class TextWorldEnv(TextGameEnv):
    """Text adventures written by a generator, a new one for each seed (TextWorld, arXiv 1806.11532).

    ## Description
    The generator of [TextWorld](https://arxiv.org/abs/1806.11532) (MIT; its interpreter Jericho is GPL-2.0) writes a
    story for each seed, and Inform 7 compiles it. By default the stories are the cooking games of the First TextWorld
    Problems. The agent finds and reads the cookbook, fetches, cuts and cooks the ingredients, and eats the meal. An
    `<answer>` gives up.

    The environment needs the extra `textworld` (Linux and macOS). It was checked with textworld 1.7.

    ## Tools
    `act(command)` gives a command to the story, such as `take the knife from the counter`.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `"train"`, `"valid"` or `"test"` |
    | `game` | `"cooking"` | also `"coin_collector"`, `"treasure_hunter"`, `"simple"` or `"custom"` |
    | `settings` | `None` | a dict of the game's settings, under TextWorld's names; see `GAMES` |
    | `max_turns` | `50` | the maximum number of turns |
    | `max_action_tokens` | `512` | the maximum number of tokens in a turn |

    `"custom"` is a quest of a given length in a house of a given size. The other arguments are those of `ToolEnv`.

    Rewards and baselines: docs/environments/textworld.md.
    """

    instructions = (
        "You play a text adventure: give one command at a time with the tool act, and read what happens. Commands: "
        "look, inventory, goal, go north (or east, south, west), examine ..., open ..., close ..., take ..., "
        "take ... from ..., drop ..., put ... on ..., insert ... into ..., unlock ... with ..., lock ... with ..., "
        "eat ..., drink ..., cook ... with ..., slice ... with ..., chop ... with ..., dice ... with ..., "
        "prepare meal. Answer with <answer>I give up</answer> only to give up."
    )
    command = "such as: open fridge"
    splits: ClassVar[Mapping[str, str]] = {"train": "train", "valid": "valid", "test": "test", "validation": "valid"}

    def __init__(self, *, game: str = "cooking", settings: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("max_turns", 50)
        kwargs.setdefault("max_action_tokens", 512)
        if not isinstance(game, str) or game not in GAMES:
            raise ArgumentError(f"there is no game {game!r}; there are {', '.join(GAMES)}")
        if not isinstance(settings, Mapping | None):
            raise ArgumentError(f"settings must be a dict of {game}'s settings, got {settings!r}")
        if unknown := set(settings or {}) - set(GAMES[game]):
            known = ", ".join(GAMES[game])
            raise ArgumentError(f"{game} has no setting {', '.join(map(repr, sorted(unknown)))}; it has {known}")
        find_textworld()
        self.game, self.settings = game, dict(GAMES[game]) | dict(settings or {})
        super().__init__(**kwargs)
        if settings:
            self.make_task(0)  # raises if the settings are impossible

    @property
    def num_tasks(self) -> int:
        """The number of seeds of the split."""
        return SPLITS[self.split]

    def make_task(self, index: int) -> Task:
        """Return the story of a seed; the seeds of `valid` and `test` follow those of `train`.

        Raises ArgumentError for settings with which the generator can make no story.
        """
        seed = index + sum(list(SPLITS.values())[: list(SPLITS).index(self.split)])
        story = write_story(self.game, json.dumps(self.settings, sort_keys=True), self.split, seed)
        metadata = {"game": self.game, "settings": self.settings, "seed": seed, "max_score": story.max_score}
        return Task(f"{self.game}-{seed}", story.beginning, [], metadata)

    def make_world(self, task: Task) -> World:
        """Start the story at its beginning."""
        return Telling(self._story(task))

    def full_score(self) -> float:
        """Return the maximum score of the story."""
        return float(self.task.metadata["max_score"])

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return TextWorld's own winning commands, one call a turn: the generator's, or else its `policy_commands`.

        Raises: ValueError with `rng`: there is only the expert.
        """
        if rng is not None:
            raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
        return self.act(*self._story(self.task).walkthrough)

    def _story(self, task: Task) -> Story:
        settings = json.dumps(task.metadata["settings"], sort_keys=True)
        return write_story(task.metadata["game"], settings, self.split, task.metadata["seed"])


class Story(NamedTuple):
    """A compiled story: the files that its interpreter reads, and its metadata."""

    z8: bytes
    game: bytes  # TextWorld's JSON
    beginning: str
    max_score: int
    walkthrough: tuple[str, ...]


class Telling:
    """A running story."""

    def __init__(self, story: Story, **infos: bool) -> None:
        textworld = find_textworld()
        _be_quiet()
        with tempfile.TemporaryDirectory(prefix="textworld") as folder:  # the interpreter has read it when it starts
            path = Path(folder, "story.z8")
            path.write_bytes(story.z8)
            path.with_suffix(".json").write_bytes(story.game)
            self.env: Any = textworld.start(str(path), textworld.EnvInfos(score=True, **infos))
            self.env.seed(1)
            self.state = self.env.reset()
        self.score = 0

    def act(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        command = " ".join(arguments["command"].split())
        words = re.findall(r"[^ '-]+", command.lower())
        if len(command) > MOST_COMMAND or not re.fullmatch(r"[A-Za-z0-9 '#-]+", command):
            return ToolResult(f"A command is one line of at most {MOST_COMMAND} letters and digits.", ok=False)
        if words[:1] == [] or words[0] not in VERBS:
            return ToolResult(f"There is no command {command.split()[0][:40]!r}.", ok=False)
        if bad := [word for word in words if word[:9] in KEPT_OUT]:
            return ToolResult(f"{bad[0]!r} is nothing to do in the story; give one command a call.", ok=False)
        self.state, score, done = self.env.step(command)
        reward, self.score = score - self.score, score
        return ToolResult(story_text(self.state.feedback), data={"reward": float(reward)}, done=bool(done))

    def close(self) -> None:
        self.env.close()


def story_text(feedback: str) -> str:
    """Return the story's text, without the screen around it: its title, the prompt, the status line."""
    text = feedback.rpartition("\n>")[0] or feedback
    text = text.partition("Would you like to RESTART")[0]
    lines = text.split("\n")
    drawn = [number for number, line in enumerate(lines) if "$$" in line]
    lines = lines[drawn[-1] + 1 :] if drawn else lines
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines)).strip()


# --------------------------------------------------------------------------------------------------------- TextWorld


@cache
def find_textworld() -> Any:
    """Import the package. Raises ImportError if it is not installed; warns about a version that was not checked."""
    drawn = np.random.get_state()  # the import draws from this state
    try:
        import textworld
        import textworld.challenges  # registers the kinds of games
    except ImportError as error:
        raise ImportError('TextWorld needs textworld: pip install "agent-r1[textworld]"') from error
    finally:
        np.random.set_state(drawn)
    check_version("textworld", "1.7")
    return textworld


def _be_quiet() -> None:
    """Suppress warnings as TextWorld does at import: its interpreter misses scores, which TextWorld counts itself."""
    from jericho import UnsupportedGameWarning

    warnings.simplefilter("ignore", UnsupportedGameWarning)


@lru_cache(maxsize=64)  # half a megabyte each; the episodes of a group play the same story
def write_story(game: str, settings: str, split: str, seed: int) -> Story:
    """Write and compile a story, in one to two seconds. `settings` is JSON.

    It is the story of the seed, or of the next seed whose story its own walkthrough wins. A walkthrough fails if a
    command cannot distinguish the names of two things.

    Raises ArgumentError for settings with which the generator can make no story.
    """
    textworld = find_textworld()
    _be_quiet()
    reason: Exception | None = None
    with _ONE_AT_A_TIME:
        before = textworld.g_rng.seed
        try:
            for again in range(TRIES):
                options = textworld.GameOptions()
                options.seeds = seed + again * sum(SPLITS.values())
                textworld.g_rng.set_seed(options.seeds["map"])
                try:
                    made = _make(textworld, game, json.loads(settings), split, options)
                    story = _compile(textworld, made, options)
                except textworld.generator.QuestGenerationError as error:
                    reason = error
                    continue
                if story is not None:
                    return story
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            reason = error
        finally:
            textworld.g_rng.set_seed(before)
    error_message = f"TextWorld cannot make a {game} game of seed {seed} with settings {settings}: {reason!r}"
    raise ArgumentError(error_message) from reason


def _compile(textworld: Any, made: Any, options: Any) -> Story | None:
    """Compile a game to a story with a winning walkthrough; None if TextWorld's walkthroughs do not win."""
    with tempfile.TemporaryDirectory(prefix="textworld") as folder:
        options.path = str(Path(folder, "story.z8"))
        path = Path(textworld.generator.compile_game(made, options))
        story = Story(path.read_bytes(), path.with_suffix(".json").read_bytes(), "", 0, ())
    telling = Telling(story, max_score=True, policy_commands=True)
    beginning, max_score = story_text(telling.state.feedback), telling.state.max_score
    policy = telling.state.policy_commands
    telling.close()
    # The walkthrough of a cooking game reads the cookbook, as a player without the recipe must. `policy` does not.
    for way in (made.metadata.get("walkthrough"), policy):
        telling = Telling(story)
        done = [telling.act("act", {"command": command}).done for command in way or ()]
        won = done and done[-1] and telling.score == max_score
        telling.close()
        if won:
            return story._replace(beginning=beginning, max_score=max_score, walkthrough=tuple(way))
    return None


def _make(textworld: Any, game: str, settings: dict[str, Any], split: str, options: Any) -> Any:
    if game == "custom":
        options.nb_rooms, options.nb_objects = settings["rooms"], settings["objects"]
        options.quest_length = settings["quest_length"]
        return textworld.generator.make_game(options)
    if game == "cooking":
        settings |= {"recipe_seed": 0, "split": split}
    if game == "simple":
        settings["test"] = split != "train"
    _, make, _ = textworld.challenges.CHALLENGES[f"tw-{game}"]
    return make(settings, options)
