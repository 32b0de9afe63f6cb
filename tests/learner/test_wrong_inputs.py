"""What a newcomer mistypes: each ends with one line that names the flag or the file, before a model is loaded or a
folder is made. `test_arguments.py` and `test_flags.py` have more ranges and contradictions, `test_config_file.py` more
files of flags."""

import importlib
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from learners import filled

from llm_utils import arguments

ROOT = Path(__file__).parents[2]
FILES = {
    "file": "x", "empty.jsonl": "", "data.csv": "question,answer\n1 + 1?,2\n", "cut.jsonl": '{"tokens": [1,\n',
    "questions.jsonl": '{"question": "1 + 1?", "answer": "2"}\n', "typo.yaml": "group_sise: 4\n",
    "tab.yaml": "env_kwargs:\n\tmax_turns: 3\n", "text.yaml": "seed: three\n", "list.yaml": "- seed\n",
    "range.yaml": "seed: -3\n", "split.yaml": "split: tset\n", "a.json": "{}", "no_ids.py": "x = 1\n",
}  # fmt: skip


@pytest.fixture
def newcomer(monkeypatch, tmp_path):
    """A folder of some files, in which loading a model fails the test."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    Path("folder").mkdir()

    def load(*_, **__):
        pytest.fail("a model was loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


CHECKED = {
    "grpo_llm --group-size 1": "--group-size 1 must be at least 2",
    "grpo_llm --group-size -4": "--group-size -4 must be at least 2",
    "grpo_llm --group-size 7": "--episodes-per-iteration 256 must be a multiple of --group-size 7",
    "grpo_llm --episodes-per-iteration 16 --group-size 1": "--group-size 1 must be at least 2",
    "grpo_llm --seed -1": "--seed must be at least 0",
    "grpo_llm --learning-rate -1e-4": "--learning-rate must be at least 0",
    """grpo_llm --env-kwargs "{'max_turns': 4}" """: "--env-kwargs takes a JSON object, such as '",
    "grpo_llm --env-kwargs true": "--env-kwargs takes a JSON object, .*, got true",
    "grpo_llm --env-kwargs max_turns=4": "--env-kwargs takes a JSON object, .*, got max_turns=4",
    "grpo_llm --env-kwargs ''": "--env-kwargs is empty",
    "ppo_llm --truncation bootstrap --env-kwargs '[1]'": "--env-kwargs takes a JSON object",
    """grpo_llm --env-kwargs '{"num_envs": 3}' """: "--env-kwargs must not contain num_envs; use --num-envs",
    "grpo_llm --env-id AgentR1/MultihopWorld": "--env-id AgentR1/MultihopWorld: there is no such environment",
    "grpo_llm --env-id CartPole-v1": "--env-id CartPole-v1: CartPoleEnv is not a ToolEnv",
    "grpo_llm --env-id ''": "--env-id is empty",
    "grpo_llm --env-id no_ids:X-v0": "--env-id no_ids:X-v0: there is no such environment; no_ids registers none",
    "grpo_llm --env-id no_ids.py:X-v0": "--env-id no_ids.py:X-v0: name the module as in an import",
    "grpo_llm --split tset": "--split tset: AgentR1/MultihopWorld-v0 has no split 'tset'; it has train, test",
    "rloo_llm --eval-split zzz": r"--eval-split zzz: .* has no split 'zzz'; it has train, test, \w+",
    "sft_llm --split tset": "--split tset: .* it has train, test, ",
    "grpo_llm --env-id AgentR1/HumanEval-v0": "--split train: AgentR1/HumanEval-v0 has no split 'train'; it has test",
    "grpo_llm --model ''": "--model is empty",
    "grpo_llm --engine vllm-server --vllm-url localhost:8000": "--vllm-url localhost:8000: this is not an address",
    "grpo_llm --no-cuda --deterministic --engine vllm": "--deterministic is incompatible with --engine vllm",
    "grpo_llm --track false": "--track takes no value: write --track, or --no-track",
    "grpo_llm --cuda=False": "--cuda takes no value: write --cuda, or --no-cuda",
    "grpo_llm --gradient-checkpointing": "--gradient-checkpointing needs a value: auto, on, off$",
    "ppo_llm --gradient-checkpointing --seed 3": "--gradient-checkpointing needs a value: auto, on, off$",
    "sft_llm --only-successes yes": "--only-successes takes no value",
    "grpo_llm --data-dir nowhere": "--data-dir nowhere: there is no such file or folder",
    "grpo_llm --config": "--config is empty",
    "grpo_llm --config nowhere.yaml": "--config nowhere.yaml: there is no such file",
    "grpo_llm --config folder": "--config folder: this is a folder",
    "grpo_llm --config typo.yaml": "--config typo.yaml: there is no flag group_sise; did you mean group_size?",
    "grpo_llm --config tab.yaml": "--config tab.yaml, line 2: a tab",
    "grpo_llm --config text.yaml": "--config text.yaml: seed takes a whole number, not 'three'",
    "grpo_llm --config list.yaml": "--config list.yaml: the file has no flags",
    "grpo_llm --config data.csv": "--config data.csv: the file has no flags",
    "grpo_llm --config questions.jsonl": "--config questions.jsonl: there is no flag question",
    "grpo_llm --config range.yaml": "--seed must be at least 0",
    "grpo_llm --config split.yaml": "--split tset: ",
    "grpo_llm --horizon-schedule 4,x": "--horizon-schedule: stages must be numbers of turns",
    "grpo_llm --total-episodes 100": "--total-episodes 100 is not a multiple of --episodes-per-iteration 256: use 256",
    "grpo_llm --num-minibatches 1000": "--num-minibatches exceeds --episodes-per-iteration",
    "grpo_llm --log-trajectories -1": "--log-trajectories must be a number of episodes, at least 0, or all",
    "grpo_llm --temperature 0": "--temperature must be above 0",
    "ppo_llm --critic-warmup 20": "--critic-warmup 20 leaves none of the 20 iterations",
    "reinforce_pp_llm --group-size 4": "--group-size does nothing without --baseline",
    "sft_llm --data nowhere.jsonl": "--data nowhere.jsonl: there is no such file",
    "sft_llm --data folder": "--data folder: there is no such file",
    "sft_llm --out file": "--out file: this is a file; give a folder",
    "sft_llm --model scratch --lora-rank 4": "--lora-rank needs a trained --model",
    "evaluate_llm --adapter nowhere": "--adapter nowhere: there is no adapter_config.json",
    "evaluate_llm --adapter file": "--adapter file: there is no adapter_config.json",
    "evaluate_llm --api localhost --api-model x": "--api localhost: this is not an address",
    "evaluate_llm --temperature -1": "--temperature must be at least 0",
}


@pytest.mark.parametrize("line", CHECKED)
def test_a_wrong_input_is_refused_when_flags_are_checked(newcomer, line):
    script, *words = shlex.split(line)
    module = importlib.import_module(script)
    with pytest.raises(SystemExit, match=f"^{CHECKED[line]}") as ended:
        module.check(filled(arguments.read(module.Args, args=words)))
    assert "\n" not in str(ended.value)


RUN = {
    "grpo_llm --model file": "--model file: this is a file; give its folder",
    "grpo_llm --model nowhere/model/config": "--model nowhere/model/config: there is no such folder",
    "grpo_llm --tokenizer file": "--tokenizer file: this is a file; give its folder",
    "grpo_llm --tokenizer folder": "--model, or --tokenizer: .*folder is not a tokenizer folder",
    "grpo_llm --env-kwargs '{\"max_turnz\": 4}'": "--env-id .* got an unexpected keyword argument 'max_turnz'; it has ",
    "grpo_llm --env-kwargs '{\"max_turns\": 0}'": "--env-id .*: max_turns must be at least 1, got 0",
    "grpo_llm --horizon-schedule 99": "--horizon-schedule 99 does nothing",
    "grpo_llm --sample-by-pass-rate a.json": ".*this is not a file of evaluate_llm.py --samples",
    "grpo_llm --resume folder": "--resume folder: there is no checkpoint",
    "sft_llm --model file": "--model file: this is a file; give its folder",
    "sft_llm --data data.csv": "--data data.csv: its first line is no JSON object with `tokens` and `action_mask`",
    "sft_llm --data cut.jsonl": "--data cut.jsonl: its first line is no JSON object",
    "sft_llm --data questions.jsonl": "--data questions.jsonl: its first line is no JSON object with `tokens` and",
    "sft_llm --data empty.jsonl": "--data empty.jsonl: the file is empty",
    "sft_llm --teacher nobody": "--teacher nobody: AgentR1/MultihopWorld-v0 has no such teacher",
    "evaluate_llm --split tset": "--split tset: .* it has train, test, ",
    "evaluate_llm --model file": "--model file: this is a file; give its folder",
    "evaluate_llm --first-episode 99999999": "--first-episode 99999999: the split test has 10000 tasks",
    "evaluate_llm --resume file": "--resume file: there is no evaluation.json",
}
CHEAP = ("sft_llm --data", "sft_llm --model", "grpo_llm --model file", "grpo_llm --resume", "evaluate_llm --first")


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=() if line.startswith(CHEAP) else pytest.mark.slow) for line in RUN]
)
def test_a_wrong_input_ends_a_script_before_it_loads_a_model(newcomer, learn, line):
    script, *words = shlex.split(line)
    with pytest.raises(SystemExit, match=f"^{RUN[line]}") as ended:
        learn(script, "--num-threads", 1, "--no-cuda", *words)
    assert "\n" not in str(ended.value) and not Path("runs").exists()


def test_a_server_that_does_not_answer_is_found_before_a_model_is_loaded(newcomer, learn):
    pytest.importorskip("httpx")
    with socket.socket() as free:  # nobody listens at its port
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(SystemExit, match=f"^--vllm-url {url}: no vLLM server answers at this address"):
            learn("grpo_llm", "--engine", "vllm-server", "--vllm-url", url, "--no-cuda", "--num-threads", 1)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "package", "message"),
    [
        (["grpo_llm", "--engine", "vllm"], "vllm", r"--engine vllm needs vllm: pip install 'agent-r1\[vllm\]'"),
        (["grpo_llm", "--engine", "vllm-server"], "httpx", r"--engine vllm-server needs httpx: .*\[http\]"),
        (["ppo_llm", "--lora-rank", 4], "peft", r"--lora-rank needs peft: pip install 'agent-r1\[lora\]'"),
        (["evaluate_llm", "--api", "http://a", "--api-model", "m"], "httpx", r"--api needs httpx: .*\[http\]"),
        (["sft_llm", "--lora-rank", 4, "--model", "tiny"], "peft", "--lora-rank needs peft"),
    ],
)
def test_a_missing_package_is_found_before_any_work(newcomer, monkeypatch, words, package, message):
    script, *flags = map(str, words)
    module = importlib.import_module(script)
    args = arguments.read(module.Args, args=flags)
    monkeypatch.setitem(sys.modules, package, None)  # Python's own way to say: not there
    with pytest.raises(SystemExit, match=f"^{message}"):
        arguments.check_machine(args)


def test_a_folder_for_runs_that_cannot_be_written_is_found_before_any_work(newcomer):
    Path("runs").write_text("a file")
    for script in ("sft_llm", "evaluate_llm"):
        module = importlib.import_module(script)
        with pytest.raises(SystemExit, match="^runs: cannot write into this folder"):
            module.check(filled(module.Args()))
    with pytest.raises(SystemExit, match="^runs: cannot write into this folder"):
        arguments.check_machine(importlib.import_module("grpo_llm").Args())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("grpo_llm --group-sise 4", "--group-size INT"),
        ("grpo_llm --group-size four", "Error parsing --group-size: invalid literal for int"),
        ("grpo_llm --dtype bf16", "invalid choice 'bf16' for argument '--dtype'"),
        ("grpo_llm train", "Unrecognized options: train"),
        ("evaluate_llm --mode rag", "invalid choice 'rag' for argument '--mode'"),
        ("sft_llm --num-steps 1e3", "Error parsing --num-steps"),
        ("compare --where seed", "error: --where seed: give NAME=VALUE, such as seed=1"),
        ("compare --runs nowhere", "no finished run in nowhere"),
        ("sweep --env-ids X --commands grpo_llm", "the command has no learner"),
        ("grpo_llm --split tset", "--split tset: "),
    ],
)
def test_a_process_ends_without_a_traceback(newcomer, environment_of_scripts, line, text):
    script, *words = shlex.split(line)
    paths = ":".join(str(ROOT / name) for name in ("envs", "tools", "learner"))
    environment = environment_of_scripts | {"PYTHONPATH": paths}
    command = [sys.executable, str(ROOT / "learner" / f"{script}.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode in (1, 2) and text in done.stderr and "Traceback" not in done.stderr
    assert not Path("runs").exists()
