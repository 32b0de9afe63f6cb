"""The scripted demonstrators of the generated web: an expert, and those who make a person's mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np

from agent_r1.tasks.deep_search.generator import WINDOW, is_page
from agent_r1.tool_env import Task

Step = tuple[str, str, dict[str, Any]]  # a thought, a tool, its arguments
MISTAKES = {"older": 0.5, "early": 0.25, "uncited": 0.25}
"""The kinds of mistakes and their shares: believe the older of two pages (and continue from there), answer the question
one hop too early, do not cite the last page."""


def work(task: Task, mistake: str | None = None, rng: np.random.Generator | None = None) -> tuple[list[Step], str]:
    """Return a demonstrator's calls, and the answer with citations. Without a mistake the calls are minimal."""
    data = task.metadata
    pages = {page: (title, year, text.splitlines()) for page, title, year, text in data["pages"]}
    last = len(data["relations"]) - 1
    wrong_hop = None  # the hop with the mistake
    if mistake == "older":
        assert rng is not None
        wrong_hop = int(rng.choice([hop for hop, page in enumerate(data["older"]) if page is not None]))
    steps: list[Step] = []
    cited: list[str] = []
    goal = name = data["start"]
    thought = ""
    for hop, relation in enumerate(data["relations"]):
        page = goal
        if not is_page(goal):
            steps.append((thought, "search", {"query": goal}))
            found = sorted((year, page) for page, (title, year, _) in pages.items() if title == goal)
            page, thought = found[0 if hop == wrong_hop else -1][1], ""
        steps.append((thought, "open", {"page": page}))
        cited.append(page)
        if relation not in data["facts"][page]:  # a false trail may break off
            break
        beyond = not any(line.startswith(f"The {relation} of") for line in pages[page][2][:WINDOW])
        steps += [("", "find", {"text": relation})] * beyond
        goal = data["facts"][page][relation]
        name, thought = name if is_page(goal) else goal, f"{relation} {goal}"
        if mistake == "early" and hop == last - 1:
            break
    if mistake == "uncited":
        cited.pop()
    return steps, " ".join([name, *(f"[{page}]" for page in cited)])
