"""SQLWorld: questions about SQLite databases, answered by a query whose result decides."""

from agent_r1.tasks.sql_world.environment import SQLWorldEnv

__all__ = ["SQLWorldEnv"]
