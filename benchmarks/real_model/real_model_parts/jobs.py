"""The runs of the scripts in learner/ that a real model's questions take, as jobs."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from sweep import Job, make_job

from llm_utils.records.run_files import write_json
from real_model_parts.questions import env_kwargs
from real_model_parts.suites import LEARNERS, PAIRS, START, Suite

SAMPLING = ("engine", "vllm_url", "dtype", "num_envs", "temperature", "top_p")  # learners and evaluations have them
ALL = {"exp-name", "model", "tokenizer", "chat-template", "env-id", "env-kwargs", "data-dir", "split", "resume"}
FIXED = {  # what makes a run the one that its label says, so no further flag may change it
    "sft_flags": {*ALL, "data", "eval-data", "out"},
    "rl_flags": {*ALL, "seed", "save-model", "eval-split", "sample-by-pass-rate"},
    "evaluate_flags": {
        *ALL, "seed", "mode", "episodes", "first-episode", "samples", "adapter", "api", "api-model", "decode",
        "candidates", "critic",
    },
}  # fmt: skip


def flag_name(word: str) -> str:
    """Of "--a-b=c", "--a_b" and "--no-a-b": "a-b"."""
    return word.partition("=")[0].removeprefix("--").replace("_", "-").removeprefix("no-")


def without_speed(flags: str) -> str:
    """Flags without those that change no figure but for rounding."""
    words, kept = iter(shlex.split(flags)), []
    for word in words:
        if not word.startswith("--") or flag_name(word) not in ("num-threads", "num-envs"):
            kept.append(word)
        elif "=" not in word:
            next(words, None)
    return shlex.join(kept)


@contextmanager
def once(note: Path, facts: Any) -> Iterator[bool]:
    """Yields True where this wasn't done yet for these facts, and notes at the end that it is."""
    needed = not note.is_file() or json.loads(note.read_text()) != facts
    if needed:
        note.unlink(missing_ok=True)
    yield needed
    if needed:
        write_json(note, facts)


def merged(label: str, seed: int = 1) -> str:
    """The folder of a model with a policy's adapters in its weights."""
    return "start" if label == START else label + f" {seed}" * (seed > 1)


def sft_jobs(suite: Suite, model: str, work: Path, flags: Sequence[str]) -> dict[str, Job]:
    jobs = {}
    for label, kind, own in ((START, "agent", suite.sft), (PAIRS, "closed_book", suite.pairs)):
        words = ["python", "learner/sft_llm.py", "--exp-name", f"real_{work.name}_{kind}", "--model", model]
        words += ["--env-id", next(iter(suite.sets.values())).env_id, "--data", str(work / f"{kind}_train.jsonl")]
        words += ["--eval-data", str(work / f"{kind}_heldout.jsonl"), "--microbatch-tokens", "2048"]
        words += ["--eval-every", "56", "--checkpoint-every", "56"]
        jobs[label] = make_job([*words, *own, *flags])
    return jobs


def rl_job(suite: Suite, work: Path, start: Path, label: str, seed: int, flags: Sequence[str]) -> Job:
    script, changed = LEARNERS[label]
    first = suite.sets[suite.reinforced[0]]
    kwargs = env_kwargs(suite, work / "reinforced", **changed)
    name = re.sub(r"\W+", "_", f"real_{work.name}_{label.lower()}")
    words = ["python", f"learner/{script}", "--exp-name", name, "--seed", str(seed), "--env-id", first.env_id]
    words += ["--env-kwargs", kwargs, "--model", str(start), "--save-model"]
    given = {flag_name(word): word.partition("=")[2] or after for word, after in pairwise([*flags, ""])}
    if given.get("eval-episodes") != "0":  # with it the other two would do nothing
        words += ["--eval-split", first.split, "--eval-episodes", "200", "--eval-every", "8"]
    return make_job([*words, "--checkpoint-every", "8", *suite.rl, *flags])


def profile_job(suite: Suite, work: Path, learner: Job, times: int, questions: int | None = None) -> Job:
    """Every training question, or the first `questions`, so many times, sampled as this learner samples."""
    args = learner.args
    words = ["python", "learner/evaluate_llm.py", "--exp-name", f"real_{work.name}_profile", "--model", args["model"]]
    words += ["--env-id", args["env_id"], "--env-kwargs", env_kwargs(suite, work / "reinforced"), "--split", "train"]
    words += ["--episodes", str(questions or 1_000_000), "--samples", str(times)]
    words += ["--cuda" if args["cuda"] else "--no-cuda"]
    same = [name for name in SAMPLING if name != "dtype" or args["engine"] == "transformers"]
    words += [word for name in same for word in (f"--{name.replace('_', '-')}", str(args[name]))]
    return make_job([*words, *["--num-threads", str(learner.threads)] * (learner.threads is not None)])


def evaluation_job(suite: Suite, name: str, data: Path, questions: str, label: str, seed: int, model: str, mode: str,
                   flags: Sequence[str]) -> Job:  # fmt: skip
    """`questions` is the hash of their file: of another one a run is another."""
    data_set = suite.sets[name]
    exp_name = re.sub(r"\W+", "_", f"real_{label.lower()}_{name.lower()}_{questions}")
    words = ["python", "learner/evaluate_llm.py", "--exp-name", exp_name, "--seed", str(seed), "--model", model]
    words += ["--mode", mode, "--env-id", data_set.env_id, "--split", data_set.split, "--episodes", "1000000"]
    words += ["--env-kwargs", env_kwargs(suite, data / data_set.folder), "--num-envs", "32"]
    return make_job([*words, *flags])


def check_jobs(jobs: Sequence[Job]) -> None:
    """SystemExit where a script would refuse its arguments: now, not after the hours of those before it."""
    for job in jobs:
        script = importlib.import_module(Path(job.words[1]).stem)
        script.check(script.Args(**job.args))


def builds_on(
    part: str, missing: Sequence[tuple[str, int]], reinforced: Sequence[tuple[str, int]], baselines: bool = True
) -> list[str]:
    """The supervised policies that a part needs: reinforcement begins with one, an evaluation plays what is missing."""
    if part == "sft":
        return [START, PAIRS] if baselines else [START]
    wanted = {START} if reinforced or part == "rl" else set()
    if part == "evaluate":
        wanted |= {label for label, _ in missing}
    return [label for label in (START, PAIRS) if label in wanted]
