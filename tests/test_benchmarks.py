"""Every benchmark that the docs name starts as they say, from a clean clone. Small sizes; nothing that is measured."""

import argparse
import gzip
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import machine
import numpy as np
import pytest
import scores
from made_up_data import write_made_up_data

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LEARNING = ("torch", "transformers", "tyro", "tensorboard", "tqdm", "matplotlib", "safetensors", "bm25s")
TINY = ROOT / "envs" / "agent_r1" / "policies" / "MultihopWorld-v0"
RUN = "--num-envs 8 --total-episodes 8 --episodes-per-iteration 8 --num-minibatches 1"
SMALL = {  # script -> flags that make it small, and what it needs
    "arithmetic_seeds": (f'--seeds 1 --splits test --episodes 8 --flags "{RUN} --eval-episodes 8" --force', LEARNING),
    "bridges --part oracle": ("--ids BabyAI --tasks 2", ("minigrid",)),
    "bridges --part tricks": ("--ids BabyAI --tasks 1", ("minigrid",)),
    "bridges --part load": ("--ids BabyAI --episodes 2 --force", ("minigrid",)),
    "bridges --part costs": ("--ids BabyAI --tasks 2 --force", ("minigrid",)),
    "bridges --part model": (f"--ids BabyAI --model {TINY} --threads 1", ("minigrid", *LEARNING)),
    "check_dialects": (f"--tokenizer {TINY} --count 10 --force", ("renderers", "transformers")),
    "dtype_seeds": (f'--seeds 1 --flags "{RUN} --eval-episodes 8" --force', LEARNING),
    "estimators": ("--games 4 --steps 10", LEARNING),
    "evidence --part horizons": (
        f'--places MultihopWorld --batches 10 --seeds 1 --workers 1 --flags "{RUN} --group-size 2" --force', LEARNING
    ),
    "evidence --part paper": (
        f'--places MultihopWorld --rows GRPO --seeds 1 --episodes 16 --workers 1 --flags "{RUN}" --force', LEARNING
    ),
    "evidence --part teachers": (
        '--places CraftWorld --rows "SFT, 100 of expert" --seeds 1 --episodes 4 --workers 1 --force', LEARNING
    ),
    "faults": ("--kinds episode --seeds 1 --episodes 32 --eval-episodes 8 --force", LEARNING),
    "fuzz_spans": ("--spans 300", ()),
    "gpu": ("--device cpu --models tiny --rows 2 --tokens 512", LEARNING),
    "kill_resume": ("--moments 1 --scripts grpo_llm --force", LEARNING),
    "math_and_code_data": ("--data {data} --mbpp-mutants 2", ("math_verify", "pydantic_monty", "tqdm")),
    "math_answers": ("--data {data} --problems 2", ("math_verify", "tqdm")),
    "multihop_seeds": (f'--seeds 1 --flags "{RUN} --eval-episodes 8 --critic-warmup 0" --force', LEARNING),
    "oracle": ("--data-dir {data}", ("bm25s",)),
    "preflight": ("--cases GRPO --layers 1", LEARNING),
    "preflight --sizes": ("0.5B", LEARNING),
    "real_data": (f"--model {TINY} --data {{data}} --sets HotpotQA GSM8K --episodes 2 --threads 1",
                  (*LEARNING, "math_verify")),
    "real_model": (
        f"--part evaluate --suite gsm8k --model {TINY} --data {{data}} --name real_model "
        '--sft-flags "--num-steps 4 --num-threads 1" --evaluate-flags "--num-threads 1" '
        f'--rl-flags "{RUN} --group-size 2 --eval-episodes 2 --num-threads 1"',
        (*LEARNING, "math_verify"),
    ),
    "retrieval_recall": ("--data-dir {data} --corpus {corpus}", ("bm25s",)),
    "sandbox_speed": ("--quick --force", ()),
    "sb3_choices": ("--seeds 1 2 --steps 1024 --episodes 4 --force", ("stable_baselines3", "bm25s")),
    "sft_bf16": ("--num-steps 2 --batch-size 2 --heldout 2", LEARNING),
    "threads": ("--total-episodes 8 --force", LEARNING),
    "tool_latency": ("--episodes 8 --iterations 2 --force", LEARNING),
    "trl_comparison": (
        '--sizes 0.1M --repeats 1 --steps 2 --prompts 1 --group 4 --threads 1 --force --checkpoint-flags '
        '"--num-steps 2 --num-demonstrations 64 --tokenizer-demonstrations 64 --eval-demonstrations 8"',
        (*LEARNING, "trl", "datasets"),
    ),
    "two_candidates": ("--templates 2", ("math_verify", "tqdm")),
    "two_processes": ("--total-episodes 8 --episodes-per-iteration 8 --eval-episodes 8 --force", LEARNING),
    "vector_throughput": ("--quick --force", ()),
    "vector_throughput --episodes": ("256", ()),
    "world_seeds": (
        f'--seeds 1 --worlds ShopWorld --learners grpo --episodes 4 --flags "{RUN} --eval-episodes 8" --force', LEARNING
    ),
    "worlds": ("--episodes 2 --ids SQLWorld PharmaSim --force", ()),
}  # fmt: skip
RECORDED = {  # names of the results, where they aren't the script's; none where the small run records nothing
    "arithmetic_seeds": ["arithmetic_seeds", "arithmetic_splits"],
    "bridges --part oracle": ["bridges_oracle"],
    "bridges --part tricks": ["bridges_tricks"],
    "bridges --part load": ["bridges_load"],
    "bridges --part costs": ["bridges_costs"],
    "bridges --part model": ["bridges_model"],
    "evidence --part horizons": ["evidence_horizons"],
    "evidence --part paper": ["evidence_paper"],
    "evidence --part teachers": ["evidence_teachers"],
    "gpu": [],
    "preflight --sizes": [],
    "real_data": ["real_data_baselines", "real_data_problems"],
    "sandbox_speed": [],
    "tool_latency": ["tool_latency_8"],
    "two_processes": ["two_processes_grpo"],
    "vector_throughput": [],
    "vector_throughput --episodes": ["vector_memory"],
}
SLOW = {
    "bridges --part model", "fuzz_spans", "sandbox_speed", "vector_throughput",
    "check_dialects", "estimators", "faults", "gpu", "preflight --sizes", "sft_bf16", "tool_latency", "two_candidates",
    "arithmetic_seeds", "dtype_seeds", "evidence --part horizons", "evidence --part paper",
    "evidence --part teachers", "kill_resume", "multihop_seeds", "preflight",
    "real_data", "real_model", "threads", "trl_comparison", "two_processes", "world_seeds",
}  # fmt: skip
SLOWLY = [pytest.mark.slow, pytest.mark.timeout(900)]
DIFFERENCES = ["check_dialects"]  # ends with 1: the tiny policy's template is not its family's to the letter


def documented() -> list[str]:
    """The commands of the docs that start a benchmark."""
    found = [command for page in PAGES for command in re.findall(r"python (benchmarks/[^`#\n]+)", page.read_text())]
    return sorted({" ".join(command.split()) for command in found})


def case_of(command: str) -> str:
    """The entry of SMALL that starts this command: the one that has most of its first words."""
    script, *flags = shlex.split(command)
    words = " ".join([Path(script).stem, *flags])
    return max((case for case in SMALL if f"{words} ".startswith(f"{case} ")), key=len, default=words)


def test_every_documented_command_has_a_small_run():
    commands = documented()
    assert len(commands) > 20
    assert {case_of(command) for command in commands} <= SMALL.keys()
    for command in commands:
        assert (ROOT / command.split()[0]).is_file(), command
    sources = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    scripts = {name for name, source in sources.items() if '\nif __name__ == "__main__":\n' in source}
    assert {case.split()[0] for case in SMALL} == scripts


@pytest.mark.parametrize("command", documented())
def test_a_documented_command_names_flags_that_there_are(command):
    script, *flags = shlex.split(command)
    source = (ROOT / script).read_text()
    for flag in flags:
        if flag.startswith("--") and " " not in flag:  # else another script's, in quotation marks
            assert any(f'"{name}"' in source for name in (flag, flag.replace("--no-", "--"))), f"{script} has no {flag}"


def make_clone(folder: Path) -> Path:
    """What a clone has, without what was run or recorded here: runs, results and images are written below it."""
    for name in ("benchmarks", "learner"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("results", "__pycache__", "runs"))
    for name in ("envs", "tools"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "evidence.md", folder / "docs")
    return folder


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    return make_clone(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """Made-up data in the official formats, and a corpus."""
    data = write_made_up_data(tmp_path_factory.mktemp("benchmark_data"))
    corpus = data / "corpus.jsonl"
    rows = [{"title": f"Title {i}", "text": f"Ada Quill was born in Lornby {i}."} for i in range(12)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data": data, "corpus": corpus}


def start(clone: Path, *words: str, timeout: float = 240) -> subprocess.CompletedProcess:
    """Start a benchmark as the docs say, where the two packages of this repository are installed, and no more is."""
    packages = os.pathsep.join([str(ROOT / "envs"), str(ROOT / "tools")])
    environment = os.environ | {"PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}
    environment["OMP_WAIT_POLICY"] = "passive"  # several run side by side
    environment.pop("AGENT_R1_DATA", None)
    return subprocess.run(
        [sys.executable, *words], cwd=clone, env=environment, capture_output=True, text=True, timeout=timeout
    )


def missing(case: str) -> list[str]:
    """What the case needs and is not installed here."""
    return [module for module in SMALL[case][1] if find_spec(module) is None]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory, places):
    """case -> (its clone, the run of it). All that were asked for begin at once, one on each core."""
    mine = [item for item in request.session.items if item.name.startswith("test_a_benchmark_runs[")]
    cases = [item.callspec.params["case"] for item in mine]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2) as pool:
        found = {}
        for case in cases:
            if not missing(case):
                name, *first = case.split()
                words = [f"benchmarks/{name}.py", *first, *shlex.split(SMALL[case][0].format(**places))]
                folder = make_clone(tmp_path_factory.mktemp(name))
                found[case] = folder, pool.submit(start, folder, *words, timeout=900 if case in SLOW else 240)
        yield found
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "/nowhere"], "--model /nowhere: there is no such folder"),
        (["--model", str(TINY), "--name", "../mine"], "--name ../mine: a name, not a path"),
        (["--model", str(TINY), "--hours", "1e-6"], "interrupted, or --hours are over; the same command goes on"),
    ],
)
def test_what_a_real_model_cannot_begin_with_is_said_in_a_line(flags, said, clone, places):
    pytest.importorskip("torch")
    words = ["--part", "sft", "--suite", "wiki", "--data", str(places["data"]), *flags]
    done = start(clone, "benchmarks/real_model.py", *words)
    assert done.returncode and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["multihop_seeds", "arithmetic_seeds"])
def test_a_picture_goes_where_its_figures_go(name, tmp_path, monkeypatch):
    """A small trial, recorded beside what stands there, leaves the picture of README alone."""
    pytest.importorskip("torch")
    module = importlib.import_module(name)
    ends = {f"eval/{what}_{end}": 0.5 for what in ("exact_match", "success") for end in ("first", "last")}
    (tmp_path / "summary.json").write_text(json.dumps(ends | {"train_seconds": 1.0}))
    drawn = []
    for what, stands_in in {
        "finish": lambda jobs, workers: [tmp_path] * len(jobs),
        "read_curve": lambda *_: (np.array([0.0, 64.0]), np.array([0.25, 0.75])),
        "plot": lambda curves, metric, x, path: drawn.append(path),
        "record_results": lambda name, *_: f"{name}_part",
        "success": lambda models, splits, *_: {model: {split: [0.5] for split in splits} for model in models},
    }.items():
        if hasattr(module, what):
            monkeypatch.setattr(module, what, stands_in)
    monkeypatch.chdir(tmp_path)  # which it changes
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", [name, "--seeds", "1", "--force"])
    module.main()
    assert [path.name for path in drawn] == [f"{name}_part.png"]


@pytest.mark.parametrize("case", [pytest.param(c, marks=SLOWLY * (c in SLOW)) for c in SMALL])
def test_a_benchmark_runs(case, runs):
    if missing(case):
        pytest.skip(f"not installed: {', '.join(missing(case))}")
    (clone, run), name = runs[case], case.split()[0]
    done = run.result()
    logs = "".join(path.read_text()[-2000:] for path in (clone / "runs" / "logs").glob("*.log"))
    if "in bf16 failed on this processor" in done.stderr + logs:
        pytest.skip("this processor can't multiply in bf16")
    assert done.returncode == (case in DIFFERENCES), f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}\n{logs}"
    assert "|" in done.stdout or "{" in done.stdout  # a table, or JSON
    assert not re.search(r"\bnan\b", done.stdout), done.stdout
    for result in RECORDED.get(case, [name]):
        record = json.loads((clone / "benchmarks" / "results" / f"{result}.json").read_text())
        assert record["command"].startswith(f"python benchmarks/{name}.py") and record["machine"] and record["results"]
        assert (clone / "benchmarks" / "results" / f"{result}.md").is_file()


@pytest.mark.parametrize("name", ["oracle", "retrieval_recall", "real_data", "math_and_code_data"])
def test_without_data_a_benchmark_says_what_is_missing(name, clone, tmp_path):
    if name == "math_and_code_data":
        pytest.importorskip("math_verify")
    done = start(clone, f"benchmarks/{name}.py")
    assert done.returncode == 2 and "required: --" in done.stderr
    words, why = {
        "oracle": (["--data-dir", tmp_path], "no data for HotpotQA"),
        "retrieval_recall": (["--data-dir", tmp_path, "--corpus", ROOT / "README.md"], "no data for HotpotQA"),
        "math_and_code_data": (["--data", tmp_path], "no data for GSM8K"),
    }.get(name, ([], ""))
    if words:
        done = start(clone, f"benchmarks/{name}.py", *map(str, words))
        assert done.returncode == 1 and done.stderr.startswith(why), done.stderr


@pytest.mark.parametrize(("command", "why"), [
    ("retrieval_recall.py --data-dir {data} --corpus nowhere.jsonl", "--corpus nowhere.jsonl: there is no such file"),
    ("check_dialects.py --tokenizer ./nowhere", "--tokenizer ./nowhere: there is no"),
])  # fmt: skip
def test_a_file_that_is_missing_is_named_before_anything_else(command, why, clone, places):
    done = start(clone, *shlex.split(f"benchmarks/{command.format(**places)}"))
    assert done.returncode == 1 and done.stderr.startswith(why), done.stderr


def test_sizes_need_no_peft_but_for_its_columns(monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "peft", None)  # Python's own way to say: not there
    table = importlib.import_module("preflight").sizes(["0.5B"])
    assert table.splitlines()[0] == "| | GRPO | PPO |" and table.splitlines()[2].startswith("| 0.5B | ")
    assert "agent-r1[lora]" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "why"), [
    ("evidence.py --part horizons --batches 4 --force", "at least 10 batches"),
    ("tool_latency.py --iterations 1 --force", "the first one is not counted"),
    ("trl_comparison.py --steps 1 --force", "the first one is not counted"),
])  # fmt: skip
def test_too_small_a_run_is_refused(command, why, clone):
    pytest.importorskip("tyro")
    done = start(clone, *shlex.split(f"benchmarks/{command}"))
    assert done.returncode == 2 and why in done.stderr


def test_flags_are_recorded_as_they_are_typed():
    from machine import given_flags

    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--eval-episodes", type=int, default=8)
    parser.add_argument("--flags", default="")
    words = ["--seeds", "4", "5", "--flags", "--kl-coef 0.1"]
    names = ("seeds", "eval_episodes", "flags")
    given = given_flags(parser, parser.parse_args(words), *names)
    assert shlex.split(given) == words and given_flags(parser, parser.parse_args([]), *names) == ""


@pytest.fixture
def bridges(monkeypatch, tmp_path):
    """bridges(*flags): the benchmark with worlds that need no other package; what it recorded, and its table."""
    script = importlib.import_module("bridges")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "IDS", ["ArithmeticWorld", "MultihopWorld"])
    for module in (script, machine):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")

    def run(part, *flags):
        monkeypatch.setattr(sys, "argv", ["bridges.py", "--part", part, *flags])
        script.main()
        folder = tmp_path / "results"
        return json.loads((folder / f"bridges_{part}.json").read_text())["results"], folder / f"bridges_{part}.md"

    return run


@pytest.mark.skipif(os.name != "posix", reason="the program that stands in is a shell script")
@pytest.mark.parametrize(
    ("script", "gpus"), [("echo Card A; echo Card B", ["Card A", "Card B"]), ("echo Card A; exit 9", None)]
)
def test_a_result_names_its_gpus(script, gpus, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = machine.describe_machine()
    assert found.get("gpus") == gpus
    assert machine.where(found).startswith("Card A, Card B, " if gpus else f"{found['cores']} core")
    assert machine.where(found | {"gpus": ["Card A"] * 8}).startswith("8 x Card A, ")


def test_a_row_of_bridges_says_how_it_was_measured(bridges):
    """Measured again, a row changes; those that stay keep their command, their machine, and whether it was busy."""
    bridges("oracle", "--tasks", "2", "--force")
    results, table = bridges("oracle", "--ids", "ArithmeticWorld", "--tasks", "3")
    given = {name: (row["command"].partition(" --part oracle ")[2], row["forced"]) for name, row in results.items()}
    assert given["MultihopWorld"] == ("--tasks 2", True)
    assert given["ArithmeticWorld"] == ("--ids ArithmeticWorld --tasks 3", False)
    assert all(row["machine"]["cores"] and row["found"]["test"]["solved"] in (2, 3) for row in results.values())
    rows = [line for line in table.read_text().splitlines() if " | test | " in line]
    assert [row.count("--tasks 3") for row in rows] == [1, 0] and [row.count("(busy)") for row in rows] == [0, 1]


@pytest.mark.slow
def test_bridges_reads_the_run_that_it_started(bridges, tmp_path, monkeypatch):
    for module in LEARNING:
        pytest.importorskip(module)
    newer = tmp_path / "runs" / "AgentR1_MultihopWorld-v0__bridges_MultihopWorld__agent__1__0"
    newer.mkdir(parents=True)
    figures = {name: {"mean": -1.0} for name in ("success", "turns", "tool_calls", "tool_errors")}
    report = {"finished": True, "seconds": 1.0, "args": {}, "metrics": figures}
    (newer / "evaluation.json").write_text(json.dumps(report))
    os.utime(newer, (2**32, 2**32))
    results, _ = bridges("model", "--model", str(TINY), "--ids", "MultihopWorld", "--threads", "1")
    assert results["MultihopWorld"]["found"]["turns"] >= 1
    assert results["MultihopWorld"]["command"].endswith("--model MultihopWorld-v0 --ids MultihopWorld --threads 1")


def test_a_part_leaves_the_recorded_whole_as_it_is(tmp_path, monkeypatch):
    import machine

    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    whole = {"rows": {"GRPO": [1, 2], "PPO": [3]}, "more": {"a": 1}}
    assert machine.record_results("table", whole, "| all |", "python all") == "table"
    for part in ({"rows": {"GRPO": [5]}, "more": {"a": 1}}, {"rows": whole["rows"]}):
        assert machine.record_results("table", part, "| a part |", "python part") == "table_part"
        assert json.loads((tmp_path / "table.json").read_text())["results"] == whole
        assert "| a part |" in (tmp_path / "table_part.md").read_text()
    again = {"rows": {"GRPO": [5, 6], "PPO": [7], "RLOO": [1]}, "more": {"a": 2}}
    assert machine.record_results("table", again, "| again |", "python all") == "table"
    assert "| again |" in (tmp_path / "table.md").read_text()
    assert machine.record_results("list", [1, 2], "", "") == "list"
    assert machine.record_results("list", [3], "", "") == "list_part"
    seeds = [{"seed": seed, "learner": "GRPO", "success": 0.1 * seed} for seed in (1, 2, 3)]
    assert machine.record_results("seeds", {"rows": seeds}, "", "") == "seeds"
    others = [row | {"seed": row["seed"] + 3} for row in seeds]
    assert machine.record_results("seeds", {"rows": others}, "", "") == "seeds_part"
    assert machine.record_results("seeds", {"rows": [*others, *seeds]}, "", "") == "seeds"
    assert machine.record_results("seeds", {"rows": []}, "", "", merged=True) == "seeds"


def test_learners_begin_with_the_adapters_that_are_evaluated(tmp_path):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    real_model = importlib.import_module("real_model")
    from llm_utils.loading import load_policy, merge_adapters

    def policy(folder: Path = TINY):
        return load_policy(folder, torch.device("cpu"))

    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(policy(), config).save_pretrained(tmp_path / "adapters")
    real_model.merge(str(TINY), tmp_path / "adapters", tmp_path / "start")
    expected = merge_adapters(policy(), str(tmp_path / "adapters")).state_dict()
    written = policy(tmp_path / "start").state_dict()
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], weight) for name, weight in expected.items())
    assert (tmp_path / "start" / "tokenizer.json").is_file()


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_questions_of_a_real_model_end_where_their_lines_do(tmp_path, ending):
    """A line feed ends them, and none of the other characters at which Python splits lines (GSM8K has one)."""
    questions = importlib.import_module("real_model_parts.questions")
    rows = [{"question": "one\u2028two\x85three"}, {"question": "four"}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    (tmp_path / f"train.jsonl{ending}").write_bytes(gzip.compress(text) if ending else text)
    assert questions.read_rows(tmp_path / "train.jsonl") == rows


def test_the_table_of_trainings_says_how_far_they_came():
    real_model = importlib.import_module("real_model")
    whole = {"charts/episodic_return": [0.1, 0.2, 0.3], "charts/episodic_return at episodes": [64.0, 128.0, 192.0],
             "charts/episodic_return at seconds": [30.0, 60.0, 90.0], "charts/exact_match": [0.0, 0.5, 1.0],
             "eval/em": [0.25, 0.5], "time/rollout": 60.0, "time/score": 10.0, "time/train": 29.0,
             "time/sync": 1.0, "sampler/gap_mean": 0.01}  # fmt: skip
    young = {"charts/episodic_return": [0.1], "charts/episodic_return at episodes": [1e4],
             "charts/episodic_return at seconds": [6.0]}  # fmt: skip
    table = real_model.runs_table({"GRPO": {"1": whole, "2": {"how": "not begun"}}, "PPO": {"1": young}})
    assert table.splitlines()[2:] == [
        "| GRPO | 1 | 192 | 1.5 | 60 %, 10 %, 29 % | 0.0100 | 0.100, 0.300 | 0.000, 1.000 | 0.250, 0.500 |",
        "| PPO | 1 | 10,000 | 0.1 | – | – | – | – | – |",
    ]


def test_reinforcement_of_a_real_model_trains_no_other_baseline_first():
    real_model = importlib.import_module("real_model")
    start, pairs, learner = real_model.START, real_model.PAIRS, ("GRPO", 1)
    everything = [(start, 1), (pairs, 1), learner]
    assert real_model.builds_on("sft", everything, []) == [start, pairs]
    assert real_model.builds_on("sft", everything, [], baselines=False) == [start]
    assert real_model.builds_on("rl", everything, [learner]) == real_model.builds_on("rl", everything, []) == [start]
    assert real_model.builds_on("evaluate", everything, [learner]) == [start, pairs]
    assert real_model.builds_on("evaluate", [(pairs, 1)], []) == [pairs]
    assert real_model.builds_on("evaluate", [learner], [learner]) == [start]


@pytest.mark.parametrize("flags", [["--eval-episodes", "0"], ["--eval-episodes=0"], []])
def test_a_run_without_evaluation_is_not_told_when_to_evaluate(tmp_path, flags):
    real_model = importlib.import_module("real_model")
    job = real_model.rl_job(real_model.SUITES["gsm8k"], tmp_path, TINY, "GRPO", 1, flags)
    assert ("--eval-split" in job.words) == (not flags) and job.args["eval_episodes"] == (0 if flags else 200)


def test_a_learner_s_label_says_what_its_environment_pays(tmp_path):
    suites, real_model = importlib.import_module("real_model_parts.suites"), importlib.import_module("real_model")
    for label, (script, changed) in suites.LEARNERS.items():
        job = real_model.rl_job(suites.GSM8K, tmp_path, TINY, label, 1, [])
        assert script in job.words[1] and script.startswith(label[:3].lower())
        assert changed.items() <= json.loads(job.args["env_kwargs"]).items()
        assert ("step_found" in str(changed)) == ("steps" in label) and "0.0" not in str(changed.get("process_reward"))
        assert (changed == {}) == (label in ("GRPO", "PPO")) and ("unfinished_reward" in changed) == ("free" in label)


@pytest.mark.parametrize("engine", ["transformers", "vllm-server"])
def test_training_questions_are_profiled_as_training_samples_them(tmp_path, engine):
    real_model = importlib.import_module("real_model")
    suite, sampling = real_model.SUITES["gsm8k"], {"num_envs": 16, "top_p": 0.9, "engine": engine, "cuda": False}
    flags = ["--num-envs=16", "--no-preflight", "--top-p", "0.9", "--engine", engine, "--no-cuda", "--num-threads", "1"]
    flags += ["--vllm-url", "http://there:1"] if engine == "vllm-server" else ["--dtype", "float32"]
    learner = real_model.rl_job(suite, tmp_path, TINY, "GRPO", 1, flags)
    job = real_model.profile_job(suite, tmp_path, learner, 3)
    sampling |= {"vllm_url": "http://there:1"} if engine == "vllm-server" else {"dtype": "float32"}
    assert job.args | sampling | {"profile": 3, "split": "train", "temperature": 1.0} == job.args
    assert str(tmp_path / "reinforced") in job.args["env_kwargs"] and job.threads == 1
    few = real_model.profile_job(suite, tmp_path, learner, 3, 50)
    assert (job.args["episodes"], few.args["episodes"]) == (1_000_000, 50)


def test_questions_that_were_drawn_by_pass_rate_are_part_of_how_a_policy_was_trained():
    real_model = importlib.import_module("real_model")

    def trained(**profile):
        args = SimpleNamespace(part="rl", rl_flags="", sft_flags="", baselines=False, **profile)
        return real_model.how_trained(real_model.SUITES["gsm8k"], [("GRPO", 1)], {}, "hash", args)["GRPO", 1]

    every = trained(profile=2, profile_questions=None)
    assert every == trained(profile=None, profile_questions=None) | {"profile": 2}
    assert trained(profile=2, profile_questions=50) == every | {"profile_questions": 50}


def test_episodes_that_faults_ended_are_no_figures(tmp_path):
    episodes = importlib.import_module("real_model_parts.episodes")
    row = {"tokens": [0, 1, 2], "action_mask": [0, 0, 1], "prompt_length": 1, "answer": "B", "task_index": 0}
    row |= {"stats": {"success": 0.0, "format": 1.0}, "fault": None}
    tokenizer = SimpleNamespace(decode=lambda tokens: "a b" if tokens == [1] else "")
    path = tmp_path / "trajectories.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"task_index": 1, "answer": "c"}) + "\n")
    assert [row["error"] for row in episodes.read_episodes(tmp_path, tokenizer)] == ["reasoning", "copying"]
    path.write_text(path.read_text() + json.dumps(row | {"fault": "retrieval"}) + "\n")
    with pytest.raises(ValueError, match=r"1 of 3 episodes were ended by faults \(retrieval\)"):
        episodes.read_episodes(tmp_path, tokenizer)


def test_what_is_prepared_is_prepared_once(tmp_path):
    real_model = importlib.import_module("real_model")
    note, done = tmp_path / "note.json", []
    for facts in (["a"], ["a"], ["b"]):
        with real_model.once(note, facts) as needed:
            done.append(needed)
    with suppress(ValueError), real_model.once(note, ["c"]):
        raise ValueError("interrupted")
    with real_model.once(note, ["c"]) as needed:
        done.append(needed)
    assert done == [True, False, True, True]


def test_adapters_are_of_the_run_that_is_named():
    real_model = importlib.import_module("real_model")
    assert real_model.name_and_folder("/a/b") == (real_model.START, Path("/a/b"))
    assert real_model.name_and_folder("GRPO, outcome only=/a=b") == ("GRPO, outcome only", Path("/a=b"))
    with pytest.raises(argparse.ArgumentTypeError, match="'RLOO' is none of GRPO"):
        real_model.name_and_folder("RLOO=/a")
    given = real_model.in_order([("PPO", Path("a")), ("PPO", Path("b")), (real_model.START, Path("c"))])
    assert list(given.items()) == [((real_model.START, 1), Path("c")), (("PPO", 1), Path("a")), (("PPO", 2), Path("b"))]
    assert [real_model.merged(*one) for one in given] == ["start", "PPO", "PPO 2"]
    hashes = {one: str(folder) for one, folder in given.items()}
    args = SimpleNamespace(part="evaluate", rl_flags="", sft_flags="", baselines=False, profile=0, profile_questions=0)
    found = real_model.how_trained(real_model.SUITES["wiki"], [("PPO", seed) for seed in (1, 2, 3)], hashes, "q", args)
    assert found["PPO", 2] == {"adapters": "c", "on_top": "b"} and "trained_on" in found["PPO", 3]
    args.part = "rl"  # trains, whatever adapters a learner has
    found = real_model.how_trained(real_model.SUITES["wiki"], [("PPO", 1)], hashes, "q", args)
    assert found["PPO", 1] == {"adapters": "c", "rl_flags": "", "trained_on": "q"}


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """real_model's main(), on questions and adapters that are nothing but names; what it did, in order."""
    real_model = importlib.import_module("real_model")
    (tmp_path / "learner").symlink_to(ROOT / "learner")
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text(name)
    done = []

    def merge(model, adapters, folder):
        done.append((Path(model).name, adapters.name, folder.name))
        shutil.copytree(TINY, folder, dirs_exist_ok=True)

    def evaluate(jobs, how, record, model, workers):
        done.append({key: Path(job.args["model"]).name for key, job in jobs.items()})

    def finish(jobs, workers):
        done.append([(job.args["exp_name"].rpartition("_")[2], job.args["seed"]) for job in jobs])
        assert not jobs, "to be trained"
        return []

    stand_ins = {"ROOT": tmp_path, "RESULTS": tmp_path / "results", "merge": merge, "evaluate": evaluate,
                 "finish": finish, "find_file": lambda path: path, "hash_of_files": lambda files: "q",
                 "split_questions": lambda suite, data, work: work.mkdir(parents=True),
                 "write_demonstrations": lambda *_: None, "write_report": lambda *_: None}  # fmt: skip
    for name, value in stand_ins.items():
        monkeypatch.setattr(real_model, name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)

    def run(*words):
        done.clear()
        monkeypatch.setattr(sys, "argv", ["real_model.py", "--part", "evaluate", "--suite", "gsm8k", "--data", ".",
                                          "--model", str(TINY), "--no-baselines", *words])  # fmt: skip
        real_model.main()
        return done

    run.done = done
    return run


def test_each_seed_is_played_with_its_own_adapters(prepared, tmp_path):
    pytest.importorskip("torch")
    start, words = "SFT on demonstrations", ["--learners", "PPO", "--seeds", "2", "--adapters", "a", "PPO=b", "PPO=c"]
    first = [(TINY.name, "a", "start"), ("start", "b", "PPO"), ("start", "c", "PPO 2")]
    played = {(start, "GSM8K", 1): "start", ("PPO", "GSM8K", 1): "PPO", ("PPO", "GSM8K", 2): "PPO 2"}
    assert prepared(*words) == [*first, [], [], played]
    assert prepared(*words) == [[], [], played]
    (tmp_path / "c" / "adapter_model.safetensors").write_text("another")
    assert prepared(*words) == [first[2], [], [], played]
    with pytest.raises(AssertionError, match="to be trained"):
        prepared("--learners", "PPO", "--seeds", "3", *words[4:])
    assert prepared.done[-1] == [("ppo", 3)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--learners", "PPO", "PPO"], "--learners has 'PPO' 2 times"),
        (["--rl-flags", "--bogus 3"], "Unrecognized"),
        (["--rl-flags", "--learning-rate -1"], "--learning-rate: a learning rate is at least 0"),
        (["--rl-flags", "--total-episodes 63"], "--total-episodes 63 is no multiple of"),
        (["--rl-flags", "'open"], "No closing quotation"),
        (["--evaluate-flags", "--bogus 4"], "Unrecognized"),
        (["--evaluate-flags", "--top-p 0.5"], "--top-p does nothing without a --temperature above 0"),
        (["--sft-flags", "--bogus 5"], "Unrecognized"),
        (["--against", "nobody"], "--against nobody: it has no SFT on demonstrations"),
        (["--name", ""], "--name is empty"),
        (["--hours", "1e9"], "at most 8760"),
    ],
)
def test_what_a_later_part_would_refuse_is_refused_before_anything_is_trained(prepared, capsys, words, said):
    pytest.importorskip("torch")
    with pytest.raises(SystemExit) as refused:
        prepared("--learners", "PPO", "--adapters", "a", *words)
    captured = capsys.readouterr()
    assert said in f"{refused.value} {captured.err} {captured.out}"
    with pytest.raises(SystemExit):  # whatever comes first
        prepared("--learners", "PPO", "--adapters", "a", *words, "--part", "rl")
    assert not [what for what in prepared.done if isinstance(what, list)]  # no call of `finish`


def test_adapters_of_a_learner_are_no_start(prepared, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    (tmp_path / "b" / "adapter_config.json").write_text('{"base_model_name_or_path": "../a"}')
    with pytest.raises(SystemExit, match="/b go on top of .*a: give that one, and LEARNER=.*/b"):
        prepared("--learners", "PPO", "--adapters", "b")
    assert not prepared.done


def test_a_file_of_a_set_that_is_cut_off_is_named(tmp_path):
    questions = importlib.import_module("real_model_parts.questions")
    whole = gzip.compress(json.dumps([{"a": 1}] * 50).encode())
    for name, content in (("a.json.gz", whole[:-9]), ("b.json", b'[{"a": 1}, {"a'), ("c.jsonl", b'{"a": 1}\n{"a'),
                          ("d.jsonl", b"\xff\xfe{}"), ("e.json.gz", b"[]")):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SystemExit, match=f"{name}: this is no whole file of the set"):
            questions.read_rows(tmp_path / name.removesuffix(".gz"))
        if name.endswith(".gz"):  # the first to read it
            with pytest.raises(SystemExit, match=f"{name}: this is no whole file of the set"):
                questions.hash_of_files([tmp_path / name])


def test_a_report_s_command_names_the_adapters_of_the_repository_only(tmp_path):
    real_model = importlib.import_module("real_model")
    ours = ROOT / "benchmarks" / "adapters"
    given = {(real_model.START, 1): ours / "one", ("PPO", 1): ours / "two"}
    given |= {("PPO", 2): tmp_path, ("PPO", 3): ROOT / "runs"}
    words = ["benchmarks/adapters/one", "PPO=benchmarks/adapters/two", "PPO=ADAPTERS", "PPO=ADAPTERS"]
    assert real_model.adapters_as_words(given) == words


def test_a_learner_of_another_suite_is_refused_at_once(monkeypatch, capsys):
    real_model, suites = importlib.import_module("real_model"), importlib.import_module("real_model_parts.suites")
    words = ["real_model.py", "--part", "rl", "--model", "m", "--data", ".", "--learners", "GRPO, steps paid"]
    words.append("--suite")
    monkeypatch.setattr(sys, "argv", [*words, "gsm8k"])
    assert real_model.arguments().suite == "gsm8k" and suites.ONLY.keys() < suites.LEARNERS.keys()
    monkeypatch.setattr(sys, "argv", [*words, "wiki"])
    with pytest.raises(SystemExit):
        real_model.arguments()
    assert "--learners 'GRPO, steps paid' is for --suite gsm8k" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("adapters", "said"),
    [
        (["a", "GRPO=b"], "--adapters of GRPO, which isn't among --learners"),
        (["a", "b"], "--adapters: 2 folders of SFT on demonstrations, and there is 1"),
        (["a", "PPO=b", "PPO=c", "PPO=a"], "--adapters: 3 folders of PPO, and --seeds 2"),
        (["PPO=b"], "--adapters of a learner come on top of those of the training on demonstrations; give both"),
        (["a", "PPO=b", "PPO=b"], "/b and /b are the same, of two runs"),
    ],
)
def test_adapters_that_belong_to_no_run_are_refused(adapters, said, prepared, tmp_path, capsys):
    pytest.importorskip("torch")
    with pytest.raises(SystemExit) as refused:
        prepared("--learners", "PPO", "--seeds", "2", "--adapters", *adapters)
    assert said in f"{refused.value} {capsys.readouterr().err}".replace(str(tmp_path), "").replace("\n", " ")


def test_seconds_are_of_as_many_threads_as_were_asked_for(monkeypatch):
    pytest.importorskip("tyro")
    multihop_seeds = importlib.import_module("multihop_seeds")
    monkeypatch.chdir(ROOT)
    some = [argparse.Namespace(threads=n, eval_every=2, flags="") for n in (1, 2)]
    one, two = (multihop_seeds.job(1, "outcome only", args) for args in some)
    assert one.args != two.args and one.args == multihop_seeds.job(1, "outcome only", some[0]).args


def test_curves_of_runs_that_are_not_finished_are_recorded(tmp_path, monkeypatch):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    real_model = importlib.import_module("real_model")
    for name, scalars in {
        "new": [("eval/em", 0)],  # stopped after the evaluation before training
        "one": [("eval/em", 0), ("charts/episodes", 5), ("charts/episodic_return", 5)],
        "two": [
            ("eval/em", 0), ("charts/episodes", 5), ("charts/episodic_return", 5), ("eval/em", 5), ("time/train", 5),
        ],
    }.items():  # fmt: skip
        with tensorboard.SummaryWriter(str(tmp_path / name)) as writer:
            for tag, step in scalars:
                writer.add_scalar(tag, 8.0, step)
    report = importlib.import_module("real_model_parts.report")
    monkeypatch.setattr(report, "find", lambda job: (job and tmp_path / job, False))
    path = tmp_path / "results" / "curves.json"

    def made(how):
        return dict.fromkeys([("GRPO", 1), ("GRPO", 2), ("PPO", 1)], how)

    assert real_model.record_curves({("GRPO", 1): "new", ("PPO", 1): None}, made("a"), path) == {}
    real_model.record_curves({("GRPO", 1): "one", ("GRPO", 2): "new"}, made("a"), path)
    found = real_model.record_curves({("GRPO", 2): "two"}, made("a"), path)
    assert json.loads(path.read_text()) == found and {k: list(v) for k, v in found.items()} == {"GRPO": ["1", "2"]}
    assert found["GRPO"]["2"]["time/train"] == 8 and "time/train" not in found["GRPO"]["1"]
    assert found["GRPO"]["2"]["eval/em at episodes"] == [0, 8] and "charts/exact_match" not in found["GRPO"]["1"]
    played = {"em": [0.0, 1.0, 1.0]}
    recorded = {(policy, "MuSiQue", 1): played for policy in (real_model.START, "GRPO", "PPO")}
    for dev in ({}, recorded, {key: row for key, row in recorded.items() if key[0] == "GRPO"}):
        real_model.plot(found, dev, tmp_path / "curves.png")
        assert (tmp_path / "curves.png").stat().st_size > 1_000
    two = recorded | {("GRPO", "MuSiQue", 2): {"em": [0.0, 0.0, 1.0]}}
    plt = importlib.import_module("matplotlib.pyplot")
    axes = plt.figure().add_subplot()
    report.plot_dev(axes, "GRPO", 8, two, "C0")
    _, after = axes.containers[0].lines[2][0].get_segments()  # the strokes of both intervals
    plt.close("all")
    one = report.around_mean([played["em"]])
    assert one[0] == pytest.approx(2 / 3) and one[1] == pytest.approx(0.2077, abs=1e-4)  # Wilson's
    assert after[:, 1] == pytest.approx(report.around_mean([played["em"], [0.0, 0.0, 1.0]])[1:])
    assert report.around_mean([[1.0] * 9] * 2) == report.around_mean([[1.0] * 9])  # a bootstrap would be certain
    apart = report.around_mean([[0.0] * 900, [1.0] * 900])  # and Wilson's of their mean too
    assert apart == scores.interval({"": np.repeat([[0.0], [1.0]], 900, 1)}) == (0.5, 0.0, 1.0)
    real_model.check_curves(made("a"), path)
    real_model.check_curves({("PPO", 1): "b"}, path)
    with pytest.raises(SystemExit, match=r"curves.json has GRPO of another model, .*; delete that, or give --name"):
        real_model.check_curves(made("b"), path)


def test_hours_stand_above_the_episodes_that_they_took():
    report, plt = importlib.import_module("real_model_parts.report"), pytest.importorskip("matplotlib.pyplot")
    axes = plt.figure().add_subplot()
    axes.set_xlim(-10, 210)
    run = {"charts/episodic_return at episodes": [50, 200], "charts/episodic_return at seconds": [5400, 7200]}
    hours = report.hours_axis(axes, run)
    hours.figure.canvas.draw()
    for episode, hour in ((0, 0), (50, 1.5), (200, 2)):  # it stands where it belongs
        places = [one.transData.transform((x, 0))[0] for one, x in ((hours, hour), (axes, episode))]
        assert places[0] == pytest.approx(places[1], abs=1)
    plt.close("all")


def test_a_recorded_training_is_found_by_its_command():
    real_model = importlib.import_module("real_model")
    files = list((ROOT / "benchmarks" / "results").glob("real_model_*_curves.json"))
    trained = [json.loads(run["how"]) for file in files for runs in json.loads(file.read_text()).values()
               for run in runs.values()]  # fmt: skip
    assert len(files) > 2 and all(how["rl_flags"] == real_model.without_speed(how["rl_flags"]) for how in trained)


def test_a_recorded_figure_names_what_it_stands_on(tmp_path):
    real_model = importlib.import_module("real_model")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = real_model.hash_of_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert real_model.hash_of_model(str(tmp_path)) != first and real_model.hash_of_model("org/name") == "org/name"
    (tmp_path / "dev.json").write_text("{}")
    (tmp_path / "dev.json.gz").write_bytes(gzip.compress(b"{}"))
    packed, plain = (real_model.hash_of_files([tmp_path / name]) for name in ("dev.json.gz", "dev.json"))
    assert packed == plain
    words = "--num-threads 1 --seed 2 --num-threads=3 --num-envs 8 --dtype float32 --num-threads  4"
    assert real_model.without_speed(words) == "--seed 2 --dtype float32" and real_model.without_speed("") == ""
    record, key = tmp_path / "episodes.jsonl", ("GRPO", "MuSiQue", 1)
    record.write_text(json.dumps({"policy": "GRPO", "set": "MuSiQue", "seed": 1, "model": first}) + "\n")
    for other in ({"model": "org/name"}, {"model": first, "on_top": "x"}):
        with pytest.raises(SystemExit, match="of another model"):
            real_model.read_record(record, {key: other})
    assert key in real_model.read_record(record, {key: {"model": first}})


TASKS = {7: SimpleNamespace(answers=["Ada", "Eve"])}


def test_what_is_recorded_of_a_real_model_is_not_played_again(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    real_model = importlib.import_module("real_model")
    WIKI = real_model.SUITES["wiki"]
    key, other = ("GRPO", "HotpotQA", 1), ("GRPO", "MuSiQue", 1)
    rows = [
        {"stats": {"em": 1.0, "f1": 1.0, "success": 1.0, "format": 1.0}, "error": None},
        {"stats": {"em": 0.0, "f1": 0.5, "success": 0.0, "format": 0.0}, "error": "format"},
    ]
    call = {"function": {"name": "search", "arguments": '{"query": "Ada"}'}}
    messages = [{"role": "system"}, {"role": "user"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "content": "Ada\nis `here` " + "x" * 500}]
    rows[1] |= {"messages": messages, "task_id": "t7", "task_index": 7, "question": "Who <img src=x>?\n\nNow."}
    monkeypatch.setattr(real_model, "make_env", lambda args: SimpleNamespace(make_task=TASKS.__getitem__))
    (tmp_path / "evaluation.json").write_text('{"args": {}}')
    monkeypatch.setattr(real_model, "read_episodes", lambda folder, tokenizer: rows)
    started = []

    def interrupted(jobs, workers):  # after the first of two
        started.append(jobs)
        raise SystemExit(130)

    monkeypatch.setattr(real_model, "finish", interrupted)
    monkeypatch.setattr(real_model, "find", lambda job: (tmp_path, job == "first"))
    how = {key: {"rl_flags": "--seed 1"}, other: {"rl_flags": "--seed 1"}}
    record = tmp_path / "episodes.jsonl"
    for _ in range(2):
        with pytest.raises(SystemExit):
            real_model.evaluate({key: "first", other: "second"}, how, record, str(TINY), 1)
    assert started == [["first", "second"], ["second"]]
    found = real_model.read_record(record, how)
    assert list(found) == [key] and found[key]["em"] == [1.0, 0.0] and found[key]["format"] == [1.0, 0.0]
    table, numbers = real_model.tables(WIKI, {"GRPO": {"HotpotQA": [found[key]]}})
    assert "| GRPO | HotpotQA | 2 | 0.500" in table and numbers["errors"]["GRPO"]["HotpotQA"]["format"] == 1
    table, _ = real_model.tables(WIKI, {"GRPO": {"HotpotQA": [found[key] | {"tool_calls": [0.0, 0.0]}]}})
    assert "EM where" not in table  # nobody searched
    searched = {"support_recall": [0.0, 0.5, 0.5, 1.0], "tool_calls": [0.0, 2.0, 2.0, 3.0], "em": [0.0, 0.0, 1.0, 1.0]}
    unsearched = searched | {"support_recall": [np.nan] * 4}  # what nobody looks up
    report = importlib.import_module("real_model_parts.report")
    lines, numbers = report.search_table({"GRPO": {"HotpotQA": [searched], "GSM8K": [unsearched]}})
    by_calls = "0.000 of 1 | 0.500 of 2 | 1.000 of 1"
    assert lines[-2] == f"| GRPO | HotpotQA | 0.000 of 1 | 0.500 of 2 | 1.000 of 1 | {by_calls} |"
    assert lines[-1] == f"| GRPO | GSM8K | – | – | – | {by_calls} |"
    assert list(numbers["GRPO"]["HotpotQA"].values()) == [[0, 1], [1, 2], [1, 1]] * 2
    assert numbers["GRPO"]["GSM8K"]["EM, calls: 2"] == [1, 2]
    lines, _ = report.search_table({"GRPO": {"GSM8K": [unsearched]}})
    assert lines[1] == "| policy | set | EM, calls: at most 1 | EM, calls: 2 | EM, calls: 3 and more |"
    em = np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
    assert report.won_and_lost(em, em[:1]) == ", 2 won, 1 lost" and report.won_and_lost(em, em) == ""
    partly = {real_model.START: {"HotpotQA": [found[key]]}, "GRPO": {x: [found[key]] for x in ("HotpotQA", "MuSiQue")}}
    table, _ = real_model.tables(WIKI, partly)
    assert "| GRPO | +0.000 [+0.000, +0.000], 0 won, 0 lost | – | – | – | – |" in table
    two = {"GRPO": {"HotpotQA": [found[key]] * 2, "2WikiMultihopQA": [found[key]]}}
    whole = {real_model.START: {x: [found[key]] for x in WIKI.sets}}
    table, numbers = real_model.tables(WIKI, whole | two)  # one seed lacks a set
    assert list(numbers["differences"]["GRPO"]) == ["HotpotQA", "2WikiMultihopQA"]
    others = {"HotpotQA": {"model": "a"}}
    assert real_model.alike({key: found[key] | {"model": "a"}}, others) and not real_model.alike(found, others)
    assert not real_model.alike(found, {})  # of another suite
    with pytest.raises(SystemExit, match="nothing of typo is recorded"):
        real_model.write_report(WIKI, "typo", {}, {}, SimpleNamespace())
    table, numbers = real_model.tables(WIKI, partly, {"greedy": whole})
    assert "| EM against SFT on demonstrations of greedy |" in table
    assert numbers["differences"]["GRPO against greedy"].keys() == {"HotpotQA", "MuSiQue", "out of domain"}
    assert "SFT on demonstrations against greedy" in numbers["differences"]
    (example,) = found[key]["examples"]
    assert real_model.story(example).splitlines() == [
        "**format**, task `t7`: `Who <img src=x>? Now.`", "", '- assistant: `search({"query": "Ada"})`',
        f"- tool: `Ada is 'here' {'x' * 286} ...`", "- right: `Ada; Eve`",
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="GRPO, HotpotQA, 1 of another model, other questions, or with other flags"):
        real_model.read_record(record, {key: {"rl_flags": "--seed 2"}})
