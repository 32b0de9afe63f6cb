"""The databases and questions of SQLWorld: two or three tables with individual names in every task, and a query.

Every task has two databases with the same tables and different rows. An answer must return the gold query's result on
both, so a constant is never right.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from functools import lru_cache
from typing import Any

import numpy as np

from agent_r1.tasks.draw import pick, sample
from agent_r1.tool_env import Task

SPLITS = ("train", "test", "more_tables", "unseen_words", "other_phrasings")
NUM_TASKS = {"train": 1_000_000, "test": 10_000}

THEMES = [
    ("shop", "lamp"), ("team", "player"), ("farm", "goat"), ("ship", "sailor"), ("school", "pupil"), ("club", "singer"),
]  # fmt: skip
UNSEEN_THEMES = [("castle", "guard"), ("bakery", "cake")]
NAMES = (
    "Abel Ada Ben Bram Cleo Cora Dora Dirk Edna Emil Fay Finn Gala Gus Hana Hugo Ida Ivo Jana Joel Kate Kurt Lena Leo "
    "Mara Max Nina Nils Olga Otto Pia Paul Quin Rosa Rolf Sara Sven Tess Theo Ute Udo Vera Vito Wanda Wim Xenia Yara "
    "Yuri Zoe Zeno"
).split()
TOWNS = "Arlen Bovik Corma Delft Ebron Fosta".split()
REGIONS = "North South East West".split()
CATEGORIES = {
    "colour": "red blue green black white".split(),
    "kind": "old new plain small large".split(),
    "grade": "first second third fourth fifth".split(),
}
NUMBERS = {
    "age": ("age", "years"),
    "price": ("price", "cost"),
    "weight": ("weight", "mass"),
    "score": ("score", "points"),
}
NAME_COLUMNS, TOWN_COLUMNS, REGION_COLUMNS = ("name", "title", "label"), ("town", "city", "place"), ("region", "area")
AGGREGATES = {"MAX": "highest", "MIN": "lowest", "SUM": "total", "AVG": "average"}
OPPOSITE = {"MAX": "MIN", "MIN": "MAX", "SUM": "AVG", "AVG": "SUM", "DESC": "ASC", "ASC": "DESC", "COUNT": "MAX"}

KINDS = ("count", "value", "which", "list", "area", "group", "most", "over")
MISTAKES = ("condition", "number", "aggregate", "key", "extreme")
PHRASINGS = {
    "count": "How many {child}s have {category} {value}?",
    "value": "What is the {aggregate} {number} of the {child}s with {category} {value}?",
    "which": "Which {child} has the {extreme} {number}?",
    "list": "Name the {child}s of the {parent} {owner}.",
    "area": "What is the {aggregate} {number} of the {child}s of all {parent}s in {place}?",
    "group": "How many {child}s does each {parent} have? Give name and number.",
    "most": "Which {parent} has the most {child}s?",
    "over": "Name the {child}s with {number} over {limit}, the highest {number} first.",
}
OTHER_PHRASINGS = {
    "count": "Count the {child}s whose {category} is {value}.",
    "value": "Take the {child}s with {category} {value}: say their {aggregate} {number}.",
    "which": "I want the name of the {child} with the {extreme} {number}.",
    "list": "The {parent} {owner} has which {child}s?",
    "area": "Say the {aggregate} {number} over the {child}s whose {parent} is in {place}.",
    "group": "For each {parent}, give its name and the number of its {child}s.",
    "most": "Name the {parent} that has more {child}s than all others.",
    "over": "List {child}s by {number}, from high to low, as long as it is over {limit}.",
}


@lru_cache(maxsize=256)  # the episodes of a group have the same task
def generate_task(seed: int, split: str, index: int) -> Task:
    """Generate task `index` of a split of the world family `seed`. The result is cached: do not change it.

    Splits: train and test (two tables), and the zero-shot variants more_tables (three), unseen_words (new topics of
    tables), other_phrasings. `answers`: the gold query. `metadata`: script (SQL that makes the database), copy (the
    same with other rows), mode (the comparison of results), kind (of the question), mistakes (queries with one error
    and another result), tables, optimal_turns (2: column names are drawn, so a look at the schema is needed).
    """
    rng = np.random.default_rng([seed, SPLITS.index(split), index])
    parent, child = pick(rng, UNSEEN_THEMES if split == "unseen_words" else THEMES)
    kind = "area" if split == "more_tables" else pick(rng, KINDS)
    category, (number, other) = pick(rng, list(CATEGORIES)), sample(rng, list(NUMBERS), 2)
    aggregate = pick(rng, list(AGGREGATES))
    words = {
        "regions": split == "more_tables",
        "c": pick(rng, (child, child + "s", child + "_list")),
        "p": pick(rng, (parent, parent + "s", parent + "_list")),
        "r": pick(rng, ("region", "regions", "region_list")),
        "c_name": pick(rng, NAME_COLUMNS),
        "p_name": pick(rng, NAME_COLUMNS),
        "key": pick(rng, (parent + "_id", parent + "_no", "of_" + parent)),
        "p_place": pick(rng, REGION_COLUMNS if split == "more_tables" else TOWN_COLUMNS),
        "category": category,
        "number": pick(rng, NUMBERS[number]),
        "other": pick(rng, NUMBERS[other]),
        "aggregate": aggregate,
        "extreme": pick(rng, ("DESC", "ASC")),
        "value": pick(rng, CATEGORIES[category]),
        "place": pick(rng, REGIONS if split == "more_tables" else TOWNS),
        "limit": int(rng.integers(30, 70)),
        "owner": pick(rng, NAMES),
    }
    gold = write_query(kind, words)
    wrong = [write_query(kind, words, mistake) for mistake in MISTAKES]
    mode = "ordered" if kind == "over" else "rows"
    counted = gold  # for the owner with the most, also the number, to see ties
    if kind == "most":
        gold, *wrong = (_without_number(query, words) for query in (gold, *wrong))
    while True:  # repeats a few times at most
        scripts = [_script(rng, words), _script(rng, words)]
        results = [_results(script, [counted, gold, *wrong]) for script in scripts]
        mistakes = [query for i, query in enumerate(wrong, 2) if any(result[i] != result[1] for result in results)]
        differ = results[0][1] != results[1][1]  # otherwise a constant would be right
        if mistakes and differ and all(_telling(kind, result[0]) for result in results):
            break
    phrasing = (OTHER_PHRASINGS if split == "other_phrasings" else PHRASINGS)[kind]
    wordings = {"aggregate": AGGREGATES[aggregate], "extreme": {"DESC": "highest", "ASC": "lowest"}[words["extreme"]]}
    return Task(
        id=f"{split}-{seed}-{index}",
        question=phrasing.format(**words | wordings | {"child": child, "parent": parent, "number": number}),
        answers=[gold],
        metadata={
            "script": scripts[0],
            "copy": scripts[1],
            "mode": mode,
            "kind": kind,
            "mistakes": mistakes,
            "tables": [words["p"], words["c"], *([words["r"]] if words["regions"] else [])],
            "optimal_turns": 2,
        },
    )


def write_query(kind: str, words: dict[str, Any], mistake: str = "") -> str:
    """Write the gold query of a kind, or one with a mistake.

    The mistakes are no condition, another number, another aggregate, the wrong key, the opposite order. If the mistake
    does not apply, the result is the gold query.
    """
    w = words | ({"number": words["other"]} if mistake == "number" else {})
    c, p = w["c"], w["p"]
    extreme = OPPOSITE[w["extreme"]] if mistake == "extreme" else w["extreme"]
    order = "ASC" if mistake == "extreme" else "DESC"
    aggregate = OPPOSITE[w["aggregate"]] if mistake == "aggregate" else w["aggregate"]
    joined = f"FROM {c} JOIN {p} ON {c}.{'id' if mistake == 'key' else w['key']} = {p}.id"
    count = f"{p}.{w['p_name']}, {'MAX(' + c + '.id)' if mistake == 'aggregate' else 'COUNT(*)'}"
    place = f"{p}.{w['p_place']} = '{w['place']}'"
    if w["regions"]:
        joined += f" JOIN {w['r']} ON {p}.{w['p_place']} = {w['r']}.id"
        place = f"{w['r']}.name = '{w['place']}'"
    conditions = {
        "count": f"{w['category']} = '{w['value']}'",
        "value": f"{w['category']} = '{w['value']}'",
        "list": f"{p}.{w['p_name']} = '{w['owner']}'",
        "area": place,
        "over": f"{w['number']} > {w['limit']}",
    }
    where = f" WHERE {conditions[kind]}" if kind in conditions and mistake != "condition" else ""
    return {
        "count": f"SELECT {'MAX(id)' if mistake == 'aggregate' else 'COUNT(*)'} FROM {c}{where}",
        "value": f"SELECT {aggregate}({w['number']}) FROM {c}{where}",
        "which": f"SELECT {w['c_name']} FROM {c} ORDER BY {w['number']} {extreme} LIMIT 1",
        "list": f"SELECT {c}.{w['c_name']} {joined}{where}",
        "area": f"SELECT {aggregate}({c}.{w['number']}) {joined}{where}",
        "group": f"SELECT {count} {joined} GROUP BY {p}.id",
        "most": f"SELECT {count} {joined} GROUP BY {p}.id ORDER BY COUNT(*) {order}",
        "over": f"SELECT {w['c_name']} FROM {c}{where} ORDER BY {w['number']} {order}",
    }[kind]


def _without_number(query: str, words: dict[str, Any]) -> str:
    """Select only the name of the one with the most, without the number."""
    name = f"{words['p']}.{words['p_name']}"
    return f"SELECT {name} " + query[query.index("FROM") :] + " LIMIT 1"


def _script(rng: np.random.Generator, w: dict[str, Any]) -> str:
    """Write SQL that makes a database."""
    parents, children = int(rng.integers(4, 7)), int(rng.integers(12, 21))
    owners = sample(rng, [name for name in NAMES if name != w["owner"]], parents)
    owners[int(rng.integers(parents))] = w["owner"]
    places = [pick(rng, range(1, 5) if w["regions"] else TOWNS) for _ in owners]
    asked = REGIONS.index(w["place"]) + 1 if w["regions"] else w["place"]
    places[int(rng.integers(parents))] = asked
    keys = [*range(1, parents + 1), *(int(rng.integers(1, parents + 1)) for _ in range(children - parents))]
    values = [pick(rng, CATEGORIES[w["category"]]) for _ in range(children)]
    values[int(rng.integers(children))] = w["value"]
    numbers = [rng.choice(np.arange(1, 100), children, replace=False).tolist() for _ in range(2)]
    names, keys = sample(rng, NAMES, children), sample(rng, keys, children)
    rows = zip(range(1, children + 1), names, keys, values, *numbers, strict=True)
    place_type = f"INTEGER REFERENCES {w['r']}(id)" if w["regions"] else "TEXT"
    statements = [
        f"CREATE TABLE {w['p']} (id INTEGER PRIMARY KEY, {w['p_name']} TEXT, {w['p_place']} {place_type})",
        f"CREATE TABLE {w['c']} (id INTEGER PRIMARY KEY, {w['c_name']} TEXT, {w['key']} INTEGER "
        f"REFERENCES {w['p']}(id), {w['category']} TEXT, {w['number']} INTEGER, {w['other']} INTEGER)",
        _insert(w["p"], zip(range(1, parents + 1), owners, places, strict=True)),
        _insert(w["c"], rows),
    ]
    if w["regions"]:
        statements.insert(0, f"CREATE TABLE {w['r']} (id INTEGER PRIMARY KEY, name TEXT)")
        statements.append(_insert(w["r"], enumerate(REGIONS, 1)))
    return ";\n".join(statements) + ";"


def _insert(table: str, rows: Any) -> str:
    return f"INSERT INTO {table} VALUES " + ", ".join(str(tuple(row)) for row in rows)


def _results(script: str, queries: list[str]) -> list[list[Any]]:
    """Return the results of the generator's queries, without limits; rows are sorted unless a query orders them."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(script)
    results = [connection.execute(query).fetchall() for query in queries]
    connection.close()
    return [rows if "ORDER BY" in query else sorted(rows) for query, rows in zip(queries, results, strict=True)]


def _telling(kind: str, rows: list[Any]) -> bool:
    """Return whether a gold result is informative: it is not empty, and has no tie if the question asks for one row."""
    if kind == "most":
        counts = Counter(count for _, count in rows)
        return counts[max(counts)] == 1 and counts[min(counts)] == 1
    return bool(rows) and rows[0][0] is not None
