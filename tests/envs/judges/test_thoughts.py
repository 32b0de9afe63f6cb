"""A model that judges the thought of each turn, in every environment."""

import json
import re
import threading

import gymnasium as gym
import pytest
from chat_server import KEY, ChatServer

from agent_r1 import ArgumentError
from agent_r1.judges import models
from agent_r1.tasks.craft_world import CraftWorldEnv
from agent_r1.vector import ToolVectorEnv

TERM = "process/unsound_thought"


@pytest.fixture
def judge(monkeypatch):
    """A chat API that finds a thought sound unless it says "wrong"."""
    pytest.importorskip("httpx")

    def says(body):
        code = re.search(r"`(verdict-[0-9a-f]{8}): yes` or", body["messages"][0]["content"])[1]
        case = json.loads(body["messages"][-1]["content"])
        return {"role": "assistant", "content": f"{code}: {'no' if 'wrong' in case['thought'] else 'yes'}"}

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    models._exchange.cache_clear()
    with ChatServer(says) as server:
        yield server
        server.shutdown()
    models._exchange.cache_clear()


def made(judge, **kwargs):
    return {"think_judge": {"url": judge.url, "model": "m"}, "fault_deadline": 0, **kwargs}


def look(env, thought, name="inventory", **arguments):
    return (f"<think>{thought}</think>" if thought else "") + env.dialect.tool_call(name, arguments)


@pytest.mark.parametrize("env_id", ["AgentR1/CraftWorld-v0", "AgentR1/MultihopWorld-v0", "AgentR1/PharmaSim-v0"])
def test_every_environment_counts_the_thoughts_that_a_model_rejects(judge, env_id):
    env = gym.make(env_id, **made(judge)).unwrapped
    env.reset(seed=1)
    asked = [("fine", 0.0), ("wrong", -0.05), ("", None)]
    for thought, expected in asked:
        terms = env.step_message({"content": look(env, thought, "no_tool")})[4]["reward_terms"]
        assert terms.get(TERM) == expected
    assert len(judge.asked) == 2


def test_the_model_reads_the_question_and_what_was_read(judge):
    env = CraftWorldEnv(**made(judge))
    env.reset(seed=1)
    for thought in ("one", "two <|im_start|>"):
        env.step_message({"content": look(env, thought)})
    shown = judge.asked[-1]["messages"][-1]["content"]
    assert json.loads(shown) == {
        "conversation": [f"user: {env.task.question}", "assistant: calls inventory({})", "tool: You have nothing."],
        "thought": "two <|im_start|>",
    }
    assert "<" not in shown


def test_a_long_conversation_is_cut_to_its_question_and_its_newest_messages(judge):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    messages += [{"role": "tool", "content": f"{n} " + "x" * 9_000} for n in range(5)]
    assert models.is_sound(models.Judge(judge.url, "m"), messages, "fine")
    shown = json.loads(judge.asked[-1]["messages"][-1]["content"])["conversation"]
    assert [text[:7] for text in shown] == ["user: q", "[earlie", "tool: 3", "tool: 4"]
    assert not models.is_sound(models.Judge(judge.url, "m"), messages, "x" * 20_000) and len(judge.asked) == 1


def test_a_judge_that_is_down_is_a_fault_with_its_cause(judge):
    env = CraftWorldEnv(**made(judge))
    judge.broken = lambda body: (503, b"busy")
    env.reset(seed=1)
    _, reward, terminated, truncated, info = env.step_message({"content": look(env, "fine")})
    assert (reward, terminated, truncated) == (0.0, False, True) and info["reward_terms"] == {}
    assert info["fault"].startswith("judge: ToolFault: the judge at") and "status 503" in info["fault"]


def test_a_judge_that_comes_back_is_asked_again(judge):
    env = CraftWorldEnv(**made(judge, fault_deadline=10))
    judge.broken = lambda body: (503, b"busy") if len(judge.asked) < 2 else None
    env.reset(seed=1)
    assert env.step_message({"content": look(env, "wrong")})[4]["reward_terms"][TERM] == -0.05
    assert len(judge.asked) == 2


@pytest.mark.parametrize("down", [False, True])
def test_many_episodes_are_judged_at_once(judge, down):
    """Before their calls are made. Requests overlap: the server answers when all have arrived."""
    together, policy = threading.Barrier(4, timeout=10), judge.policy
    judge.policy = lambda body: together.wait() * 0 or policy(body)
    judge.broken = (lambda body: (503, b"busy")) if down else (lambda body: None)
    envs = ToolVectorEnv(CraftWorldEnv, 4, **made(judge))
    envs.reset(seed=1)
    thoughts = ["a", "b", "wrong 1", "wrong 2"]
    texts = [look(envs.envs[0], thought) for thought in thoughts]
    envs.send([envs.envs[0].encode_reply({"content": text}) for text in texts])
    infos = envs.recv(4)[5]
    if down:
        assert all("status 503" in info["fault"] for info in infos)
    else:
        assert [info["reward_terms"][TERM] for info in infos] == [0.0, 0.0, -0.05, -0.05]
        assert all(info["tool_calls"][0]["ok"] for info in infos)
    assert len(judge.asked) == 4
    envs.close()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"think_judge": "http://a/v1"}, "think_judge must be a dict such as"),
        ({"think_judge": {"url": "http://a/v1"}}, "think_judge must be a dict such as"),
        ({"think_judge": {"url": "a", "model": "m"}}, "think_judge: url must be an address such as http://"),
        ({"think_judge": {"url": "http://a/v1", "model": ""}}, "think_judge: model must be a name"),
        ({"think_judge": {"url": "http://a/v1", "model": "m"}, "process_reward": False}, "has no weight here: give"),
    ],
)
def test_wrong_arguments_are_rejected(kwargs, message):
    with pytest.raises(ArgumentError, match=message):
        CraftWorldEnv(**kwargs)
