"""The experts of every generated world over a thousand tasks."""

import gymnasium as gym
import pytest

from agent_r1 import generated_worlds
from agent_r1.text.tokenizers import ByteTokenizer
from agent_r1.validation.probes import span


@pytest.mark.slow
@pytest.mark.timeout(1800)  # Terminal starts a sandbox and runs tests for every task
@pytest.mark.parametrize("env_id", generated_worlds())
def test_the_expert_succeeds_in_a_thousand_tasks_in_the_fewest_turns(env_id):
    env = gym.make(env_id).unwrapped
    for index in range(1_000):
        env.reset(options={"task_index": index})
        turns = env.demonstration()
        assert len(turns) == env.task.metadata.get("optimal_turns", len(turns)), index
        for text in turns:
            _, _, terminated, _, info = env.step(span(env, text))
        assert terminated and info["is_success"], index
    env.close()


@pytest.mark.parametrize("env_id", [env_id for env_id in generated_worlds() if "Terminal" not in env_id])
def test_the_expert_is_understood_where_the_template_opens_a_thought(env_id):
    """It comes out of the thought before it calls or answers, in spans of others as in demonstrations."""
    tokenizer = ByteTokenizer(chat_template=ByteTokenizer().chat_template + "{{- '<think>\\n' }}")
    env = gym.make(env_id, tokenizer=tokenizer).unwrapped
    assert env.dialect.starts_thinking
    env.reset(options={"task_index": 3})
    for text in env.demonstration():
        _, _, terminated, _, info = env.step(span(env, text))
        assert info["tool_calls"] or terminated or env.choices is None, text
    assert terminated and info["is_success"]
    env.close()


def test_a_thought_that_the_template_opened_is_gone_on_with(monkeypatch):
    env = gym.make("AgentR1/MultihopWorld-v0").unwrapped
    plain = env.dialect.spoken("<think>so</think> a")
    monkeypatch.setattr(env.dialect, "starts_thinking", True)  # of all environments: dialects are shared
    assert plain == "<think>so</think> a" and env.dialect.spoken(plain) == "so</think> a"
    assert env.dialect.spoken("a") == "</think>\n\na" == env.dialect.spoken(env.dialect.spoken("a"))
