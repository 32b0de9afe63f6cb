"""docs/recipe.md: its own files and commands, in order, with a tiny model as the student and a local server as the
teacher. A command of the page that changes is a command that runs here."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import torch
import transformers
from chat_server import KEY, ChatServer, called, expert

from agent_r1 import validate
from agent_r1.text.tokenizers import load_tokenizer
from llm_utils.imitation.demonstrations import read_rows
from llm_utils.setup.sources import model_source

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
ENV_ID = "AgentR1/Rows-v0"
API, SERVED = "https://api.openai.com/v1", "http://localhost:8000/v1"


def commands(heading: str) -> str:
    """Return the bash blocks below a heading of the page, up to the next heading of the same level."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert blocks, heading
    return "".join(blocks)


def changed(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in text, f"the page has no {old!r}"
        text = text.replace(old, new)
    return text


def variable(name: str, text: str) -> str:
    """Return the value of a shell variable."""
    return shlex.split(re.search(rf"^{name}=.*$", text, re.MULTILINE)[0])[0].partition("=")[2]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """The page's files in the current folder, and the environment's arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "desk", raising=False)
    for name, code in re.findall(r"^```python\n# (\w+\.py)(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        Path(name).write_text(f"#{code}")
    runpy.run_path("make_rows.py")
    yield json.loads(variable("ROWS", commands("Rows and functions")))
    sys.modules.pop("desk", None)


@pytest.fixture
def student(tmp_path):
    """The folder of a random chat model of 30k parameters, with a tokenizer that a shipped policy has."""
    tokenizer = load_tokenizer(model_source("tiny", "AgentR1/ArithmeticWorld-v0"))
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.GraniteConfig(vocab_size=len(tokenizer), max_position_embeddings=2048, **size)
    folder = tmp_path / "student"
    transformers.GraniteForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def teacher(desk, monkeypatch):
    """teacher(split, tasks): the address of an API that solves these tasks, except every fourth."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    servers = []

    def serve(split, num_tasks):
        env = gym.make(ENV_ID, split=split, **desk).unwrapped
        solve, too_hard = expert(env, num_tasks), {env.make_task(index).question for index in range(0, num_tasks, 4)}

        def reply(body):
            return called(content="<answer>0</answer>") if body["messages"][1]["content"] in too_hard else solve(body)

        servers.append(ChatServer(reply))
        return servers[-1].url

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_rows_and_functions_pass_the_check(desk, capsys):
    assert validate.main([ENV_ID, "--env-kwargs", json.dumps(desk), "--tasks", "4"]) == 0
    assert "| 1.000 |" in capsys.readouterr().out  # the demonstrations


@pytest.mark.parametrize("heading", ["On one GPU", "On a laptop, without a GPU or an API"])
def test_every_command_that_names_the_environment_has_its_rows(heading):
    """Also supervised training on a file, which at the end prints commands to evaluate and improve."""
    found = [command for command in commands(heading).replace("\\\n", " ").splitlines() if ENV_ID in command]
    assert len(found) >= 2
    for command in found:
        assert '--env-kwargs "$ROWS"' in command, command


def test_a_teachers_episodes_become_the_students_data(desk, teacher, student, learn, capsys):
    """Their prompts, turns and masks are those that the student will sample."""
    flags = ["--api", teacher("train", 8), "--api-model", "m", "--tokenizer", student, "--split", "train"]
    flags += ["--env-id", ENV_ID, "--env-kwargs", json.dumps(desk), "--episodes", 8, "--num-envs", 4]
    file = learn("evaluate_llm", *flags) / "trajectories.jsonl"
    tokenizer = load_tokenizer(str(student))
    rows = read_rows(str(file), len(tokenizer), tokenizer, only_successes=True)
    assert "6 of 8 episodes succeeded and are kept" in capsys.readouterr().err
    env = gym.make(ENV_ID, split="train", tokenizer=str(student), **desk).unwrapped
    for row, index in zip(rows, (1, 2, 3, 5, 6, 7), strict=True):
        env.reset(options={"task_index": index})
        turns = "".join(turn + env.dialect.end_of_turn for turn in env.demonstration())
        assert tokenizer.decode(row.tokens[row.action_mask].tolist()) == turns
        assert row.tokens[: row.prompt_length].tolist() == env.episode.buffer[: env.episode.length].tolist()
    with pytest.raises(SystemExit, match="are of the tokenizer .*student; record the episodes with --tokenizer"):
        learn("sft_llm", "--model", "tiny", "--env-id", "AgentR1/MultihopWorld-v0", "--data", file)


def run(script: str, folder: Path) -> str:
    """Run commands as a shell does, up to the first that fails. Return what they printed."""
    script = re.sub(r"(?<=python )(learner|benchmarks)/", rf"{ROOT}/\1/", script)
    script = f"set -eo pipefail\npython() {{ {shlex.quote(sys.executable)} \"$@\"; }}\n{script}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute or two on a core that is free
def test_the_commands_for_one_gpu_run_in_order(desk, teacher, student, tmp_path):
    pytest.importorskip("peft")
    script = changed(
        commands("Rows and functions") + commands("On one GPU"),
        {
            variable("STUDENT", commands("On one GPU")): str(student),
            "export OPENAI_API_KEY=...": "",
            API: teacher("train", 16),
            "--episodes 1000": "--episodes 16",
            "--num-steps 200": "--num-steps 2",
            "--total-episodes 5120": "--total-episodes 16 --episodes-per-iteration 16 --eval-episodes 8",
            "--engine vllm": "--num-envs 8",
            "--model runs/*__desk__*": "--episodes 8 --model runs/*__desk__*",
            "--samples 8": "--samples 2",
            SERVED: teacher("test", 8),
            "--split test": "--split test --episodes 8",
            "\nvllm serve": "\n: vllm serve",
        },
    )
    said = run(script, tmp_path)
    assert "12 of 16 episodes succeeded and are kept" in said
    memory = re.findall(r"^\| ([\d.]+B) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE)
    for size, full, lora in memory:
        assert re.search(rf"^\| {size} \| {full}; \d+ \| {lora}; \d+ \|", said, re.MULTILINE), size
    assert len(memory) == 4
    served = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*__served__*/evaluation.json")]
    assert served[0]["metrics"]["success"]["mean"] == 0.75
    (model,) = tmp_path.glob("runs/*__desk__*/model")
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(os.listdir(model))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute or two on a core that is free
def test_the_commands_for_a_laptop_run_in_order(desk, tmp_path):
    script = changed(
        commands("Rows and functions") + commands("On a laptop, without a GPU or an API"),
        {
            "--num-steps 60": "--num-steps 2 --num-demonstrations 40",
            "--total-episodes 2560 --episodes-per-iteration 128": "--total-episodes 16 --episodes-per-iteration 16 "
            "--eval-episodes 8",
            "--temperature 1": "--temperature 1 --episodes 8",
        },
    )
    assert "success in evaluations, greedy" in run(script, tmp_path)
