"""The tasks of Terminal that come with the package: sixteen kinds, drawn from a seed, in Harbor's layout.

The tests of all of them are one program that compares files with the expected ones. If a script of the policy must run
first, `tests/run.sh` runs it: before the tests, in a separate machine.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from agent_r1.task_data.harbor import TerminalTask
from agent_r1.tasks.draw import pick, sample

NUM_TASKS = {"train": 100_000, "test": 1_000, "unseen_kinds": 1_000}
FOLDER = "/app"
NAMES = "ada ben cora dirk edna finn gala hugo ida joel kate leo mara nils olga paul rosa sven tess udo vera".split()
WORDS = "apple brick cloud delta ember frost grain harbor island jungle kettle lemon marble needle orange".split()
CITIES = "Bergen Cadiz Dover Essen Genoa Lille Malmo Porto".split()

TEST = """#!/bin/bash
# run.sh, where there is one, runs what was written, in a place without these tests if the harness has one (RAN=1).
if [ -f /tests/run.sh ] && [ -z "$RAN" ]; then bash /tests/run.sh; fi
mkdir -p /logs/verifier
if python3 /tests/check.py; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""
CHECK = '''"""Compares the files in /app with expected.json: files, modes (octal), and what has to be gone."""

import json
import os
import stat
import sys

expected = json.load(open("/tests/expected.json"))


def same(path, content):
    if os.path.realpath(path) != path or not os.path.isfile(path):
        return False
    with open(path, encoding="utf-8", errors="replace") as file:
        found = file.read()
    if path.endswith(".json"):
        return json.loads(found) == json.loads(content)
    lines = [[line.rstrip() for line in text.strip().splitlines()] for text in (found, content)]
    return lines[0] == lines[1]


wrong = [path for path, content in expected["files"].items() if not same(path, content)]
wrong += [path for path, mode in expected["modes"].items() if stat.S_IMODE(os.lstat(path).st_mode) != int(mode, 8)]
wrong += [path for path in expected["gone"] if os.path.lexists(path)]
print("wrong:", ", ".join(wrong) or "nothing")
sys.exit(bool(wrong))
'''


@dataclass(frozen=True)
class Draft:
    """The draft of a task by one kind. Paths are relative to /app.

    Attributes:
        instruction: the instruction for the policy.
        start: the initial files.
        steps: the commands that solve it, in order; without the last one it is not solved.
        files: the expected contents at the end. modes: their permissions. gone: files that must not exist.
        run: the command to run before the tests.
    """

    instruction: str
    start: Mapping[str, str | bytes]
    steps: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, str] = field(default_factory=dict)
    gone: Sequence[str] = ()
    run: str = ""


def _lines(lines: Iterable[Any]) -> str:
    return "".join(f"{line}\n" for line in lines)


def count_lines(rng: np.random.Generator) -> Draft:
    word = pick(rng, ("ERROR", "WARNING", "TIMEOUT"))
    levels = [word, "INFO", "DEBUG"]
    logs = {
        f"logs/{name}.log": _lines(f"{pick(rng, levels)} {pick(rng, WORDS)}" for _ in range(int(rng.integers(8, 20))))
        for name in sample(rng, NAMES, 3)
    }
    logs[f"logs/{pick(rng, WORDS)}.txt"] = f"{word} in a text\n" * 3
    number = sum(text.count(word) for path, text in logs.items() if path.endswith(".log"))
    return Draft(
        f"Count the lines with the word {word} in all files of logs/ that end in .log. Write the number to count.txt.",
        logs,
        [f"cat logs/*.log | grep {word} > /tmp/found; wc -l < /tmp/found", "wc -l < /tmp/found > count.txt"],
        {"count.txt": str(number)},
    )


def sum_column(rng: np.random.Generator) -> Draft:
    rows = [(pick(rng, CITIES[:4]), pick(rng, WORDS), int(rng.integers(1, 500))) for _ in range(20)]
    city = rows[0][0]
    return Draft(
        f"sales.csv has the columns city, item and amount. Write the sum of amount over the rows of {city} to sum.txt.",
        {"sales.csv": "city,item,amount\n" + _lines(",".join(map(str, row)) for row in rows)},
        ["head -3 sales.csv", f"awk -F, '$1 == \"{city}\" {{s += $3}} END {{print s}}' sales.csv > sum.txt"],
        {"sum.txt": str(sum(amount for place, _, amount in rows if place == city))},
    )


def filter_json(rng: np.random.Generator) -> Draft:
    people = [{"name": name, "age": int(rng.integers(18, 80))} for name in sample(rng, NAMES, 10)]
    limit = sorted(person["age"] for person in people)[5]
    program = (
        "import json; people = json.load(open('people.json')); "
        f"print('\\n'.join(sorted(p['name'] for p in people if p['age'] >= {limit})))"
    )
    return Draft(
        f"people.json is a list of objects with name and age. Write the names of all who are {limit} or older to "
        "names.txt, one a line, in alphabetical order.",
        {"people.json": json.dumps(people, indent=1)},
        [f'python3 -c "{program}" | tee /tmp/names', "cp /tmp/names names.txt"],
        {"names.txt": _lines(sorted(person["name"] for person in people if person["age"] >= limit))},
    )


def rename(rng: np.random.Generator) -> Draft:
    names, texts = sample(rng, WORDS, 4), sample(rng, WORDS, 4)
    old, new = pick(rng, ((".txt", ".md"), (".jpeg", ".jpg"), (".htm", ".html")))
    start = {f"notes/{name}{old}": text + "\n" for name, text in zip(names, texts, strict=True)}
    return Draft(
        f"Rename every file in notes/ that ends in {old}, so that it ends in {new}. Leave other files as they are.",
        start | {"notes/keep.cfg": "x=1\n"},
        ["ls notes", f'for f in notes/*{old}; do mv "$f" "${{f%{old}}}{new}"; done'],
        {path.removesuffix(old) + new: text for path, text in start.items()} | {"notes/keep.cfg": "x=1\n"},
        gone=list(start),
    )


def unpack(rng: np.random.Generator) -> Draft:
    files = {f"{pick(rng, WORDS)}/{name}.txt": pick(rng, WORDS) + "\n" for name in sample(rng, NAMES, 4)}
    buffer = io.BytesIO()
    with gzip.GzipFile("", "wb", 6, buffer, mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return Draft(
        "Unpack bundle.tar.gz into the folder out/, and write the number of files that it has to count.txt.",
        {"bundle.tar.gz": buffer.getvalue()},
        ["mkdir out && tar xzf bundle.tar.gz -C out", "find out -type f | wc -l > count.txt"],
        {f"out/{path}": text for path, text in files.items()} | {"count.txt": str(len(files))},
    )


def permissions(rng: np.random.Generator) -> Draft:
    scripts = {f"bin/{name}.sh": f"echo {name}\n" for name in sample(rng, WORDS, 3)}
    keys = {f"keys/{name}.key": f"{pick(rng, WORDS)}\n" for name in sample(rng, NAMES, 3)}
    return Draft(
        "Make the scripts in bin/ executable for everybody (mode 755), and let nobody but the owner read and write "
        "the files in keys/ (mode 600).",
        scripts | keys,
        ["chmod 755 bin/*.sh", "chmod 600 keys/*.key"],
        scripts | keys,
        dict.fromkeys(scripts, "755") | dict.fromkeys(keys, "600"),
    )


def replace_text(rng: np.random.Generator) -> Draft:
    old, new = (f"{city.lower()}.example.com" for city in sample(rng, CITIES, 2))
    files = {
        f"config/{folder}{name}.conf": f"host = {old}\nport = {int(rng.integers(1000, 9999))}\nbackup = {old}\n"
        for folder, name in zip(("", "sub/", "sub/deep/"), sample(rng, WORDS, 3), strict=True)
    }
    return Draft(
        f"Replace {old} by {new} in all files below config/, as often as it occurs.",
        files,
        [f"grep -rl '{old}' config", f"grep -rl '{old}' config | xargs sed -i 's/{old}/{new}/g'"],
        {path: text.replace(old, new) for path, text in files.items()},
    )


def unique(rng: np.random.Generator) -> Draft:
    names = [pick(rng, NAMES) for _ in range(25)]
    return Draft(
        "Write the lines of names.txt to unique.txt, each once, in alphabetical order.",
        {"names.txt": _lines(names)},
        ["wc -l names.txt", "sort -u names.txt > unique.txt"],
        {"unique.txt": _lines(sorted(set(names)))},
    )


def most_frequent(rng: np.random.Generator) -> Draft:
    addresses = [f"10.0.{rng.integers(256)}.{rng.integers(256)}" for _ in range(5)]
    counts = sample(rng, range(2, 12), 5)
    hits = [address for address, count in zip(addresses, counts, strict=True) for _ in range(count)]
    lines = [f"{hits[i]} GET /{pick(rng, WORDS)} {pick(rng, (200, 404))}" for i in rng.permutation(len(hits))]
    ((top, number),) = Counter(hits).most_common(1)
    return Draft(
        "Every line of access.log begins with an address. Write the most frequent address and how often it occurs to "
        "top.txt, with a space in between.",
        {"access.log": _lines(lines)},
        [
            "cut -d' ' -f1 access.log | sort | uniq -c | sort -rn > /tmp/counts; head -2 /tmp/counts",
            "awk 'NR == 1 {print $2, $1}' /tmp/counts > top.txt",
        ],
        {"top.txt": f"{top} {number}"},
    )


def mend_python(rng: np.random.Generator) -> Draft:
    right, wrong = "total += n", pick(rng, ("total = n", "total -= n", "total += 1"))
    limit = int(rng.integers(10, 40))
    program = (
        "import sys\n\ntotal = 0\nfor line in open(sys.argv[1]):\n    n = int(line)\n"
        f"    if n > {limit}:\n        {wrong}\nprint(total)\n"
    )
    tests = [rng.integers(1, 100, 8).tolist() for _ in range(2)]
    return Draft(
        f"total.py should print the sum of those numbers in a file (one a line) that are greater than {limit}: "
        "python3 total.py FILE. It is wrong. Mend it.",
        {"total.py": program, "example.txt": _lines(rng.integers(1, 100, 6).tolist())},
        ["cat total.py; python3 total.py example.txt", f"sed -i 's/{wrong}/{right}/' total.py"],
        {f"ran/{i}": str(sum(n for n in numbers if n > limit)) for i, numbers in enumerate(tests)},
        run="mkdir -p ran\n"
        + "".join(
            f"printf '%s\\n' {' '.join(map(str, numbers))} > ran/in\npython3 total.py ran/in > ran/{i}\n"
            for i, numbers in enumerate(tests)
        ),
    )


def mend_shell(rng: np.random.Generator) -> Draft:
    ending = pick(rng, ("txt", "log", "csv"))
    names = [f"{a} {b}.{ending}" for a, b in zip(sample(rng, WORDS, 3), sample(rng, NAMES, 3), strict=True)]
    script = f"#!/bin/bash\nmkdir -p $2\nfor f in $1/*.{ending}; do\n  cp $f $2/\ndone\n"
    expected = {f"ran/to here/{name}": f"{i}\n" for i, name in enumerate(names)}
    return Draft(
        f"backup.sh FROM TO copies the files of a folder that end in .{ending} to another one. It fails where names "
        "have spaces. Mend it.",
        {"backup.sh": script, f"data/{names[0]}": "example\n"},
        [
            "cat backup.sh; bash backup.sh data /tmp/copy",
            'sed -i \'s|cp $f $2/|cp "$f" "$2"/|; s|mkdir -p $2|mkdir -p "$2"|; s|in $1/|in "$1"/|\' backup.sh',
        ],
        expected,
        run="mkdir -p 'ran/from here'\n"
        + "".join(f"echo {i} > 'ran/from here/{name}'\n" for i, name in enumerate(names))
        + "bash backup.sh 'ran/from here' 'ran/to here'\n",
    )


def join_tables(rng: np.random.Generator) -> Draft:
    people = dict(zip(sample(rng, range(10, 99), 6), sample(rng, NAMES, 6), strict=True))
    orders = [(pick(rng, list(people)), pick(rng, WORDS)) for _ in range(8)]
    return Draft(
        "people.csv has the columns id,name and orders.csv the columns id,item, both without a header. Write a line "
        "name,item for every order to joined.csv, in alphabetical order.",
        {
            "people.csv": _lines(f"{number},{name}" for number, name in people.items()),
            "orders.csv": _lines(f"{number},{item}" for number, item in orders),
        },
        [
            "sort people.csv > /tmp/p; sort orders.csv > /tmp/o",
            "join -t, -o 1.2,2.2 /tmp/p /tmp/o | LC_ALL=C sort > joined.csv",
        ],
        {"joined.csv": _lines(sorted(f"{people[number]},{item}" for number, item in orders))},
    )


def clean_up(rng: np.random.Generator) -> Draft:
    places = ["", "src/", "src/deep/"]
    names = sample(rng, WORDS, 8)
    count = int(rng.integers(2, 6))
    waste = {f"{places[i % 3]}{name}.tmp": "x\n" for i, name in enumerate(names[:count])}
    kept = {f"{place}{name}.dat": f"{name}\n" for place, name in zip(places, names[5:], strict=True)}
    return Draft(
        "Delete all files that end in .tmp, here and in all folders below, and nothing else. Write how many these "
        "were to deleted.txt.",
        waste | kept,
        ["find . -name '*.tmp' | wc -l > deleted.txt", "find . -name '*.tmp' -delete"],
        kept | {"deleted.txt": str(len(waste))},
        gone=list(waste),
    )


def to_json(rng: np.random.Generator) -> Draft:
    rows = list(zip(sample(rng, NAMES, 5), (pick(rng, CITIES) for _ in range(5)), strict=True))
    program = "import csv, json; json.dump(list(csv.DictReader(open('people.csv'))), open('people.json', 'w'))"
    return Draft(
        "Convert people.csv to people.json: a list of objects, one for each row, with the header's names as keys.",
        {"people.csv": "name,city\n" + _lines(",".join(row) for row in rows)},
        ["cat people.csv", f'python3 -c "{program}"'],
        {"people.json": json.dumps([{"name": name, "city": city} for name, city in rows])},
    )


def largest(rng: np.random.Generator) -> Draft:
    sizes = sample(rng, range(50, 900), 6)
    places, names = ["", "a/", "b/"] * 2, sample(rng, WORDS, 6)
    paths = [f"files/{place}{name}.bin" for place, name in zip(places, names, strict=True)]
    return Draft(
        "Write the path of the largest file below files/, as seen from here (it begins with files/), to largest.txt.",
        {path: "x" * size for path, size in zip(paths, sizes, strict=True)},
        ["find files -type f -printf '%s %p\\n' | sort -n | tail -1", "find files -type f -printf '%s %p\\n' | sort -n "
         "| tail -1 | cut -d' ' -f2 > largest.txt"],  # fmt: skip
        {"largest.txt": paths[sizes.index(max(sizes))]},
    )


def settings(rng: np.random.Generator) -> Draft:
    keys = sample(rng, WORDS, 5)
    values = [int(rng.integers(1, 100)) for _ in range(6)]
    lines = [f"{key}={value}" for key, value in zip(keys[:4], values[:4], strict=True)]
    changed = [*lines[:1], f"{keys[1]}={values[4] + 100}", *lines[2:], f"{keys[4]}={values[5]}"]
    return Draft(
        f"In settings.env set {keys[1]} to {values[4] + 100}, and add {keys[4]}, {values[5]}, at the end.",
        {"settings.env": _lines(lines)},
        [f"sed -i 's/^{keys[1]}=.*/{keys[1]}={values[4] + 100}/' settings.env; cat settings.env",
         f"echo {keys[4]}={values[5]} >> settings.env"],  # fmt: skip
        {"settings.env": _lines(changed)},
    )


KINDS: dict[str, Callable[[np.random.Generator], Draft]] = {
    kind.__name__: kind
    for kind in (
        count_lines, sum_column, filter_json, rename, unpack, permissions, replace_text, unique, most_frequent,
        mend_python, mend_shell, join_tables, clean_up,
    )
}  # fmt: skip
UNSEEN_KINDS = {kind.__name__: kind for kind in (to_json, largest, settings)}


@lru_cache(maxsize=256)  # the episodes of a group have the same task
def generate_task(seed: int, split: str, index: int) -> TerminalTask:
    """Generate task `index` of the family `seed`: train and test (thirteen kinds, in turn), unseen_kinds (three)."""
    rng = np.random.default_rng([seed, list(NUM_TASKS).index(split), index])
    kinds = UNSEEN_KINDS if split == "unseen_kinds" else KINDS
    kind = list(kinds)[index % len(kinds)]
    draft = kinds[kind](rng)
    expected = {
        "files": {f"{FOLDER}/{path}": text for path, text in draft.files.items()},
        "modes": {f"{FOLDER}/{path}": mode for path, mode in draft.modes.items()},
        "gone": [f"{FOLDER}/{path}" for path in draft.gone],
    }
    tests = {"test.sh": TEST, "check.py": CHECK, "expected.json": json.dumps(expected, indent=1)}
    if draft.run:
        tests["run.sh"] = draft.run
    return TerminalTask(
        id=f"{kind}-{split}-{seed}-{index}",
        instruction=draft.instruction,
        folder=FOLDER,
        start={
            f"{FOLDER}/{path}": (0o644, content.encode() if isinstance(content, str) else content)
            for path, content in draft.start.items()
        },
        tests={name: text.encode() for name, text in tests.items()},
        solution=_lines(["#!/bin/bash", *draft.steps]),
        steps=tuple(draft.steps),
    )
