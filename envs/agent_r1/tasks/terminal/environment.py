"""Terminal: small shell tasks in Harbor's layout, run in a sandbox and judged by hidden tests."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from agent_r1.arguments import ArgumentError, integer
from agent_r1.baselines import ONLY_EXPERTS, Baselines
from agent_r1.dialects import Call
from agent_r1.task_data.harbor import TerminalTask, has_split, load_tasks
from agent_r1.tasks.demonstrators import SLOPPY, TEACHERS, demonstrator
from agent_r1.tasks.terminal import generator
from agent_r1.tool_env import End, Task, ToolEnv
from agent_r1_tools import Tool, ToolResult

if TYPE_CHECKING:
    from agent_r1_tools.python import Limits
    from agent_r1_tools.shell import Machine

MAX_TEST_SECONDS = 60.0
"""The upper limit for the time of a task's tests, which its task.toml sets."""
SUBMIT_SECONDS = 600.0
"""The time after which a sandbox counts as stuck; a busy machine takes long to start one."""
RUN_PYTHON = """python3 -c '
import runpy, sys
sys.path.append("/tests")
passed = 0
for file in sys.argv[1:]:
    found = runpy.run_path(file)
    for name in sorted(found):
        if name.startswith("test_") and callable(found[name]):
            if any(hasattr(found[name](), mark) for mark in ("__next__", "__await__", "__anext__")):
                sys.exit(f"{file}: {name} is a generator or async, and was not run")
            passed += 1
with open("/logs/verifier/reward.txt", "w") as file:  # and not after the process: what they import may end it
    file.write("1" if passed else "0")
' /tests/*.py"""
"""A runner for tests without a test.sh: functions test_* that raise if they fail."""


class TerminalEnv(Baselines, ToolEnv):
    """Small tasks for a shell in a sandbox, judged by hidden tests.

    ## Description
    A task is an instruction and a folder: count, sum, rename, unpack, set rights, join tables, fix a script. The policy
    has bash in a sandbox, and submits. Its folder is then carried into another sandbox with the tests. Their result is
    the score. The policy never sees the tests.

    Tasks are folders in [Harbor's layout](https://www.harborframework.com/docs/tasks), which Terminal-Bench 2 also
    uses. The package generates sixteen kinds. The environment also runs other folders that need no image.

    The environment needs Linux with bubblewrap. Elsewhere it raises SandboxError, which names what to install.

    ## Tools

    - `shell(command)` runs a command in bash.
    - `submit()` ends the episode.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `train`, `test` or `unseen_kinds` |
    | `world_seed` | `0` | the family of tasks |
    | `data_dir` | `None` | a folder of task folders, or one with such folders `train` and `test` |
    | `limits` | `None` | an `agent_r1_tools.python.Limits`; `None`: `agent_r1_tools.shell.LIMITS` |
    | `max_turns` | `12` | the maximum number of turns |

    The other arguments are those of `ToolEnv`. A missing folder raises DataNotFoundError. A task that cannot be used
    raises DataFormatError with file, line and reason.

    Rewards and baselines: docs/environments/terminal.md.
    """

    instructions = (
        "Solve the task with shell commands. Every command starts in the task's folder; files stay, variables and cd "
        "don't. When it is done, call submit."
    )
    outcome_term: ClassVar[str] = "outcome/tests_passed"
    slow_judge: bool = True  # the tests run in a separate sandbox
    splits: ClassVar[Mapping[str, str]] = {name: name for name in generator.NUM_TASKS}
    teachers: ClassVar[tuple[str, ...]] = tuple(TEACHERS)

    def __init__(
        self,
        *,
        world_seed: int = 0,
        data_dir: str | os.PathLike[str] | None = None,
        limits: Limits | None = None,
        max_turns: int = 12,
        **kwargs: Any,
    ) -> None:
        from agent_r1_tools.python import Limits
        from agent_r1_tools.shell import LIMITS, ShellTool

        if not isinstance(limits, Limits | None):
            raise ArgumentError(f"limits must be None or an agent_r1_tools.python.Limits, got {limits!r}")
        self.limits = limits or LIMITS
        submit = Tool.from_function(
            self._submit, name="submit", timeout=SUBMIT_SECONDS, timeout_is_fault=True, repeatable=True
        )
        super().__init__([ShellTool(), submit], max_turns=max_turns, **kwargs)
        self.world_seed = integer("world_seed", world_seed, least=0)
        self.data_dir = data_dir
        self._tasks = None if data_dir is None else load_tasks(data_dir, self.split)
        # What is ours to know and not the policy's, should it lie inside of what the sandbox shows.
        self._hide = [str(Path(__file__).parents[2]), *([] if data_dir is None else [str(data_dir)])]

    @classmethod
    def has_split(cls, split: str, **kwargs: Any) -> bool:
        """Return whether the split has tasks. A folder without folders of splits is for training only."""
        data_dir = kwargs.get("data_dir")
        return super().has_split(split) and (data_dir is None or has_split(data_dir, split))

    @property
    def num_tasks(self) -> int:
        """The number of tasks: some thousands in every generated split, or the tasks of a folder."""
        return generator.NUM_TASKS[self.split] if self._tasks is None else len(self._tasks)

    def terminal_task(self, index: int) -> TerminalTask:
        """Return task `index` in the form of Harbor's layout; `task_data.harbor.write_task` writes it to a folder."""
        if self._tasks is None:
            return generator.generate_task(self.world_seed, self.split, index)
        return self._tasks[index]

    def make_task(self, index: int) -> Task:
        """Generate task `index`, or folder `index` by name. Its tests and solution are not part of it."""
        task = self.terminal_task(index)
        return Task(task.id, task.instruction, ["submit"], {"folder": task.folder, "files": sorted(task.start)})

    def start_episode(self, task: Task) -> None:
        """Start a new machine with the task's files."""
        from agent_r1_tools.shell import Machine, ShellTool, pack

        folder = self.terminal_task(self.episode.task_index)
        shell = self.tools["shell"]
        assert isinstance(shell, ShellTool)
        shell.begin(Machine(folder.folder, self.limits, hide=self._hide), pack(folder.start))

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float] | End:
        """End the episode after `submit` with the score of the tests."""
        return End(*result.data) if call.name == "submit" and result.ok else {}

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Submit the task with any answer; its text does not matter. Without an answer there is no verdict."""
        score = self._score() if answer else 0.0
        return score, {"em": float(score >= 1), "score": score}

    def _submit(self) -> ToolResult:
        """Say that the task is done: its tests decide."""
        score = self._score()  # in the tool, where episodes do not wait for each other
        return ToolResult("Submitted.", data=(score, {}, {"em": float(score >= 1), "score": score}), done=True)

    def _score(self) -> float:
        task = self.terminal_task(self.episode.task_index)
        return run_tests(task, self.tools["shell"].get_state(), self.limits, self._hide)

    def demonstration(self, rng: np.random.Generator | None = None, teacher: str | None = None) -> list[str]:
        """Return the turns of the solution on the current task as text, one command each, and then `submit`.

        A fallible teacher submits before the last command in a share of the episodes (1 - its number). With `rng` only,
        a sloppy demonstrator always does.

        Raises: ValueError for an unknown teacher, for a fallible one without `rng`, for a folder without solution, and
        for foreign folders for all except the expert.
        """
        task = self.terminal_task(self.episode.task_index)
        who = demonstrator(rng, teacher)
        if not task.solution:
            raise ValueError(f"task {task.id} has no solution/solve.sh")
        steps = list(task.steps) or [task.solution]
        if rng is not None and who != "expert":
            if not task.steps:
                raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
            if who == SLOPPY or rng.random() >= TEACHERS[who]:
                steps.pop()
        calls = [self.dialect.tool_call("shell", {"command": step}) for step in steps]
        return [*calls, self.dialect.tool_call("submit", {})]


def run_tests(task: TerminalTask, packed: bytes, limits: Limits, hide: list[str]) -> float:
    """Return the score, from 0 to 1, of the tests of a task for the final files of an episode.

    Only the task's folder counts. A `tests/run.sh` first runs the policy's program, in a machine without tests. Then
    the tests run in a new machine, where they cannot be changed. All remaining processes are ended, and then the reward
    is read. Without a reward, or if test.sh was killed, the score is 0.

    Raises ToolFault if the sandbox fails.
    """
    from dataclasses import replace

    from agent_r1_tools.python import CallError
    from agent_r1_tools.shell import Machine, part

    seconds = min(task.seconds, MAX_TEST_SECONDS)
    limits = replace(limits, wall_seconds=seconds, cpu_seconds=seconds)
    packed = part(packed, task.folder)
    try:
        if "run.sh" in task.tests:
            with Machine(task.folder, limits, hide=hide) as machine:
                _unpack(machine, packed)
                machine.run(task.tests["run.sh"].decode("utf-8", "replace"))
                packed = part(machine.pack(), task.folder)
        files = {f"/tests/{path}": content for path, content in task.tests.items()}
        with Machine(task.folder, limits, files=files, writable=["/logs/verifier"], hide=hide) as machine:
            _unpack(machine, packed)
            command = "bash /tests/test.sh" if "test.sh" in task.tests else RUN_PYTHON
            _, code = machine.run(command, {"RAN": "1", "PYTHONSAFEPATH": "1"})
            if code is None or code < 0 or code > 128:
                return 0.0
            return _reward(machine.read("/logs/verifier/reward.txt"), machine.read("/logs/verifier/reward.json"))
    except CallError:  # the policy's files broke the machine
        return 0.0


def _unpack(machine: Machine, packed: bytes) -> None:
    """Unpack files. Raises SandboxError if that fails, as in the shell: the policy's files do not run yet."""
    from agent_r1_tools.python import CallError, SandboxError

    try:
        machine.unpack(packed)
    except CallError as error:
        raise SandboxError(f"the machine of the tests is lost: {error}") from None


def _reward(text: bytes | None, values: bytes | None) -> float:
    """Return the number in reward.txt, or "reward" (else the minimum) in reward.json; from 0 to 1."""
    try:
        if text is not None:
            score = float(text)
        else:
            read = json.loads(values or b"0")
            score = float((read["reward"] if "reward" in read else min(read.values())) if isinstance(read, dict) else 0)
    except (ValueError, TypeError, RecursionError):
        return 0.0
    return min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0
