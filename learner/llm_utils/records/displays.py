"""The texts of a run for people: the table of an evaluation, some of its episodes, and the last lines."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from agent_r1.trajectories import transcript
from agent_r1_tools.text import printable
from llm_utils.records import commands
from llm_utils.records.intervals import Interval, difference, mean, proportion
from llm_utils.setup.environments import ids_of
from llm_utils.trajectory import OF_TURNS

SHOWN = {"success": "success", "em": "exact match", "f1": "F1", "return": "return"}  # in the table: name, title
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
WIDTH = 40  # of a sparkline
LENGTH = 6_000  # characters of an episode in TensorBoard
SUMS = ("tokens", "sampled_tokens", "candidate_tokens", "critic_value")  # sums, and values that are no shares


def interval(name: str, values: Sequence[float], seed: int = 0) -> Interval:
    """Return the mean of a statistic's values, one per task, with its 95 % interval: a proportion's for a share."""
    array = np.asarray(values, float)
    is_sum = name in (*OF_TURNS, *SUMS)  # its values may lie between 0 and 1 by chance
    is_share = not is_sum and ((array >= 0) & (array <= 1)).all()
    return proportion(array) if is_share else mean(values, seed, resamples=2000)


def sparkline(values: Sequence[float], encoding: str | None = "utf-8") -> str:
    """Return one character per value, at most `WIDTH` of them. Shares have the scale from 0 to 1, others their own."""
    try:
        BARS.encode(encoding or "ascii")
        bars = BARS
    except (UnicodeError, LookupError):
        bars = ASCII_BARS
    if len(values) > WIDTH:
        values = [values[round(i)] for i in np.linspace(0, len(values) - 1, WIDTH)]
    low, high = min(0.0, *values), max(1.0, *values)
    if (low, high) != (0.0, 1.0):
        low, high = min(values), max(values)
    return "".join(bars[round((len(bars) - 1) * (value - low) / ((high - low) or 1))] for value in values)


def table(
    history: Sequence[Mapping[str, float]], intervals: Mapping[str, Interval], encoding: str | None, prefix: str = ""
) -> str:
    """Return the table of an evaluation. `history` has the means of all evaluations so far, this one at the end.

    `intervals` are of this evaluation. `prefix` begins the metrics' names in both. A metric that has been equal to one
    above it gets no row.
    """
    rows, curves = [["", "before", "best", "now", "95 % interval", "all"]], []
    for name, title in ((f"{prefix}{metric}", title) for metric, title in SHOWN.items()):
        curve = [evaluation[name] for evaluation in history if name in evaluation]
        if name not in intervals or curve in curves:
            continue
        curves.append(curve)
        _, low, high = intervals[name]
        means = [f"{value:.3f}" for value in (curve[0], max(curve), curve[-1])]
        rows.append([title, *means, f"{low:.3f} to {high:.3f}", sparkline(curve, encoding)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *numbers, last in rows:
        cells = [first.ljust(widths[0]), *(n.rjust(w) for n, w in zip(numbers, widths[1:], strict=False)), last]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def change(before: Mapping[str, float], after: Mapping[str, float], history: Sequence[Mapping[str, float]]) -> str:
    """Return a line on success before and after training. `before` and `after` have the success of each task."""
    tasks = [task for task in before if task in after]
    best = max(range(len(history)), key=lambda i: history[i].get("success", 0.0))
    first, last = history[0]["success"], history[-1]["success"]
    text = f"success in evaluations, greedy: {first:.3f} before, {last:.3f} after"
    if len(history) < 2 or not tasks:
        return text
    first_of, last_of = (np.array([side[task] for task in tasks]) for side in (before, after))
    value, low, high = difference(last_of, first_of)
    text += f" ({value:+.3f}, 95 % interval {low:+.3f} to {high:+.3f})"
    return text + f", best {history[best]['success']:.3f} after {history[best]['iteration']:.0f} iterations"


def samples(rows: Sequence[Any]) -> list[tuple[str, str]]:
    """Return headings and transcripts of two episodes of each environment: a failed and a successful one if there are
    both."""
    of_envs: dict[str, list[Any]] = {}  # without an id in a run on one environment
    for row in rows:
        if not row.fault and row.record.get("messages"):
            of_envs.setdefault(row.record.get("env_id", ""), []).append(row)
    chosen = []
    for valid in of_envs.values():
        failed = [row for row in valid if not row.stats.get("success")]
        solved = [row for row in valid if row.stats.get("success")]
        chosen += [failed[0], solved[0]] if failed and solved else valid[:2]
    found = []
    for row in chosen:
        end = "success" if row.stats.get("success") else "no success"
        env_id, index = row.record.get("env_id"), row.record.get("task_index", row.task_index)
        text = transcript(row.record["messages"], row.record.get("reward_terms") or [])
        if len(text) > LENGTH:
            half, cut = LENGTH // 2, len(text) - LENGTH
            text = f"{text[:half]}\n... [{cut} characters cut] ...\n{text[-half:]}"
        task = f"{env_id}, task index {index}" if env_id else f"task index {index}"
        found.append((f"{task}, {end}, return {row.stats['return']:+.2f}", text))
    return found


def as_markdown(texts: Sequence[tuple[str, str]]) -> str:
    """Return headings and texts as Markdown. A model's text cannot end its block of code, because the fence is longer
    than any row of backticks in it."""
    parts = []
    for heading, text in texts:
        fence = "`" * (1 + max([2, *map(len, re.findall("`+", text))]))
        parts.append(f"{heading}\n\n{fence}\n{text}\n{fence}")
    return "\n\n".join(parts)


def as_html(texts: Sequence[tuple[str, str]]) -> str:
    """Return headings and texts as HTML. A model's text has no effect as HTML."""
    return "".join(f"<p>{html.escape(heading)}</p><pre>{html.escape(text)}</pre>" for heading, text in texts)


def last_lines(run_dir: Path, model: Path, args: Any, refused: str = "") -> str:
    """Return the last lines of a training run: its folder, the model's, and commands to copy.

    There are no commands for files that were not written. `refused` says why --engine transformers cannot sample from
    the model ("": it can). Then vLLM samples in the commands. If it is not installed, a line reports it instead.
    """
    saved, kept = (model / "config.json").is_file(), run_dir / "checkpoint"
    lines = []
    if getattr(args, "log_trajectories", 0):
        lines.append(("look at it", commands.show(run_dir)))
    each: list[list[str]] = []
    if saved or (kept / "policy" / "config.json").is_file():
        each = evaluations(run_dir, model, args)
    elif (kept / "policy" / "adapter_config.json").is_file():
        each = _for_each_id(["--adapter", str(kept / "policy")], args)
    engine = ["--engine", "vllm"] if refused else []
    sampled = not refused or find_spec("vllm") is not None
    each = each if sampled else []
    lines += [("evaluate it", commands.script_beside("evaluate_llm.py", *flags, *engine)) for flags in each]
    if hasattr(args, "total_episodes"):
        if (kept / "state.json").is_file():
            further = commands.resume(run_dir, "--total-episodes", str(2 * args.total_episodes))
            lines.append(("train further", further))
    elif saved and sampled:
        name = str(run_dir if model.parent == run_dir else model)
        small = args.model in ("scratch", "tiny")  # in another folder it would get the rate of a pretrained model
        rate = ["--learning-rate", "3e-4"] if small else []
        improve = commands.script_beside("grpo_llm.py", "--model", name, *rate, *_environment_flags(args), *engine)
        lines.append(("improve it", improve))
    where = f"written to {run_dir}" + f", the model to {model}" * saved
    text = "\n".join([printable(where), *(f"  {title + ':':15}{command}" for title, command in lines)])
    if not sampled:
        text += f"\n  no engine here samples from this model, as it has {refused}; try vLLM, if it has this model"
    return text


def evaluations(run_dir: Path, model: Path, args: Any) -> list[list[str]]:
    """Return the flags with which evaluate_llm.py evaluates a run's model, for each of the run's environments."""
    if model.parent != run_dir:  # only a run's folder names its environment
        return [["--model", str(model), *_environment_flags(args)]]
    return _for_each_id(["--model", str(run_dir)], args)


def _for_each_id(flags: list[str], args: Any) -> list[list[str]]:
    """Return the flags once for each of several environments, with its id. A single one is the run's."""
    ids = ids_of(args)
    return [[*flags, "--env-id", env_id] for env_id in ids] if len(ids) > 1 else [flags]


def _environment_flags(args: Any) -> list[str]:
    """Return the flags that name the environment of `args`, without those that have their default."""
    flags = {"--env-id": args.env_id, "--env-kwargs": args.env_kwargs, "--data-dir": args.data_dir}
    defaults = ("AgentR1/MultihopWorld-v0", "{}", None)
    changed = [item for item, default in zip(flags.items(), defaults, strict=True) if item[1] != default]
    return [word for flag, value in changed for word in (flag, *([value] if isinstance(value, str) else value))]
