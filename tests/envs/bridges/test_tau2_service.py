"""tau2-bench retail and airline: gold actions solve them, a customer talks, and data are copied where they change."""

import json
import threading
import time

import pytest

pytest.importorskip("tau2")
pytest.importorskip("loguru")

from bridge_cases import call, check_others_play_the_same, say

from agent_r1 import ArgumentError
from agent_r1.bridges.tau2 import service as service
from agent_r1.bridges.tau2.environment import Desk, load
from agent_r1.bridges.tau2.service import Tau2AirlineEnv, Tau2RetailEnv, Tau2ServiceEnv
from agent_r1.validation import probes
from agent_r1.vector import ToolVectorEnv

BOTH = (Tau2RetailEnv, Tau2AirlineEnv)


@pytest.mark.parametrize("kind", BOTH)
def test_splits_are_the_originals(kind):
    original = load(f"domains.{kind.domain}.environment").get_tasks_split()
    for split in ("train", "test", "base"):
        env = kind(split=split)
        assert [env.make_task(index).id for index in range(env.num_tasks)] == [
            task.id for task in load(f"domains.{kind.domain}.environment").get_tasks(split)
        ]
        assert env.num_tasks == len(original[split])


@pytest.mark.parametrize("kind", BOTH)
def test_the_expert_solves_all_tasks(kind):
    env = kind(split="base")
    for index in range(env.num_tasks):
        episode = probes.play(env, index, probes.expert)
        assert episode.success and episode.process == 0 and episode.rewards[-1] == 1.0, env.task.id


@pytest.mark.parametrize("kind", BOTH)
def test_the_data_are_compared_as_tau2_compares_them(kind):
    """Gold, gold without its last call, nothing: by the records that were looked up, and by tau2's hash of all."""
    whole = load(f"domains.{kind.domain}.environment").get_environment
    before = service.base(kind.domain).get_db_hash()
    env, seen = kind(split="base"), set()
    for index in (0, 3, 8, 12):
        env.reset(options={"task_index": index})
        gold = [(one.name, one.arguments) for one in env.criteria().actions or []]
        original = Desk(whole())
        for name, arguments in gold:
            original.act(name, arguments)
        for calls in (gold, gold[:-1], []):
            env.reset(options={"task_index": index})
            for name, arguments in calls:
                call(env, name, **arguments)
            same = env.world.env.get_db_hash() == original.env.get_db_hash()
            assert env.same_data() == same
            seen.add(same)
    assert seen == {True, False} and service.base(kind.domain).get_db_hash() == before


@pytest.mark.parametrize("kind", BOTH)
def test_the_verdict_is_the_originals(kind):
    """The same conversation through tau2's own evaluators."""
    pytest.importorskip("pandas")
    message, environment = load("data_model.message"), load(f"domains.{kind.domain}.environment")
    data = load("evaluator.evaluator_env").EnvironmentEvaluator
    told = load("evaluator.evaluator_communicate").CommunicateEvaluator
    env, tasks, seen = kind(split="base"), environment.get_tasks("base"), set()
    some = [index for index, task in enumerate(tasks) if task.evaluation_criteria.communicate_info][:2]
    for index in some:
        env.reset(options={"task_index": index})
        turns = env.demonstration()
        for played in (turns, [*turns[:-1], "Goodbye."]):
            probes.play(env, index, lambda env, rng, played=played: played)
            desk, history = Desk(environment.get_environment()), []
            for number, (name, arguments, _) in enumerate(env.memory["log"]):
                made = message.ToolCall(id=str(number), name=name, arguments=arguments)
                history.append(message.AssistantMessage(role="assistant", tool_calls=[made]))
                history.append(desk.env.get_response(made))
            history += [message.AssistantMessage(role="assistant", content=text) for text, _ in env.memory["talk"]]
            parts = data.calculate_reward(environment.get_environment, tasks[index], history).reward
            assert env.verdict().score == parts * told.calculate_reward(tasks[index], history).reward
            seen.add(env.verdict().score)
    assert seen == {0.0, 1.0}


@pytest.mark.parametrize("kind", BOTH)
def test_who_hangs_up_is_right_where_nothing_is_to_be_done(kind):
    for split in ("train", "test"):
        env = kind(split=split)
        right = sum(
            probes.play(env, index, probes.shortcuts(env)["goodbye"]).success for index in range(env.num_tasks)
        )
        assert right / env.num_tasks == env.floor
    assert env.floor == {"retail": 2 / 40, "airline": 6 / 20}[kind.domain]


@pytest.mark.parametrize("kind", BOTH)
def test_saying_nothing_and_giving_up_pay_nothing(kind):
    env = kind(max_turns=8)
    for index in range(8):
        for probe in (probes.null, probes.copying, probes.many_answers):
            episode = probes.play(env, index, probe)
            assert episode.over and not episode.success and sum(episode.rewards) == 0


def test_the_script_tells_its_note_piece_by_piece_then_agrees():
    env = Tau2RetailEnv(split="base")
    env.reset(options={"task_index": 0})
    words = env.task.metadata["user_scenario"]["instructions"]
    assert words["reason_for_call"] in env.task.question
    say(env, "Who are you? Is there anything else?")
    assert words["known_info"] in env.messages[-1]["content"] and words["unknown_info"] in env.messages[-1]["content"]
    say(env, "<think>Goodbye.</think>Go on.")
    assert words["task_instructions"] in env.messages[-1]["content"]
    for _ in range(3):
        *_, terminated, truncated, _ = say(env, "I do that now.")
        assert not terminated and env.messages[-1] == {"role": "user", "content": "Yes, please go ahead."}
    *_, terminated, truncated, info = say(env, "Is there anything else?")
    assert terminated and info["metrics"] == {"db": 0.0, "communicate": 1.0} and not info["is_success"]


def test_who_is_transferred_hangs_up():
    env = Tau2RetailEnv()
    env.reset(options={"task_index": 0})
    assert not call(env, "transfer_to_human_agents", summary="x")[2]
    assert say(env, "Please hold on.")[2]
    env.reset(options={"task_index": 0})
    assert not call(env, "transfer_to_human_agents")[2] and not say(env, "Please hold on.")[2]  # it failed


def test_any_function_may_be_the_customer():
    heard = []

    def user(messages):
        heard.append(messages)
        return "###STOP###" if "bye" in messages[-1]["content"] else f"{len(messages)} messages"

    env = Tau2AirlineEnv(split="base", user=user)
    env.reset(options={"task_index": 0})
    assert env.task.question == "Hello, I need your help."
    say(env, "What is it?")
    assert env.messages[-1] == {"role": "user", "content": "4 messages"}
    state = env.get_state()
    *_, terminated, _, info = say(env, "bye")
    assert terminated and info["is_success"]  # nothing is to be done
    system, *talk = heard[-1]
    assert "User Simulation Guidelines" in system["content"] and "emma_kim_9957" in system["content"]
    assert [message["role"] for message in talk] == ["user", "assistant"] * 2 + ["user"]
    assert talk[-1]["content"] == "bye" and talk[-2]["content"] == "4 messages"
    env.set_state(state)
    assert len(heard) == 2 and say(env, "bye")[4]["is_success"]


def test_a_customer_who_breaks_is_a_fault():
    def user(messages):
        raise KeyError("the client")

    env = Tau2RetailEnv(user=user, fault_deadline=0)
    env.reset(options={"task_index": 0})
    _, reward, terminated, truncated, info = say(env, "What is it?")
    assert truncated and reward == 0 and info["fault"].startswith("user: ") and "KeyError" in info["fault"]
    with pytest.raises(ArgumentError, match="user must be a function"):
        Tau2RetailEnv(user="nobody")
    with pytest.raises(ArgumentError, match="user 'nowhere:user'"):
        Tau2RetailEnv(user="nowhere:user")


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        (Tau2RetailEnv, "calculate", {"expression": "9**9**9**9"}),
        (Tau2RetailEnv, "calculate", {"expression": "(" * 5_000}),
        (Tau2AirlineEnv, "calculate", {"expression": "__import__('os')"}),
        (Tau2RetailEnv, "get_order_details", {"order_id": "#" * 100_000}),
        (Tau2RetailEnv, "get_user_details", {"user_id": "\ud800"}),
        (Tau2RetailEnv, "get_product_details", {"product_id": ["1"]}),
        (Tau2RetailEnv, "return_delivered_order_items", {
            "order_id": "#W2378156", "item_ids": ["4602305039"] * 10_000, "payment_method_id": "credit_card_9513926",
        }),
        (Tau2RetailEnv, "get_user_details", {"user_id": "yusuf_rossi_9620", "self": 1}),
        (Tau2AirlineEnv, "search_onestop_flight", {"origin": "JFK", "destination": "SEA", "date": 20240520}),
        (Tau2AirlineEnv, "book_reservation", {
            "user_id": "mia_li_3668", "origin": "JFK", "destination": "SEA", "flight_type": "one_way",
            "cabin": "economy", "flights": [{"self": 1}, {"flight_number": [[]]}], "passengers": [{}] * 1_000,
            "payment_methods": [], "total_baggages": 10**4_000, "nonfree_baggages": -1, "insurance": "no",
        }),
        (Tau2AirlineEnv, "send_certificate", {"user_id": "nobody", "amount": 50}),
    ],
)  # fmt: skip
def test_hostile_arguments_get_a_readable_result(kind, name, arguments):
    env = kind(max_action_tokens=300_000, max_context_tokens=1_000_000)
    env.reset(seed=0)
    info = call(env, name, **arguments)[4]
    assert not info["tool_calls"][0]["ok"] and 0 < len(env.messages[-1]["content"]) <= 8_192
    assert not any(service.changes(env.world.env.tools.db).values())


def test_numbers_beyond_what_python_writes_break_no_judge():
    """Fifty dollars times a number of 4,300 digits."""
    env = Tau2AirlineEnv(max_action_tokens=300_000, max_context_tokens=1_000_000)
    env.reset(options={"task_index": 0})
    for _ in range(2):
        call(env, "send_certificate", user_id="mia_li_3668", amount=int("9" * 4_300))
    payment = {"reservation_id": "YAX4DR", "total_baggages": 1, "payment_id": "credit_card_4938634"}
    call(env, "update_reservation_baggages", nonfree_baggages=int("9" * 4_300), **payment)
    *_, terminated, _, info = say(env, "Goodbye.")
    assert terminated and info["metrics"]["db"] == 0.0
    env.reset(options={"task_index": 0})


@pytest.mark.parametrize("kind", BOTH)
def test_two_episodes_share_nothing(kind):
    one, other = kind(split="base"), kind(split="base")
    index = 12
    one.reset(options={"task_index": index})
    turns = one.demonstration()
    alone = [one.step(probes.span(one, text))[0].tolist() for text in turns]
    one.reset(options={"task_index": index})
    other.reset(options={"task_index": index})
    mixed = []
    for text in turns:
        if not other.episode.over:
            other.step(probes.span(other, text))
        mixed.append(one.step(probes.span(one, text))[0].tolist())
    assert mixed == alone


@pytest.mark.parametrize("kind", BOTH)
def test_nothing_can_be_farmed(kind):
    env = kind(max_context_tokens=1_000_000)
    env.reset(options={"task_index": 0, "max_turns": 60})
    for turn in range(60):
        reward = say(env, "Tell me more.")[1] if turn % 2 else call(env, "calculate", expression="1 + 1")[1]
        assert reward <= 0


def test_an_episode_copies_little():
    env = Tau2AirlineEnv(split="base")
    env.reset(options={"task_index": 12})
    db = env.world.env.tools.db
    assert sum(len(getattr(db, name).own) for name in type(db).model_fields) == 0
    call(env, "search_direct_flight", origin="BOS", destination="MCO", date="2024-05-18")
    call(env, "get_reservation_details", reservation_id="YAX4DR")
    assert {name: getattr(db, name).own for name in type(db).model_fields} == {
        "flights": set(), "users": set(), "reservations": {"YAX4DR"},
    }  # fmt: skip


def test_metadata_is_json():
    for kind in BOTH:
        assert issubclass(kind, Tau2ServiceEnv) and json.dumps(kind().make_task(3).metadata)


@pytest.mark.parametrize("name", ["Retail", "Airline"])
def test_another_process_plays_the_same(name):
    assert not check_others_play_the_same(f"AgentR1/Tau2{name}-v0", 5)


@pytest.mark.parametrize("kind", BOTH)
def test_a_slow_user_keeps_nobody_else_waiting(kind):
    at_once, most, lock = 0, 0, threading.Lock()

    def user(messages):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.2)
        with lock:
            at_once -= 1
        return "Yes."

    envs = ToolVectorEnv(kind, num_envs=8, text=True, user=user)
    envs.reset(seed=5)
    envs.step(["Anything else?"] * 8)
    assert most > 4 and all(env.messages[-1]["content"] == "Yes." for env in envs.envs)
    envs.close()
