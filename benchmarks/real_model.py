"""A real model learns real questions: supervised on demonstrations, then by reinforcement, then judged on dev.

    python benchmarks/real_model.py --part sft --suite wiki --model FOLDER --data DATA
    python benchmarks/real_model.py --part rl --suite wiki --model FOLDER --data DATA         # begins with sft
    python benchmarks/real_model.py --part evaluate --suite wiki --model FOLDER --data DATA   # begins with both
    python benchmarks/real_model.py --part report --suite wiki --model FOLDER --data DATA     # of what is recorded

What the repository has recorded is of one model (docs/real_model.md): with another one, or other flags, give `--name`.

`--suite wiki` is HotpotQA, 2WikiMultihopQA and MuSiQue with a search tool (reinforcement on the first two), `--suite
gsm8k` is GSM8K with a calculator. FOLDER is a small chat model (SmolLM2-135M-Instruct), DATA holds hotpotqa/,
2wikimultihopqa/, musique/, gsm8k/ in the official formats. A tenth of the training questions is held out to choose by;
dev (GSM8K: test) is read by `--part evaluate` only.

Long work comes in pieces: after `--hours` (or Ctrl-C) the run under way writes its checkpoint, and the same command
goes on. Finished runs are not repeated (llm_utils/benchmark.py). Each evaluation that ends is a line of
results/NAME_episodes.jsonl, and what stands there is neither trained nor played again. `--adapters FOLDER` begins with
the adapters of a supervised training on demonstrations (RUN/checkpoint/policy of a run with --lora-rank) in place of
that run; `GRPO=FOLDER` beside it evaluates those of a learner, on top, in place of its run with seed 1. On a GPU
`--rl-flags "--engine vllm"` and the like speed things up. Tables and JSON go to results/.
"""

import argparse
import gzip
import hashlib
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from machine import RESULTS, above_0, describe_machine, from_1, record_results
from scores import cell, interval

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "learner"))
from llm_utils.benchmark import Job, find, finish, make_job  # noqa: E402
from llm_utils.checkpoint import save_model  # noqa: E402
from llm_utils.compare import read_curve  # noqa: E402
from llm_utils.demonstrations import Demonstrations  # noqa: E402
from llm_utils.loading import load_policy, merge_adapters  # noqa: E402
from llm_utils.run_files import write_json  # noqa: E402


@dataclass(frozen=True)
class DataSet:
    """One set: its environment, and where its questions stand."""

    env_id: str
    folder: str
    train: str  # the official file
    heldout: str  # the file that the environment reads in `split`; ours holds training questions
    split: str


@dataclass(frozen=True)
class Suite:
    """What is trained on, what it is judged by, and how."""

    sets: dict[str, DataSet]
    reinforced: list[str]  # the sets that reinforcement sees, one format
    columns: dict[str, list[str]]  # of the table: name -> sets that are averaged
    env_kwargs: dict[str, Any]
    modes: dict[str, str]  # baselines of the model as it comes: label -> mode of evaluate_llm.py
    sft: list[str]
    pairs: list[str]
    rl: list[str]
    no_process: dict[str, Any] = field(default_factory=lambda: {"process_reward": False})


HOTPOT = DataSet("AgentR1/HotpotQA-v0", "hotpotqa", "hotpot_train_v1.1.json", "hotpot_dev_distractor_v1.json", "dev")
WIKI = Suite(
    {
        "HotpotQA": HOTPOT,
        "2WikiMultihopQA": DataSet("AgentR1/2WikiMultihopQA-v0", "2wikimultihopqa", "train.json", "dev.json", "dev"),
        "MuSiQue": DataSet(
            "AgentR1/MuSiQue-v0", "musique", "musique_ans_v1.0_train.jsonl", "musique_ans_v1.0_dev.jsonl", "dev"
        ),
    },
    ["HotpotQA", "2WikiMultihopQA"],
    {"in domain": ["HotpotQA", "2WikiMultihopQA"], "out of domain": ["MuSiQue"]},
    {"top_k": 1, "max_turns": 6, "max_context_tokens": 2048, "max_action_tokens": 64},
    {"base, naive RAG": "naive_rag", "base tool call": "agent"},
    ["--num-steps", "224", "--batch-size", "8", "--learning-rate", "1e-4", "--warmup-steps", "10"],
    ["--num-steps", "224", "--batch-size", "8", "--learning-rate", "1e-4", "--warmup-steps", "10"],
    ["--total-episodes", "4096", "--episodes-per-iteration", "64", "--num-minibatches", "1", "--num-envs", "64"],
)
GSM8K = Suite(
    {"GSM8K": DataSet("AgentR1/GSM8K-v0", "gsm8k", "train.jsonl", "test.jsonl", "test")},
    ["GSM8K"],
    {},
    {"tools": ["calculator"], "max_turns": 10, "max_context_tokens": 1024, "max_action_tokens": 96},
    {"base tool call": "agent"},
    ["--num-steps", "1681", "--batch-size", "8", "--learning-rate", "1e-4", "--warmup-steps", "50"],
    ["--num-steps", "1681", "--batch-size", "8", "--learning-rate", "1e-4", "--warmup-steps", "50"],
    ["--total-episodes", "4096", "--episodes-per-iteration", "64", "--num-minibatches", "1", "--num-envs", "64"],
)
SUITES = {"wiki": WIKI, "gsm8k": GSM8K}
LEARNERS = {  # label -> script, process rewards
    "GRPO": ("grpo_llm.py", True),
    "GRPO, outcome only": ("grpo_llm.py", False),
    "PPO": ("ppo_llm.py", True),
    "PPO, outcome only": ("ppo_llm.py", False),
}
START = "SFT on demonstrations"
PAIRS = "SFT on question-answer pairs"
PARTS = ("sft", "rl", "evaluate", "report")
ERRORS = ("format", "search", "copying", "reasoning")
MEASURED = 100  # held-out questions of a set, at most, on whose demonstrations the loss is measured
Key = tuple[str, str, int]  # policy, set, seed
Figures = dict[str, list[Any]]


# ---------------------------------------------------------------------------------------------------------- questions


def find_file(path: Path) -> Path:
    """An official file, packed or not."""
    for found in (path, path.with_name(path.name + ".gz")):
        if found.is_file():
            return found
    raise SystemExit(f"there is no {path} (nor with .gz); --data holds a folder for each set, see docs/data.md")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an official file, JSON or JSON lines, packed or not."""
    found = find_file(path)
    text = gzip.open(found, "rt").read() if found.suffix == ".gz" else found.read_text()
    if ".jsonl" not in path.name:
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n") if line.strip()]  # str.splitlines() also splits at U+2028


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.suffix == ".jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) if lines else json.dumps(rows))


def split_questions(suite: Suite, data: Path, work: Path) -> None:
    """Write nine tenths of each set's training questions as its train file, the others as its held-out file.

    The sets that reinforcement sees stand together in `reinforced/`, in the format of the first one.
    """
    rng = np.random.default_rng(0)
    together: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for name, data_set in suite.sets.items():
        rows = read_rows(data / data_set.folder / data_set.train)
        out = set(rng.permutation(len(rows))[: max(1, len(rows) // 10)].tolist())
        for is_out, file in ((False, data_set.train), (True, data_set.heldout)):
            some = [row for index, row in enumerate(rows) if (index in out) == is_out]
            write_rows(work / data_set.folder / file, some)
            if name in suite.reinforced:
                together[is_out] += some
    first = suite.sets[suite.reinforced[0]]
    for is_out, file in ((False, first.train), (True, first.heldout)):
        order = rng.permutation(len(together[is_out]))
        write_rows(work / "reinforced" / file, [together[is_out][index] for index in order])


def env_kwargs(suite: Suite, folder: Path, **more: Any) -> str:
    return json.dumps({**suite.env_kwargs, "data_dir": str(folder), **more})


def write_demonstrations(suite: Suite, model: str, work: Path) -> None:
    """Rows of tokens for sft_llm.py: demonstrations with tools, and question-answer pairs without."""
    for kind in ("agent", "closed_book"):
        for part in ("train", "heldout"):
            path = work / f"{kind}_{part}.jsonl"
            rows = []
            for data_set in suite.sets.values():
                split = "train" if part == "train" else data_set.split
                kwargs = json.loads(env_kwargs(suite, work / data_set.folder))
                maker = Demonstrations(data_set.env_id, split, kwargs, model, seed=0, mode=kind)
                tasks = maker.make_env().num_tasks
                rows += maker.make(0, tasks if part == "train" else min(tasks, MEASURED), expert_share=1.0)
            content = [{"tokens": r.tokens.tolist(), "action_mask": r.action_mask.astype(int).tolist()} for r in rows]
            write_rows(path, content)
            lengths = [len(r.tokens) for r in rows]
            print(f"{path}: {len(rows)} rows of {np.mean(lengths):.0f} tokens, the longest of {max(lengths)}")


def name_and_folder(text: str) -> tuple[str, Path]:
    """Whose adapters, and where they are, of "GRPO=FOLDER" or "FOLDER"."""
    name, given, folder = text.partition("=")
    if name in LEARNERS and given:
        return name, Path(folder).resolve()
    if given and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(LEARNERS)}")
    return START, Path(text).resolve()


def hash_of(adapters: Path) -> str:
    """Of the weights of adapters."""
    file = adapters / "adapter_model.safetensors"
    if not file.is_file():
        raise SystemExit(f"--adapters {adapters}: there is no {file.name}; give a folder that peft saved")
    return hash_of_files([file])


def hash_of_files(files: Sequence[Path]) -> str:
    """Of what they hold, unpacked."""
    found = hashlib.sha256()
    for file in sorted(files):
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as content:
            while block := content.read(1 << 20):
                found.update(block)
    return found.hexdigest()[:16]


def hash_of_model(model: str) -> str:
    """Of a folder's weights; a name on a hub stands for itself."""
    weights = list(Path(model).glob("*.safetensors"))
    return hash_of_files(weights) if weights else model


def without_threads(flags: str) -> str:
    """Flags without the one that changes no figure."""
    words = iter(shlex.split(flags))
    kept = [word for word in words if word != "--num-threads" or next(words, None) is None]
    return shlex.join(word for word in kept if not word.startswith("--num-threads="))


def merge(model: str, adapters: Path, folder: Path) -> None:
    """Write the model with LoRA adapters added to its weights, as learners begin with it."""
    save_model(merge_adapters(load_policy(model, torch.device("cpu"), whole=True), str(adapters)), folder, model)


# --------------------------------------------------------------------------------------------------------------- jobs


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
    script, process = LEARNERS[label]
    first = suite.sets[suite.reinforced[0]]
    kwargs = env_kwargs(suite, work / "reinforced", **({} if process else suite.no_process))
    name = re.sub(r"\W+", "_", f"real_{work.name}_{label.lower()}")
    words = ["python", f"learner/{script}", "--exp-name", name, "--seed", str(seed), "--env-id", first.env_id]
    words += ["--env-kwargs", kwargs, "--model", str(start), "--save-model"]
    words += ["--eval-split", first.split, "--eval-episodes", "200", "--eval-every", "8", "--checkpoint-every", "8"]
    return make_job([*words, *suite.rl, *flags])


def evaluation_job(suite: Suite, name: str, data: Path, questions: str, label: str, seed: int, model: str, mode: str,
                   flags: Sequence[str]) -> Job:  # fmt: skip
    """`questions` is the hash of their file: of another one a run is another."""
    data_set = suite.sets[name]
    exp_name = re.sub(r"\W+", "_", f"real_{label.lower()}_{name.lower()}_{questions}")
    words = ["python", "learner/evaluate_llm.py", "--exp-name", exp_name, "--seed", str(seed), "--model", model]
    words += ["--mode", mode, "--env-id", data_set.env_id, "--split", data_set.split, "--episodes", "1000000"]
    words += ["--env-kwargs", env_kwargs(suite, data / data_set.folder), "--num-envs", "32"]
    return make_job([*words, *flags])


# ------------------------------------------------------------------------------------------------------------- errors


def well_formed(row: dict[str, Any]) -> bool:
    terms = row["reward_terms"]  # of each turn; older runs wrote their sum
    turns = [terms] if isinstance(terms, dict) else terms
    return not any({"outcome/format", "outcome/unfinished"} & terms.keys() for terms in turns)


def kind_of_error(row: dict[str, Any], text: str, answer: str) -> str | None:
    """What went wrong in an episode: the first of `ERRORS` that holds; None where it was right.

    format: no well-formed answer. search: not every gold passage was found. copying: the answer stands in nothing that
    the tools said. reasoning: it does, and is wrong.
    """
    if row["stats"].get("success"):
        return None
    if not well_formed(row):
        return "format"
    if row["stats"].get("support_recall", 1.0) < 1.0:
        return "search"
    shown = " ".join(text.casefold().split())
    return "reasoning" if " ".join(answer.casefold().split()) in shown else "copying"


def read_episodes(folder: Path, tokenizer: Any) -> list[dict[str, Any]]:
    """The episodes of an evaluation in the order of their tasks, with `text`, `answer` and `error`."""
    rows = [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]
    for row in rows:
        mask, start = np.array(row["action_mask"], bool), row["prompt_length"]
        tokens = np.array(row["tokens"])
        given = tokenizer.decode(tokens[start:][~mask[start:]].tolist())
        last = row["turns"][-1] if row["turns"] else [0, 0]
        said = tokenizer.decode(tokens[last[0] : last[1]].tolist())
        row["answer"] = (re.findall(r"<answer>(.*?)</answer>", said, re.DOTALL) or [""])[-1].strip()
        row["text"] = tokenizer.decode(tokens.tolist())
        row["error"] = kind_of_error(row, given, row["answer"])
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


def story(example: dict[str, Any], longest: int = 300) -> str:
    """An example in Markdown, a line a turn."""
    lines = [f"**{example['error']}**, task {example['task']}: {example['question']}", ""]
    for role, text in example["said"]:
        text = " ".join(text.split())
        cut = text if len(text) <= longest else text[:longest] + " ..."
        lines.append(f"- {role}: `{cut.replace('`', chr(39))}`")
    return "\n".join([*lines, f"- right: {'; '.join(example['right'])}", ""])


# ------------------------------------------------------------------------------------------------------------- tables

METRICS = {"em": "EM", "f1": "F1", "support_recall": "support recall", "format": "right format", "tool_calls": "calls",
           "tool_errors": "tool errors"}  # fmt: skip


def proportion(values: Sequence[float]) -> str:
    import evaluate_llm

    low, high = evaluate_llm.wilson(values)
    return cell(float(np.mean(values)), low, high)


def figures(rows: Sequence[dict[str, Any]]) -> Figures:
    """Of each question in order: what is measured (None where it isn't), and the kind of error."""
    found: Figures = {metric: [row["stats"].get(metric) for row in rows] for metric in METRICS}
    return found | {"format": [float(well_formed(row)) for row in rows], "error": [row["error"] for row in rows]}


def complete(scores: dict[str, np.ndarray], names: Sequence[str]) -> bool:
    """Whether all of these sets were played, with as many seeds each."""
    seeds = {len(scores.get(name, ())) for name in names}
    return len(seeds) == 1 and 0 not in seeds


def tables(suite: Suite, episodes: dict[str, dict[str, list[Figures]]]) -> tuple[str, dict[str, Any]]:
    """`episodes` is label -> set -> the figures of each seed. Markdown, and the same as numbers."""
    numbers: dict[str, Any] = {"metrics": {}, "differences": {}, "errors": {}, "questions": {}}
    lines = ["| policy | set | questions | " + " | ".join(METRICS.values()) + " |", "|---" * (3 + len(METRICS)) + "|"]
    scores: dict[str, dict[str, np.ndarray]] = {}
    for label, sets in episodes.items():
        scores[label] = {}
        for name, seeds in sets.items():
            values = {metric: [np.array(seed[metric], float) for seed in seeds] for metric in METRICS}
            scores[label][name] = np.array(values["em"])
            numbers["questions"][name] = len(seeds[0]["em"])
            numbers["metrics"].setdefault(label, {})[name] = {
                metric: [float(np.mean(seed)) for seed in found] for metric, found in values.items()
            }
            cells = []
            for metric, found in values.items():
                flat = np.concatenate(found)
                if np.isnan(flat).any():
                    cells.append("–")
                elif metric in ("em", "format"):
                    cells.append(proportion(found[0]) if len(found) == 1 else
                                 cell(*interval({name: np.array(found)})))  # fmt: skip
                else:
                    cells.append(f"{flat.mean():.3f}")
            lines.append(f"| {label} | {name} | {len(seeds[0]['em'])} | " + " | ".join(cells) + " |")
            kinds = {kind: sum(seed["error"].count(kind) for seed in seeds) for kind in ERRORS}
            numbers["errors"].setdefault(label, {})[name] = kinds
    columns = {name: [name] for name in suite.sets} | suite.columns
    lines += ["", "| EM against " + START + " | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for label in scores:
        if label == START or START not in scores:
            continue
        found = {column: interval(scores[label], scores[START], names) for column, names in columns.items()
                 if complete(scores[label], names) and complete(scores[START], names)}  # fmt: skip
        numbers["differences"][label] = found
        cells = [cell(*found[column], sign="+") if column in found else "–" for column in columns]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += ["", "| what went wrong, episodes | set | " + " | ".join(ERRORS) + " |", "|---" * (2 + len(ERRORS)) + "|"]
    for label, sets in numbers["errors"].items():
        for name, kinds in sets.items():
            lines.append(f"| {label} | {name} | " + " | ".join(str(kinds[kind]) for kind in ERRORS) + " |")
    return "\n".join(lines), numbers


OF_A_RUN = dict.fromkeys(("time/rollout", "time/score", "time/train", "time/sync"), np.sum)  # seconds
OF_A_RUN |= dict.fromkeys(("sampler/gap_mean", "losses/entropy"), np.mean)


def record_curves(
    jobs: dict[tuple[str, int], Job], how: dict[tuple[str, int], str], path: Path
) -> dict[str, dict[str, Any]]:
    """Training return and held-out EM of each run, against episodes and seconds of training, and where its time went;
    also of one that isn't finished. Those of other runs stay in the file, but for a learner's that were made in another
    way."""
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}
    for (label, seed), job in jobs.items():
        folder, _ = find(job)
        one: dict[str, Any] = {}
        for metric in ("charts/episodic_return", "charts/exact_match", "eval/em") if folder else ():
            with suppress(KeyError):  # nothing of it yet
                curves = {x: read_curve(folder, metric, x) for x in ("episodes", "seconds")}
                one |= {f"{metric} at {x}": at.tolist() for x, (at, _) in curves.items()}
                one[metric] = curves["episodes"][1].tolist()
        for metric, whole in OF_A_RUN.items() if folder else ():
            with suppress(KeyError):
                one[metric] = float(whole(read_curve(folder, metric)[1]))
        if one:
            others = found.get(label, {})
            found[label] = {key: run for key, run in others.items() if run["how"] == how[label, seed]}
            found[label][str(seed)] = {"how": how[label, seed]} | one
    if found:
        path.parent.mkdir(exist_ok=True)
        write_json(path, found)
    return found


def runs_table(found: dict[str, dict[str, Any]]) -> str:
    """How far each training came, and what it was like in its first and second half, in Markdown."""
    heads = ["training", "seed", "episodes", "minutes", "rollout, scoring, update", "return, halves"]
    heads += ["EM of samples, halves", "held-out EM, greedy"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for label, runs in found.items():
        for seed, run in runs.items():
            if "charts/episodic_return" not in run:
                continue
            cells = [label, seed, f"{run['charts/episodic_return at episodes'][-1]:,.0f}"]
            cells.append(f"{run['charts/episodic_return at seconds'][-1] / 60:.1f}")
            parts = [run.get(f"time/{part}") for part in ("rollout", "score", "train")]
            whole = sum(filter(None, parts)) + run.get("time/sync", 0.0)
            cells.append("–" if None in parts else ", ".join(f"{100 * part / whole:.0f} %" for part in parts))
            for metric in ("charts/episodic_return", "charts/exact_match"):
                values = run.get(metric, [])
                halves = values[: len(values) // 2], values[len(values) - len(values) // 2 :]
                cells.append(", ".join(f"{np.mean(half):.3f}" for half in halves) if halves[0] else "–")
            cells.append(", ".join(f"{value:.3f}" for value in run.get("eval/em", ())) or "–")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def hours_axis(axes: Any, run: dict[str, Any]) -> Any:
    """The hours of a run above its episodes; beyond the run at its mean speed."""
    episodes, seconds = ([0.0, *run[f"charts/episodic_return at {x}"]] for x in ("episodes", "seconds"))
    x, hours = (np.array([-at[-1], *at, 2 * at[-1]]) for at in (episodes, np.array(seconds) / 3600))
    there, back = (lambda at: np.interp(at, x, hours)), (lambda at: np.interp(at, hours, x))
    return axes.secondary_xaxis("top", functions=(there, back))


def plot_dev(axes: Any, label: str, end: float, recorded: dict[Key, Figures], colours: Iterator[str]) -> None:
    """Exact match on each set of dev, before training and after it, at `end` episodes, with 95 % intervals."""
    import evaluate_llm

    for place, which in enumerate(dict.fromkeys(which for _, which, _ in recorded)):
        rows = [[row["em"] for (name, one, _), row in recorded.items() if (name, one) == (policy, which)]
                for policy in (START, label)]  # fmt: skip
        if all(rows):
            em = [np.concatenate(row) for row in rows]
            y = np.array([[values.mean(), *evaluate_llm.wilson(values)] for values in em])
            x = np.array([0, end]) + 0.012 * end * place  # or intervals hide each other
            around = np.abs(y[:, 1:] - y[:, :1]).T
            named = {"color": next(colours), "label": f"{label}, {which}, dev"}
            axes.errorbar(x, y[:, 0], around, fmt="o:", linewidth=1, **named)


def plot(found: dict[str, dict[str, Any]], recorded: dict[Key, Figures], path: Path) -> None:
    """Left the training return, with its mean over five iterations, right the greedy exact match: on held-out questions
    on the way, on dev before and after. A step's few questions differ much from the next one's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.4))
    for axes, metric, shown in zip(panels, ("charts/episodic_return", "eval/em"),
                                   ("training return", "exact match, greedy"), strict=True):
        for number, (label, runs) in enumerate(found.items()):
            for index, run in enumerate(run for run in runs.values() if metric in run):
                x, y = np.array(run[f"{metric} at episodes"]), np.array(run[metric])
                smooth = [(np.convolve(z, np.ones(5) / 5, "valid") if len(z) > 4 else z) for z in (x, y)]
                of = f"{label}, held-out questions" if metric == "eval/em" else label
                axes.plot(x, y, ".", color=f"C{number}", alpha=0.5)
                axes.plot(*(smooth if metric.startswith("charts") else (x, y)), color=f"C{number}",
                          label=of if index == 0 else None)  # fmt: skip
        axes.set(xlabel="training episodes", ylabel=shown)
        axes.set_ylim(min(0.0, axes.get_ylim()[0]), max(1.0, axes.get_ylim()[1]))
        axes.spines[["top", "right"]].set_visible(False)
    colours = (f"C{number}" for number in count(len(found)))
    trained = [(label, run) for label, runs in found.items() for run in runs.values()
               if "charts/episodic_return" in run]  # fmt: skip
    for label, run in dict(trained).items():
        plot_dev(panels[1], label, run["charts/episodic_return at episodes"][-1], recorded, colours)
    if trained:
        panels[1].set_xlabel("training episodes (dev, before and after: side by side, to be read)")
        hours_axis(panels[0], trained[0][1]).set_xlabel("hours of the first run")
    panels[1].legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# --------------------------------------------------------------------------------------------------------------- main


def builds_on(part: str, missing: Sequence[tuple[str, int]], reinforced: Sequence[tuple[str, int]]) -> list[str]:
    """The supervised policies that a part needs: reinforcement begins with one, an evaluation plays what is missing."""
    if part == "sft":
        return [START, PAIRS]
    wanted = {START} if reinforced or part == "rl" else set()
    if part == "evaluate":
        wanted |= {label for label, _ in missing}
    return [label for label in (START, PAIRS) if label in wanted]


def evaluate(jobs: dict[Key, Job], how: dict[Key, dict[str, Any]], record: Path, model: str, workers: int) -> None:
    """Play what isn't recorded, and record a line of each evaluation that ends, also when others were interrupted."""
    from agent_r1.tokenizers import load_tokenizer

    jobs = {key: job for key, job in jobs.items() if key not in read_record(record, how)}
    try:
        finish(list(jobs.values()), workers)
    finally:
        for key, job in jobs.items():
            folder, finished = find(job)
            if finished:
                line = dict(zip(("policy", "set", "seed"), key, strict=True)) | how[key]
                line["machine"] = describe_machine()
                rows = read_episodes(folder, load_tokenizer(model))
                env = make_env(json.loads((folder / "evaluation.json").read_text())["args"])
                line |= figures(rows)
                line["examples"] = examples(rows, lambda index, env=env: env.make_task(index).answers)
                record.parent.mkdir(exist_ok=True)
                with record.open("a") as file:
                    file.write(json.dumps(line) + "\n")


def write_report(suite: Suite, name: str, recorded: dict[Key, Figures], args: argparse.Namespace) -> None:
    """Write the tables of what is recorded, and episodes that went wrong. SystemExit where nothing is."""
    if not recorded:
        raise SystemExit(f"nothing of {name} is recorded; --part evaluate plays it")
    episodes: dict[str, dict[str, list[Figures]]] = {}
    to_read = [f"# Episodes that went wrong\n\nThe first of each kind, of the trained agents of `{name}.md`."]
    for (label, which, seed), found in recorded.items():
        episodes.setdefault(label, {}).setdefault(which, []).append(found)
        if label == START or label in LEARNERS:
            to_read += [f"## {label}, {which}, seed {seed}", *map(story, found.get("examples", ()))]
    (RESULTS / f"{name}_examples.md").write_text("\n\n".join(to_read) + "\n")
    table, numbers = tables(suite, episodes)
    curves = RESULTS / f"{name}_curves.json"
    if curves.is_file():
        found = json.loads(curves.read_text())
        plot(found, recorded, ROOT / "docs" / "images" / f"{name}.png")
        table += f"\n\n{runs_table(found)}"
    print(table)
    command = f"python benchmarks/real_model.py --part {args.part} --suite {args.suite} --model FOLDER"
    command += f" --data DATA --seeds {args.seeds}" + (f" --name {name}" if args.name else "")
    command += f" --learners {shlex.join(args.learners)}".rstrip()
    if args.adapters:
        given = ["ADAPTERS" if label == START else f"{label}=ADAPTERS" for label, _ in args.adapters]
        command += f" --adapters {shlex.join(given)}"
    command += "" if args.baselines else " --no-baselines"
    for flag in ("sft_flags", "rl_flags", "evaluate_flags"):
        if getattr(args, flag):
            command += f' --{flag.replace("_", "-")} "{getattr(args, flag)}"'
    record_results(name, numbers, table, command, merged=True)


def how_trained(suite: Suite, reinforced: Sequence[tuple[str, int]], adapters: dict[str, str], questions: str,
                args: argparse.Namespace) -> dict[tuple[str, int], dict[str, Any]]:  # fmt: skip
    """Which training a figure is of, for each policy and seed: its flags and questions, or the hash of adapters."""
    sft = {"sft_flags": without_threads(args.sft_flags), "trained_on": questions}
    start = {"adapters": adapters[START]} if adapters else sft
    found: dict[tuple[str, int], dict[str, Any]] = {(START, 1): start}
    if args.baselines:
        found = {(label, 1): {} for label in suite.modes} | {(PAIRS, 1): sft} | found
    for label, seed in reinforced:
        if args.part != "rl" and seed == 1 and label in adapters:
            found[label, seed] = start | {"on_top": adapters[label]}
        else:
            found[label, seed] = start | {"rl_flags": without_threads(args.rl_flags), "trained_on": questions}
    return found


def how_played(suite: Suite, data: Path, model: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Which model, questions and flags a figure is of, for each set; nothing for a part that plays none of dev."""
    if args.part not in ("evaluate", "report"):
        return {which: {} for which in suite.sets}
    flags = without_threads(args.evaluate_flags)
    files = {which: find_file(data / one.folder / one.heldout) for which, one in suite.sets.items()}
    return {
        which: {"model": model, "questions": hash_of_files([file]), "evaluate_flags": flags}
        for which, file in files.items()
    }


def alike(recorded: dict[Key, Figures], sets: dict[str, dict[str, Any]]) -> dict[Key, Figures]:
    """What was played with these models, questions and flags."""
    return {
        key: row for key, row in recorded.items()
        if key[1] in sets and all(row.get(name) == value for name, value in sets[key[1]].items())
    }  # fmt: skip


def read_record(path: Path, how: dict[Key, dict[str, Any]]) -> dict[Key, Figures]:
    """What was recorded of these. SystemExit for a line that was made in another way."""
    found = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        row = json.loads(line)
        key = (row["policy"], row["set"], row["seed"])
        if key in how and any(row.get(name) != value for name, value in how[key].items()):
            said = f"{path} has {', '.join(map(str, key))} of another model, other questions, or with other flags"
            raise SystemExit(f"{said}; delete that line, or give --name")
        found[key] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True, help="how far to go; what a part builds on comes first")
    parser.add_argument("--suite", choices=list(SUITES), required=True)
    parser.add_argument("--model", required=True, help="the chat model to begin with: a folder or a Hugging Face name")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds the data sets' folders")
    parser.add_argument("--adapters", type=name_and_folder, nargs="*", default=[], metavar="[LEARNER=]FOLDER",
                        help="in place of training on demonstrations; with a learner's name, of its run")
    parser.add_argument("--learners", nargs="*", choices=list(LEARNERS), default=["GRPO"],
                        help="of parts rl and evaluate; without a name only what comes before is evaluated")
    parser.add_argument("--baselines", action=argparse.BooleanOptionalAction, default=True,
                        help="evaluate the model as it comes, and with question-answer pairs")
    parser.add_argument("--seeds", type=from_1, default=1, help="runs of each learner")
    parser.add_argument("--workers", type=from_1, default=1, help="runs at the same time")
    parser.add_argument("--hours", type=above_0, default=2.0,
                        help="stop after so many hours (default: 2); the same command goes on")
    parser.add_argument("--sft-flags", default="", help="further flags of sft_llm.py, in quotation marks")
    parser.add_argument("--rl-flags", default="", help="further flags of the learners, in quotation marks")
    parser.add_argument("--evaluate-flags", default="", help="further flags of evaluate_llm.py, in quotation marks")
    parser.add_argument("--name", help="of the results and of the folder below runs/ (default: real_model_SUITE)")
    args = parser.parse_args()
    os.chdir(ROOT)
    suite, data = SUITES[args.suite], args.data.resolve()
    model = str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model
    name = args.name or f"real_model_{args.suite}"
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C: the run under way writes its checkpoint
    signal.setitimer(signal.ITIMER_REAL, args.hours * 3600)
    adapters: dict[str, Path] = dict(args.adapters)
    if adapters and START not in adapters:
        parser.error("--adapters of a learner come on top of those of the training on demonstrations; give both")
    if len(adapters) < len(args.adapters) or not adapters.keys() <= {START, *args.learners}:
        parser.error("--adapters take one folder each, of the training on demonstrations and of --learners")
    hashes = {label: hash_of(folder) for label, folder in adapters.items()}
    weights = hash_of_model(model)
    questions = hash_of_files([find_file(data / one.folder / one.train) for one in suite.sets.values()])
    work = ROOT / "runs" / "prepared" / f"{name}_{questions}"  # with other questions, runs are others
    facts = {"model": [model, weights], "suite": args.suite} | hashes
    prepared = work / "prepared.json"
    if args.part != "report" and (not prepared.is_file() or json.loads(prepared.read_text()) != facts):
        prepared.unlink(missing_ok=True)
        split_questions(suite, data, work)
        write_demonstrations(suite, model, work)
        if adapters:
            merge(model, adapters[START], work / "start")
        for label in hashes.keys() - {START}:
            merge(str(work / "start"), adapters[label], work / label)
        write_json(prepared, facts)
    # what is recorded needs no run
    wanted = [(label, seed) for label in args.learners for seed in range(1, args.seeds + 1)]
    trained = how_trained(suite, wanted, hashes, questions, args)
    policies = list(trained)
    sets = how_played(suite, data, weights, args)
    how = {(label, which, seed): sets[which] | trained[label, seed] for label, seed in policies for which in sets}
    record = RESULTS / f"{name}_episodes.jsonl"
    recorded = read_record(record, how) if args.part in ("evaluate", "report") else {}
    missing = [(label, seed) for label, seed in policies if any((label, x, seed) not in recorded for x in suite.sets)]
    if args.part == "report":
        write_report(suite, name, alike(recorded, sets), args)
        return
    given = {(label, 1) for label in adapters}
    rl_wanted = [one for one in wanted if args.part == "rl" or (one in missing and one not in given)]

    # train
    runs: dict[tuple[str, int], tuple[str, str]] = {(label, 1): (model, mode) for label, mode in suite.modes.items()}
    jobs = sft_jobs(suite, model, work, shlex.split(args.sft_flags))
    runs |= {(label, 1): (str(work / ("start" if label == START else label)), "agent") for label in adapters}
    needed = [label for label in builds_on(args.part, missing, rl_wanted) if (label, 1) not in runs]
    for label, folder in zip(needed, finish([jobs[label] for label in needed], args.workers), strict=True):
        runs[label, 1] = (str(folder), "closed_book" if label == PAIRS else "agent")
        report = json.loads((folder / "summary.json").read_text())
        print(f"{label}: loss {report['eval/expert_token_loss_first']:.3f} -> "
              f"{report['eval/expert_token_loss_last']:.3f} on held-out questions, "
              f"{report['train_seconds'] / 60:.0f} minutes; {folder}")  # fmt: skip
    if args.part == "sft":
        return
    start = Path(runs[START, 1][0]) if rl_wanted else work
    rl_jobs = {
        (label, seed): rl_job(suite, work, start, label, seed, shlex.split(args.rl_flags)) for label, seed in rl_wanted
    }
    try:
        folders = finish(list(rl_jobs.values()), args.workers)
    finally:
        made = {one: json.dumps(trained[one] | {"model": weights}) for one in rl_jobs}
        if found := record_curves(rl_jobs, made, RESULTS / f"{name}_curves.json"):
            plot(found, {}, ROOT / "docs" / "images" / f"{name}.png")
    for (label, seed), folder in zip(rl_wanted, folders, strict=True):
        runs[label, seed] = (str(folder), "agent")
        report = json.loads((folder / "summary.json").read_text())
        print(f"{label}: held-out EM {report['eval/exact_match_first']:.3f} -> {report['eval/exact_match_last']:.3f}, "
              f"{report['train_seconds'] / 3600:.1f} hours; {folder}")  # fmt: skip
    if args.part == "rl":
        return

    # evaluate
    evaluations = {
        (label, which, seed): evaluation_job(
            suite, which, data, sets[which]["questions"], label, seed, *runs[label, seed],
            shlex.split(args.evaluate_flags),
        )
        for label, seed in missing for which in suite.sets
    }  # fmt: skip
    evaluate(evaluations, how, record, model, args.workers)
    write_report(suite, name, alike(read_record(record, how), sets), args)


if __name__ == "__main__":
    main()
