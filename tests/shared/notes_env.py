"""An environment with two tools, for tests of how turns are read: `Notes`."""

import json

import numpy as np

from agent_r1 import Task, Tool, ToolEnv


class Notes(ToolEnv):
    """Two tools: one without parameters, one with every kind of them."""

    num_tasks = 1

    def __init__(self, **kwargs):
        def ping() -> str:
            """Says pong."""
            return "pong"

        def note(path: str, text: str = "", lines: list[int] | None = None, depth: int = 3, draft: bool = False) -> str:
            """Notes a text."""
            return json.dumps([path, text, lines, depth, draft])

        super().__init__([Tool.from_function(ping), Tool.from_function(note)], **kwargs)

    def make_task(self, index):
        return Task("t", "q", ["a"])

    def judge_answer(self, answer):
        return float(answer == "a"), {}


def begin(dialect=None, **kwargs):
    env = Notes(dialect=dialect, **kwargs)
    env.reset(seed=0)
    return env


def span(env, text, end=True):
    text += env.dialect.end_of_turn * end
    return np.array(env.tokenizer.encode(text, add_special_tokens=False), np.int32)


def made(outcome):
    return [(call["name"], call["arguments"], call["ok"]) for call in outcome[4]["tool_calls"]]
