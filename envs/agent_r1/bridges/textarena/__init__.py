"""TextArena: text games for one or two players."""

from agent_r1.bridges.textarena.environment import TextArenaEnv

__all__ = ["TextArenaEnv"]
