"""Printer of the episodes of a run, or of a file that `RecordTrajectories` wrote.

    python -m agent_r1.show runs/RUN                          the last three episodes
    python -m agent_r1.show runs/RUN --episodes all --task t7
    python -m agent_r1.show trajectories.jsonl --iteration 20 --failed
    python -m agent_r1.show runs/RUN --episodes 1 --raw       the tokens as the model saw them
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_r1 import interrupts
from agent_r1.text.tokenizers import Tokenizer, load_tokenizer
from agent_r1.trajectories import SAMPLED, UNREAD, raw_transcript, say, transcript
from agent_r1_tools.bounded import TooLargeError, bounded_lines
from agent_r1_tools.text import printable

NO_EPISODES = (
    "this run has no recorded episodes (sft_llm.py records none; other learners record some after each iteration)"
)

OTHER_TOKENIZER = "name the tokenizer of the run with --tokenizer NAME_OR_FOLDER"


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, and report the number of lines that are not rows. Raises SystemExit without a file."""
    if path.is_dir():
        folder, path = path, path / "trajectories.jsonl"
        if not path.is_file() or not path.stat().st_size:
            raise SystemExit(printable(f"{folder}: {NO_EPISODES}"))
    damaged = 0
    try:
        with path.open("rb") as file:
            for line in bounded_lines(file):
                try:
                    row = json.loads(line)
                    row["tokens"], row["task_index"]  # noqa: B018
                except (ValueError, LookupError, TypeError, RecursionError):
                    damaged += 1
                else:
                    yield row
    except TooLargeError as error:
        raise SystemExit(printable(f"{path}: {error}")) from None
    except OSError as error:
        error_message = f"{path} cannot be read: {error.strerror}; give a run's folder or a file of rows"
        raise SystemExit(printable(error_message)) from None
    if damaged:
        print(printable(f"{path}: {damaged} lines are not rows"), file=sys.stderr)


def wanted(row: Mapping[str, Any], iteration: int | None, task: str | None, failed: bool) -> bool:
    """Return whether a row passes the filters."""
    if iteration is not None and row.get("iteration") != iteration:
        return False
    if task is not None and task not in (row.get("task_id"), str(row["task_index"])):
        return False
    return not (failed and row.get("is_success"))


def headline(row: Mapping[str, Any]) -> str:
    """Format one line with the episode's task and its end."""
    turns, earned = len(row.get("turns") or ()), sum(row.get("turn_rewards") or row.get("rewards") or ())
    end = "terminated" if row.get("terminated") else f"truncated ({row.get('truncation_reason') or 'cut short'})"
    parts = [
        f"iteration {row['iteration']}" if "iteration" in row else "",
        f"task {row.get('task_id') or row['task_index']}",
        "success" if row.get("is_success") else "no success",
        f"return {earned:+.2f}",
        f"{turns} turn{'s' * (turns != 1)}, {len(row['tokens'])} tokens",
        f"fault: {row['fault']}" if row.get("fault") else end,
    ]
    return printable(", ".join(part for part in parts if part)).replace("\n", "\\n")


def shown(row: Mapping[str, Any]) -> str:
    """Format an episode as text for a terminal."""
    messages = row.get("messages")
    if messages is None:
        return f"{headline(row)}\n(it was logged without its messages)"
    terms = row.get("reward_terms") or []
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    read = turns[-1] + 1 if turns else len(messages)
    text = f"{headline(row)}\n\n{transcript(messages[:read], terms)}"
    return f"{text}\n{UNREAD}\n{transcript(messages[read:], [])}" if messages[read:] else text


def raw(row: Mapping[str, Any], tokenizer: Tokenizer, color: bool) -> str:
    """Format an episode's tokens as text for a terminal; sampled spans are green with `color`.

    Raises SystemExit if the tokenizer does not have these tokens.
    """
    if not 0 <= min(row["tokens"], default=0) <= max(row["tokens"], default=0) < len(tokenizer):
        raise SystemExit(f"the tokenizer has {len(tokenizer)} tokens, not all of this episode; {OTHER_TOKENIZER}")
    text = raw_transcript(row, tokenizer)
    if color:
        text = text.replace(SAMPLED[0], f"\x1b[32m{SAMPLED[0]}").replace(SAMPLED[1], f"{SAMPLED[1]}\x1b[0m")
    return f"{headline(row)}\n\n{text}"


def tokenizer_of(row: Mapping[str, Any], run: Path, given: str | None) -> Tokenizer:
    """Load the given tokenizer, or else the row's: the built-in one, the copy in the run's model/, or the one that the
    row names. A stranger may have written the row, so its name is only looked up on this machine: as a folder, or in
    the hub's cache. Raises SystemExit if there is none."""
    name = given or row.get("tokenizer")
    if given is None and name != "byte" and (run / "model" / "tokenizer_config.json").is_file():
        name = str(run / "model")
    if not isinstance(name, str):
        raise SystemExit(printable(f"{run}: the rows name no tokenizer; {OTHER_TOKENIZER}"))
    if given is None and name != "byte" and not os.path.isdir(name):
        folder = _cached(name)
        if folder is None:
            missing = f"the rows name the tokenizer {name!r:.200}, which is not on this machine"
            raise SystemExit(printable(f"{missing}; {OTHER_TOKENIZER}"))
        name = folder
    try:
        return load_tokenizer(None if name == "byte" else name)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(printable(f"{' '.join(str(error).split())}; {OTHER_TOKENIZER}")) from None


def _cached(name: str) -> str | None:
    """Return the folder of a repository's tokenizer in the hub's cache, None without one. Asks no server."""
    try:
        from huggingface_hub import try_to_load_from_cache

        paths = [try_to_load_from_cache(name, file) for file in ("tokenizer_config.json", "tokenizer.json")]
    except (ImportError, ValueError):  # without the package there is no cache; this cannot be a repository's name
        return None
    return next((os.path.dirname(path) for path in paths if isinstance(path, str)), None)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m agent_r1.show", description="Print episodes of a run.")
    parser.add_argument("run", type=Path, help="a run's folder, or a file of rows")
    parser.add_argument("--episodes", default="3", metavar="N|all", help="print the last N episodes (default: 3)")
    parser.add_argument("--iteration", type=int, help="only episodes of this iteration")
    parser.add_argument("--task", help="only episodes of this task: its id or its index")
    parser.add_argument("--failed", action="store_true", help="only episodes without success")
    parser.add_argument("--raw", action="store_true", help="print the tokens as the model saw them")
    parser.add_argument("--tokenizer", metavar="NAME", help='with --raw: name, folder or "byte" (default: the run\'s)')
    args = parser.parse_args(words)
    if args.tokenizer and not args.raw:
        parser.error("--tokenizer does nothing without --raw")
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if args.episodes != "all" and not (args.episodes.isdecimal() and int(args.episodes)):
        parser.error("--episodes must be a number, at least 1, or all")
    limit = None if args.episodes == "all" else int(args.episodes)
    iterations: set[int] = set()
    tasks: dict[str, None] = {}  # the first ones

    def asked_for() -> Iterator[dict[str, Any]]:
        for row in read_rows(args.run):
            iterations.update([row["iteration"]] if isinstance(row.get("iteration"), int) else ())
            if len(tasks) < 3 and isinstance(row.get("task_id"), str):
                tasks[row["task_id"]] = None
            if wanted(row, args.iteration, args.task, args.failed):
                yield row

    chosen = asked_for() if limit is None else deque(asked_for(), maxlen=limit)
    printed, damaged = False, 0
    for row in chosen:
        try:
            text = raw(row, tokenizer_of(row, args.run, args.tokenizer), color) if args.raw else shown(row)
        # The row has values of other types, or values that are too large.
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
            damaged += 1
            continue
        say(("\n" + "-" * 100 + "\n\n" if printed else "") + text)
        printed = True
    if damaged:
        print(printable(f"{args.run}: {damaged} rows are damaged"), file=sys.stderr)
    if not printed:
        filters = ["--iteration"] * (args.iteration is not None) + ["--task"] * (args.task is not None)
        filters += ["--failed"] * args.failed
        condition = f" with {' and '.join(filters)}" if filters else ""
        available = f"; it has episodes of iterations {min(iterations)} to {max(iterations)}" if iterations else ""
        if args.task is not None and tasks:
            names = printable(", ".join(tasks)).replace("\n", "\\n")
            available += f"{' and' if iterations else '; it has episodes'} of tasks such as {names}"
        raise SystemExit(f"{printable(str(args.run))} has no such episode{condition}{available}")


if __name__ == "__main__":
    try:
        interrupts.run(main)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
