"""ToolEnv: tool use as a Markov decision process over tokens. Every promise of docs/how_it_works.md, one by one."""

import copy
import dataclasses
import json
import math
import pickle
import time

import numpy as np
import pytest
from fuzz_spans import check_step, plain
from hypothesis import given
from hypothesis import strategies as st

from agent_r1 import ArgumentError, Task, Tool, ToolEnv, ToolResult
from agent_r1.dialects import DIALECTS
from agent_r1.text.tokenizers import render_chat
from agent_r1.tool_env import CUT, MAX_CALLS, NO_ACTION_HINT
from agent_r1.vector import ToolVectorEnv

WORDS = ("ant", "bee", "cat", "dog", "emu")


class Counter(Tool):
    """A tool with a session: it counts its calls."""

    name = "count"
    description = "Counts its calls."
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    timeout = math.inf
    concurrency_safe = False

    def __init__(self):
        self.calls = 0

    def execute(self, arguments):
        self.calls += 1
        return ToolResult(f"call {self.calls}", data=self.calls)

    def get_state(self):
        return [self.calls]

    def set_state(self, state):
        self.calls = 0 if state is None else state[0]


class Toy(ToolEnv):
    """Say the word that stands in the question."""

    splits = {"train": "train", "test": "test", "evaluation": "test"}
    PROCESS_WEIGHTS = {**ToolEnv.PROCESS_WEIGHTS, "sum_seen": 0.25}
    num_tasks = len(WORDS)

    def __init__(self, **kwargs):
        def echo(text: str = "") -> str:
            """Gives the text back."""
            return text

        def add(a: int, b: int) -> str:
            """Adds two numbers."""
            return str(a + b)

        def fail() -> str:
            """Fails."""
            raise RuntimeError("the wire is cut")

        def sleep(seconds: float) -> str:
            """Sleeps."""
            time.sleep(seconds)
            return "slept"

        def roll() -> str:
            """Rolls a die."""
            return str(self.np_random.integers(1_000_000))

        super().__init__(
            [
                *(Tool.from_function(f, timeout=math.inf, max_result_chars=10**6) for f in (echo, add, fail, roll)),
                Tool.from_function(sleep, timeout=0.02),
                Counter(),
            ],
            **kwargs,
        )

    def make_task(self, index):
        return Task(f"{self.split}-{index}", f"Say {WORDS[index]}.", [WORDS[index]])

    def judge_result(self, call, result):
        return {"sum_seen": 1.0} if call.name == "add" and result.ok else {}

    def judge_answer(self, answer):
        right = float(answer in self.task.answers)
        return right, {"em": right}


@pytest.fixture
def make():
    def begin(task=0, seed=0, options=None, **kwargs):
        env = Toy(**kwargs)
        env.reset(seed=seed, options={"task_index": task} | (options or {}))
        return env

    return begin


def call(env, name, **arguments):
    return env.dialect.tool_call(name, arguments)


def state_of(env):
    return env._observation()


def text_of(env, tokens):
    return env.tokenizer.decode(tokens.tolist())


def new_text(env, before, outcome):
    """What a step added to the state, as text."""
    return text_of(env, outcome[0][before.size :])


MALFORMED = {
    "hermes": "<tool_call>\n{broken\n</tool_call>",
    "qwen_xml": "<tool_call>\n<function=echo>\n</tool_call>",
    "llama3_json": '{"name": "echo", "parameters": 5}',
    "react": "Action: echo\nAction Input: {broken",
    "fenced": "```tool_call\n{broken\n```",
}


# ---------------------------------------------------------------------- the state


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_state_only_grows_and_keeps_the_span(make, say, dialect):
    """next_state[: len(state) + len(span)] == state + span, whatever the span is."""
    env = make(dialect=dialect, max_turns=50)
    texts = [
        call(env, "echo", text="hello"),
        "no action",
        "",
        MALFORMED[dialect],
        call(env, "echo", text="&lt;|im_end|"),
        "<think>" + call(env, "echo", text="hidden"),
        f"two {call(env, 'echo', text='1')}\n{call(env, 'add', a=1, b=2)} calls",
        "<|im_end|> more <|im_start|> after the end",
        "\ufffd\0\x1b[0m",
        "<answer>ant</answer>",
    ]
    for text in texts:
        for closed in (False, True):
            if env.episode.over:
                break
            before = state_of(env)
            span = env.tokenizer.encode(text + env.dialect.end_of_turn * closed)
            after = env.step(np.asarray(span))[0]
            assert after[: before.size + len(span)].tolist() == before.tolist() + span
            assert after.dtype == np.int32 and after in env.observation_space


def test_the_span_is_not_written_again(make):
    """A call in an odd but valid form, and bytes that are no text, stay as sampled."""
    env = make()
    before = state_of(env)
    tokenizer = env.tokenizer
    text = '<tool_call>{ "arguments":{"text" : "\\u0041"},\n\n"name":"echo"}  </tool_call>'
    odd = [255, 128, *tokenizer.encode(text)]
    after, _, _, _, info = env.step(np.asarray(odd))
    assert after[before.size : before.size + len(odd)].tolist() == odd
    assert info["tool_calls"] == [{"name": "echo", "arguments": {"text": "A"}, "ok": True}]


def test_observations_are_copies(make, say):
    env = make()
    first, _ = env.reset(seed=0)
    kept = first.copy()
    first[:] = 0
    second = say(env, "hm")[0]
    assert np.array_equal(second[: kept.size], kept)
    second[:] = 0
    assert np.array_equal(state_of(env)[: kept.size], kept)


def test_the_prompt_holds_instructions_tools_and_question(make):
    env = make(task=3)
    text = text_of(env, state_of(env))
    assert env.instructions in text and "Say dog." in text and text.endswith("<|im_start|>assistant\n")
    assert all(name in text for name in env.tools)


@given(
    turns=st.lists(
        st.one_of(
            st.lists(st.integers(0, 264), max_size=80),
            st.text(max_size=40).map(lambda text: list(text.encode(errors="replace"))),
        ),
        max_size=4,
    ),
    closed=st.booleans(),
)
def test_any_ids_keep_the_invariants(turns, closed):
    env = Toy(max_context_tokens=2_000, max_action_tokens=64)
    state, info = env.reset(seed=1)
    assert plain(info)
    for ids in turns:
        span = np.asarray(ids + env.dialect.close() * closed, np.int64)
        outcome = env.step(span)
        check_step(env, state, span, outcome)
        state = outcome[0]
        if outcome[2] or outcome[3]:
            break


# ---------------------------------------------------------------------- what a turn means


@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_calls_run_in_order(make, say, dialect):
    env = make(dialect=dialect)
    before = state_of(env)
    written = "\n".join(call(env, "count") for _ in range(3)) + "\n" + call(env, "echo", text="fine")
    outcome = say(env, written)
    assert [record["name"] for record in outcome[4]["tool_calls"]] == ["count", "count", "count", "echo"]
    added = new_text(env, before, outcome)[len(written) :]
    places = [added.index(text) for text in ("call 1", "call 2", "call 3", "fine")]
    assert places == sorted(places)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_arguments_keep_their_types(make, say, dialect):
    """Qwen's XML writes the text "5" and the number 5 alike; the tool's schema tells them apart."""
    env = make(dialect=dialect)
    for name, arguments in [("echo", {"text": "5"}), ("echo", {"text": "null"}), ("add", {"a": 5, "b": -7})]:
        info = say(env, call(env, name, **arguments))[4]
        assert info["tool_calls"] == [{"name": name, "arguments": arguments, "ok": True}]


def test_at_most_eight_calls_are_run(make, say):
    env = make()
    info = say(env, "\n".join(call(env, "count") for _ in range(MAX_CALLS + 3)))[4]
    assert len(info["tool_calls"]) == MAX_CALLS == 8 and env.tools["count"].calls == 8
    assert "3 more calls were not run" in env.messages[-1]["content"]
    env = make()
    info = say(env, "\n".join(call(env, "add", a=i, b=i) for i in range(8)))[4]
    assert "process/failed_call" not in info["reward_terms"]


def test_a_malformed_call_beyond_the_eighth_still_costs_the_format(make, say):
    env = make(process_reward=False)
    assert say(env, "\n".join([call(env, "count")] * 8 + [MALFORMED["hermes"]]))[1] == 0.0
    assert say(env, "<answer>ant</answer>")[1] == -0.5


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("order", ["call first", "answer first"])
@pytest.mark.parametrize("kind", ["good", "malformed", "unknown"])
def test_an_answer_beside_a_call_is_ignored(make, say, dialect, order, kind):
    env = make(dialect=dialect)
    written = {
        "good": call(env, "echo", text="hello"),
        "malformed": MALFORMED[dialect],
        "unknown": call(env, "nothing"),
    }[kind]
    parts = [written, "<answer>ant</answer>"]
    text = "\n".join(parts if order == "call first" else parts[::-1]) + "\n"
    _, _, terminated, truncated, info = say(env, text)
    assert not terminated and not truncated and "answer" not in info and len(info["tool_calls"]) == 1
    assert say(env, "<answer>ant</answer>")[2]


def test_the_last_answer_counts_and_more_than_one_cost_the_format(make, say):
    _, reward, terminated, _, info = say(make(), "<answer>bee</answer> no: <answer>ant</answer>")
    assert terminated and info["answer"] == "ant" and info["metrics"] == {"em": 1.0} and info["is_success"]
    assert (reward, info["reward_terms"]) == (-0.5, {"outcome/format": -0.5})
    info = say(make(), "<answer>ant</answer> no: <answer>bee</answer>")[4]
    assert info["answer"] == "bee" and info["metrics"] == {"em": 0.0} and not info["is_success"]


@pytest.mark.parametrize("empty", ["", " ", "\n\t"])
def test_an_empty_answer_scores_nothing(make, say, empty):
    _, reward, terminated, _, info = say(make(), f"<answer>{empty}</answer>")
    assert terminated and reward == -0.5 and info["metrics"] == {"em": 0.0}
    assert info["answer"] == "" and not info["is_success"]
    info = say(make(), f"<answer>ant</answer><answer>{empty}</answer>")[4]  # the last one counts
    assert info["metrics"] == {"em": 0.0} and info["reward_terms"] == {"outcome/format": -0.5}


@pytest.mark.parametrize("text", ["", "Hello.", "ant", "<answer>ant", "ant</answer>", "<think><answer>ant</answer>"])
@pytest.mark.parametrize("closed", [True, False])
def test_no_action_gets_a_hint_and_the_episode_goes_on(make, say, text, closed):
    env = make()
    before = state_of(env)
    outcome = say(env, text, closed)
    _, reward, terminated, truncated, info = outcome
    assert not terminated and not truncated and reward == 0.0 and info["reward_terms"] == {"process/no_action": 0.0}
    assert NO_ACTION_HINT in new_text(env, before, outcome)
    assert env.messages[-1] == {"role": "user", "content": NO_ACTION_HINT}
    assert say(env, "<answer>ant</answer>")[1:3] == (1.0, True)


def test_no_action_can_be_made_to_cost(make, say):
    env = make(process_reward={"no_action": -0.2})
    assert say(env, "hm")[1] == -0.2


def test_thinking_is_not_searched_for_calls_or_answers(make, say):
    env = make()
    hidden = f"<think>{call(env, 'count')} <answer>bee</answer></think>"
    info = say(env, hidden + call(env, "echo", text="a"))[4]
    assert [record["name"] for record in info["tool_calls"]] == ["echo"] and env.tools["count"].calls == 0
    _, reward, _, _, info = say(env, f"{hidden}<answer>ant</answer>")
    assert reward == 1.0 and info["answer"] == "ant"


@pytest.mark.parametrize("stop", ["<|im_end|>", "<|endoftext|>"])
def test_a_span_is_read_up_to_its_first_stop_token(make, say, stop):
    env = make()
    info = say(env, f"hm{stop}{call(env, 'count')}<answer>ant</answer>")[4]
    assert info["tool_calls"] == [] and "process/no_action" in info["reward_terms"]
    assert say(env, f"<answer>ant</answer>{stop}<answer>bee</answer>")[4]["answer"] == "ant"


# ---------------------------------------------------------------------- calls that go wrong


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("kind", "term", "words"),
    [
        ("malformed", "process/malformed_call", ""),
        ("unknown", "process/failed_call", "no tool named 'nothing'"),
        ("arguments", "process/failed_call", "missing 'b'"),
        ("types", "process/failed_call", "'a' must be integer"),
        ("extra", "process/failed_call", "unknown 'more'"),
        ("fails", "process/failed_call", "the wire is cut"),
        ("times out", "process/failed_call", "no result within 0.02 seconds"),
    ],
)
def test_every_fault_is_a_response_a_term_and_an_entry(make, say, dialect, kind, term, words):
    env = make(dialect=dialect)
    written = {
        "malformed": lambda: MALFORMED[dialect],
        "unknown": lambda: call(env, "nothing", x=1),
        "arguments": lambda: call(env, "add", a=1),
        "types": lambda: call(env, "add", a="one", b=2),
        "extra": lambda: call(env, "echo", text="", more=1),
        "fails": lambda: call(env, "fail"),
        "times out": lambda: call(env, "sleep", seconds=5),
    }[kind]()
    before = state_of(env)
    outcome = say(env, written)
    check_step(env, before, np.asarray(env.tokenizer.encode(written + "<|im_end|>")), outcome)
    _, reward, terminated, truncated, info = outcome
    assert not terminated and not truncated
    (record,) = info["tool_calls"]
    assert record["ok"] is False and words in record["error"]
    assert (record["arguments"] is None) == (kind == "malformed")
    weight = {"process/malformed_call": -0.1, "process/failed_call": -0.05}[term]
    assert info["reward_terms"] == {term: weight} and reward == weight
    added = new_text(env, before, outcome)[len(written) :]
    assert "Error" in added and words in added
    assert say(env, "<answer>ant</answer>")[1] == (-0.5 if kind == "malformed" else 1.0)


def test_one_fault_does_not_stop_the_other_calls(make, say):
    env = make()
    texts = [call(env, "count"), MALFORMED["hermes"], call(env, "nothing"), call(env, "fail"), call(env, "count")]
    info = say(env, "\n".join(texts))[4]
    assert [record["ok"] for record in info["tool_calls"]] == [True, False, False, False, True]
    assert env.tools["count"].calls == 2
    assert info["reward_terms"] == {
        "process/malformed_call": pytest.approx(-0.1),
        "process/failed_call": pytest.approx(-0.1),
        "process/repeated_call": pytest.approx(-0.05),
    }


def test_a_name_that_looks_like_a_tool_is_none(make, say):
    env = make()
    for name in ("Echo", " echo", "echo\n", "echo.echo", "__init__", "e" * 1_000):
        info = say(env, f"<tool_call>{json.dumps({'name': name, 'arguments': {}})}</tool_call>")[4]
        assert info["tool_calls"][0]["ok"] is False and len(env.messages[-1]["content"]) < 300


# ---------------------------------------------------------------------- the end


def test_turns_run_out(make, say):
    env = make(max_turns=3)
    for turn in (1, 2):
        _, _, terminated, truncated, info = say(env, call(env, "echo", text=str(turn)))
        assert (terminated, truncated, info["turn"]) == (False, False, turn)
        assert "truncation_reason" not in info and "is_success" not in info
    before = state_of(env)
    outcome = say(env, call(env, "echo", text="the last word"))
    _, reward, terminated, truncated, info = outcome
    assert (terminated, truncated, info["truncation_reason"], info["turn"]) == (False, True, "turns", 3)
    assert info["reward_terms"] == {"outcome/unfinished": -0.5} and reward == -0.5
    assert info["is_success"] is False and info["answer"] is None and info["metrics"] == {"em": 0.0}
    assert "the last word" in new_text(env, before, outcome)[50:]  # the learner bootstraps from what comes next


def test_an_answer_in_the_last_turn_terminates(make, say):
    env = make(max_turns=2)
    say(env, "hm")
    assert say(env, "<answer>ant</answer>")[1:4] == (1.0, True, False)


@pytest.mark.parametrize("text", ["hm", "<answer>ant</answer>", MALFORMED["hermes"]])
def test_a_task_of_one_turn_terminates(make, say, text):
    for env in (make(max_turns=1), make(max_turns=5, options={"max_turns": 1})):
        _, _, terminated, truncated, info = say(env, text)
        assert (terminated, truncated) == (True, False) and "truncation_reason" not in info


@pytest.mark.parametrize(
    ("argument", "text", "paid"),
    [
        (None, "hm", -0.5),
        (None, MALFORMED["hermes"], -1.0),
        (0, "hm", 0.0),
        (0.0, MALFORMED["hermes"], 0.0),
        (-0.25, "hm", -0.25),
        (-2, MALFORMED["hermes"], -2.0),
    ],
)
def test_what_an_unfinished_episode_pays(make, say, argument, text, paid):
    env = make(max_turns=2, unfinished_reward=argument, process_reward=False)
    assert say(env, text)[1] == 0.0
    _, reward, _, truncated, info = say(env, "hm")
    assert truncated and reward == paid and info["reward_terms"] == {"outcome/unfinished": paid}
    assert type(info["reward_terms"]["outcome/unfinished"]) is float


def test_unfinished_reward_leaves_answers_alone(make, say):
    assert say(make(unfinished_reward=-7), "<answer></answer>")[1] == -0.5


# ---------------------------------------------------------------------- equation 6


@pytest.mark.parametrize(
    ("answer", "malformed", "paid"),
    [
        ("<answer>ant</answer>", False, 1.0),
        ("<answer>bee</answer>", False, 0.0),
        ("<answer>ant</answer>", True, -0.5),
        ("<answer>bee</answer>", True, -0.5),
        ("<answer></answer>", False, -0.5),
        ("<answer></answer>", True, -1.0),
        ("<answer>ant</answer><answer>ant</answer>", False, -0.5),
        ("<answer>ant</answer><answer>ant</answer>", True, -1.0),
        ("<answer></answer><answer>ant</answer>", False, -0.5),
    ],
)
@pytest.mark.parametrize("process_reward", [True, False])
def test_equation_6(make, say, answer, malformed, paid, process_reward):
    """r = score if r_format = 1 else r_format - 1, with r_format = (a + c) / 2."""
    env = make(process_reward=process_reward)
    if malformed:
        assert say(env, MALFORMED["hermes"])[1] == (-0.1 if process_reward else 0.0)
    say(env, call(env, "echo", text="a"))  # does not make it good again
    _, reward, terminated, _, info = say(env, answer)
    assert terminated and reward == paid
    name = "outcome/format" if paid < 0 else "outcome/score"
    assert info["reward_terms"] == {name: paid}


def test_failed_and_repeated_calls_do_not_cost_the_format(make, say):
    env = make()
    say(env, call(env, "fail"))
    say(env, call(env, "fail"))
    say(env, call(env, "nothing"))
    assert say(env, "<answer>ant</answer>")[1] == 1.0


def test_a_score_between_0_and_1_is_paid_as_it_is(say):
    class Half(Toy):
        def judge_answer(self, answer):
            return 0.5, {}

    env = Half()
    env.reset(seed=0)
    _, reward, _, _, info = say(env, "<answer>x</answer>")
    assert reward == 0.5 and info["is_success"] is False


# ---------------------------------------------------------------------- process rewards


def test_repeated_calls(make, say):
    env = make(max_turns=20)
    same = [call(env, "add", a=1, b=2), '<tool_call>{"arguments": {"b": 2, "a": 1}, "name": "add"}</tool_call>']
    assert say(env, same[0])[4]["reward_terms"] == {"process/sum_seen": 0.25}
    for text in same:  # also in another order of keys
        assert say(env, text)[4]["reward_terms"] == {"process/sum_seen": 0.25, "process/repeated_call": -0.05}
    assert "process/repeated_call" in say(env, call(env, "add", a=1.0, b=2))[4]["reward_terms"]  # to JSON 1.0 is 1
    for text in (call(env, "add", a=2, b=1), call(env, "echo", text="1"), call(env, "fail")):
        assert "process/repeated_call" not in say(env, text)[4]["reward_terms"]
    assert say(env, call(env, "fail"))[4]["reward_terms"] == {
        "process/failed_call": -0.05,
        "process/repeated_call": -0.05,
    }
    twice = say(env, "\n".join([call(env, "echo", text="2")] * 3))[4]["reward_terms"]
    assert twice == {"process/repeated_call": pytest.approx(-0.1)}
    say(env, MALFORMED["hermes"])
    assert say(env, MALFORMED["hermes"])[4]["reward_terms"] == {"process/malformed_call": -0.1}
    env.reset(seed=0)
    assert say(env, same[0])[4]["reward_terms"] == {"process/sum_seen": 0.25}


def test_a_tool_that_changes_its_arguments_changes_nothing_else(say):
    class Greedy(Counter):
        parameters = {"type": "object"}

        def execute(self, arguments):
            arguments.pop("x")["y"] = 0
            return ToolResult("taken")

    class Env(Toy):
        def __init__(self):
            ToolEnv.__init__(self, [Greedy()])

    env = Env()
    env.reset(seed=0)
    texts = [call(env, "count", x={"y": number}) for number in (1, 2, 1)]
    for text, number in zip(texts, (1, 2, 1), strict=True):
        info = say(env, text)[4]
        assert info["tool_calls"][0]["arguments"] == {"x": {"y": number}}
        assert json.loads(env.messages[-2]["tool_calls"][0]["function"]["arguments"]) == {"x": {"y": number}}
    assert info["reward_terms"] == {"process/repeated_call": -0.05}  # only the third is one


def test_process_weights_true_false_and_dict(make, say):
    turn = [call(make(), "add", a=1, b=2), call(make(), "fail"), MALFORMED["hermes"]]
    default = say(make(), "\n".join(turn))
    assert default[4]["reward_terms"] == {
        "process/sum_seen": 0.25, "process/failed_call": -0.05, "process/malformed_call": -0.1
    }  # fmt: skip
    assert default[1] == pytest.approx(0.1)
    off = say(make(process_reward=False), "\n".join(turn))
    assert off[1] == 0.0 and off[4]["reward_terms"] == {}
    assert [record["ok"] for record in off[4]["tool_calls"]] == [True, False, False]  # still there to be seen
    some = say(make(process_reward={"sum_seen": 2, "failed_call": 0.0}), "\n".join(turn))
    assert some[4]["reward_terms"] == {
        "process/sum_seen": 2.0, "process/failed_call": 0.0, "process/malformed_call": -0.1
    }  # fmt: skip
    with pytest.raises(ValueError, match="'sum_sen'; there are .*sum_seen"):
        make(process_reward={"sum_sen": 1})


def test_a_term_without_a_weight_is_a_mistake_in_the_task(say):
    class Typo(Toy):
        def judge_result(self, call, result):
            return {"sum_sen": 1.0}

    for process_reward in (True, False):
        env = Typo(process_reward=process_reward)
        env.reset(seed=0)
        with pytest.raises(ValueError, match="'sum_sen'.*PROCESS_WEIGHTS"):
            say(env, call(env, "echo", text="a"))


def test_a_class_without_the_usual_terms_pays_none_of_them(say):
    class Bare(Toy):
        PROCESS_WEIGHTS = {"sum_seen": 1.0}

    env = Bare()
    env.reset(seed=0)
    assert say(env, "\n".join([MALFORMED["hermes"], call(env, "fail"), call(env, "add", a=1, b=1)]))[1] == 1.0


# ---------------------------------------------------------------------- room


def test_a_span_longer_than_an_action_is_cut(make):
    env = make(max_action_tokens=20)
    before = state_of(env)
    span = np.asarray(env.tokenizer.encode("<answer>ant</answer><|im_end|> and more"), np.int32)
    outcome = env.step(span)
    check_step(env, before, span, outcome)
    after, reward, terminated, truncated, info = outcome
    assert (terminated, truncated, info["truncation_reason"]) == (False, True, "context")
    assert after.tolist() == before.tolist() + span[:20].tolist()
    assert info["reward_terms"] == {"outcome/unfinished": -0.5} and info["answer"] is None
    assert env.messages[-1]["role"] == "assistant" and env.messages[-1]["content"] == text_of(env, span[:20])


def test_a_span_of_exactly_the_length_fits(make):
    env = make(max_action_tokens=21)
    assert env.step(np.asarray(env.tokenizer.encode("<answer>ant</answer><|im_end|>")))[1:3] == (1.0, True)


def test_a_span_longer_than_the_room_is_cut(make, say):
    room = state_of(make()).size + 500
    env = make(max_context_tokens=room)
    say(env, "x" * 150)  # with the hint
    before = state_of(env)
    left = room - before.size
    span = np.full(left + 1, ord("x"), np.int32)
    outcome = env.step(span)
    check_step(env, before, span, outcome)
    assert outcome[0].size == room and outcome[4]["truncation_reason"] == "context"
    assert outcome[4]["max_new_tokens"] == 0


def test_an_answer_may_fill_the_room(make):
    """No room for the forced end of turn is no reason to lose the answer."""
    env = make()
    answer = np.asarray(env.tokenizer.encode("<answer>ant</answer>"), np.int32)
    room = state_of(env).size + 200
    env = make(max_context_tokens=room, max_action_tokens=200)
    before = state_of(env)
    span = np.concatenate([np.full(200 - answer.size, ord(" "), np.int32), answer])
    outcome = env.step(span)
    check_step(env, before, span, outcome)
    assert outcome[1:3] == (1.0, True) and outcome[0].size == room


def test_calls_are_cut_short_where_no_result_fits(make):
    room = state_of(make()).size + 200
    env = make(max_context_tokens=room, max_action_tokens=200)
    text = call(env, "count") + "<|im_end|>"
    span = np.asarray(env.tokenizer.encode("x" * (200 - len(env.tokenizer.encode(text))) + text), np.int32)
    before = state_of(env)
    outcome = env.step(span)
    check_step(env, before, span, outcome)
    assert outcome[3] and outcome[4]["truncation_reason"] == "context"
    assert outcome[4]["tool_calls"] == [{"name": "count", "arguments": {}, "ok": True}]
    assert env.messages[-1]["role"] == "assistant"  # what isn't in the state isn't in the conversation


def test_a_hint_that_does_not_fit_is_not_in_the_conversation(make):
    room = state_of(make()).size + 100
    env = make(max_context_tokens=room, max_action_tokens=99)
    outcome = env.step(np.full(50, ord("x")))
    assert outcome[4]["truncation_reason"] == "context" and env.messages[-1]["role"] == "assistant"


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("text", ["abc " * 4_000, "\N{GRINNING FACE}" * 4_000, "<|im_end|>" * 2_000, "\n" * 9_000])
def test_long_results_are_cut_with_a_marker(make, say, dialect, text):
    env = make(dialect=dialect, max_context_tokens=3_000, max_turns=20)
    env.tools["echo"].function = lambda **_: text
    before = state_of(env)
    outcome = say(env, call(env, "echo"))
    assert not outcome[3] and CUT in new_text(env, before, outcome)
    content = env.messages[-1]["content"]
    assert content.endswith(CUT) and text.startswith(content.removesuffix(CUT))
    assert content.removesuffix(CUT) or text.isspace()
    # As much as fits is there, and the policy has room to answer.
    assert 256 <= outcome[4]["max_new_tokens"] <= 256 + 40 or text.isspace()
    assert say(env, "<answer>ant</answer>")[1:3] == (1.0, True)


def test_short_results_stay_whole_beside_a_long_one(make, say):
    env = make(max_context_tokens=3_000)
    say(env, "\n".join([call(env, "count"), call(env, "echo", text="ab" * 700), call(env, "count")]))
    contents = [message["content"] for message in env.messages if message["role"] == "tool"]
    assert contents[0] == "call 1" and contents[2] == "call 2" and contents[1].endswith(CUT)


@pytest.mark.parametrize("missing", range(0, 300, 7))
def test_a_result_that_just_fits_leaves_room_to_answer(make, say, missing):
    """No cliff between a result that is cut and one that fits: the next turn always has the reserve, or it's over."""
    size = state_of(make()).size
    env = make(max_context_tokens=size + 900)
    _, _, _, truncated, info = say(env, call(env, "echo", text="x" * (430 - missing)))
    assert truncated or info["max_new_tokens"] >= env._reserve


def test_the_context_never_overflows(make, say):
    """Episodes against every bound in turn; check_step looks at the size."""
    size = state_of(make()).size
    for room in [*range(size + 300, size + 700, 13)]:
        env = make(max_context_tokens=room, max_turns=30)
        over = False
        while not over:
            before = state_of(env)
            text = call(env, "echo", text="y" * 60)
            span = np.asarray(env.tokenizer.encode(text + "<|im_end|>"), np.int32)
            outcome = env.step(span)
            check_step(env, before, span, outcome)
            over = outcome[2] or outcome[3]
        assert outcome[4]["truncation_reason"] == "context"


def test_max_new_tokens_tells_a_sampler_its_room(make, say):
    env = make(max_action_tokens=50)
    assert env.reset(seed=0)[1]["max_new_tokens"] == 50
    env = make(max_context_tokens=state_of(env).size + 300)
    info = env.reset(seed=0, options={"task_index": 0})[1]
    assert info["max_new_tokens"] == 300
    state, _, _, _, info = say(env, "hm")
    assert info["max_new_tokens"] == env.max_context_tokens - state.size


def test_a_prompt_without_room_is_a_mistake_of_the_programmer():
    with pytest.raises(ValueError, match="the prompt of task 'train-.' .* max_context_tokens=100; increase max"):
        Toy(max_context_tokens=100).reset(seed=0)
    with pytest.raises(ArgumentError, match="the prompt of task 'train-.' .* max_context_tokens=100; increase max"):
        ToolVectorEnv(Toy, num_envs=2, max_context_tokens=100).reset(seed=0)
    wordy = type("Wordy", (Toy,), {"instructions": "Be short. " * 300})
    with pytest.raises(ArgumentError, match="the prompt of task 'train-.' has .* max_context_tokens=2500"):
        ToolVectorEnv(wordy, num_envs=2, max_context_tokens=2_500).reset(seed=0)


def test_a_question_without_room_ends_its_own_episode_only():
    class Uneven(Toy):
        def make_task(self, index):
            task = super().make_task(index)
            system = "x" * 100_000 if index == 2 else None
            return dataclasses.replace(task, question="x" * 100_000 * (index == 1) + task.question, instructions=system)

    envs = ToolVectorEnv(Uneven, num_envs=3)
    _, infos = envs.reset(seed=0, options={"task_index": [0, 1, 2]})
    assert infos["fault"][0] is None
    assert all(f"the prompt of task 'train-{index}' has" in infos["fault"][index] for index in (1, 2))
    assert Uneven(max_context_tokens=200_000).reset(options={"task_index": 1})[0].size > 100_000


def test_default_bounds():
    env = Toy()
    assert env.observation_space.max_len == env.max_context_tokens == 32_768
    assert env.action_space.max_len == env.max_action_tokens == 2_048
    assert env.action_space.vocab_size == env.observation_space.vocab_size == len(env.tokenizer)
    assert Toy(max_context_tokens=1_000).max_action_tokens == 1_000


# ---------------------------------------------------------------------- forced tokens


def test_an_open_span_is_closed_by_the_environment(make, say):
    env = make()
    (end,) = env.dialect.close()
    for text, closed in [("hm", False), ("hm", True), (call(env, "count"), False), (call(env, "count"), True)]:
        before = state_of(env)
        span = env.tokenizer.encode(text) + [end] * closed
        rest = env.step(np.asarray(span))[0][before.size + len(span) :].tolist()
        assert rest[:1] == ([10] if closed else [end])  # a newline follows the end of turn in ChatML
        assert rest.count(end) == (1 if closed else 2)


def test_an_empty_span_is_a_turn(make):
    env = make()
    before = state_of(env)
    after, _, terminated, _, info = env.step(np.array([], np.int32))
    assert not terminated and info["turn"] == 1 and after[before.size] == env.dialect.close()[0]


def test_the_last_turn_is_closed_too(make, say):
    env = make()
    end = env.dialect.close()
    before = state_of(env)
    span = env.tokenizer.encode("<answer>ant</answer>")
    assert env.step(np.asarray(span))[0][before.size :].tolist() == span + end
    env = make()
    assert say(env, "<answer>ant</answer>")[0][before.size :].tolist() == span + end  # nothing is added


def test_a_span_that_goes_on_after_its_stop_token_is_closed_again(make, say):
    env = make()
    before = state_of(env)
    outcome = say(env, "hm<|im_end|>what is this", closed=False)
    assert new_text(env, before, outcome).startswith("hm<|im_end|>what is this<|im_end|>\n<|im_start|>user\n")


# ---------------------------------------------------------------------- info


def test_info_of_reset_and_steps(make, say):
    env = make()
    info = env.reset(seed=0, options={"task_index": 2})[1]
    assert info == {
        "turn": 0, "task_id": "train-2", "reward_terms": {}, "tool_calls": [],
        "stop_token_ids": env.dialect.stop_token_ids, "max_new_tokens": 2_048,
    }  # fmt: skip
    info = say(env, call(env, "echo", text="a"))[4]
    assert set(info) == {"turn", "task_id", "reward_terms", "tool_calls", "stop_token_ids", "max_new_tokens"}
    info = say(env, "<answer>cat</answer>")[4]
    assert {"is_success": True, "answer": "cat", "metrics": {"em": 1.0}}.items() <= info.items()


def test_info_belongs_to_the_caller(make, say):
    env = make()
    info = say(env, call(env, "echo", text="a"))[4]
    for value in info.values():
        if hasattr(value, "clear"):
            value.clear()
    assert env.dialect.stop_token_ids and say(env, "<answer>ant</answer>")[4]["stop_token_ids"]
    env.messages.clear()
    assert env.messages


def test_changing_the_arguments_in_info_changes_nothing_else(make, say):
    env = make()
    info = say(env, call(env, "echo", text="a"))[4]
    info["tool_calls"][0]["arguments"]["text"] = "b"
    assert env.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"text": "a"}'
    env.episode.messages[2]["tool_calls"][0]["function"]["arguments"]["text"] = "c"
    assert info["tool_calls"][0]["arguments"] == {"text": "b"}


@pytest.mark.parametrize(
    "value", ['"\\ud83d\\ude00"', '"\\u0000"', "9" * 1_500, "1e308", "-0.0", "[[[[{}]]]]", "[1, null]"]
)
def test_info_survives_json(make, say, value):
    env = make()
    info = say(env, f'<tool_call>{{"name": "echo", "arguments": {{"text": {value}}}}}</tool_call>')[4]
    assert json.loads(json.dumps(info)) == info and plain(info)
    (record,) = info["tool_calls"]
    assert record["arguments"] is not None


# ---------------------------------------------------------------------- determinism and options


def play(env, spans):
    """Everything that a policy can see of an episode."""
    seen = [*env.reset(seed=5)]
    for span in spans:
        state, *rest = env.step(span)
        seen += [state, *rest]
        if rest[1] or rest[2]:
            break
    return [item.tolist() if isinstance(item, np.ndarray) else item for item in seen]


def test_two_environments_and_two_resets_agree(make):
    env = make()
    spans = [
        np.asarray(env.tokenizer.encode(text), np.int32)
        for text in (call(env, "roll"), call(env, "roll") + call(env, "count"), "<answer>x</answer>")
    ]
    first = play(env, spans)
    assert first == play(env, spans) == play(make(seed=9, task=3), spans)
    rolled = env.messages[3]["content"]
    assert rolled.isdigit() and rolled != env.messages[5]["content"]


def test_the_seed_draws_the_task_and_no_seed_goes_on(make):
    env = Toy()
    assert len({env.reset(seed=seed)[1]["task_id"] for seed in range(40)}) == len(WORDS)
    env.reset(seed=3)
    drawn = [env.reset()[1]["task_id"] for _ in range(20)]
    env.reset(seed=3)
    assert drawn == [env.reset()[1]["task_id"] for _ in range(20)] and len(set(drawn)) > 1


def test_a_named_task(make):
    env = make()
    for index in (4, np.int64(1), 0):
        info = env.reset(options={"task_index": index})[1]
        assert info["task_id"] == f"train-{index}" and env.task.question == f"Say {WORDS[index]}."
        json.dumps(info)


def test_a_horizon_for_one_episode(make, say):
    env = make(max_turns=5)
    env.reset(options={"max_turns": 2})
    say(env, "hm")
    assert say(env, "hm")[3]
    env.reset()
    assert [say(env, "hm")[3] for _ in range(5)] == [False] * 4 + [True]
    env.reset(options={"max_turns": 7})
    assert [say(env, "hm")[3] for _ in range(7)] == [False] * 6 + [True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task_index": 5}, r"task_index must be .*\[0, 5\) in split 'train', got 5"),
        ({"task_index": -1}, "got -1"),
        ({"task_index": 1.5}, "task_index must be an integer"),
        ({"task_index": "1"}, "task_index must be an integer"),
        ({"max_turns": 0}, "max_turns must be at least 1"),
        ({"max_turns": 2.5}, "max_turns must be an integer"),
        ({"task": 1}, "'task_index' and 'max_turns', got 'task'"),
    ],
)
def test_wrong_options(make, say, options, words):
    env = make(task=1)
    say(env, "hm")
    given = copy.deepcopy(options)
    with pytest.raises(ValueError, match=words):
        env.reset(options=options)
    assert options == given
    assert say(env, "<answer>bee</answer>")[1] == 1.0  # the episode that was running still is


def test_options_are_left_alone(make):
    options = {"task_index": 2, "max_turns": 3}
    make().reset(options=options)
    assert options == {"task_index": 2, "max_turns": 3}


# ---------------------------------------------------------------------- snapshots


TURNS = ("roll", "count", "echo", "roll", "count", "hm", "malformed", "count")


def run(env, say, turns):
    texts = {"hm": "hm", "malformed": MALFORMED["hermes"], "echo": call(env, "echo", text="a")}
    seen = []
    for turn in turns:
        state, *rest = say(env, texts.get(turn) or call(env, turn))
        seen.append((state.tolist(), *rest))
    answer = say(env, "<answer>cat</answer>")
    return [*seen, (answer[0].tolist(), *answer[1:]), env.messages]


@pytest.mark.parametrize("cut", range(len(TURNS) + 1))
@pytest.mark.parametrize("where", ["here", "elsewhere", "unused", "pickled"])
def test_a_branch_is_a_replay(make, say, cut, where):
    """Every branch from a snapshot goes on as the episode itself did, tools' sessions and dice included."""
    env = make(task=2, seed=8, max_turns=20)
    for turn in TURNS[:cut]:
        run_one = {"hm": "hm", "malformed": MALFORMED["hermes"], "echo": call(env, "echo", text="a")}
        say(env, run_one.get(turn) or call(env, turn))
    snapshot = env.get_state()
    expected = run(env, say, TURNS[cut:])
    if where == "pickled":
        snapshot = pickle.loads(pickle.dumps(snapshot))
    for _ in range(2):  # a snapshot can be used again
        target = {"here": env, "unused": Toy(max_turns=20)}.get(where) or make(task=4, seed=1, max_turns=20)
        target.set_state(snapshot)
        assert run(target, say, TURNS[cut:]) == expected
        with pytest.raises(RuntimeError, match="after the end"):
            say(target, "hm")


def test_a_snapshot_of_the_end_is_over(make, say):
    env = make()
    say(env, "<answer>ant</answer>")
    snapshot = env.get_state()
    env.reset()
    env.set_state(snapshot)
    with pytest.raises(RuntimeError, match="after the end"):
        say(env, "hm")


@pytest.mark.parametrize("where", ["here", "another"])
def test_notes_that_an_episode_begins_with_are_not_begun_anew(where, say):
    class Counted(Toy):
        def start_episode(self, task):
            self.memory["left"] = {"steps": 3}

        def judge_result(self, call, result):
            self.memory["left"]["steps"] -= 1
            return super().judge_result(call, result)

    env, other = Counted(), Counted()
    env.reset(seed=1)
    say(env, call(env, "echo", text="x"))
    snapshot = env.get_state()
    if where == "here":
        say(env, call(env, "echo", text="y"))
        other = env
    other.set_state(snapshot)
    assert other.memory["left"] == {"steps": 2}
    say(other, call(other, "echo", text="y"))
    assert other.memory["left"] == {"steps": 1} and snapshot["episode"].memory["left"] == {"steps": 2}


def test_a_snapshot_keeps_the_horizon(make, say):
    env = make(max_turns=9, options={"max_turns": 2})
    say(env, "hm")
    other = make(max_turns=9)
    other.set_state(env.get_state())
    assert say(other, "hm")[3]


def test_later_resets_draw_as_the_original_would(make):
    env = make(seed=4)
    snapshot = env.get_state()
    drawn = [env.reset()[1]["task_id"] for _ in range(10)]
    other = make(seed=77)
    other.set_state(snapshot)
    assert [other.reset()[1]["task_id"] for _ in range(10)] == drawn


def test_a_snapshot_of_another_task_set_is_refused(make):
    env, other = make(split="test", task=1), make(task=0)
    with pytest.raises(ValueError, match="task 'test-1'.*'train-1'.*same arguments"):
        other.set_state(env.get_state())
    assert other.task.id == "train-0"


def test_a_refused_snapshot_changes_no_random_numbers(make):
    env, other = make(split="test", task=1, seed=1), make(task=0)
    before = other.np_random.bit_generator.state
    with pytest.raises(ValueError, match="same arguments"):
        other.set_state(env.get_state())
    assert other.np_random.bit_generator.state == before != env.np_random.bit_generator.state


def test_a_snapshot_too_long_for_this_environment_is_refused(make, say):
    env = make()
    say(env, call(env, "echo", text="x" * 900))
    with pytest.raises(ValueError, match="max_context_tokens"):
        make(max_context_tokens=state_of(env).size - 10).set_state(env.get_state())


# ---------------------------------------------------------------------- render


def test_ansi(make, say):
    env = make(render_mode="ansi")
    say(env, "<think>so</think>" + call(env, "add", a=1, b=2))
    say(env, "hm")
    say(env, MALFORMED["hermes"])
    say(env, "<answer>bee</answer>")
    text = env.render()
    for part in (
        "[system]", "[user]", "Say ant.", "[assistant]", '{"name": "add", "arguments": {"a": 1, "b": 2}}',
        "[tool add]\n3", "reward +0.25  (process/sum_seen +0.25)", "process/no_action +0.00", NO_ACTION_HINT,
        "process/malformed_call -0.10", "<answer>bee</answer>", "outcome/format -0.50",
    ):  # fmt: skip
        assert part in text, part
    assert text.count("[assistant]") == text.count("    reward ") == 4
    env.reset()
    assert "[assistant]" not in env.render()


def test_human_prints_the_same_as_it_goes(make, say, capsys):
    env, silent = make(render_mode="human"), make(render_mode="ansi")
    for one in (env, silent):
        say(one, call(one, "add", a=1, b=2))
        say(one, "hm")
        say(one, "<answer>ant</answer>")
    assert capsys.readouterr().out == silent.render() + "\n"
    assert env.render() is None


def test_control_characters_are_spelled_out(make, say):
    env = make(render_mode="ansi")
    say(env, "\x1b[2J\x07\r\tone\ntwo\x9b\u202e")
    assert "\\x1b[2J\\x07\\x0d\tone\ntwo\\x9b\\u202e\n" in env.render()


def test_rendering_what_a_terminal_cannot_write(say, capsys):
    class Odd(Toy):
        def make_task(self, index):
            return Task("odd", "Say \ud800.", ["\ud800"])

    env = Odd(render_mode="human")
    env.reset(seed=0)
    env.step(np.array([255, 254], np.int32))
    capsys.readouterr().out.encode()
    ansi = Odd(render_mode="ansi")
    ansi.reset(seed=0)
    ansi.render().encode()


# ---------------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    "action",
    [
        "<answer>ant</answer>",
        None,
        7,
        3.5,
        [[1, 2], [3, 4]],
        [[1, 2], [3]],
        np.zeros((1, 4), np.int32),
        np.array([1.0, 2.0]),
        np.array([True]),
        np.array(["a"]),
        np.array([1, None]),
        {"tokens": [1]},
        [10**30],
        {1, 2},
    ],
)
def test_what_is_no_span_raises(make, say, action):
    env = make()
    with pytest.raises(ValueError, match=r"1-D array of token ids.*env\.unwrapped\.tokenizer.*TextInterface"):
        env.step(action)
    assert say(env, "<answer>ant</answer>")[1] == 1.0  # nothing happened


@pytest.mark.parametrize("ids", [[265], [-1], [1, 2, 2**31], [-(2**40)], np.array([2**63], np.uint64)])
def test_ids_outside_the_vocabulary_raise(make, say, ids):
    env = make()
    with pytest.raises(ValueError, match=r"token id -?\d+ is outside the vocabulary of 265.*action_space.vocab_size"):
        env.step(np.asarray(ids))
    assert say(env, "<answer>ant</answer>")[4]["turn"] == 1


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64])
def test_any_integers_are_ids(make, dtype):
    env = make()
    assert not env.step(np.array([72, 105], dtype))[2]
    assert not env.step([72, 105])[2] and not env.step((72, 105))[2] and not env.step([])[2]


def test_a_step_after_the_end_raises(make, say):
    env = make()
    say(env, "<answer>ant</answer>")
    state = state_of(env)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"after the end of the episode; call reset\(\)"):
            say(env, "hm")
    assert np.array_equal(state, state_of(env))
    env.reset()
    say(env, "hm")


def test_before_the_first_reset(capsys):
    env = Toy(render_mode="ansi")
    for use in (
        lambda: env.step(np.array([1])),
        lambda: env.messages,
        lambda: env.task,
        lambda: env.render(),
        lambda: env.get_state(),
    ):
        with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
            use()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"split": "dev"}, "Toy has no split 'dev'; it has train, test, evaluation"),
        ({"render_mode": "rgb_array"}, "None, 'ansi' or 'human', got 'rgb_array'"),
        ({"max_turns": 0}, "max_turns must be at least 1"),
        ({"max_context_tokens": 0}, "max_context_tokens must be at least 1"),
        ({"max_action_tokens": -5}, "max_action_tokens must be at least 1"),
        ({"max_turns": "3"}, "max_turns must be an integer, got '3'"),
        ({"max_turns": True}, "max_turns must be an integer, got True"),
        ({"max_context_tokens": 2.5}, "max_context_tokens must be an integer, got 2.5"),
        ({"unfinished_reward": math.nan}, "unfinished_reward must be a number, got nan"),
        ({"unfinished_reward": "x"}, "unfinished_reward must be a number, got 'x'"),
        ({"process_reward": {"failed_call": math.inf}}, r"process_reward\['failed_call'\] must be a number, got inf"),
        ({"process_reward": {"failed_call": "x"}}, r"process_reward\['failed_call'\] must be a number, got 'x'"),
        ({"process_reward": 5}, "process_reward must be True, False or a dict of weights, got 5"),
        ({"unfinished_reward": 10**400}, "unfinished_reward must be a number, got one that is too large"),
        ({"process_reward": {"failed_call": -(10**5_000)}}, "must be a number, got one that is too large"),
        ({"fault_deadline": "x"}, "fault_deadline must be a number of seconds, 0 or more, got 'x'"),
        ({"fault_deadline": True}, "fault_deadline must be a number of seconds, 0 or more, got True"),
        ({"fault_deadline": math.nan}, "fault_deadline must be a number of seconds, 0 or more, got nan"),
        ({"dialect": "klingon"}, "'klingon'.*hermes"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        Toy(**arguments)


def test_a_tool_twice_is_a_mistake():
    class Twice(ToolEnv):
        def __init__(self):
            super().__init__([Counter(), Counter()])

    with pytest.raises(ValueError, match="two tools are named 'count'"):
        Twice()


def test_results_and_calls_must_match(make):
    env = make()
    turn = env._begin_turn(np.asarray(env.tokenizer.encode(call(env, "count"))))
    with pytest.raises(ValueError, match="1 call.*got 0 results"):
        env._end_turn(turn, [])


# ---------------------------------------------------------------------- the conversation in chat form


def test_messages_are_the_state_in_chat_form(make):
    """With turns written as the family writes them, the chat template makes the state of the messages, bit by bit."""
    env = make(task=1, max_turns=10)
    texts = [
        call(env, "echo", text="Grüße, \N{GRINNING FACE}"),
        call(env, "add", a=1, b=2) + "\n" + call(env, "count"),
        "Let me think.\n" + call(env, "fail"),
        "hm",
        "So it is <answer>bee</answer>.",
    ]
    for text in texts:
        env.step(np.asarray(env.tokenizer.encode(text + "<|im_end|>")))
        messages, over = env.messages, env.episode.over
        rendered = render_chat(env.tokenizer, env.episode.messages, env._schemas, add_generation_prompt=not over)
        assert rendered.removesuffix("\n" * over) == text_of(env, state_of(env))
        assert over or env.dialect.render(messages, env.schemas) == state_of(env).tolist()
        assert json.loads(json.dumps(messages)) == messages
    assert over and [m["role"] for m in messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "tool", "assistant", "tool", "assistant", "user",
        "assistant",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["<think>so</think>", "a malformed one: <tool_call>{</tool_call>"])
def test_what_chat_form_cannot_say_stands_in_the_content(make, say, text):
    env = make()
    say(env, text)
    assert env.messages[2] == {"role": "assistant", "content": text}


def test_messages_of_every_dialect_name_the_calls(make, say):
    for dialect in DIALECTS:
        env = make(dialect=dialect)
        say(env, "I look.\n" + call(env, "echo", text="a") + "\n")
        assistant, tool = env.messages[2:]
        function = {"name": "echo", "arguments": '{"text": "a"}'}
        (named,) = assistant["tool_calls"]
        assert named == {"type": "function", "id": named["id"], "function": function}
        assert assistant["content"] == "I look."
        assert tool == {"role": "tool", "name": "echo", "content": "a", "tool_call_id": named["id"]}
