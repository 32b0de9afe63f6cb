"""Every flag of every script with values out of range. The flags are read off `Args`, so a new one is covered: what it
accepts beyond the usual has to be named here."""

import ast
import dataclasses
import importlib
import json
import subprocess
import sys
import typing
from pathlib import Path

import machine
import pytest
from learners import ALL, PLAY, WITH_ENVIRONMENT, filled

from agent_r1.bridges import babyai

ROOT = Path(__file__).parents[2]
MAY_BE_0 = {  # and what that means
    **dict.fromkeys(("num_threads", "num_workers"), "chosen; this process"),
    **dict.fromkeys(("checkpoint_every", "eval_every", "eval_episodes", "eval_demonstrations"), "none"),
    **dict.fromkeys(("log_trajectories", "lora_rank", "max_staleness", "dynamic_sampling"), "none"),
    **dict.fromkeys(("critic_warmup", "warmup_steps", "reject_ratio", "replay_successes"), "none"),
    **dict.fromkeys(("clip_coef", "clip_coef_high", "clip_coef_value", "kl_coef", "ent_coef", "weight_decay"), "off"),
    **{"dual_clip": "off", "step_weight": "as GRPO"},
    **{"branch_alpha": "only more entropy branches", "branch_beta": "a coin, whatever the entropy is"},
    **dict.fromkeys(("learning_rate", "critic_learning_rate"), "these weights stay as they are: a control"),
    **dict.fromkeys(("gamma", "gae_lambda", "gamma_turn", "max_invalid", "expert_share", "rag_share"), "shares"),
    "seed": "a seed as any other",
    "first_episode": "from the first task on",
    "first_demonstration": "from the first task on",
}
NEEDS = {  # what makes a flag do something
    "gamma_turn": {"advantage": "bilevel"}, "constant_length": {"loss_aggregation": "constant"},
    "group_size": {"baseline": True}, "importance_cap": {"old_logprobs": "trainer"},
    "reject_ratio": {"old_logprobs": "trainer"}, "api_model": {"api": "http://a"}, "top_p": {"temperature": 1.0},
    "rm_coef": {"reward_model": "runs/a"},
    "samples": {"temperature": 1.0}, "candidates": {"temperature": 1.0, "decode": "best-of-n"},
    "critic": {"temperature": 1.0, "decode": "best-of-n"}, "vllm_url": {"engine": "vllm-server"},
    "wandb_project_name": {"track": True},
}  # fmt: skip


def fields(*kinds):
    """Every flag of these types: script, name."""
    for script in ALL:
        args = importlib.import_module(script).Args
        for name, hint in typing.get_type_hints(args).items():
            if {*typing.get_args(hint), hint} & {*kinds} and hint is not bool:
                yield script, name


def check(script, name, value):
    """What the script says of the value, before any work; "" where it is accepted."""
    module = importlib.import_module(script)
    flag, known = name.replace("_", "-"), {field.name for field in dataclasses.fields(module.Args)}
    needed = {other: setting for other, setting in NEEDS.get(name, {}).items() if other in known}
    try:
        module.check(filled(module.Args(**needed, **{name: value})))
    except SystemExit as error:
        assert "\n" not in str(error) and f"--{flag}" in str(error), error  # one line, and it names the flag
        return str(error)
    return ""


@pytest.mark.parametrize("script", ALL)
def test_numbers(script):
    """A negative number, NaN and infinity are nowhere accepted, 0 where MAY_BE_0 says what it means."""
    seen = 0
    for owner, name in fields(int, float):
        if owner == script:
            seen += 1
            assert check(script, name, -1), f"--{name} -1 is accepted"
            greedy = (script, name) == ("evaluate_llm", "temperature")
            assert (check(script, name, 0) == "") == (name in MAY_BE_0 or greedy), name
    for owner, name in fields(float):
        if owner == script:
            for value in map(float, ("nan", "inf", "-inf")):
                assert check(script, name, value), f"--{name} {value} is accepted"
    assert seen > 4
    assert "--seed must be below" in check(script, "seed", 2**80)


@pytest.mark.parametrize("script", ALL)
def test_an_empty_text_is_refused_but_where_it_is_the_default(script):
    defaults = vars(importlib.import_module(script).Args())
    names = [name for owner, name in fields(str) if owner == script]
    assert len(names) > 6
    for name in names:
        assert bool(check(script, name, "")) == (defaults[name] != ""), name


def test_every_name_in_the_tables_is_a_flag():
    assert {*MAY_BE_0, *NEEDS} <= {name for _, name in fields(int, float, str)}


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        *((script, ["--compile"], "^--compile needs a GPU: ") for script in (*PLAY, "sft_llm")),
        ("grpo_llm", ["--env-id", "nowhere.at.all:X-v0"], "there is no module nowhere.at.all in this folder"),
        ("grpo_llm", ["--env-id", ".here:X-v0"], "there is no module .here in this folder"),
        ("grpo_llm", ["--engine", "vllm-server", "--vllm-url", "a:80"], "--vllm-url a:80: this is not an address"),
        ("evaluate_llm", ["--api", "openai.com", "--api-model", "m"], "--api openai.com: this is not an address"),
        ("sft_llm", ["--out", __file__], "--out .*: this is a file; give a folder"),
        ("sft_llm", ["--out", str(Path(__file__).parent)], "--out .*: the folder has files that are not a model's"),
        ("grpo_llm", ["--resume", "nowhere"], "--resume nowhere: there is no such folder"),
        ("sft_llm", ["--resume", "nowhere"], "--resume nowhere: there is no such folder"),
        ("evaluate_llm", ["--model", "no-such-model", "--tokenizer", "byte"], "--model no-such-model: .*"),
        ("sft_llm", ["--model", "no-such-model", "--tokenizer", "byte"], "--model no-such-model: .*"),
        ("grpo_llm", ["--model", "no-such-model", "--tokenizer", "byte"], "--model no-such-model: .*"),
        ("grpo_llm", ["--model", "no-such-model"], "no-such-model"),
        ("evaluate_llm", ["--model", ROOT / "docs"], "the folder has no config.json"),
        ("grpo_llm", ["--env-id", "AgentR1/SQLWorld-v0"], "no tiny policy is shipped for AgentR1/SQLWorld-v0"),
        ("evaluate_llm", ["--env-id", "AgentR1/PharmaSim-v0"], "--model tiny: no tiny policy is shipped"),
        ("sft_llm", ["--env-id", "AgentR1/SQLWorld-v0", "--model", "tiny"], "--model tiny: no tiny policy is shipped"),
        ("grpo_llm", ["--sample-by-pass-rate", ROOT], "this is not a file of evaluate_llm.py --samples"),
    ],
)
def test_what_isnt_there_ends_with_one_line(learn, monkeypatch, script, words, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit, match=message) as ended:
        learn(script, "--num-threads", 1, "--no-cuda", *words)
    assert "\n" not in str(ended.value)
    assert not Path("runs").exists()


@pytest.mark.parametrize("script", WITH_ENVIRONMENT)
@pytest.mark.parametrize(
    ("env_id", "package", "extra"), [("BabyAI", "minigrid", "babyai"), ("GSM8K", "math_verify", "math")]
)
def test_a_missing_package_ends_with_one_line_that_names_its_extra(
    learn, monkeypatch, tmp_path, policy_folder, script, env_id, package, extra
):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    data = ["--data-dir", tmp_path] if env_id == "GSM8K" else []
    monkeypatch.setitem(sys.modules, package, None)  # Python's own way to say: not there
    babyai.find_level.cache_clear()
    words = ["--env-id", f"AgentR1/{env_id}-v0", "--model", policy_folder, "--tokenizer", "byte", *data]
    with pytest.raises(SystemExit, match=rf"^--env-id AgentR1/{env_id}-v0: .*agent-r1\[{extra}\].$") as ended:
        learn(script, *words, "--num-threads", 1, "--no-cuda")
    assert "\n" not in str(ended.value)


def test_a_model_without_weights_is_refused(learn, policy_folder, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((policy_folder / "config.json").read_bytes())
    with pytest.raises(SystemExit, match="--model .*model: "):
        learn("evaluate_llm", "--model", tmp_path / "model", "--tokenizer", "byte", "--num-threads", 1, "--no-cuda")


# ---------------------------------------------------------------------------------------------------------- benchmarks


def numbers(path):
    """The flags of a benchmark whose type is a number: (flag, name of the type)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            kinds = [word.value.id for word in node.keywords if word.arg == "type" and isinstance(word.value, ast.Name)]
            yield from ((node.args[0], kind) for kind in kinds if kind not in ("Path", "name_and_folder", "flags_type"))


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_every_number_of_a_benchmark_has_a_range(path):
    assert all(kind in ("from_0", "from_1", "above_0") for _, kind in numbers(path))


def test_ranges_of_benchmarks():
    assert sum(len(list(numbers(path))) for path in (ROOT / "benchmarks").rglob("*.py")) > 50
    assert (machine.from_0("0"), machine.from_1("12"), machine.above_0("1e-4")) == (0, 12, 1e-4)
    for kind, texts in (("from_0", "-1 1.5 nan x"), ("from_1", "0 -1 inf"), ("above_0", "0 -1 nan inf x")):
        for text in [*texts.split(), ""]:
            with pytest.raises(Exception, match="and not"):
                getattr(machine, kind)(text)


def test_a_sweep_refuses_what_would_never_end():
    script = ROOT / "learner" / "sweep.py"
    words = ["--env-ids", "AgentR1/MultihopWorld-v0", "--commands", "python learner/ppo_llm.py", "--workers", "0"]
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and done.stderr.endswith("error: --workers must be at least 1\n")


@pytest.mark.parametrize("script", PLAY)
@pytest.mark.parametrize("given", [{"loss_mask": False}, {"eval_episodes": 0}, {"max_staleness": 2}])
def test_the_defaults_that_are_printed_may_be_typed(script, given):
    from llm_utils.run import fill_defaults

    module = importlib.import_module(script)
    args = module.Args(**{name: value for name, value in given.items() if hasattr(module.Args, name)})
    chosen = fill_defaults(args)
    assert "learning_rate" in chosen and ("eval_split" in chosen) == (args.eval_episodes > 0)
    module.check(args)


@pytest.mark.parametrize("script", PLAY)
@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, "sampler"),
        ({"max_staleness": 1}, "trainer"),
        ({"max_staleness": 3, "reject_ratio": 2.0}, "trainer"),
        ({"max_staleness": 1, "old_logprobs": "sampler"}, "sampler"),  # typed
        ({"replay_successes": 0.2}, "trainer"),  # an older policy sampled some rows
        ({"dtype": "bfloat16"}, "trainer"),
        ({"compile": True}, "trainer"),  # its sampler is not compiled
        ({"engine": "vllm"}, "trainer"),
        ({"loss_mask": False}, "trainer"),
    ],
)
def test_only_the_same_program_with_the_same_weights_spares_the_trainers_log_probabilities(script, given, chosen):
    from llm_utils.run import fill_defaults

    args = importlib.import_module(script).Args(cuda=False, **given)
    fill_defaults(args)
    assert args.old_logprobs == chosen
