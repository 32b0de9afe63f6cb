"""BabyAI: minigrid's rooms in words; its bot fulfils missions by our calls."""

import numpy as np
import pytest

pytest.importorskip("minigrid")

from bridge_cases import call

from agent_r1 import ArgumentError
from agent_r1.bridges import babyai
from agent_r1.bridges.babyai import LEVELS, BabyAIEnv
from agent_r1.validation import probes
from agent_r1.validation.checks import CHECKS, Subject

QUICK = [level for level in LEVELS if level not in ("KeyInBox", "GoToImpUnlock", "Unlock", "UnblockPickup", "Pickup")]


@pytest.mark.parametrize("level", QUICK)
def test_the_bot_fulfils_missions(level):
    env = BabyAIEnv(level=level)
    episode = probes.play(env, 0, probes.expert)
    assert episode.success and episode.process == 0
    reward = episode.infos[-1]["metrics"]["reward"]
    actions = len(babyai.plan(env.task.metadata["env_id"], env.task.metadata["seed"]))
    assert reward == episode.rewards[-1] == pytest.approx(1 - 0.9 * actions / env.world.env.max_steps)


def test_there_are_forty_levels():
    assert len(set(LEVELS)) == len(LEVELS) == 40
    for level in LEVELS:
        babyai.find_level(level)
    with pytest.raises(ArgumentError, match="BabyAI has no level 'Nowhere'; it has ActionObjDoor"):
        BabyAIEnv(level="Nowhere")


def test_a_level_that_the_bot_cannot_do_is_named():
    env = BabyAIEnv(level="KeyInBox")
    env.reset(options={"task_index": 0})
    with pytest.raises(ValueError, match="BabyAI's bot fails in BabyAI-KeyInBox-v0 with seed 0"):
        env.demonstration()


@pytest.mark.parametrize("level", ["GoToDoor", "OpenDoor", "GoToRedBall"])
def test_things_are_named_as_they_are_read(level):
    named = 0
    for index in range(20):
        env = BabyAIEnv(level=level)
        env.reset(options={"task_index": index})
        inner = env.world.env
        for line in env.task.question.splitlines()[2:]:
            name = line.partition(":")[0]
            named += babyai.way_to(inner, name) is not None
            assert name == "wall" or name in [thing for thing, _, _ in babyai.seen(inner)], line
    assert named > 20


def test_a_bot_that_plans_without_end_is_stopped():
    env = BabyAIEnv(level="GoToImpUnlock")
    env.reset(options={"task_index": 6})
    with pytest.raises(ValueError, match="no action after 200 searches"):
        env.demonstration()


def test_several_levels_take_turns():
    several, names = BabyAIEnv(level="GoToLocal, PickupLoc,Open", split="test"), ["GoToLocal", "PickupLoc", "Open"]
    for index in range(6):
        one = BabyAIEnv(level=names[index % 3], split="test")
        assert several.make_task(index) == one.make_task(index)
        several.reset(options={"task_index": index})
        one.reset(options={"task_index": index})
        assert several.demonstration() == one.demonstration()
    with pytest.raises(ArgumentError, match="BabyAI has no level ''"):
        BabyAIEnv(level="GoToLocal,")


def test_a_level_that_is_no_text_is_named():
    with pytest.raises(ArgumentError, match="BabyAI has no level .*GoToLocal"):
        BabyAIEnv(level=["GoToLocal"])


def test_there_are_only_experts():
    env = BabyAIEnv()
    env.reset(options={"task_index": 0})
    with pytest.raises(ValueError, match="no demonstrator that makes mistakes"):
        env.demonstration(np.random.default_rng(0))


def test_a_step_may_be_written_with_a_point():
    env = BabyAIEnv(level="GoToObj")
    env.reset(seed=0)
    assert call(env, "forward", steps=1.0)[4]["tool_calls"][0]["ok"]


def test_the_last_action_cuts_the_episode():
    env = BabyAIEnv(level="GoToObjS6", max_turns=500)
    env.reset(options={"task_index": 0})
    for _ in range(500):
        *_, terminated, truncated, info = call(env, "turn", direction="left")
        if terminated or truncated:
            break
    assert (terminated, truncated, info["truncation_reason"]) == (False, True, "game") and not info["is_success"]


def test_the_view_is_minigrids():
    """Things lie where the words say: so far ahead and to the side."""
    for index in range(30):
        env = BabyAIEnv(level="GoToLocal")
        env.reset(options={"task_index": index})
        inner = env.world.env
        for name, ahead, right in babyai.seen(inner):
            place = inner.agent_pos + ahead * inner.dir_vec + right * inner.right_vec
            thing = inner.grid.get(*place)
            assert name.startswith(babyai.name_of(thing))


def test_go_to_leads_to_the_thing_that_was_named():
    found = 0
    for index in range(30):
        env = BabyAIEnv(level="PickupDist")
        env.reset(options={"task_index": index})
        inner = env.world.env
        for name, ahead, right in babyai.seen(inner)[:2]:
            state = env.get_state()
            thing = inner.grid.get(*(inner.agent_pos + ahead * inner.dir_vec + right * inner.right_vec))
            *_, terminated, _, info = call(env, "go_to", thing=f" {name.upper()} ")
            if not terminated and info["tool_calls"][0]["ok"]:
                here = env.world.env
                assert babyai.name_of(here.grid.get(*here.front_pos)) == babyai.name_of(thing)
                found += 1
            env.set_state(state)
            inner = env.world.env
    assert found > 30


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("go_to", {"thing": "unicorn"}), ("go_to", {"thing": "x" * 100_000}), ("go_to", {"thing": "\ud800"}),
        ("go_to", {"thing": 7}), ("forward", {"steps": 10**30}), ("forward", {"steps": -1}), ("forward", {}),
        ("turn", {"direction": "__class__"}), ("pick_up", {"thing": "all"}), ("toggle", {"self": 1}),
    ],
)  # fmt: skip
def test_hostile_arguments_get_a_readable_result(name, arguments):
    env = BabyAIEnv(max_action_tokens=300_000, max_context_tokens=1_000_000)
    env.reset(seed=0)
    before = babyai.state(env.world.env)
    info = call(env, name, **arguments)[4]
    assert not info["tool_calls"][0]["ok"] and 0 < len(env.messages[-1]["content"]) < 2_000
    assert babyai.state(env.world.env) == before


def test_what_is_in_the_way_is_said():
    env = BabyAIEnv(level="GoToObj")
    env.reset(seed=0)
    call(env, "forward", steps=20)
    assert "Something is in the way after" in env.messages[-1]["content"]
    call(env, "pick_up")
    call(env, "drop")
    assert "Nothing happens." in env.messages[-1]["content"]


def test_saying_nothing_and_giving_up_pay_nothing():
    env = BabyAIEnv(max_turns=4)
    for probe in (probes.null, probes.copying, probes.stuffing):
        episode = probes.play(env, 3, probe)
        assert not episode.success and sum(episode.rewards) <= 0


def test_two_episodes_share_nothing():
    one, other = BabyAIEnv(level="Open"), BabyAIEnv(level="Open")
    one.reset(options={"task_index": 1})
    turns = one.demonstration()
    alone = [one.step(probes.span(one, text))[0].tolist() for text in turns]
    one.reset(options={"task_index": 1})
    other.reset(options={"task_index": 2})
    mixed = []
    for text, noise in zip(turns, other.demonstration() * 9, strict=False):
        mixed.append(one.step(probes.span(one, text))[0].tolist())
        if not other.episode.over:
            other.step(probes.span(other, noise))
    assert mixed == alone


@pytest.mark.parametrize(("check", "level"), [
    pytest.param("farming", "GoToObjMazeS7", marks=pytest.mark.slow), ("determinism", "SynthS5R2"),
    ("global state", "BossLevel"),
])  # fmt: skip
def test_larger_levels_are_validated(check, level):
    CHECKS[check](Subject("AgentR1/BabyAI-v0", {"level": level}, 2))
