"""The sampler: no episode waits for another one's tools, none is lost, and every token knows its weights."""

import random
import threading
import time
from types import SimpleNamespace

import evaluate_llm
import numpy as np
import pytest
import torch

from agent_r1 import Task, Tool, ToolEnv, ToolResult
from agent_r1.vector import ToolVectorEnv
from llm_utils.imitation import demonstrations
from llm_utils.imitation.demonstrations import demonstrate
from llm_utils.records.logger import mean_stats
from llm_utils.sampling import rollout
from llm_utils.sampling.engine import Span
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.training.forward import policy_forward

NUMBER = {"type": "object", "properties": {"episode": {"type": "integer"}}, "required": ["episode"]}


class Wait(Tool):
    """Blocks as long as `block(episode)` does."""

    name, description, parameters, timeout = "wait", "Blocks.", NUMBER, 20.0

    def __init__(self, block):
        self.block = block

    def execute(self, arguments):
        self.block(arguments["episode"])
        return ToolResult(f"waited for {arguments['episode']}")


class Dice(ToolEnv):
    """Two tasks, each with a throw of a die in it."""

    instructions, num_tasks = "Throw.", 2

    def make_task(self, index):
        return Task(f"t{index}", f"Throw number {index}.", ["none"])

    def user_turn(self, text):
        return f"It shows {self.np_random.integers(6)}."

    def judge_answer(self, answer):
        return 0.0, {} if answer else {"shown": float(self.np_random.integers(6))}


class Waiting(ToolEnv):
    """Any number of waits, then an answer."""

    instructions, num_tasks = "Wait.", 1000

    def __init__(self, block, **kwargs):
        super().__init__([Wait(block)], max_turns=9, **kwargs)

    def make_task(self, index):
        return Task(f"task-{index}", f"Question {index}", [str(index)])

    def judge_answer(self, answer):
        return 1.0, {}


class Script:
    """An engine that writes `waits[episode]` tool calls and then an answer, each in `steps[episode]` steps."""

    overlaps = False

    def __init__(self, env, waits, steps):
        self.env, self.waits, self.steps = env, waits, steps
        self.version, self.num_steps, self.fed = 0, 0, []
        self.episode, self.turn, self.left = {}, {}, {}

    def release(self):
        assert not self.left

    def feed(self, slot, tokens, max_new_tokens, stop_token_ids, seed=None):
        if seed is not None:
            self.episode[slot], self.turn[slot] = seed[2], 0
        self.fed.append((slot, self.episode[slot], self.turn[slot], tokens.tolist()))
        self.left[slot] = self.steps[self.episode[slot]]

    @property
    def busy(self):
        return bool(self.left)

    def step(self):
        self.num_steps += 1
        ended = []
        for slot in list(self.left):
            self.left[slot] -= 1
            if not self.left[slot]:
                del self.left[slot]
                episode, turn = self.episode[slot], self.turn[slot]
                self.turn[slot] += 1
                text = f"<answer>{episode}</answer>"
                if turn < self.waits[episode]:
                    text = self.env.dialect.tool_call("wait", {"episode": episode})
                span = np.array(self.env.tokenizer.encode(text + self.env.dialect.end_of_turn), np.int32)
                versions = np.full(len(span), self.version, np.int32)
                ended.append(Span(slot, span, np.zeros(len(span), np.float32), versions))
        return ended


@pytest.fixture
def make_sampler():
    """make_sampler(num_envs, block, waits, steps): a sampler whose engine follows a script."""
    made = []

    def make(num_envs, block, waits, steps, in_order=False):
        made.append(ToolVectorEnv(Waiting, num_envs=num_envs, observation="new", block=block))
        return rollout.Sampler(made[-1], Script(made[-1].envs[0], waits, steps), seed=1, in_order=in_order)

    yield make
    for envs in made:
        envs.close()


def test_a_slow_tool_delays_its_own_episode_only(make_sampler):
    """The tool of episode 0 answers when all other episodes are over: with a barrier anywhere, never."""
    others_done, gave_up = threading.Event(), []

    def block(episode):
        if episode == 0 and not others_done.wait(timeout=10):
            gave_up.append(episode)

    sampler = make_sampler(3, block, [1] * 12, [1 + i % 3 for i in range(12)])

    def on_done():
        if len(sampler.done) == 11:
            others_done.set()

    sampler.on_done = on_done
    sampler.add((i, i) for i in range(12))
    rows = sampler.collect(range(12))
    assert not gave_up
    assert list(rows[0].stats)[:1] == ["return"] and [row.episode for row in rows] == list(range(12))


class Measured(Waiting):
    """The task of an even number has a metric of its own; all have some that are called as statistics of ours."""

    def judge_answer(self, answer):
        guesses = 7.0 if int(answer) % 2 == 0 else None
        return 1.0, {"success": 0.5, "turns": 99, "return": 10.0, "tokens": 5, "guesses": guesses, "solved": True}


def test_a_tasks_metrics_change_no_statistic_of_ours_and_are_averaged_over_those_that_have_them():
    envs = ToolVectorEnv(Measured, num_envs=2, observation="new", block=lambda episode: None)
    sampler = rollout.Sampler(envs, Script(envs.envs[0], [1, 0, 1, 0], [1] * 4), seed=1)
    sampler.add((i, i) for i in range(4))
    rows = sampler.collect(range(4))
    envs.close()
    assert [row.stats["turns"] for row in rows] == [2, 1, 2, 1] == [len(row.turns) for row in rows]
    assert [row.stats["tokens"] for row in rows] == [len(row.tokens) for row in rows]
    assert "guesses" in rows[0].stats and "guesses" not in rows[1].stats
    found = mean_stats(rows)
    assert found["return"] == pytest.approx(np.mean([row.rewards.sum() for row in rows]))
    assert found["success"] == found["solved"] == 1 and found["guesses"] == 7
    theirs = {"task_success": 0.5, "task_turns": 99, "task_return": 10, "task_tokens": 5}
    assert {name: value for name, value in found.items() if name.startswith("task_")} == theirs
    table = evaluate_llm.summarize(rows, seed=1)
    assert table["success"]["mean"] == 1 and table["turns"]["mean"] == 1.5
    assert table["guesses"] == {"mean": 7, "low": 7, "high": 7}


def test_intervals_of_tasks_that_were_played_often_are_of_tasks():
    """Two tasks of which one always succeeds: 200 plays tell no more of a third task than two do."""
    rows = [SimpleNamespace(task_index=task, stats={"success": float(task)}) for task in (0, 1) for _ in range(100)]
    found = evaluate_llm.summarize(rows, seed=1)["success"]
    assert found == evaluate_llm.summarize(rows[::100], seed=1)["success"]
    assert found["mean"] == 0.5 and found["low"] < 0.1 and found["high"] > 0.9


@pytest.mark.parametrize(
    ("terms", "well"),
    [
        ({"outcome/em": 0.0, "process/call": 1.0}, True), ({"outcome/em": 1.0, "outcome/injected": -1.0}, True),
        ({"outcome/format": -0.5}, False), ({"outcome/unfinished": 0.0}, False), ({"process/no_action": 0.0}, False),
    ],
)  # fmt: skip
def test_what_nothing_ended_is_not_well_formed(terms, well):
    assert evaluate_llm.well_formed(terms) == well


def test_writing_goes_on_while_a_tool_works(make_sampler):
    """An engine step is never held up by a tool: with one in flight there are as many steps as without."""
    release = threading.Event()
    sampler = make_sampler(2, lambda episode: release.wait(10), [1, 0], [1, 50])
    sampler.add([(0, 0), (1, 1)])
    for _ in range(50):
        sampler.advance()
    assert sampler.engine.num_steps == 50 and set(sampler.done) == {1} and sampler.acting
    release.set()
    assert len(sampler.collect([0, 1])) == 2


def test_without_writing_only_results_are_taken(make_sampler):
    sampler = make_sampler(2, lambda episode: None, [1, 1], [1, 3])
    sampler.add([(0, 0), (1, 1), (2, 2)])
    sampler.advance()
    deadline = time.monotonic() + 10
    while not any(turn == 1 for _, _, turn, _ in sampler.engine.fed):
        assert time.monotonic() < deadline
        sampler.advance(write=False)
    assert sampler.engine.num_steps == 1 and len(sampler.queue) == 1


@pytest.mark.parametrize("in_order", [False, True])
def test_no_episode_is_lost_or_mixed_up_and_groups_stay_together(make_sampler, in_order):
    """Iterations are queued ahead; tools take random times."""
    rng = random.Random(0)
    waits, steps = ([rng.randrange(n, 4) for _ in range(60)] for n in (0, 1))
    delays = {episode: rng.random() * 0.01 for episode in range(60)}
    sampler = make_sampler(7, lambda episode: time.sleep(delays[episode]), waits, steps, in_order)
    count = []
    sampler.on_done = lambda: count.append(1)
    size, group = 20, 4
    sampler.add((i, 100 + i // group) for i in range(60))
    for first in range(0, 60, size):
        rows = sampler.collect(range(first, first + size))
        assert [row.episode for row in rows] == list(range(first, first + size))
        for row in rows:
            assert row.task_index == 100 + row.episode // group
            assert row.stats["turns"] == waits[row.episode] + 1 == len(row.turns) and row.terminated
            env = sampler.envs.envs[0]
            text = env.tokenizer.decode(row.tokens.tolist())
            assert f"Question {row.task_index}" in text and f"<answer>{row.episode}</answer>" in text
            assert text.count(f"waited for {row.episode}") == waits[row.episode]
            assert text.count("waited for") == waits[row.episode]
        for i in range(0, size, group):
            assert len({row.tokens[: row.prompt_length].tobytes() for row in rows[i : i + group]}) == 1
    assert len(count) == 60 and not sampler.done and not sampler.live and not sampler.queue
    assert sampler.free == list(range(7))


def test_in_order_what_the_engine_sees_does_not_depend_on_the_tools(make_sampler):
    def fed(delays, in_order):
        waits, steps = [2] * 9, [1 + i % 2 for i in range(9)]
        sampler = make_sampler(4, lambda episode: time.sleep(delays[episode % 4]), waits, steps, in_order)
        sampler.add((i, i) for i in range(9))
        sampler.collect(range(9))
        return sampler.engine.fed

    quick, slow = [0.0, 0.01, 0.02, 0.03], [0.03, 0.02, 0.01, 0.0]
    assert fed(quick, True) == fed(slow, True)
    assert fed(quick, False) != fed(slow, False)


def test_with_staleness_versions_are_kept_per_token_and_bounded(policy, make_envs, vocab_size):
    """The loop of the learners with --max-staleness 2: iterations are queued two ahead of the one that is awaited."""
    engine = TransformersEngine(policy, 4, vocab_size)
    sampler = rollout.Sampler(make_envs(4, max_turns=2, max_action_tokens=8), engine, seed=1)
    staleness, bound, size, iterations, queued, mixed = [], 2, 6, 5, 0, 0
    for iteration in range(1, iterations + 1):
        while queued < min(iterations, iteration + bound):
            sampler.add((queued * size + i, i) for i in range(size))
            queued += 1
        rows = sampler.collect(range((iteration - 1) * size, iteration * size))
        for row in rows:
            versions = row.versions[row.action_mask]
            assert (np.diff(versions) >= 0).all() and not row.versions[~row.action_mask].any()
            mixed += versions[0] != versions[-1]
            staleness += (iteration - 1 - versions).tolist()
        engine.update([], iteration)
    assert min(staleness) == 0 and 1 <= max(staleness) <= bound
    assert mixed  # an episode went on under new weights
    assert not sampler.live


def test_new_weights_are_sampled_from_at_once(policy, make_envs, vocab_size):
    """`update` in the middle of an episode: what is sampled afterwards has the new weights' log-probabilities."""
    envs = make_envs(1, max_turns=1, max_action_tokens=40)
    engine = TransformersEngine(policy, 1, vocab_size)
    sampler = rollout.Sampler(envs, engine, seed=1)
    sampler.add([(3, 0)])
    for _ in range(20):
        sampler.advance()
    old = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    name = "model.norm.weight"  # the head sees it, keys and values don't
    engine.update([(name, old[name] * 1.5)], version=1)
    (row,) = sampler.collect([3])
    versions = row.versions[row.action_mask]
    assert versions.tolist() == [0] * 20 + [1] * 20
    mask = row.action_mask
    for version, weight in enumerate((old[name], old[name] * 1.5)):
        engine.update([(name, weight)], version)
        with torch.no_grad():
            logprobs, _ = policy_forward(policy, row.segments(), vocab_size, 1.0)
        close = np.isclose(logprobs.numpy(), row.logprobs[mask], atol=1e-4)
        assert close[versions == version].all() and close[versions != version].mean() < 0.3


def test_episodes_of_a_task_have_dice_of_their_own(policy, vocab_size):
    """The environment's randomness is a function of seed and episode, or a run would learn one throw by heart."""

    def shown(seed, first=0):
        envs = ToolVectorEnv(Dice, num_envs=6, observation="new", max_turns=1, max_action_tokens=4)
        engine = TransformersEngine(policy, 6, vocab_size)
        rows = rollout.rollout(envs, engine, [(first + i, i % 2) for i in range(24)], seed)
        envs.close()
        assert [row.task_index for row in rows] == [0, 1] * 12
        return [row.stats["shown"] for row in rows]

    one = shown(1)
    assert len(set(one[::2])) > 2 < len(set(one[1::2]))
    assert one == shown(1) and one != shown(2) and one != shown(1, first=24)


def test_demonstrations_of_a_task_have_dice_of_their_own():
    env = Dice(max_turns=2)
    shown = []
    for seed in (1, 2):
        for task in range(20):
            demonstrate(env, task % 2, lambda: ["Go on."], seed=1000 * seed + task)
            shown.append(env.messages[-1]["content"])
    assert len(set(shown[:20])) > 2 and shown[:20] != shown[20:]


def test_demonstrations_are_made_with_the_seed_of_their_maker(monkeypatch):
    seen = []
    monkeypatch.setattr(demonstrations, "demonstrate", lambda *args: seen.append(args) or demonstrate(*args))
    for seed in (1, 2):
        demonstrations.Demonstrations("AgentR1/MultihopWorld-v0", "train", {}, None, seed).make(0, 2, 1.0, 0.5)
    assert [args[3] for args in seen] == [1, 1, 2, 2]
