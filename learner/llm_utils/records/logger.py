"""The displays of a run: TensorBoard, Weights & Biases, the terminal, and the figures of an iteration.

Infrastructure errors (a search server that is down) are not caused by the policy. An episode with one is excluded from
every mean and counted separately.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from llm_utils import config_file
from llm_utils.records import commands, displays, run_files, run_warnings, tracking
from llm_utils.records.progress import Progress, duration
from llm_utils.setup.environments import words


def run_name(args: Any, *more: str) -> str:
    """Return the name of a new run's folder. `more` follows the name of the experiment."""
    parts = [run_files.name_of(args.env_id), args.exp_name, *more, str(args.seed), str(int(time.time()))]
    return re.sub("[/:]", "_", "__".join(parts))


def open_writer(run_dir: Path, args: Any, run: dict[str, Any], purge_step: int | None) -> SummaryWriter:
    """Write config.yaml of a new run. Open TensorBoard's writer with a table of the arguments; with --track, also a W&B
    run with the same content.

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
    if purge_step is None:  # a resumed run keeps the flags that it began with
        config_file.write(run_dir, args)
    writer = SummaryWriter(str(run_dir), purge_step=purge_step)
    table = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
    return writer


class Logger:
    """The files and the terminal of a run. A run on several processes logs on rank 0 only."""

    def __init__(self, run_dir: Path, args: Any, total_episodes: int, run: dict[str, Any]) -> None:
        """Open the files. `run` holds the run's counters. A resumed run's are not 0, and its later rows and scalars are
        removed."""
        self.run_dir, self.args, self.run, resumed = run_dir, args, run, run["iteration"] > 0
        run_files.claim(run_dir)
        run_files.drop_later_rows(run_dir / "trajectories.jsonl", run["iteration"])
        self.writer = open_writer(run_dir, args, run, run["global_step"] + 1 if resumed else None)
        done = run["iteration"] * args.episodes_per_iteration
        self.begun = (run["iteration"], run["train_seconds"])
        self.show = commands.show(run_dir) if args.log_trajectories else ""
        self.num_iterations = total_episodes // args.episodes_per_iteration
        label = f"iteration {run['iteration']}/{self.num_iterations}"
        self.bar = Progress(total_episodes, "episode", label, done, lines=0, with_clock=False)
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
        if valid:
            scalars = {**scalars, "charts/return_std": float(np.std([row.stats["return"] for row in valid]))}
        names = {"return": "episodic_return", "turns": "episodic_length", "em": "exact_match"}
        ours_last = sorted(stats.items(), key=lambda item: item[0] in names)  # ours override a task's metrics
        shown = {f"charts/{names.get(name, name)}": value for name, value in ours_last} | share_of_faults(played)
        for env, group in by_environment(valid).items():
            of_env = sorted(mean_stats(group).items(), key=lambda item: item[0] in names)
            shown |= {f"charts/{env}/{names.get(name, name)}": value for name, value in of_env}
            shown |= {f"rewards/{env}/{name}": value for name, value in mean_terms(group).items()}
        shown |= scalars
        ages = [run["iteration"] - 1 - row.versions[row.action_mask] for row in rows]
        shown["charts/staleness"] = float(np.concatenate(ages).mean()) if any(map(len, ages)) else 0.0
        shown |= {f"rewards/{name}": value for name, value in mean_terms(valid).items()}
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
        advantages = [np.abs(row.advantages[row.train_mask]) for row in rows]
        extent = {"batch/valid": len(valid), "batch/advantage": float(np.concatenate([*advantages, np.zeros(1)]).max())}
        warnings = run_warnings.of_iteration(shown | extent, run.setdefault("warnings", {}), self.args, self.show)
        for text in warnings.values():
            self.warn(text)
        self.summary(run)
        figures = [f"{name} {stats[name]:.2f}" for name in ("return", "success") if name in stats]
        if "charts/tokens_per_second" in shown:
            figures.append(f"{shown['charts/tokens_per_second']:.0f} tokens/s")
        iteration, (begun, seconds) = run["iteration"], self.begun
        if begun < iteration < self.num_iterations:  # the pace of this session, without evaluations
            pace = (run["train_seconds"] - seconds) / (iteration - begun)
            figures.append(f"{duration(pace * (self.num_iterations - iteration))} left")
        label, text = f"iteration {iteration}/{self.num_iterations}", ", ".join(figures)
        self.bar.show(text, label)
        if self.bar.bar is None:
            self.bar.write(f"{label}: {text}", sys.stderr)

    def evaluation(self, rows: Sequence[Any], run: dict[str, Any]) -> None:
        """Log the evaluation after `run["iteration"]` iterations. The summary keeps the first and the last one."""
        valid = [row for row in rows if not row.fault]
        result = mean_stats(valid)
        if any(row.fault for row in rows):
            result |= {"invalid": share_of_faults(rows)["charts/invalid"]}
        groups = by_environment(valid)
        of_envs = {env: mean_stats(group) for env, group in groups.items()}
        for tag, figures in {"eval": result, **{f"eval/{env}": of_env for env, of_env in of_envs.items()}}.items():
            for name, value in figures.items():
                self.writer.add_scalar(f"{tag}/{name}", value, run["global_step"])
            for name, key in (("exact_match", "em"), ("success", "success")):
                run["summary"].setdefault(f"{tag}/{name}_first", figures.get(key))
                run["summary"][f"{tag}/{name}_last"] = figures.get(key)
        run["summary"] |= {f"eval/{env}/episodes": len(group) for env, group in groups.items()}
        self.writer.flush()
        self.summary(run)
        self.table(valid, run)
        self.texts(displays.samples(rows), run["global_step"])

    def table(self, valid: Sequence[Any], run: dict[str, Any]) -> None:
        """Print the table of an evaluation, and one for each of several environments. The means of all evaluations are
        kept in `run`, and so in checkpoints."""
        groups = {"": valid, **{f"{env}/": group for env, group in by_environment(valid).items()}}
        intervals = {}
        for name, (env, group) in itertools.product(displays.SHOWN, groups.items()):
            if values := [row.stats[name] for row in group if name in row.stats]:
                intervals[f"{env}{name}"] = displays.interval(name, values)
        means = {name: value for name, (value, _, _) in intervals.items()}
        run.setdefault("evaluations", []).append({"iteration": run["iteration"], **means})
        successes = {str(row.task_index): row.stats["success"] for row in valid if "success" in row.stats}
        run["success_after"] = successes
        run.setdefault("success_before", successes)
        if any(successes.values()):
            run.setdefault("warnings", {})["success"] = True
        tasks = f"{len(valid)} tasks of split {words(self.args.eval_split)}, greedy"
        lines = [f"evaluation after {run['iteration']} iterations: {tasks}"]
        for env in groups:
            lines += [f"{env[:-1]}: {len(groups[env])} tasks"] if env else []
            lines.append(displays.table(run["evaluations"], intervals, sys.stdout.encoding, env))
        self.bar.write("\n".join(lines))

    def texts(self, episodes: Sequence[tuple[str, str]], step: int) -> None:
        """Log some episodes as text. W&B does not take texts from TensorBoard's files."""
        if not episodes:
            return
        self.writer.add_text("eval/episodes", displays.as_markdown(episodes), step)
        self.writer.flush()
        if self.args.track:
            import wandb

            content = io.StringIO(displays.as_html(episodes))
            wandb.log({"eval/episodes": wandb.Html(content, inject=False), "global_step": step})

    def warn(self, text: str) -> None:
        """Print a warning, and add it to the summary as one line."""
        self.bar.write(text, sys.stderr)
        self.run["summary"].setdefault("warnings", []).append(" ".join(text.split()))

    def summary(self, run: dict[str, Any]) -> None:
        """Write summary.json of a run in progress."""
        figures = {**run["summary"], "train_seconds": run["train_seconds"]}
        content = {**figures, "finished": False, "args": asdict(self.args)}
        run_files.write_json(self.run_dir / "summary.json", content)

    def close(self) -> None:
        """Write everything to disk and mark the run as finished, so that sweep.py skips it. Print the last lines."""
        self.bar.close()
        self.writer.close()
        if text := run_warnings.at_end(self.run.get("warnings", {}), self.args, self.show):
            self.warn(text)
            self.summary(self.run)
        path = self.run_dir / "summary.json"
        run_files.write_json(path, json.loads(path.read_text()) | {"finished": True})
        history = [means for means in self.run.get("evaluations", []) if "success" in means]
        if history:
            print(displays.change(self.run["success_before"], self.run["success_after"], history))
        print(displays.last_lines(self.run_dir, self.run_dir / "model", self.args))


def mean_stats(rows: Sequence[Any]) -> dict[str, float]:
    """Return the mean of every statistic over the rows that have it. Not every episode has all metrics of its task."""
    names = dict.fromkeys(name for row in rows for name in row.stats)
    return {name: float(np.mean([row.stats[name] for row in rows if name in row.stats])) for name in names}


def mean_terms(rows: Sequence[Any]) -> dict[str, float]:
    """Return the mean of every reward term over the rows; a row without it counts as 0."""
    names = sorted({name for row in rows for name in row.reward_terms})
    return {name: float(np.mean([row.reward_terms[name] for row in rows])) for name in names}


def by_environment(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Group the episodes of a run on several environments by their ids, without "AgentR1/". Other runs have no
    groups."""
    groups: dict[str, list[Any]] = {}
    for row in rows:
        if "env_id" in row.record:
            groups.setdefault(row.record["env_id"].removeprefix("AgentR1/"), []).append(row)
    return groups


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
