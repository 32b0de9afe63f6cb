"""CraftWorld: tasks that are what they say, an expert that nobody beats, exact counts, rewards that no loop farms."""

import hashlib
import json
import math
import os
import subprocess
import sys
from functools import partial
from itertools import pairwise

import gymnasium as gym
import numpy as np
import pytest

from agent_r1 import ArgumentError
from agent_r1.tasks.craft_world import (
    ITEMS,
    MISTAKES,
    MOST_NEEDED,
    OTHER_PHRASINGS,
    PHRASING,
    TIRED,
    UNSEEN_ITEMS,
    CraftWorldEnv,
    act,
    generate_task,
    play,
    progress,
    waste,
)
from agent_r1.validation import probes

SPLITS = list(CraftWorldEnv.splits)
TASKS = 300


def tasks(split, count=TASKS, **kwargs):
    return [generate_task(0, split, index, **kwargs) for index in range(count)]


def depth_of(item, recipes):
    """The depth of an item, worked out from the recipes: 0 for what is got."""
    return 1 + max(depth_of(i, recipes) for i in recipes[item]) if item in recipes else 0


def call(env, name, **arguments):
    return env.dialect.tool_call(name, arguments)


def run(env, index, texts, say):
    """Play texts in task `index`: the return, the sum of progress, and the last step's outcome."""
    env.reset(seed=0, options={"task_index": index})
    total = gained = 0.0
    for text in texts() if callable(texts) else texts:
        outcome = say(env, text)
        total, gained = total + outcome[1], gained + outcome[4]["reward_terms"].get("process/progress", 0.0)
        if outcome[2] or outcome[3]:
            break
    return total, gained, outcome


# ---------------------------------------------------------------------- tasks


@pytest.mark.parametrize("split", SPLITS)
def test_a_task_is_a_function_of_seed_split_index_and_depth(split):
    drawn = tasks(split, 50)
    generate_task.cache_clear()
    assert drawn == tasks(split, 50) and len({task.id for task in drawn}) == 50
    env = CraftWorldEnv(split=split, world_seed=7)
    assert env.num_tasks == (1_000_000 if split == "train" else 10_000)
    for index in (49, 3, env.num_tasks - 1, 3):
        env.reset(seed=index, options={"task_index": index})  # the seed of reset draws no task
        assert env.task == generate_task(7, split, index) != generate_task(0, split, index)
    json.dumps([task.metadata for task in drawn])


def test_the_tasks_are_the_same_in_every_process_and_under_every_hash_seed():
    code = (
        "import hashlib, json\n"
        "from agent_r1.tasks.craft_world import CraftWorldEnv as C, generate_task as g, play\n"
        "import numpy as np\n"
        "rows = [g(3, s, i) for s in C.splits for i in range(20)]\n"
        "rows = [[t.question, t.metadata, play(t, np.random.default_rng(1), 0.3)] for t in rows]\n"
        "print(hashlib.sha256(json.dumps(rows).encode()).hexdigest())\n"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, timeout=100, check=True,
        ).stdout.strip()
        for seed in ("0", "1", "2")
    }  # fmt: skip
    rows = [generate_task(3, s, i) for s in SPLITS for i in range(20)]
    rows = [[t.question, t.metadata, play(t, np.random.default_rng(1), 0.3)] for t in rows]
    assert told == {hashlib.sha256(json.dumps(rows).encode()).hexdigest()}


@pytest.mark.parametrize("split", SPLITS)
def test_the_tree_is_what_the_metadata_say(split):
    lengths, depths = set(), set()
    for task in tasks(split):
        data = task.metadata
        recipes, needs, goal = data["recipes"], data["needs"], data["goal"]
        assert depth_of(goal, recipes) == data["depth"]
        used = [i for ingredients in recipes.values() for i in ingredients]
        assert len(set(used)) == len(used) and set(used) | {goal} == set(needs)  # a tree: one way to every item
        for item, ingredients in recipes.items():
            assert all(needs[i] == needs[item] * pieces for i, pieces in ingredients.items())
            assert all(list(needs).index(i) > list(needs).index(item) for i in ingredients)
        assert needs[goal] == data["count"] and max(needs.values()) <= MOST_NEEDED
        assert set(needs) <= set(UNSEEN_ITEMS if split == "unseen_items" else ITEMS)
        usual = task.question.startswith(PHRASING.format(count=data["count"], goal=goal))
        assert usual == (split != "other_phrasings") and goal in task.question
        lengths.add(data["optimal_turns"])
        depths.add(data["depth"])
    assert depths == {"depth_4": {4}, "depth_5": {5}}.get(split, {1, 2, 3})
    assert 3 <= min(lengths) and max(lengths) <= 20


def test_lengths_span_what_the_page_says():
    assert {task.metadata["optimal_turns"] for task in tasks("train", 1_000, depth=1)} == {3, 4}
    deepest = {task.metadata["optimal_turns"] for task in tasks("depth_5", 2_000)}
    assert deepest == set(range(11, 21))


def test_depth_is_an_argument():
    for depth in range(1, 6):
        env = CraftWorldEnv(depth=depth)
        for index in range(20):
            env.reset(options={"task_index": index})
            assert env.task.metadata["depth"] == depth and env.task == generate_task(0, "train", index, depth)
    with pytest.raises(ArgumentError, match="depth must be None or one of 1, 2, 3, 4, 5 in split 'test', got 6"):
        CraftWorldEnv(split="test", depth=6)
    with pytest.raises(ArgumentError, match="None or one of 4 in split 'depth_4', got 3"):
        CraftWorldEnv(split="depth_4", depth=3)


def test_nothing_can_be_learned_by_heart():
    """An item is got in one task and crafted in another, from other things."""
    made, got = {}, set()
    for task in tasks("train", 2_000):
        for item, ingredients in task.metadata["recipes"].items():
            made.setdefault(item, set()).add(tuple(ingredients))
        got |= set(task.metadata["needs"]) - set(task.metadata["recipes"])
    assert set(made) == got == set(ITEMS) and not set(ITEMS) & set(UNSEEN_ITEMS)
    assert all(len(ways) > 5 for ways in made.values())


def test_unseen_items_are_only_remarked_on():
    remarked = {task.question.split()[-1].strip(".") for task in tasks("train", 2_000) if "need no" in task.question}
    assert remarked == set(UNSEEN_ITEMS)


def test_the_vocabulary_covers_the_worlds():
    assert CraftWorldEnv.vocabulary() == [*ITEMS, *UNSEEN_ITEMS, *"0123456789"]
    assert len(set(ITEMS + UNSEEN_ITEMS)) == len(ITEMS) + len(UNSEEN_ITEMS)
    starts = [phrasing.partition("{")[0] for phrasing in OTHER_PHRASINGS]
    said = [task.question for task in tasks("other_phrasings")]
    assert all(any(question.startswith(start) for question in said) for start in starts)


# ---------------------------------------------------------------------- the expert


@pytest.mark.parametrize("split", SPLITS)
def test_the_expert_makes_it_in_the_optimal_number_of_turns(split):
    """Of 1,000 tasks, by the rules alone; the next test plays the environment."""
    for task in tasks(split, 1_000):
        inventory = {}
        steps = play(task)
        assert all(act(task, inventory, *step)[1] for step in steps)
        assert progress(task, inventory) == 1.0 and waste(task, inventory) == 0
        assert len(steps) == task.metadata["optimal_turns"]


@pytest.mark.parametrize("split", SPLITS)
def test_the_expert_in_the_environment(split, say):
    env = CraftWorldEnv(split=split)
    for index in range(25):
        total, gained, (_, _, terminated, truncated, info) = run(env, index, env.demonstration, say)
        assert terminated and not truncated and info["is_success"] and info["answer"] is None
        assert info["turn"] == env.task.metadata["optimal_turns"]
        assert info["metrics"] == {"progress": 1.0, "waste": 0.0}
        assert gained == pytest.approx(0.5) and total == pytest.approx(1.5)


def test_nobody_is_quicker():
    """A search through everything that can be got and crafted: no way has fewer calls, look-ups aside. And without
    look-ups nobody knows what to craft from: each crafted item has to be looked up."""
    searched = 0
    for task in tasks("train", 60):
        data = task.metadata
        if len(data["needs"]) > 4 or sum(data["needs"].values()) > 16:
            continue
        searched += 1
        frontier, calls = {()}, 0
        while not any(progress(task, dict(held)) == 1.0 for held in frontier):
            calls += 1
            following = set()
            for held in frontier:
                for item, need in data["needs"].items():
                    for count in range(1, need + 1):
                        inventory = dict(held)
                        if act(task, inventory, "craft" if item in data["recipes"] else "get", item, count)[1]:
                            following.add(tuple(sorted(inventory.items())))
            frontier = {held for held in following if not waste(task, dict(held))}
        assert calls + len(data["recipes"]) == data["optimal_turns"]
    assert searched > 15


def test_every_step_of_the_expert_is_needed():
    for task in tasks("train", 100) + tasks("depth_5", 30):
        steps = [step for step in play(task) if step[0] != "recipe"]
        for left_out in range(len(steps)):
            inventory = {}
            for step in steps[:left_out] + steps[left_out + 1 :]:
                act(task, inventory, *step)
            assert progress(task, inventory) < 1


@pytest.mark.parametrize(
    ("teacher", "share"), [("fallible_75", 0.75), ("fallible_50", 0.5), ("fallible_25", 0.25), ("sloppy", 0.31)]
)
def test_demonstrators_succeed_as_often_as_the_page_says(teacher, share):
    successes = 0
    for index, task in enumerate(tasks("train", 1_000)):
        inventory = {}
        how = MISTAKES[teacher], TIRED if teacher == "sloppy" else 0.0
        for step in play(task, np.random.default_rng([5, index]), *how):
            if step[0] not in ("", "inventory"):
                act(task, inventory, *step)
        successes += progress(task, inventory) == 1.0
    assert abs(successes / 1_000 - share) <= 0.03


def test_the_sloppy_demonstrators_habit_fails_at_depth_3():
    """It mostly gives up after its first crafting, so whoever does what it mostly does never makes the goal."""
    ends, crafted = [], []
    for index in range(400):
        task, inventory = generate_task(0, "train", index, 3), {}
        steps = play(task, np.random.default_rng(index), MISTAKES["sloppy"], TIRED)
        worked = [act(task, inventory, *step)[1] and step[0] == "craft" for step in steps if step[2]]
        crafted.append(sum(worked))
        ends.append(progress(task, inventory) == 1.0)
    assert 0.05 < np.mean(ends) < 0.16
    assert np.mean([count == 1 for count in crafted if count]) > 0.6


@pytest.mark.parametrize("teacher", [None, "fallible_75", "fallible_50", "fallible_25"])
def test_demonstrators_in_the_environment(teacher, say):
    """What they plan is what happens; whoever fails gives up or makes too much; every turn can be read."""
    env, ends = CraftWorldEnv(), set()
    for index in range(60):
        turns = partial(env.demonstration, np.random.default_rng(index), teacher)
        _, gained, (_, _, terminated, truncated, info) = run(env, index, turns, say)
        assert terminated or truncated
        assert gained == pytest.approx(0.5 * info["metrics"]["progress"])
        assert info["is_success"] == (info["metrics"]["progress"] == 1.0)
        assert not any("malformed" in name for terms in env.episode.rewards for name in terms)
        ends.add("made" if info["is_success"] else "wasted" if info["answer"] is None else "gave up")
    assert ends == {"made", "wasted", "gave up"}
    again = [env.demonstration(np.random.default_rng(3), teacher) for _ in range(2)]
    assert again[0] == again[1]


def test_who_multiplies_nothing_makes_what_needs_no_multiplication(say):
    env, right = CraftWorldEnv(split="test"), 0
    for index in range(100):
        turns = partial(env.shortcut_without_counting, np.random.default_rng(0))
        _, _, (_, _, terminated, _, info) = run(env, index, turns, say)
        recipes, needs = env.task.metadata["recipes"], env.task.metadata["needs"]
        plain = all(needs[i] == n for ingredients in recipes.values() for i, n in ingredients.items())
        assert terminated and info["is_success"] == plain
        right += plain
    assert 10 < right < 50  # counts matter


# ---------------------------------------------------------------------- the rules


@pytest.fixture
def lamp(monkeypatch):
    """An environment whose task is known: 2 lamp of 2 rod and 1 clay each, a rod of 2 iron."""
    recipes = {"lamp": {"clay": 1, "rod": 2}, "rod": {"iron": 2}}
    needs = {"lamp": 2, "clay": 2, "rod": 4, "iron": 8}
    task = generate_task(0, "train", 0)
    data = {"goal": "lamp", "count": 2, "depth": 2, "recipes": recipes, "needs": needs, "optimal_turns": 6}
    env = CraftWorldEnv()
    monkeypatch.setattr(env, "make_task", lambda index: type(task)("lamp", "Make 2 lamp.", ["2 lamp"], data))
    env.reset()
    return env


def shown(env, say, name, **arguments):
    """What a call shows, and the progress that it pays, in units of the potential."""
    info = say(env, call(env, name, **arguments))[4]
    return env.messages[-1]["content"], info["reward_terms"].get("process/progress", 0.0) / 0.5


def test_what_the_tools_say(lamp, say):
    assert shown(lamp, say, "recipe", item="lamp") == ("lamp: get 1 clay, craft 2 rod.", 0.0)
    assert shown(lamp, say, "recipe", item=" Clay ") == ("clay can't be crafted, only got.", 0.0)
    assert shown(lamp, say, "inventory") == ("You have nothing.", 0.0)
    assert shown(lamp, say, "get", item="rod", count=4) == ("Error: rod can't be got, only crafted.", 0.0)
    assert shown(lamp, say, "craft", item="iron", count=8) == ("Error: iron can't be crafted, only got.", 0.0)
    assert shown(lamp, say, "get", item="iron", count=8) == ("You have 8 iron.", pytest.approx(8 / 16))
    assert shown(lamp, say, "craft", item="rod", count=5) == ("Error: not enough iron.", 0.0)
    assert shown(lamp, say, "craft", item="rod", count=3) == ("You have 3 rod.", pytest.approx(3 / 16))
    assert shown(lamp, say, "inventory") == ("You have 2 iron, 3 rod.", 0.0)
    assert lamp.memory["inventory"] == {"iron": 2, "rod": 3}


def test_a_goal_may_be_made_piece_by_piece(lamp, say):
    for item, count in (("iron", 4), ("clay", 1)):
        say(lamp, call(lamp, "get", item=item, count=count))
    say(lamp, call(lamp, "craft", item="rod", count=2))
    assert not say(lamp, call(lamp, "craft", item="lamp", count=1))[2]
    for item, count in (("iron", 4), ("clay", 1)):
        say(lamp, call(lamp, "get", item=item, count=count))
    say(lamp, call(lamp, "craft", item="rod", count=2))
    _, _, terminated, _, info = say(lamp, call(lamp, "craft", item="lamp", count=1))
    assert terminated and info["is_success"] and info["reward_terms"]["outcome/made"] == 1.0


def test_a_piece_too_many_is_no_success_and_costs_the_progress(lamp, say):
    assert shown(lamp, say, "get", item="clay", count=2)[1] == pytest.approx(2 / 16)
    assert shown(lamp, say, "get", item="iron", count=9)[1] == pytest.approx(-2 / 16)
    assert shown(lamp, say, "craft", item="rod", count=4)[1] == 0.0
    _, reward, terminated, _, info = say(lamp, call(lamp, "craft", item="lamp", count=2))
    assert terminated and not info["is_success"] and reward == 0.0 and info["reward_terms"] == {"outcome/made": 0.0}
    assert info["metrics"] == {"progress": 0.0, "waste": 1.0}


def test_several_calls_in_a_turn_and_none_after_the_end(lamp, say):
    """They count in their order: what comes after the goal is made neither wastes nor pays."""
    say(lamp, call(lamp, "get", item="iron", count=8) + "\n" + call(lamp, "get", item="clay", count=2))
    last = [("craft", "rod", 4), ("craft", "lamp", 2), ("get", "clay", 1)]
    _, reward, terminated, _, info = say(lamp, "\n".join(call(lamp, n, item=i, count=c) for n, i, c in last))
    assert terminated and info["is_success"] and info["metrics"]["waste"] == 0.0
    assert info["reward_terms"] == {"process/progress": pytest.approx(0.5 * 6 / 16), "outcome/made": 1.0}
    assert [one["ok"] for one in info["tool_calls"]] == [True, True]


@pytest.mark.parametrize("text", ["<answer>stuck</answer>", "<answer>2 lamp</answer>"])
def test_an_answer_gives_up(lamp, say, text):
    say(lamp, call(lamp, "get", item="clay", count=2))
    _, reward, terminated, _, info = say(lamp, text)
    assert terminated and not info["is_success"] and reward == 0.0
    assert info["metrics"] == {"progress": pytest.approx(2 / 16), "waste": 0.0}


def test_without_an_end_nothing_is_paid_and_a_malformed_call_costs_half(say):
    env = CraftWorldEnv(max_turns=3)
    for texts, paid in ((["hm"] * 3, 0.0), (["<tool_call>{</tool_call>"] * 3, -0.5)):
        _, _, (*_, truncated, info) = run(env, 0, texts, say)
        assert truncated and sum(v for k, v in info["reward_terms"].items() if k.startswith("outcome/")) == paid
    env = CraftWorldEnv()
    _, _, (*_, info) = run(env, 0, lambda: ["<tool_call>{</tool_call>", *env.demonstration()], say)
    assert info["is_success"] and info["reward_terms"]["outcome/format"] == -0.5


# ---------------------------------------------------------------------- rewards that no loop farms


def test_the_progress_telescopes(say):
    """Its sum is the potential at the end, whatever a random player did on the way."""
    env, met = CraftWorldEnv(max_turns=60), []
    for index in range(25):
        env.reset(options={"task_index": index})
        rng = np.random.default_rng(index)
        items, total, over = list(env.task.metadata["needs"]), 0.0, False
        while not over:
            arguments = {"item": items[rng.integers(len(items))], "count": int(rng.integers(1, 4))}
            outcome = say(env, call(env, ("get", "craft")[rng.integers(2)], **arguments))
            over = outcome[2] or outcome[3]
            total += outcome[4]["reward_terms"].get("process/progress", 0.0)
            assert total == pytest.approx(0.5 * progress(env.task, env.memory["inventory"]))
            met.append(total)
    assert -1e-9 < min(met) and max(met) > 0.2 and sum(b < a - 0.1 for a, b in pairwise(met)) > 5  # it rose and fell


@pytest.mark.parametrize(
    ("thought", "paid"),
    [("2 lamp", 0.25), ("I need 2 Lamp, I think", 0.25), ("3 lamp", -0.25), ("12 lamp", -0.25), ("2 lamps", None),
     ("2 wick", None), ("", None)],
)  # fmt: skip
def test_the_count_in_the_thought_of_a_look_up_is_right_or_not(lamp, say, thought, paid):
    """An item counts once, so a repeated look-up pays nothing."""
    lamp.process_weights["count_noted"] = 0.5
    for expected in (paid, None):
        terms = say(lamp, f"<think>{thought}</think>{call(lamp, 'recipe', item='lamp')}")[4]["reward_terms"]
        assert terms.get("process/count_noted") == expected


def test_the_expert_notes_every_count_rightly(say):
    env = gym.make("AgentR1/CraftWorld-v0", process_reward={"count_noted": 0.5}).unwrapped
    run(env, 3, env.demonstration, say)
    assert sum(terms.get("process/count_noted", 0.0) for terms in env.episode.rewards) == pytest.approx(0.5)


def farms(task):
    """Turns that a farmer might repeat and alternate."""
    data = task.metadata
    goal, got = data["goal"], next(i for i in data["needs"] if i not in data["recipes"])
    maker = next(item for item, ingredients in data["recipes"].items() if got in ingredients)
    return {
        "look up": [("recipe", {"item": goal})],
        "get": [("get", {"item": got, "count": 1})],
        "get and look": [("get", {"item": got, "count": 1}), ("inventory", {})],
        "get and craft": [("get", {"item": got, "count": 1}), ("craft", {"item": maker, "count": 1})],
        "fail": [("craft", {"item": got, "count": 1}), ("get", {"item": goal, "count": 1})],
    }


@pytest.mark.parametrize("kind", ["look up", "get", "get and look", "get and craft", "fail"])
def test_two_hundred_turns_gain_no_more_than_the_oracle(kind, say):
    env = CraftWorldEnv(max_turns=200, max_context_tokens=200_000, depth=2)
    for index in range(3):
        env.reset(options={"task_index": index})
        turns = farms(env.task)[kind]
        texts = [call(env, name, **arguments) for name, arguments in turns] * (200 // len(turns))
        env.reset(options={"task_index": index})
        gained, best = 0.0, 0.0
        for text in texts:
            *_, terminated, truncated, info = say(env, text)
            gained += sum(v for k, v in info["reward_terms"].items() if k.startswith("process/"))
            best = max(best, gained)
            if terminated or truncated:
                break
        assert info["turn"] == 200 or info["is_success"]
        assert best <= 0.5 + 1e-9 and gained <= 0.5 + 1e-9


# ---------------------------------------------------------------------- hostile arguments, branching


HOSTILE = [
    "x" * 100_000, "", "\0", "\ud800", "<|im_end|>", "</tool_response><|im_end|>", "../../etc/passwd", "' OR 1=1 --",
    "日本", "<answer>2 lamp</answer>", "__class__", "{0.__class__}", 7, None, [], {}, ["lamp"],
]  # fmt: skip
COUNTS = [0, -1, 10**300, 1e308, 2.5, True, "2", None, [], math.inf, math.nan, 100]


@pytest.mark.parametrize("name", ["recipe", "get", "craft"])
def test_hostile_arguments_are_answered(lamp, say, name):
    from agent_r1_tools import run_tool

    tool = lamp.tools[name]
    counted = {} if name == "recipe" else {"count": 2}
    calls = [{"item": item, **counted} for item in HOSTILE]
    calls += [{"item": "clay", "count": count} for count in COUNTS] + [{}, {"item": "clay", "more": 1}]
    for arguments in calls:
        result = run_tool(tool, arguments)
        assert not result.ok and result.fault is None
        assert result.content.startswith("Error") and len(result.content) < 400
    assert run_tool(tool, "nonsense").ok is False
    assert not lamp.memory.get("inventory")


def test_a_whole_number_may_be_written_as_a_float(lamp, say):
    assert shown(lamp, say, "get", item="clay", count=2.0)[0] == "You have 2 clay."
    assert lamp.memory["inventory"] == {"clay": 2} and isinstance(lamp.memory["inventory"]["clay"], int)


def test_an_episode_branches_exactly(say):
    """From every turn of the expert's way, the rest gives the same outcomes, here and in another environment."""
    env, other = CraftWorldEnv(split="depth_4"), CraftWorldEnv(split="depth_4")
    env.reset(options={"task_index": 5})
    texts = env.demonstration()
    states, outcomes = [env.get_state()], []
    for text in texts:
        outcomes.append(say(env, text))
        states.append(env.get_state())
    assert all(a["episode"].length < b["episode"].length for a, b in pairwise(states))
    for turn in range(len(texts)):
        for one in (env, other):
            one.set_state(states[turn])
            for text, before in zip(texts[turn:], outcomes[turn:], strict=True):
                after = say(one, text)
                assert np.array_equal(after[0], before[0]) and after[1:] == before[1:]
    # A branch that wastes something leaves the snapshot as it was.
    env.set_state(states[-2])
    got = next(item for item in env.task.metadata["needs"] if item not in env.task.metadata["recipes"])
    say(env, call(env, "get", item=got, count=1))
    assert not say(env, texts[-1])[4]["is_success"]
    env.set_state(states[-2])
    assert say(env, texts[-1])[4]["is_success"]


def test_many_episodes_at_once(say):
    """The vector environment gives what the single one gives."""
    envs = gym.make_vec("AgentR1/CraftWorld-v0", num_envs=4, depth=2)
    envs.reset(options={"task_index": list(range(4))})
    single = CraftWorldEnv(depth=2)
    alone = [run(single, index, single.demonstration, say) for index in range(4)]
    texts = [env.unwrapped.demonstration() for env in envs.envs]
    returns = np.zeros(4)
    for turn in range(max(map(len, texts))):
        ids = [i for i in range(4) if turn < len(texts[i])]
        end = single.dialect.end_of_turn
        envs.send([np.asarray(single.tokenizer.encode(texts[i][turn] + end), np.int32) for i in ids], ids)
        done, _, rewards, terminations, _, _ = envs.recv(min_batch=len(ids))
        for i, reward, terminated in zip(done, rewards, terminations, strict=True):
            returns[i] += reward
            assert terminated == (turn == len(texts[i]) - 1)
    assert returns == pytest.approx([total for total, _, _ in alone])
    envs.close()


@pytest.mark.parametrize("depth", [None, 1, 2, 3])
def test_the_floor_is_that_of_the_depth(depth):
    env = CraftWorldEnv(depth=depth)
    trick = probes.shortcuts(env)["without_counting"]
    share = np.mean([probes.play(env, index, trick).success for index in range(300)])
    assert env.floor - 0.08 < share < env.floor + 0.03
