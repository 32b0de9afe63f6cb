"""Multi-hop question answering with a search tool: HotpotQA, 2WikiMultihopQA and MuSiQue.

The policy gets a question, searches as often as it wants within its turns, and answers in `<answer>...</answer>`.
`QuestionAnsweringEnv` has the corpora, the process terms and the score of an answer. A data set only adds its
questions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from agent_r1.arguments import ArgumentError
from agent_r1.baselines import ONLY_EXPERTS, Baselines
from agent_r1.dialects import Call
from agent_r1.rewards import PROCESS_WEIGHTS, exact_match, f1
from agent_r1.task_data import has_questions, load_questions
from agent_r1.tool_env import Task, ToolEnv
from agent_r1_tools import Tool, ToolResult
from agent_r1_tools.search import (
    BM25Retriever,
    HTTPRetriever,
    LookupTool,
    Passage,
    Retriever,
    SearchTool,
    load_corpus,
)
from agent_r1_tools.search.words import fold_title

logger = logging.getLogger(__name__)

# Corpora and indexes are cached for the process: checks, vector environments and groups of equal tasks share them.
_own_index = lru_cache(maxsize=256)(BM25Retriever)
_LARGE = 100_000  # passages; indexing a larger corpus takes long, so it is logged


# A tool's own bugs, which the policy reads. (Infrastructure errors are retried or end the episode.)
_TOOL_BUGS = frozenset({"timeout", "exception", "bad_result"})


@lru_cache(maxsize=4)
def _shared_index(passages: tuple[Passage, ...]) -> BM25Retriever:
    if len(passages) > _LARGE:
        logger.warning("indexing %d passages; once per process", len(passages))
    return BM25Retriever(passages)


@lru_cache(maxsize=4)
def _corpus_file(path: Path, mtime_ns: int, size: int) -> tuple[Passage, ...]:
    return tuple(dict.fromkeys(load_corpus(path)))


@lru_cache(maxsize=4)
def _server(address: str) -> HTTPRetriever:
    return HTTPRetriever(address, "search" if address.rstrip("/").endswith("/search") else "retrieve", check=False)


def shared_corpus(corpus: str | os.PathLike[str] | Retriever) -> tuple[Retriever, tuple[Passage, ...] | None]:
    """Return a retriever for a file of passages, with these passages; for the address of a server; or the given one.

    Raises: FileNotFoundError for a missing file; RetrievalError for a server that does not answer.
    """
    if not isinstance(corpus, str | os.PathLike):
        return corpus, None
    if str(corpus).startswith(("http://", "https://")):
        server = _server(str(corpus))
        server.check()
        return server, None
    if not (path := Path(corpus)).is_file():
        raise FileNotFoundError(
            f"there is no corpus file {str(corpus)!r}; a corpus must be a file of JSON lines with title and text, the "
            "http(s) address of a retrieval server, or a retriever; for questions with passages also 'own' or 'pooled'"
        )
    passages = _corpus_file(path, path.stat().st_mtime_ns, path.stat().st_size)
    return _shared_index(passages), passages


class QuestionAnsweringEnv(Baselines, ToolEnv):
    """Questions that are answered with the help of a search tool; the base of the environments of this kind.

    A subclass gives `num_tasks` and `make_task`. What the judges read in `Task.metadata`:

        supports          titles of the gold passages
        passages          [(title, text), ...]: the passages that come with the question, the corpus "own"
        support_indexes   which of them are gold; without it, those whose title is in `supports`

    Args:
        corpus: "own" (the passages of the question), "pooled" (those of all questions of the split), a file of JSON
            lines with `title` and `text`, the http(s) address of a retrieval server (Search-R1's protocol, or
            Agent-R1's where the address ends in /search; see `HTTPRetriever`), or a `Retriever`.
        top_k: passages in one search result, at most.
        tools: "search", "lookup" (a passage by its title; not with a server or a retriever), or both.
        kwargs: the arguments of `ToolEnv`.

    Raises: FileNotFoundError for a corpus file that isn't there; RetrievalError for a server that doesn't answer.
    """

    instructions = (
        "Answer the question. Look facts up with the tools, one step at a time. "
        "When you know the answer, give it in as few words as possible as <answer>your answer</answer>."
    )
    outcome_term: ClassVar[str] = "outcome/exact_match"
    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = PROCESS_WEIGHTS
    yes_no_rule: ClassVar[bool] = True  # how F1 treats yes and no, see rewards.f1

    def __init__(
        self,
        *,
        corpus: str | os.PathLike[str] | Retriever = "own",
        top_k: int = 5,
        tools: Sequence[str] = ("search",),
        **kwargs: Any,
    ) -> None:
        unknown = [name for name in tools if name not in ("search", "lookup")]
        if unknown or not tools or isinstance(tools, str):
            raise ArgumentError(f"tools must be a tuple of 'search' or 'lookup' or both, got {tools!r}")
        if isinstance(corpus, str | os.PathLike) or not hasattr(corpus, "search"):
            corpus = str(corpus)
        self.corpus: str | Retriever = corpus
        self.top_k = top_k
        self._tool_names = tuple(tools)
        super().__init__(self._shared_tools(), **kwargs)
        self._gold: list[tuple[str, str | None]] = []
        self._unique_titles: set[str] = set()

    # ------------------------------------------------------------------ corpora

    def own_retriever(self, task: Task) -> Retriever:
        """Return the index of corpus "own": BM25 over the question's passages."""
        return _own_index(_passages(task))

    def pooled_passages(self) -> tuple[Passage, ...]:
        """Return the passages of corpus "pooled", each once."""
        raise ArgumentError(f"{type(self).__name__} has no corpus 'pooled'")

    def _shared_tools(self) -> list[Tool]:
        """Return the tools over a corpus that all episodes share; for "own" over nothing, until an episode begins."""
        if self.corpus == "own":
            return self._tools(_shared_index(()), ())
        if self.corpus == "pooled":
            passages = self.pooled_passages()
            return self._tools(_shared_index(passages), passages)
        retriever, file_passages = shared_corpus(self.corpus)
        if file_passages is not None:
            return self._tools(retriever, file_passages)
        if self._tool_names != ("search",):
            raise ArgumentError(
                "a retriever or a retrieval server can only search; lookup needs corpus 'own', 'pooled' or a file"
            )
        return [SearchTool(retriever, self.top_k)]

    def _tools(self, retriever: Retriever, passages: tuple[Passage, ...]) -> list[Tool]:
        return [
            SearchTool(retriever, self.top_k) if name == "search" else LookupTool(passages) for name in self._tool_names
        ]

    # ------------------------------------------------------------------ what things mean

    def start_episode(self, task: Task) -> None:
        """Give the tools the question's own passages (if that is the corpus) and note which are gold."""
        passages = _passages(task)
        if self.corpus == "own":
            self.tools = {tool.name: tool for tool in self._tools(self.own_retriever(task), passages)}
        titles = [fold_title(passage.title) for passage in passages]
        self._unique_titles = {title for title in titles if titles.count(title) == 1}
        self._gold = _gold(task)

    def potential(self) -> float:
        """Return the share of the gold passages that were found. The argument `shaping` pays its differences."""
        return len(self.memory.get("supports_found", ())) / len(self._gold) if self._gold else 0.0

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float]:
        """Return `support_found`: newly found gold passages / all gold passages. It also counts a tool's own bugs."""
        data = result.data if isinstance(result.data, dict) else {}
        if not result.ok:
            if data.get("error") in _TOOL_BUGS:
                self.memory["tool_bugs"] = self.memory.get("tool_bugs", 0) + 1
            return {}
        found: list[int] = self.memory.setdefault("supports_found", [])
        new = [
            index
            for index, gold in enumerate(self._gold)
            if index not in found and any(self._is_gold(hit, gold) for hit in _hits(data))
        ]
        found.extend(new)
        return {"support_found": len(new) / len(self._gold)} if new else {}

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Score exact match; the metrics are em, f1, tool_bugs and, with tools, support_recall.

        An empty answer scores 0.
        """
        em, f1_score = 0.0, 0.0
        if answer.strip():
            em = exact_match(answer, self.task.answers)
            f1_score = f1(answer, self.task.answers, self.yes_no_rule)
        metrics = {"em": em, "f1": f1_score}
        if self.tools:  # without tools, as in the one-turn baselines, nothing can be found
            found = len(self.memory.get("supports_found", ()))
            metrics["support_recall"] = found / len(self._gold) if self._gold else 1.0
        return em, metrics | {"tool_bugs": float(self.memory.get("tool_bugs", 0))}

    def _is_gold(self, hit: tuple[str, str], gold: tuple[str, str | None]) -> bool:
        """Return whether title and text are equal. In a foreign corpus a title is enough if it is unique."""
        if fold_title(hit[0]) != fold_title(gold[0]):
            return False
        from_elsewhere = self.corpus not in ("own", "pooled")
        return (
            gold[1] is None
            or " ".join(hit[1].split()) == " ".join(gold[1].split())
            or (from_elsewhere and fold_title(gold[0]) in self._unique_titles)
        )


def _passages(task: Task) -> tuple[Passage, ...]:
    """Return the passages of a task, each once (2WikiMultihopQA lists some twice)."""
    return tuple(dict.fromkeys(Passage(title, text) for title, text in task.metadata.get("passages", ())))


def _gold(task: Task) -> list[tuple[str, str | None]]:
    """Return (title, text) of the gold passages; the text is None if the question does not include the passage."""
    passages = task.metadata.get("passages", ())
    titles = task.metadata.get("supports", ())
    indexes = task.metadata.get("support_indexes")
    if indexes is None:
        indexes = [index for index, (title, _) in enumerate(passages) if title in titles]
    gold: list[tuple[str, str | None]] = [tuple(passages[index]) for index in indexes]
    included = {title for title, _ in gold}
    return gold + [(title, None) for title in titles if title not in included]


def _hits(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (title, text) of the results of a search or lookup."""
    return list(zip(data.get("titles", ()), data.get("texts", ()), strict=False))


# ---------------------------------------------------------------------- the data sets


class MultihopQAEnv(QuestionAnsweringEnv):
    """A data set of multi-hop questions in its official format; see `HotpotQAEnv` and its siblings."""

    data_set: ClassVar[str]
    floor = 0.1  # questions whose answer is yes: 2 to 8 % in HotpotQA and 2WikiMultihopQA
    instructions = (
        "Answer the question. You may reason inside <think></think> first. Search for the facts you need, as often "
        "as you need; each search gives you a few passages. When you know the answer, give it, as short as possible "
        "and without an explanation, as <answer>your answer</answer>."
    )
    splits: ClassVar[Mapping[str, str]] = {"train": "train", "dev": "dev", "validation": "dev"}

    def __init__(
        self,
        *,
        split: str = "train",
        data_dir: str | os.PathLike[str] | None = None,
        corpus: str | os.PathLike[str] | Retriever = "own",
        top_k: int = 5,
        tools: Sequence[str] = ("search",),
        **kwargs: Any,
    ) -> None:
        self.questions = load_questions(self.data_set, split, data_dir)
        super().__init__(split=split, corpus=corpus, top_k=top_k, tools=tools, **kwargs)

    @classmethod
    def has_split(cls, split: str, **kwargs: Any) -> bool:
        """Return whether the folder, if one is given, has the file of a split."""
        return super().has_split(split) and has_questions(cls.data_set, split, kwargs.get("data_dir"))

    @property
    def num_tasks(self) -> int:
        """The number of questions of the split."""
        return len(self.questions)

    def make_task(self, index: int) -> Task:
        """Return question `index` in the order of the file."""
        question = self.questions[index]
        metadata = {
            **question.metadata,
            "supports": list(question.support_titles),
            "support_indexes": list(question.supports),
            "passages": [(passage.title, passage.text) for passage in question.paragraphs],
        }
        return Task(question.id, question.question, list(question.answers), metadata)

    def pooled_passages(self) -> tuple[Passage, ...]:
        """Return the paragraphs of all questions of the split, each (title, text) once, in the order of the file."""
        return tuple(dict.fromkeys(p for question in self.questions for p in question.paragraphs))

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return the expert's turns on the current task as text: a search for each gold title, then the gold answer.

        Raises: ValueError with `rng`: no demonstrator makes mistakes here, there is only the expert.
        """
        if rng is not None:
            raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
        titles = self.task.metadata["supports"][: self.max_turns - 1]
        searches = [self.dialect.tool_call("search", {"query": title}) for title in titles]
        return [*searches, f"<answer>{self.task.answers[0]}</answer>"]

    def shortcut_yes(self, rng: np.random.Generator) -> list[str]:
        """Answer yes to every question."""
        return ["<answer>yes</answer>"]


class HotpotQAEnv(MultihopQAEnv):
    """Questions over two Wikipedia paragraphs, in the distractor setting (HotpotQA, arXiv 1809.09600).

    ## Description
    A question of [HotpotQA](https://hotpotqa.github.io) (Yang et al. 2018,
    [arXiv 1809.09600](https://arxiv.org/abs/1809.09600)) needs two gold paragraphs: a bridge from one to the other, or
    a comparison of the two. The policy searches among ten paragraphs, or in a larger corpus, as often as its turns
    allow. It ends the episode with `<answer>...</answer>`. The prompt has the instructions, the tools' schemas and the
    question. Paragraphs only come through tools.

    The data is under CC BY-SA 4.0 and is not part of this package. The environment needs the extra `search`.

    ## Tools

    - `search(query)` returns up to `top_k` passages, best first.
    - `lookup(title)` returns the passages with this title. It is optional: `tools=("search", "lookup")`.

    At most eight calls of one turn are run.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `"train"` or `"dev"` (also `"validation"`) |
    | `data_dir` | `None` | the folder with the data files |
    | `corpus` | `"own"` | the searched passages (below) |
    | `top_k` | `5` | the maximum number of passages in a search result |
    | `tools` | `("search",)` | `"search"`, `"lookup"` or both |
    | `process_reward` | `True` | `False`: no process terms; a dict: new weights, such as `{"support_found": 0.5}` |

    `corpus` is one of these:

    - `"own"`: the paragraphs of the question;
    - `"pooled"`: the paragraphs of all questions of the split;
    - a file of JSON lines with `title` and `text`;
    - the address of a retrieval server, or a `Retriever`; both without `lookup`.

    The other arguments are those of `ToolEnv`.

    Rewards and baselines: docs/environments/hotpotqa.md.
    """

    data_set: ClassVar[str] = "hotpotqa"


class TwoWikiMultihopQAEnv(MultihopQAEnv):
    """Questions over two to four Wikipedia paragraphs, made from Wikidata (2WikiMultihopQA, arXiv 2011.01060).

    ## Description
    [2WikiMultihopQA](https://github.com/Alab-NII/2wikimultihop) (Ho et al. 2020,
    [arXiv 2011.01060](https://arxiv.org/abs/2011.01060)) has compositional, inference, comparison and bridge-comparison
    questions, made from relations of Wikidata. Two or four of the ten paragraphs of a question are gold. The policy
    searches and answers as in HotpotQA.

    The data is under Apache-2.0 and is not part of this package. The environment needs the extra `search`.

    ## Tools
    `search(query)` and, optionally, `lookup(title)`, as in `HotpotQAEnv`.

    ## Arguments
    The arguments are those of `HotpotQAEnv`. The folder `data_dir` has `train.json` and `dev.json`. If it also has the
    official `id_aliases.json`, any alias or demonym of the gold answer is right.

    Rewards and baselines: docs/environments/2wikimultihopqa.md.
    """

    data_set: ClassVar[str] = "2wikimultihopqa"


class MuSiQueEnv(MultihopQAEnv):
    """Questions of two to four hops that can't be answered by shortcuts: MuSiQue-Answerable (arXiv 2108.00573).

    ## Description
    [MuSiQue-Answerable](https://github.com/StonyBrookNLP/musique) (Trivedi et al. 2022, [arXiv
    2108.00573](https://arxiv.org/abs/2108.00573)) has questions of two to four hops. They are built so that no hop can
    be skipped. Each question has twenty paragraphs, and two to four of them are gold. The policy searches and answers
    as in HotpotQA. Agent-R1 uses this data set as its out-of-domain test.

    The data is under CC BY 4.0 and is not part of this package. The environment needs the extra `search`.

    ## Tools
    `search(query)` and, optionally, `lookup(title)`, as in `HotpotQAEnv`. A search for each hop and an answer need up
    to five of the six turns.

    ## Arguments
    The arguments are those of `HotpotQAEnv`. The folder `data_dir` has `musique_ans_v1.0_train.jsonl` and
    `musique_ans_v1.0_dev.jsonl`.

    Rewards and baselines: docs/environments/musique.md.
    """

    data_set: ClassVar[str] = "musique"
    floor = 0.02  # no answer is yes
    yes_no_rule: ClassVar[bool] = False
