"""The files of an evaluation. Whatever ends it, what was played is kept, and --resume plays the rest.

    runs/{run_name}/evaluation.json       arguments, figures; until the end `finished` is false and there are no figures
                    trajectories.jsonl    a row for every episode, from the moment it is over; at the end in their order
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from llm_utils import arguments
from llm_utils.arguments import ArgsT
from llm_utils.records import run_files
from llm_utils.recovery import checkpoint, disk, signals
from llm_utils.trajectory import Trajectory

ROWS, REPORT = "trajectories.jsonl", "evaluation.json"


def load_args(args: ArgsT) -> ArgsT:
    """The arguments of the evaluation that `args.resume` names; or `args`. SystemExit where there is none, or others
    contradict its own."""
    folder = vars(args)["resume"]
    if not folder:
        return args
    try:
        report = json.loads((Path(folder) / REPORT).read_text())
        float(report["seconds"])
        run_files.claim(Path(folder))
        return arguments.resumed(args, {"episodes": report["args"]["episodes"], **report["args"]}, REPORT)
    except FileNotFoundError:
        why = f"there is no {REPORT}; give the folder of an evaluation (runs/...)"
        raise SystemExit(f"--resume {folder}: {why}") from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise SystemExit(f"--resume {folder}: {REPORT} is damaged: {error!r}") from None


@dataclass
class Episode:
    """What figures are made of. The whole row is in the file."""

    task_index: int
    stats: dict[str, float]
    fault: str | None
    place: tuple[int, int]  # of its row: the first byte, and how many


class Episodes:
    """The episodes that were played, by number: all that `task_of` has a task for."""

    def __init__(self, folder: Path, task_of: Callable[[int], int | None], model_files: str | None = None) -> None:
        """Those in the folder's rows, where it goes on. What a fault ended is played again, and so is what was being
        written when the evaluation was killed; these rows are removed, and so is what is no row.

        SystemExit where the files of the model are not those that played (`sources.model_files`), or rows are of
        another version."""
        self.path, self.task_of = folder / ROWS, task_of
        self.played: dict[int, Episode] = {}
        self.seconds = 0.0  # that the evaluation has taken before
        self.signal: int | None = None  # that ends it
        if self.path.is_file():
            report = json.loads((folder / REPORT).read_text())
            if "model_files" not in report:
                raise SystemExit(f"--resume {folder}: an evaluation of another version; begin a new one")
            if report["model_files"] != model_files:
                why = "the model's files have changed since (their names, sizes or times); begin a new evaluation"
                raise SystemExit(f"--resume {folder}: {why}")
            self.seconds = report["seconds"]
            if not report.get("finished", True):  # it was stopped: the report was written when it began, or went on
                self.seconds += max(0.0, self.path.stat().st_mtime - (folder / REPORT).stat().st_mtime)
            with self.path.open("rb") as file:
                run_files.replace(self.path, self._kept(file))
        self.file = self.path.open("ab")

    def _kept(self, file: IO[bytes]) -> Iterator[bytes]:
        size = damaged = 0
        for line in file:
            row = None
            try:
                row = json.loads(line)
                number, fault = row["episode"], row["fault"]
                stats = {name: float(value) for name, value in dict(row["stats"]).items()}
                episode = Episode(row["task_index"], stats, fault, (size, len(line)))
                whole = line.endswith(b"\n") and type(number) is int and self.task_of(number) == episode.task_index
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                if isinstance(row, dict) and "tokens" in row:  # ours
                    raise SystemExit(f"{self.path}: a row of another version lacks {error}; begin a new one") from None
                whole, fault = False, None
            if whole and not fault and number not in self.played:
                self.played[number] = episode
                size += len(line)
                yield line
            damaged += not whole and line.endswith(b"\n")
        if damaged:
            print(f"{self.path}: {damaged} damaged lines were removed", file=sys.stderr)

    def add(self, row: Trajectory, **extra: Any) -> None:
        """An episode is over."""
        line, start = run_files.line(row, **extra), self.file.tell()
        self.file.write(line)
        self.file.flush()
        self.played[row.episode] = Episode(row.task_index, row.stats, row.fault, (start, len(line)))
        if self.signal is not None:  # Python drops what a signal raises where nothing can be raised, as in a finalizer
            raise KeyboardInterrupt

    def close(self) -> list[Episode]:
        """All have been played: put the rows into the order of their numbers. Returns the episodes in this order."""
        self.file.close()
        episodes = [self.played[number] for number in sorted(self.played)]

        def rows(file: IO[bytes]) -> Iterator[bytes]:
            for episode in episodes:
                file.seek(episode.place[0])
                yield file.read(episode.place[1])

        with self.path.open("rb") as file:
            run_files.replace(self.path, rows(file))
        return episodes

    @contextmanager
    def keeping(self, total: int) -> Iterator[None]:
        """Whatever ends the evaluation inside says how many of `total` episodes are kept, and how to go on. Ctrl-C and
        SIGTERM end it with 130 and 143."""
        with signals.interrupting(lambda number: setattr(self, "signal", number)):
            try:
                yield
            except BaseException as error:
                signals.ignore()
                with suppress(OSError):  # what isn't written yet, on a full disk
                    self.file.close()
                kept = sum(not episode.fault for episode in self.played.values())
                command = checkpoint.resume_command(self.path.parent)
                how = f"{kept} of {total} episodes are kept; go on with\n  {command}"
                if self.signal is None and (reason := disk.no_room(error)):
                    sys.exit(f"stopped: {reason}\n{how}")
                signals.end(error, how, self.signal)
                raise
            finally:
                self.file.close()
