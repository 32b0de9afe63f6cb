"""TextArena: games for one player and for two, in words."""

from agent_r1.bridges.textarena.environment import TextArenaEnv

__all__ = ["TextArenaEnv"]
