"""MiniWoB++: small tasks on web pages, in a real browser, by the numbers of a page's elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from agent_r1.arguments import some_of
from agent_r1.baselines import ONLY_EXPERTS
from agent_r1.bridges.bridge import FinalRewardEnv, World, call_schema
from agent_r1.bridges.miniwob.page import CALL_TIMEOUT, KEYS, MOST_TEXT, Page, find_chromium, task_names
from agent_r1.bridges.miniwob.scripts import SCRIPTS
from agent_r1.dialects import Call
from agent_r1.tool_env import End, Task
from agent_r1_tools import ToolResult

SPLITS = {"train": 1_000_000, "test": 10_000}  # tasks; the seeds of test follow those of train


TEXT = {"type": "string", "maxLength": MOST_TEXT}
ELEMENT = {"type": "integer", "minimum": 1, "maximum": 100_000, "description": "its number in brackets"}
TOOLS = [
    call_schema("click", "Click on an element.", element=ELEMENT),
    call_schema("type", "Click on an element and type.", element=ELEMENT, text=TEXT),
    call_schema("select", "Choose an option of a list.", element=ELEMENT, option={"type": "string"}),
    call_schema("press", "Press a key.", key={"type": "string", "enum": list(KEYS)}),
]


class MiniWoBEnv(FinalRewardEnv):
    """MiniWoB++: small tasks on web pages in a real, headless Chromium.

    ## Description
    The agent reads what is asked and what stands on the page, a line an element with its number, clicks, types, chooses
    and presses keys, and reads the page again. A task ends when its page says so.

    ## Rewards
    MiniWoB's own at the end, from -1 to 1, without its discount for time: a page has all the time there is. 1 is the
    success. An answer gives up.

    Args:
        tasks: names of MiniWoB's tasks, such as ("click-button", "login-user"); None for `SCRIPTS`, those with an
            expert.
    """

    instructions = (
        "You do a task on a web page. You read its elements, each with its number in brackets; after each call you "
        "read the page again. Answer with <answer>I give up</answer> only to give up."
    )

    timeout = CALL_TIMEOUT
    floor = 0.15  # on some pages there is one thing to click

    def __init__(self, *, tasks: Sequence[str] | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("max_turns", 20)
        kwargs.setdefault("max_action_tokens", 512)
        find_chromium()
        self.names = some_of("tasks", tuple(SCRIPTS) if tasks is None else tasks, task_names())
        super().__init__(TOOLS, **kwargs)

    @property
    def num_tasks(self) -> int:
        """The number of seeds of the split, over all tasks."""
        return SPLITS[self.split]

    def make_task(self, index: int) -> Task:
        """Return seed `index`, each task in turn; `test` seeds follow `train`, and some pages draw differently."""
        name = self.names[index % len(self.names)]
        seed = index + (SPLITS["train"] if self.split == "test" else 0)
        utterance, page = first_view(name, seed, self.split)
        return Task(f"{name}-{seed}", f"{utterance}\n\n{page}", [], {"name": name, "seed": seed, "mode": self.split})

    def make_world(self, task: Task) -> World:
        """Make the page at its beginning."""
        return Page(**task.metadata)

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float] | End:
        """End the episode with the page."""
        if not result.done:
            return {}
        self.memory["reward"] = result.data["reward"]
        return End(float(result.data["reward"] == 1), metrics={"reward": self.final_reward()})

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return the calls of a script that reads the first page, one call a turn.

        Raises: ValueError for a task without one, and with `rng`: there is only the expert.
        """
        if rng is not None:
            raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
        name = self.task.metadata["name"]
        if name not in SCRIPTS:
            raise ValueError(f"there is no script for {name}; there is one for {', '.join(SCRIPTS)}")
        return [self.dialect.tool_call(tool, dict(arguments)) for tool, arguments in calls(**self.task.metadata)]


@lru_cache(maxsize=1024)  # the episodes of a group have the same task
def first_view(name: str, seed: int, mode: str) -> tuple[str, str]:
    """Return the instruction, and the text of the page."""
    page = Page(name, seed, mode)
    page.close()
    return page.utterance, str(page)


@lru_cache(maxsize=1024)
def calls(name: str, seed: int, mode: str) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """Return the calls of a task's script."""
    page = Page(name, seed, mode)
    page.close()
    return tuple(SCRIPTS[name](page.utterance, page.elements))
