"""ArithmeticWorld: problems that are what they say, that its expert solves, and that a shortcut does not."""

import re

import gymnasium as gym
import numpy as np
import pytest

from agent_r1.tasks.arithmetic_world import (
    DAYS,
    ITEMS,
    NAMES,
    NUM_TASKS,
    OTHER_PHRASINGS,
    UNSEEN_ITEMS,
    UNSEEN_NAMES,
    VERBS,
    ArithmeticWorldEnv,
    generate_task,
)
from agent_r1.tool_env import Task

SPLITS = list(ArithmeticWorldEnv.splits)
TASKS = 300


def tasks(split, seed=0, count=TASKS):
    return [generate_task(seed, split, index) for index in range(count)]


def read(task):
    """(start, [(day, operator, number)]), read off the question."""
    verbs = {verb: operator for operator, group in VERBS.items() for verb in group}
    pattern = rf"on (\w+) she ({'|'.join(verbs)}) (\d+)"
    events = [(day, verbs[verb], int(number)) for day, verb, number in re.findall(pattern, task.question)]
    return int(re.search(r"\d+", task.question)[0]), events


@pytest.mark.parametrize("split", SPLITS)
def test_a_task_is_a_function_of_seed_split_and_index(split):
    drawn = tasks(split, count=50)
    assert drawn == tasks(split, count=50)
    env = gym.make("AgentR1/ArithmeticWorld-v0", split=split).unwrapped
    for index in (49, 3, 3):
        env.reset(seed=index, options={"task_index": index})
        assert env.task == drawn[index]
    others = [tasks(split, seed=1, count=50)] + [tasks(other, count=50) for other in SPLITS if other != split]
    for other in others:
        assert not {task.question for task in drawn} & {task.question for task in other}


def test_world_seed_is_an_argument():
    env = gym.make("AgentR1/ArithmeticWorld-v0", world_seed=7).unwrapped
    env.reset(options={"task_index": 12})
    assert env.task == generate_task(7, "train", 12) != generate_task(0, "train", 12)


def test_sizes():
    for split in SPLITS:
        env = ArithmeticWorldEnv(split=split)
        assert env.num_tasks == (1_000_000 if split == "train" else 10_000) == NUM_TASKS.get(split, NUM_TASKS["test"])
        env.reset(options={"task_index": env.num_tasks - 1})


@pytest.mark.parametrize("split", SPLITS)
def test_the_answer_follows_from_the_words(split):
    for task in tasks(split):
        value, events = read(task)
        steps, values = task.metadata["steps"], task.metadata["values"]
        assert len(steps) == len(values) == len(events)
        for (day, operator, number), step, expected in zip(events, steps, values, strict=True):
            assert step == [day, f"{value} {operator} {number}"]
            result = {"+": value + number, "-": value - number, "*": value * number, "/": value / number}[operator]
            assert result == expected > 0
            value = expected
        assert task.answers == [str(value)]
        days = [DAYS.index(day) for day, _, _ in events]
        assert all((second - first) % 7 == 1 for first, second in zip(days, days[1:], strict=False))


def test_every_operator_is_used():
    used = [operator for task in tasks("train", count=1_000) for _, operator, _ in read(task)[1]]
    assert all(used.count(operator) > 0.05 * len(used) for operator in VERBS)


def test_variants_are_what_they_say():
    steps = {split: {len(task.metadata["steps"]) for task in tasks(split)} for split in SPLITS}
    assert steps.pop("more_steps") == {4} and all(numbers == {2, 3} for numbers in steps.values())
    for split in SPLITS:
        for task in tasks(split):
            start, events = read(task)
            terms = [start] + [number for _, operator, number in events if operator in "+-"]
            assert all((100 <= n < 1000) if split == "larger_numbers" else (10 <= n < 100) for n in terms)
            asked = re.sub(r" \w+ only has \w+\.", "", task.question)
            unseen = set(UNSEEN_NAMES + UNSEEN_ITEMS) & set(re.findall(r"\w+", asked))
            assert len(unseen) == (2 if split == "unseen_words" else 0)
            usual = re.match(r"\w+ has \d+ \w+; on ", task.question) and "does she have then?" in task.question
            assert bool(usual) == (split != "other_phrasings")
    starts = {phrasing.split(" {")[0] for phrasing in OTHER_PHRASINGS if not phrasing.startswith("{")}
    assert all(any(task.question.startswith(start) for task in tasks("other_phrasings")) for start in starts)


def test_unseen_words_are_remarked_on_in_training():
    words = {word for task in tasks("train", count=1_000) for word in re.findall(r"\w+", task.question)}
    assert set(UNSEEN_NAMES + UNSEEN_ITEMS) <= words
    assert not set(NAMES) & set(UNSEEN_NAMES) and not set(ITEMS) & set(UNSEEN_ITEMS)


def demonstrate(env, index, rng=None):
    """(return, last info) of the scripted expert, or with `rng` of the sloppy demonstrator."""
    env.reset(seed=0, options={"task_index": index})
    total = 0.0
    for text in env.demonstration(rng):
        ids = env.tokenizer.encode(text + env.dialect.end_of_turn)
        _, reward, terminated, truncated, info = env.step(np.asarray(ids, np.int32))
        total += reward
    assert terminated and not truncated
    return total, info


@pytest.mark.parametrize("split", SPLITS)
def test_the_expert_solves_every_task(split):
    env = ArithmeticWorldEnv(split=split)
    for index in range(TASKS):
        total, info = demonstrate(env, index)
        assert info["is_success"] and info["answer"] == env.task.answers[0]
        assert info["metrics"] == {"em": 1.0, "step_recall": 1.0}
        assert total == pytest.approx(1.3)  # every step pays its share of 0.3


@pytest.mark.parametrize("split", SPLITS)
def test_the_sloppy_demonstrator_mostly_fails(split):
    """It is right by luck only. Its format is faultless."""
    env = ArithmeticWorldEnv(split=split)
    rng = np.random.default_rng(0)
    infos = [demonstrate(env, index, rng)[1] for index in range(TASKS)]
    assert np.mean([info["is_success"] for info in infos]) < 0.05
    assert all("outcome/correct" in info["reward_terms"] for info in infos)


def test_the_answer_stands_nowhere_in_the_question():
    drawn = tasks("train", count=1_000)
    assert sum(task.answers[0] in re.findall(r"\d+", task.question) for task in drawn) < 40
    assert len({task.answers[0] for task in drawn}) > 300


@pytest.mark.parametrize(
    ("answer", "success"), [("{}", True), ("{}.0", True), (" {} ", True), ("{} shells", False), ("-{}", False)]
)
def test_equality_is_that_of_numbers(answer, success, say):
    env = ArithmeticWorldEnv()
    env.reset(options={"task_index": 0})
    info = say(env, f"<answer>{answer.format(env.task.answers[0])}</answer>")[4]
    assert info["is_success"] == success and info["metrics"] == {"em": float(success), "step_recall": 0.0}


@pytest.mark.parametrize("answer", ["1,0{}", "nan", "inf", "9" * 5_000, "1e999", "", "\ud800", "٧"])
def test_an_answer_that_is_no_number_is_wrong(answer, say):
    env = ArithmeticWorldEnv()
    env.reset(seed=0)
    assert not say(env, f"<answer>{answer}</answer>")[4]["is_success"]


def test_rewards_have_names(say):
    env = ArithmeticWorldEnv()
    env.reset(options={"task_index": 0})
    (_, first), *_ = env.task.metadata["steps"]
    call = env.dialect.tool_call("calculator", {"expression": first})
    share = 0.3 / len(env.task.metadata["steps"])
    assert say(env, call)[4]["reward_terms"] == {"process/step_found": pytest.approx(share)}
    assert say(env, call)[4]["reward_terms"] == {"process/repeated_call": -0.05}  # found once is found
    terms = say(env, "<answer>0</answer>")[4]["reward_terms"]
    assert terms == {"outcome/correct": 0.0, "process/unused_result": -0.04}  # neither result was used


@pytest.fixture
def own(monkeypatch):
    """An environment of one task: its question and its steps, "day expression value"."""

    def make(question, *steps):
        values = [int(step.rsplit(" ", 1)[1]) for step in steps]
        days = [step.rsplit(" ", 1)[0].split(" ", 1) for step in steps]
        env = ArithmeticWorldEnv(max_turns=20)
        task = Task("own", question, [str(values[-1])], {"steps": days, "values": values})
        monkeypatch.setattr(env, "make_task", lambda index: task)
        env.reset(options={"task_index": 0})
        return env

    return make


def paid(env, say, expression):
    terms = say(env, env.dialect.tool_call("calculator", {"expression": expression}))[4]["reward_terms"]
    return terms.get("process/step_found", 0.0)


def test_equal_steps_are_one(own, say):
    env = own("Ada has 23; she buys 7, 9 and sells 9.", "Monday 23 + 7 30", "Tuesday 30 + 9 39", "Sunday 39 - 9 30")
    assert [paid(env, say, e) for e in ("23 + 7", "40 - 10", "30 + 9", "39 - 9")] == pytest.approx([0.15, 0, 0.15, 0])
    assert say(env, "<answer>30</answer>")[4]["metrics"] == {"em": 1.0, "step_recall": 1.0}


@pytest.mark.parametrize("expression", ["46", "46 + 0", "46.0 * 1", "1 * 46", "-1 * -46", "45.9 + .1 + 46 - 46"])
def test_a_result_that_is_in_the_call_is_not_found(own, say, expression):
    env = own("Ada has 23; she swaps each for 2, and sells 5.", "Monday 23 * 2 46", "Tuesday 46 - 5 41")
    assert paid(env, say, expression) == 0
    assert paid(env, say, "23 * 2") == pytest.approx(0.15)


def test_a_result_that_is_in_the_question_is_no_step(own, say):
    env = own("Ada has 23; she buys 23, and sells 23.", "Monday 23 + 23 46", "Tuesday 46 - 23 23")
    assert [paid(env, say, e) for e in ("46 / 2", "20 + 3", "23 + 23")] == pytest.approx([0, 0, 0.3])
    env = own("Ada has 20; she buys 20, 40 of them.", "Monday 20 + 20 40")
    assert paid(env, say, "20 + 20") == 0 and say(env, "<answer>40</answer>")[4]["metrics"] == {"em": 1.0}


def test_only_the_first_results_find_a_step(own, say):
    env = own("Ada has 23; she buys 7, and sells 5.", "Monday 23 + 7 30", "Tuesday 30 - 5 25")
    assert [paid(env, say, f"{n} + 1") for n in (50, 51, 52, 53, 29)] == [0] * 5


def test_a_number_named_in_a_thought_is_unused(say):
    env = ArithmeticWorldEnv()
    env.reset(options={"task_index": 0})
    (_, first), *_ = env.task.metadata["steps"]
    say(env, env.dialect.tool_call("calculator", {"expression": first}))
    said = env.messages[-1]["content"]
    terms = say(env, f"<think>{said}</think>{said}<answer>0</answer>")[4]["reward_terms"]
    assert terms["process/unused_result"] == -0.02


def test_everything_in_one_calculation_is_fine(say):
    env = ArithmeticWorldEnv(max_turns=2)
    env.reset(options={"task_index": 0})
    whole = env.task.metadata["steps"][0][1]
    for _, step in env.task.metadata["steps"][1:]:
        _, operator, number = step.split()
        whole = f"({whole}) {operator} {number}"
    info = say(env, env.dialect.tool_call("calculator", {"expression": whole}))[4]
    assert "process/step_found" in info["reward_terms"]
    assert say(env, f"<answer>{env.messages[-1]['content']}</answer>")[4]["is_success"]


def test_the_vocabulary_covers_the_worlds():
    words = set(ArithmeticWorldEnv.vocabulary())
    assert words >= set(NAMES + UNSEEN_NAMES + ITEMS + UNSEEN_ITEMS + DAYS) | set("0123456789")


def test_a_snapshot_branches_an_episode(say):
    env, other = ArithmeticWorldEnv(), ArithmeticWorldEnv()
    env.reset(options={"task_index": 3})
    texts = env.demonstration()
    say(env, texts[0])
    state = env.get_state()
    say(env, "<answer>0</answer>")
    other.set_state(state)
    for text in texts[1:]:
        info = say(other, text)[4]
    assert info["is_success"] and info["metrics"]["step_recall"] == 1.0
