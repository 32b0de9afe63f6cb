"""Every benchmark that the docs name starts as they say, from a clean clone. Small sizes; nothing that is measured."""

import argparse
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import machine
import numpy as np
import pytest
from made_up_data import write_made_up_data

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks/real_model/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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
    "episode_digests": ("--names AgentR1/ArithmeticWorld-v0 --episodes 17", ()),
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
    "systems --part decoding": (f'--seeds 1 --episodes 4 --critics 1 --flags "{RUN}" --force', LEARNING),
    "families": ('--families Qwen3 "Gemma 3" --columns transformers', LEARNING),
    "faults": ("--kinds episode --seeds 1 --episodes 32 --eval-episodes 8 --force", LEARNING),
    "fuzz_spans": ("--spans 300", ()),
    "gpu": ("--device cpu --models tiny --rows 2 --tokens 512", LEARNING),
    "iteration_digests": ("--names evaluate_llm", LEARNING),
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
    "serve_load": ("--clients 2 --seconds 0.5 --force", ("fastapi", "httpx")),
    "sft_bf16": ("--num-steps 2 --batch-size 2 --heldout 2", LEARNING),
    "speedups": ("--rows 2 --repetitions 2 --episodes 8 --iterations 0 --force", LEARNING),
    "speedups --device": ("cpu --models tiny --tokens 512 --repetitions 2", LEARNING),
    "stale_ratios": ("--games 4", LEARNING),
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
    "vllm_gpu": ("--device cpu", (*LEARNING, "vllm")),
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
    "episode_digests": [],
    "gpu": [],
    "iteration_digests": [],
    "preflight --sizes": [],
    "real_data": ["real_data_baselines", "real_data_problems"],
    "sandbox_speed": [],
    "speedups": ["speedups_cpu"],
    "speedups --device": [],
    "systems --part decoding": ["systems_decoding"],
    "tool_latency": ["tool_latency_8"],
    "two_processes": ["two_processes_grpo"],
    "vector_throughput": [],
    "vllm_gpu": [],
    "vector_throughput --episodes": ["vector_memory"],
}
SLOW = {
    "bridges --part model", "fuzz_spans", "math_and_code_data", "sandbox_speed", "vector_throughput",
    "check_dialects", "iteration_digests", "estimators", "faults", "gpu", "preflight --sizes", "sft_bf16",
    "speedups --device", "stale_ratios", "tool_latency",
    "two_candidates", "arithmetic_seeds", "dtype_seeds", "evidence --part horizons", "evidence --part paper",
    "evidence --part teachers", "systems --part decoding", "kill_resume", "multihop_seeds", "preflight",
    "real_data", "real_model", "threads", "trl_comparison", "two_processes", "vllm_gpu", "world_seeds",
}  # fmt: skip
ROOMS = ("learning", "performance", "environments", "evidence", "real_model")  # what common/ and results/ are not
COMMANDS = {path.stem: f"benchmarks/{room}/{path.name}" for room in ROOMS
            for path in sorted((ROOT / "benchmarks" / room).glob("*.py"))
            if not path.stem.startswith("systems_")}  # fmt: skip  # parts of a command
SLOWLY = [pytest.mark.slow, pytest.mark.timeout(900)]
slowly = partial(pytest.param, marks=SLOWLY)
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
    assert {case.split()[0] for case in SMALL} == COMMANDS.keys()


def test_commands_and_what_they_share_have_rooms_of_their_own():
    def starts(path):
        return '\nif __name__ == "__main__":\n' in path.read_text()

    assert {path.name for path in (ROOT / "benchmarks").iterdir() if path.name != "__pycache__"} == {
        *ROOMS, "common", "results"
    }  # fmt: skip
    assert all(starts(ROOT / path) for path in COMMANDS.values())
    assert not [path for path in (ROOT / "benchmarks").glob("*/*_parts/*.py") if starts(path)]
    assert not [path for path in (ROOT / "benchmarks" / "common").iterdir() if path.suffix == ".py" and starts(path)]
    for room, commands in {"evidence": ["evidence", "systems"], "real_model": ["real_model"]}.items():
        assert sorted(path.stem for path in (ROOT / "benchmarks" / room).glob("*.py")) == commands


def test_the_page_has_every_command_in_the_order_of_the_rooms():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    table = page.partition("| what | command | result |")[2].partition("\n\n")[0]
    named = re.findall(r"`python (benchmarks/(\w+)/\w+\.py)", table)
    assert {command for command, _ in named} == set(COMMANDS.values())
    assert list(dict.fromkeys(room for _, room in named)) == list(ROOMS)
    assert [room for _, room in named] == sorted((room for _, room in named), key=ROOMS.index)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS.values())
def test_a_command_says_what_it_is_for_wherever_it_is_started(command, tmp_path):
    name = Path(command).stem
    if missing(next(case for case in SMALL if case.split()[0] == name)):
        pytest.skip(f"not installed: what {name} needs")
    done = start(tmp_path, str(ROOT / command), "--help")
    assert done.returncode == 0 and f"python {command}" in done.stdout, done.stderr


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
                words = [COMMANDS[name], *first, *shlex.split(SMALL[case][0].format(**places))]
                folder = make_clone(tmp_path_factory.mktemp(name))
                found[case] = folder, pool.submit(start, folder, *words, timeout=900 if case in SLOW else 240)
        yield found
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "/nowhere"], "--model /nowhere: there is no such folder"),
        slowly(["--model", str(TINY), "--name", "../mine"], "--name ../mine: a name, not a path"),
        slowly(["--model", str(TINY), "--hours", "1e-6"], "interrupted, or --hours are over; the same command goes on"),
    ],
)
def test_what_a_real_model_cannot_begin_with_is_said_in_a_line(flags, said, clone, places):
    pytest.importorskip("torch")
    words = ["--part", "sft", "--suite", "wiki", "--data", str(places["data"]), *flags]
    done = start(clone, "benchmarks/real_model/real_model.py", *words)
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
        assert record["command"].startswith(f"python {COMMANDS[name]}") and record["machine"] and record["results"]
        assert (clone / "benchmarks" / "results" / f"{result}.md").is_file()


@pytest.mark.parametrize("name", ["oracle", "retrieval_recall", "real_data", "math_and_code_data"])
def test_without_data_a_benchmark_says_what_is_missing(name, clone, tmp_path):
    if name == "math_and_code_data":
        pytest.importorskip("math_verify")
    done = start(clone, COMMANDS[name])
    assert done.returncode == 2 and "required: --" in done.stderr
    words, why = {
        "oracle": (["--data-dir", tmp_path], "no data for HotpotQA"),
        "retrieval_recall": (["--data-dir", tmp_path, "--corpus", ROOT / "README.md"], "no data for HotpotQA"),
        "math_and_code_data": (["--data", tmp_path], "no data for GSM8K"),
    }.get(name, ([], ""))
    if words:
        done = start(clone, COMMANDS[name], *map(str, words))
        assert done.returncode == 1 and done.stderr.startswith(why), done.stderr


@pytest.mark.parametrize(("command", "why"), [
    ("environments/retrieval_recall.py --data-dir {data} --corpus nowhere.jsonl",
     "--corpus nowhere.jsonl: there is no such file"),
    ("environments/check_dialects.py --tokenizer ./nowhere", "--tokenizer ./nowhere: there is no"),
])  # fmt: skip
def test_a_file_that_is_missing_is_named_before_anything_else(command, why, clone, places):
    done = start(clone, *shlex.split(f"benchmarks/{command.format(**places)}"))
    assert done.returncode == 1 and done.stderr.startswith(why), done.stderr


def test_sizes_need_no_peft_but_for_its_columns(monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "peft", None)  # Python's own way to say: not there
    preflight = importlib.import_module("preflight")
    for table in (preflight.sizes(["0.5B"]), preflight.choices(["0.5B"])):
        assert table.splitlines()[0] == "| | GRPO | PPO |" and table.splitlines()[2].startswith("| 0.5B | ")
    assert table.splitlines()[2] == "| 0.5B | off, 32768 | off, 32768 |"
    assert preflight.choices(["3B"], 10).splitlines()[2] == "| 3B | refused | refused |"
    assert "agent-r1[lora]" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "why"), [
    ("evidence/evidence.py --part horizons --batches 4 --force", "at least 10 batches"),
    ("performance/tool_latency.py --iterations 1 --force", "the first one is not counted"),
    ("learning/trl_comparison.py --steps 1 --force", "the first one is not counted"),
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


def test_families_keep_the_columns_of_the_other_environment(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    families = importlib.import_module("families")
    right = {"batch": 1e-6, "checkpointing": 0.0, "gradients finite": True, "trees": True}
    for name, found in {
        "measure_trainer": lambda _: right,
        "measure_engine": lambda _: {"refused": "windows of 8 tokens"},
        "registered": lambda _: True,
        "in_child": lambda *_: {"gap": 3e-3},
        "import_vllm": lambda: argparse.Namespace(__version__="0.32"),
    }.items():
        monkeypatch.setattr(families, name, found)
    for module in (families, machine):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setitem(families.FAMILIES, "New", ("New 1B", "no_such_type", {}))
    for columns in ("transformers", "vllm"):
        monkeypatch.setattr(sys, "argv", ["families.py", "--families", "Qwen3", "New", "--columns", columns])
        families.main()
    assert "New: transformers" in capsys.readouterr().out
    (row,) = [line for line in (tmp_path / "families.md").read_text().splitlines() if line.startswith("| Qwen3 |")]
    assert row.endswith("| yes (1e-06) | yes | no: windows of 8 tokens | no: differs by 3e-03 |")
    assert list(json.loads((tmp_path / "families.json").read_text())["results"]["families"]) == ["Qwen3"]
    assert families.trainer_cell(right | {"checkpointing": 2e-3}) == "no: differs by 2e-03"
    assert families.trainer_cell(right | {"gradients finite": False}) == "no: gradients are not finite"
    assert families.engine_cell({"failed": "ValueError: x | y."}) == "no: ValueError: x / y"


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


def test_seconds_are_of_as_many_threads_as_were_asked_for(monkeypatch):
    pytest.importorskip("tyro")
    multihop_seeds = importlib.import_module("multihop_seeds")
    monkeypatch.chdir(ROOT)
    some = [argparse.Namespace(threads=n, eval_every=2, flags="") for n in (1, 2)]
    one, two = (multihop_seeds.job(1, "outcome only", args) for args in some)
    assert one.args != two.args and one.args == multihop_seeds.job(1, "outcome only", some[0]).args
