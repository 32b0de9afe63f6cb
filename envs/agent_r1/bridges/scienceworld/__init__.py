"""ScienceWorld: thirty tasks of an elementary science class, in a simulated house, in text."""

from agent_r1.bridges.scienceworld.environment import ScienceWorldEnv

__all__ = ["ScienceWorldEnv"]
