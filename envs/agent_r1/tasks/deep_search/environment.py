"""The environment DeepSearch: its tools, the score of a cited answer, and its scripted demonstrators."""

from __future__ import annotations

import math
import os
import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from agent_r1.arguments import ArgumentError, integer
from agent_r1.baselines import ONLY_EXPERTS, Baselines
from agent_r1.dialects import Call
from agent_r1.rewards import exact_match, f1
from agent_r1.task_data import DataNotFoundError, Question, load_questions
from agent_r1.tasks.deep_search.experts import MISTAKES, work
from agent_r1.tasks.deep_search.generator import FILLERS, PAGE_IDS, PORTRAIT, SPLITS, WINDOW, YEARS, generate_task
from agent_r1.tasks.deep_search.pages import (
    Page,
    PageSearch,
    Web,
    generated_web,
    gold_passages,
    key,
    page_id,
    passage_pages,
    question_task,
    task_pages,
)
from agent_r1.tasks.demonstrators import TEACHERS, demonstrator
from agent_r1.tasks.multihop_world import MultihopWorldEnv
from agent_r1.tasks.question_answering import shared_corpus
from agent_r1.tool_env import Task, ToolEnv
from agent_r1_tools import Tool, ToolFault, ToolResult, run_tool
from agent_r1_tools.running import describe
from agent_r1_tools.search import Passage, Retriever
from agent_r1_tools.search.passages import QueryRefused
from agent_r1_tools.search.words import fold
from agent_r1_tools.text import encodable

QUESTIONS = ("hotpotqa", "2wikimultihopqa", "musique")
NUM_TASKS = {"train": 1_000_000}
MAX_FOUND = 10  # lines that `find` shows
OPEN_HITS = 20  # number of hits that `open` requests from a server
_CITATION = re.compile(r"\[([^\[\]]*)\]")


class DeepSearchEnv(Baselines, ToolEnv):
    """Questions about linked pages that the policy searches, opens, reads and cites.

    ## Description
    A question follows relations from one person to the next: "Who is the pilot of the deputy of Lobrek?". Each fact is
    on its own page. The answer cites its pages in square brackets: `<answer>Kelvon [p12] [p34]</answer>`. An answer
    ends the episode.

    The default web is generated for every task, with invented names, so nothing has to be downloaded. The environment
    needs the extra `search`. A web has these traps:

    - A search for a name finds a person's page. Where a person has two pages, the newer one is right. The older one
      leads to another answer. Every task has at least one such pair on its way.
    - Some pages do not contain the name (a portrait of "this person"). Only a link finds such a page: "is described on
      page [p31]".
    - A long page shows its fact only to `find`.
    - Every person in a fact has a page, with facts about the same relations.

    Questions of HotpotQA, 2WikiMultihopQA or MuSiQue can replace the generated ones.

    ## Tools

    - `search(query)` lists pages by title, year and first line.
    - `open(page)` shows the beginning of a page.
    - `find(text)` shows the lines of the open page that contain a text.

    At most eight calls of one turn are run.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `train`, `test`, `pages_N` (N = 2, 3, 4, 6, 8), `unseen_entities`, `other_phrasings` |
    | `world_seed` | `0` | the family of worlds |
    | `questions` | `None` | `"hotpotqa"`, `"2wikimultihopqa"` or `"musique"` instead of generated questions |
    | `data_dir` | `None` | the folder with the files of `questions` |
    | `corpus` | `"own"` | the searched pages (below) |
    | `top_k` | `5` | the maximum number of pages in a search result |
    | `max_turns` | `30` | the maximum number of turns |
    | `max_action_tokens` | `512` | the maximum number of tokens in a turn |

    `corpus` is one of these:

    - `"own"`: the pages of the task;
    - `"pooled"`, with `questions`: the pages of all questions in the file;
    - a file of passages, the address of a retrieval server, or a `Retriever`.

    A generated task is a function of `world_seed`, split and index. The other arguments are those of `ToolEnv`.

    Rewards and baselines: docs/environments/deep_search.md.
    """

    instructions = (
        "Answer the question from pages of a web. search lists pages, open shows a page by its name in [brackets], "
        "find shows the lines of the open page that contain a text. Where two pages contradict each other, the newer "
        "one is right. Give the answer in as few words as possible, and cite each page it rests on, and no other, as "
        "<answer>your answer [page] [page]</answer>."
    )
    outcome_term: ClassVar[str] = "outcome/cited_answer"
    splits: ClassVar[Mapping[str, str]] = {name: name for name in SPLITS}
    depends_on: ClassVar[Mapping[str, str]] = {"find": "read"}  # on another page the same text may be looked for again
    teachers: ClassVar[tuple[str, ...]] = tuple(TEACHERS)
    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = {
        **ToolEnv.PROCESS_WEIGHTS,
        "page_found": 0.3,  # times newly opened gold pages / all gold pages
    }

    def __init__(
        self,
        *,
        world_seed: int = 0,
        split: str = "train",
        questions: str | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        corpus: str | os.PathLike[str] | Retriever = "own",
        top_k: int = 5,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("max_turns", 30)
        kwargs.setdefault("max_action_tokens", 512)
        if isinstance(corpus, str | os.PathLike) or not hasattr(corpus, "search"):
            corpus = str(corpus)
        if questions is None and (data_dir is not None or corpus == "pooled"):
            raise ArgumentError(
                f"each generated task has its own web; data_dir and corpus='pooled' need questions=, one of "
                f"{', '.join(QUESTIONS)}; got data_dir={data_dir!r}, corpus={corpus!r}"
            )
        if questions is not None and questions not in QUESTIONS:
            raise ArgumentError(f"questions must be None or one of {', '.join(QUESTIONS)}, got {questions!r}")
        self.world_seed = integer("world_seed", world_seed, least=0)
        self.questions: list[Question] | None = None
        pool: list[Question] = []
        if questions is not None and split in self.splits:  # other splits are rejected below
            self.questions, pool = _questions(questions, split, data_dir)
        self.corpus: str | Retriever = corpus
        self.top_k = top_k
        self._gold: set[str] = set()
        self._web: Web | None = None  # None: a retriever or a server finds the pages
        self._retriever: Retriever | None = None
        if corpus == "pooled":
            self._web = _corpus_web(tuple(dict.fromkeys(p for question in pool for p in question.paragraphs)))
        elif corpus != "own":
            self._retriever, passages = shared_corpus(corpus)
            self._web = None if passages is None else _corpus_web(passages)
        else:
            self._web = generated_web(())
        super().__init__(self._episode_tools(), split=split, **kwargs)

    def _episode_tools(self) -> list[Tool]:
        retriever = self._retriever if self._web is None else self._web.retriever
        assert retriever is not None
        return [
            PageSearch(retriever, self.top_k, self._web),
            Tool.from_function(
                self.open,
                timeout=retriever.timeout,
                concurrency_safe=False,
                timeout_is_fault=True,
                repeatable=True,
            ),
            Tool.from_function(self.find, timeout=math.inf, concurrency_safe=False),
        ]

    @classmethod
    def has_split(cls, split: str, **kwargs: Any) -> bool:
        """Return whether the split has tasks; with `questions`, whether its files have questions for it."""
        name = kwargs.get("questions")
        if name not in QUESTIONS or not super().has_split(split):
            return super().has_split(split)
        try:
            return bool(_questions(name, split, kwargs.get("data_dir"))[0])
        except (ArgumentError, DataNotFoundError):
            return False

    @property
    def num_tasks(self) -> int:
        """The number of tasks: a million in train, ten thousand in other splits; or the questions of a data set."""
        return NUM_TASKS.get(self.split, 10_000) if self.questions is None else len(self.questions)

    def make_task(self, index: int) -> Task:
        """Generate task `index`, or take question `index`."""
        if self.questions is None:
            return generate_task(self.world_seed, self.split, index)
        return question_task(self.questions[index])

    def start_episode(self, task: Task) -> None:
        """Give the tools the task's own pages, if these are the corpus."""
        if self.corpus == "own":
            self._web = generated_web(task_pages(task))
            self.tools = {tool.name: tool for tool in self._episode_tools()}
        self._gold = {key(name) for name in self._gold_names(task)}

    def _gold_names(self, task: Task) -> list[str]:
        """Return the ids of the gold pages in this corpus: of the same passage, or else by its title."""
        if self.corpus == "own":
            return list(task.metadata["supports"])
        pages = {} if self._web is None else self._web.by_passage
        return [pages[gold].id if gold in pages else page_id(gold.title) for gold in gold_passages(task)]

    # ------------------------------------------------------------------ what can be done

    def open(self, page: str) -> ToolResult:
        """Open a page, and read how it begins.

        Args:
            page: The name of the page, as it stands in [brackets].
        """
        memory = self.memory  # of this episode, also where the search for the page outlasts it
        result_page = self._page(page)
        if result_page is None:
            return ToolResult("There is no such page. Give the name as search and links show it.", ok=False)
        memory["page"] = result_page.id
        if self._web is None:
            memory["text"] = result_page.text
        shown, rest = result_page.lines[:WINDOW], len(result_page.lines) - WINDOW
        more = [f"({rest} more lines: find shows those that contain a text.)"] if rest > 0 else []
        return ToolResult("\n".join([result_page.heading, *shown, *more]), data={"page": result_page.id})

    def find(self, text: str) -> ToolResult:
        """Find a text on the open page; shows the lines that contain it.

        Args:
            text: The text, in any case.
        """
        name, wanted = self.memory.get("page"), fold(text).strip()
        if name is None:
            return ToolResult("No page is open.", ok=False)
        if not wanted:
            return ToolResult("Give a text to find.", ok=False)
        page = Page(name, name, self.memory["text"]) if self._web is None else self._web.pages[key(name)]
        lines = [line for line in page.lines if wanted in fold(line)]
        if not lines:
            return ToolResult(f"No line of [{name}] contains it.")
        more = [f"({len(lines) - MAX_FOUND} more lines contain it.)"] if len(lines) > MAX_FOUND else []
        return ToolResult("\n".join([f"[{name}]", *lines[:MAX_FOUND], *more]))

    def _page(self, name: str) -> Page | None:
        """Return a page by its id. A server is asked for the title, and only a page with exactly that title counts."""
        name = name[:500].strip().removeprefix("[").removesuffix("]")
        if self._web is not None:
            return self._web.pages.get(key(name))
        assert self._retriever is not None
        try:
            (hits,) = self._retriever.search([unicodedata.normalize("NFC", encodable(name))], OPEN_HITS)
        except QueryRefused:
            return None
        except OSError as error:  # an error of the server: a title is not a path
            raise ToolFault(describe(error)) from error
        candidates = (Page(page_id(passage.title), passage.title, passage.text) for passage, _ in hits)
        return next((page for page in candidates if key(page.id) == key(name)), None)

    # ------------------------------------------------------------------ judges

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float]:
        """Return `page_found`: newly opened gold pages / all gold pages."""
        if call.name != "open" or not result.ok:
            return {}
        opened, page = self.memory.setdefault("opened", []), key(result.data["page"])
        self.memory["read"] = page  # when this call was made; all calls of a turn have run by now
        if page in opened:
            return {}
        opened.append(page)
        return {"page_found": 1 / len(self._gold)} if page in self._gold else {}

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Score exact match x F1 of the citations; the metrics have both separately."""
        text, cited = read_citations(answer, set(self.memory.get("opened", ())) | self._gold)
        opened = self._gold & set(self.memory.get("opened", ()))
        right = len(cited & opened)
        em = exact_match(text, self.task.answers) if text else 0.0
        score = em * 2 * right / (len(cited) + len(self._gold)) if cited else 0.0
        return score, {
            "em": em,
            "f1": f1(text, self.task.answers, yes_no_rule=False) if text else 0.0,
            "citation_precision": right / len(cited) if cited else 0.0,
            "citation_recall": right / len(self._gold),
            "page_recall": len(opened) / len(self._gold),
        }

    # ------------------------------------------------------------------ demonstrators

    def demonstration(self, rng: np.random.Generator | None = None, teacher: str | None = None) -> list[str]:
        """Return the turns of a scripted demonstrator on the current task as text.

        Args:
            rng: None: the expert, which needs `metadata["optimal_turns"]` turns. With `questions` or another corpus it
                searches for each gold title, opens it, and gives the gold answer.
            teacher: with `rng`, a name of `teachers`: the fallible ones make a mistake in 25, 50 and 75 % of the
                episodes. None: the sloppy demonstrator, which makes one in every episode. See `MISTAKES`.

        Raises: ValueError for an unknown teacher, for a fallible one without `rng`, and with `rng` if there is only the
        expert.
        """
        who = demonstrator(rng, teacher)
        if self.questions is not None or self.corpus != "own":
            if who != "expert":
                raise ValueError(ONLY_EXPERTS.format(name=type(self).__name__))
            return self._title_by_title()
        mistake = None
        if rng is not None and who != "expert" and rng.random() < 1 - TEACHERS.get(who, 0.0):
            mistake = str(rng.choice(list(MISTAKES), p=list(MISTAKES.values())))
        steps, answer = work(self.task, mistake, rng)
        turns = [
            (f"<think>{thought}</think>" if thought else "") + self.dialect.tool_call(name, arguments)
            for thought, name, arguments in steps
        ]
        return [*turns, f"<answer>{answer}</answer>"]

    def shortcut_last_relation(self, rng: np.random.Generator) -> list[str]:
        """Search for the question's last relation, open all hits, and answer with the first hit's value, citing all.

        It exists for the generated web only.
        """
        relation = self.task.metadata["relations"][-1]
        hits = run_tool(self.tools["search"], {"query": relation}).data["pages"]
        values = [facts[relation] for page in hits if relation in (facts := self.task.metadata["facts"][page])]
        opened = [self.dialect.tool_call("open", {"page": page}) for page in hits]
        cited = "".join(f" [{page}]" for page in hits)
        return [self.dialect.tool_call("search", {"query": relation}), *opened, f"<answer>{values[0]}{cited}</answer>"]

    def _title_by_title(self) -> list[str]:
        titles = [passage.title for passage in gold_passages(self.task)]
        pages = self._gold_names(self.task)
        call = self.dialect.tool_call
        turns = [
            turn
            for title, page in zip(titles, pages, strict=True)
            for turn in (call("search", {"query": title}), call("open", {"page": page}))
        ]
        return [*turns, f"<answer>{self.task.answers[0]} {' '.join(f'[{page}]' for page in pages)}</answer>"]

    @staticmethod
    def vocabulary() -> list[str]:
        """Return every word of the generated webs, which a small tokenizer should keep whole."""
        fillers = [word for filler in FILLERS for word in filler.split()]
        words = [*MultihopWorldEnv.vocabulary(), *PAGE_IDS, *map(str, YEARS), *fillers, PORTRAIT, "Notes"]
        return list(dict.fromkeys(words))


def read_citations(answer: str, known: set[str]) -> tuple[str, set[str]]:
    """Return the text of an answer without its citations, and the cited pages (in the form of `key`).

    Text in square brackets is a citation: the name of a page in `known`, or else names separated by commas.
    """
    cited: set[str] = set()
    for inside in _CITATION.findall(answer):
        parts = [inside] if key(inside) in known else inside.split(",")
        cited |= {key(part) for part in parts if part.strip()}
    return " ".join(_CITATION.sub(" ", answer).split()), cited


def _questions(name: str, split: str, data_dir: str | os.PathLike[str] | None) -> tuple[list[Question], list[Question]]:
    """Return the questions of a split that name their gold pages, and all of the file; test and pages_N use dev."""
    if split in ("unseen_entities", "other_phrasings"):
        raise ArgumentError(f"split {split!r} belongs to the generated web; {name} has train, test and pages_N")
    rows = load_questions(name, "train" if split == "train" else "dev", data_dir)
    wanted = int(split.removeprefix("pages_")) if split.startswith("pages_") else None
    gold = [len(question_task(row).metadata["supports"]) for row in rows]
    questions = [row for row, number in zip(rows, gold, strict=True) if number and wanted in (None, number)]
    if not questions:
        raise ArgumentError(f"no question of {name} fits split {split!r}: none has that many gold pages")
    return questions, rows


@lru_cache(maxsize=4)
def _corpus_web(passages: tuple[Passage, ...]) -> Web:
    return Web(passage_pages(passages))
