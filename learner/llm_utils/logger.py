"""What a run shows: TensorBoard, Weights & Biases, a progress bar, and the figures of an iteration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from llm_utils import checkpoint


class Logger:
    """The files and the progress bar of a run. A run on several processes logs on rank 0 only."""

    TRAJECTORIES = 8  # rows per iteration in trajectories.jsonl

    def __init__(self, run_dir: Path, args: Any, total_episodes: int, run: dict[str, Any]) -> None:
        """`run` holds the counters of the run; those of a resumed one are not 0, and later rows and scalars are cut."""
        self.run_dir, self.args, resumed = run_dir, args, run["iteration"] > 0
        run_dir.mkdir(parents=True, exist_ok=True)
        checkpoint.drop_later_rows(run_dir / "trajectories.jsonl", run["iteration"])
        if args.track:
            import wandb

            project, config = args.wandb_project_name, asdict(args)
            wandb.init(project=project, name=run_dir.name, config=config, sync_tensorboard=True)
        self.writer = SummaryWriter(str(run_dir), purge_step=run["global_step"] + 1 if resumed else None)
        table = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
        self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
        done = run["iteration"] * args.episodes_per_iteration
        self.bar = tqdm(total=total_episodes, initial=done, unit="episode", dynamic_ncols=True)

    def iteration(
        self, rows: Sequence[Any], logs: Sequence[Mapping[str, float]], run: dict[str, Any], scalars: dict[str, float]
    ) -> None:
        """Log an iteration: its rows, a dict of figures per optimizer step, and further scalars. Writes the summary."""
        stats = mean_stats(rows)
        names = {"return": "episodic_return", "turns": "episodic_length", "em": "exact_match"}
        scalars = {f"charts/{names.get(name, name)}": value for name, value in stats.items()} | scalars
        ages = [run["iteration"] - 1 - row.versions[row.action_mask] for row in rows]
        scalars["charts/staleness"] = float(np.concatenate(ages).mean()) if any(map(len, ages)) else 0.0
        for name in sorted({name for row in rows for name in row.reward_terms}):
            scalars[f"rewards/{name}"] = float(np.mean([row.reward_terms[name] for row in rows]))
        for name in sorted({name for log in logs for name in log}):
            scalars[f"losses/{name}"] = float(np.mean([log[name] for log in logs if name in log]))
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, run["global_step"])
        some = rows[: self.TRAJECTORIES]
        checkpoint.append_rows(self.run_dir / "trajectories.jsonl", some, iteration=run["iteration"])
        self.summary(run)
        shown = f"return {stats['return']:.2f}, success {stats['success']:.2f}, {scalars['charts/SPS']:.0f} turns/s"
        self.bar.set_postfix_str(shown)

    def evaluation(self, rows: Sequence[Any], run: dict[str, Any]) -> None:
        """Note what an evaluation after `run["iteration"]` iterations gave; the summary has the first and the last."""
        result = mean_stats(rows)
        for name, value in result.items():
            self.writer.add_scalar(f"eval/{name}", value, run["global_step"])
        for name, key in (("exact_match", "em"), ("success", "success")):
            run["summary"].setdefault(f"eval/{name}_first", result.get(key))
            run["summary"][f"eval/{name}_last"] = result.get(key)
        self.summary(run)
        text = ", ".join(f"{name} {value:.3f}" for name, value in result.items())
        self.bar.write(f"evaluation after {run['iteration']} iterations: {text}")

    def summary(self, run: dict[str, Any]) -> None:
        """Write summary.json."""
        content = {**run["summary"], "train_seconds": run["train_seconds"], "args": asdict(self.args)}
        checkpoint.write_json(self.run_dir / "summary.json", content)

    def close(self) -> None:
        """Everything to disk. The run came to its end: the summary says so, and llm_utils/benchmark.py skips it."""
        path = self.run_dir / "summary.json"
        checkpoint.write_json(path, json.loads(path.read_text()) | {"finished": True})
        self.bar.close()
        self.writer.close()


def mean_stats(rows: Sequence[Any]) -> dict[str, float]:
    """The mean of every statistic over the rows."""
    names = dict.fromkeys(name for row in rows for name in row.stats)
    return {name: float(np.mean([row.stats[name] for row in rows])) for name in names}
