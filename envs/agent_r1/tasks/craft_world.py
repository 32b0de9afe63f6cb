"""CraftWorld: crafting tasks with recipes that are new in every task.

The recipes are drawn from the task's seed, so nothing has to be downloaded and no recipe can be learned by heart.
TextCraft (arXiv 2311.05772) has the same role; the recipes and rules here are ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from agent_r1.arguments import ArgumentError, integer
from agent_r1.baselines import Baselines
from agent_r1.dialects import Call
from agent_r1.rewards import paper_outcome
from agent_r1.tasks.demonstrators import SLOPPY, TEACHERS, demonstrator
from agent_r1.tasks.draw import pick, sample
from agent_r1.tool_env import End, Task, ToolEnv
from agent_r1_tools import Tool, ToolResult

# Words. The unseen ones occur in training as a remark, never as an item to get or to craft.
ITEMS = (
    "amber anchor anvil arrow awl axe axle banner barrel basin basket bead beam bell bellows belt bench blade "
    "blanket bolt bone boot bottle bow bowl bracket brass brick bridle bronze broom brush bucket buckle button "
    "cable cage candle canvas cart cask chain chair chalk charcoal chest chisel clamp clasp clay clock cloth coal "
    "coin collar compass copper cord cork cotton crank crate crown cup dagger dial door dough drill drum dye engine "
    "fabric feather fence fiber file flag flask flint flour flute forge frame fuse gear gem glass glaze glove glue "
    "gold gravel grease hammer handle harness harp hatch helmet hinge hoe honey hook hoop horn hull ink iron ivory "
    "jar kettle key kiln knife knot lace ladder lamp lantern latch lead leather lens lever lid linen lock log loom "
    "lumber mallet marble mast mat mesh mill mirror mortar motor nail needle net nickel nut oil oven paddle paint "
    "panel paper paste pearl peg"
).split()
UNSEEN_ITEMS = (
    "pen pigment pillow pipe pitch plank plate plow plug pole pot powder pulley pump quill quilt rail rake resin "
    "ribbon ring rivet rod roof rope rudder saddle sail salt sand satin saw scale screw shield silk silver sponge "
    "spring steel"
).split()

DEPTHS = {"depth_4": (4,), "depth_5": (5,)}  # the other splits have 1 to 3
MOST_NEEDED = 9  # maximum number of pieces of an item in a task
MOST_ITEMS = 14  # maximum number of items: six to craft and eight to get, 2 * 6 + 8 = 20 turns
MOST_AT_ONCE = 99  # maximum number of pieces in one call

PHRASING = "Make {count} {goal}."
OTHER_PHRASINGS = (
    "Please craft {goal} for me, {count} in number.",
    "What I want is {count} {goal}.",
    "Your goal is {goal}: {count}.",
)
NUM_TASKS = {"train": 1_000_000, "test": 10_000}


@lru_cache(maxsize=1024)  # the episodes of a group have the same task
def generate_task(seed: int, split: str, index: int, depth: int | None = None) -> Task:
    """Generate task `index` of a split of the world family `seed`. The result is cached: do not change it.

    Splits: train and test (depth 1 to 3), and the zero-shot variants depth_4, depth_5, unseen_items, other_phrasings.
    `depth`, from 1 to 5, replaces the depths of the split. `metadata`: goal, count, depth, recipes ({crafted item:
    {ingredient: pieces for one}}, the goal's first), needs ({item: pieces in all}, each after the item that uses it),
    optimal_turns (a look-up and a crafting for each crafted item, a `get` for each other one).
    """
    rng = np.random.default_rng([seed, list(CraftWorldEnv.splits).index(split), index])
    depths = (depth,) if depth is not None else DEPTHS.get(split, (1, 2, 3))
    drawn = pick(rng, depths)
    pool = UNSEEN_ITEMS if split == "unseen_items" else ITEMS
    names = iter(sample(rng, pool, MOST_ITEMS))
    goal, count = next(names), int(rng.integers(1, 4))
    # In a quarter of the deeper tasks one recipe has a second ingredient that is crafted.
    forked = int(rng.integers(3, drawn + 1)) if drawn >= 3 and rng.random() < 0.25 else 0
    recipes: dict[str, dict[str, int]] = {}
    needs = {goal: count}

    def add(item: str, level: int) -> None:
        gets = int(rng.integers(2)) + (level == 1)
        levels = [0] * gets + [1] * (level == forked) + [level - 1] * (level > 1)
        ingredients = [next(names) for _ in levels]
        recipes[item] = {i: int(rng.integers(1, min(3, MOST_NEEDED // needs[item]) + 1)) for i in ingredients}
        needs.update({i: needs[item] * pieces for i, pieces in recipes[item].items()})
        for ingredient, below in zip(ingredients, levels, strict=True):
            if below:
                add(ingredient, below)

    add(goal, drawn)
    remark = f" You need no {pick(rng, UNSEEN_ITEMS)}." if rng.random() < 0.2 else ""
    phrasing = PHRASING
    if split == "other_phrasings":
        phrasing = pick(rng, OTHER_PHRASINGS)
    return Task(
        id=f"{split}-{seed}-{index}" + (f"-depth{depth}" if depth is not None else ""),
        question=phrasing.format(count=count, goal=goal) + remark,
        answers=[f"{count} {goal}"],
        metadata={
            "goal": goal,
            "count": count,
            "depth": drawn,
            "recipes": recipes,
            "needs": needs,
            "optimal_turns": len(needs) + len(recipes),
        },
    )


# ---------------------------------------------------------------------- the rules


def act(task: Task, inventory: dict[str, int], name: str, item: str, count: int) -> tuple[str, bool]:
    """Apply the tool `name`, and change `inventory` in place. Return the policy's text, and whether the call worked."""
    recipes, needs = task.metadata["recipes"], task.metadata["needs"]
    item = item.strip().lower() if len(item) < 100 else item[:40] + "..."
    if item not in needs:
        return f"Error: there is no {item[:43]!r}.", False
    if name == "recipe":
        if item not in recipes:
            return f"{item} can't be crafted, only got.", True
        parts = [f"{'craft' if i in recipes else 'get'} {pieces} {i}" for i, pieces in recipes[item].items()]
        return f"{item}: {', '.join(parts)}.", True
    if not 1 <= count <= MOST_AT_ONCE:
        return f"Error: count must be from 1 to {MOST_AT_ONCE}.", False
    if (item in recipes) != (name == "craft"):
        can, cannot = ("crafted", "got") if item in recipes else ("got", "crafted")
        return f"Error: {item} can't be {cannot}, only {can}.", False
    used = {i: pieces * count for i, pieces in recipes.get(item, {}).items()}
    for ingredient, pieces in used.items():
        if inventory.get(ingredient, 0) < pieces:
            return f"Error: not enough {ingredient}.", False
    for ingredient, pieces in used.items():
        inventory[ingredient] -= pieces
    inventory[item] = inventory.get(item, 0) + count
    return f"You have {inventory[item]} {item}.", True


def waste(task: Task, inventory: Mapping[str, int]) -> int:
    """Return the number of pieces that the goal cannot use. Nothing can be returned, so one such piece is too many."""
    return _missing_and_waste(task, inventory)[1]


def progress(task: Task, inventory: Mapping[str, int]) -> float:
    """Compute the potential: the share of needed pieces held or used; 0 after any waste, 1 at the goal.

    It depends only on the inventory, not on the history.
    """
    missing, wasted = _missing_and_waste(task, inventory)
    return 0.0 if wasted else 1.0 - missing / sum(task.metadata["needs"].values())


def _missing_and_waste(task: Task, inventory: Mapping[str, int]) -> tuple[int, int]:
    recipes, missing, wasted = task.metadata["recipes"], 0, 0
    required = {task.metadata["goal"]: task.metadata["count"]}
    for item in task.metadata["needs"]:  # the item that uses it comes before it
        lacking = required[item] - inventory.get(item, 0)
        missing, wasted = missing + max(0, lacking), wasted + max(0, -lacking)
        required.update({i: pieces * max(0, lacking) for i, pieces in recipes.get(item, {}).items()})
    return missing, wasted


# ---------------------------------------------------------------------- demonstrators

Step = tuple[str, str, int]  # a tool's name, an item, a count; ("", "", 0) gives up
GIVE_UP: Step = ("", "", 0)
MULTIPLIES_NOTHING = {1: 0.37, 2: 0.13, 3: 0.04, 4: 0.02, 5: 0.02}  # depth -> share of tasks without multiplication
MISTAKES = {"fallible_75": 0.06, "fallible_50": 0.15, "fallible_25": 0.29, SLOPPY: 0.15}  # per turn; see `mistaken`
TIRED = 0.7  # share of episodes in which the sloppy demonstrator gives up after the first crafting


def next_step(task: Task, known: set[str], inventory: Mapping[str, int]) -> Step:
    """Return the next step of an expert that has looked up `known`: from the goal downwards, left to right.

    The count of a look-up is the number of needed pieces, which the expert notes.
    """
    recipes = task.metadata["recipes"]

    def supply(item: str, lacking: int) -> Step:
        if item not in recipes:
            return "get", item, lacking
        if item not in known:
            return "recipe", item, lacking
        for ingredient, pieces in recipes[item].items():
            short = pieces * lacking - inventory.get(ingredient, 0)
            if short > 0:
                return supply(ingredient, short)
        return "craft", item, lacking

    goal = task.metadata["goal"]
    return supply(goal, task.metadata["count"] - inventory.get(goal, 0))


def mistaken(rng: np.random.Generator, step: Step) -> Step:
    """Return a mistake instead of the right step: give up (3 in 10), else skip a look-up or change a count by one."""
    name, item, count = step
    if rng.random() < 0.3:
        return GIVE_UP
    if name == "recipe":
        return "craft", item, count
    return name, item, count - 1 if count > 1 and rng.random() < 0.5 else count + 1


def play(task: Task, rng: np.random.Generator | None = None, mistakes: float = 0.0, tired: float = 0.0) -> list[Step]:
    """Return the steps of the expert, or, with `rng`, of a demonstrator that makes mistakes.

    `mistakes` is the probability of a mistake in a turn. `tired` is the share of episodes in which the demonstrator
    gives up after the first crafting. No demonstrator notices a mistake at once. After a failed call it gives up (1 in
    2), or looks at the inventory and continues with the missing pieces.
    """
    goal, count = task.metadata["goal"], task.metadata["count"]
    inventory: dict[str, int] = {}
    believed: dict[str, int] = {}
    known: set[str] = set()
    steps: list[Step] = []
    tires = rng is not None and tired > 0 and rng.random() < tired
    while inventory.get(goal, 0) < count and len(steps) < CraftWorldEnv.default_turns:
        planned = step = next_step(task, known, believed)
        if rng is not None and rng.random() < mistakes:
            step = mistaken(rng, planned)
        steps.append(step)
        if step == GIVE_UP:
            break
        worked = act(task, inventory, *step)[1]
        if step[0] == "recipe":
            known.add(step[1])
        elif worked:
            act(task, believed, *planned)
            if tires and step[0] == "craft" and inventory.get(goal, 0) < count:
                steps.append(GIVE_UP)
                break
            tires &= step[0] != "craft"
        elif rng is None or rng.random() < 0.5:
            steps.append(GIVE_UP)
            break
        else:
            steps.append(("inventory", "", 0))
            believed = dict(inventory)
    return steps


class CraftWorldEnv(Baselines, ToolEnv):
    """Crafting tasks with recipes that are new in every task.

    ## Description
    A task asks for a number of pieces of one item, for example "Make 2 lamp.". This item is crafted from other items,
    and some of these are crafted too. The basic items can be got directly. The recipes are drawn from the task's seed,
    so a policy cannot learn them by heart. It has to look up recipes and compute counts. Over up to twenty turns it has
    to remember what is still missing. Nothing has to be downloaded.

    TextCraft ([arXiv 2311.05772](https://arxiv.org/abs/2311.05772)) has the same role. The recipes and rules here are
    ours:

    - An item of depth 1 is crafted from basic items. An item of depth 2 needs an item of depth 1, and so on.
    - Goals have depth 1 to 5. The shortest solution has 3 to 20 turns of one call each.
    - A recipe has one to three ingredients and needs 1 to 3 pieces of each.
    - Every item is an ingredient of one recipe only. No task needs more than 9 pieces of an item.
    - In a quarter of the tasks of depth 3 and more, one recipe has two crafted ingredients.

    The episode ends when the goal is made. It is a success if nothing is left over. An `<answer>` gives up.

    ## Tools

    - `recipe(item)` shows the ingredients of one piece.
    - `get(item, count)` gets pieces of a basic item.
    - `craft(item, count)` crafts pieces of an item and uses up the ingredients.
    - `inventory()` lists the pieces that are there.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `train`, `test`, `depth_4`, `depth_5`, `unseen_items`, `other_phrasings` |
    | `depth` | `None` | tasks of this depth only, 1 to 5; `None`: the depths of the split |
    | `world_seed` | `0` | the family of worlds |
    | `max_turns` | `30` | the maximum number of turns |
    | `max_action_tokens` | `512` | the maximum number of tokens in a turn |

    A task is a function of `world_seed`, split, index and `depth`. The splits `depth_4` and `depth_5` only allow their
    own depth. The other arguments are those of `ToolEnv`.

    Rewards and baselines: docs/environments/craft_world.md.
    """

    instructions = (
        "Make what is asked for, exactly, with nothing left over. Look up recipes; get what can be got and craft the "
        "rest. The task ends when it is made. <answer>stuck</answer> gives up."
    )
    outcome_term: ClassVar[str] = "outcome/made"
    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = {
        **ToolEnv.PROCESS_WEIGHTS,
        "progress": 0.5,  # times the difference that a call makes to `progress`
        "repeated_call": 0.0,  # the same call may be right twice
        "count_noted": 0.0,  # right counts in the thoughts of look-ups, minus wrong ones, / all crafted items
    }
    splits: ClassVar[Mapping[str, str]] = {
        name: name for name in ("train", "test", "depth_4", "depth_5", "unseen_items", "other_phrasings")
    }
    teachers: ClassVar[tuple[str, ...]] = tuple(TEACHERS)
    default_turns: ClassVar[int] = 30  # one and a half times the longest optimal solution

    def __init__(self, *, world_seed: int = 0, depth: int | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("max_turns", self.default_turns)
        kwargs.setdefault("max_action_tokens", 512)  # a turn is short here, and a policy that babbles should not stall
        tools = (self.recipe, self.get, self.craft, self.inventory)
        super().__init__([Tool.from_function(tool, timeout=math.inf) for tool in tools], **kwargs)
        if depth is not None and depth not in DEPTHS.get(self.split, (1, 2, 3, 4, 5)):
            allowed = ", ".join(map(str, DEPTHS.get(self.split, (1, 2, 3, 4, 5))))
            raise ArgumentError(f"depth must be None or one of {allowed} in split {self.split!r}, got {depth!r}")
        self.world_seed = integer("world_seed", world_seed, least=0)
        self.depth = depth
        depths = (depth,) if depth is not None else DEPTHS.get(self.split, (1, 2, 3))
        self.floor = sum(MULTIPLIES_NOTHING[level] for level in depths) / len(depths)

    @property
    def num_tasks(self) -> int:
        """The number of tasks: a million in train, ten thousand in every other split."""
        return NUM_TASKS.get(self.split, NUM_TASKS["test"])

    def make_task(self, index: int) -> Task:
        """Generate task `index`; nothing is stored."""
        return generate_task(self.world_seed, self.split, index, self.depth)

    # ------------------------------------------------------------------ tools

    def recipe(self, item: str) -> ToolResult:
        """Say what one piece of an item is made of."""
        return self._act("recipe", item, 0)

    def get(self, item: str, count: int) -> ToolResult:
        """Get pieces of an item that needs no crafting."""
        return self._act("get", item, count)

    def craft(self, item: str, count: int) -> ToolResult:
        """Craft pieces of an item; what they are made of is used up."""
        return self._act("craft", item, count)

    def inventory(self) -> ToolResult:
        """Say what you have."""
        held = [f"{pieces} {item}" for item, pieces in self._held.items() if pieces]
        return ToolResult(f"You have {', '.join(held) or 'nothing'}.")

    @property
    def _held(self) -> dict[str, int]:
        held: dict[str, int] = self.memory.setdefault("inventory", {})
        return held

    def _act(self, name: str, item: str, count: int) -> ToolResult:
        if self._made:  # by a call before this one in the same turn
            return ToolResult("Error: the task is over.", ok=False)
        text, ok = act(self.task, self._held, name, item, int(count))
        return ToolResult(text, ok=ok, data=progress(self.task, self._held), done=self._made)

    @property
    def _made(self) -> bool:
        return self._held.get(self.task.metadata["goal"], 0) >= self.task.metadata["count"]

    # ------------------------------------------------------------------ judges

    def potential(self) -> float:
        """Return `progress` after the last judged call, from 0 to 1. The argument `shaping` pays its differences."""
        return float(self.memory.get("progress", 0.0))

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float] | End:
        """Return the call's change of `progress`, and `count_noted`.

        The made goal is the end: score 1 without waste, else 0.
        """
        before = self.memory.get("progress", 0.0)
        after = result.data if isinstance(result.data, float) else before
        self.memory["progress"] = after
        amounts = {"progress": after - before} if after != before else {}
        amounts |= self._judge_note(call)
        return End(float(after == 1.0), amounts, self._metrics()) if result.done else amounts

    def _judge_note(self, call: Call) -> dict[str, float]:
        """Compare the count in the thought of a look-up with the pieces that the task needs; an item counts once."""
        if not self.process_weights.get("count_noted"):
            return {}
        item = str((call.arguments or {}).get("item", "")).strip().lower() if call.name == "recipe" else ""
        noted: list[str] = self.memory.get("noted", [])
        recipes, needs = self.task.metadata["recipes"], self.task.metadata["needs"]
        if item not in recipes or item in noted:
            return {}
        count = re.search(rf"(\d{{1,9}})\s+{re.escape(item)}\b", self.episode.thought.lower())
        if count is None:
            return {}
        self.memory["noted"] = [*noted, item]
        return {"count_noted": (1 if int(count[1]) == needs[item] else -1) / len(recipes)}

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Score an answer 0: the goal is not made."""
        return 0.0, self._metrics()

    def _metrics(self) -> dict[str, float]:
        """Return the metrics progress and waste (pieces that the goal cannot use)."""
        return {"progress": progress(self.task, self._held), "waste": float(waste(self.task, self._held))}

    def judge_end(self, score: float, *, answer: str, answer_ok: bool, calls_ok: bool) -> float:
        """Compute equation 6 without the part about answers, because the task needs no answer."""
        return paper_outcome(score, answer_ok=True, calls_ok=calls_ok)

    # ------------------------------------------------------------------ demonstrations

    def demonstration(self, rng: np.random.Generator | None = None, teacher: str | None = None) -> list[str]:
        """Return the turns of a demonstrator on the current task as text.

        Without arguments it is the expert, which is optimal with one call a turn. `teacher` names a fallible one. With
        `rng` only, it is the sloppy demonstrator, for a warm start.

        Raises ValueError for an unknown teacher, and for a fallible one without `rng`.
        """
        who = demonstrator(rng, teacher)
        if rng is None or who == "expert":
            steps = play(self.task)
        else:
            tired = TIRED if who == SLOPPY else 0.0
            steps = play(self.task, rng, MISTAKES[who], tired)
        return [self._turn(*step) for step in steps]

    def shortcut_without_counting(self, rng: np.random.Generator) -> list[str]:
        """Return the turns of a baseline that uses the numbers of every recipe as they are, without multiplication."""
        data = self.task.metadata
        pieces = {i: n for ingredients in data["recipes"].values() for i, n in ingredients.items()}
        pieces[data["goal"]] = data["count"]
        return [self._turn(name, item, pieces[item]) for name, item, _ in play(self.task)] + [self._turn(*GIVE_UP)]

    def _turn(self, name: str, item: str, count: int) -> str:
        if not name:
            return "<answer>stuck</answer>"
        arguments: dict[str, Any] = {} if name == "inventory" else {"item": item}
        note = f"<think>{count} {item}</think>" if name == "recipe" else ""
        return note + self.dialect.tool_call(name, arguments | ({"count": count} if name in ("get", "craft") else {}))

    @staticmethod
    def vocabulary() -> list[str]:
        """Return every word of the worlds, and the digits, which a small tokenizer should keep whole."""
        return ITEMS + UNSEEN_ITEMS + list("0123456789")
