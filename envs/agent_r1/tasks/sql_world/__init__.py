"""SQLWorld: questions over SQLite databases, answered by a query and judged by its result."""

from agent_r1.tasks.sql_world.environment import SQLWorldEnv

__all__ = ["SQLWorldEnv"]
