"""The adapter for tinker-cookbook: its own rollouts play whole groups, and what it keeps is the `ToolEnv`'s own.

`make test-adapters` installs tinker-cookbook and runs this; elsewhere it is skipped."""

import asyncio
import os
import pickle
import re
import subprocess
import sys
from collections import defaultdict, deque
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tinker_cookbook")

import scripted_episodes as scripted  # noqa: E402
import tinker  # noqa: E402
import torch  # noqa: E402
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs  # noqa: E402
from tinker_cookbook.rl import train  # noqa: E402
from tinker_cookbook.rl.data_processing import compute_advantages, trajectory_to_data  # noqa: E402
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator  # noqa: E402
from tinker_cookbook.rl.rollout_strategy import FailFast, RetryOnFailure  # noqa: E402
from tinker_cookbook.rl.rollouts import (  # noqa: E402
    do_group_rollout,
    do_group_rollout_and_filter_constant_reward,
)
from tinker_cookbook.rl.types import TrajectoryGroup  # noqa: E402

from agent_r1 import End  # noqa: E402
from agent_r1.adapters.tinker import TinkerDatasetBuilder, TinkerGroupBuilder  # noqa: E402
from agent_r1_tools import ToolFault  # noqa: E402

STOPS = {None: "completed", "turns": "max_turns", "context": "max_tokens"}


class Script(TokenCompleter):
    """Writes in every state what the episodes wrote there, each as often as they did."""

    def __init__(self, episodes):
        self.spans, self.asked = defaultdict(deque), []
        for episode in episodes:
            for state, span in zip(episode.states, episode.spans, strict=False):
                self.spans[tuple(state)].append(span)

    async def __call__(self, model_input, stop, *, max_tokens=None):
        span = self.spans[tuple(model_input.to_ints())].popleft()
        self.asked.append((stop, max_tokens))
        return TokensWithLogprobs(list(span), [-0.5] * len(span), "stop" if span[-1] in stop else "length")


class Service:
    """What `tinker.SamplingClient` does for a completer, without the service."""

    def __init__(self, script):
        self.script = script

    async def sample(self, prompt, num_samples, sampling_params):
        wrote = await self.script(prompt, sampling_params.stop, max_tokens=sampling_params.max_tokens)
        tokens, logprobs = np.array(wrote.tokens, np.int32), np.array(wrote.logprobs, np.float32)
        sequence = tinker.SampledSequence(wrote.stop_reason, "0", tokens_np=tokens, logprobs_np=logprobs)
        return tinker.SampleResponse(sequences=[sequence])


def rollout(builder, script, **kwargs):
    return asyncio.run(do_group_rollout(builder, script, **kwargs))


def desks(count, **kwargs):
    """A group of `count` episodes at the desk, and what the expert writes there."""
    env = scripted.make("Desk-v0", **kwargs)
    played = [scripted.play(env, 0, "expert")] * count
    env.close()
    return TinkerGroupBuilder("Desk-v0", 0, count, kwargs), played


@pytest.fixture(autouse=True)
def whole_desk(monkeypatch):
    for name in ("faults", "broken_start", "open"):
        monkeypatch.setattr(scripted.Desk, name, 0)


# ---------------------------------------------------------------------------------------------- the same as the ToolEnv


@pytest.mark.parametrize("index", range(2))
@pytest.mark.parametrize("env_id", scripted.WORLDS)
def test_a_group_is_what_the_environment_plays(env_id, index):
    kwargs = scripted.world(env_id)
    env = scripted.make(env_id, **kwargs)
    expected = [scripted.play(env, index, kind) for kind in scripted.KINDS]
    assert [episode.info.get("truncation_reason") for episode in expected[-2:]] == ["turns", "context"]
    script = Script(expected)
    group = rollout(TinkerGroupBuilder(env_id, index, len(expected), kwargs), script)
    assert not group.rollout_errors and not any(script.spans.values())

    by_spans = sorted(expected, key=lambda episode: episode.spans)
    order = sorted(range(len(expected)), key=lambda i: [t.ac.tokens for t in group.trajectories_G[i].transitions])
    for i, episode in zip(order, by_spans, strict=True):
        trajectory = group.trajectories_G[i]
        assert [t.ob.to_ints() for t in trajectory.transitions] == episode.states[:-1]
        assert trajectory.final_ob.to_ints() == episode.states[-1]
        assert [t.ac.tokens for t in trajectory.transitions] == episode.spans
        assert [t.reward for t in trajectory.transitions] == episode.rewards
        assert group.get_total_rewards()[i] == pytest.approx(sum(episode.rewards))
        assert [t.episode_done for t in trajectory.transitions] == [False] * (len(episode.spans) - 1) + [True]
        assert [t.logs for t in trajectory.transitions] == [
            {"task_id": info["task_id"], **info["reward_terms"]} for info in episode.infos
        ]
        stop, info = STOPS[episode.info.get("truncation_reason")], episode.info
        metrics = dict(trajectory.transitions[-1].metrics)
        assert metrics.pop("num_truncations_max_turn_tokens", 0) == count_cut(episode, env)
        assert metrics == {**info["metrics"], "success": info["is_success"], f"stop/{stop}": 1.0}
        assert trajectory.stop_reason == stop
        assert not any(t.metrics for t in trajectory.transitions[:-1])


def count_cut(episode, env):
    """The turns without an end after which the episode went on."""
    return sum(span[-1] not in env.dialect.stop_token_ids for span in episode.spans[:-1])


def test_an_end_by_the_task_is_told_in_the_task_s_word(monkeypatch):
    monkeypatch.setattr(scripted.Desk, "judge_result", lambda *_: End(0.0, truncation_reason="time"))
    builder, played = desks(1)
    (trajectory,) = rollout(builder, Script(played)).trajectories_G
    assert [t.ac.tokens for t in trajectory.transitions] == played[0].spans[:1]
    assert trajectory.transitions[-1].metrics == {**played[0].info["metrics"], "success": 0.0, "stop/time": 1.0}
    assert trajectory.stop_reason == "time"


@pytest.mark.parametrize("env_id", scripted.WORLDS)
def test_an_episode_is_one_row_of_data(env_id):
    """tinker-cookbook merges turns whose observation begins with what came before, and starts a new row elsewhere."""
    kwargs = scripted.world(env_id)
    env = scripted.make(env_id, **kwargs)
    for kind in scripted.KINDS:
        episode = scripted.play(env, 3, kind)
        group = rollout(TinkerGroupBuilder(env_id, 3, 1, kwargs), Script([episode]))
        (row,) = trajectory_to_data(group.trajectories_G[0], 0.25)
        tokens = episode.states[-2] + episode.spans[-1]
        assert row.model_input.to_ints() == tokens[:-1]
        assert row.loss_fn_inputs["target_tokens"].to_torch().tolist() == tokens[1:]
        mask = torch.zeros(len(tokens))
        for state, span in zip(episode.states, episode.spans, strict=False):
            mask[len(state) : len(state) + len(span)] = 1
        assert row.loss_fn_inputs["mask"].to_torch().equal(mask[1:])
        assert row.loss_fn_inputs["advantages"].to_torch().equal(0.25 * mask[1:])
        assert row.loss_fn_inputs["logprobs"].to_torch().equal(-0.5 * mask[1:])


def test_advantages_are_returns_less_the_mean_of_the_group():
    env_id = scripted.WORLDS[0]
    kwargs = scripted.world(env_id)
    env = scripted.make(env_id, **kwargs)
    expected = [scripted.play(env, 5, kind) for kind in ("expert", "malformed", "turns")]
    group = rollout(TinkerGroupBuilder(env_id, 5, 3, kwargs), Script(expected))
    returns = torch.tensor([sum(episode.rewards) for episode in expected])
    assert len(set(returns.tolist())) == 3
    (advantages,) = compute_advantages([group])
    assert sorted(advantages.tolist()) == pytest.approx(sorted((returns - returns.mean()).tolist()), abs=1e-6)


def test_a_sampler_is_told_the_room_there_is_and_what_ends_a_turn():
    env_id = scripted.WORLDS[0]
    kwargs = scripted.world(env_id, max_action_tokens=40)
    env = scripted.make(env_id, **kwargs)
    episode = scripted.play(env, 0, "context")
    assert episode.infos[-2]["max_new_tokens"] == 40
    script = Script([episode])
    rollout(TinkerGroupBuilder(env_id, 0, 1, kwargs), script)
    _, info = env.reset(options={"task_index": 0})
    rooms = [info["max_new_tokens"], *(info["max_new_tokens"] for info in episode.infos[:-1])]
    assert script.asked == [(env.dialect.stop_token_ids, room) for room in rooms]


# --------------------------------------------------------------------------------------------------- faults and threads


def test_what_an_episode_opens_stays_in_its_thread_and_is_closed():
    builder, played = desks(4)
    group = rollout(builder, Script(played))
    assert [t.reward for trajectory in group.trajectories_G for t in trajectory.transitions] == 4 * played[0].rewards
    assert group.trajectories_G[0].final_ob.to_ints() == played[0].states[-1]
    assert scripted.Desk.open == 0


@pytest.mark.parametrize("where", ["step", "reset"])
def test_a_fault_is_an_error_of_the_rollout(where):
    builder, played = desks(2)
    scripted.Desk.faults, scripted.Desk.broken_start = 1, where == "reset"
    with pytest.raises(ToolFault, match="tool query: ConnectionError: no line|could not begin: ConnectionError"):
        rollout(builder, Script(played), strategy=FailFast())
    assert scripted.Desk.open == 0  # nor is an episode left open that had no fault


def test_an_episode_that_broke_is_played_again():
    builder, played = desks(3)
    scripted.Desk.faults = 1
    script = Script([*played, played[0]])
    group = rollout(builder, script, strategy=RetryOnFailure(max_retries=1))
    assert [error.error_type for error in group.rollout_errors] == ["ToolFault"]
    assert group.get_total_rewards() == [sum(played[0].rewards)] * 3  # no zero of a fault among them


def test_a_group_that_stays_broken_is_left_out():
    builder, played = desks(2)
    play = lambda: do_group_rollout_and_filter_constant_reward(  # noqa: E731
        Service(Script(5 * played)), builder, max_tokens=64, temperature=1.0,
        do_remove_constant_reward_groups=False, strategy=RetryOnFailure(max_retries=1),
    )  # fmt: skip
    group = asyncio.run(play())
    assert isinstance(group, TrajectoryGroup) and group.get_total_rewards() == [sum(played[0].rewards)] * 2
    scripted.Desk.faults = 100
    assert asyncio.run(play()) is None


# -------------------------------------------------------------------------------------------------- builders, data sets


def test_a_builder_pickles_into_a_process_that_knows_nothing():
    env_id = scripted.WORLDS[1]
    kwargs = scripted.world(env_id, split="test")
    builder = TinkerGroupBuilder(env_id, 7, 2, kwargs)
    code = (
        "import asyncio, pickle, sys\n"
        "envs = asyncio.run(pickle.load(sys.stdin.buffer).make_envs())\n"
        "observation, stop = asyncio.run(envs[1].initial_observation())\n"
        "print(len(envs), observation.to_ints() + stop)\n"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(builder), env=paths, capture_output=True)
    state, info = scripted.make(env_id, **kwargs).reset(options={"task_index": 7})
    assert result.stdout.decode().strip() == f"2 {state.tolist() + info['stop_token_ids']}", result.stderr.decode()


def test_data_sets_have_every_task_once():
    env_id = scripted.WORLDS[0]
    settings = dict(env_id=env_id, tokenizer=None, groups_per_batch=3, group_size=4, num_batches=5)
    train_set, test_set = asyncio.run(TinkerDatasetBuilder(**settings, test_split="more_hops", num_test_tasks=7)())
    builders = [builder for i in range(len(train_set)) for builder in train_set.get_batch(i)]
    assert len(train_set) == 5 and len({builder.task_index for builder in builders}) == len(builders) == 15
    assert {(b.group_size, b.env_kwargs["split"], b.env_id) for b in builders} == {(4, "train", env_id)}
    assert builders[0].logging_tags() == ["AgentR1_MultihopWorld-v0"]
    assert [len(test_set.get_batch(i)) for i in range(len(test_set))] == [3, 3, 1]
    tests = [builder for i in range(len(test_set)) for builder in test_set.get_batch(i)]
    assert [builder.task_index for builder in tests] == list(range(7))
    assert {(b.group_size, b.env_kwargs["split"]) for b in tests} == {(1, "more_hops")}
    again, none = asyncio.run(TinkerDatasetBuilder(**settings, test_split=None)())
    other, _ = asyncio.run(TinkerDatasetBuilder(**settings, seed=1)())
    assert none is None and again.tasks == train_set.tasks != other.tasks


def test_a_small_split_gives_all_its_tasks():
    builder = TinkerDatasetBuilder(env_id="Desk-v0", tokenizer=None, groups_per_batch=2, test_split=None)
    data, _ = asyncio.run(builder())
    assert len(data) == 3 and sorted(data.tasks) == list(range(scripted.Desk.num_tasks))


@pytest.mark.parametrize("env_id", scripted.WORLDS)
def test_the_evaluator_of_tinker_cookbook_measures_the_expert(env_id):
    kwargs = scripted.world(env_id)
    builder = TinkerDatasetBuilder(env_id=env_id, env_kwargs=kwargs, tokenizer=kwargs["tokenizer"], num_test_tasks=6)
    _, test_set = asyncio.run(builder())
    env = scripted.make(env_id, **kwargs, split="test")
    script = Script([scripted.play(env, index, "expert") for index in range(6)])
    metrics = asyncio.run(RLTestSetEvaluator(test_set, max_tokens=64).eval_token_completer(script))
    assert metrics["test/env/all/success"] == metrics["test/env/all/stop/completed"] == 1
    assert metrics["test/env/all/total_episodes"] == 6 and metrics["test/env/all/reward/total"] >= 1


# ------------------------------------------------------------------------------------------------------------- the page


def test_the_page_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "tinker.md").read_text(encoding="utf-8")
    training, evaluation = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    started = []

    async def main(config):  # the service is not here
        started.append(config)

    monkeypatch.setattr(train, "main", main)
    exec(compile(training, "training", "exec"), {"__name__": "docs"})
    (config,) = started
    assert isinstance(config.dataset_builder, TinkerDatasetBuilder)
    assert config.dataset_builder.tokenizer == config.model_name and config.rollout_error_tolerance is True
    exec(compile(evaluation, "evaluation", "exec"), {"__name__": "docs"})
    assert "test/env/all/success" in capsys.readouterr().out
