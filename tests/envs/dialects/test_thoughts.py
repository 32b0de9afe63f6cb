"""The thought of a span: the text inside its thinking tags."""

import pytest

from agent_r1.dialects import get_dialect
from agent_r1.text.tokenizers import load_tokenizer


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("<think> a </think>b<think>c</think>", "a\nc", "b"),
        ("b<think>never closed", "never closed", "b"),
        ("a</think>b", "", "a</think>b"),
        ('<think><tool_call>{"name": "x"}</tool_call></think>b', '<tool_call>{"name": "x"}</tool_call>', "b"),
        ('<tool_call>{"name": "x", "arguments": {"y": "<think>z</think>"}}</tool_call>', "", ""),
    ],
)
def test_the_thought_of_a_span(text, thought, content):
    tokenizer = load_tokenizer(None)
    turn = get_dialect(None, tokenizer).parse(tokenizer.encode(text), [])
    assert (turn.thought, turn.content) == (thought, content)


def test_a_prompt_may_open_the_thought(monkeypatch):
    tokenizer = load_tokenizer(None)
    dialect = get_dialect(None, tokenizer)
    monkeypatch.setattr(dialect, "starts_thinking", True)
    assert dialect.parse(tokenizer.encode("a</think>b"), []).thought == "a"
