"""Scripted agents: what they search for, buy and choose. One never errs, some err once, one is sloppy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent_r1.tasks.draw import pick
from agent_r1.tasks.shop_world.reward import purchase_score

if TYPE_CHECKING:
    import numpy as np

    from agent_r1.task_data.webshop import Product
    from agent_r1.tasks.shop_world.environment import ShopWorldEnv


@dataclass(frozen=True)
class Plan:
    """The plan of an episode: a search, the product to open (None: there are no results), the values to choose."""

    query: str
    page: int
    item: str | None
    values: tuple[str, ...]


def expert_plan(env: ShopWorldEnv) -> Plan:
    """Plan a search for the whole request and the purchase of the fitting product, in the generated shop with score 1.

    In WebShop's data it searches for the product's title, and buys the first result if the product is not found.
    """
    metadata, goal = env.task.metadata, env.goal
    results = env.shop.search(metadata["search"])
    place = next((place for place, product in enumerate(results) if product.asin == metadata["item"]), 0)
    item = results[place] if results else None
    return Plan(
        metadata["search"],
        place // env.page_size + 1,
        None if item is None else item.asin,
        () if item is None else _offered(item, goal.options),
    )


def fallible_plan(env: ShopWorldEnv, rng: np.random.Generator, success: float) -> Plan:
    """Return the expert's plan, with one mistake with probability 1 - `success`.

    The mistakes are equally likely: forget an option, choose a wrong value, buy another product of the page that does
    not fit.
    """
    plan = expert_plan(env)
    if rng.random() < success or plan.item is None:
        return plan
    others = [product for product in _page(env, plan.query, plan.page) if not _fits(env, product)]
    number = int(rng.integers(len(plan.values))) if plan.values else 0
    mistakes: list[Plan] = []
    if others:
        other = pick(rng, others)
        mistakes.append(replace(plan, item=other.asin, values=_offered(other, plan.values)))
    if plan.values:
        mistakes.append(replace(plan, values=plan.values[:number] + plan.values[number + 1 :]))
        options = env.shop.by_id[plan.item.lower()].options.values()
        (group,) = [values for values in options if plan.values[number] in values][:1]
        wrong_values = [value for value in group if value not in plan.values]
        if wrong_values:
            values = list(plan.values)
            values[number] = pick(rng, wrong_values)
            mistakes.append(replace(plan, values=tuple(values)))
    return pick(rng, mistakes) if mistakes else plan


def sloppy_plan(env: ShopWorldEnv, rng: np.random.Generator) -> Plan:
    """Return a sloppy plan; `FULL_SEARCH` to `CHOOSES` are its probabilities.

    It searches with all words, with the type and one attribute, or with the type only. It opens the first result, the
    first within the limit, or any one of the page. It chooses or omits each option.
    """
    goal = env.goal
    kind = rng.random()
    words = [goal.query, *goal.attributes[: int(kind < FULL_SEARCH + HALF_SEARCH)]]
    query = env.task.metadata["search"] if kind < FULL_SEARCH else ", ".join(words)
    page = _page(env, query, 1)
    if not page:
        return Plan(query, 1, None, ())
    look = rng.random()
    cheap = [product for product in page if product.price <= goal.price_upper]
    if look < FIRST_RESULT + WITHIN_LIMIT:
        item = cheap[0] if cheap and look >= FIRST_RESULT else page[0]
    else:
        item = pick(rng, page)
    chosen = tuple(value for value in goal.options if rng.random() < CHOOSES)
    return Plan(query, 1, item.asin, _offered(item, chosen))


FULL_SEARCH, HALF_SEARCH, FIRST_RESULT, WITHIN_LIMIT, CHOOSES = 0.2, 0.3, 0.2, 0.6, 0.3


def _page(env: ShopWorldEnv, query: str, page: int) -> list[Product]:
    return env.shop.search(query)[(page - 1) * env.page_size : page * env.page_size]


def _offered(product: Product, values: Sequence[str]) -> tuple[str, ...]:
    """Return the values that the product has, in its spelling."""
    offered = {value for group in product.options.values() for value in group}
    return tuple(value for value in map(str.lower, values) if value in offered)


def _fits(env: ShopWorldEnv, product: Product) -> bool:
    """Return whether buying the product, with all requested options that it has, scores 1."""
    wanted = _offered(product, env.goal.options)
    chosen = {kind: value for value in wanted for kind, group in product.options.items() if value in group}
    return purchase_score(product, env.goal, chosen, env.nouns).total >= 1
