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
    """An episode: a search, the product that is opened (None: there are no results), the values that are chosen."""

    query: str
    page: int
    item: str | None
    values: tuple[str, ...]


def expert_plan(env: ShopWorldEnv) -> Plan:
    """Searches for all that was asked for, and buys what fits, in the generated shop always with score 1.

    In WebShop's data it searches for the product's title; where that isn't among the results it buys the first one.
    """
    metadata, goal = env.task.metadata, env.goal
    found = env.shop.search(metadata["search"])
    place = next((place for place, product in enumerate(found) if product.asin == metadata["item"]), 0)
    item = found[place] if found else None
    return Plan(
        metadata["search"],
        place // env.page_size + 1,
        None if item is None else item.asin,
        () if item is None else _offered(item, goal.options),
    )


def fallible_plan(env: ShopWorldEnv, rng: np.random.Generator, success: float) -> Plan:
    """The expert, who with probability 1 - `success` makes one mistake, any kind as often as the others: to forget an
    option, to choose another value than the one asked for, to buy another product of the page, which doesn't fit."""
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
        wrong = [value for value in group if value not in plan.values]
        if wrong:
            values = list(plan.values)
            values[number] = pick(rng, wrong)
            mistakes.append(replace(plan, values=tuple(values)))
    return pick(rng, mistakes) if mistakes else plan


def sloppy_plan(env: ShopWorldEnv, rng: np.random.Generator) -> Plan:
    """Searches with all words, with the type and one attribute, or with the type alone; opens the first result, the
    first within the limit, or any one of the page; chooses each option or leaves it out. `FULL_SEARCH` to `CHOOSES` say
    how often."""
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
    """Those of the values that the product has, as it writes them."""
    there = {value for group in product.options.values() for value in group}
    return tuple(value for value in map(str.lower, values) if value in there)


def _fits(env: ShopWorldEnv, product: Product) -> bool:
    """Whether buying it, with all the options asked for that it has, scores 1."""
    wanted = _offered(product, env.goal.options)
    chosen = {kind: value for value in wanted for kind, group in product.options.items() if value in group}
    return purchase_score(product, env.goal, chosen, env.nouns).total >= 1
