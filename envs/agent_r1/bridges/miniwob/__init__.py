"""MiniWoB++: small tasks on web pages, in a real browser, by the numbers of a page's elements."""

from agent_r1.bridges.miniwob.environment import MiniWoBEnv

__all__ = ["MiniWoBEnv"]
