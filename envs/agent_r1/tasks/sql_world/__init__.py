"""SQLWorld: questions over SQLite databases; the answer is a query, and its results decide."""

from agent_r1.tasks.sql_world.environment import SQLWorldEnv

__all__ = ["SQLWorldEnv"]
