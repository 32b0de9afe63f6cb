"""BFCL's multi-turn tasks through bfcl-eval: a user makes requests, and simulated services run the calls."""

from __future__ import annotations

import ast
import copy
import datetime
import decimal
import importlib
import inspect
import json
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import resources
from threading import Lock
from types import FunctionType
from typing import Any, ClassVar

import numpy as np

from agent_r1.baselines import ONLY_EXPERTS
from agent_r1.bridges.bridge import BridgeEnv, World, check_version
from agent_r1.dialects import Call
from agent_r1.tool_env import End, Task, UserTurn
from agent_r1_tools import Tool, ToolResult

INSTALL = 'pip install "agent-r1[bfcl]" && pip install --no-deps "bfcl-eval>=2026.3,<2026.4"'
CHECKED = "2026.3"
MOST_STEPS = 20  # MAXIMUM_STEP_LIMIT of the package: turns with calls for one request
MOST_FILES = 10_000  # limit for `find` and `du`: copies of folders share files, so there may be 2 ** n
MOST_DIGITS = 1_000
MOST_PATHS = 500_000  # maximum number of characters of all paths that `find` lists
MOST_CHARS = 50_000  # maximum length of a result
LOCK = Lock()  # the package keeps some things in globals
API = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code."
APIS = {  # class: its module, which is its file of function descriptions, too
    "GorillaFileSystem": "gorilla_file_system", "MathAPI": "math_api", "MessageAPI": "message_api",
    "TwitterAPI": "posting_api", "TicketAPI": "ticket_api", "TradingBot": "trading_bot", "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}  # fmt: skip
ADDED = "I have updated some more functions you can choose from. What about now?"  # the package's sentence


class BFCLMultiTurnEnv(BridgeEnv):
    """Multi-turn tasks of the Berkeley function calling leaderboard: a user's requests to simulated services.

    ## Description
    The tasks are those of the
    [Berkeley function calling leaderboard](https://gorilla.cs.berkeley.edu/leaderboard.html). They come with the
    package [bfcl-eval](https://pypi.org/project/bfcl-eval/) (Apache-2.0), checked with version 2026.3. A user makes one
    request after another. Eight simulated services run the calls, for example a file system, a car and a stock broker.

    A turn with calls gets their results. A turn without a call says that the request is done, or that it cannot be
    done. It is checked, and the user makes the next request of the task's script. An `<answer>` to the last request
    counts as plain text. An `<answer>` to an earlier request gives up.

    The environment needs the extra `bfcl` and the package itself. bfcl-eval pins numpy 1.26 and a dozen SDKs that are
    not used here. So install it without its dependencies: `pip install --no-deps "bfcl-eval>=2026.3,<2026.4"`.

    ## Tools
    The tools are the functions of the task's one or two services. In `base` a task has 18 to 39 of the 128 functions.
    The prompt describes each service once. It does not describe the return values of functions.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"base"` | `"base"`, `"miss_func"`, `"miss_param"` or `"long_context"` |
    | `max_turns` | `64` | the maximum number of turns |
    | `max_context_tokens` | `131_072` | the maximum number of tokens in an episode |
    | `max_action_tokens` | `8_192` | the maximum number of tokens in a turn |

    The other arguments are those of `ToolEnv`.

    Rewards and baselines: docs/environments/bfcl_multi_turn.md.
    """

    instructions = (
        "Do what the user asks by calling functions, as many as it takes. Don't ask back where you can find out. When "
        "the request is done, or can't be done because a function or a value is missing, say so in plain text without "
        "a call; the user then goes on."
    )
    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = {
        **BridgeEnv.PROCESS_WEIGHTS,
        "request_done": 0.0,
    }
    splits: ClassVar[Mapping[str, str]] = {name: name for name in ("base", "miss_func", "miss_param", "long_context")}

    def __init__(self, *, split: str = "base", **kwargs: Any) -> None:
        require_bfcl()
        kwargs.setdefault("max_turns", 64)
        kwargs.setdefault("max_context_tokens", 131_072)
        kwargs.setdefault("max_action_tokens", 8_192)
        self._added: list[str] = []
        super().__init__([schema for api in APIS for schema in schemas_of(api).values()], split=split, **kwargs)

    def make_tool(self, schema: Mapping[str, Any]) -> Tool:
        """Make the tool of a function, whose results may be long, as `long_context` needs."""
        tool = super().make_tool(schema)
        tool.max_result_chars = MOST_CHARS
        return tool

    @property
    def num_tasks(self) -> int:
        """The number of tasks of the category."""
        return len(load(self.split))

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of the functions that the policy knows."""
        return [self._all_tools[name].schema for name in [*self.task.metadata["tools"], *self._added]]

    def make_task(self, index: int) -> Task:
        """Return task `index` of the category."""
        return self.task_of(self.split, index)

    def task_of(self, category: str, index: int) -> Task:
        """Return task `index` of a category."""
        entry = load(category)[index]
        apis = "\n".join(f"- {about(api)}" for api in entry["apis"])
        added = {name for names in entry["added"].values() for name in names}
        tools = [name for api in entry["apis"] for name in schemas_of(api) if name not in added]
        metadata = {"split": category, "index": index, "tools": tools}
        metadata |= {key: copy.deepcopy(entry[key]) for key in ("apis", "requests", "added", "gold")}
        return Task(entry["id"], entry["requests"][0], [], metadata, f"{self.instructions}\n\n{apis}")

    def make_world(self, task: Task) -> World:
        """Make the services at the beginning."""
        return Services(task.metadata["split"], task.metadata["index"])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, as `ToolEnv.reset` says."""
        self._added = []  # the prompt doesn't show them
        return super().reset(seed=seed, options=options)

    def start_episode(self, task: Task) -> None:
        """Give the policy the task's own functions, and those that were added so far."""
        super().start_episode(task)
        done = self.memory.get("request", 0)
        self._added = [name for at, names in task.metadata["added"].items() if int(at) <= done for name in names]
        self.tools = {name: self._all_tools[name] for name in [*task.metadata["tools"], *self._added]}

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float] | End:
        """End the episode after too many turns for one request, as in the package."""
        self.memory["calls"] = self.memory.get("calls", 0) + 1
        if self.episode.turn - self.memory.get("since", 0) > MOST_STEPS:
            return End(0.0, metrics=self._done())
        return {}

    def user_turn(self, text: str) -> UserTurn | End:
        """Check the request, which counts as done, and continue with the user's next one."""
        if not self._right():
            return End(0.0, metrics=self._done())
        requests, done = self.task.metadata["requests"], self.memory.get("request", 0) + 1
        amounts = {"request_done": 1 / len(requests)}
        self.memory.update({"request": done, "calls": 0, "since": self.episode.turn})
        if done == len(requests):
            return End(1.0, amounts, self._done())
        new = self.task.metadata["added"].get(str(done), [])
        self._added += new
        self.tools |= {name: self._all_tools[name] for name in new}
        told = [json.dumps(self._all_tools[name].schema["function"]) for name in new]
        return UserTurn("\n".join([*told, requests[done]]), amounts)

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Score an answer: to the last request it counts like plain text, to an earlier one it gives up."""
        last = self.memory.get("request", 0) + 1 == len(self.task.metadata["requests"])
        score = float(bool(answer) and last and self._right())
        return score, {"requests_done": 1.0} if score else self._done()

    def judge_end(self, score: float, *, answer: str, answer_ok: bool, calls_ok: bool) -> float:
        """Pay the package's score."""
        return score

    def _done(self) -> dict[str, float]:
        """Return the metric requests_done: the share of passed requests."""
        return {"requests_done": self.memory.get("request", 0) / len(self.task.metadata["requests"])}

    def _right(self) -> bool:
        """Run the package's check of a request, on its calls and those of the policy."""
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker

        request, gold = self.memory.get("request", 0), self.task.metadata["gold"]
        if not gold[request]:
            return True
        if not self.memory.get("calls"):
            return False
        services: Any = self.world
        expected = Services(self.task.metadata["split"], self.task.metadata["index"])
        for calls in gold[: request + 1]:
            expected.answers.clear()
            for name, arguments in calls:
                expected.act(name, copy.deepcopy(arguments))
        try:
            same = state_checker(services.apis, expected.apis)["valid"]
        except RecursionError:  # a folder that contains itself
            return False
        return bool(same and response_checker(services.answers, expected.answers, request)["valid"])

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return the task's own calls, one a turn (eight if a request takes more than 20), and a word after a request.

        Raises: ValueError with `rng`: there is only the expert.
        """
        if rng is not None:
            raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
        turns = []
        for calls in self.task.metadata["gold"]:
            texts = [self.dialect.tool_call(name, arguments) for name, arguments in calls]
            size = 1 if len(texts) <= MOST_STEPS else 8
            turns += ["\n".join(texts[at : at + size]) for at in range(0, len(texts), size)]
            turns.append("That is done." if calls else "That can't be done: something is missing.")
        return turns


# ---------------------------------------------------------------------------------------------------------- the world


class Services:
    """The running services of a task: private instances of the package's classes."""

    def __init__(self, split: str, index: int) -> None:
        entry = load(split)[index]
        self.answers: list[str] = []  # what the package's check compares
        self.apis: dict[str, Any] = {}
        for name in entry["apis"]:
            self.apis[name] = made = api_class(name)()
            if name != "MathAPI":  # it has no state
                made._load_scenario(copy.deepcopy(entry["config"].get(name, {})), long_context=split == "long_context")
                made.__dict__ = copy.deepcopy(made.__dict__)  # long contexts are shared in the package

    def act(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        api = api_of(name)
        with LOCK:
            try:
                text, ok = call(self.apis[api], name, arguments)
            except RecursionError:
                text, ok = "Error during execution: too deep", False
            except Exception as error:  # as the package's executor
                text, ok = f"Error during execution: {error}", False
        self.answers.append(text)
        return ToolResult(text, ok=ok)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def call(api: Any, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    """Return a method's result, as the package's executor writes it, and whether the call succeeded.

    `name` is one of the documented functions. Raises the exceptions of the method.
    """
    import mpmath

    refused = refusal(api, name, arguments)
    if refused:
        return json.dumps({"error": refused}), False
    method = getattr(api, name)
    if name == "post_tweet":  # its default lists would be shared by all instances
        arguments = {"tags": [], "mentions": []} | arguments
    with mpmath.workdps(15), decimal.localcontext():  # MathAPI sets the global precision
        result = method(**arguments)
        if not isinstance(result, dict):
            return str(result), True
        if isinstance(result.get("error"), str):
            result["error"] = in_order(result["error"])
        try:
            return json.dumps(result), "error" not in result
        except (TypeError, ValueError):
            return str(result), "error" not in result


def in_order(error: str) -> str:
    """Sort the set that the package lists in an error, because its order differs between processes."""
    for start, end in (("Invalid fields for update: ", ""), ("Invalid travel class. Must be one of {", "}")):
        if error.startswith(start):
            return start + ", ".join(sorted(error.removeprefix(start).removesuffix(end).split(", "))) + end
    return error


def refusal(api: Any, name: str, arguments: dict[str, Any]) -> str:
    """Return the reason not to make a call that may take unlimited time or memory; "" if it is made."""
    digits = [arguments.get("precision", 0), arguments.get("decimal_places", 0)]
    if any(isinstance(count, int) and abs(count) > MOST_DIGITS for count in digits):
        return f"At most {MOST_DIGITS} digits."
    if name == "power":
        base, exponent = arguments.get("base"), arguments.get("exponent")
        if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > 4 * MOST_DIGITS:
            return "The result is too large."
    if name in ("find", "du") and not (walks(api.root) and walks(api._current_dir)):  # it may be removed
        return f"{name}: more than {MOST_FILES} files and directories, or {MOST_PATHS} characters of paths"
    return ""


def walks(root: Any) -> bool:
    """Return whether a walk through a directory ends soon: copies share contents, and may contain themselves."""
    waiting, files, chars = [(root, 0)], 0, 0
    while waiting:
        place, before = waiting.pop()
        inside = [(entry, before + 1 + len(name)) for name, entry in getattr(place, "contents", {}).items()]
        files += len(inside)
        chars += sum(length for _, length in inside)
        if files > MOST_FILES or chars > MOST_PATHS:
            return False
        waiting += inside
    return True


# ---------------------------------------------------------------------------------------------------------- bfcl-eval


@cache
def require_bfcl() -> None:
    """Raise ImportError if bfcl-eval or mpmath is missing."""
    try:
        import bfcl_eval  # noqa: F401
        import mpmath  # noqa: F401
    except ImportError as error:
        raise ImportError(f"BFCL needs bfcl-eval, without its pinned dependencies: {INSTALL}") from error
    check_version("bfcl-eval", CHECKED)


class Day(datetime.datetime):
    """A fixed date: the day of the package's stock market."""

    @classmethod
    def today(cls) -> Day:
        return cls(2024, 9, 1)


@cache
def api_class(api: str) -> Any:
    """Return the package's class, with a fixed date for a traveller's age."""
    cls: Any = getattr(importlib.import_module(API + APIS[api]), api)
    if api != "TravelAPI":
        return cls
    method = cls.verify_traveler_information
    fixed = FunctionType(method.__code__, method.__globals__ | {"datetime": Day})
    return type(api, (cls,), {method.__name__: fixed})


@cache
def schemas_of(api: str) -> dict[str, dict[str, Any]]:
    """Return an API's functions by name, as JSON schemas, without the text about the API (see `about`)."""
    schemas = {}
    for doc in _rows(f"multi_turn_func_doc/{APIS[api]}.json"):
        description = doc["description"].partition("Tool description: ")[2]
        parameters = json_schema(doc["parameters"])
        if doc["name"] == "close_ticket":  # the task's own calls name an unknown one
            parameters["properties"]["ticket_id"]["type"] = ["integer", "string"]
        schemas[doc["name"]] = {"name": doc["name"], "description": description, "parameters": parameters}
    return schemas


@cache
def about(api: str) -> str:
    """Return the package's text about an API."""
    doc = _rows(f"multi_turn_func_doc/{APIS[api]}.json")[0]["description"]
    return str(doc.partition("Tool description: ")[0]).strip()


@cache
def api_of(name: str) -> str:
    """Return the API that has a function."""
    return next(api for api in APIS if name in schemas_of(api))


def json_schema(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the package's notation to a JSON schema."""
    types = {"dict": "object", "float": "number"}
    schema = dict(spec) | {"type": types.get(spec["type"], spec["type"])}
    if "properties" in spec:
        schema["properties"] = {name: json_schema(inner) for name, inner in spec["properties"].items()}
    if "items" in spec:
        schema["items"] = json_schema(spec["items"])
    return schema


@lru_cache(maxsize=4)
def load(split: str) -> list[dict[str, Any]]:
    """Return the tasks of a category. The result is cached: do not change it.

    `gold` has the calls of each request as (name, arguments), `added` the functions announced before a request.
    """
    name = f"BFCL_v4_multi_turn_{split}.json"
    answers = {row["id"]: row["ground_truth"] for row in _rows(f"possible_answer/{name}")}
    tasks = []
    for row in _rows(name):
        gold = [[read_call(text) for text in turn] for turn in answers[row["id"]]]
        added = {}
        for at, names in row.get("missed_function", {}).items():  # except functions that earlier calls of the task need
            added[at] = [name for name in names if not any(name == one for turn in gold[: int(at)] for one, _ in turn)]
        requests = ["\n".join(said["content"] for said in turn) or ADDED for turn in row["question"]]
        rest = {"apis": row["involved_classes"], "config": row["initial_config"], "added": added, "gold": gold}
        tasks.append({"id": row["id"], "requests": requests} | rest)
    return tasks


def read_call(text: str) -> tuple[str, dict[str, Any]]:
    """Read one of the task's own calls, such as sort('a.txt'), into name and arguments."""
    node: Any = ast.parse(text, mode="eval").body
    name = node.func.id
    names = list(inspect.signature(getattr(api_class(api_of(name)), name)).parameters)[1:]
    arguments = dict(zip(names, node.args, strict=False)) | {keyword.arg: keyword.value for keyword in node.keywords}
    return name, {key: ast.literal_eval(value) for key, value in arguments.items()}


def _rows(path: str) -> list[dict[str, Any]]:
    lines = (resources.files("bfcl_eval") / "data" / path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]
