"""Void turns: turns of the policy with neither a call nor an answer (SimpleTIR, arXiv 2509.02479)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile

import numpy as np

from agent_r1.tool_env import CUT, NO_ACTION_HINT
from llm_utils.trajectory import Trajectory


def has_void_turn(row: Trajectory) -> bool:
    """Return True if a turn of the episode has neither a call nor an answer, and no user heard it.

    The environment then replies with a hint. A last turn that filled the context gets no reply.
    """
    record = row.record
    said = list(dropwhile(lambda message: message["role"] != "assistant", record["messages"]))
    replies = [message["content"].removesuffix(CUT) for message in said if message["role"] == "user"]
    if any(map(NO_ACTION_HINT.startswith, replies)):
        return True
    acted = any(record["tool_calls"][-1:]) or record["answer"] is not None
    return not acted and record["truncation_reason"] == "context" and said[-1]["role"] == "assistant"


def drop_void_turns(rows: Sequence[Trajectory]) -> int:
    """Exclude episodes with a void turn from training, and return their number.

    Call it after the advantages: the episodes are the policy's own, so they stay in the baselines.
    """
    void = [row for row in rows if has_void_turn(row)]
    for row in void:
        row.train_mask = np.zeros_like(row.train_mask)
    return len(void)
