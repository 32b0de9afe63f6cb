"""learner/evaluate_llm.py: the numbers it reports, the baselines, and a run."""

import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import evaluate_llm
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_r1 import tiny_policy
from llm_utils.records import earlier_runs
from llm_utils.setup.loading import load_policy, merge_adapters
from llm_utils.setup.sources import fingerprint, model_files, model_source
from llm_utils.value_model import Critic, save_critic

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "learner" / "evaluate_llm.py"
ENV_ID = "AgentR1/MultihopWorld-v0"
SMALL = ["--tokenizer", "byte", "--num-envs", "4", "--num-threads", "1", "--episodes", "6"]
SMALL += ["--env-kwargs", json.dumps({"max_turns": 2, "max_action_tokens": 8})]


def run(monkeypatch, tmp_path, *arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    folder = max(Path("runs").iterdir(), key=lambda folder: folder.stat().st_mtime)
    rows = [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]
    return json.loads((folder / "evaluation.json").read_text()), rows


@pytest.mark.parametrize("name", ["em", "f1", "success", "format", "truncated"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_score_of_0_in_all_tasks_is_not_certain(name, times):
    """Wilson's interval of 0 of 20, also where each task is played several times; a mean of turns may be certain."""
    rows = [SimpleNamespace(task_index=i % 20, stats={name: 0.0, "turns": 1.0}) for i in range(20 * times)]
    table = evaluate_llm.summarize(rows, 0)
    shown = "exact_match" if name == "em" else name
    assert table[shown]["low"] == 0 and table[shown]["high"] == pytest.approx(0.1611, abs=1e-4)
    assert table["turns"] == {"mean": 1, "low": 1, "high": 1}


def test_pass_at_k_has_golden_values():
    assert [evaluate_llm.pass_at(k, 5, 2) for k in (1, 2, 3, 4, 5)] == pytest.approx([0.4, 0.7, 0.9, 1, 1], abs=1e-12)
    assert [evaluate_llm.pass_at(k, 4, 0) for k in (1, 4)] == [0, 0]
    as_a_product = 1 - np.prod(1 - 64 / np.arange(4951, 5001))  # the paper's, for binomials of hundreds of digits
    assert evaluate_llm.pass_at(64, 5000, 50) == pytest.approx(as_a_product, abs=1e-12)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(wins, data):
    k = data.draw(st.integers(1, len(wins)))
    subsets = [any(chosen) for chosen in itertools.combinations(wins, k)]
    assert evaluate_llm.pass_at(k, len(wins), sum(wins)) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


def test_tasks_with_dropped_episodes_count_up_to_their_samples():
    """Three tasks of 5 samples each; two episodes of the third, the successes, were dropped."""
    of_tasks = [[0, 0, 0, 1, 1], [0] * 5, [1, 0, 0]]
    rows = [SimpleNamespace(task_index=i, stats={"success": win}) for i, wins in enumerate(of_tasks) for win in wins]
    table = evaluate_llm.pass_table(rows, 5)
    assert list(table) == ["mean@5", "pass@1", "pass@2", "pass@4", "pass@5"]
    assert [row["tasks"] for row in table.values()] == [3, 3, 3, 2, 2]
    expected = [(0.4 + 0 + 1 / 3) / 3, (0.4 + 0 + 1 / 3) / 3, (0.7 + 0 + 2 / 3) / 3, 0.5, 0.5]
    assert [row["mean"] for row in table.values()] == pytest.approx(expected)
    assert all(0 <= row["low"] < row["mean"] < row["high"] <= 1 for row in table.values())
    assert list(evaluate_llm.pass_table(rows, 8)) == ["mean@8", "pass@1", "pass@2", "pass@4"]  # no task has 8


@pytest.mark.parametrize("mode", ["agent", "base_tool_call", "naive_rag", "closed_book"])
def test_a_run(monkeypatch, tmp_path, policy_folder, mode):
    result, rows = run(monkeypatch, tmp_path, "--model", policy_folder, *SMALL, "--mode", mode)
    assert result["episodes"] == len(rows) == 6
    assert [row["task_index"] for row in rows] == list(range(6))
    metrics = result["metrics"]
    assert metrics["turns"]["mean"] == (1 if mode in ("naive_rag", "closed_book") else 2)
    for name in ("exact_match", "f1", "success", "format", "tool_errors", "turns"):
        assert metrics[name]["low"] <= metrics[name]["mean"] <= metrics[name]["high"]
    assert metrics["return"]["mean"] == pytest.approx(np.mean([row["stats"]["return"] for row in rows]))


def test_the_baseline_of_a_run_is_what_it_began_with(monkeypatch, tmp_path, policy_folder):
    run_dir = tmp_path / "runs" / "a_run"
    (run_dir / "model").mkdir(parents=True)
    for file in policy_folder.iterdir():
        (run_dir / "model" / file.name).write_bytes(file.read_bytes())
    arguments = {"model": str(policy_folder), "tokenizer": "byte"}
    (run_dir / "summary.json").write_text(json.dumps({"args": arguments}))
    trained, _ = run(monkeypatch, tmp_path, "--model", run_dir, *SMALL)
    assert trained["model"] == str(run_dir / "model")
    base, _ = run(monkeypatch, tmp_path, "--model", run_dir, *SMALL, "--mode", "base_tool_call")
    assert base["model"] == str(policy_folder)


def test_a_context_beyond_the_models_positions_is_refused(monkeypatch, tmp_path, policy_folder):
    shutil.copytree(policy_folder, tmp_path / "few")
    config = json.loads((tmp_path / "few" / "config.json").read_text())
    (tmp_path / "few" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    with pytest.raises(SystemExit, match="the model has 64 positions: limit them with --env-kwargs"):
        run(monkeypatch, tmp_path, "--model", tmp_path / "few", *SMALL, "--env-kwargs", '{"max_context_tokens": 65}')


def test_other_tasks_than_the_first(monkeypatch, tmp_path, policy_folder):
    _, rows = run(monkeypatch, tmp_path, "--model", policy_folder, *SMALL, "--first-episode", 3)
    assert [row["task_index"] for row in rows] == list(range(3, 9))
    with pytest.raises(SystemExit, match="--first-episode 2000000: the split test has 10000 tasks"):
        run(monkeypatch, tmp_path, "--model", policy_folder, *SMALL, "--first-episode", 2_000_000)
    flags = ["--first-episode", 3, "--samples", 2, "--temperature", 1, "--episodes", 2, "--exp-name", "sampled"]
    report, rows = run(monkeypatch, tmp_path, "--model", policy_folder, *SMALL, *flags)
    assert [row["task_index"] for row in rows] == [3, 3, 4, 4] and report["metrics"]["mean@2"]["tasks"] == 2
    (file,) = Path("runs").glob("*/pass_rates.json")
    assert json.loads(file.read_text())["episodes"] == [0, 0, 0, 2, 2]


def test_adapters_on_top_of_others_are_played_with_them(monkeypatch, tmp_path, policy_folder, capsys):
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    for name, base in (("sft", policy_folder), ("rl/grpo", "../../sft")):
        peft.get_peft_model(load_policy(policy_folder, torch.device("cpu")), config).save_pretrained(tmp_path / name)
        file = tmp_path / name / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))
    by_hand = merge_adapters(merge_adapters(load_policy(policy_folder, torch.device("cpu")), "sft"), "rl/grpo")
    by_hand.save_pretrained(tmp_path / "merged")
    for file in policy_folder.glob("*token*"):
        shutil.copy(file, tmp_path / "merged")
    _, expected = run(monkeypatch, tmp_path, "--model", tmp_path / "merged", *SMALL)
    flags = [*SMALL, "--adapter", "rl/grpo", "--exp-name"]
    report, rows = run(monkeypatch, tmp_path, *flags, "on_top")  # the base's base is the model
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in expected]
    assert report["model"] == f"{policy_folder} with sft and rl/grpo"
    said = capsys.readouterr().err
    assert "--adapter rl/grpo is applied on top of sft" in said and f"--model {policy_folder}" in said
    args = evaluate_llm.Args(model=str(policy_folder), adapter="rl/grpo")
    before = model_files(args)
    os.utime(tmp_path / "sft" / "adapter_model.safetensors", ns=(1, 1))
    assert model_files(args) != before
    file = tmp_path / "sft" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "../rl/grpo"}))
    with pytest.raises(SystemExit, match="--adapter rl/grpo: .* its own base"):
        run(monkeypatch, tmp_path, *flags, "circle")


def test_adapters_below_others_are_found_from_where_those_really_lie(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bases = {"real/sft": "Qwen/base", "real/grpo": "../sft", "linked/sft": "another", "odd": 5}
    bases |= {"far": str(tmp_path / "real" / "sft"), "a": "../b", "b": "../c", "c": "../b"}
    for name, base in bases.items():
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (tmp_path / "linked" / "latest").symlink_to(tmp_path / "real" / "grpo")
    for name in ("linked/latest", "far"):
        assert earlier_runs.stack_of_adapters(name) == ["real/sft", name]
        assert earlier_runs.base_of_adapters(name) == "Qwen/base"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert earlier_runs.stack_of_adapters("../far")[0] == str((tmp_path / "real" / "sft").resolve())  # no ../../..
    monkeypatch.chdir(tmp_path)
    assert earlier_runs.base_of_adapters("odd") is None
    with pytest.raises(SystemExit, match="--adapter a: .* its own base"):
        earlier_runs.stack_of_adapters("a")


def test_adapters_in_the_repository_say_what_they_go_on_top_of():
    folders = [file.parent for file in (ROOT / "benchmarks" / "real_model" / "adapters").rglob("adapter_config.json")]
    stacks = [earlier_runs.stack_of_adapters(str(folder)) for folder in folders]
    assert {len(stack) for stack in stacks} == {1, 2}
    for folder, stack in zip(folders, stacks, strict=True):
        assert (len(stack) == 1) == (folder.name == "real_model_wiki"), folder
        assert earlier_runs.base_of_adapters(str(folder)) == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize("wrong", ["other names", "nothing", "some", "whole numbers", "NaN"])
def test_adapters_that_would_change_nothing_are_refused(tmp_path, policy_folder, wrong):
    """peft passes over weights of other names, and leaves what is missing as new adapters are."""
    peft = pytest.importorskip("peft")
    safetensors = pytest.importorskip("safetensors.torch")
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(load_policy(policy_folder, torch.device("cpu")), config).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    there = safetensors.load_file(file)
    one = next(iter(there))
    changed = {
        "other names": {name.replace("base_model.model.", "base_model."): weight for name, weight in there.items()},
        "nothing": {},
        "some": dict(list(there.items())[:3]),
        "whole numbers": {name: weight.to(torch.int64) for name, weight in there.items()},
        "NaN": there | {one: torch.full_like(there[one], torch.nan)},
    }[wrong]
    safetensors.save_file(changed, file)
    with pytest.raises(SystemExit, match="does not fit --model: .*(only in the file or|not hold finite)"):
        merge_adapters(load_policy(policy_folder, torch.device("cpu")), str(tmp_path))


def test_adapters_are_merged_or_refused(monkeypatch, tmp_path, policy_folder):
    peft = pytest.importorskip("peft")
    policy = load_policy(policy_folder, torch.device("cpu"))
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(policy, config)
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
        merged = merge_adapters(load_policy(policy_folder, torch.device("cpu")), tmp_path / "adapter")
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
    _, plain = run(monkeypatch, tmp_path, "--model", policy_folder, *SMALL)
    flags = ["--adapter", tmp_path / "adapter", "--exp-name", "adapted"]  # a folder of its own, also in this second
    report, other = run(monkeypatch, tmp_path, "--model", policy_folder, *SMALL, *flags)
    assert [row["tokens"] for row in plain] != [row["tokens"] for row in other]
    assert {row["model"] for row in other} == {report["model"]} == {f"{policy_folder} with {tmp_path / 'adapter'}"}
    with pytest.raises(SystemExit, match="no adapter_config.json; give a folder that peft saved"):
        run(monkeypatch, tmp_path, "--model", policy_folder, *SMALL, "--adapter", tmp_path)
    of_run = tmp_path / "other" / "checkpoint" / "policy"
    shutil.copytree(tmp_path / "adapter", of_run)
    with pytest.raises(SystemExit, match=f"no adapter_config.json; give {of_run}$"):
        merge_adapters(policy, tmp_path / "other")
    with pytest.raises(SystemExit, match=f"evaluate_llm.py --adapter {of_run},"):
        model_source(str(tmp_path / "other"), ENV_ID)
    file = of_run / "adapter_config.json"
    file.write_text(file.read_text().replace('"r": 2', '"r": 3'))
    with pytest.raises(SystemExit, match="does not fit --model: .*size mismatch") as caught:
        merge_adapters(load_policy(policy_folder, torch.device("cpu")), of_run)
    assert len(str(caught.value)) < 1000 and "\n" not in str(caught.value)
    (of_run / "adapter_model.safetensors").write_bytes((of_run / "adapter_model.safetensors").read_bytes()[:5])
    with pytest.raises(SystemExit, match=f"--adapter {of_run}: its weights cannot be read"):
        merge_adapters(load_policy(policy_folder, torch.device("cpu")), of_run)
    file.write_text("{}")
    with pytest.raises(SystemExit, match=f"--adapter {of_run}: {file}: peft_type is None; only LORA is supported"):
        merge_adapters(load_policy(policy_folder, torch.device("cpu")), of_run)
    with pytest.raises(SystemExit, match="--engine transformers"):
        run(monkeypatch, tmp_path, "--model", policy_folder, *SMALL, "--adapter", tmp_path, "--engine", "vllm")
    with pytest.raises(SystemExit, match="--mode base_tool_call evaluates a run's initial model.*leave out --adapter"):
        run(monkeypatch, tmp_path, "--model", policy_folder, *SMALL, "--adapter", tmp_path, "--mode", "base_tool_call")


@pytest.fixture
def run_on_hotpotqa(tmp_path, policy_folder, made_up_data):
    """The folder of a run that was trained on HotpotQA, with arguments of its own, and these arguments."""
    kwargs = {"max_turns": 2, "max_action_tokens": 8, "data_dir": str(made_up_data / "hotpotqa")}
    args = {"model": str(policy_folder), "tokenizer": "byte", "env_id": "AgentR1/HotpotQA-v0", "eval_split": "dev"}
    args["env_kwargs"] = json.dumps(kwargs)
    run_dir = tmp_path / "runs" / "a_run"
    shutil.copytree(policy_folder, run_dir / "model")
    (run_dir / "summary.json").write_text(json.dumps({"args": args}))
    return run_dir, args


def test_a_run_is_played_where_it_was_trained(monkeypatch, tmp_path, run_on_hotpotqa, capsys):
    run_dir, args = run_on_hotpotqa
    played, rows = run(monkeypatch, tmp_path, "--model", run_dir, *SMALL[:-2])
    assert {name: played["args"][name] for name in ("env_id", "split", "env_kwargs")} == {
        "env_id": args["env_id"], "split": "dev", "env_kwargs": args["env_kwargs"],
    }  # fmt: skip
    assert len(rows) == 2 and rows[0]["stats"].keys() >= {"support_recall"}
    printed = capsys.readouterr()
    assert "--env-id AgentR1/HotpotQA-v0 --split dev --env-kwargs '{" in printed.err
    assert "AgentR1/HotpotQA-v0, dev: 2 episodes" in printed.out


def test_where_a_run_is_played_elsewhere_that_is_said(run_on_hotpotqa):
    run_dir, args = run_on_hotpotqa

    def filled(**given):
        evaluation = evaluate_llm.Args(**{"model": str(run_dir), **given})
        said = "\n".join(earlier_runs.fill_environment(evaluation))
        return evaluation.env_id, evaluation.split, evaluation.env_kwargs, said

    *played, said = filled(env_id=ENV_ID)
    assert played == [ENV_ID, "test", "{}"] and f"trained on {args['env_id']}, but is evaluated on {ENV_ID}" in said
    *played, said = filled(env_kwargs="{}", split="train")
    assert played == [args["env_id"], "train", "{}"] and "max_action_tokens" in said and "uses its own" in said
    (run_dir / "summary.json").write_text(json.dumps({"args": args, "finished": False}))
    assert "is not finished" not in filled()[-1]  # its model/ is what an earlier end left
    (run_dir / "checkpoint").mkdir()
    (run_dir / "model").rename(run_dir / "checkpoint" / "policy")
    assert "this run is not finished; its last checkpoint is evaluated" in filled()[-1]
    (run_dir / "checkpoint" / "policy").rename(run_dir / "model")
    *played, said = filled(model="Qwen/base", adapter=str(run_dir / "model"))
    assert played == [args["env_id"], "dev", args["env_kwargs"]]
    assert filled(model="tiny") == (ENV_ID, "test", "{}", "")


def test_the_adapters_of_a_run_are_played_on_the_model_that_they_were_trained_on(run_on_hotpotqa, policy_folder):
    run_dir, args = run_on_hotpotqa

    def unfinished():
        (run_dir / "summary.json").write_text(json.dumps({"args": args, "finished": False}))
        return filled()[0]

    def filled(**given):
        evaluation = evaluate_llm.Args(adapter=str(run_dir / "model"), **given)
        return "\n".join(earlier_runs.fill_environment(evaluation)), evaluation.model

    said, model = filled()
    assert model == args["model"] and f"taken from the run: --model {args['model']} --tokenizer byte " in said
    assert "is not finished" not in said and "is not finished" in unfinished()
    assert filled(api="http://a")[1] == "tiny"  # and --adapter is refused
    said, model = filled(model=f"{policy_folder}/")  # the same
    assert Path(model) == policy_folder and "trained on --model" not in said
    said, model = filled(model=str(run_dir))  # what came of it
    assert f"the adapters were trained on --model {args['model']}, but are evaluated on {run_dir}" in said
    said, model = filled(model="Qwen/base")
    assert model == "Qwen/base" and f"the adapters were trained on --model {args['model']}, but are" in said


@pytest.mark.parametrize(("model", "base"), [("tiny", tiny_policy(ENV_ID)), ("scratch", "RUN/scratch"), ("Q/b", "Q/b")])
def test_what_a_run_began_with_is_named_the_same_everywhere(run_on_hotpotqa, monkeypatch, model, base):
    """"tiny" is another policy in another environment."""
    run_dir, args = run_on_hotpotqa
    (run_dir / "summary.json").write_text(json.dumps({"args": args | {"model": model, "env_id": ENV_ID}}))
    base = base.replace("RUN", str(run_dir))
    assert earlier_runs.beginning_of_run(str(run_dir / "model")) == base
    for env_id in (None, "AgentR1/CraftWorld-v0"):
        evaluation = evaluate_llm.Args(adapter=str(run_dir / "model"), env_id=env_id)
        earlier_runs.fill_environment(evaluation)
        assert evaluation.model == base
    monkeypatch.chdir(run_dir)
    assert earlier_runs.beginning_of_run("model") in (base, "./scratch")  # from inside


def test_adapters_without_a_run_are_played_on_the_shipped_policy_and_that_is_said(tmp_path):
    said = earlier_runs.fill_environment(evaluate_llm.Args(adapter=str(tmp_path)))
    assert f"--adapter {tmp_path} names no model; it is evaluated on --model tiny, the shipped policy" in said
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/base"}')  # as peft saves it
    said = earlier_runs.fill_environment(evaluate_llm.Args(adapter=str(tmp_path), model="Qwen/other"))
    assert "the adapters were trained on --model Qwen/base, but are evaluated on Qwen/other" in said
    evaluation = evaluate_llm.Args(adapter=str(tmp_path))
    assert earlier_runs.fill_environment(evaluation) == ["taken from the run: --model Qwen/base"]
    assert evaluation.model == "Qwen/base"
    assert not [line for line in earlier_runs.fill_environment(evaluate_llm.Args()) if "adapter" in line]


@pytest.mark.parametrize("args", ["", "[1]", "{}", '{"args": null}', '{"args": [1]}', '{"args": {"env_kwargs": {}}}'])
def test_somebody_elses_summary_is_no_run(tmp_path, args):
    (tmp_path / "model").mkdir()
    (tmp_path / "summary.json").write_text(args)
    args = SimpleNamespace(model=str(tmp_path / "model"), env_id=None, env_kwargs="{}")
    assert earlier_runs.other_environment(args) == ""
    evaluation = evaluate_llm.Args(model=str(tmp_path / "model"), env_id=ENV_ID, env_kwargs="{}")
    assert not [line for line in earlier_runs.fill_environment(evaluation) if "finished" in line]


def test_other_arguments_of_the_environment_than_the_start_had_are_said(run_on_hotpotqa):
    run_dir, args = run_on_hotpotqa
    other = json.dumps(json.loads(args["env_kwargs"]) | {"max_turns": 5})

    def said(**given):
        return earlier_runs.other_environment(SimpleNamespace(**args | {"model": str(run_dir)} | given))

    assert said() == said(env_kwargs=args["env_kwargs"].replace(" ", "")) == ""  # in other spelling
    assert said(env_id=ENV_ID, env_kwargs=other) == said(model="tiny", env_kwargs=other) == ""
    assert said(env_kwargs=other, data="rows.jsonl") == ""  # nothing is played
    assert said(env_kwargs=other) == (
        f"--model {run_dir} was trained with --env-kwargs '{args['env_kwargs']}', but this run has '{other}'"
    )


def test_adapters_on_a_model_whose_files_have_changed_are_told(monkeypatch, tmp_path, policy_folder, capsys):
    peft = pytest.importorskip("peft")
    base, run_dir = tmp_path / "base", tmp_path / "runs" / "trained"
    shutil.copytree(policy_folder, base)
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    adapters = run_dir / "checkpoint" / "policy"
    peft.get_peft_model(load_policy(base, torch.device("cpu")), config).save_pretrained(adapters)
    args = {"model": str(base), "tokenizer": "byte", "env_id": ENV_ID, "env_kwargs": "{}"}
    (run_dir / "summary.json").write_text(json.dumps({"args": args, "model_files": fingerprint(str(base))}))
    flags = [*SMALL, "--adapter", adapters]
    run(monkeypatch, tmp_path, *flags)
    assert "may not be the initial" not in capsys.readouterr().err
    (base / "config.json").touch()
    run(monkeypatch, tmp_path, *flags, "--exp-name", "again")
    assert f"{base} may not be the initial model of {adapters}" in capsys.readouterr().err


def card_lines() -> list[tuple[str, str]]:
    """The commands on the cards of the shipped policies that stand whole, and what the card says came out."""
    cards = sorted((ROOT / "envs/agent_r1/policies").glob("*/README.md"))
    pattern = r"^\|[^|]*\(`evaluate_llm\.py ([^`]*--episodes[^`]*)`\) \| ([^|]*\]) \|$"
    return [found for card in cards for found in re.findall(pattern, card.read_text(), re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "said"), card_lines())
def test_what_the_card_of_a_shipped_policy_says_comes_out(monkeypatch, tmp_path, flags, said):
    result, _ = run(monkeypatch, tmp_path, *shlex.split(flags), "--num-threads", "1")
    # other processors round otherwise, which now and then samples another token
    near = 0.01 if "--temperature" in flags else 0.0015
    assert result["metrics"]["success"]["mean"] == pytest.approx(float(said.split()[0]), abs=near)


def test_most_shipped_policies_have_a_line_that_can_be_played_again():
    assert len(card_lines()) >= 5


@pytest.fixture
def critic_run(policy_folder, tmp_path, vocab_size):
    """critic_run(policy, tokenizer): the folder of a run that left a critic with random values."""

    def make(policy, tokenizer=None):
        args = SimpleNamespace(gradient_checkpointing="off", env_id=ENV_ID, chat_template=None)
        critic = Critic(str(policy_folder), args, torch.float32)
        torch.nn.init.normal_(critic.head.weight)
        (tmp_path / "trained").mkdir(exist_ok=True)
        save_critic(critic, policy, tmp_path / "trained", args, tokenizer, vocab_size)
        return tmp_path / "trained"

    return make


SAMPLED = ["--temperature", 1, "--candidates", 2]


def test_a_critic_picks_turns(monkeypatch, tmp_path, policy_folder, policy, critic_run, capsys):
    flags = ["--model", policy_folder, *SMALL, *SAMPLED, "--decode", "value-turn", "--critic", critic_run(policy)]
    report, rows = run(monkeypatch, tmp_path, *flags)
    assert report["policy_of_critic"] == "the evaluated one" and "another policy" not in capsys.readouterr().err
    assert all(row["stats"]["candidate_tokens"] > row["stats"]["sampled_tokens"] for row in rows)
    with torch.no_grad():
        policy.get_input_embeddings().weight[0, 0] += 1
    critic_run(policy)
    report, _ = run(monkeypatch, tmp_path, *flags, "--exp-name", "other")
    assert report["policy_of_critic"] == "another one" and "was trained for another policy" in capsys.readouterr().err


def test_a_critic_of_other_tokens_is_refused(monkeypatch, tmp_path, policy_folder, policy, critic_run):
    run_dir = critic_run(policy, tiny_policy("AgentR1/CraftWorld-v0"))
    flags = ["--decode", "value-turn", "--critic", run_dir, *SAMPLED]
    with pytest.raises(SystemExit, match="reads the tokens of another tokenizer or chat template"):
        run(monkeypatch, tmp_path, "--model", policy_folder, *SMALL, *flags)


@pytest.mark.parametrize("by_critic", [False, True])
def test_the_best_of_several_episodes_counts(monkeypatch, tmp_path, policy_folder, policy, critic_run, by_critic):
    flags = [*SAMPLED, "--decode", "best-of-n", *(["--critic", critic_run(policy)] if by_critic else [])]
    report, rows = run(monkeypatch, tmp_path, "--model", policy_folder, *SMALL, *flags)
    assert (report["episodes"], len(rows)) == (6, 12)
    assert [row["task_index"] for row in rows] == [i // 2 for i in range(12)]
    name = "critic_value" if by_critic else "success"
    pairs = [(rows[i]["stats"], rows[i + 1]["stats"]) for i in range(0, 12, 2)]
    best = [max(pair, key=lambda stats: stats[name]) for pair in pairs]
    tokens = [sum(stats["sampled_tokens"] for stats in pair) for pair in pairs]
    assert report["metrics"]["return"]["mean"] == pytest.approx(np.mean([stats["return"] for stats in best]))
    assert report["metrics"]["candidate_tokens"]["mean"] == pytest.approx(np.mean(tokens))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--decode", "value-turn", "--temperature", "1"], "--decode value-turn needs --critic"),
        (["--decode", "best-of-n"], "--decode best-of-n needs a --temperature above 0"),
        (["--decode", "best-of-n", "--temperature", "1", "--samples", "2"], "--samples contradicts --decode best-of-n"),
        (["--critic", "runs/any"], "--critic does nothing with --decode plain"),
        (["--decode", "value-turn", "--temperature", "1", "--critic", "runs/any"], "runs/any has no critic"),
        (["--decode", "best-of-n", "--api", "http://a", "--api-model", "m"], "--decode does nothing with --api"),
    ],
)
def test_decoding_refuses_what_contradicts(monkeypatch, tmp_path, policy_folder, flags, message):
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, tmp_path, *SMALL, *([] if "--api" in flags else ["--model", policy_folder]), *flags)
