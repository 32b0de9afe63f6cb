"""LangGraph's own loop plays episodes with the tools of an environment, which pays them."""

import pytest

pytest.importorskip("langgraph")
pytest.importorskip("langchain_openai")

from chat_server import KEY  # noqa: E402
from langchain.agents import create_agent  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402
from langgraph.prebuilt import ToolNode  # noqa: E402
from other_loops import break_down, made, model_server, stepped  # noqa: E402

from agent_r1 import prompt_messages, score_messages  # noqa: E402
from agent_r1.adapters.langgraph import tools_of  # noqa: E402
from agent_r1_tools import ToolFault  # noqa: E402


def agent(server, env):
    model = ChatOpenAI(model="m", base_url=server.url, api_key=KEY, max_retries=0)
    return create_agent(model, tools_of(env))


def test_their_loop_plays_an_episode_and_no_call_is_made_twice():
    env, calls = made()
    with model_server() as server:
        out = agent(server, env).invoke({"messages": prompt_messages(env)})
    assert server.asked[0]["tools"] == env.schemas and len(calls) == 3
    total, info = score_messages(env, out["messages"])
    assert info["is_success"] and total == pytest.approx(stepped(env.messages)) and len(calls) == 3
    assert len(info["turn_rewards"]) == 4


def test_calls_of_one_turn_and_wrong_ones():
    """The policy reads a failure of its own, and the conversation is paid as steps would be."""
    env, calls = made()
    turn = [("calculator", {"expression": "1"}), ("calculator", {"expression": "2"}), ("calculator", {"number": 3})]
    with model_server(turn, "<answer>3</answer>") as server:
        out = agent(server, env).invoke({"messages": prompt_messages(env)})
    assert [m["content"].split(":")[0] for m in server.asked[-1]["messages"][3:]] == ["1", "2", "Error in calculator"]
    total, info = score_messages(env, out["messages"])
    assert total == pytest.approx(stepped(env.messages)) and not info["is_success"] and len(calls) == 2


def test_a_fault_leaves_the_loop():
    env, _ = made()
    break_down(env)
    with model_server() as server, pytest.raises(ToolFault, match="the machine is gone"):
        agent(server, env).invoke({"messages": prompt_messages(env)})
    assert len(server.asked) == 1


def test_a_fault_that_their_node_handles_is_not_paid():
    env, _ = made()
    break_down(env)
    with model_server() as server:
        reply = ChatOpenAI(model="m", base_url=server.url, api_key=KEY).bind_tools(env.schemas)
        messages = [*prompt_messages(env), reply.invoke(prompt_messages(env))]
    node = ToolNode(tools_of(env), handle_tool_errors=True)
    from langgraph.graph import START, MessagesState, StateGraph

    graph = StateGraph(MessagesState).add_node("tools", node).add_edge(START, "tools").compile()
    messages = graph.invoke({"messages": messages})["messages"]
    total, info = score_messages(env, messages)
    assert total == 0 and "the machine is gone" in info["fault"]
