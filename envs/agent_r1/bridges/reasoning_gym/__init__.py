"""reasoning-gym: a hundred sets of generated problems, each scored by its own rule."""

from agent_r1.bridges.reasoning_gym.environment import ReasoningGymEnv

__all__ = ["ReasoningGymEnv"]
