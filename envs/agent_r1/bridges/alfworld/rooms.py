"""ALFWorld's six types of tasks in rooms that are drawn from the floor plans and tables of its wheel.

The official games come from rooms in a 3D simulator. Here a floor plan gives furniture and things, and the positions of
the things are drawn from ALFWorld's table of allowed places.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from agent_r1.bridges.bridge import check_version
from agent_r1.bridges.textworld import find_textworld
from agent_r1.tasks.draw import pick, sample

KINDS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
"""The six types of tasks, by ALFWorld's names."""
MAKER = {  # kind of task -> where the thing is changed, and the table of allowed things
    "pick_clean_then_place_in_recep": ("SinkBasin", "Cleanable"),
    "pick_heat_then_place_in_recep": ("Microwave", "Heatable"),
    "pick_cool_then_place_in_recep": ("Fridge", "Coolable"),
}
LAMP = "DeskLamp"
MOST_THINGS = 30  # the official rooms have as many, and time grows with them
ALWAYS = ("KnifeType", "ButterKnifeType")  # the domain names them
ACTORS = ("SinkBasinType", "MicrowaveType", "FridgeType")
SPELLING = str.maketrans({"-": "_minus_", "|": "_bar_", "+": "_plus_", ".": "_dot_", ",": "_comma_"})


def draw_game(kind: str, seed: int, split: str) -> dict[str, Any]:
    """Draw a game in the form of ALFWorld's files: a function of its arguments."""
    alfworld = find_alfworld()
    from alfworld.gen import constants
    from alfworld.gen.goal_library import gdict

    rng = np.random.default_rng([seed, KINDS.index(kind)])
    unseen = split == "valid_unseen"
    scenes = [
        scene
        for room in sorted(constants.GOALS_VALID[kind])
        for scene in constants.SCENE_TYPE[room]
        if (scene in constants.TEST_SCENE_NUMBERS) == unseen
    ]
    goal: tuple[str, str] | None = None
    while goal is None:  # some rooms lack the things of a type
        furniture, kinds_of_things = floor_plan(pick(rng, scenes))
        goal = draw_goal(rng, kind, furniture, kinds_of_things)
    thing, place = goal
    things = draw_things(rng, kind, thing, place, furniture, kinds_of_things)
    lamp = LAMP if kind == "look_at_obj_in_light" else ""
    names = {"obj": thing, "recep": place, "toggle": lamp, "mrecep": ""}
    sentence = pick(rng, gdict[kind]["templates"]).format(**{name: value.lower() for name, value in names.items()})
    problem = write_problem(furniture, things, gdict[kind]["pddl"].format(**names).replace("#", "-"))
    domain, grammar = (Path(path).read_text() for path in (alfworld.ALFRED_PDDL_PATH, alfworld.ALFRED_TWL2_PATH))
    return {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL", sentence),
        "pddl_problem": problem,
        "walkthrough": find_way(kind, thing, place, furniture, things),
    }


def find_way(kind: str, thing: str, place: str, furniture: Any, things: list[tuple[str, str, str]]) -> list[list[str]]:
    """Return commands that solve the task, each a verb and the ids of things, with knowledge of all positions."""
    from alfworld.gen import constants

    shut = {name for one, name in furniture if one in constants.OPENABLE_CLASS_LIST}
    found = [(name, where) for one, name, where in things if one == thing]
    way: list[list[str]] = []

    def visit(where: str, open_it: bool = True) -> None:
        if not way or ["go to {}", where] != next((step for step in way[::-1] if step[0] == "go to {}"), None):
            way.append(["go to {}", where])
        if open_it and where in shut:
            shut.remove(where)
            way.append(["open {}", where])

    goal = next(name for one, name in furniture if one == place)
    for name, where in found[: 2 if kind == "pick_two_obj_and_place" else 1]:
        visit(where)
        way.append(["take {} from {}", name, where])
        if kind in MAKER:
            maker = next(one_name for one, one_name in furniture if one == MAKER[kind][0])
            visit(maker, open_it=False)
            way.append([f"{kind.split('_')[1]} {{}} with {{}}", name, maker])
        if kind == "look_at_obj_in_light":
            lamp, desk = next((name, where) for one, name, where in things if one == LAMP)
            visit(desk)
            way.append(["use {}", lamp])
        else:
            visit(goal)
            way.append(["move {} to {}", name, goal])
    return way


@lru_cache(maxsize=128)
def floor_plan(scene: int) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return the furniture of a room as (type, id), and the kinds of its things."""
    from alfworld import gen
    from alfworld.gen import constants

    layouts = Path(gen.__path__[0], "layouts")
    kinds = json.loads((layouts / f"FloorPlan{scene}-objects.json").read_text())
    known = json.loads((layouts / f"FloorPlan{scene}-openable.json").read_text())
    stands = set(constants.VAL_RECEPTACLE_OBJECTS) - set(constants.MOVABLE_RECEPTACLES)
    furniture = []
    for name in sorted(known):
        kind = name.split("|")[-1] if name.endswith("Basin") else name.split("|")[0]
        furniture.append((kind, name))
    for kind in sorted(set(kinds) & stands - {kind for kind, _ in furniture}):  # the plan lists them
        furniture += [
            (kind, f"{kind}|+00.00|+00.00|+{number:02d}.00") for number in range(4 if "Burner" in kind else 1)
        ]
    portable = set().union(*constants.VAL_RECEPTACLE_OBJECTS.values()) - stands
    return (
        tuple(one for one in furniture if one[0] in stands),
        tuple(sorted(kind for kind in kinds if kind in portable or kind == LAMP)),
    )


def draw_goal(rng: np.random.Generator, kind: str, furniture: Any, things: tuple[str, ...]) -> tuple[str, str] | None:
    """Draw the wanted thing and its target; None if the room has none for this type of task."""
    holds = tables()
    stands = sorted({one for one, _ in furniture})
    maker, table = MAKER.get(kind, ("", ""))
    if (maker and maker not in stands) or (kind == "look_at_obj_in_light" and not lamp_places(stands, things)):
        return None
    wanted = [thing for thing in things if thing != LAMP and (not table or thing in holds[table])]
    goals = [
        (thing, place)
        for thing in wanted
        for place in stands
        # it lies elsewhere at first
        if place != maker and thing in holds[place] and any(thing in holds[one] for one in stands if one != place)
    ]
    return pick(rng, goals) if goals else None


def lamp_places(stands: list[str], things: tuple[str, ...]) -> list[str]:
    """Return the furniture that may hold a lamp."""
    return [place for place in ("Desk", "SideTable", "Dresser", "DiningTable") if place in stands and LAMP in things]


def draw_things(
    rng: np.random.Generator, kind: str, thing: str, place: str, furniture: Any, kinds_of_things: tuple[str, ...]
) -> list[tuple[str, str, str]]:
    """Draw the positions of things: (type, id, id of the furniture). No wanted thing is at the target."""
    holds = tables()
    stands = sorted({one for one, _ in furniture})
    ids = {stand: [name for one, name in furniture if one == stand] for stand in stands}
    counts = {thing: int(rng.integers(2 if kind == "pick_two_obj_and_place" else 1, 4))}
    others = [one for one in kinds_of_things if one not in (thing, LAMP)]
    for one in sample(rng, others, len(others)):
        if sum(counts.values()) < MOST_THINGS:
            counts[one] = int(rng.integers(1, 3))
    found: list[tuple[str, str, str]] = []
    for one, count in sorted(counts.items()):
        places = [
            name for stand in stands if one in holds[stand] and (one, stand) != (thing, place) for name in ids[stand]
        ]
        for number in range(count if places else 0):
            found.append((one, f"{one}|+00.00|+{len(found):02d}.00|+{number:02d}.00", pick(rng, places)))
    if kind == "look_at_obj_in_light":
        found.append(
            (LAMP, f"{LAMP}|+00.00|+00.00|+00.00", pick(rng, ids[pick(rng, lamp_places(stands, kinds_of_things))]))
        )
    return found


@cache
def tables() -> Mapping[str, frozenset[str]]:
    """Return the allowed contents of furniture, and the things that can be cleaned, heated, cooled and sliced."""
    from alfworld.gen import constants

    both = {**constants.VAL_RECEPTACLE_OBJECTS, **constants.VAL_ACTION_OBJECTS}
    return {name: frozenset(values) for name, values in both.items()}


def write_problem(furniture: Any, things: list[tuple[str, str, str]], goal: str) -> str:
    """Write the room in ALFWorld's PDDL: each piece of furniture has a place, and the agent starts in none."""
    from alfworld.gen import constants

    holds = tables()
    spots = {name: f"loc|{number}|0|0|0" for number, (_, name) in enumerate(furniture)}
    stands, kinds = sorted({one for one, _ in furniture}), sorted({one for one, _, _ in things})
    names = {
        "agent": ["agent1"],
        "location": ["loc|99|0|0|0", *spots.values()],
        "receptacle": [name for _, name in furniture],
        "object": [name for _, name, _ in things],
        "rtype": list(dict.fromkeys([*(f"{one}Type" for one in stands), *ACTORS])),
        "otype": list(dict.fromkeys([*(f"{one}Type" for one in kinds), *ALWAYS])),
    }
    facts = ["atLocation agent1 loc|99|0|0|0"]
    for kind, name in furniture:
        facts += [f"receptacleType {name} {kind}Type", f"receptacleAtLocation {name} {spots[name]}"]
        facts += [f"openable {name}"] if kind in constants.OPENABLE_CLASS_LIST else []
    facts += [f"canContain {one}Type {kind}Type" for one in stands for kind in kinds if kind in holds[one]]
    for kind, name, where in things:
        facts += [f"objectType {name} {kind}Type", f"inReceptacle {name} {where}"]
        facts += [f"objectAtLocation {name} {spots[where]}"]
        facts += [f"toggleable {name}"] if kind == LAMP else [f"pickupable {name}"]
        facts += [f"isReceptacleObject {name}"] if kind in constants.MOVABLE_RECEPTACLES else []
        for table in ("Cleanable", "Heatable", "Coolable", "Sliceable"):
            facts += [f"{table.lower()} {name}"] if kind in holds[table] else []
    objects = "\n        ".join(f"{name.translate(SPELLING)} - {kind}" for kind, some in names.items() for name in some)
    init = "\n        ".join(f"({fact.translate(SPELLING)})" for fact in facts)
    return (
        "(define (problem room)\n    (:domain alfred)\n    (:objects\n        "
        f"{objects}\n    )\n    (:init\n        (= (total-cost) 0)\n        {init}\n    )\n{goal}"
    )


@cache
def find_alfworld() -> Any:
    """Return the package. Raises ImportError if it or a dependency is not installed; warns of a version that was not
    checked."""
    there = os.environ.get("ALFWORLD_DATA")
    try:
        import alfworld.info  # sets ALFWORLD_DATA, and makes that folder
        import fast_downward  # noqa: F401

        find_textworld()
    except ImportError as error:
        raise ImportError('ALFWorld needs alfworld: pip install "agent-r1[alfworld]"') from error
    finally:
        if there is None:
            os.environ.pop("ALFWORLD_DATA", None)
    check_version("alfworld", "0.4")
    check_version("fast-downward-textworld", "20.6")
    return alfworld.info
