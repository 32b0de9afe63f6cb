"""DeepSearch: questions answered by searching, opening and reading linked pages, with citations."""

from agent_r1.tasks.deep_search.environment import DeepSearchEnv
from agent_r1.tasks.deep_search.generator import generate_task
from agent_r1.tasks.deep_search.pages import Page

__all__ = ["DeepSearchEnv", "Page", "generate_task"]
