"""Digests, to compare two versions of the code: a table, a file, and what differs from another file."""

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from typing import Any


class LeftOut(Exception):
    """What cannot be digested here: its data or sandbox is missing."""


def digest(content: Any) -> str:
    """Of JSON in which arrays and numbers of numpy may stand, 16 hex digits."""
    text = json.dumps(content, sort_keys=True, default=lambda value: value.tolist())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compare(row: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Whether a row is as before, and the first parts of it that are not."""
    if before is None or row.get("digest") == before.get("digest"):
        return "not there before" if before is None else "equal"
    changed = [part for part, one in row.get("parts", {}).items() if one != before.get("parts", {}).get(part)]
    return f"DIFFERENT in {len(changed)}: {', '.join(changed[:6])}"


def measure(take: Callable[[str], dict[str, Any]], args: argparse.Namespace, unit: str) -> int:
    """Digest each name: a line of a table, and a file of all. Returns how many differ from those of `--against`."""
    before = json.loads(args.against.read_text()) if args.against else None
    rows, wrong = {}, 0
    print(f"| | {unit} | digest | seconds | |\n|---|---|---|---|---|")
    for name in args.names:
        begun = time.monotonic()
        try:
            row = take(name)
        except LeftOut as error:
            row = {"count": 0, "digest": f"left out: {error}"}
        except Exception as error:
            row = {"count": 0, "digest": f"failed: {type(error).__name__}: {error}"}
        rows[name] = row | {"seconds": round(time.monotonic() - begun, 1)}
        verdict = compare(row, before.get(name)) if before is not None else ""
        wrong += verdict not in ("", "equal") or bool(row.get("vector")) or row["digest"].startswith("failed")
        print(f"| {name} | {row['count']} | {row['digest']} | {rows[name]['seconds']} | {verdict} |", flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return wrong
