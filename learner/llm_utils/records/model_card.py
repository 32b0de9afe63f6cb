"""The card of a trained policy: README.md in the folder of the saved model, with metadata for Hugging Face's hub."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_r1_tools.text import printable
from llm_utils import distributed
from llm_utils.records.displays import evaluations
from llm_utils.records.earlier_runs import beginning_of_run
from llm_utils.records.intervals import wilson
from llm_utils.recovery.checkpoint import save_model

# Flags of the card's table, if the script has them.
FLAGS = (
    "env_kwargs", "seed", "total_episodes", "num_steps", "learning_rate", "lora_rank", "group_size", "kl_coef",
    "temperature", "dtype", "tokenizer", "chat_template", "data",
)  # fmt: skip


def save_with_card(policy: Any, folder: Path, tokenizer: str | None, args: Any, summary: Mapping[str, Any]) -> None:
    """Save the trained policy as `checkpoint.save_model` does, and write README.md beside it. `summary` has the figures
    of the run's evaluations. All processes must call this together. Raise OSError."""
    save_model(policy, folder, tokenizer, args.chat_template)
    if distributed.rank() > 0:
        return
    parameters = sum(weight.numel() for name, weight in policy.named_parameters() if "lora_" not in name)
    (folder / "README.md").write_text(card(folder, args, summary, parameters), encoding="utf-8")


def card(folder: Path, args: Any, summary: Mapping[str, Any], parameters: int) -> str:
    """Return the card's text. Names that someone else may have chosen are escaped."""
    script = Path(sys.argv[0]).stem
    method = "sft" if script == "sft_llm" else "reinforcement-learning"
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if (base := hub_name(args.model)) is not None:
        metadata["base_model"] = base
    metadata["tags"] = ["agent-r1", "tool-use", method]
    facts = {
        "base model": code(args.model),
        "parameters": f"{parameters:,}",
        "environment": code(args.env_id),
        "split": code(args.split),
        "algorithm": code(f"{script}.py"),
    }
    for name in FLAGS:
        value = getattr(args, name, None)
        if value not in (None, "", 0, "{}") or (name == "seed" and value == 0):
            facts[code(f"--{name.replace('_', '-')}")] = code(value)
    rows = [f"| {name} | {value} |" for name, value in (facts | figures(summary)).items()]
    of_run = (folder.parent / "summary.json").is_file()
    each = evaluations(folder.parent if of_run else folder, folder, args)
    use = [shlex.join(["python", "learner/evaluate_llm.py", *flags]) for flags in each]
    use.append(f"vllm serve {shlex.quote(str(folder))}")
    title = re.sub(r"[^\w./ -]", " ", (folder.parent if of_run else folder).name, flags=re.ASCII)
    parts = [
        "---\n" + "".join(f"{name}: {json.dumps(value)}\n" for name, value in metadata.items()) + "---",
        f"# {title}",
        "A policy that solves tasks by calling tools, trained with Agent-R1 for Gymnasium.",
        "\n".join(["| | |", "|---|---|", *rows]),
        "Evaluate it, or serve it:",
        "\n".join(["```bash", *map(one_line, use), "```"]),
        "The licence is that of the base model.",
    ]
    if args.tokenizer == "byte":
        parts.insert(4, "The tokenizer is the environments' byte tokenizer, saved for transformers with the same ids.")
    return "\n\n".join(parts) + "\n"


def figures(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows of the table about evaluations, before and after training; of a run on several environments also
    those of each."""
    rows = {}
    names = {"success": "success", "exact_match": "exact match", "expert_token_loss": "expert-token loss"}
    for env in dict.fromkeys(key.rpartition("/")[0] for key in summary if key.startswith("eval/")):
        count, of_env = summary.get(f"{env}/episodes"), env.removeprefix("eval").removeprefix("/")
        for name, shown in names.items():
            values = [summary.get(f"{env}/{name}_{when}") for when in ("first", "last")]
            numbers = [_with_interval(value, count) for value in values if isinstance(value, int | float)]
            if len(numbers) == 2:
                title = f"{shown} on {count} held-out tasks" if count else f"{shown} on held-out tasks"
                title += f" of {code(of_env)}" * bool(of_env) + ", greedy" * bool(count)
                rows[title] = f"{numbers[0]} before, {numbers[1]} after"
    return rows


def _with_interval(value: float, count: int | None) -> str:
    if not count or not 0 <= value <= 1:
        return f"{value:.4f}"
    low, high = wilson(value, count)
    return f"{value:.3f} (95 % CI {low:.3f} to {high:.3f})"


def hub_name(model: str | None) -> str | None:
    """Return the name on the hub of the model that a run began with, also over several runs; None if there is none."""
    seen: set[str] = set()
    while model is not None and os.path.isdir(os.path.expanduser(model)) and model not in seen:
        seen.add(model)
        model = beginning_of_run(model)
    valid = model is not None and re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", model, re.ASCII)
    return model if valid and model not in ("tiny", "scratch", *seen) else None


def one_line(value: Any) -> str:
    """Return a text, or a list of texts, as one line without control characters."""
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return printable(" ".join(text.split()))


def code(value: Any) -> str:
    """Return a value as code in a cell of a Markdown table. A fence longer than any inside it cannot be closed."""
    line = re.sub(r"\\*\|", r"\\|", one_line(value))  # a pipe after two backslashes would end the cell
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    pad = " " if line[:1] == "`" or line[-1:] == "`" else ""
    return f"{fence}{pad}{line}{pad}{fence}" if line else ""
