"""The environment ShopWorld: four tools, the score of a purchase, and scripted demonstrators of several qualities."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from agent_r1.arguments import ArgumentError, integer
from agent_r1.baselines import Baselines
from agent_r1.dialects import Call
from agent_r1.task_data.webshop import Files, Goal, Product, find_webshop, load_webshop, split_goals
from agent_r1.tasks.demonstrators import SLOPPY, TEACHERS, demonstrator
from agent_r1.tasks.shop_world.agents import expert_plan, fallible_plan, sloppy_plan
from agent_r1.tasks.shop_world.catalogue import (
    ATTRIBUTES,
    NUM_TASKS,
    OPTIONS,
    SPLITS,
    TYPES,
    Shop,
    brands,
    generate_task,
    generated_shop,
    loaded_shop,
    shop_task,
)
from agent_r1.tasks.shop_world.reward import Nouns, purchase_score
from agent_r1.tool_env import End, Task, ToolEnv
from agent_r1_tools import Tool, ToolResult
from agent_r1_tools.search.bm25 import require_bm25
from agent_r1_tools.search.passages import one_line
from agent_r1_tools.search.search_tool import MAX_QUERY_CHARS
from agent_r1_tools.tool import encodable

DATA_SPLITS = ("train", "validation", "test")
MAX_TITLE, MAX_ABOUT = 100, 1_000  # characters on a page of a title, and of a description or the bullets


class ShopWorldEnv(Baselines, ToolEnv):
    """Purchases for a customer in a generated shop of thousands of products.

    ## Description
    A customer asks for a product of a type, with attributes, with options, below a price. The policy searches, opens a
    product of the results, chooses its options, and buys it. The purchase ends the episode. WebShop's reward pays it: a
    purchase that fits in part gets a part of the reward.

    The role is that of WebShop ([arXiv 2207.01206](https://arxiv.org/abs/2207.01206)). The shop is generated, and
    nothing has to be downloaded. With `data_dir` the shop is WebShop's. The environment needs the extra `search`.

    ## Tools

    - `search(query, page=1)` ranks products by BM25 over titles, descriptions and options.
    - `open(item)` shows the page of a product that a search has shown.
    - `choose(value)` chooses a value of an option of the open product. It replaces another value of this option.
    - `buy()` buys the open product with the chosen options.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `train`, `validation`, `test`, or a zero-shot variant (below) |
    | `world_seed` | `0` | the shop and its customers |
    | `page_size` | `4` | the number of results on a page |
    | `data_dir` | `None` | a folder with WebShop's own files |
    | `human_goals` | `True` | with `data_dir`, instructions written by people; `False`: synthetic ones |
    | `nouns` | `None` | a function that returns the nouns of a title; `None`: `title_nouns` |
    | `max_turns` | `10` | the maximum number of turns |
    | `max_action_tokens` | `512` | the maximum number of tokens in a turn |

    The zero-shot variants are `unseen_types`, `more_constraints` and `other_phrasings`. The other arguments are those
    of `ToolEnv`. A missing or damaged file raises DataNotFoundError or DataFormatError, with file, row and field.

    Rewards and baselines: docs/environments/shop_world.md.
    """

    floors: ClassVar[Mapping[str, float]] = {  # with all words as the query, the search engine solves much of the task
        "within_limit": 1.0, "cheapest": 0.66, "first_result": 0.55,
    }  # fmt: skip
    instructions = (
        "You shop for a customer. Search, open a product of the results, choose its options, then buy it. "
        "Buying ends the visit; what you bought is judged by how well it fits."
    )
    splits: ClassVar[Mapping[str, str]] = {name: name for name in SPLITS}
    PROCESS_WEIGHTS: ClassVar[Mapping[str, float]] = {
        **ToolEnv.PROCESS_WEIGHTS,
        "repeated_call": 0.0,  # the same option of another product, or back to the same results
    }
    teachers: ClassVar[tuple[str, ...]] = tuple(TEACHERS)

    def __init__(
        self,
        *,
        world_seed: int = 0,
        data_dir: str | os.PathLike[str] | None = None,
        human_goals: bool = True,
        page_size: int = 4,
        split: str = "train",
        nouns: Nouns | None = None,
        **kwargs: Any,
    ) -> None:
        integer("page_size", page_size, least=1)
        require_bm25()
        kwargs.setdefault("max_turns", 10)
        kwargs.setdefault("max_action_tokens", 512)  # a turn is short here, and a policy that babbles should not stall
        functions = (self.search, self.open, self.choose, self.buy)
        super().__init__([Tool.from_function(f, timeout=math.inf) for f in functions], split=split, **kwargs)
        self.world_seed, self.page_size, self.nouns = integer("world_seed", world_seed, least=0), page_size, nouns
        self._files: Files | None = None if data_dir is None else find_webshop(data_dir, human_goals)
        if self._files is not None and self.split not in DATA_SPLITS:
            splits = ", ".join(DATA_SPLITS)
            raise ArgumentError(f"split {split!r} belongs to the generated shop; WebShop's data has {splits}")
        if self._files is not None and not self._goals:
            raise ArgumentError(f"split {split!r} has no goal: of fewer than four all are in split 'train'")

    @classmethod
    def has_split(cls, split: str, **kwargs: Any) -> bool:
        """Return whether the split has tasks; WebShop's data has three splits."""
        return super().has_split(split) and (kwargs.get("data_dir") is None or split in DATA_SPLITS)

    @property
    def shop(self) -> Shop:
        """The catalogue, which all environments of a process share."""
        return generated_shop(self.world_seed) if self._files is None else loaded_shop(self._files)

    @property
    def _goals(self) -> Sequence[Goal]:
        assert self._files is not None
        return split_goals(load_webshop(self._files)[1], self.split)

    @property
    def goal(self) -> Goal:
        """The request of this episode's customer."""
        return Goal(**self.task.metadata["goal"])

    @property
    def num_tasks(self) -> int:
        """The number of tasks: a million in train, ten thousand in other splits; with `data_dir` its goals."""
        return NUM_TASKS.get(self.split, NUM_TASKS["test"]) if self._files is None else len(self._goals)

    def make_task(self, index: int) -> Task:
        """Generate task `index`, or take it from the data."""
        if self._files is None:
            return generate_task(self.world_seed, self.split, index)
        goal = self._goals[index]
        return shop_task(f"{self.split}-{index}", goal, search=goal.name, item=goal.asin)

    # ------------------------------------------------------------------ tools

    def search(self, query: str, page: int = 1) -> ToolResult:
        """Search the shop.

        Args:
            query: Words.
            page: Which page of the results.
        """
        self._leave()
        products = self.shop.search(encodable(query[:MAX_QUERY_CHARS]))
        pages = -(-len(products) // self.page_size)
        if not products:
            return ToolResult("No products found.")
        if not 1 <= page <= pages:
            return ToolResult(f"There is no such page; the results have {pages}.", ok=False)
        shown = products[(page - 1) * self.page_size : page * self.page_size]
        seen: list[str] = self.memory.setdefault("seen", [])
        seen.extend(product.asin for product in shown if product.asin not in seen)
        return ToolResult("\n".join([*map(_row, shown), f"Page {page} of {pages}."]))

    def open(self, item: str) -> ToolResult:
        """Open a product.

        Args:
            item: Its id in the results.
        """
        self._leave()
        product = self.shop.by_id.get(item.strip().lower())
        if product is None or product.asin not in self.memory.get("seen", ()):
            return ToolResult("No results so far have a product with this id.", ok=False)
        self.memory["item"] = product.asin
        about = [product.description, " ".join(product.bullets)]
        lines = [_row(product), *(_short(text, MAX_ABOUT) for text in about if text)]
        return ToolResult("\n".join([*lines, *map(_option_line, product.options.items())]))

    def choose(self, value: str) -> ToolResult:
        """Choose an option of the open product.

        Args:
            value: One of the values that the product has.
        """
        product = self._product
        if product is None:
            return ToolResult("Open a product first.", ok=False)
        wanted = value.strip().lower()
        kinds = [kind for kind, values in product.options.items() if wanted in values]
        if not kinds:
            lines = ["It has no such option.", *map(_option_line, product.options.items())]
            return ToolResult("\n".join(lines), ok=False)
        chosen: dict[str, str] = self.memory.setdefault("chosen", {})
        kind = next((kind for kind in kinds if kind not in chosen), kinds[-1])
        chosen[kind] = wanted
        return ToolResult(f"Chosen: {one_line(kind)} {one_line(wanted)}.")

    def buy(self) -> ToolResult:
        """Buy the open product with the chosen options. This ends the visit."""
        product = self._product
        if product is None:
            return ToolResult("Open a product first.", ok=False)
        data = {"item": product.asin, "options": dict(self.memory.get("chosen", {}))}
        return ToolResult(f"Bought {product.asin}.", data=data, done=True)

    @property
    def _product(self) -> Product | None:
        return self.shop.by_id[self.memory["item"].lower()] if "item" in self.memory else None

    def _leave(self) -> None:
        """Leave a product's page, and drop the chosen options, as in WebShop."""
        self.memory.pop("item", None)
        self.memory.pop("chosen", None)

    # ------------------------------------------------------------------ judgements

    def judge_result(self, call: Call, result: ToolResult) -> dict[str, float] | End:
        """End the episode with a purchase. The score is WebShop's, at most 1."""
        if not result.done:
            return {}
        product = self.shop.by_id[result.data["item"].lower()]
        score = purchase_score(product, self.goal, result.data["options"], self.nouns)
        total = min(1.0, score.total)
        option = {} if score.option is None else {"option": score.option}
        parts = {"type": score.type, "attribute": score.attribute, "price": score.price}
        return End(total, metrics={"score": total, **parts, **option})

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        """Score an answer 0: it buys nothing."""
        return 0.0, {"score": 0.0}

    def judge_end(self, score: float, *, answer: str, answer_ok: bool, calls_ok: bool) -> float:
        """Pay the score of the purchase, 0 without one. A wrong format costs process terms only."""
        return score

    # ------------------------------------------------------------------ demonstrations

    def demonstration(self, rng: np.random.Generator | None = None, teacher: str | None = None) -> list[str]:
        """Return the turns of a scripted agent on the current task as text, one call a turn.

        `teacher` is one of `teachers`: the expert, or an agent that succeeds in a percentage of the episodes, which
        needs `rng`. None: the expert, or with `rng` the sloppy agent from which the shipped policy was made.
        """
        who = demonstrator(rng, teacher)
        if rng is None or who == "expert":
            plan = expert_plan(self)
        elif who == SLOPPY:
            plan = sloppy_plan(self, rng)
        else:
            plan = fallible_plan(self, rng, TEACHERS[who])
        page = {"page": plan.page} if plan.page > 1 else {}
        calls: list[tuple[str, dict[str, Any]]] = [("search", {"query": plan.query} | page)]
        if plan.item is not None:
            calls += [("open", {"item": plan.item}), *(("choose", {"value": value}) for value in plan.values)]
        return [self.dialect.tool_call(name, arguments) for name, arguments in [*calls, ("buy", {})]]

    def shortcut_first_result(self, rng: np.random.Generator) -> Iterator[str]:
        """Search with the question, and buy the first result at any price, with its options that the question names."""
        yield from self._buy(self.shop.search(self.task.question[:MAX_QUERY_CHARS])[:1])

    def shortcut_cheapest(self, rng: np.random.Generator) -> Iterator[str]:
        """Do the same with the cheapest product of the first page."""
        page = self.shop.search(self.task.question[:MAX_QUERY_CHARS])[: self.page_size]
        yield from self._buy(sorted(page, key=lambda product: product.price)[:1])

    def shortcut_within_limit(self, rng: np.random.Generator) -> Iterator[str]:
        """Do the same with the first product of the first page within the limit, the last number of the question."""
        page = self.shop.search(self.task.question[:MAX_QUERY_CHARS])[: self.page_size]
        limit = float([math.inf, *re.findall(r"\d+(?:\.\d+)?", self.task.question)][-1])
        yield from self._buy([product for product in page if product.price <= limit][:1])

    def _buy(self, chosen: Sequence[Product]) -> Iterator[str]:
        call = self.dialect.tool_call
        yield call("search", {"query": self.task.question})
        for product in chosen:
            yield call("open", {"item": product.asin})
            named = re.findall(r"\w+", self.task.question.lower())
            values = [value for group in product.options.values() for value in group if value in named]
            yield from (call("choose", {"value": value}) for value in values)
        yield call("buy", {})

    @staticmethod
    def vocabulary() -> list[str]:
        """Return every word of the shop, and the digits, which a small tokenizer should keep whole."""
        values = [value for group in OPTIONS.values() for value in group]
        return [*brands(), *TYPES, *ATTRIBUTES, *OPTIONS, *values, *"0123456789"]


def _row(product: Product) -> str:
    """Format a product as one line, price first."""
    return f"${product.price:.2f} ".replace(".00 ", " ") + f"{product.asin}: {_short(product.name, MAX_TITLE)}"


def _option_line(option: tuple[str, tuple[str, ...]]) -> str:
    return _short(f"{option[0]}: {', '.join(option[1])}", MAX_ABOUT)


def _short(text: str, length: int) -> str:
    line = one_line(text)
    return line if len(line) <= length else line[:length] + "..."
