"""Warnings about runs that learn nothing, on made-up figures, on those of shipped policies, and in a real run."""

import json
from types import SimpleNamespace

import pytest
import torch
from learners import PLAY
from safetensors.torch import load_file

from llm_utils.records.run_warnings import at_end, of_iteration

SHOW = "python -m agent_r1.show runs/r"
BASE = {"max_staleness": 0, "top_p": 1.0, "engine": "transformers", "gamma": 1.0}
PPO = BASE | {"gamma_turn": 1.0, "critic_warmup": 0}
GRPO = BASE | {"group_size": 8}
FINE = {"charts/success": 0.4, "charts/episodic_return": 0.5, "charts/return_std": 0.3, "charts/truncated": 0.1,
        "losses/policy_loss": 0.0, "losses/grad_norm": 0.3, "losses/entropy": 0.3, "batch/valid": 64,
        "batch/advantage": 2.0}  # fmt: skip
IN_GROUPS = FINE | {"charts/groups_with_signal": 0.9}
EQUAL = IN_GROUPS | {"charts/success": 0.0, "charts/groups_with_signal": 0.0, "losses/grad_norm": 1e-17,
                     "batch/advantage": 1e-11, "charts/return_std": 0.0}  # fmt: skip


def watch(iterations, **args):
    """The names of the warnings of each iteration, their texts, and the one at the end. The state is as resumed."""
    state, args, names, texts = {}, SimpleNamespace(**args), [], []
    for figures in iterations:
        state = json.loads(json.dumps(state))
        found = of_iteration(figures, state, args, SHOW)
        names.append(sorted(found))
        texts += found.values()
    return names, texts, at_end(state, args, SHOW)


def test_groups_without_a_signal_are_told_once_and_at_the_end():
    names, (text,), end = watch([EQUAL, EQUAL, EQUAL], **GRPO)
    assert names == [["signal"], [], []]
    assert text.startswith("warning: iteration 1: the episodes of each group have equal returns (return 0.50, success")
    for remedy in (f"`{SHOW} --failed`", "sft_llm.py", "--group-size", "--temperature"):
        assert remedy in text and remedy in end
    assert end.startswith("warning: no group had a signal in 3 of 3 iterations: nothing was trained\n")
    assert len(text.splitlines()) == len(end.splitlines()) == 2
    moved = watch([EQUAL | {"losses/grad_norm": 0.1}] * 2, **GRPO)[2]  # by a KL penalty or an entropy bonus
    assert "in 2 of 2 iterations: the rewards taught nothing\n" in moved
    assert "no group had a signal in 2 of 3 iterations\n" in watch([EQUAL, IN_GROUPS, EQUAL], **GRPO)[2]
    assert watch([IN_GROUPS, EQUAL], **GRPO)[2] is None


def test_no_command_prints_episodes_that_are_not_recorded():
    args, state = SimpleNamespace(**GRPO), {}
    nothing = EQUAL | {"charts/truncated": 1.0, "charts/episodic_return": 0.0}
    found = [text for _ in range(10) for text in of_iteration(nothing, state, args, "").values()]
    assert len(found) == 3 and "; begin with sft_llm.py, or" not in found[1]
    for text in [*found, at_end(state, args, "")]:
        remedy = text.splitlines()[1].strip()
        assert remedy.startswith(("begin with", "raise max_turns")) and "look at" not in text and "``" not in text


def test_further_groups_of_dynamic_sampling_may_have_a_signal():
    found = EQUAL | {"losses/grad_norm": 0.2, "batch/advantage": 1.0}
    assert watch([found] * 3, **GRPO, dynamic_sampling=2) == ([[]] * 3, [], None)
    for none in (EQUAL, EQUAL | {"losses/grad_norm": 0.001}):  # the gradient of a KL penalty
        assert watch([none], **GRPO, dynamic_sampling=2)[0] == [["signal"]]


def test_a_rejected_batch_is_not_trained():
    """Its groups have a signal, but no optimizer step is made."""
    rejected = {name: value for name, value in IN_GROUPS.items() if not name.startswith("losses/")}
    rejected |= {"charts/rejected": 1.0, "batch/advantage": 0.0, "sampler/gap_mean": 0.4}
    names, (text,), end = watch([rejected] * 3, **GRPO, reject_ratio=1.1)
    assert names == [["untrained"], [], []]
    assert "iteration 1: --reject-ratio 1.1 dropped every episode, so nothing was trained\n" in text
    assert end.startswith("warning: in 3 of 3 iterations --reject-ratio 1.1 dropped every episode")
    assert watch([IN_GROUPS | {"charts/rejected": 0.9}] * 3, **GRPO, reject_ratio=1.1) == ([[]] * 3, [], None)
    no_tokens = {name: value for name, value in rejected.items() if "rejected" not in name and "gap" not in name}
    assert "no episode has a token to train on" in watch([no_tokens], **PPO)[1][0]


def test_one_episode_says_nothing():
    one = EQUAL | {"batch/valid": 1, "charts/truncated": 1.0}
    for args in (GRPO, PPO, BASE):
        assert watch([one] * 9, **args) == ([[]] * 9, [], None)


def test_solved_tasks_are_no_failure():
    solved = EQUAL | {"charts/success": 1.0, "losses/entropy": 0.0001}
    assert watch([IN_GROUPS, *[solved] * 9], **GRPO) == ([[]] * 10, [], None)
    assert "every episode succeeded in 2 of 2 iterations" in watch([solved] * 2, **GRPO)[2]


def test_equal_returns_without_groups():
    equal = FINE | {"charts/return_std": 0.0, "losses/grad_norm": 0.001, "batch/advantage": 0.0}  # of an entropy bonus
    names, (text,), end = watch([equal] * 2, **BASE)
    assert names == [["signal"], []] and "all episodes have equal returns" in text and "--group-size" not in text
    assert end.startswith("warning: all returns were equal in 2 of 2 iterations: the rewards taught nothing\n")
    assert watch([equal], **BASE | {"gamma": 0.9})[0] == [["signal"]]
    early = equal | {"batch/advantage": 0.7}  # with a discount, an early return is worth more
    assert watch([early], **BASE | {"gamma": 0.9}) == ([[]], [], None)


def test_ppo_learns_from_equal_returns_until_its_critic_knows_them():
    equal = FINE | {"charts/return_std": 0.0, "losses/grad_norm": 0.2}
    names, (text,), end = watch([equal] * 4, **PPO)
    assert names == [[], [], ["signal"], []] and "all episodes have equal returns" in text
    assert end.startswith("warning: all returns were equal in 4 of 4 iterations: the rewards taught nothing\n")
    silence = ([[]] * 12, [], None)
    assert watch([equal, equal, FINE] * 4, **PPO) == silence
    assert watch([equal | {"batch/valid": 2}] * 12, **PPO) == silence  # a rare success may still come
    assert watch([equal, equal | {"charts/episodic_return": 0.0}] * 6, **PPO) == silence
    assert watch([equal] * 12, **PPO | {"gamma": 0.9}) == silence  # an early return is worth more
    nothing = equal | {"charts/episodic_return": 0.0, "charts/success": 0.0}
    assert watch([nothing] * 3, **PPO | {"gamma": 0.9})[0] == [[], [], ["signal"]]
    assert watch([equal | {"losses/grad_norm": 0.0}], **PPO)[0] == [["signal"]]


def test_the_critic_warm_up_of_ppo_is_left_out():
    warm_up = {name: value for name, value in FINE.items() if not name.startswith("losses/")} | {"losses/grad_norm": 0}
    equal = warm_up | {"losses/grad_norm": 0.5, "charts/return_std": 0.0}
    for first in (warm_up, equal):
        assert watch([first, first, FINE], **PPO | {"critic_warmup": 2}) == ([[], [], []], [], None)


def test_groups_that_are_equal_in_themselves_give_reinforce_with_a_baseline_no_gradient():
    flat = FINE | {"losses/grad_norm": 0.0, "batch/advantage": 0.0}
    assert watch([flat], **GRPO, baseline=True)[0] == [["signal"]]
    assert "no group had a signal" in watch([flat], **GRPO, baseline=True)[2]


def no_success(returns, **more):
    """The iterations that warn of no success, in a run with these mean returns."""
    rows = [FINE | {"charts/success": 0.0, "charts/episodic_return": value} for value in returns]
    return [number for number, names in enumerate(watch(rows, **PPO, **more)[0], 1) if "success" in names]


def test_no_success_is_told_after_ten_iterations():
    assert no_success([-0.5] * 40) == [10] and no_success([-0.5] * 9) == []
    some = [FINE | {"charts/success": 0.01, "charts/episodic_return": -0.5}]
    assert watch(some * 32, **PPO)[0] == [[]] * 32
    schedule = {"horizon_schedule": "2,4", "horizon_every": 4}
    assert no_success([-0.5] * 40, **schedule) == [14]  # a short horizon may allow none


def test_an_entropy_collapse():
    def run(*entropies, success=0.3):
        return watch([FINE | {"losses/entropy": e, "charts/success": success} for e in entropies], **PPO)[0]

    assert run(0.3, 0.004, 0.004, 0.004, 0.004) == [[], [], [], ["entropy"], []]
    assert run(0.3, 0.004, 0.004, 0.3, 0.004, 0.004) == [[]] * 6
    assert run(0.02, *[0.004] * 5) == run(0.3, *[0.01] * 5) == [[]] * 6
    assert run(0.3, *[0.004] * 5, success=0.95) == [[]] * 6  # it has converged


def test_a_gap_between_sampler_and_trainer():
    far = FINE | {"sampler/gap_mean": 0.4}
    assert watch([far, far], **PPO)[0] == [["gap"], []]
    assert "serve the model" in watch([far], **PPO | {"engine": "vllm-server"})[1][0]
    assert watch([FINE | {"sampler/gap_mean": 0.013}], **PPO)[0] == [[]]  # the largest recorded
    assert watch([far], **PPO | {"max_staleness": 1})[0] == watch([far], **PPO | {"top_p": 0.9})[0] == [[]]


def test_all_episodes_cut_short():
    cut = FINE | {"charts/truncated": 1.0, "charts/success": 0.0, "charts/return_std": 0.0}
    assert watch([cut], **PPO)[0] == [["truncated"]]
    others = {"charts/truncated": 0.99, "charts/success": 0.1, "charts/horizon": 2, "charts/return_std": 0.1}
    for name, value in others.items():
        assert watch([cut | {name: value}], **PPO)[0] == [[]]
    assert watch([cut], **PPO, truncation="bootstrap")[0] == [[]]


# Recorded figures of default runs on MultihopWorld, seed 1: success, entropy, norm of the gradient.
RLOO = [(0.23, 0.0653, 0.202), (0.246, 0.0586, 0.229), (0.34, 0.0564, 0.213), (0.449, 0.0497, 0.218),
        (0.531, 0.0517, 0.238), (0.605, 0.0373, 0.113), (0.695, 0.0357, 0.15), (0.793, 0.0287, 0.0721),
        (0.895, 0.0195, 0.0469), (0.875, 0.0216, 0.0631), (0.922, 0.0154, 0.0396), (0.934, 0.0143, 0.0524),
        (0.934, 0.0134, 0.059), (0.945, 0.0126, 0.0431), (0.984, 0.0111, 0.0169), (0.949, 0.0115, 0.0339)]  # fmt: skip


def test_a_run_that_learns_gets_no_warning():
    rows = [FINE | {"charts/success": s, "losses/entropy": e, "losses/grad_norm": g} for s, e, g in RLOO]
    assert watch(rows, **PPO) == ([[]] * len(rows), [], None)


def test_a_run_without_a_signal_says_so(learn, policy_folder, capsys):
    """Its returns are equal, as nothing it writes is a call or an answer; so its weights stay equal to the bit."""
    flags = ["--env-kwargs", json.dumps({"max_turns": 1, "max_action_tokens": 4}), "--num-threads", 1, "--num-envs", 8]
    flags += ["--model", policy_folder, "--tokenizer", "byte", "--eval-episodes", 4, "--save-model"]
    flags += ["--episodes-per-iteration", 8, "--group-size", 4, "--total-episodes", 8, "--num-minibatches", 1]
    run_dir = learn("grpo_llm", *flags)
    printed = capsys.readouterr()
    assert printed.err.count("have equal returns") == 1
    assert "warning: no group had a signal in 1 of 1 iterations: nothing was trained\n" in printed.err
    assert f"-m agent_r1.show {run_dir} --failed" in printed.err
    before, after = load_file(policy_folder / "model.safetensors"), load_file(run_dir / "model" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    said = json.loads((run_dir / "summary.json").read_text())["warnings"]
    assert any("no group had a signal" in line and "\n" not in line for line in said)

    learn("grpo_llm", "--resume", run_dir, "--total-episodes", 16)
    printed = capsys.readouterr()
    assert "have equal returns" not in printed.err  # it was said in the first part of the run
    assert "warning: no group had a signal in 2 of 2 iterations: nothing was trained\n" in printed.err
    table = printed.out[printed.out.index("evaluation after 2 iterations") :]
    assert "▁▁" in table or "__" in table  # it has both evaluations


@pytest.mark.slow
@pytest.mark.parametrize("script", PLAY)
def test_default_runs_of_the_shipped_policy_get_no_warning(learn, capsys, script):
    run_dir = learn(script, "--num-threads", 1, "--total-episodes", 768, "--eval-episodes", 64)
    assert "warning:" not in capsys.readouterr().err
    assert "warnings" not in json.loads((run_dir / "summary.json").read_text())
