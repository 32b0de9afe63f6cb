"""reasoning-gym: a hundred data sets of generated problems, each with its own scoring rule."""

from agent_r1.bridges.reasoning_gym.environment import ReasoningGymEnv

__all__ = ["ReasoningGymEnv"]
