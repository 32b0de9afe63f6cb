"""The files of an evaluation. If anything ends it early, finished episodes are kept, and --resume runs the rest.

    runs/{run_name}/evaluation.json       arguments, figures; until the end `finished` is false and there are no figures
                    trajectories.jsonl    one line per episode, written when it ends; sorted by number at the end
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from llm_utils import arguments
from llm_utils.arguments import ArgsT
from llm_utils.records import commands, run_files
from llm_utils.recovery import disk, signals
from llm_utils.trajectory import Trajectory

ROWS, REPORT = "trajectories.jsonl", "evaluation.json"


def load_args(args: ArgsT) -> ArgsT:
    """Return the arguments of the evaluation that `args.resume` names, or `args`. Raise SystemExit if there is none, or
    if given arguments contradict its own."""
    folder = vars(args)["resume"]
    if not folder:
        return args
    try:
        report = json.loads((Path(folder) / REPORT).read_text())
        float(report["seconds"])
        run_files.claim(Path(folder))
        saved = current_names({"episodes": report["args"]["episodes"], **report["args"]})
        return arguments.resumed(args, saved, REPORT)
    except (FileNotFoundError, NotADirectoryError):
        cause = f"there is no {REPORT}; give the folder of an evaluation (runs/...)"
        raise SystemExit(f"--resume {folder}: {cause}") from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise SystemExit(f"--resume {folder}: {REPORT} is damaged: {error!r}") from None


def current_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded arguments with the names of this version: --samples was --profile, 0 for one sample."""
    values = arguments.in_this_version(saved)
    return {"samples": values.pop("profile") or 1, **values} if "profile" in values else values


@dataclass
class Episode:
    """The inputs of an evaluation's figures. The whole record is in the file."""

    task_index: int
    stats: dict[str, float]
    fault: str | None
    place: tuple[int, int]  # of its line: the first byte, and the number of bytes


class Episodes:
    """The finished episodes, by number. `task_of` returns the task of each valid number."""

    def __init__(self, folder: Path, task_of: Callable[[int], int | None], model_files: str | None = None) -> None:
        """Read the finished episodes in the folder. Episodes that were ended by infrastructure errors, or cut short
        when the evaluation was killed, run again. Their lines are removed, and so are damaged lines.

        Raise SystemExit if the model's files have changed (`sources.model_files`), or if lines are of another version.
        """
        self.path, self.task_of = folder / ROWS, task_of
        self.played: dict[int, Episode] = {}
        self.seconds = 0.0  # that the evaluation took before
        self.signal: int | None = None  # the signal that ends it
        if self.path.is_file():
            report = json.loads((folder / REPORT).read_text())
            if "model_files" not in report:
                raise SystemExit(f"--resume {folder}: this evaluation is of another version; start a new one")
            if report["model_files"] != model_files:
                cause = "the model's files have changed since (their names, sizes or times); start a new evaluation"
                raise SystemExit(f"--resume {folder}: {cause}")
            self.seconds = report["seconds"]
            if not report.get("finished", True):  # it was stopped: the report was written when it started or resumed
                self.seconds += max(0.0, self.path.stat().st_mtime - (folder / REPORT).stat().st_mtime)
            with self.path.open("rb") as file:
                run_files.replace(self.path, self._valid_lines(file))
        self.file = self.path.open("ab")

    def _valid_lines(self, file: IO[bytes]) -> Iterator[bytes]:
        size = damaged = 0
        for line in file:
            row = None
            try:
                row = json.loads(line)
                number, fault = row["episode"], row["fault"]
                stats = {name: float(value) for name, value in dict(row["stats"]).items()}
                episode = Episode(row["task_index"], stats, fault, (size, len(line)))
                valid = line.endswith(b"\n") and type(number) is int and self.task_of(number) == episode.task_index
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                if isinstance(row, dict) and "tokens" in row:  # written by this program
                    cause = f"a line of another version lacks {error}; start a new evaluation"
                    raise SystemExit(f"{self.path}: {cause}") from None
                valid, fault = False, None
            if valid and not fault and number not in self.played:
                self.played[number] = episode
                size += len(line)
                yield line
            damaged += not valid and line.endswith(b"\n")
        if damaged:
            print(f"{self.path}: {damaged} damaged lines were removed", file=sys.stderr)

    def add(self, row: Trajectory, **extra: Any) -> None:
        """Record an episode that ended."""
        line, start = run_files.line(row, **extra), self.file.tell()
        self.file.write(line)
        self.file.flush()
        self.played[row.episode] = Episode(row.task_index, row.stats, row.fault, (start, len(line)))
        if self.signal is not None:  # Python drops a signal's exception in some places, such as finalizers
            raise KeyboardInterrupt

    def close(self) -> list[Episode]:
        """Sort the lines by episode number once all have ended. Return the episodes in this order."""
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
        """Report how many of `total` episodes are kept, and how to resume, if anything ends the evaluation early.
        Ctrl-C and SIGTERM end it with status 130 and 143."""
        with signals.interrupting(lambda number: setattr(self, "signal", number)):
            try:
                yield
            except BaseException as error:
                signals.ignore()
                with suppress(OSError):  # a full disk may reject buffered data
                    self.file.close()
                num_kept = sum(not episode.fault for episode in self.played.values())
                command = commands.resume(self.path.parent)
                remedy = f"{num_kept} of {total} episodes are kept; resume with\n  {command}"
                if isinstance(error, SystemExit) and not num_kept:
                    remedy = ""  # it could not begin, and the error says why
                if self.signal is None and (reason := disk.no_room(error)):
                    sys.exit(f"stopped: {reason}\n{remedy}")
                signals.end(error, remedy, self.signal)
                raise
            finally:
                self.file.close()
