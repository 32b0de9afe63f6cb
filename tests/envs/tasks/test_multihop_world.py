"""MultihopWorld: worlds that are what they say, that its expert solves, and that a shortcut does not."""

import json

import gymnasium as gym
import numpy as np
import pytest

from agent_r1.tasks.multihop_world import (
    NUM_TASKS,
    OTHER_PHRASINGS,
    PHRASING,
    RELATIONS,
    UNSEEN_RELATIONS,
    MultihopWorldEnv,
    expert,
    generate_task,
    names,
)
from agent_r1_tools import run_tool

SPLITS = list(MultihopWorldEnv.splits)
SEEN, UNSEEN = map(set, names())
TASKS = 300


def tasks(split, seed=0, count=TASKS):
    return [generate_task(seed, split, index) for index in range(count)]


def facts(task):
    """{(entity, relation): value} as the passages state them, read off the text."""
    found = {}
    for title, text in task.metadata["passages"]:
        subject, _, rest = text.partition(" has ")
        assert subject == title
        for fact in rest.partition(".")[0].split(", "):
            relation, value = fact.split(" ")
            assert (title, relation) not in found  # one value for each relation: answers are unique
            found[title, relation] = value
    return found


def remarks(task):
    """The words of interest in what passages say beside their facts ("Once met Kelvon.", "Once a jester too.")."""
    said = " ".join(text.partition(".")[2] for _, text in task.metadata["passages"])
    return set(said.replace(".", "").split()) - {"Once", "met", "a", "too"}


@pytest.mark.parametrize("split", SPLITS)
def test_a_task_is_a_function_of_seed_split_and_index(split):
    drawn = tasks(split, count=50)
    assert drawn == tasks(split, count=50)
    env = gym.make("AgentR1/MultihopWorld-v0", split=split).unwrapped
    for index in (49, 3, 3):
        env.reset(seed=index, options={"task_index": index})  # the seed of reset draws no world
        assert env.task == drawn[index]
    others = [tasks(split, seed=1, count=50)] + [tasks(other, count=50) for other in SPLITS if other != split]
    for other in others:
        assert not {task.question for task in drawn} & {task.question for task in other}
    assert len({task.id for task in drawn}) == 50 and len({task.question for task in drawn}) == 50


def test_world_seed_is_an_argument():
    env = gym.make("AgentR1/MultihopWorld-v0", world_seed=7).unwrapped
    env.reset(options={"task_index": 12})
    assert env.task == generate_task(7, "train", 12) != generate_task(0, "train", 12)


def test_sizes():
    for split in SPLITS:
        env = MultihopWorldEnv(split=split)
        assert env.num_tasks == (1_000_000 if split == "train" else 10_000) == NUM_TASKS.get(split, NUM_TASKS["test"])
        env.reset(options={"task_index": env.num_tasks - 1})


@pytest.mark.parametrize("split", SPLITS)
def test_the_question_has_one_answer_and_the_passages_say_it(split):
    for task in tasks(split):
        data, known = task.metadata, facts(task)
        entity = data["chain"][0]
        for relation, following in zip(data["relations"], data["chain"][1:], strict=True):
            entity = known[entity, relation]
            assert entity == following
        assert task.answers == [entity]
        assert data["supports"] == data["chain"][:-1] and len(set(data["chain"])) == data["hops"] + 1
        titles = [title for title, _ in data["passages"]]
        assert len(set(titles)) == len(titles) and set(data["chain"]) <= set(titles)
        assert set(known.values()) <= set(titles)  # everyone who is mentioned can be looked up
        assert data["chain"][0] in task.question
        asked = [word.strip("?.:,") for word in task.question.split()]
        assert [word for word in asked if word in data["relations"]] == data["relations"][::-1]


@pytest.mark.parametrize("split", SPLITS)
def test_the_relations_of_the_question_stand_in_other_passages_too(split):
    """A relation alone does not name a passage: what was found has to be used."""
    distractors = 0
    for task in tasks(split, count=100):
        on_chain = set(zip(task.metadata["supports"], task.metadata["relations"], strict=True))
        distractors += any(r in task.metadata["relations"] for e, r in facts(task) if (e, r) not in on_chain)
    assert distractors > 95


def test_unseen_words_are_only_remarked_on_in_training_and_test():
    assert not SEEN & UNSEEN and not set(RELATIONS) & set(UNSEEN_RELATIONS) and not SEEN & set(RELATIONS)
    assert (len(SEEN), len(UNSEEN)) == (1_000, 200)
    remarked = set()
    for split in ("train", "test"):
        for task in tasks(split, count=1_000):
            for (entity, relation), value in facts(task).items():
                assert entity in SEEN and value in SEEN and relation in RELATIONS
            remarked |= remarks(task)
            assert not (UNSEEN | set(UNSEEN_RELATIONS)) & set(task.question.replace("?", "").split())
    assert remarked <= UNSEEN | set(UNSEEN_RELATIONS)
    assert set(UNSEEN_RELATIONS) <= remarked and len(remarked & UNSEEN) == len(UNSEEN)  # all of them do occur


def test_variants_are_what_they_say():
    hops = {split: {task.metadata["hops"] for task in tasks(split)} for split in SPLITS}
    assert hops.pop("more_hops") == {4} and all(numbers == {2, 3} for numbers in hops.values())
    for split in SPLITS:
        for task in tasks(split):
            known = facts(task)
            people = {entity for entity, _ in known} | set(known.values())
            assert people <= (UNSEEN if split == "unseen_entities" else SEEN)
            relations = {relation for _, relation in known}
            assert relations <= set(UNSEEN_RELATIONS if split == "unseen_relations" else RELATIONS)
            wanted = " of the ".join(task.metadata["relations"][::-1])
            usual = PHRASING.format(chain=wanted, start=task.metadata["chain"][0])
            assert (task.question == usual) == (split != "other_phrasings")
    starts = {phrasing.partition("{")[0] for phrasing in OTHER_PHRASINGS}
    assert {start for start in starts for task in tasks("other_phrasings") if task.question.startswith(start)} == starts


def demonstrate(env, index, rng=None):
    """(return, last info) of the scripted expert, or with `rng` of the sloppy worker."""
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
    env = MultihopWorldEnv(split=split)
    for index in range(TASKS):
        total, info = demonstrate(env, index)
        assert info["is_success"] and info["answer"] == env.task.answers[0]
        assert info["metrics"] == {"em": 1.0, "f1": 1.0, "support_recall": 1.0, "tool_bugs": 0.0}
        assert total == pytest.approx(1.3)  # every support pays its share of 0.3


@pytest.mark.parametrize("split", SPLITS)
def test_the_sloppy_worker_mostly_fails(split):
    """It is right by luck only, and never has seen all of the evidence. Its format is faultless."""
    env = MultihopWorldEnv(split=split)
    rng = np.random.default_rng(0)
    infos = [demonstrate(env, index, rng)[1] for index in range(TASKS)]
    assert np.mean([info["is_success"] for info in infos]) < 0.1
    assert all(info["metrics"]["support_recall"] <= 0.5 for info in infos)
    assert all("outcome/exact_match" in info["reward_terms"] for info in infos)


@pytest.mark.parametrize("split", SPLITS)
def test_the_experts_query_finds_the_support_first(split):
    env = MultihopWorldEnv(split=split)
    for task in tasks(split, count=1_500 if split == "unseen_relations" else TASKS):
        retriever = env.own_retriever(task)
        for (_, kind, query), support in zip(expert(task), task.metadata["supports"], strict=False):
            (hits,) = retriever.search([query], 2)
            assert kind == "search" and hits[0][0].title == support
            assert len(hits) == 1 or hits[0][1] > hits[1][1]  # not by a tie


def test_guessing_needs_the_whole_chain():
    """The answer is no constant, and neither the first passage's facts nor the question give it away."""
    drawn = tasks("train", count=1_000)
    assert len({task.answers[0] for task in drawn}) > 500
    near = sum(task.answers[0] in dict(task.metadata["passages"])[task.metadata["chain"][0]] for task in drawn)
    assert near < 250 and not any(task.answers[0] in task.question for task in drawn)


def test_the_vocabulary_covers_the_worlds():
    words = set(MultihopWorldEnv.vocabulary())
    assert words == SEEN | UNSEEN | set(RELATIONS) | set(UNSEEN_RELATIONS)
    for split in SPLITS:
        for task in tasks(split, count=50):
            assert {word for fact in facts(task).items() for word in (*fact[0], fact[1])} | remarks(task) <= words


def test_a_wider_search_and_a_longer_episode():
    env = MultihopWorldEnv(split="more_hops", top_k=3, max_turns=4)
    env.reset(seed=0, options={"task_index": 0})
    texts = env.demonstration()
    assert len(texts) == 5  # four hops and the answer: one more than there are turns
    for text in texts[:4]:
        *_, terminated, truncated, info = env.step(np.asarray(env.tokenizer.encode(text)))
    assert truncated and not terminated and info["metrics"]["support_recall"] == 1.0
    assert "[3] " in env.messages[-1]["content"]


def test_a_corpus_from_elsewhere_is_what_is_searched(tmp_path):
    title, text = generate_task(0, "train", 1).metadata["passages"][0]
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"title": title, "text": text}))
    env = MultihopWorldEnv(corpus=str(path))
    env.reset(options={"task_index": 0})
    assert run_tool(env.tools["search"], {"query": title}).data["titles"] == [title]
    with pytest.raises(ValueError, match="no corpus 'pooled'"):
        MultihopWorldEnv(corpus="pooled")
