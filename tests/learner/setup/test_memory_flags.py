"""--gradient-checkpointing and --microbatch-tokens that are `auto`: the fastest that fits, equal in all processes."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from llm_utils import distributed
from llm_utils.setup import memory_flags
from llm_utils.setup.preflight import GB, Part, Report, preflight

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
OFF = [("off", size) for size in (32_768, 16_384, 8192, 4096)]
ON = [("on", size) for size in (32_768, 16_384, 8192, 4096)]


def arguments(**given):
    defaults = {"gradient_checkpointing": "auto", "microbatch_tokens": "auto", "model": "m", "env_id": "e"}
    return SimpleNamespace(**defaults | given)


def chosen(args):
    return args.gradient_checkpointing, args.microbatch_tokens


def pairs(values):
    return [(one["gradient_checkpointing"], one["microbatch_tokens"]) for one in values]


@pytest.mark.parametrize(
    ("device", "longest_row", "given", "expected"),
    [
        (CUDA, 2048, {}, OFF + ON),
        (CUDA, 10_000, {}, OFF[:2] + ON[:2]),  # a microbatch has at least one row, so less saves nothing
        (CUDA, 50_000, {}, OFF[:1] + ON[:1]),
        (CUDA, 2048, {"gradient_checkpointing": "on"}, ON),
        (CUDA, 2048, {"microbatch_tokens": 500}, [("off", 500), ("on", 500)]),
        (CUDA, 2048, {"gradient_checkpointing": "off", "microbatch_tokens": 500}, [("off", 500)]),
        (CPU, 10_000, {}, [("off", 4096), ("on", 4096)]),
    ],
)
def test_what_may_be_chosen_begins_with_the_fastest(device, longest_row, given, expected):
    assert pairs(memory_flags.candidates(arguments(**given), device, longest_row)) == expected


@pytest.mark.parametrize(("device", "critic"), [(CUDA, False), (CUDA, True), (CPU, False)])
def test_the_first_that_fits_is_chosen_and_more_memory_never_chooses_a_later_one(device, critic):
    shape = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**shape, intermediate_size=1024, vocab_size=2000)
    more = {"lora_rank": 0, "engine": "vllm-server", "num_envs": 8, "dtype": "float32", "preflight": True}

    def estimate(memory_gb):
        kwargs = {"critic": critic, "reference": False, "longest_row": 1024, "world_size": 1, "memory_gb": memory_gb}
        return partial(preflight, config_or_source=config, device=device, **kwargs)

    tried = memory_flags.candidates(arguments(), device, 1024)
    peaks = [estimate(1)(SimpleNamespace(**vars(arguments(**more)) | one | {"preflight": False})).peak for one in tried]
    assert peaks[0] > 1.3 * peaks[-1]
    share, last = {"cuda": 0.92, "cpu": 0.95}[device.type], len(tried)
    for peak in sorted(peaks):
        args = arguments(**more)
        report, smaller = memory_flags.choose(args, device, 1024, estimate((peak + 2) / share / GB))
        first = next(i for i, other in enumerate(peaks) if other <= peak)
        assert chosen(args) == pairs(tried)[first] and report.fits and report.peak == peaks[first]
        assert smaller == tried[first + 1 :] and first <= last
        last = first
    assert last == 0
    args = arguments(**more)
    report, smaller = memory_flags.choose(args, device, 1024, estimate(0.9 * min(peaks) / GB))
    assert chosen(args) == pairs(tried)[-1] and smaller == []
    with pytest.raises(SystemExit, match="does not fit") as refused:
        report.refuse()
    assert "--gradient-checkpointing" not in str(refused.value)  # it is on


def test_given_values_stay_and_are_not_printed(capsys):
    args = arguments(gradient_checkpointing="off", microbatch_tokens=500)
    report, smaller = memory_flags.choose(args, CUDA, 1024, lambda args: Report([Part("all", 10)], 5))
    assert not report.fits and smaller == [] and chosen(args) == ("off", 500)
    assert args.open_flags == {} and capsys.readouterr().err == ""


def test_processes_choose_by_the_least_memory_of_all(monkeypatch):
    assert memory_flags.least_memory_gb(CPU) is None
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_reduce_max", lambda value: max(value, -3.5))
    for mine, least in ((2 * GB, 2), (4 * GB, 3.5)):
        monkeypatch.setattr(memory_flags, "memory_of", lambda device, mine=mine: mine)
        assert memory_flags.least_memory_gb(CPU) == least


# ------------------------------------------------------------------------------------------------- measured on a GPU


@pytest.fixture
def check(monkeypatch, policy, capsys):
    """check(*bytes): choose without a limit, then check with these measurements. Returns the values and the report."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def run(*measurements):
        args, left = arguments(microbatch_tokens=4096), list(measurements)
        part = Part("activations", 1, "update", (memory_flags.CHECKPOINTING, "--microbatch-tokens"))
        report = Report([Part("weights", 10), part], 100)
        smaller = memory_flags.choose(args, CUDA, 1024, lambda args: report)[1]
        assert chosen(args) == ("off", 4096)

        def measured():
            if left[0] is None:
                left.pop(0)
                raise torch.OutOfMemoryError
            return left.pop(0)

        found = memory_flags.check(args, policy, report, smaller, measured)
        assert not left
        return chosen(args), found

    return run


def checkpointed(model):
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_a_choice_that_fits_is_measured_once(check, policy):
    values, report = check(90)
    assert values == ("off", 4096) and report.fits and not checkpointed(policy)


@pytest.mark.parametrize("first", [91, None])
def test_if_too_much_was_chosen_the_next_smaller_values_are_taken(check, policy, capsys, first):
    values, report = check(first, 50)
    assert values == ("on", 4096) and report.fits and checkpointed(policy)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("--env-id e: --gradient-checkpointing off") and lines[1].endswith("-checkpointing on")


def test_if_nothing_fits_the_measured_report_is_refused(check):
    values, report = check(95, 91)
    with pytest.raises(SystemExit, match="--microbatch-tokens") as refused:
        report.refuse()
    assert values == ("on", 4096) and "--gradient-checkpointing" not in str(refused.value)
    with pytest.raises(torch.OutOfMemoryError):
        check(None, None)


# --------------------------------------------------------------------------------------------------- whole runs, a CPU

FLAGS = ["--num-envs", 8, "--env-kwargs", '{"max_turns": 2, "max_action_tokens": 8}', "--no-cuda", "--num-threads", 1]
FLAGS += ["--episodes-per-iteration", 8, "--total-episodes", 16, "--num-minibatches", 1, "--eval-episodes", 0]
FLAGS += ["--group-size", 4, "--deterministic"]


def weights(run_dir):
    return load_file(run_dir / "model" / "model.safetensors")


def test_auto_on_a_cpu_is_4096_without_checkpointing_to_the_bit(learn, capsys, monkeypatch):
    auto = learn("grpo_llm", *FLAGS, "--exp-name", "auto")
    assert "--gradient-checkpointing off --microbatch-tokens 4096\n" in capsys.readouterr().err
    given = ["--gradient-checkpointing", "off", "--microbatch-tokens", 4096]
    other = learn("grpo_llm", *FLAGS, *given, "--exp-name", "given")
    assert "--microbatch-tokens" not in capsys.readouterr().err
    without = learn("grpo_llm", *FLAGS, "--no-preflight", "--exp-name", "without")
    for run_dir in (other, without):
        assert all(torch.equal(weight, weights(run_dir)[name]) for name, weight in weights(auto).items())
    for run_dir, opened in ((auto, "auto"), (other, None), (without, "auto")):
        recorded = json.loads((run_dir / "summary.json").read_text())["args"]
        assert (recorded["gradient_checkpointing"], recorded["microbatch_tokens"]) == ("off", 4096)
        repeated = yaml.safe_load((run_dir / "config.yaml").read_text())
        assert repeated["gradient_checkpointing"] == (opened or "off")
        assert repeated["microbatch_tokens"] == (opened or 4096)
    monkeypatch.setattr(memory_flags, "CPU_SIZE", 50)  # as a machine that would choose otherwise
    learn("grpo_llm", "--resume", auto, "--total-episodes", 24)
    assert json.loads((auto / "summary.json").read_text())["args"]["microbatch_tokens"] == 4096
    learn("grpo_llm", "--resume", auto, "--total-episodes", 32, "--microbatch-tokens", "auto")
    assert json.loads((auto / "summary.json").read_text())["args"]["microbatch_tokens"] == 50


def test_where_only_checkpointing_fits_a_cpu_it_is_chosen(learn, monkeypatch, capsys):
    sums, real = {}, preflight

    def scarce(args, **kwargs):
        report = real(args, **kwargs)
        sums[args.gradient_checkpointing] = report.peak
        report.available = report.peak - 1 if args.gradient_checkpointing == "off" else report.peak
        return report

    monkeypatch.setattr("llm_utils.run.preflight", scarce)
    run_dir = learn("ppo_llm", *[flag for flag in FLAGS if flag not in ("--group-size", 4)])
    assert "--gradient-checkpointing on --microbatch-tokens 4096\n" in capsys.readouterr().err
    assert json.loads((run_dir / "summary.json").read_text())["args"]["gradient_checkpointing"] == "on"
    assert sums["on"] < sums["off"]


@pytest.mark.parametrize(("room", "expected"), [(1e12, "off"), (0, "on")])
def test_supervised_training_chooses_after_its_model_is_loaded(policy, policy_folder, monkeypatch, room, expected):
    monkeypatch.setattr(memory_flags, "memory_of", lambda device: int(room))
    args = arguments(lora_rank=0)
    assert memory_flags.choose_for_rows(args, policy, str(policy_folder), 300, 100) == 4096
    assert chosen(args) == (expected, 4096) and checkpointed(policy) == (expected == "on")
    assert args.open_flags == {"gradient_checkpointing": "auto", "microbatch_tokens": "auto"}


def test_supervised_training_with_given_values_adds_nothing_up(policy, monkeypatch):
    monkeypatch.delattr(memory_flags, "preflight")
    args = arguments(gradient_checkpointing="off", microbatch_tokens=10)
    assert memory_flags.choose_for_rows(args, policy, "unread", 300, 100) == 10
    assert chosen(args) == ("off", 10)


def test_runs_of_older_versions_had_a_switch(learn):
    run_dir = learn("grpo_llm", *FLAGS)
    state = run_dir / "checkpoint" / "state.json"
    content = json.loads(state.read_text())
    content["args"]["gradient_checkpointing"] = True
    state.write_text(json.dumps(content))
    learn("grpo_llm", "--resume", run_dir, "--total-episodes", 24)
    assert json.loads((run_dir / "summary.json").read_text())["args"]["gradient_checkpointing"] == "on"
    old = Path("old.yaml")
    old.write_text((run_dir / "config.yaml").read_text().replace("checkpointing: auto", "checkpointing: true"))
    again = learn("grpo_llm", "--config", old, "--exp-name", "again")
    assert json.loads((again / "summary.json").read_text())["args"]["gradient_checkpointing"] == "on"
