"""The displays of a run: TensorBoard, Weights & Biases, a progress bar, and the figures of an iteration.

Infrastructure errors (a search server that is down) are not caused by the policy. An episode with one is excluded from
every mean and counted separately.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from llm_utils.records import run_files, tracking


def run_name(args: Any, *more: str) -> str:
    """Return the name of a new run's folder. `more` follows the name of the experiment."""
    words = [args.env_id, args.exp_name, *more, str(args.seed), str(int(time.time()))]
    return re.sub("[/:]", "_", "__".join(words))


def open_writer(run_dir: Path, args: Any, run: dict[str, Any], purge_step: int | None) -> SummaryWriter:
    """Open TensorBoard's writer with a table of the arguments; with --track, also a W&B run with the same content.

    The id of the W&B run is kept in `run`, and so in checkpoints: a resumed run continues under it. A resumed run's
    earlier logs from `purge_step` on are removed.
    """
    if args.track:
        tracking.start(
            project=args.wandb_project_name,
            name=run_dir.name,
            config=asdict(args),
            sync_tensorboard=True,
            id=run.setdefault("wandb_id", secrets.token_hex(8)),
            resume="allow",
            allow_val_change=True,  # some values may change in a resumed run
        )
    writer = SummaryWriter(str(run_dir), purge_step=purge_step)
    table = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
    return writer


class Logger:
    """The files and the progress bar of a run. A run on several processes logs on rank 0 only."""

    def __init__(self, run_dir: Path, args: Any, total_episodes: int, run: dict[str, Any]) -> None:
        """Open the files. `run` holds the run's counters. A resumed run's are not 0, and its later rows and scalars are
        removed."""
        self.run_dir, self.args, resumed = run_dir, args, run["iteration"] > 0
        run_files.claim(run_dir)
        run_files.drop_later_rows(run_dir / "trajectories.jsonl", run["iteration"])
        self.writer = open_writer(run_dir, args, run, run["global_step"] + 1 if resumed else None)
        done = run["iteration"] * args.episodes_per_iteration
        self.bar = tqdm(total=total_episodes, initial=done, unit="episode", dynamic_ncols=True)
        self.summary(run)  # a finished run that is resumed is no longer finished

    def iteration(
        self,
        rows: Sequence[Any],
        logs: Sequence[Mapping[str, float]],
        run: dict[str, Any],
        scalars: Mapping[str, float],
        played: Sequence[Any] | None = None,
    ) -> None:
        """Log an iteration and write the summary.

        `rows` are the trajectories trained on. `played` (default: the same) also has those that were filtered out or
        ended by infrastructure errors; episode statistics are computed over `played`.

        `logs` is a dict of figures per optimizer step. The mean is logged; for names that end in _max, the largest; for
        names that begin with gap_ (sampler against trainer), the first step's, because later ones include the policy's
        own change. `scalars` are logged unchanged.
        """
        played = rows if played is None else played
        valid = [row for row in played if not row.fault]
        stats = mean_stats(valid)
        names = {"return": "episodic_return", "turns": "episodic_length", "em": "exact_match"}
        ours_last = sorted(stats.items(), key=lambda item: item[0] in names)  # ours override a task's metrics
        shown = {f"charts/{names.get(name, name)}": value for name, value in ours_last} | share_of_faults(played)
        shown |= scalars
        ages = [run["iteration"] - 1 - row.versions[row.action_mask] for row in rows]
        shown["charts/staleness"] = float(np.concatenate(ages).mean()) if any(map(len, ages)) else 0.0
        for name in sorted({name for row in valid for name in row.reward_terms}):
            shown[f"rewards/{name}"] = float(np.mean([row.reward_terms[name] for row in valid]))
        for name in sorted({name for log in logs for name in log}):
            values = [log[name] for log in logs if name in log]
            if not name.startswith("gap_"):
                shown[f"losses/{name}"] = float(max(values) if name.endswith("_max") else np.mean(values))
            elif name in logs[0] and f"sampler/{name}" not in shown:
                shown[f"sampler/{name}"] = float(logs[0][name])
        for name, value in shown.items():
            self.writer.add_scalar(name, value, run["global_step"])
        self.writer.flush()  # in case the run ends early
        wanted = self.args.log_trajectories
        trained = {row.episode: row for row in rows}
        written_rows = [trained.get(row.episode, row) for row in played] if wanted == "all" else rows[:wanted]
        extra = {"iteration": run["iteration"], "env_id": self.args.env_id, "model": self.args.model}
        run_files.append_rows(self.run_dir / "trajectories.jsonl", written_rows, **extra)
        self.summary(run)
        figures = [f"{name} {stats[name]:.2f}" for name in ("return", "success") if name in stats]
        self.bar.set_postfix_str(", ".join([*figures, f"{shown['charts/SPS']:.0f} turns/s"]))

    def evaluation(self, rows: Sequence[Any], run: dict[str, Any]) -> None:
        """Log the evaluation after `run["iteration"]` iterations. The summary keeps the first and the last one."""
        result = mean_stats([row for row in rows if not row.fault])
        if any(row.fault for row in rows):
            result |= {"invalid": share_of_faults(rows)["charts/invalid"]}
        for name, value in result.items():
            self.writer.add_scalar(f"eval/{name}", value, run["global_step"])
        for name, key in (("exact_match", "em"), ("success", "success")):
            run["summary"].setdefault(f"eval/{name}_first", result.get(key))
            run["summary"][f"eval/{name}_last"] = result.get(key)
        self.writer.flush()
        self.summary(run)
        text = ", ".join(f"{name} {value:.3f}" for name, value in result.items())
        self.bar.write(f"evaluation after {run['iteration']} iterations: {text}")

    def summary(self, run: dict[str, Any]) -> None:
        """Write summary.json of a run in progress."""
        figures = {**run["summary"], "train_seconds": run["train_seconds"]}
        content = {**figures, "finished": False, "args": asdict(self.args)}
        run_files.write_json(self.run_dir / "summary.json", content)

    def close(self) -> None:
        """Write everything to disk and mark the run as finished, so that sweep.py skips it."""
        path = self.run_dir / "summary.json"
        summary = json.loads(path.read_text()) | {"finished": True}
        run_files.write_json(path, summary)
        self.bar.close()
        self.writer.close()
        before, after = summary.get("eval/success_first"), summary.get("eval/success_last")
        if None not in (before, after):
            print(f"success in evaluations, greedy: {before:.3f} before, {after:.3f} after")
        print(f"written to {self.run_dir}; python -m agent_r1.show {shlex.quote(str(self.run_dir))} prints episodes")


def mean_stats(rows: Sequence[Any]) -> dict[str, float]:
    """Return the mean of every statistic over the rows that have it. Not every episode has all metrics of its task."""
    names = dict.fromkeys(name for row in rows for name in row.stats)
    return {name: float(np.mean([row.stats[name] for row in rows if name in row.stats])) for name in names}


def share_of_faults(rows: Sequence[Any]) -> dict[str, float]:
    """Return the share of episodes that ended in infrastructure errors, overall and by their number of tool calls.

    If errors hit tool calls, episodes with more calls are lost more often; these figures show it.
    """
    groups: dict[str, list[bool]] = {"charts/invalid": []}
    for row in rows:
        calls = int(row.stats["tool_calls"])
        for name in ("invalid", f"invalid_calls_{calls if calls < 3 else '3+'}"):
            groups.setdefault(f"charts/{name}", []).append(bool(row.fault))
    return {name: float(np.mean(broken)) for name, broken in groups.items() if broken}
