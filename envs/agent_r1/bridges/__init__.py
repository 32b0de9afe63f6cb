"""Environments that live in other people's packages, one file each: their simulators, our contract."""

from agent_r1.bridges.bridge import BridgeEnv, World
from agent_r1.bridges.gym_tool_env import GymToolEnv

__all__ = ["BridgeEnv", "GymToolEnv", "World"]
