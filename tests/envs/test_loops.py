"""Episodes that the loop of another program plays: docs/chat_apis.md."""

import json
import pickle
from types import SimpleNamespace

import gymnasium as gym
import pytest
from checked_environments import Right

import agent_r1
from agent_r1 import End, ToolFault, ToolResult, call_tool, new_messages, prompt_messages, score_messages
from agent_r1.episode import MAX_CALLS
from agent_r1.loops import ENDED, TOO_MANY
from agent_r1.text.tokenizers import render_chat

# Worlds whose judges read what tools did, not only what they said; a sandbox and the shop among them.
WORLDS = [name for name in agent_r1.generated_worlds() if not agent_r1.ENVIRONMENTS[name].requires]


def played(env, turns):
    """Play turns by `step`; return the return, the last info and the messages."""
    total, info = 0.0, {}
    for turn in turns:
        reply = {"content": turn} if isinstance(turn, str) else turn
        _, reward, terminated, truncated, info = env.step_message(reply)
        total += reward
        if terminated or truncated:
            break
    return total, info


def other_loop(env, turns):
    """Play the turns of chat messages as a foreign loop does: it makes the calls and appends what they return."""
    messages = prompt_messages(env)
    for turn in turns:
        messages.append(turn)
        for call in turn.get("tool_calls", ()):
            function = call["function"]
            result = call_tool(env, function["name"], json.loads(function["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.content})
    return messages


def fail(*_):
    raise AssertionError("a tool ran")


@pytest.mark.parametrize("env_id", WORLDS)
def test_a_conversation_of_another_loop_is_paid_like_steps(env_id):
    stepped, looped = (gym.make(env_id).unwrapped for _ in range(2))
    if not hasattr(stepped, "demonstration") or stepped._has_user:
        pytest.skip("no expert, or a user")
    for index in range(3):
        stepped.reset(options={"task_index": index})
        played(stepped, stepped.demonstration())
        turns = [m for m in stepped.messages if m["role"] == "assistant"]
        stepped.reset(options={"task_index": index})
        total, info = played(stepped, turns)
        looped.reset(options={"task_index": index})
        messages = other_loop(looped, turns)
        assert [m["content"] for m in messages if m["role"] == "tool"][: len(turns) - 1]
        for tool in looped.tools.values():
            tool.execute = fail
        paid, about = score_messages(looped, messages)
        assert paid == pytest.approx(total) and sum(about.pop("turn_rewards")) == pytest.approx(total)
        assert about == info
        assert looped._observation().tolist() == stepped._observation().tolist()
        looped = gym.make(env_id).unwrapped


def call(name, call_id="a", /, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"type": "function", "id": call_id, "function": function}


def arithmetic():
    env = gym.make("AgentR1/ArithmeticWorld-v0").unwrapped
    env.reset(options={"task_index": 3})
    return env


def test_the_text_that_the_messages_show_is_the_result():
    env = arithmetic()
    call_tool(env, "calculator", {"expression": "1 + 1"})
    turn = {"role": "assistant", "content": None, "tool_calls": [call("calculator", expression="1 + 1")]}
    score_messages(env, [turn, {"role": "tool", "tool_call_id": "a", "content": "two"},
                         {"role": "assistant", "content": "<answer>2</answer>"}])  # fmt: skip
    assert env.messages[-2]["content"] == "two"


def test_a_conversation_without_an_answer_is_unfinished():
    env = arithmetic()
    total, info = score_messages(env, 2 * [{"role": "assistant", "content": "Hm."}])
    assert total < 0 and not info["is_success"] and info["truncation_reason"] == "turns"
    assert "outcome/unfinished" in info["reward_terms"]


def test_a_last_turn_whose_calls_were_not_made_is_left_out():
    env = arithmetic()
    said = {"role": "assistant", "content": "Hm."}
    score_messages(env, [said, {"role": "assistant", "tool_calls": [call("calculator", expression="1")]}])
    assert len(env.episode.turns) == 1
    env = arithmetic()
    with pytest.raises(ValueError, match="turn 0 calls calculator, but no such call was made"):
        score_messages(env, [{"role": "assistant", "tool_calls": [call("calculator", expression="1")]}, said])


def test_a_last_call_that_equals_an_earlier_one_was_not_made():
    env = arithmetic()
    content = call_tool(env, "calculator", {"expression": "1"}).content
    turn = {"role": "assistant", "tool_calls": [call("calculator", expression="1")]}
    score_messages(env, [turn, {"role": "tool", "tool_call_id": "a", "content": content}, turn])
    assert len(env.episode.turns) == 1


def test_a_fault_is_raised_in_the_loop_and_never_paid():
    def broken(word: str) -> str:
        """Raises what is no fault of the policy."""
        raise ToolFault("down", ran=True)

    rows = [{"question": "?", "answer": "2"}]
    env = gym.make("AgentR1/Rows-v0", data=rows, tools=[broken], fault_deadline=0).unwrapped
    env.reset(options={"task_index": 0})
    with pytest.raises(ToolFault, match="down"):
        call_tool(env, "broken", {"word": "x"})
    assert call_tool(env, "broken", {"word": "x"}).content == ENDED
    total, info = score_messages(env, [{"role": "assistant", "tool_calls": [call("broken", word="x")]}])
    assert total == 0 and "down" in info["fault"] and not info["is_success"]


class Door(Right):
    """Place 1 ends the task, and place 0 has a fault."""

    def read(self, place: int) -> ToolResult:
        """Read what stands at a place."""
        if place == 0:
            raise ToolFault("dark", ran=True)
        return ToolResult(f"place {place}", done=place == 1)

    def judge_result(self, call, result):
        return End(1.0) if result.done else {"read": 1.0 if result.ok else 0.0}


def door(**kwargs):
    env = Door(**kwargs)
    env.reset(seed=0)
    return env


def reads(*places):
    """A turn that reads places; the ids of its calls are equal."""
    return {"role": "assistant", "content": None, "tool_calls": [call("read", place=place) for place in places]}


@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("places", [(1, 2), (1, 2, 1), (2, 1, 3)])
def test_calls_after_the_end_need_no_result(places, others):
    stepped, looped = door(), door()
    total, info = played(stepped, [reads(*places)])
    for place in places if others else places[: places.index(1) + 1]:
        call_tool(looped, "read", {"place": place})
    paid, about = score_messages(
        looped, [reads(*places), *[reads(5), {"role": "assistant", "content": "Hm."}] * others]
    )
    assert paid == total and about == info | {"turn_rewards": [total]}


def test_a_refused_call_takes_no_result_of_another():
    """The other loop made the calls in another order, so the first one of the turn was refused."""
    env = door()
    for place in (1, 2):
        call_tool(env, "read", {"place": place})
    _, info = score_messages(env, [reads(2, 1)])
    assert info["is_success"] and [made["ok"] for made in info["tool_calls"]] == [False, True]


def test_a_fault_is_not_paid_where_later_calls_of_the_turn_were_not_made():
    env = door(fault_deadline=0)
    with pytest.raises(ToolFault, match="dark"):
        call_tool(env, "read", {"place": 0})
    total, info = score_messages(env, [reads(0, 2)])
    assert total == 0 and "dark" in info["fault"]


def test_results_of_calls_with_equal_ids_are_in_order():
    env = door()
    messages = [reads(2, 3)]
    for place in (2, 3):
        content = call_tool(env, "read", {"place": place}).content
        messages.append({"role": "tool", "tool_call_id": "a", "content": content})
    score_messages(env, [*messages, {"role": "assistant", "content": "Hm."}])
    assert [m["content"] for m in env.messages if m["role"] == "tool"] == ["place 2", "place 3"]


def test_judges_read_the_results_of_the_tools_and_not_the_texts_of_the_messages():
    env, judged = door(), []
    env.judge_result = lambda call, result: judged.append(result.content) or {}
    call_tool(env, "read", {"place": 2})
    shown = [{"role": "tool", "tool_call_id": "a", "content": text} for text in ("703 \ud800", "no such tool")]
    turn = {"role": "assistant", "tool_calls": [call("read", place=2), call("red", place=1)]}
    score_messages(env, [turn, *shown, {"role": "assistant", "content": "Hm."}])
    assert judged == ["place 2", "Error: there is no tool named 'red'. Tools: read."]
    assert [m["content"] for m in env.messages if m["role"] == "tool"] == ["703 \ufffd", "no such tool"]


def test_a_loop_that_calls_for_ever_is_refused():
    env = door(max_turns=2)
    bound = 2 * MAX_CALLS
    results = [call_tool(env, "read", {"place": 2}) for _ in range(bound + 5)]
    assert {result.content for result in results[:bound]} == {"place 2"} and len(env.episode.made) == bound
    assert all(result == ToolResult(TOO_MANY, ok=False) for result in results[bound:])
    _, info = score_messages(env, [reads(*[2] * (bound + 4)), reads(4)])
    assert info["truncation_reason"] == "turns" and info["tool_calls"] == [
        {"name": "read", "arguments": {"place": 4}, "ok": False, "error": TOO_MANY}
    ]


def test_calls_beyond_those_of_a_turn_leave_no_results():
    env = door()
    places = [*[2] * MAX_CALLS, 3, 3]
    for place in (*places, 4):
        call_tool(env, "read", {"place": place})
    _, info = score_messages(env, [reads(*places), reads("4")])
    assert info["tool_calls"][0]["ok"] and env.messages[-1]["content"] == "place 4"


def test_a_reply_that_fits_into_the_context_is_read_once():
    """What it fills is not missing when its calls get their results."""
    env = door()
    room = len(env.encode_reply(reads(2))) * 3 // 2
    env.max_context_tokens = env.episode.length + room
    call_tool(env, "read", {"place": 2})
    _, info = score_messages(env, [reads(2), {"role": "assistant", "content": "Hm."}])
    assert info["truncation_reason"] == "context" and info["tool_calls"][0]["ok"]


def test_a_wrong_call_is_told_and_punished():
    env = arithmetic()
    assert not call_tool(env, "calculater", {}).ok and "calculator" in call_tool(env, "calculater", {}).content
    assert not call_tool(env, "calculator", {"expr": "1"}).ok and not call_tool(env, "calculator", "x").ok
    turn = {"role": "assistant", "tool_calls": [call("calculater"), call("calculator", expr="1")]}
    _, info = score_messages(env, [turn, {"role": "assistant", "content": "<answer>0</answer>"}])
    assert env.episode.rewards[0]["process/failed_call"] == -0.1
    assert [made["ok"] for made in env.episode.tool_calls[0]] == [False, False]


@pytest.mark.parametrize("depth", [100, 3_000])
def test_arguments_nested_too_deeply_are_a_malformed_call(depth):
    """The same call is malformed in `step_message`; the episode can be copied and pickled afterwards."""
    env, nested = arithmetic(), []
    for _ in range(depth):
        nested = [nested]
    assert "nested deeper than 64" in call_tool(env, "calculator", {"expression": nested}).content
    pickle.dumps(env.get_state())
    function = {"name": "calculator", "arguments": {"expression": nested}}
    turn = {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}
    score_messages(env, [turn, {"role": "assistant", "content": "<answer>0</answer>"}])
    assert env.episode.rewards[0]["process/malformed_call"] == -0.1
    pickle.dumps(env.get_state())


def test_objects_of_langchain_are_read():
    env = arithmetic()
    content = call_tool(env, "calculator", {"expression": "2"}).content
    dumped = [
        {"type": "human", "content": "?"},
        {"type": "ai", "content": "", "tool_calls": [{"name": "calculator", "args": {"expression": "2"}, "id": "x"}]},
        {"type": "tool", "content": content, "tool_call_id": "x"},
        {"type": "ai", "content": [{"type": "text", "text": "<answer>2</answer>"}]},
    ]
    messages = [SimpleNamespace(model_dump=lambda fields=fields: fields) for fields in dumped]
    _, info = score_messages(env, messages)
    assert info["answer"] == "2" and len(env.episode.turns) == 2


def test_wrong_use_names_the_remedy():
    env = arithmetic()
    with pytest.raises(ValueError, match="no turn"):
        score_messages(env, prompt_messages(env))
    for message in ("text", {"content": "x"}, {"role": "robot", "content": "x"}):
        with pytest.raises(TypeError, match="a message must"):
            score_messages(env, [message])
    env.step_message({"content": "Hm."})
    for use in (lambda: score_messages(env, [{"role": "assistant", "content": ""}]), lambda: call_tool(env, "x", {})):
        with pytest.raises(RuntimeError, match=r"call reset\(\)"):
            use()
    with pytest.raises(ValueError, match="'schemas' or 'text'"):
        prompt_messages(env, "json")

    class Heard(Right):
        def user_turn(self, text):
            return "go on"

    env = Heard()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="has a user"):
        score_messages(env, [{"role": "assistant", "content": "Hm."}])


def test_the_messages_that_a_step_appended():
    env = arithmetic()
    assert new_messages(env) == [] and prompt_messages(env) == env.messages
    calls = [call("calculator", expression="1"), call("calculator", "b", expression="2")]
    turn = {"content": None, "tool_calls": calls}
    env.step_message(turn)
    assert new_messages(env) == env.messages[-2:] and new_messages(env)[0]["role"] == "tool"
    (shown,) = new_messages(env, "text")
    assert shown["role"] == "user" and shown["content"].count("<tool_response>") == 2
    assert prompt_messages(env) == env.messages[:2]
    env.step_message({"content": "Hm."})
    assert new_messages(env, "text") == new_messages(env) == env.messages[-1:]
    env.step_message({"content": "<answer>1</answer>"})
    assert new_messages(env) == []


def test_the_prompt_as_text_makes_the_same_tokens_without_schemas():
    env = arithmetic()
    messages = prompt_messages(env, "text")
    assert {m["role"] for m in messages} <= {"system", "user"} and "calculator" in messages[0]["content"]
    rendered = render_chat(env.tokenizer, messages, None, True)
    assert env.tokenizer.encode(rendered, add_special_tokens=False) == env._observation().tolist()


def test_control_tokens_in_texts_are_disarmed():
    env = gym.make("AgentR1/Rows-v0", data=[{"question": "<|im_end|>", "answer": "2"}]).unwrapped
    env.reset(options={"task_index": 0})
    assert prompt_messages(env, "text")[-1]["content"] == "< |im_end|>"


def test_calls_of_another_loop_are_in_snapshots():
    env, other = arithmetic(), arithmetic()
    content = call_tool(env, "calculator", {"expression": "2"}).content
    other.set_state(env.get_state())
    turn = {"role": "assistant", "tool_calls": [call("calculator", expression="2")]}
    messages = [turn, {"role": "tool", "tool_call_id": "a", "content": content}, {"role": "assistant", "content": "2"}]
    assert score_messages(env, messages)[0] == score_messages(other, messages)[0]


def test_tasks_are_counted_without_an_instance(tmp_path):
    counts = agent_r1.task_counts("AgentR1/CraftWorld-v0")
    assert counts["train"] == 1_000_000 and counts["test"] == 10_000
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{i}?", "answer": "2"}) + "\n" for i in range(20)))
    counts = agent_r1.task_counts("AgentR1/Rows-v0", {"data": str(rows)})
    assert sum(counts.values()) == 20 and set(counts) == {"train", "test"}
    with pytest.raises(agent_r1.ArgumentError, match="every split"):
        agent_r1.task_counts("AgentR1/CraftWorld-v0", {"split": "test"})
    with pytest.raises(agent_r1.ArgumentError, match="no such environment"):
        agent_r1.task_counts("AgentR1/Craft-v0")
