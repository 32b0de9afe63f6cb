"""Environments that live in other people's packages, one file each: their simulators, our contract."""

from agent_r1.bridges.bridge import BridgeEnv, FinalRewardEnv, World, call_schema
from agent_r1.bridges.gym_tool_env import GymToolEnv
from agent_r1.bridges.text_game import TextGameEnv

__all__ = ["BridgeEnv", "FinalRewardEnv", "GymToolEnv", "TextGameEnv", "World", "call_schema"]
