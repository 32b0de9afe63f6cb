"""BFCL's multi-turn tasks: the package's calls, state and check, without its eval and its globals."""

import copy
import json
import sys

import numpy as np
import pytest

pytest.importorskip("bfcl_eval")

from bridge_cases import call, forgotten, run_elsewhere, say

from agent_r1.bridges import bfcl, bridge
from agent_r1.bridges.bfcl import APIS, BFCLMultiTurnEnv, Services
from agent_r1.validation import probes

SPLITS = list(BFCLMultiTurnEnv.splits)
BASE = bfcl.load("base")
FILES_AND_NUMBERS = next(i for i, task in enumerate(BASE) if {"GorillaFileSystem", "MathAPI"} == {*task["apis"]})


def test_without_the_package_the_error_says_what_to_do():
    with forgotten(bfcl.require_bfcl) as patched:
        patched.setitem(sys.modules, "bfcl_eval", None)
        with pytest.raises(ImportError, match=r'pip install "agent-r1\[bfcl\]" && pip install --no-deps "bfcl-eval'):
            BFCLMultiTurnEnv()


def test_another_version_is_named_once():
    with forgotten(bfcl.require_bfcl) as patched:
        patched.setattr(bridge.metadata, "version", lambda package: "2027.1.1")
        with pytest.warns(UserWarning, match="bfcl-eval 2027.1.1 wasn't checked; 2026.3 was"):
            BFCLMultiTurnEnv()
        BFCLMultiTurnEnv()  # a second warning would be an error


def begin(index=0, **kwargs):
    env = BFCLMultiTurnEnv(**kwargs)
    env.reset(options={"task_index": index})
    return env


@pytest.mark.parametrize("split", SPLITS)
def test_the_tasks_own_calls_succeed(split):
    env = BFCLMultiTurnEnv(split=split)
    assert env.num_tasks == 200
    for index in (*range(0, 200, 12), 49, 173):  # the last two: what the data get wrong
        episode = probes.play(env, index, probes.expert)
        assert episode.success and episode.process == 0 and episode.infos[-1]["metrics"] == {"requests_done": 1.0}
        assert all(made["ok"] for info in episode.infos[1:] for made in info["tool_calls"])
        json.dumps(env.task.metadata)


def written(name, arguments):
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def test_the_package_judges_a_whole_episode_alike():
    """What its own executor, which evals texts, and its own checker say of the same calls, right and wrong."""
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker, multi_turn_utils

    env = BFCLMultiTurnEnv()
    for index in range(0, 60, 3):
        entry, found = bfcl.load("base")[index], []
        for wrong in (False, True):
            env.reset(options={"task_index": index})
            gold = copy.deepcopy(entry["gold"])
            if wrong:
                gold[-1] = gold[-1][:-1] or [("no_such_function", {})]
            for turn in gold:
                for name, arguments in turn:
                    *_, info = call(env, name, **arguments)
                *_, info = say(env, "Done.")
            texts = [[[written(*one) for one in turn]] for turn in gold]
            right = [[written(*one) for one in turn] for turn in entry["gold"]]
            test = {"id": entry["id"], "initial_config": entry["config"], "involved_classes": entry["apis"]}
            name = f"checked_{index}_{wrong}"
            verdict = multi_turn_checker.multi_turn_checker(texts, right, test, "multi_turn_base", name)
            assert verdict["valid"] == info["is_success"], (entry["id"], wrong, verdict)
            found.append(info["is_success"])
        assert found == [True, False]
    for name in [name for name in vars(multi_turn_utils) if name.startswith("checked_")]:
        delattr(multi_turn_utils, name)


def test_a_request_without_its_calls_ends_the_episode():
    env = begin(process_reward={"request_done": 1.0})
    (first, *_), *_ = env.task.metadata["gold"]
    assert first[0] == "cd"
    *_, terminated, _, info = say(env, "Done.")
    assert terminated and not info["is_success"] and info["metrics"] == {"requests_done": 0.0}
    env.reset(options={"task_index": 0})
    for name, arguments in env.task.metadata["gold"][0]:
        call(env, name, **arguments)
    _, reward, terminated, _, info = say(env, "Done.")
    assert reward == 1 / 4 and not terminated
    assert env.messages[-1] == {"role": "user", "content": env.task.metadata["requests"][1]}
    _, reward, terminated, _, info = say(env, "<answer>I give up</answer>")
    assert terminated and reward == 0 and info["metrics"] == {"requests_done": 1 / 4}


def test_an_answer_to_the_last_request_counts():
    env = begin(3)
    for text in env.demonstration()[:-1]:
        say(env, text)
    _, reward, terminated, _, info = say(env, "<answer>There they are.</answer>")
    assert terminated and reward == 1 and info["is_success"]


def test_more_than_twenty_turns_for_a_request_end_the_episode():
    env = begin()
    for turn in range(21):
        *_, terminated, truncated, info = call(env, "pwd")
        assert terminated == (turn == 20) and not truncated
    assert not info["is_success"]


def test_a_missing_function_is_told_when_it_is_there():
    env = begin(split="miss_func")
    assert "sort" not in env.tools and "sort(" not in str(env.messages[0])
    *_, info = call(env, "sort", file_name="a")
    assert "there is no tool named 'sort'" in info["tool_calls"][0]["error"]
    for _ in range(2):  # the second episode begins as the first did
        env.reset(options={"task_index": 0})
        assert "sort" not in [schema["function"]["name"] for schema in env.schemas]
        turns = env.demonstration()
        at = turns.index("That can't be done: something is missing.")
        for text in turns[: at + 1]:
            say(env, text)
        told, sentence = env.messages[-1]["content"].split("\n")
        assert json.loads(told)["name"] == "sort" and sentence == bfcl.ADDED
        state = env.get_state()
        call(env, "sort", file_name="final_report.pdf")
        assert env.messages[-1]["content"].startswith('{"sorted_content"')
    other = BFCLMultiTurnEnv(split="miss_func")
    other.set_state(state)
    assert "sort" in other.tools and other.schemas == env.schemas
    for text in turns[at + 1 :]:
        *_, info = say(other, text)
    assert info["is_success"]


JUNK = [
    None, True, -1, 10**30, 1e308, float("nan"), float("inf"), "", "x" * 100_000, "\ud800\0", "__class__",
    "__import__('os').system('true')", [], [[[]]] * 100, [1, "a", None], {"a": {"b": 1}}, {"title": 1, "z": 2, "y": 3},
]  # fmt: skip


@pytest.mark.parametrize("api", APIS)
def test_arguments_of_any_kind_get_a_result(api):
    index = next(i for i, entry in enumerate(bfcl.load("long_context")) if api in entry["apis"])
    services = Services("long_context", index)
    usual = {"string": "a", "number": 1.5, "integer": 2, "boolean": True, "array": ["a"], "object": {}}
    for name, schema in bfcl.schemas_of(api).items():
        properties = schema["parameters"]["properties"]
        for junk in JUNK:
            for nth in range(len(properties) + 1):  # one of them, or all
                arguments = {
                    key: junk if nth in (i, len(properties)) else usual[np.atleast_1d(spec["type"])[0]]
                    for i, (key, spec) in enumerate(properties.items())
                }
                result = services.act(name, arguments)
                assert isinstance(result.content, str)
    services.answers.clear()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("power", {"base": 10, "exponent": 10**9}), ("power", {"base": 10**400, "exponent": -(10**9)}),
        ("logarithm", {"value": 2, "base": 3, "precision": 10**9}), ("square_root", {"number": 2, "precision": 10**12}),
        ("round_number", {"number": 7, "decimal_places": -(10**9)}), ("mean", {"numbers": ["1", "2"]}),
        ("cd", {"folder": ["a"]}), ("cd", {"self": 1}), ("cat", {"file_name": "../../etc/passwd"}),
        ("_load_scenario", {}), ("__init__", {}), ("find", {"path": "/" * 5_000}),
    ],
)  # fmt: skip
def test_hostile_calls_fail_at_once_and_change_nothing(name, arguments):
    env = begin(FILES_AND_NUMBERS, max_action_tokens=50_000)
    before = repr(env.world.apis["GorillaFileSystem"].root)
    info = call(env, name, **arguments)[4]
    assert 0 < len(env.messages[-1]["content"]) < 10_000
    assert not info["tool_calls"][0]["ok"] or name == "find"
    assert repr(env.world.apis["GorillaFileSystem"].root) == before


def test_a_walk_through_copies_of_copies_is_refused():
    services = Services("base", 0)
    services.act("mkdir", {"dir_name": "a"})
    for copy_ in "bcdefghijklmnopqrstuvwxyz":
        services.act("cp", {"source": "a", "destination": copy_})
        services.act("mv", {"source": copy_, "destination": "a"})
    services.act("cp", {"source": "a", "destination": "a"})  # it holds itself
    for name in ("find", "du"):
        assert not services.act(name, {}).ok and "more than 10000 files" in services.answers[-1]
    assert services.act("ls", {}).ok


def doubled(services, levels):
    """A tree whose every level holds the one below it twice."""
    assert services.act("mkdir", {"dir_name": "k0"}).ok
    for level in range(levels):
        above = f"k{level + 1}"
        calls = [("cp", {"source": f"k{level}", "destination": "x"}), ("mkdir", {"dir_name": above})]
        calls += [("mv", {"source": one, "destination": above}) for one in (f"k{level}", "x")]
        assert all(services.act(name, arguments).ok for name, arguments in calls)


def test_a_walk_from_a_place_that_was_removed_is_refused_too():
    services = Services("base", 0)
    calls = [("mkdir", {"dir_name": "a"}), ("cd", {"folder": "a"}), ("mkdir", {"dir_name": "s"})]
    calls += [("cd", {"folder": ".."}), ("cp", {"source": "a", "destination": "b"}), ("rm", {"file_name": "a"})]
    calls += [("cd", {"folder": place}) for place in ("b", "s", "..")]
    for name, arguments in calls:  # a copy knows the place that it was copied from as the one above it
        assert services.act(name, arguments).ok
    doubled(services, 14)
    assert bfcl.walks(services.apis["GorillaFileSystem"].root)
    for name in ("find", "du"):
        assert not services.act(name, {}).ok and "more than 10000 files" in services.answers[-1]


def test_long_names_do_not_multiply():
    services = Services("base", 0)
    services.act("mkdir", {"dir_name": "=" * 10_000})
    services.act("cd", {"folder": "=" * 10_000})
    doubled(services, 11)
    services.act("cd", {"folder": ".."})
    assert not services.act("find", {"path": "."}).ok and len(services.answers[-1]) < 1_000


def test_what_the_package_lists_in_any_order_is_sorted():
    assert bfcl.in_order("Invalid fields for update: z, a") == "Invalid fields for update: a, z"
    listed = "Invalid travel class. Must be one of {'b', 'a'}"
    assert bfcl.in_order(listed) == "Invalid travel class. Must be one of {'a', 'b'}"


def test_two_episodes_share_nothing():
    """The package shares long contexts, default lists and precisions among all instances."""
    index = next(i for i, entry in enumerate(bfcl.load("long_context")) if "TravelAPI" in entry["apis"])
    one, other = Services("long_context", index), Services("long_context", index)
    before = copy.deepcopy(vars(other.apis["TravelAPI"]))
    for card in one.apis["TravelAPI"].credit_card_list.values():
        card["balance"] = -1
    assert all(before[key] == value for key, value in vars(other.apis["TravelAPI"]).items() if key != "_random")
    tweets = [Services("base", 0) for _ in range(2)]
    for services in tweets:
        api = services.apis["TwitterAPI"]
        api.authenticated = True
        services.act("post_tweet", {"content": "hello"})
        services.act("mention", {"tweet_id": 3, "mentioned_usernames": ["@a"]})
        assert api.tweets[3]["mentions"] == ["@a"]
    import decimal

    import mpmath

    precision, digits = mpmath.mp.dps, decimal.getcontext().prec
    maths = Services("base", FILES_AND_NUMBERS)
    maths.act("logarithm", {"value": 2, "base": 3, "precision": 77})
    maths.act("square_root", {"number": 2, "precision": 77})
    assert (mpmath.mp.dps, decimal.getcontext().prec) == (precision, digits)


def test_episodes_in_turn_are_as_they_are_alone():
    one, other = begin(30), begin(31)
    turns = one.demonstration()
    alone = [say(one, text)[0].tolist() for text in turns]
    one.reset(options={"task_index": 30})
    mixed, noise = [], iter(other.demonstration())
    for text in turns:
        mixed.append(say(one, text)[0].tolist())
        if not other.episode.over:
            say(other, next(noise))
    assert mixed == alone


def test_a_snapshot_is_played_again_and_goes_on():
    env, other = begin(44), BFCLMultiTurnEnv()
    turns = env.demonstration()
    for cut in range(1, len(turns)):
        env.reset(options={"task_index": 44})
        for text in turns[:cut]:
            say(env, text)
        other.set_state(env.get_state())
        rest = [[say(one, text)[0].tolist() for text in turns[cut:]] for one in (env, other)]
        assert rest[0] == rest[1] and env.episode.rewards == other.episode.rewards


def test_another_process_on_another_day_plays_the_same():
    program = (
        "import agent_r1, hashlib, gymnasium as gym; from agent_r1.validation import probes\n"
        "from agent_r1.bridges.bfcl import Services\n"
        "env = gym.make('AgentR1/BFCLMultiTurn-v0', split='long_context').unwrapped\n"
        "told = [probes.play(env, index, probes.expert).states for index in (5, 60, 100, 150)]\n"
        "index = next(i for i in range(200) if 'TravelAPI' in env.make_task(i).metadata['apis'])\n"
        "services = Services('base', index)\n"
        "travel = services.apis['TravelAPI']\n"
        "name = {'first_name': travel.user_first_name, 'last_name': travel.user_last_name}\n"
        "born = {'date_of_birth': '2006-09-02', 'passport_number': 'US1'}\n"
        "told.append(services.act('verify_traveler_information', name | born).content)\n"
        "print(told[-1], hashlib.sha256(repr(told).encode()).hexdigest())"
    )
    runs = (("0", "UTC"), ("1", "Asia/Tokyo"))
    found = {run_elsewhere(program, PYTHONHASHSEED=seed, TZ=zone)[0] for seed, zone in runs}
    assert len(found) == 1 and "at least 18" in found.pop()


def test_saying_nothing_stuffing_and_farming_pay_nothing():
    for split in SPLITS:
        env = BFCLMultiTurnEnv(split=split, max_turns=12)
        for index in range(0, 200, 20):
            for probe in (probes.null, probes.copying, probes.stuffing, probes.many_answers):
                episode = probes.play(env, index, probe)
                assert not episode.success and sum(episode.rewards) <= 0
