"""What an evaluation's episodes were like: figures, the kinds of errors, and some of them to be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from real_model_parts.suites import ERRORS, Figures

METRICS = {"em": "EM", "f1": "F1", "support_recall": "support recall", "format": "right format", "tool_calls": "calls",
           "tool_errors": "tool errors"}  # fmt: skip


def kind_of_error(row: dict[str, Any], text: str) -> str | None:
    """What went wrong in an episode in which tools and environment said `text`: the first of `ERRORS` that holds; None
    where it was right.

    format: no well-formed answer. search: not every gold passage was found. copying: the answer stands in nothing that
    the tools said. reasoning: it does, and is wrong.
    """
    if row["stats"].get("success"):
        return None
    if not row["stats"]["format"]:
        return "format"
    if row["stats"].get("support_recall", 1.0) < 1.0:
        return "search"
    answer, shown = (" ".join(said.casefold().split()) for said in (row["answer"] or "", text))
    return "reasoning" if answer in shown else "copying"


def read_episodes(folder: Path, tokenizer: Any) -> list[dict[str, Any]]:
    """The episodes of an evaluation in the order of their tasks, with `error`.

    ValueError where a fault of the machinery ended some: without them it isn't of the same tasks as others.
    """
    rows = [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]
    if faults := [row["fault"] for row in rows if row["fault"]]:
        raise ValueError(f"{len(faults)} of {len(rows)} episodes were ended by faults ({faults[0]})")
    for row in rows:
        given = np.array(row["tokens"])[row["prompt_length"] :]
        given = given[~np.array(row["action_mask"], bool)[row["prompt_length"] :]]
        row["error"] = kind_of_error(row, tokenizer.decode(given.tolist()))
    return sorted(rows, key=lambda row: row["task_index"])


def make_env(args: dict[str, Any]) -> Any:
    """The environment that an evaluation with these arguments played."""
    return gym.make(args["env_id"], split=args["split"], **json.loads(args["env_kwargs"])).unwrapped


SHOWN = 3  # episodes of each error that are recorded to be read


def examples(rows: Sequence[dict[str, Any]], answers: Callable[[int], list[str]]) -> list[dict[str, Any]]:
    """The first of each error, as texts: what was asked, what is right, and what the policy and the tools said."""
    found = []
    for kind in ERRORS:
        for row in [row for row in rows if row["error"] == kind][:SHOWN]:
            said = [[message["role"], spoken(message)] for message in row["messages"][2:]]
            one = {"error": kind, "task": row["task_id"], "question": row["question"], "said": said}
            found.append(one | {"right": answers(row["task_index"])})
    return found


def spoken(message: dict[str, Any]) -> str:
    calls = [f"{x['function']['name']}({x['function']['arguments']})" for x in message.get("tool_calls") or []]
    return " ".join([message.get("content") or "", *calls]).strip()


def story(example: dict[str, Any]) -> str:
    """An example in Markdown, a line a turn. Whatever was said or read stands in code: it is text, and nothing else."""

    def code(text: str, longest: int = 300) -> str:
        text = " ".join(text.split())
        text = text if len(text) <= longest else text[:longest] + " ..."
        return f"`{text.replace('`', chr(39))}`"

    lines = [f"**{example['error']}**, task {code(example['task'])}: {code(example['question'], 2000)}", ""]
    lines += [f"- {role}: {code(text)}" for role, text in example["said"]]
    return "\n".join([*lines, f"- right: {code('; '.join(example['right']))}", ""])


def figures(rows: Sequence[dict[str, Any]]) -> Figures:
    """Of each question in order: what is measured (None where it isn't), and the kind of error."""
    found: Figures = {metric: [row["stats"].get(metric) for row in rows] for metric in METRICS}
    return found | {"error": [row["error"] for row in rows]}
