"""A turn that a sampler cut at its bound is read as one that is a token too long: docs/how_it_works.md, Room."""

import numpy as np
import pytest
from notes_env import Notes, begin, span

from agent_r1.dialects import DIALECTS
from agent_r1.vector import ToolVectorEnv
from agent_r1.wrappers import TextInterface

MALFORMED, UNFINISHED = {"process/malformed_call": -0.1}, {"outcome/unfinished": -0.5}
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)

CUT = {
    "hermes": '<tool_call>\n{"name": "note", "arguments": {"path": "a long path that the bound cuts',
    "qwen_xml": "<tool_call>\n<function=note>\n<parameter=path>\na long path that the bound cuts",
    "llama3_json": '{"name": "note", "parameters": {"path": "a long path that the bound cuts',
    "react": 'Thought: so.\nAction: note\nAction Input: {"path": "a long path that the bound cuts',
    "fenced": '```tool_call\n{"name": "note", "arguments": {"path": "a long path that the bound cuts',
}


def cut_texts(env):
    """Calls and an answer, cut at many places."""
    whole, name = CUT[env.dialect.name], env.dialect.name
    first = {"hermes": 4, "qwen_xml": 4, "llama3_json": 5, "react": 24, "fenced": 14}[name]
    texts = [whole[:size] for size in range(max(first, len("<tool_call>") * (name in ("hermes", "qwen_xml"))), 70)]
    call = env.dialect.tool_call("ping", {})
    return [*texts, f"{call}\n{whole}", "So. <answer>a long answ", "<think>hm</think><answer>a"]


@every_dialect
def test_a_turn_that_the_bound_cuts_is_as_one_token_more(dialect):
    for text in cut_texts(begin(dialect)):
        ids = span(begin(dialect), text, end=False)
        for more in (ids[:0], ids[:1]):
            env = begin(dialect, max_action_tokens=len(ids))
            state, reward, terminated, truncated, info = env.step(np.concatenate([ids, more]))
            assert (terminated, truncated, info["truncation_reason"]) == (False, True, "context"), text
            assert (info["reward_terms"], info["tool_calls"]) == (UNFINISHED, []), text
            assert env.messages[-1]["content"] == text and state[-len(ids) :].tolist() == ids.tolist()


@every_dialect
def test_and_at_the_end_of_the_context_in_text_and_beside_others(dialect):
    env = begin(dialect, max_context_tokens=begin(dialect).episode.length * 8 // 7 + 80)
    ids = span(env, "\n" * (env.room - len(span(env, CUT[dialect], end=False))) + CUT[dialect], end=False)
    assert len(ids) == env.room
    info = env.step(ids)[4]
    assert (info["reward_terms"], info["truncation_reason"]) == (UNFINISHED, "context")
    bound = len(span(begin(dialect), CUT[dialect], end=False))
    text = TextInterface(Notes(dialect=dialect, max_action_tokens=bound))
    text.reset(seed=0)
    assert text.step(CUT[dialect] + "and is cut off there")[4]["reward_terms"] == UNFINISHED
    envs = ToolVectorEnv(lambda: Notes(dialect=dialect, max_action_tokens=bound), num_envs=2, text=True)
    envs.reset(seed=0)
    _, rewards, _, truncations, infos = envs.step([CUT[dialect] + "more", "So."])
    assert (rewards.tolist(), truncations.tolist()) == ([-0.5, 0.0], [True, False])
    envs.close()


@every_dialect
def test_what_is_whole_at_the_bound_counts(dialect):
    """A call or an answer of which only the stop token is cut off, and one that has room for it."""
    for end in (False, True):
        for text, calls in ((begin(dialect).dialect.tool_call("ping", {}), 1), ("<answer>a</answer>", 0)):
            ids = span(begin(dialect), text, end)
            env = begin(dialect, max_action_tokens=len(ids))
            _, reward, terminated, truncated, info = env.step(ids)
            assert len(info["tool_calls"]) == calls and all(call["ok"] for call in info["tool_calls"])
            assert (reward, terminated, truncated) == (1.0 - calls, not calls, False)


@every_dialect
def test_a_call_that_the_policy_left_open_is_malformed(dialect):
    """Shorter than the bound, or with its stop token at the bound: nothing has cut it."""
    for end, more in ((True, 0), (True, 5), (False, 5)):
        ids = span(begin(dialect), CUT[dialect], end)
        env = begin(dialect, max_action_tokens=len(ids) + more)
        _, _, terminated, truncated, info = env.step(ids)
        assert (info["reward_terms"], terminated, truncated) == (MALFORMED, False, False)


@every_dialect
@pytest.mark.parametrize(
    "text", ["I think about it", "<think>I think", "<answer>a</answer> and so on", "<answer>a</answer> or <answer>b"]
)
def test_other_text_at_the_bound_is_read_as_before(dialect, text):
    opened = "</think>" if begin(dialect).dialect.starts_thinking else ""
    ids = span(begin(dialect), opened + text, end=False)
    _, _, terminated, truncated, info = begin(dialect, max_action_tokens=len(ids)).step(ids)
    assert (terminated, truncated) == ("<answer>" in text, False)
