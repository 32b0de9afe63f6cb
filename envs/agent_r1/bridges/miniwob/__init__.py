"""MiniWoB++: small tasks on web pages in a real browser, with numbers for the elements of a page."""

from agent_r1.bridges.miniwob.environment import MiniWoBEnv

__all__ = ["MiniWoBEnv"]
