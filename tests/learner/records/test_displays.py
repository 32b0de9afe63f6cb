"""The table of an evaluation, episodes as text, and the last lines of a run."""

import io
import json
import shlex
from pathlib import Path

import grpo_llm
import numpy as np
import pytest
import sft_llm

from llm_utils.records import displays
from llm_utils.records.intervals import difference, proportion
from llm_utils.records.logger import Logger


def test_sparklines():
    assert displays.sparkline([0, 0.5, 1]) == "▁▅█" and displays.sparkline([0.4, 0.5]) == "▄▅"  # not their own scale
    assert displays.sparkline([-5, 0, 10]) == "▁▃█" and displays.sparkline([3, 3]) == "▁▁"
    assert displays.sparkline([0, 1], "ascii") == displays.sparkline([0, 1], None) == "_#"
    assert len(displays.sparkline(np.linspace(0, 1, 500))) == displays.WIDTH


def test_the_table_of_an_evaluation():
    history = [{"iteration": 0, "success": 0.1, "em": 0.1, "return": -0.5}]
    history += [{"iteration": 5, "success": 0.6, "em": 0.6, "return": 2.0}]
    history += [{"iteration": 10, "success": 0.5, "em": 0.5, "return": 1.0}]
    intervals = {name: (means, 0.25, 1.0) for name, means in history[-1].items()}
    title, success, returns = displays.table(history, intervals, "utf-8").splitlines()  # exact match is equal
    assert title.split() == ["before", "best", "now", "95", "%", "interval", "all"]
    assert success.split() == ["success", "0.100", "0.600", "0.500", "0.250", "to", "1.000", "▂▅▅"]
    assert returns.split()[:4] == ["return", "-0.500", "2.000", "1.000"]


def test_the_change_has_the_interval_of_the_difference_over_the_same_tasks():
    before = {str(i): float(i < 2) for i in range(21)}
    after = {str(i): float(i < 15) for i in range(20)}  # an infrastructure error ended the last one
    history = [{"iteration": 0, "success": 0.1}, {"iteration": 5, "success": 0.9}, {"iteration": 9, "success": 0.75}]
    value, low, high = difference(*(np.array([side[str(i)] for i in range(20)]) for side in (after, before)))
    assert displays.change(before, after, history) == (
        f"success in evaluations, greedy: 0.100 before, 0.750 after ({value:+.3f}, 95 % interval {low:+.3f} to "
        f"{high:+.3f}), best 0.900 after 5 iterations"
    )


@pytest.fixture
def rows(made_up_rows):
    rows = made_up_rows(1, 4)
    for number, row in enumerate(rows):
        row.stats["success"] = float(number == 2)
        text = f"````\n# of {number} </pre><b>\n```\n"
        row.record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]}
    return rows


def test_a_failed_and_a_successful_episode_as_text(rows):
    failed, solved = displays.samples(rows)
    assert "no success" in failed[0] and "# of 0" in failed[1]
    assert ", success" in solved[0] and "# of 2" in solved[1]
    rows[0].record["messages"][1]["content"] = "x" * 50_000
    long = displays.samples(rows)[0][1]
    assert len(long) < 7_000 and "characters cut" in long
    rows[0].fault = "search"
    assert "# of 1" in displays.samples(rows)[0][1]


def test_each_of_several_environments_has_two_episodes_with_its_own_numbers(rows, made_up_rows):
    more = made_up_rows(1, 4)
    for number, row in enumerate([*rows, *more]):
        row.task_index, own = 500 + number, number % 4
        row.stats["success"] = float(number in (1, 2, 5))
        row.record = {**rows[0].record, "env_id": f"my/{'AB'[number > 3]}-v0", "task_index": own}
    found = [heading.rpartition(",")[0] for heading, _ in displays.samples([*rows, *more])]
    assert found == [
        "my/A-v0, task index 0, no success", "my/A-v0, task index 1, success",
        "my/B-v0, task index 0, no success", "my/B-v0, task index 1, success",
    ]  # fmt: skip


def test_returns_are_no_shares():
    assert displays.interval("return", [0.1, 0.1]) == pytest.approx((0.1, 0.1, 0.1))
    for name in ("success", "em", "support_recall"):
        assert displays.interval(name, [0.0, 0.0]) == proportion(np.zeros(2)) and proportion(np.zeros(2))[2] > 0.6
    assert displays.interval("support_recall", [0.5, 3.0])[2] > 1


def test_text_of_a_model_stays_in_its_block(rows):
    from tensorboard.plugin_util import markdown_to_safe_html

    page = markdown_to_safe_html(displays.as_markdown(displays.samples(rows)))
    assert page.count("<pre>") == page.count("</pre>") == 2 and "<h1>" not in page and "<b>" not in page
    page = displays.as_html(displays.samples(rows))
    assert page.count("<pre>") == page.count("</pre>") == 2 and "<b>" not in page


def test_tensorboard_has_the_episodes(rows, tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = {"iteration": 0, "global_step": 7, "train_seconds": 0.0, "summary": {}}
    logger = Logger(tmp_path, grpo_llm.Args(eval_split="test"), 8, run)
    logger.evaluation(rows, run)
    logger.close()
    (event,) = EventAccumulator(str(tmp_path)).Reload().Tensors("eval/episodes/text_summary")
    assert event.step == 7 and b"# of 2" in event.tensor_proto.string_val[0]
    assert "evaluation after 0 iterations: 4 tasks of split test, greedy\n" in capsys.readouterr().out
    assert json.loads(json.dumps(run))["evaluations"] == [{"iteration": 0, "success": 0.25, "return": pytest.approx(
        np.mean([row.stats["return"] for row in rows]))}]  # fmt: skip


def test_the_summary_counts_the_tasks_of_each_environment(rows, tmp_path):
    for number, row in enumerate(rows):
        row.task_index, row.record["env_id"] = number, f"AgentR1/{'AB'[number > 0]}-v0"
    run = {"iteration": 0, "global_step": 0, "train_seconds": 0.0, "summary": {}}
    logger = Logger(tmp_path, grpo_llm.Args(log_trajectories=0), 8, run)
    logger.evaluation(rows, run)
    logger.bar.close()
    logger.writer.close()
    assert run["summary"]["eval/A-v0/episodes"] == 1 and run["summary"]["eval/B-v0/episodes"] == 3
    assert run["success_before"] == {str(i): float(i == 2) for i in range(4)}
    assert logger.show == ""  # no episodes are recorded


def commands(text):
    return {line.split(":")[0].strip(): shlex.split(line.split(":", 1)[1]) for line in text.splitlines()[1:]}


def test_the_last_lines_name_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["learner/grpo_llm.py"])
    run_dir = tmp_path / "a run\x1b[31m"
    args = grpo_llm.Args(env_id="my:Mine/Own-v0", total_episodes=32)
    assert set(commands(displays.last_lines(run_dir, run_dir / "model", args))) == {"look at it"}
    for name in ("model/config.json", "checkpoint/policy/adapter_config.json", "checkpoint/state.json"):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text("{}")
    text = displays.last_lines(run_dir, run_dir / "model", args)
    assert "\x1b" not in text and text.splitlines()[0].endswith("/model")
    run_dir = tmp_path / "run"
    (tmp_path / "a run\x1b[31m").rename(run_dir)
    found = commands(displays.last_lines(run_dir, run_dir / "model", args))
    assert found["look at it"][1:] == ["-m", "agent_r1.show", str(run_dir)]
    assert found["evaluate it"][1:] == ["learner/evaluate_llm.py", "--model", str(run_dir)]
    assert found["train further"][1:] == ["learner/grpo_llm.py", "--resume", str(run_dir), "--total-episodes", "64"]
    (run_dir / "model" / "config.json").unlink()
    found = commands(displays.last_lines(run_dir, run_dir / "model", args))
    assert found["evaluate it"][2:] == ["--adapter", str(run_dir / "checkpoint" / "policy")]


def test_a_run_on_several_environments_is_evaluated_on_each(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["learner/grpo_llm.py"])
    args = grpo_llm.Args(env_id=["AgentR1/A-v0", "my:Mine/B-v0"])
    for file, words in (
        ("checkpoint/policy/adapter_config.json", ["--adapter", str(tmp_path / "checkpoint" / "policy")]),
        ("model/config.json", ["--model", str(tmp_path)]),
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}")
        text = displays.last_lines(tmp_path, tmp_path / "model", args)
        found = [shlex.split(line)[3:] for line in text.splitlines() if "evaluate it:" in line]
        assert found == [["learner/evaluate_llm.py", *words, "--env-id", env_id] for env_id in args.env_id]


def test_the_last_lines_of_supervised_training(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["learner/sft_llm.py"])
    out, kwargs = tmp_path / "my policy", json.dumps({"max_turns": 3})
    out.mkdir()
    (out / "config.json").write_text("{}")
    found = commands(displays.last_lines(Path("runs/r"), out, sft_llm.Args(env_id="my:Own-v0", env_kwargs=kwargs)))
    environment = ["--env-id", "my:Own-v0", "--env-kwargs", kwargs]
    assert found["evaluate it"][1:] == ["learner/evaluate_llm.py", "--model", str(out), *environment]
    small = ["--learning-rate", "3e-4"]  # from scratch
    assert found["improve it"][1:] == ["learner/grpo_llm.py", "--model", str(out), *small, *environment]
    pretrained = sft_llm.Args(model="Qwen/Qwen2.5-0.5B-Instruct")
    assert "--learning-rate" not in displays.last_lines(Path("runs/r"), out, pretrained)
    assert "look at it" not in found


def test_the_last_lines_of_a_model_that_transformers_does_not_sample(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["learner/sft_llm.py"])
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(displays, "find_spec", lambda name: object())
    found = commands(displays.last_lines(Path("runs/r"), tmp_path, sft_llm.Args(model="ai21/x"), "only Mamba layers"))
    assert found["evaluate it"][-2:] == found["improve it"][-2:] == ["--engine", "vllm"]
    monkeypatch.setattr(displays, "find_spec", lambda name: None)
    text = displays.last_lines(Path("runs/r"), tmp_path, sft_llm.Args(model="ai21/x"), "only Mamba layers")
    assert "no engine here samples from this model, as it has only Mamba layers" in text.splitlines()[1]
    assert "evaluate it" not in text and "improve it" not in text


def test_a_terminal_without_unicode_gets_a_table_too(rows, tmp_path, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    run = {"iteration": 0, "global_step": 0, "train_seconds": 0.0, "summary": {}}
    logger = Logger(tmp_path, grpo_llm.Args(), 8, run)
    logger.evaluation(rows, run)
    logger.bar.close()
    logger.writer.close()
    stream.flush()
    assert b"success" in stream.buffer.getvalue()
