"""MiniWoB++: small tasks on web pages in a real browser, with numbers for the elements of a page."""

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
    """Small tasks on web pages in a real, headless Chromium (MiniWoB++).

    ## Description
    Tasks of [MiniWoB++](https://miniwob.farama.org) (MIT) are, for example, to close a dialog, to log in, to read a
    table, or to delete a mail. The first message has the task and the page as text, one element per line with its
    number. The agent clicks, types, selects and presses keys. After each call it reads the page again. The page
    decides when a task ends. An `<answer>` gives up.

    The environment needs the extra `miniwob`, Chromium and its driver. On Debian both come by
    `apt-get install chromium chromium-driver`. It was checked with miniwob 1.1.0 and Chromium 156. The variables
    MINIWOB_CHROME_BINARY and MINIWOB_CHROMEDRIVER name a browser and a driver that are not on the PATH.

    ## Tools

    - `click(element)` clicks on an element by its number.
    - `type(element, text)` clicks on an element and types one line of at most 200 characters.
    - `select(element, option)` selects an option of a list by its text.
    - `press(key)` presses a key: Enter, Tab, Backspace, Delete, Escape, Space, an arrow, Home, End, PageUp, PageDown or
      Control+a.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `"train"` or `"test"` |
    | `tasks` | `None` | names of tasks, such as `("click-button", "login-user")`; `None`: the 34 with an expert |
    | `max_turns` | `20` | the maximum number of turns |
    | `max_action_tokens` | `512` | the maximum number of tokens in a turn |

    The 34 tasks with an expert are in `agent_r1.bridges.miniwob.scripts.SCRIPTS`. The other arguments are those of
    `ToolEnv`.

    Rewards and baselines: docs/environments/miniwob.md.
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
