"""What the scripts refuse before any work: values out of range, flags that would do nothing, contradictions."""

import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest
import tyro
from learners import ALL, PLAY, WITH_ENVIRONMENT, filled

from llm_utils import arguments, command_line
from llm_utils.records import tracking


def check(script, *words):
    """Read a command line and check it, as the script does first of all."""
    module = importlib.import_module(script)
    args = filled(arguments.read(module.Args, args=[str(word) for word in words]))
    module.check(args)
    return args


BOUNDS = [
    (ALL, ["--seed", -1], "--seed must be at least 0"),
    (ALL, ["--num-threads", -1], "--num-threads must be at least 0"),
    (WITH_ENVIRONMENT, ["--env-kwargs", 3], "--env-kwargs takes a JSON object"),
    (WITH_ENVIRONMENT, ["--env-kwargs", '{"split": "test"}'], "--env-kwargs must not contain split; use --split"),
    (ALL, ["--env-id", "AgentR1/Nope-v0"], "there is no such environment; similar ids: AgentR1/"),
    ((*PLAY, "sft_llm"), ["--max-grad-norm", 0], "--max-grad-norm must be above 0"),
    ((*PLAY, "sft_llm"), ["--max-grad-norm", -1], "--max-grad-norm must be above 0"),
    ((*PLAY, "sft_llm"), ["--max-grad-norm", "nan"], "--max-grad-norm must be above 0"),
    ((*PLAY, "sft_llm"), ["--checkpoint-every", -1], "--checkpoint-every must be at least 0"),
    ((*PLAY, "sft_llm"), ["--learning-rate", -1], "--learning-rate must be at least 0"),
    ((*PLAY, "evaluate_llm"), ["--num-envs", 0], "--num-envs must be at least 1"),
    (PLAY, ["--gamma", "nan"], "--gamma must be between 0 and 1"),
    (PLAY, ["--reward-model", "runs/a", "--rm-coef", 0], "--rm-coef must be above 0; leave out --reward-model"),
    (PLAY, ["--reward-model", "runs/a", "--rm-coef", 1.5], "--rm-coef must be between 0 and 1"),
    (["reward_model_llm"], ["--kind", "pairs", "--batch-size", 9], "--batch-size 9 must be even with --kind pairs"),
    (["reward_model_llm"], ["--data", "./nowhere.jsonl"], "--data ./nowhere.jsonl: there is no such file"),
    (PLAY, ["--dual-clip", 1], "--dual-clip must be above 1, or 0 to turn it off"),
    (PLAY, ["--clip-coef", "nan"], "--clip-coef must be at least 0"),
    (["ppo_llm"], ["--critic-warmup", -1], "--critic-warmup must be at least 0"),
    (["ppo_llm"], ["--ent-coef", -1], "--ent-coef must be at least 0"),
    (["ppo_llm"], ["--target-kl", -1], "--target-kl must be above 0"),
    (["sft_llm"], ["--warmup-steps", -5], "--warmup-steps must be at least 0"),
    (["sft_llm"], ["--weight-decay", -1], "--weight-decay must be at least 0"),
    (["sft_llm"], ["--num-workers", -1], "--num-workers must be at least 0"),
    (["sft_llm"], ["--eval-demonstrations", -3], "--eval-demonstrations must be at least 0"),
    (["sft_llm"], ["--hidden-size", 0], "--hidden-size must be at least 24"),
    (["sft_llm"], ["--hidden-size", 28], "--hidden-size must be a multiple of 8"),
    (["sft_llm"], ["--num-layers", 1], "--num-layers must be at least 2"),
    (["sft_llm"], ["--tokenizer-demonstrations", 0], "--tokenizer-demonstrations must be at least 1"),
    (["evaluate_llm"], ["--temperature", -1], "--temperature must be at least 0"),
    (["evaluate_llm"], ["--episodes", -5], "--episodes must be at least 1"),
    (["evaluate_llm"], ["--top-p", 2], "--top-p must be above 0 and at most 1"),
]
REWARD = ["--kl-coef", 0.1, "--kl-in", "reward"]
DEAD = [
    ((*PLAY, "sft_llm"), ["--wandb-project-name", "mine"], "--wandb-project-name does nothing without --track"),
    ((*PLAY, "evaluate_llm"), ["--vllm-url", "http://a:1"], "--vllm-url does nothing without --engine vllm-server"),
    (PLAY, ["--dtype", "float32", "--float32-head"], "--float32-head does nothing with --dtype float32"),
    (PLAY, ["--kl-estimator", "k1"], "--kl-estimator does nothing without --kl-coef above 0 and --kl-in loss"),
    (PLAY, [*REWARD, "--kl-estimator", "k1"], "--kl-estimator does nothing without .*--kl-in loss"),
    (PLAY, ["--old-logprobs", "sampler", "--importance-cap", 3], "--importance-cap does nothing with --old-logprobs s"),
    (PLAY, ["--old-logprobs", "sampler", "--no-loss-mask"], "--old-logprobs does nothing as sampler with --no-loss-m"),
    (PLAY, ["--eval-episodes", 0, "--eval-every", 3], "--eval-every does nothing without an evaluation"),
    (["sft_llm"], ["--eval-demonstrations", 0, "--eval-every", 3], "--eval-every does nothing without an ev"),
    (["sft_llm"], ["--data", __file__, "--eval-every", 3], "--eval-every does nothing without an evaluation"),
    (["sft_llm"], ["--rag-share", 1, "--expert-share", 0.7], "--expert-share does nothing with .*--rag-share 1"),
    (PLAY, ["--eval-episodes", 0, "--eval-split", "test"], "--eval-split does nothing with --eval-episodes 0"),
    (PLAY, ["--rm-coef", 0.5], "--rm-coef does nothing without --reward-model"),
    (PLAY, ["--constant-length", 99], "--constant-length does nothing without --loss-aggregation constant"),
    (PLAY, ["--horizon-every", 3], "--horizon-every does nothing without --horizon-schedule of several stages"),
    (PLAY, ["--horizon-schedule", "4", "--horizon-every", 3], "--horizon-every does nothing without .*several stages"),
    (["reinforce_pp_llm"], ["--group-size", 4], "--group-size does nothing without --baseline"),
    (["ppo_llm"], ["--gamma-turn", 0.5], "--gamma-turn does nothing without --advantage bilevel"),
    (["sft_llm"], ["--model", "tiny", "--hidden-size", 64], "--hidden-size does nothing without --model scratch"),
    (["sft_llm"], ["--data", "rows.jsonl", "--expert-share", 1], "--expert-share does nothing with --data"),
    (["sft_llm"], ["--data", "rows.jsonl", "--eval-demonstrations", 9], "--eval-demonstrations does nothing with --d"),
    (["sft_llm"], ["--model", "tiny", "--data", "r", "--rag-share", 0.1], "--rag-share does nothing with --data"),
    (["evaluate_llm"], ["--top-p", 0.9], "--top-p does nothing without a --temperature above 0"),
    (["evaluate_llm"], ["--engine", "vllm", "--dtype", "float32"], "--dtype does nothing with --engine vllm"),
]
SHAPED = ["--env-id", "AgentR1/CraftWorld-v0", "--env-kwargs", '{"shaping": 0.9}']
BOOTSTRAP = ["--truncation", "bootstrap", "--env-kwargs"]
CONTRADICTIONS = [
    (PLAY, ["--total-episodes", 100], "--total-episodes 100 is not a multiple of .* 256: use 256$"),
    (PLAY, ["--total-episodes", 1000], "--total-episodes 1000 is not a multiple of .* 256: use 768 or 1024$"),
    (["grpo_llm"], [*REWARD, "--dynamic-sampling", 1], "--dynamic-sampling is incompatible with --kl-in reward"),
    (["ppo_llm"], [*BOOTSTRAP, '{"unfinished_reward": -1}'], "--truncation bootstrap .*leave out unfinished_reward"),
    (PLAY, SHAPED, "shaping must be the learner's discount per turn: use --gamma 0.9, or shaping 1.0"),
    (["ppo_llm"], [*SHAPED, "--gamma", 0.9], "--gamma 0.9 discounts per token, but shaping is per turn: use --gamma 1"),
    (["ppo_llm"], [*SHAPED, "--advantage", "bilevel"], "shaping must be .*: use --gamma-turn 0.9, or shaping 1.0"),
    (["ppo_llm"], [*BOOTSTRAP, '{"shaping": 1}'], "--truncation bootstrap contradicts shaping"),
    (["ppo_llm"], ["--total-episodes", 256], "--critic-warmup 1 leaves none of the 1 iterations to the policy: use"),
    (["ppo_llm"], ["--critic-warmup", 20], "--critic-warmup 20 leaves none .* or --total-episodes 5376 or more$"),
    (["sft_llm"], ["--data", "./nowhere.jsonl"], "--data ./nowhere.jsonl: there is no such file"),
]


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [(script, *case[1:]) for case in [*BOUNDS, *DEAD, *CONTRADICTIONS] for script in case[0]],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, list) else x if str(x).endswith("_llm") else "",
)
def test_what_is_refused(script, words, message):
    with pytest.raises(SystemExit, match=message):
        check(script, *words)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        *((script, []) for script in ALL),
        *((script, ["--kl-coef", 0.1, "--kl-estimator", "k1"]) for script in PLAY),
        *((script, ["--no-loss-mask", "--importance-cap", 3]) for script in PLAY),
        *((script, ["--eval-episodes", 0, "--eval-every", 0]) for script in PLAY),
        ("ppo_llm", [*BOOTSTRAP, '{"unfinished_reward": 0}']),
        *((script, [*SHAPED, "--gamma", 0.9]) for script in PLAY if script != "ppo_llm"),
        ("ppo_llm", [*SHAPED, "--gamma", 0.9, "--advantage", "turns"]),
        ("ppo_llm", ["--critic-warmup", 19, "--advantage", "bilevel", "--gamma-turn", 0.5]),
        ("grpo_llm", ["--dynamic-sampling", 1, "--kl-coef", 0.1]),
        ("reinforce_pp_llm", ["--baseline", "--group-size", 4]),
        ("sft_llm", ["--data", __file__, "--rag-share", 0.1, "--hidden-size", 64, "--eval-every", 0]),
        ("evaluate_llm", ["--temperature", 1, "--top-p", 0.9]),
    ],
)
def test_what_has_an_effect_is_accepted(script, words):
    check(script, *words)


def test_a_run_goes_on_with_the_switches_that_it_was_accepted_with():
    """A run notes what it put in for `auto`; and refusals that are newer than a run must not end it."""
    check("ppo_llm", "--resume", "runs/RUN", "--dtype", "float32", "--float32-head")


@pytest.mark.parametrize(
    ("script", "words"), [("sft_llm", ["--max-grad-norm", -1]), ("evaluate_llm", ["--env-kwargs", "3"])]
)
def test_scripts_check_first_of_all(learn, script, words):
    with pytest.raises(SystemExit, match=words[0]):
        learn(script, *words)
    assert not Path("runs").exists()


@pytest.mark.parametrize("words", [["--group-size", 4], ["--no-advantage-mask"], ["--credit", "episode"]], ids=str)
def test_the_example_of_an_algorithm_refuses_what_it_leaves_out(monkeypatch, words):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs" / "examples")
    with pytest.raises(SystemExit, match=f"ReMax here takes no {words[0].replace('--no-', '--')}: its default stays"):
        check("remax_llm", *words)


def test_every_switch_and_bound_is_an_argument_of_some_script():
    from llm_utils import arguments

    known = {name for script in ALL for name in vars(importlib.import_module(script).Args())}
    bounds = {*arguments.MINIMUM, *arguments.ABOVE_0, *arguments.TRAINED_BY, *arguments.SHARES}
    assert {*bounds, *arguments.SWITCHES} <= known


OF_COMMON = ["run", "environment", "model", "engine", "evaluation", "machine"]
TITLES = {
    **dict.fromkeys(PLAY, ["sampling", "advantages", "optimization", "loss", *OF_COMMON]),
    "sft_llm": ["run", "machine", "demonstrations", "model", "training"],
    "reward_model_llm": ["run", "machine", "episodes", "model", "training"],
    "evaluate_llm": ["run", "machine", "environment", "model", "engine", "episodes", "decoding"],
}


@pytest.mark.parametrize("script", ALL)
def test_help_shows_flags_in_groups_an_algorithms_own_first(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    kind, common = importlib.import_module(script).Args, {field.name for field in fields(arguments.Common)}
    with pytest.raises(SystemExit):
        arguments.read(kind, args=["--help"])
    boxes: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if title := re.fullmatch(r"\W*(?:(\w+) )?options\W*", line):
            box = boxes.setdefault(title[1] or "", [])
        elif flag := re.match("[│ ] --([a-z0-9-]+)", line):
            box.append(flag[1].replace("-", "_"))
    assert boxes.pop("") == [] and list(boxes) == TITLES[script] and all(boxes.values())
    assert sorted(sum(boxes.values(), [])) == sorted([*(field.name for field in fields(kind)), "config"])
    assert "config" in boxes["run"] and "cuda" in boxes["machine"]
    if script in PLAY:
        for title, names in boxes.items():
            assert {*names} <= common | {"config"} if title in OF_COMMON else not common & {*names}


@pytest.mark.parametrize("script", ALL)
def test_groups_change_nothing_of_what_is_read(script):
    kind = importlib.import_module(script).Args
    assert arguments.read(kind, args=[]) == kind() and kind().exp_name == script
    words = ["--seed", "3", "--no-cuda", "--env_id", "a", "--tokenizer", "byte", "--dtype=float32"]
    args = arguments.read(kind, args=words)
    assert args == tyro.cli(kind, args=words) and (args.seed, args.cuda, args.dtype) == (3, False, "float32")
    assert type(args) is kind and arguments.read(kind, args, args=[]) == args


@pytest.mark.parametrize("script", ALL)
def test_every_flag_has_a_help(script):
    kind = importlib.import_module(script).Args
    texts = command_line.texts_of(kind)
    assert texts.keys() == {field.name for field in fields(kind)} and all(text for text, _ in texts.values())


TYPED_IN = """
from dataclasses import dataclass, field
from llm_utils import arguments

@dataclass(kw_only=True)
class Args(arguments.Common):
    exp_name: str = "mine"
    layers: list[int] = field(default_factory=lambda: [1, 2])
    needed: int
    model: str = field()
"""


@pytest.mark.parametrize("script", ["<stdin>", "<string>"])
def test_a_script_of_ones_own_may_have_lists_and_flags_without_a_default(script, capsys):
    """Also where nobody can read its text, as in a notebook: its flags then have no help."""
    space = {"__name__": "typed_in"}
    exec(compile(TYPED_IN, script, "exec"), space)
    args = arguments.read(space["Args"], args=["--needed", "3", "--model", "m"])
    assert (args.needed, args.layers, args.exp_name, args.split, args.model) == (3, [1, 2], "mine", "train", "m")
    assert args.layers is not arguments.read(space["Args"], args=["--needed", "3", "--model", "m"]).layers
    assert arguments.read(space["Args"], args, args=["--layers", "7"]).layers == [7]
    arguments.check_each(args)
    with pytest.raises(SystemExit):
        arguments.read(space["Args"], args=[], prog="mine.py")
    assert "--needed" in capsys.readouterr().err


@pytest.mark.parametrize("script", [*PLAY, "sft_llm"])
def test_tracking_without_its_package_is_refused(script, monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda module: None)
    with pytest.raises(SystemExit, match=r"--track needs wandb: pip install 'agent-r1\[track\]'"):
        arguments.check_machine(check(script, "--track"))


def test_the_server_of_tracking_is_asked_after_all_other_checks(monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda module: None)
    with pytest.raises(SystemExit, match="--total-episodes 100 is not a multiple"):
        check("grpo_llm", "--track", "--total-episodes", 100)
