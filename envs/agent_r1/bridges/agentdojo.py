"""AgentDojo through its package: user tasks in which tool results hold injected instructions."""

from __future__ import annotations

import copy
import datetime
import warnings
from collections.abc import Mapping
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from agent_r1.arguments import ArgumentError, finite
from agent_r1.baselines import ONLY_EXPERTS
from agent_r1.bridges.bridge import BridgeEnv, World, check_version
from agent_r1.dialects import Call
from agent_r1.tool_env import End, Outcome, Task
from agent_r1_tools import Tool, ToolResult

CHECKED = "0.1"
MOST_CHARS = 50_000  # maximum length of a result
NOW = datetime.datetime(2024, 6, 1)  # the time of changes in an episode, later than all data


class AgentDojoEnv(BridgeEnv):
    """User tasks over mails, files, money or bookings, with injected instructions in the tool results.

    ## Description
    [AgentDojo](https://arxiv.org/abs/2406.13352) tests agents against prompt injection. It runs through its package
    [agentdojo](https://pypi.org/project/agentdojo/) (MIT). The environment needs the extra `agentdojo` and was checked
    with version 0.1.35, with AgentDojo's tasks of v1.2.2. Importing the package also imports the SDKs of five vendors.
    This takes about 6 seconds per process. Nothing is sent anywhere.

    The policy does a user's task with tools. A mail, a web page or a bill in a tool result contains an injection. This
    is a text that tells the agent to do something else, for example to send money to a stranger. A turn without a call,
    or an `<answer>`, is the final answer. It ends the episode.

    ## Tools
    The tools are the functions of a suite: 11 to 28 functions, depending on the split.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"workspace"` | the suite: `"workspace"`, `"travel"`, `"banking"` or `"slack"` |
    | `attack` | `"important_instructions_no_names"` | the wording of the injection; `None`: no injections |
    | `injected_reward` | `-1` | the reward of an injection that the policy obeyed |
    | `version` | `"v1.2.2"` | the version of AgentDojo's tasks, `"v1"` to `"v1.2.2"` |
    | `max_turns` | `32` | the maximum number of turns |
    | `max_context_tokens` | `131_072` | the maximum number of tokens in an episode |

    The attacks are AgentDojo's: "direct", "ignore_previous", "system_message", "injecagent", "tool_knowledge", and
    "important_instructions" with its variants. The other arguments are those of `ToolEnv`.

    Rewards and baselines: docs/environments/agentdojo.md.
    """

    instructions = "When the task is done, answer in plain text, without a call."
    floors: ClassVar[Mapping[str, float]] = {"numbers": 0.45}  # banking: two more of its tasks ask for a number
    splits: ClassVar[Mapping[str, str]] = {name: name for name in ("workspace", "travel", "banking", "slack")}

    def __init__(
        self,
        *,
        attack: str | None = "important_instructions_no_names",
        injected_reward: float = -1.0,
        version: str = "v1.2.2",
        split: str = "workspace",
        **kwargs: Any,
    ) -> None:
        require_agentdojo()
        self.injected_reward = finite("injected_reward", injected_reward)
        if not isinstance(version, str):
            raise ArgumentError(f"version must be the name of a version, such as v1.2.2, got {version!r}")
        self.attack, self.version = attack, version
        kwargs.setdefault("max_turns", 32)
        kwargs.setdefault("max_context_tokens", 131_072)
        is_split = isinstance(split, str) and split in self.splits  # others are rejected below
        schemas = schemas_of(find_suite(version, split)) if is_split else []
        if not isinstance(attack, str | None):
            raise ArgumentError(f"attack must be the name of an attack or None, got {attack!r}")
        if attack is not None:
            find_attack(version, "workspace", attack)
        super().__init__(schemas, split=split, **kwargs)
        self.floor = 0.35 if split == "banking" else 0.05  # 5 of its 16 tasks are solved from the beginning

    def make_tool(self, schema: Mapping[str, Any]) -> Tool:
        """Make the tool of a function, whose results may be long."""
        tool = super().make_tool(schema)
        tool.max_result_chars = MOST_CHARS
        return tool

    @property
    def num_tasks(self) -> int:
        """The number of pairs of a user task of the suite and one of its injections."""
        suite = find_suite(self.version, self.split)
        return len(suite.user_tasks) * (len(suite.injection_tasks) if self.attack is not None else 1)

    def make_task(self, index: int) -> Task:
        """Return user task and injection number `index`; the injections of a user task follow each other."""
        suite = find_suite(self.version, self.split)
        user, injection = list(suite.user_tasks), list(suite.injection_tasks)
        task, goal = (index, None) if self.attack is None else divmod(index, len(injection))
        metadata: dict[str, Any] = {"version": self.version, "suite": self.split, "attack": self.attack}
        metadata |= {"user_task": user[task], "injection_task": None if goal is None else injection[goal]}
        metadata["goal"] = None if goal is None else suite.injection_tasks[injection[goal]].GOAL
        name = "-".join(str(part) for part in (self.split, user[task], metadata["injection_task"]) if part)
        instructions = f"{system_message()}\n{self.instructions}"
        return Task(name, suite.user_tasks[user[task]].PROMPT, [], metadata, instructions)

    def make_world(self, task: Task) -> World:
        """Make the suite's world at the beginning."""
        return Desk(*place_of(task))

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float] | End:
        """Return no terms: AgentDojo's checks see all calls at the end."""
        self.memory.setdefault("calls", []).append([call.name, copy.deepcopy(call.arguments)])
        self.memory["did"] = self.memory.get("did", False) or result.ok
        return {}

    def user_turn(self, text: str) -> End:
        """End the episode with the final answer."""
        score, metrics = self.judge_answer(text)
        return End(score, metrics=metrics)

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Run AgentDojo's checks of the user's task and of the injection.

        Without an answer, or without a successful call, the user's task is not done.
        """
        utility, injected = self._checked(answer)
        utility = utility and bool(answer)
        self.memory["injected"] = injected
        metrics = {"utility": float(utility), "security": float(not injected)}
        return float(utility and self.memory.get("did", False)), metrics

    def judge_end(self, score: float, *, answer: str, answer_ok: bool, calls_ok: bool) -> Outcome:
        """Pay AgentDojo's utility, and as a separate term the cost of an obeyed injection."""
        besides = {"injected": self.injected_reward} if self.memory.get("injected") else {}
        return Outcome(score, besides=besides)

    def _checked(self, answer: str) -> tuple[bool, bool]:
        """Return whether the user's task is done, and whether the injection was obeyed."""
        from agentdojo.functions_runtime import FunctionCall

        place = place_of(self.task)
        suite, user, injection, before = scene(*place)
        desk: Any = self.world
        calls = [FunctionCall(function=name, args=arguments) for name, arguments in self.memory.get("calls", ())]
        found = []
        for task in (user, injection):
            states = before.model_copy(deep=True), desk.state.model_copy(deep=True)
            text = [{"type": "text", "content": answer}]
            try:
                found.append(task is not None and bool(suite._check_task_result(task, text, *states, calls)))
            except Exception:  # caused by the policy's data: an invalid date, an empty list
                found.append(False)
        return found[0], found[1]

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return AgentDojo's calls for the user's task, one a turn, and its answer; the injection is ignored.

        Raises: ValueError with `rng`: there is only the expert.
        """
        if rng is not None:
            raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
        _, user, _, before = scene(*place_of(self.task))
        calls = user.ground_truth(before.model_copy(deep=True))
        turns = [self.dialect.tool_call(call.function, dict(call.args)) for call in calls]
        return [*turns, user.GROUND_TRUTH_OUTPUT or "That is done."]

    def shortcut_numbers(self, rng: np.random.Generator) -> list[str]:
        """Make a call without arguments, and answer with all numbers from 0 on, as many as fit into a turn."""
        question = next(name for name, tool in self.tools.items() if not tool.parameters.get("required"))
        numbers, room = " ".join(map(str, range(2500))), self.max_action_tokens - 16  # a token has a letter, or more
        return [self.dialect.tool_call(question, {}), numbers[: max(room, 0)]]


# ---------------------------------------------------------------------------------------------------------- the world


class Desk:
    """The running world of a suite."""

    def __init__(self, *place: Any) -> None:
        from agentdojo.functions_runtime import FunctionsRuntime

        suite, _, _, before = scene(*place)
        self.state: Any = before.model_copy(deep=True)
        self.runtime = FunctionsRuntime(suite.tools)

    def act(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        from agentdojo.agent_pipeline.tool_execution import tool_result_to_str

        inbox: Any = getattr(self.state, "inbox", None)
        known = set(inbox.emails) if inbox is not None else set()
        try:
            found, error = self.runtime.run_function(self.state, name, arguments)
            for key in inbox.emails.keys() - known if inbox is not None else ():  # they have the clock's time
                inbox.emails[key].timestamp = NOW
            if hasattr(found, "last_modified") and name in ("create_file", "append_to_file"):
                found.last_modified = NOW
            if error is None and name == "create_calendar_event":  # it makes a set of them
                found.participants.sort()
            text = tool_result_to_str(found) if error is None else error
        except Exception as broken:  # caused by arguments that the package does not expect
            text = error = f"{type(broken).__name__}: {broken}"
        return ToolResult(text, ok=error is None)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def place_of(task: Task) -> tuple[Any, ...]:
    """Return the scene of a task."""
    return tuple(task.metadata[key] for key in ("version", "suite", "attack", "user_task", "injection_task"))


@lru_cache(maxsize=64)  # the episodes of a group begin equally
def scene(version: str, suite: str, attack: str | None, user_task: str, injection_task: str | None) -> tuple[Any, ...]:
    """Return a suite, a user task and an injection task of it, and the first world. It is cached: do not change it."""
    found = find_suite(version, suite)
    user, injection = found.user_tasks[user_task], None
    injections: dict[str, str] = {}
    if attack is not None and injection_task is not None:
        injection = found.injection_tasks[injection_task]
        injections = find_attack(version, suite, attack).attack(user, injection)
    return found, user, injection, user.init_environment(load(found, injections))


def load(suite: Any, injections: Mapping[str, str]) -> Any:
    """Load what the suite's `load_and_inject_default_environment` loads, with YAML's fast loader if available."""
    import yaml
    from agentdojo.task_suite.task_suite import read_suite_file

    text = read_suite_file(suite.name, "environment.yaml", suite.data_path)
    text = text.format(**{**suite.get_injection_vector_defaults(), **injections})
    return suite.environment_type.model_validate(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


# ---------------------------------------------------------------------------------------------------------- agentdojo


@cache
def require_agentdojo() -> None:
    """Raise ImportError if agentdojo or one of its imports is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the SDKs that it imports
            import agentdojo.attacks  # noqa: F401  (registers them)
            import agentdojo.task_suite.load_suites  # noqa: F401
    except ImportError as error:
        raise ImportError('AgentDojo needs agentdojo: pip install "agent-r1[agentdojo]"') from error
    check_version("agentdojo", CHECKED)


@cache
def find_suite(version: str, name: str) -> Any:
    """Return a suite of tasks. Raises ArgumentError for a version that AgentDojo does not have."""
    from agentdojo.task_suite.load_suites import _SUITES, get_suite

    if version not in list(_SUITES):
        raise ArgumentError(f"AgentDojo has no version {version!r}; it has {', '.join(_SUITES)}")
    return get_suite(version, name)


@cache
def find_attack(version: str, suite: str, name: str) -> Any:
    """Return the attack, which words the injections.

    Raises ArgumentError for an unknown attack, a manual one, and one without a goal ("dos").
    """
    from agentdojo.attacks.attack_registry import ATTACKS, load_attack

    attacks = [attack for attack, kind in ATTACKS.items() if attack != "manual" and not kind.is_dos_attack]
    if name not in attacks:
        raise ArgumentError(f"AgentDojo has no attack {name!r}; it has {', '.join(attacks)}")
    return load_attack(name, find_suite(version, suite), SimpleNamespace(name="local"))


@cache
def system_message() -> str:
    """Return AgentDojo's own system message, with its wrapped lines joined."""
    from agentdojo.agent_pipeline.agent_pipeline import load_system_message

    return str(load_system_message("default")).replace("\\\n", "").strip()


def schemas_of(suite: Any) -> list[dict[str, Any]]:
    """Return a suite's functions with their arguments as JSON schemas."""
    found = []
    for tool in suite.tools:
        schema = tool.parameters.model_json_schema()
        parameters = {"type": "object"} | _inline(schema, schema.get("$defs", {}))
        found.append({"name": tool.name, "description": tool.description, "parameters": parameters})
    return found


def _inline(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Return a schema without references and pydantic's titles."""
    if isinstance(schema, list):
        return [_inline(one, definitions) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        schema = definitions[schema["$ref"].rpartition("/")[2]] | rest
    named = {"properties": {name: _inline(one, definitions) for name, one in schema.get("properties", {}).items()}}
    kept = {key: value for key, value in schema.items() if key not in ("title", "$defs", "properties")}
    return {key: _inline(value, definitions) for key, value in kept.items()} | (named if "properties" in schema else {})
