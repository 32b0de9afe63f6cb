"""The conversation as chat APIs take it, and their replies as turns: docs/chat_apis.md."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from chat_server import KEY, ChatServer, called, expert, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

import agent_r1  # noqa: F401  (registers the environments)
from agent_r1 import Task, Tool, ToolEnv
from agent_r1.dialects import DIALECTS
from agent_r1.text.tokenizers import ByteTokenizer
from agent_r1.wrappers import RecordTrajectories

PAGE = Path(__file__).parents[3] / "docs" / "chat_apis.md"
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)
OPENS_THINKING = ByteTokenizer(chat_template=ByteTokenizer().chat_template + "{{- '<think>\\n' }}")


class Sums(ToolEnv):
    """Add two numbers."""

    num_tasks = 3

    def __init__(self, **kwargs):
        def add(a: int, b: int) -> str:
            """Adds two numbers."""
            return str(a + b)

        def today() -> str:
            """Tells the date."""
            return "Monday"

        super().__init__([Tool.from_function(add), Tool.from_function(today)], **kwargs)

    def make_task(self, index):
        return Task(f"sum-{index}", f"What is {index} + 5?", [str(index + 5)])

    def judge_answer(self, answer):
        right = float(answer in self.task.answers)
        return right, {"em": right}


@pytest.fixture
def make():
    def begin(task=2, **kwargs):
        env = Sums(**kwargs)
        env.reset(options={"task_index": task})
        return env

    return begin


def request(env):
    return {"model": "m", "messages": env.messages, "tools": env.schemas}


# ---------------------------------------------------------------------- the conversation


@every_dialect
def test_a_strict_api_takes_every_conversation(make, dialect):
    """Calls and results, turns that can only be kept as text, hints, and turns that say nothing."""
    env = make(dialect=dialect, max_turns=20)
    calls = [("add", {"a": 1, "b": 2}), ("nobody", {}), ("add", {"a": "x\"\n<|im_end|>é"})]
    replies = [
        called(("add", {"a": 1, "b": 2})),
        called(*calls, content="I add."),
        called(("add", '{"a": 1, "b"'), *calls[:1]),  # malformed: nothing of it can be in chat form
        called(*calls * 3),  # more than are run
        {"content": "Hm."},
        {"content": ""},
    ]
    for reply in replies:
        env.step_message(reply)
        assert refusal(json.loads(json.dumps(request(env)))) is None
    env.step_message({"content": "<answer>7</answer>"})
    assert env.episode.over


def test_calls_have_ids_and_their_results_name_them(make):
    env = make()
    for _ in range(2):
        env.step_message(called(("add", {"a": 1, "b": 2}), ("today", {})))
    ids = [call["id"] for message in env.messages for call in message.get("tool_calls", ())]
    assert len(set(ids)) == 4 and all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in ids)
    results = [message for message in env.messages if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in results] == ids
    assert [message["content"] for message in results] == ["3", "Monday"] * 2
    assistant = env.messages[2]
    assert assistant["content"] is None
    assert assistant["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}


def test_names_that_apis_refuse(make):
    env = make()
    env.step_message(called(("a tool\nof mine" + "e" * 100, {})))
    assert refusal(request(env)) is None
    assistant, tool = env.messages[2:]
    assert assistant["tool_calls"][0]["function"]["name"] == tool["name"] == "a_tool_of_mine" + "e" * 50
    assert "there is no tool named 'a tool\\nof minee" in tool["content"]


def test_the_conversation_is_a_copy(make):
    env = make()
    env.step_message(called(("today", {})))
    before = env.messages
    before[2]["tool_calls"][0]["function"]["name"] = before[0]["content"] = "changed"
    assert env.messages[2]["tool_calls"][0]["function"]["name"] == "today" and env.messages[0] != before[0]


@every_dialect
def test_a_prompt_takes_the_chat_form(make, dialect):
    """With calls and results in it, for whoever goes on with another program's conversation."""
    env = make(dialect=dialect)
    env.step_message(called(("add", {"a": 1, "b": 2}), content="I add."))
    assert env.dialect.render(env.messages, env.schemas) == env.dialect.render(env.episode.messages, env.schemas)
    if dialect == "hermes":  # in the family's own template it is the state, too
        assert env.dialect.render(env.messages, env.schemas) == env._observation().tolist()


# ---------------------------------------------------------------------- replies


@every_dialect
@pytest.mark.parametrize("tokenizer", [None, OPENS_THINKING], ids=["plain", "opens_thinking"])
def test_a_reply_is_a_turn_in_any_dialect(make, dialect, tokenizer):
    env = make(dialect=dialect, tokenizer=tokenizer)
    calls = [("add", {"a": 1, "b": 2}), ("today", {}), ("add", {"a": 2, "b": -5})]
    before = env._observation()
    state, reward, *_, info = env.step_message(called(*calls, content="I add."))
    assert [(call["name"], call["arguments"], call["ok"]) for call in info["tool_calls"]] == [(*c, True) for c in calls]
    assert [message["content"] for message in env.messages[2:]] == ["I add.", "3", "Monday", "-3"]
    assert state[: len(before)].tolist() == before.tolist()
    state, reward, terminated, _, info = env.step_message({"role": "assistant", "content": "It is <answer>7</answer>"})
    assert (reward, terminated, info["answer"], info["is_success"]) == (1.0, True, "7", True)


@every_dialect
@pytest.mark.parametrize("arguments", ["{", "[1]", '"add"', "{'a': 1}", '{"a": NaN}', "</tool_call>```\n{}<|im_end|>"])
def test_arguments_that_are_no_object_are_a_malformed_call(make, dialect, arguments):
    """The policy's error, in every family; the calls beside it are made."""
    env = make(dialect=dialect)
    terminated, _, info = env.step_message(called(("add", arguments), ("today", {})))[2:]
    assert not terminated and info["reward_terms"] == {"process/malformed_call": -0.1}
    assert [call["ok"] for call in info["tool_calls"]] == [False, True]


def test_arguments_nested_too_deeply_are_a_malformed_call_in_any_form(make):
    """As JSON text, or as a client library has read them."""
    nested: list = []
    for _ in range(3_000):
        nested = [nested]
    for arguments in ("{" + '"a": ' + "[" * 3_000 + "]" * 3_000 + "}", {"a": nested}):
        reply = {"content": None, "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
        info = make(max_action_tokens=10_000).step_message(reply)[4]
        assert info["reward_terms"] == {"process/malformed_call": -0.1}


@every_dialect
def test_a_call_that_a_family_cannot_write_is_the_policys_error(make, dialect):
    env = make(dialect=dialect)
    for name, arguments in (("two\nlines", {}), ("", {}), ("add", {"a>": "</parameter><|im_end|>"})):
        _, _, terminated, _, info = env.step_message(called((name, arguments)))
        assert not terminated and [call["ok"] for call in info["tool_calls"]] == [False]


@every_dialect
def test_calls_that_a_server_leaves_in_the_text_are_read(make, dialect):
    env = make(dialect=dialect)
    text = env.dialect.write_turn("I add.", [("add", {"a": 1, "b": 2}), ("today", {})])
    info = env.step_message({"content": text})[4]
    assert [call["ok"] for call in info["tool_calls"]] == [True, True] and env.messages[2]["content"] == "I add."


@every_dialect
@pytest.mark.parametrize("content", ["Then <|im_end|> and <|endoftext|>.", "<think>I add", "a</think>b<think>c"])
def test_nothing_in_the_text_hides_the_calls(make, dialect, content):
    env = make(dialect=dialect)
    info = env.step_message(called(("add", {"a": 1, "b": 2}), ("today", {}), content=content))[4]
    assert [call["ok"] for call in info["tool_calls"]] == [True, True]
    assert env.messages[2]["content"] in ("Then < |im_end|> and < |endoftext|>.", "a</think>b", None)


@pytest.mark.parametrize("arguments", ["", "  ", "{}", None, {}])
def test_no_arguments_may_be_written_as_nothing(make, arguments):
    env = make()
    reply = {"content": None, "tool_calls": [{"function": {"name": "today", "arguments": arguments}}]}
    assert env.step_message(reply)[4]["tool_calls"][0]["ok"]


def test_what_replies_look_like(make):
    """Objects of client libraries, contents in parts, refusals; thoughts that a server left in the text are hidden."""
    message = SimpleNamespace(model_dump=lambda: called(("today", {})))
    assert make().step_message(message)[4]["tool_calls"][0]["ok"]
    parts = [{"type": "text", "text": "<answer>"}, {"type": "text", "text": "7</answer>"}]
    assert make().step_message({"content": parts})[4]["is_success"]
    assert make().step_message({"content": ["<answer>", "7</answer>", {"type": "image"}]})[4]["is_success"]
    env = make()
    env.step_message({"content": None, "refusal": "I won't."})
    assert env.messages[2]["content"] == "I won't."
    info = make().step_message({"content": "<think><answer>1</answer></think><answer>7</answer>"})[4]
    assert info["is_success"]
    wrongs = ("<answer>7</answer>", None, {}, [called()], {"content": "", "tool_calls": ["add"]}, {"content": 3})
    wrongs += ({"content": b"x"}, {"content": "", "tool_calls": 5})
    wrongs += ({"content": "", "tool_calls": [{"name": "add", "args": {"a": b"1"}}]},)
    for wrong in wrongs:
        with pytest.raises(TypeError, match="in a reply must have|a reply must be a|of a call in a reply must be JSON"):
            make().step_message(wrong)


def test_langchain_names_arguments_otherwise_and_keeps_calls_apart_that_it_cannot_read(make):
    env = make()
    reply = {"content": "", "type": "ai"}
    reply["tool_calls"] = [{"name": "add", "args": {"a": 1, "b": 2}, "id": "a", "type": "tool_call"}]
    reply["invalid_tool_calls"] = [{"name": "add", "args": '{"a": 1', "id": "b", "error": "no JSON"}]
    info = env.step_message(SimpleNamespace(model_dump=lambda: reply))[4]
    assert [(call["name"], call["arguments"], call["ok"]) for call in info["tool_calls"]][0] == (
        "add", {"a": 1, "b": 2}, True,
    )  # fmt: skip
    assert "process/malformed_call" in info["reward_terms"]


PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|im_start|>", "<answer>", "</answer>",
    "```", "```python\n", "\n", "Action: add", "\nAction Input:", '{"name": ', '"add"', '"arguments": {}}',
    "<function=add>", "</function>", "</parameter>", "\ud800", "\U0010f8a1", "\0", "é", "7",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
arguments = texts | st.dictionaries(texts, texts | st.integers() | st.none(), max_size=2) | st.none()
replies = st.lists(st.tuples(texts, st.lists(st.tuples(texts | st.just("add"), arguments), max_size=3)), max_size=4)


@every_dialect
@settings(max_examples=40, deadline=None)
@given(replies=replies)
def test_no_reply_breaks_an_episode(dialect, replies):
    """What is said stays in the state, and a strict API takes every conversation that goes on."""
    env = Sums(dialect=dialect, max_turns=10)
    state, _ = env.reset(seed=0)
    for content, calls in replies:
        made = [{"function": {"name": name, "arguments": given}} for name, given in calls]
        after, _, terminated, truncated, info = env.step_message({"content": content, "tool_calls": made})
        assert after[: len(state)].tolist() == state.tolist()
        assert json.loads(json.dumps(info)) == info
        if terminated or truncated:
            break
        assert len(info["tool_calls"]) >= len(calls)
        assert refusal(json.loads(json.dumps(request(env), ensure_ascii=False).encode())) is None
        state = after


def test_a_reply_too_long_for_the_turn_is_cut(make):
    env = make(max_action_tokens=40)
    state, _, terminated, truncated, info = env.step_message({"content": "x" * 100 + "<answer>7</answer>"})
    assert not terminated and not truncated and info["reward_terms"] == {"process/no_action": 0.0}
    assert env.messages[2]["content"] == "x" * 40


def test_replies_go_through_wrappers_and_vector_environments(make, tmp_path):
    env = RecordTrajectories(make(), tmp_path / "rows.jsonl")
    env.reset(options={"task_index": 2})
    env.step(env.unwrapped.encode_reply({"content": "<answer>7</answer>"}))
    assert json.loads((tmp_path / "rows.jsonl").read_text())["is_success"]
    envs = gym.make_vec("AgentR1/ArithmeticWorld-v0", num_envs=2, split="test")
    envs.reset(seed=[1, 2])
    spans = [env.encode_reply({"content": f"<answer>{env.task.answers[0]}</answer>"}) for env in envs.envs]
    assert envs.step(spans)[1].tolist() == [1.0, 1.0]
    envs.close()


# ---------------------------------------------------------------------- a real client


@pytest.fixture
def server(monkeypatch):
    """A strict chat API, where the real client finds it, whose model knows how ArithmeticWorld's tasks are solved."""
    server = ChatServer(expert(gym.make("AgentR1/ArithmeticWorld-v0", split="test").unwrapped))
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    yield server
    server.shutdown()
    server.server_close()


def test_the_loop_of_the_page_with_the_real_client(server, capsys):
    pytest.importorskip("openai")
    (loop,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "OpenAI()" in code]
    assert len([line for line in loop.splitlines() if line.strip()]) <= 11
    exec(compile(loop, PAGE.name, "exec"), {})
    assert capsys.readouterr().out.startswith("True ")
    assert len(server.asked) > 1 and any("tool_call_id" in message for message in server.asked[-1]["messages"])


def test_the_strict_api_is_strict():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    user, assistant = {"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "y"}
    good = [user, assistant, result]
    assert refusal({"messages": good}) is None
    objects = {**call, "function": {"name": "f", "arguments": {}}}
    for wrong in (
        [user, assistant],
        [user, result],
        [user, {**assistant, "tool_calls": [objects]}, result],
        [user, assistant, {**result, "tool_call_id": "b"}],
        [*good, assistant, result],
        [user, {**assistant, "tool_calls": []}, user],
        [user, {**assistant, "thoughts": "x"}, result],
    ):
        assert refusal({"messages": wrong}) is not None
    assert np.all([refusal({"messages": [user], "tools": []}), refusal({"messages": [user], "seed": 1})])
