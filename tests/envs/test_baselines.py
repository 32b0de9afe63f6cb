"""The baseline naive RAG: the passages of one search in the prompt, one turn, no tools."""

import gymnasium as gym
import pytest
from gymnasium.envs.registration import EnvSpec

from agent_r1 import ArgumentError, ToolEnv, ToolFault, ToolResult
from agent_r1.baselines import INSTRUCTIONS, baseline, closed_book, naive_rag, question_with_passages
from agent_r1.vector import ToolVectorEnv

ENV_ID = "AgentR1/MultihopWorld-v0"


@pytest.fixture
def plain():
    env = gym.make(ENV_ID, split="test").unwrapped
    env.reset(options={"task_index": 4})
    return env


def test_the_passages_of_one_search_stand_in_the_prompt(plain, say):
    passages = plain.tools["search"].execute({"query": plain.task.question}).content
    env = naive_rag(type(plain))(split="test")
    tokens, _ = env.reset(options={"task_index": 4})
    text = env.tokenizer.decode(tokens.tolist())
    assert question_with_passages(plain.task.question, passages) in text and INSTRUCTIONS in text
    assert "search" not in text and env.max_turns == 1 and env.schemas == []
    _, reward, terminated, _, info = say(env, f"<answer>{plain.task.answers[0]}</answer>")
    assert (reward, terminated, info["is_success"], info["metrics"]["em"]) == (1, True, True, 1)
    assert "support_recall" not in info["metrics"]  # nothing can be looked up


def test_a_turn_without_an_answer_ends_it(plain, say):
    env = naive_rag(type(plain))()
    env.reset(seed=0)
    _, reward, terminated, truncated, info = say(env, env.dialect.tool_call("search", {"query": "x"}))
    assert terminated and not truncated and not info["is_success"] and reward < 0


def test_a_search_tool_is_needed():
    with pytest.raises(ArgumentError, match="needs a tool named search"):
        naive_rag(ToolEnv)()


def test_a_search_that_is_down_is_a_fault(plain, monkeypatch):
    down = ToolResult("?", fault="the server is down")
    monkeypatch.setattr(type(plain.tools["search"]), "execute", lambda self, arguments: down)
    env_class = naive_rag(type(plain))
    with pytest.raises(ToolFault, match="the server is down"):
        env_class(fault_deadline=0).reset(seed=0)
    envs = ToolVectorEnv(env_class, 2, fault_deadline=0)
    _, infos = envs.reset(seed=0)
    assert infos["fault"].tolist() == ["reset: ToolFault: the server is down"] * 2
    envs.close()


def test_an_episode_outlives_a_snapshot_that_is_refused(plain, say):
    env, other = (naive_rag(type(plain))(split=split) for split in ("test", "train"))
    env.reset(options={"task_index": 4})
    other.reset(options={"task_index": 5})
    with pytest.raises(ValueError, match="same arguments"):
        env.set_state(other.get_state())
    assert say(env, f"<answer>{plain.task.answers[0]}</answer>")[4]["is_success"]


def test_closed_book_is_the_question_alone(plain, say):
    env = closed_book(type(plain))(split="test")
    tokens, _ = env.reset(options={"task_index": 4})
    text = env.tokenizer.decode(tokens.tolist())
    assert plain.task.question in text and "search" not in text and env.max_turns == 1 and env.schemas == []
    for turn in env.demonstration():
        _, reward, terminated, _, info = say(env, turn)
    assert (reward, terminated, info["is_success"]) == (1, True, True)


def test_what_naive_rag_demonstrates_is_what_the_passages_give(plain):
    env = naive_rag(type(plain))(split="test")
    env.reset(options={"task_index": 4})
    assert env.demonstration() == env.rag_demonstration()


def test_a_baseline_of_an_id_has_the_arguments_of_its_registration(plain, monkeypatch):
    spec = EnvSpec("Mine/Hops-v0", type(plain), kwargs={"split": "test", "world_seed": 5})
    monkeypatch.setitem(gym.registry, "Mine/Hops-v0", spec)
    there = gym.make("Mine/Hops-v0").unwrapped
    assert there.world_seed == 5
    for mode in ("naive_rag", "closed_book"):
        env = baseline("Mine/Hops-v0", mode)()
        for one in (env, there):
            one.reset(options={"task_index": 3})
        assert env.max_turns == 1 and env.task.question.endswith(there.task.question)
        assert baseline("Mine/Hops-v0", mode)(world_seed=0).world_seed == 0


def test_a_baseline_of_a_function_is_refused(plain, monkeypatch):
    monkeypatch.setitem(gym.registry, "Mine/Made-v0", EnvSpec("Mine/Made-v0", lambda **kwargs: type(plain)(**kwargs)))
    with pytest.raises(ArgumentError, match="closed_book needs a class to derive from: register Mine/Made-v0 with its"):
        baseline("Mine/Made-v0", "closed_book")


@pytest.mark.parametrize("mode", ["naive_rag", "closed_book"])
def test_there_is_no_tool_to_call(plain, say, mode):
    env = baseline(ENV_ID, mode)(split="test")
    for _ in range(2):
        env.reset(options={"task_index": 4})
        info = say(env, env.dialect.tool_call("search", {"query": plain.task.question}))[4]
        assert "there is no tool named 'search'" in info["tool_calls"][0]["error"]
        assert "process/support_found" not in info["reward_terms"]


def test_a_search_that_needs_the_episode_is_a_fault_and_no_passage():
    with pytest.raises(ToolFault, match="the search before the episode failed"):
        baseline("AgentR1/ShopWorld-v0", "naive_rag")(fault_deadline=0).reset(seed=0)
