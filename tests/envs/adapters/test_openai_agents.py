"""The runner of the OpenAI Agents SDK plays episodes with the tools of an environment, which pays them."""

import pytest

pytest.importorskip("agents", reason="needs openai-agents")

from agents import (  # noqa: E402
    Agent,
    MaxTurnsExceeded,
    OpenAIChatCompletionsModel,
    Runner,
    UserError,
    set_tracing_disabled,
)
from chat_server import KEY  # noqa: E402
from openai import AsyncOpenAI  # noqa: E402
from other_loops import break_down, made, model_server, stepped  # noqa: E402

from agent_r1 import prompt_messages, score_messages  # noqa: E402
from agent_r1.adapters.openai_agents import messages_of, tools_of  # noqa: E402
from agent_r1_tools import ToolFault  # noqa: E402

set_tracing_disabled(True)


def run(server, env, **options):
    client = AsyncOpenAI(base_url=server.url, api_key=KEY, max_retries=0)
    agent = Agent(name="player", tools=tools_of(env), model=OpenAIChatCompletionsModel("m", client))
    return Runner.run_sync(agent, prompt_messages(env), **options)


def test_their_loop_plays_an_episode_and_no_call_is_made_twice():
    env, calls = made()
    with model_server() as server:
        result = run(server, env)
    assert len(calls) == 3 and [tool["function"]["name"] for tool in server.asked[0]["tools"]] == ["calculator"]
    assert server.asked[0]["tools"][0]["function"]["parameters"] == env.schemas[0]["function"]["parameters"]
    total, info = score_messages(env, messages_of(result))
    assert info["is_success"] and total == pytest.approx(stepped(env.messages)) and len(calls) == 3
    assert len(info["turn_rewards"]) == 4


def test_calls_of_one_turn_and_wrong_ones(monkeypatch):
    monkeypatch.setattr("chat_server.refusal", lambda body: None)  # the SDK repeats arguments that are no object
    env, calls = made()
    turn = [("calculator", {"expression": "1"}), ("calculator", {"expression": "2"}), ("calculator", "[3]")]
    with model_server(turn, "<answer>3</answer>") as server:
        result = run(server, env)
    shown = messages_of(result)
    assert [m["content"].split(":")[0] for m in shown if m["role"] == "tool"] == ["1", "2", "Error in calculator"]
    total, info = score_messages(env, shown)
    assert total == pytest.approx(stepped(shown)) and not info["is_success"]
    assert [call["expression"] for call in calls] == ["1", "2"]


def test_a_fault_ends_the_run():
    env, _ = made()
    break_down(env)
    with model_server() as server, pytest.raises(UserError, match="the machine is gone") as raised:
        run(server, env)
    assert isinstance(raised.value.__cause__, ToolFault) and len(server.asked) == 1


def test_a_run_that_is_cut_off_is_unfinished():
    env, calls = made()
    with model_server() as server, pytest.raises(MaxTurnsExceeded) as raised:
        run(server, env, max_turns=2)
    _, info = score_messages(env, messages_of(raised.value.run_data))
    assert len(calls) == 2 and info["truncation_reason"] == "turns" and not info["is_success"]
