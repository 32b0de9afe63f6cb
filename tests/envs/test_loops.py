"""Episodes that the loop of another program plays: docs/chat_apis.md."""

import json
from types import SimpleNamespace

import gymnasium as gym
import pytest
from checked_environments import Right

import agent_r1
from agent_r1 import ToolFault, call_tool, new_messages, prompt_messages, score_messages
from agent_r1.loops import ENDED
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


def test_a_wrong_call_is_told_and_punished():
    env = arithmetic()
    assert not call_tool(env, "calculater", {}).ok and "calculator" in call_tool(env, "calculater", {}).content
    assert not call_tool(env, "calculator", {"expr": "1"}).ok and not call_tool(env, "calculator", "x").ok
    turn = {"role": "assistant", "tool_calls": [call("calculater"), call("calculator", expr="1")]}
    _, info = score_messages(env, [turn, {"role": "assistant", "content": "<answer>0</answer>"}])
    assert env.episode.rewards[0]["process/failed_call"] == -0.1
    assert [made["ok"] for made in env.episode.tool_calls[0]] == [False, False]


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
