"""The environment PharmaSim: `ask`, `solve`, plain speech, the three scores, and its scripted demonstrators."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from agent_r1.arguments import integer
from agent_r1.baselines import Baselines
from agent_r1.dialects import Call
from agent_r1.rewards import exact_match
from agent_r1.task_data import DataNotFoundError
from agent_r1.task_data.pharma_sim import Pair
from agent_r1.tasks.demonstrators import SLOPPY, TEACHERS, demonstrator
from agent_r1.tasks.draw import pick, sample
from agent_r1.tasks.pharma_sim.scenarios import (
    SPLITS,
    generate_task,
    load_scenarios,
    match_question,
    own_words,
)
from agent_r1.tool_env import Outcome, Task, ToolEnv, UserTurn
from agent_r1.users import User, ask_user, find_user
from agent_r1_tools import Tool, ToolResult

MAX_INTERACTIONS = 20
NOT_UNDERSTOOD = "I don't understand. Ask me about one of the topics, please."
NUM_TASKS = {"train": 1_000_000}


class PharmaSimEnv(Baselines, ToolEnv):
    """Conversations in which a pharmacist questions a customer and names the cause of the problem.

    ## Description
    A customer comes with a complaint. The first message lists subjects (people and things to ask about) and topics. The
    policy asks questions, in calls or in plain speech, and then names the cause. So this is also the environment with a
    user. Nothing has to be downloaded.

    The role is that of PharmaSimText ([arXiv 2404.18978](https://arxiv.org/abs/2404.18978)). **The scenarios are
    invented. They are not medical advice.**

    ## Tools

    - `ask(subject, topic)` asks the customer a question. A turn with neither a call nor an answer does the same.
    - `solve()` ends the conversation and opens the post-test, which lists the possible causes.

    At most eight calls of one turn are run. The answer names one cause and ends the episode.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `train`, `validation`, `test` or `unseen_customers` |
    | `world_seed` | `0` | the family of tasks |
    | `data_dir` | `None` | a folder with scenarios of PharmaSimText, instead of ours |
    | `user` | `None` | a function that replies to plain speech, or `"module:function"` |
    | `max_turns` | `24` | the maximum number of turns |
    | `max_action_tokens` | `512` | the maximum number of tokens in a turn |

    `validation` and `test` have other wordings of the same customers. The other arguments are those of `ToolEnv`. A
    missing or damaged file raises DataNotFoundError or DataFormatError, with file and field.

    Rewards and baselines: docs/environments/pharma_sim.md.
    """

    instructions = (
        "You are a pharmacist, and a customer has a problem. Find its cause: put questions with ask(subject, topic), "
        "or just say them. When you have asked all that matters, call solve and give the cause, as it is listed, as "
        "<answer>cause</answer>."
    )
    outcome_term: ClassVar[str] = "outcome/posttest"
    floor = 0.25  # four causes to choose from
    splits: ClassVar[Mapping[str, str]] = {name: name for name in SPLITS}
    teachers: ClassVar[tuple[str, ...]] = tuple(TEACHERS)
    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = {
        **ToolEnv.PROCESS_WEIGHTS,
        "repeated_call": 0.0,  # an interaction costs enough
        "interaction": -0.01,
        "key_question": 0.0,
    }

    def __init__(
        self,
        *,
        world_seed: int = 0,
        split: str = "train",
        data_dir: str | os.PathLike[str] | None = None,
        user: User | str | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("max_turns", 24)
        kwargs.setdefault("max_action_tokens", 512)
        self.world_seed = integer("world_seed", world_seed, least=0)
        self.data_dir = None if data_dir is None else str(data_dir)
        self.user = find_user(user)
        self.slow_judge = self.user is not None
        if split in self.splits:  # others are rejected below
            load_scenarios(self.splits[split], self.data_dir)
        tools = (self.ask, self.solve)
        super().__init__(
            [Tool.from_function(tool, timeout=math.inf, concurrency_safe=False) for tool in tools],
            split=split,
            **kwargs,
        )

    @classmethod
    def has_split(cls, split: str, **kwargs: Any) -> bool:
        """Return whether the folder, if one is given, has scenarios of a split."""
        data_dir = kwargs.get("data_dir")
        try:
            return super().has_split(split) and bool(load_scenarios(cls.splits[split], data_dir and str(data_dir)))
        except DataNotFoundError:
            return False

    @property
    def num_tasks(self) -> int:
        """The number of tasks, variants of a few scenarios: a million in train, ten thousand in other splits."""
        return NUM_TASKS.get(self.split, 10_000)

    def make_task(self, index: int) -> Task:
        """Generate task `index`; nothing is stored."""
        return generate_task(self.world_seed, self.split, index, self.data_dir)

    # ------------------------------------------------------------------ what can be done

    def ask(self, subject: str, topic: str) -> ToolResult:
        """Ask the customer a question.

        Args:
            subject: Whom or what it is about, one of the subjects.
            topic: What you want to know, one of the topics.
        """
        data = self.task.metadata
        names = [_named(subject, data["subjects"]), _named(topic, data["topics"])]
        if self.memory.get("posttest"):
            return ToolResult(f"The conversation is over. {_posttest(self.task)}", ok=False)
        for name, kind, known in zip(names, ("subject", "topic"), ("subjects", "topics"), strict=True):
            if name is None:
                return ToolResult(f"There is no such {kind}. The {known} are: {', '.join(data[known])}.", ok=False)
        subject, topic = str(names[0]), str(names[1])
        question = f"I want to know about this: {subject}, {topic}."
        return self._interact((subject, topic), question)

    def solve(self) -> ToolResult:
        """End the conversation; the post-test then lists the possible causes."""
        if self.memory.get("posttest"):
            return ToolResult(f"The conversation is over. {_posttest(self.task)}", ok=False)
        return self._interact(None, None)

    def _interact(self, pair: Pair | None, question: str | None) -> ToolResult:
        """Run one interaction: a question about a pair (None: not understood) in words, or without words the solution.

        `data` has the amounts of its terms.
        """
        count = self.memory["interactions"] = self.memory.get("interactions", 0) + 1
        forced = count >= MAX_INTERACTIONS
        if forced or question is None:
            self.memory["posttest"] = True
            text = f"The customer has to go. {_posttest(self.task)}" if forced else _posttest(self.task)
            return ToolResult(text, data={} if forced else {"interaction": 1.0})
        amounts, reply = {"interaction": 1.0}, NOT_UNDERSTOOD
        if pair is not None:
            data, asked = self.task.metadata, self.memory.setdefault("asked", [])
            reply = next((text for *about, text in data["answers"] if tuple(about) == pair), data["others"])
            if list(pair) not in asked:
                asked.append(list(pair))
                amounts["key_question"] = (list(pair) in data["key"]) / len(data["key"])
        self.memory.setdefault("talk", []).append([question, reply])
        return ToolResult(reply, data=amounts)

    # ------------------------------------------------------------------ what it means

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float]:
        """Return the amounts that the interaction has noted."""
        return dict(result.data) if result.ok else {}

    def user_turn(self, text: str) -> UserTurn:
        """Return the customer's reply to plain speech, which is an interaction like `ask`.

        `match_question` finds the question, also if `user` writes the reply. Failures of `user` are faults.
        """
        if self.memory.get("posttest"):
            return UserTurn(f"The conversation is over. {_posttest(self.task)}")
        result = self._interact(match_question(text, self.task), text)
        if self.user is None or self.memory.get("posttest"):
            return UserTurn(result.content, result.data)
        reply = ask_user(self.user, user_messages(self.task, self.memory["talk"]), self.strict)
        self.memory["talk"][-1][1] = reply
        return UserTurn(reply, result.data)

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Score 1 for the right cause; the metrics are the three scores and the number of interactions."""
        posttest = exact_match(answer, self.task.answers) if answer.strip() else 0.0
        key, asked = self.task.metadata["key"], self.memory.get("asked", [])
        quality = sum(pair in asked for pair in key) / len(key)
        return posttest, {
            "posttest": posttest,
            "trajectory_quality": quality,
            "combined": posttest * quality,
            "interactions": float(self.memory.get("interactions", 0)),
        }

    def judge_end(self, score: float, *, answer: str, answer_ok: bool, calls_ok: bool) -> Outcome:
        """Pay 1 or -1, and the cost of a missing `solve`."""
        left_out = answer and not self.memory.get("posttest")
        return Outcome(1.0 if answer_ok and score >= 1 else -1.0, {"interaction": 1.0} if left_out else {})

    # ------------------------------------------------------------------ demonstrators

    def demonstration(self, rng: np.random.Generator | None = None, teacher: str | None = None) -> list[str]:
        """Return the turns of a scripted demonstrator on the current task as text.

        Args:
            rng: None: the expert, which asks every key question, solves and names the cause.
            teacher: with `rng`, a name of `teachers`: the fallible ones jump to a conclusion in a third, two thirds and
                all of the episodes. They then ask only the first key question, and draw one of the causes. None: the
                sloppy demonstrator, which asks up to three questions about anything, and draws a cause.

        Raises: ValueError for an unknown teacher, and for a fallible one without `rng`.
        """
        who = demonstrator(rng, teacher)
        data, cause = self.task.metadata, self.task.answers[0]
        questions = data["key"]
        jumps = 1.0 if who == SLOPPY else (1 - TEACHERS[who]) / 0.75  # one in four jumps is right
        if rng is not None and who != "expert" and rng.random() < jumps:
            cause = pick(rng, data["causes"])
            questions = questions[:1]
            if who == SLOPPY:
                pairs = [[subject, topic] for subject in data["subjects"] for topic in data["topics"]]
                questions = sample(rng, pairs, int(rng.integers(4)))
        call = self.dialect.tool_call
        asks = [call("ask", {"subject": subject, "topic": topic}) for subject, topic in questions]
        return [*asks, call("solve", {}), f"<answer>{cause}</answer>"]

    def shortcut_guess(self, rng: np.random.Generator) -> list[str]:
        """Ask nothing, and draw one of the causes in the post-test."""
        causes = self.task.metadata["causes"]
        return [self.dialect.tool_call("solve", {}), f"<answer>{pick(rng, causes)}</answer>"]

    @staticmethod
    def vocabulary() -> list[str]:
        """Return every word of the shipped scenarios, in lower case, which a small tokenizer should keep whole."""
        return own_words()


def user_messages(task: Task, talk: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Return the messages for a `user`: a system message with the customer's knowledge, then the conversation.

    It is told from the customer's side: "assistant" is the customer and "user" the pharmacist. It ends with the
    pharmacist's last text; questions of `ask` are put into words. `talk` has pairs (text, reply); the last reply is not
    read.
    """
    data = task.metadata
    known = "\n".join(f"- {subject}, {topic}: {text}" for subject, topic, text in data["answers"])
    system = (
        "You play a customer in a pharmacy. Answer the pharmacist's last question in one or two sentences, only from "
        "what you know, and say nothing else about it. You don't know the cause of your problem. To what isn't listed "
        f"say: {data['others']}\nWhat you know:\n{known}"
    )
    messages = [{"role": "system", "content": system}, {"role": "assistant", "content": data["opening"]}]
    for spoken, reply in talk:
        messages += [{"role": "user", "content": spoken}, {"role": "assistant", "content": reply}]
    return messages[:-1]


def _posttest(task: Task) -> str:
    return f"{task.metadata['posttest']} {'; '.join(task.metadata['causes'])}. Answer as <answer>cause</answer>."


def _named(text: str, names: Mapping[str, Any]) -> str | None:
    """Return the name in a text, in any case and spacing."""
    wanted = " ".join(text[:200].casefold().split())
    return next((name for name in names if " ".join(name.casefold().split()) == wanted), None)
