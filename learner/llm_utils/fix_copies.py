"""Keeps functions that stand in several learners equal: `python learner/llm_utils/fix_copies.py [--check]`.

A top-level function or class below the comment

    # Copied from learner/ppo_llm.py

gets the text of the one with the same name in that file. With --check nothing is written; the exit status is 1 where
something differs.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"# Copied from (\S+)\s*$")


def blocks(source: str) -> dict[str, tuple[int, int]]:
    """Name -> (first line, one past the last line) of every top-level function and class, decorators included."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = (first - 1, node.end_lineno or node.lineno)
    return found


def fixed(source: str, root: Path = ROOT) -> tuple[str, list[str]]:
    """The source with its copies up to date, and the names of those that were not.

    Raises ValueError where a mark names something that isn't there.
    """
    lines, outdated = source.splitlines(True), []
    for name, (first, end) in sorted(blocks(source).items(), key=lambda item: -item[1][0]):  # from the bottom up
        mark = MARK.match(lines[first - 1]) if first else None
        if not mark:
            continue
        original = (root / mark[1]).read_text(encoding="utf-8") if (root / mark[1]).is_file() else ""
        if name not in blocks(original):
            raise ValueError(f"{name} is marked as copied from {mark[1]}, where there is no such function or class")
        start, stop = blocks(original)[name]
        text = original.splitlines(True)[start:stop]
        if text != lines[first:end]:
            lines[first:end] = text
            outdated.append(name)
    return "".join(lines), outdated[::-1]


def main(check: bool) -> int:
    """Bring all learners up to date, or only say which are not."""
    status = 0
    for path in sorted((ROOT / "learner").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        new, outdated = fixed(source)
        if outdated:
            status = 1
            print(f"{path.relative_to(ROOT)}: {', '.join(outdated)} {'differs' if check else 'brought up to date'}")
            if not check:
                path.write_text(new, encoding="utf-8")
    return status if check else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
