"""ShopWorld: a shop that is what it says, agents of known quality, and no way to earn but to buy what fits."""

import itertools
import json
import os
import pickle
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest

import agent_r1
from agent_r1.tasks.shop_world import ShopWorldEnv
from agent_r1.tasks.shop_world.catalogue import (
    ATTRIBUTES,
    HITS,
    NUM_FAMILIES,
    NUM_TASKS,
    OPTIONS,
    OTHER_PHRASINGS,
    TYPES,
    UNSEEN_TYPES,
    WORDING,
    brands,
    generate_task,
    generated_shop,
)
from agent_r1.tasks.shop_world.reward import FUZZY, normalize_color, purchase_score, token_set_ratio
from agent_r1.validation import probes
from agent_r1_tools import run_tool
from agent_r1_tools.search.bm25 import stems

SPLITS = list(ShopWorldEnv.splits)
SHOP = generated_shop(0)
WORDS = [*TYPES, *ATTRIBUTES, *OPTIONS, *itertools.chain(*OPTIONS.values())]


def tasks(split="train", seed=0, count=200):
    return [generate_task(seed, split, index) for index in range(count)]


def call(env, name, **arguments):
    """One call, one turn: what `step` gives."""
    text = env.dialect.tool_call(name, arguments) + env.dialect.end_of_turn
    return env.step(np.asarray(env.tokenizer.encode(text), np.int32))


def read(env, name, **arguments):
    """What a call shows."""
    call(env, name, **arguments)
    return env.messages[-1]["content"]


def play(env, index, rng=None, teacher=None):
    """(return, turns, last info) of a scripted agent."""
    env.reset(seed=0, options={"task_index": index})
    texts, total = env.demonstration(rng, teacher), 0.0
    for text in texts:
        span = env.tokenizer.encode(text + env.dialect.end_of_turn)
        _, reward, terminated, truncated, info = env.step(np.asarray(span, np.int32))
        total += reward
    assert terminated and not truncated
    return total, len(texts), info


@pytest.fixture
def env():
    made = ShopWorldEnv()
    made.reset(options={"task_index": 0})
    return made


# ---------------------------------------------------------------------- the shop and its tasks


def test_the_shop():
    products = SHOP.products
    assert len(products) == 4_320 == len(SHOP.by_id) and len(brands()) == 432 == len(set(brands()))
    assert {sum(product.name == kind for product in products) for kind in TYPES} == {108}
    for product in products:
        assert len(set(product.attributes)) == 4 and set(product.attributes) <= set(ATTRIBUTES)
        assert len(product.options) == 2 and 10 <= product.price <= 79
        assert all(len(set(values)) == 3 and set(values) <= set(OPTIONS[k]) for k, values in product.options.items())
    assert SHOP is generated_shop(0) and generated_shop(1).products[0] != products[0]
    assert set(UNSEEN_TYPES) <= set(TYPES) and len(UNSEEN_TYPES) == 8


def test_no_word_of_the_shop_passes_for_another():
    """Neither to WebShop's fuzzy judge nor to the search engine."""
    assert len(set(WORDS)) == len(WORDS)
    values = [*ATTRIBUTES, *itertools.chain(*OPTIONS.values())]
    for one, other in itertools.combinations(values, 2):
        assert token_set_ratio(one, other) <= FUZZY and one not in other and other not in one
        assert one in ATTRIBUTES or other in ATTRIBUTES or normalize_color(one) != normalize_color(other)
    assert len({stems(word) for word in WORDS}) == len(WORDS) and () not in {stems(word) for word in WORDS}


def test_customers_ask_for_what_tells_a_product_from_its_family():
    """So that others are as good but for one word."""
    assert len(SHOP.wanted) == 3 * NUM_FAMILIES
    for task in tasks():
        goal = task.metadata["goal"]
        lacks = [
            set(goal["attributes"] + goal["options"]).difference(other.attributes, *other.options.values())
            for other in SHOP.products
            if other.name == goal["name"]
        ]
        assert sum(not lacking for lacking in lacks) >= 2 and sum(len(lacking) == 1 for lacking in lacks) >= 2


@pytest.mark.parametrize(("trick", "most"), [("cheapest", 0.68), ("first_result", 0.58)])
def test_tricks_often_fail(env, trick, most):
    probe = probes.shortcuts(env)[trick]
    assert np.mean([probes.play(env, index, probe).success for index in range(300)]) < most


@pytest.mark.parametrize("split", SPLITS)
def test_tasks_are_what_the_split_says(split):
    for task in tasks(split):
        goal = task.metadata["goal"]
        product = SHOP.by_id[goal["asin"].lower()]
        more = split == "more_constraints"
        assert product in SHOP.wanted
        assert len(goal["attributes"]) == (3 if more else 2)
        assert len(goal["options"]) in ({2} if more else {1, 2})
        assert set(goal["attributes"]) <= set(product.attributes) and product.price < goal["price_upper"]
        assert (product.name in UNSEEN_TYPES) == (split == "unseen_types")
        assert task.question.startswith(WORDING.partition("{")[0]) == (split != "other_phrasings")
        for word in [product.name, *goal["attributes"], *goal["options"], str(int(goal["price_upper"]))]:
            assert word in task.question
        assert task.metadata["optimal_turns"] == 3 + len(goal["options"])
        json.dumps(task.metadata)
    assert len({task.question for task in tasks(split)}) > 190
    others = {task.question for other in SPLITS if other != split for task in tasks(other)}
    assert len({task.question for task in tasks(split)} & others) < 3


def test_unseen_types_are_only_remarked_on():
    """And all of them are, so that they are known as words."""
    remarked = set()
    for split in ("train", "validation", "test"):
        for task in tasks(split):
            asked, _, remark = task.question.partition(" dollars.")
            assert not set(UNSEEN_TYPES) & {*asked.replace(":", "").replace(",", "").split()}
            remarked |= {*remark.rstrip(".").split()} & {*TYPES}
    assert remarked == set(UNSEEN_TYPES)
    for task in tasks("unseen_types"):
        assert task.metadata["goal"]["query"] not in task.question.partition(" dollars.")[2].rstrip(".").split()


def test_all_other_phrasings_occur():
    questions = [task.question for task in tasks("other_phrasings")]
    assert all(any(q.startswith(w.partition("{")[0]) for q in questions) for w in OTHER_PHRASINGS)


def test_sizes_and_seeds():
    for split in SPLITS:
        env = ShopWorldEnv(split=split)
        assert env.num_tasks == (1_000_000 if split == "train" else 10_000) == NUM_TASKS.get(split, NUM_TASKS["test"])
        env.reset(options={"task_index": env.num_tasks - 1})
    other = ShopWorldEnv(world_seed=3)
    other.reset(options={"task_index": 5})
    assert other.task == generate_task(3, "train", 5) != generate_task(0, "train", 5)


def test_the_same_world_in_another_process_and_hash_seed():
    code = (
        "import json\n"
        "from agent_r1.tasks.shop_world.catalogue import generate_task, generated_shop\n"
        "shop = generated_shop(0)\n"
        "found = [product.asin for product in shop.search('red soft lamp shirt')]\n"
        "print(json.dumps([generate_task(0, 'test', 7).metadata, found]))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    mine = [generate_task(0, "test", 7).metadata, [p.asin for p in SHOP.search("red soft lamp shirt")]]
    assert json.loads(done.stdout) == json.loads(json.dumps(mine))


def test_the_vocabulary_covers_what_is_shown(env):
    known = set(ShopWorldEnv.vocabulary())
    assert {word for word in known if word.isdigit()} == set("0123456789") and len(known) < 700
    env.reset(options={"task_index": 0})
    shown = read(env, "search", query=env.task.metadata["search"])
    shown += "\n" + read(env, "open", item=env.task.metadata["item"])
    letters = "".join(c if c.isalpha() else " " for c in f"{shown}\n{env.task.question}").split()
    assert set(letters) - known <= {*"Page of I need one at most dollars have a already".split()}


# ---------------------------------------------------------------------- agents


@pytest.mark.parametrize("split", SPLITS)
def test_the_expert_buys_what_fits_in_as_many_turns_as_it_takes(split):
    env = ShopWorldEnv(split=split)
    for index in range(200 if split == "train" else 60):
        total, turns, info = play(env, index)
        assert total == 1.0 and info["is_success"] and turns == env.task.metadata["optimal_turns"] <= 5
        assert info["metrics"] == {"score": 1, "type": 1, "attribute": 1, "option": 1, "price": 1}


@pytest.mark.parametrize("page_size", [1, 20])
def test_the_expert_turns_pages(page_size):
    env = ShopWorldEnv(page_size=page_size)
    assert all(play(env, index)[2]["is_success"] for index in range(100))


@pytest.mark.parametrize("share", [50, *(pytest.param(share, marks=pytest.mark.slow) for share in (75, 25))])
def test_fallible_agents_succeed_as_often_as_they_say(share):
    env = ShopWorldEnv(max_context_tokens=4_096)
    right = [
        play(env, index, np.random.default_rng([share, index]), f"fallible_{share}")[2]["is_success"]
        for index in range(1_000)
    ]
    assert abs(np.mean(right) - share / 100) <= 0.03


def test_the_sloppy_agent_explores_and_mostly_fails():
    env = ShopWorldEnv()
    played = [play(env, index, np.random.default_rng([0, index])) for index in range(400)]
    assert 0.01 < np.mean([info["is_success"] for *_, info in played]) < 0.1
    assert 0.35 < np.mean([total for total, *_ in played]) < 0.5
    assert {turns for _, turns, _ in played} == {3, 4, 5}
    assert all(call["ok"] for *_, info in played for call in info["tool_calls"])


# ---------------------------------------------------------------------- tools and rewards


def test_results_come_in_pages(env):
    found = SHOP.search("red shirt")
    assert len(found) == HITS
    first, second = read(env, "search", query="red shirt"), read(env, "search", query="red shirt", page=2)
    rows = [f"${product.price:.0f} {product.asin}: {product.name}" for product in found]
    assert first.splitlines() == [*rows[:4], "Page 1 of 13."] and second.splitlines() == [*rows[4:8], "Page 2 of 13."]
    assert read(env, "search", query="red shirt", page=13).splitlines() == [*rows[48:], "Page 13 of 13."]
    for page in (0, -1, 14, 10**400):
        assert read(env, "search", query="red shirt", page=page) == "There is no such page; the results have 13."
    assert read(env, "search", query="qqq") == "No products found."


def test_only_what_a_search_showed_can_be_opened(env):
    found = SHOP.search("red shirt")
    refusal = "No results so far have a product with this id."
    assert read(env, "open", item=found[0].asin) == refusal
    read(env, "search", query="red shirt")
    assert read(env, "open", item=found[4].asin) == refusal == read(env, "open", item="nothing")
    product = found[3]
    assert read(env, "open", item=f" {product.asin.lower()} ").splitlines() == [
        f"${product.price:.0f} {product.asin}: shirt",
        ", ".join(product.attributes),
        *(f"{kind}: {', '.join(values)}" for kind, values in product.options.items()),
    ]
    read(env, "search", query="blue lamp")
    assert read(env, "open", item=product.asin).startswith("$")  # it was shown before


def test_options_are_those_of_the_open_product_and_lost_with_it(env):
    assert read(env, "choose", value="red") == "Open a product first." == read(env, "buy")
    read(env, "search", query=env.task.metadata["search"])
    read(env, "open", item=env.task.metadata["item"])
    product = SHOP.by_id[env.task.metadata["item"].lower()]
    kind, values = next(iter(product.options.items()))
    assert read(env, "choose", value=values[0].upper()) == f"Chosen: {kind} {values[0]}."
    read(env, "choose", value=values[1])
    assert env.memory["chosen"] == {kind: values[1]}  # another value of the same option takes its place
    said = read(env, "choose", value="gigantic")
    assert said.splitlines()[0] == "It has no such option." and f"{kind}: {', '.join(values)}" in said
    read(env, "open", item=product.asin)
    assert "chosen" not in env.memory
    read(env, "search", query="lamp")
    assert read(env, "buy") == "Open a product first."  # as in WebShop a search leaves the product


def test_a_purchase_pays_webshops_score(env):
    for index in range(60):
        env.reset(options={"task_index": index})
        query = env.task.metadata["goal"]["query"]
        read(env, "search", query=query)
        product = SHOP.search(query)[index % 4]
        read(env, "open", item=product.asin)
        _, reward, terminated, truncated, info = call(env, "buy")
        score = purchase_score(product, env.goal, {})
        assert terminated and not truncated and reward == score.total == info["metrics"]["score"]
        assert info["reward_terms"] == {"outcome/score": reward} and not info["is_success"] and info["answer"] is None
        assert score.option == 0 and score.type == 1


@pytest.mark.parametrize("text", ["<answer>Rufem0</answer>", "<answer>{answer}</answer>"])
def test_an_answer_buys_nothing(env, say, text):
    _, reward, terminated, _, info = say(env, text.format(answer=env.task.answers[0]))
    assert terminated and reward == 0.0 and not info["is_success"]


def test_who_never_buys_gets_nothing_and_calls_cost_what_they_say(env, say):
    total = 0.0
    while True:
        _, reward, terminated, truncated, info = say(env, "Which one?")
        total += reward
        if terminated or truncated:
            break
    assert truncated and info["truncation_reason"] == "turns" and info["turn"] == 10 and total == 0.0
    env.reset(options={"task_index": 0})
    assert call(env, "open", item="x")[1] == -0.05 and say(env, "<tool_call>\n{oops\n</tool_call>")[1] == -0.1
    read(env, "search", query=env.task.metadata["search"])
    assert call(env, "search", query=env.task.metadata["search"])[1] == 0.0  # back to the results costs nothing
    read(env, "open", item=env.task.metadata["item"])
    for value in env.task.metadata["goal"]["options"]:
        call(env, "choose", value=value)
    assert call(env, "buy")[1] == 1.0  # the score is WebShop's, whatever the format was


def test_nothing_is_earned_on_the_way():
    """200 turns of repeated and alternated actions."""
    env = ShopWorldEnv(max_turns=300, max_context_tokens=300_000)
    for period in (1, 2, 3, 4):
        env.reset(options={"task_index": period})
        moves = [
            ("search", {"query": env.task.metadata["search"]}),
            ("open", {"item": env.task.metadata["item"]}),
            *(("choose", {"value": value}) for value in env.task.metadata["goal"]["options"]),
        ]
        for turn in range(200):
            name, arguments = moves[turn % min(period, len(moves))]
            assert call(env, name, **arguments)[1] <= 0.0


def test_calls_after_a_purchase_do_not_count(env):
    product = SHOP.search("soft chair")[0]
    texts = [
        env.dialect.tool_call("search", {"query": "soft chair"}),
        env.dialect.tool_call("open", {"item": product.asin}),
        env.dialect.tool_call("buy", {}),
        env.dialect.tool_call("open", {"item": "nothing"}),
    ]
    _, reward, terminated, _, info = env.step(np.asarray(env.tokenizer.encode("\n".join(texts))))
    assert terminated and set(info["reward_terms"]) == {"outcome/score"} and len(info["tool_calls"]) == 3


def test_an_episode_branches_exactly(env):
    read(env, "search", query=env.task.metadata["search"])
    read(env, "open", item=env.task.metadata["item"])
    read(env, "choose", value=env.task.metadata["goal"]["options"][0])
    state, other = pickle.loads(pickle.dumps(env.get_state())), ShopWorldEnv()
    ends = []
    for branch in (env, other):
        branch.set_state(state)
        read(branch, "search", query="red")  # leaves the product
        branch.set_state(state)
        for value in branch.task.metadata["goal"]["options"][1:]:
            call(branch, "choose", value=value)
        ends.append(call(branch, "buy"))
    assert np.array_equal(ends[0][0], ends[1][0]) and ends[0][1:] == ends[1][1:] and ends[0][1] == 1.0


HOSTILE = [
    "", " ", "x" * 100_000, "0", "-1", "\0", "\ud800", "'; DROP TABLE items; --", "../../etc/passwd", "B" * 9, "١",
    '"', "\\", "<|im_end|>", "</tool_response>", "{}", "%s%n", "\N{GRINNING FACE}" * 5_000, "a " * 50_000, "$10", "*",
]  # fmt: skip


def test_whatever_is_written_gets_a_readable_result(env):
    env = ShopWorldEnv(max_turns=500, max_context_tokens=200_000)
    env.reset(options={"task_index": 0})
    start = time.process_time()
    for opened in (False, True):
        for name, key in (("search", "query"), ("open", "item"), ("choose", "value")):
            for value in [*HOSTILE, 3, None, [], {}, True, 10**300]:
                read(env, "search", query="red")
                if opened:
                    read(env, "open", item=SHOP.search("red")[0].asin)
                tool = env.tools[name]
                result = run_tool(tool, {key: value})
                assert result.content and len(result.content) < 500 and result.fault is None
        for page in ("2", 1.5, None, [], 10**4_000, -(10**4_000), True):
            assert run_tool(env.tools["search"], {"query": "red", "page": page}).content
        env.reset(options={"task_index": 0})
    assert time.process_time() - start < 20


def test_without_the_search_library_no_shop_is_made(monkeypatch):
    def none():
        raise ImportError('pip install "agent-r1[search]"')

    monkeypatch.setattr("agent_r1_tools.search.bm25._libraries", none)
    with pytest.raises(ImportError, match="search"):
        ShopWorldEnv()


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="page_size must be at least 1"):
        ShopWorldEnv(page_size=0)
    with pytest.raises(ValueError, match="'corpus'; it has world_seed, data_dir, human_goals, page_size, split, nouns"):
        gym.make("AgentR1/ShopWorld-v0", corpus="own")


# ---------------------------------------------------------------------- the tiny policy


def test_an_episode_is_short_for_the_tiny_policy():
    """Every word is a token, also those of types that no training task asks for."""
    folder = agent_r1.tiny_policy("AgentR1/ShopWorld-v0")
    unknown = set()
    for split in ("train", "unseen_types"):
        env = ShopWorldEnv(tokenizer=folder, split=split)
        for index in range(30):
            env.reset(options={"task_index": index})
            for text in env.demonstration():
                state, *_ = env.step(probes.span(env, text))
            assert len(state) <= 250
            pieces = {env.tokenizer.decode([token]) for token in state.tolist()}
            unknown |= {piece for piece in pieces if len(piece) == 1 and piece.isalpha()}
    assert not unknown
