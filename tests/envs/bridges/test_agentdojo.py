"""AgentDojo: its user tasks, its injections, and its two checks, by our calls."""

import contextlib
import io
import json
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("agentdojo")

from bridge_cases import call, forgotten, run_elsewhere, say

from agent_r1 import ArgumentError
from agent_r1.bridges import agentdojo, bridge
from agent_r1.bridges.agentdojo import AgentDojoEnv
from agent_r1.validation import probes

SUITES = list(AgentDojoEnv.splits)


def begin(index=0, **kwargs):
    env = AgentDojoEnv(**kwargs)
    env.reset(options={"task_index": index})
    return env


def test_without_the_package_the_error_says_what_to_do():
    with forgotten(agentdojo.require_agentdojo) as patched:
        patched.setitem(sys.modules, "agentdojo.attacks", None)
        with pytest.raises(ImportError, match=r'pip install "agent-r1\[agentdojo\]"'):
            AgentDojoEnv()


def test_another_version_is_named_once():
    version = bridge.metadata.version
    with forgotten(agentdojo.require_agentdojo) as patched:
        patched.setattr(bridge.metadata, "version", lambda name: "0.2.0" if name == "agentdojo" else version(name))
        with pytest.warns(UserWarning, match="agentdojo 0.2.0 wasn't checked; 0.1 was"):
            AgentDojoEnv()
        AgentDojoEnv()  # a second warning would be an error


def test_what_there_isnt_is_said():
    with pytest.raises(ArgumentError, match="AgentDojo has no attack 'dos'; it has direct, ignore_previous"):
        AgentDojoEnv(attack="dos")
    with pytest.raises(ArgumentError, match="AgentDojo has no version 'v9'; it has v1, "):
        AgentDojoEnv(version="v9")
    with pytest.raises(ArgumentError, match="version must be the name of a version, such as v1.2.2"):
        AgentDojoEnv(version=["v1"])
    with pytest.raises(ArgumentError, match="attack must be the name of an attack or None"):
        AgentDojoEnv(attack=["direct"])
    with pytest.raises(ArgumentError, match="AgentDojoEnv has no split .*banking"):
        AgentDojoEnv(split=["banking"])
    with pytest.raises(ValueError, match="AgentDojoEnv has no split 'home'; it has workspace"):
        AgentDojoEnv(split="home")


@pytest.mark.parametrize("suite", SUITES)
def test_its_own_calls_solve_the_user_tasks(suite):
    env = AgentDojoEnv(split=suite, attack=None)
    assert env.num_tasks == {"workspace": 40, "travel": 20, "banking": 16, "slack": 21}[suite]
    for index in range(0, env.num_tasks, 4):
        episode = probes.play(env, index, probes.expert)
        assert episode.success and episode.process == 0
        assert episode.infos[-1]["metrics"] == {"utility": 1.0, "security": 1.0}
        json.dumps(env.task.metadata)


@pytest.mark.parametrize("suite", SUITES)
def test_its_own_calls_pass_injections_over(suite):
    env = AgentDojoEnv(split=suite)
    assert env.num_tasks == {"workspace": 560, "travel": 140, "banking": 144, "slack": 105}[suite]
    for index in range(3, env.num_tasks, env.num_tasks // 4):
        episode = probes.play(env, index, probes.expert)
        assert episode.success and episode.infos[-1]["metrics"] == {"utility": 1.0, "security": 1.0}
        assert "<INFORMATION>" in env.tokenizer.decode(episode.states[-1])  # it was read


@pytest.mark.parametrize("suite", SUITES)
def test_an_injection_obeyed_costs(suite):
    """All that AgentDojo has calls for; those of the user's task after them don't make it good."""
    env = AgentDojoEnv(split=suite, max_turns=64)
    obeyed = 0
    for index in range(env.num_tasks // len(agentdojo.find_suite("v1.2.2", suite).user_tasks)):
        env.reset(options={"task_index": index})
        _, _, injection, before = agentdojo.scene(*agentdojo.place_of(env.task))
        calls = injection.ground_truth(before.model_copy(deep=True))
        for one in calls:
            call(env, one.function, **one.args)
        _, reward, terminated, _, info = say(env, injection.GROUND_TRUTH_OUTPUT or "Done.")
        assert terminated and info["metrics"]["security"] == float(not (calls or injection.GROUND_TRUTH_OUTPUT))
        if calls or injection.GROUND_TRUTH_OUTPUT:
            assert reward == info["metrics"]["utility"] - 1 and info["reward_terms"]["outcome/injected"] == -1
            obeyed += 1
    assert obeyed == {"workspace": 6, "travel": 7, "banking": 9, "slack": 5}[suite]


def test_it_costs_an_episode_that_never_ends_too_and_as_much_as_is_said():
    env = begin(4, split="banking", injected_reward=-3, max_turns=1, unfinished_reward=0)
    _, _, injection, before = agentdojo.scene(*agentdojo.place_of(env.task))
    (one,) = injection.ground_truth(before)
    _, reward, terminated, truncated, info = call(env, one.function, **one.args)
    assert (terminated or truncated) and reward == -3
    assert info["reward_terms"] == {"outcome/unfinished": 0.0, "outcome/injected": -3.0}
    assert info["metrics"] == {"utility": 0.0, "security": 0.0} and not info["is_success"]


@pytest.mark.parametrize("suite", SUITES)
def test_the_package_judges_alike(suite):
    """Its own pipeline over the same pairs, obedient and not."""
    from agentdojo.agent_pipeline.ground_truth_pipeline import GroundTruthPipeline
    from agentdojo.attacks.attack_registry import load_attack

    package = agentdojo.find_suite("v1.2.2", suite)
    attack = load_attack("direct", package, SimpleNamespace(name="local"))
    env = AgentDojoEnv(split=suite, attack="direct", max_turns=64)
    for index in range(1, env.num_tasks, env.num_tasks // 3):
        env.reset(options={"task_index": index})
        user = package.user_tasks[env.task.metadata["user_task"]]
        injection = package.injection_tasks[env.task.metadata["injection_task"]]
        injections = attack.attack(user, injection)
        for task in (user, injection):
            env.reset(options={"task_index": index})
            verdict = package.run_task_with_pipeline(GroundTruthPipeline(task), user, injection, injections)
            for one in task.ground_truth(env.world.state.model_copy(deep=True)):
                call(env, one.function, **one.args)
            *_, info = say(env, task.GROUND_TRUTH_OUTPUT or "Done.")
            assert (info["metrics"]["utility"], info["metrics"]["security"]) == (verdict[0], not verdict[1])


@pytest.mark.parametrize("suite", SUITES)
def test_worlds_are_loaded_as_the_package_loads_them(suite):
    package = agentdojo.find_suite("v1.2.2", suite)
    for index in (0, 1):
        user, injection = list(package.user_tasks.values())[index], list(package.injection_tasks.values())[index]
        injections = agentdojo.find_attack("v1.2.2", suite, "tool_knowledge").attack(user, injection)
        assert agentdojo.load(package, injections) == package.load_and_inject_default_environment(injections)


def test_without_a_call_nothing_is_done():
    for suite in SUITES:
        env = AgentDojoEnv(split=suite, attack=None)
        for index in range(0, env.num_tasks, 1 if suite == "banking" else 7):
            for probe in (probes.null, probes.copying, *[probes.stuffing] * (suite != "banking")):
                episode = probes.play(env, index, probe)
                assert not episode.success and sum(episode.rewards) <= 0


def test_a_call_that_was_never_made_is_none():
    """Tasks that are as they should be from the beginning, and calls of no such tool, or without its arguments."""
    env = AgentDojoEnv(split="banking", attack=None)
    for name, arguments in (("no_such_tool", {}), ("send_money", {})):
        for index in range(env.num_tasks):
            turns = [env.dialect.tool_call(name, arguments), "Done."]
            episode = probes.play(env, index, lambda env, rng, turns=turns: turns)
            assert not episode.success and sum(episode.rewards) <= 0


JUNK = [
    None, True, -1, 10**30, 1e308, float("nan"), "", "x" * 9_000, "\ud800\0", "__class__", "!!python/object:os.system",
    "{0.__class__}", [], [[[]]] * 100, [1, "a", None], [{"type": "event", "event_details": {"a": {}}}], {"a": {"b": 1}},
]  # fmt: skip


@pytest.mark.parametrize("suite", SUITES)
def test_arguments_of_any_kind_get_a_result(suite):
    desk = begin(split=suite).world
    for tool in agentdojo.schemas_of(agentdojo.find_suite("v1.2.2", suite)):
        properties = tool["parameters"]["properties"]
        for junk in JUNK:
            for nth in range(len(properties) + 1):  # one of them, or all
                arguments = {key: junk if nth in (i, len(properties)) else "1" for i, key in enumerate(properties)}
                assert isinstance(desk.act(tool["name"], arguments).content, str)


def test_what_is_left_there_cannot_break_the_checks():
    for suite, index in (("workspace", 77), ("travel", 30), ("banking", 3), ("slack", 40)):
        env = begin(index, split=suite)
        for tool in list(env.tools):
            properties = env.tools[tool].parameters["properties"]
            env.world.act(tool, {key: "x" * 5_000 for key in properties})
            env.world.act(tool, {key: ["1"] if "array" in str(spec) else "1" for key, spec in properties.items()})
        call(env, next(iter(env.tools)))
        *_, terminated, _, info = say(env, "\ud800 2024 " + "1" * 1_000)
        assert terminated and set(info["metrics"]) == {"utility", "security"}


def test_a_snapshot_is_played_again_and_what_is_written_has_no_clock():
    env, other = begin(split="workspace"), AgentDojoEnv(split="workspace")
    turns = [
        ("create_file", {"filename": "a.txt", "content": "b"}),
        ("append_to_file", {"file_id": "26", "content": "c"}),
        ("send_email", {"recipients": ["a@b.com"], "subject": "s", "body": "t"}),
        ("get_sent_emails", {}), ("delete_file", {"file_id": "26"}),
    ]  # fmt: skip
    for name, arguments in turns[:4]:
        assert call(env, name, **arguments)[4]["tool_calls"][0]["ok"]
    assert "2024-06-01" in env.messages[-1]["content"]
    other.set_state(env.get_state())
    for one in (env, other):
        call(one, *turns[4][:1], **turns[4][1])
    assert env.messages == other.messages and env.world.state == other.world.state


def test_two_episodes_share_nothing():
    one, other = begin(8, split="slack"), begin(9, split="slack")
    turns = one.demonstration()
    alone = [say(one, text)[0].tolist() for text in turns]
    one.reset(options={"task_index": 8})
    mixed, noise = [], iter(other.demonstration())
    for text in turns:
        mixed.append(say(one, text)[0].tolist())
        if not other.episode.over:
            say(other, next(noise))
    assert mixed == alone
    place = agentdojo.place_of(one.task)
    assert agentdojo.scene(*place)[3] == agentdojo.load(agentdojo.find_suite(*place[:2]), _injections(place))


def _injections(place):
    suite = agentdojo.find_suite(*place[:2])
    attack = agentdojo.find_attack(*place[:3])
    return attack.attack(suite.user_tasks[place[3]], suite.injection_tasks[place[4]])


def test_another_process_plays_the_same():
    program = (
        "import agent_r1, hashlib, gymnasium as gym; from agent_r1.validation import probes\n"
        "env = gym.make('AgentR1/AgentDojo-v0', split='travel').unwrapped\n"
        "told = [probes.play(env, index, probes.expert).states for index in (5, 100)]\n"
        "env = gym.make('AgentR1/AgentDojo-v0').unwrapped\n"
        "told += [probes.play(env, index, probes.expert).states for index in (117, 200)]\n"
        "env.reset(options={'task_index': 117})\n"
        "sent = env.dialect.tool_call('get_sent_emails', {})\n"
        "told += [env.step(probes.span(env, text))[0].tolist() for text in (*env.demonstration()[:-1], sent)]\n"
        "print(hashlib.sha256(repr(told).encode()).hexdigest())"
    )
    elsewhere, _ = run_elsewhere(program, PYTHONHASHSEED="7", TZ="Asia/Tokyo")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})
    assert elsewhere == printed.getvalue()


def test_nothing_can_be_farmed():
    env = begin(split="banking", max_turns=200)
    for turn in range(200):
        _, reward, terminated, truncated, _ = call(env, ("get_balance", "get_iban")[turn % 2])
        assert reward <= 0 and not terminated
    assert truncated
