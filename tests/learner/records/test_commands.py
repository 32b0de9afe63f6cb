"""Commands to copy: the same program, path and quotes wherever they are printed."""

import shlex
import sys
from pathlib import Path

import grpo_llm
import pytest
import yaml

from llm_utils import config_file
from llm_utils.records import commands


@pytest.fixture(autouse=True)
def script(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["my code/grpo_llm.py"])


def test_paths_are_quoted_and_obey_no_terminal():
    run_dir = Path("runs/a run\x1b[31m\n# it's")
    for command in (commands.show(run_dir), commands.resume(run_dir), commands.script_beside("x.py", str(run_dir))):
        assert "\x1b" not in command and "\n" not in command
        assert shlex.split(command)[-1] == "runs/a run\\x1b[31m\\n# it's"
    assert shlex.split(commands.script_beside("x.py"))[1:] == ["my code/x.py"]


def test_training_keeps_its_launcher_and_other_programs_are_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    program, *words = shlex.split(commands.resume("runs/r", "--seed", "2"))
    assert Path(program).name == "torchrun"
    assert words == ["--nproc-per-node", "2", "my code/grpo_llm.py", "--resume", "runs/r", "--seed", "2"]
    for command in (commands.show("runs/r"), commands.script_beside("evaluate_llm.py")):
        assert Path(shlex.split(command)[0]).name == Path(sys.executable).name


def test_a_files_comment_stays_a_comment(tmp_path):
    folder = tmp_path / "a\nseed: 5"
    folder.mkdir()
    config_file.write(folder, grpo_llm.Args())
    text = (folder / "config.yaml").read_text()
    assert yaml.safe_load(text)["seed"] == 1 and text.count("\nseed: ") == 1
