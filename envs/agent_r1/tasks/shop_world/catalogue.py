"""The generated shop: its words, its products, and what its customers ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from agent_r1.task_data.webshop import Files, Goal, Product, load_webshop
from agent_r1.tasks.draw import pick, sample
from agent_r1.tasks.shop_world.reward import purchase_score
from agent_r1.tool_env import Task
from agent_r1_tools.search import BM25Retriever, Passage

HITS = 50  # maximum number of hits of a search, as in WebShop
FIRST_PAGE = 4  # number of results among which the expert's search finds the product

DEPARTMENTS = {  # department › group: types
    "Clothing › Tops": "shirt jacket sweater vest hoodie",
    "Clothing › Accessories": "scarf belt hat wallet umbrella",
    "Home › Furniture": "chair desk shelf mirror stool",
    "Home › Textiles": "rug pillow blanket curtain towel",
    "Kitchen › Cookware": "kettle pan knife tray bowl",
    "Kitchen › Storage": "jar mug basket bottle tin",
    "Outdoors › Camping": "tent backpack lantern hammock compass",
    "Outdoors › Garden": "rake bench bucket planter hose",
}
UNSEEN_TYPES = "hoodie umbrella stool towel bowl tin compass hose".split()  # in the shop; no training task asks for one
TYPES = {kind: group for group, kinds in DEPARTMENTS.items() for kind in kinds.split()}
ATTRIBUTES = (
    "waterproof washable organic durable lightweight handmade foldable portable recycled vegan soft sturdy insulated "
    "compact breathable adjustable elegant vintage rustproof padded seamless quiet glossy modern"
).split()
OPTIONS = {
    "color": "red blue green black white pink purple yellow brown orange".split(),
    "size": "mini small medium large giant".split(),
    "style": "plain striped dotted checked floral woven".split(),
}
KINDS = [("color", "size"), ("color", "style"), ("size", "style")]  # a type has two kinds of options

NUM_FAMILIES = 720  # of six products each: 4,320 in all
MODELS = 10  # of each brand
ATTRIBUTES_EACH, VALUES_EACH = 4, 3

WORDING = "I need one {type}: {attributes}, {options}, at most {limit} dollars.{remark}"
REMARK = " I already have a {type}."  # an unseen type, so that a policy with a small vocabulary knows it as a word
OTHER_PHRASINGS = (
    "Please order a {type} for me. It has to be {attributes}, with {options}, and may cost {limit} dollars.{remark}",
    "My budget is {limit} dollars. Find something {attributes} with {options}, namely a {type}.{remark}",
    "With {options}, {attributes}, for no more than {limit} dollars: which {type} can I get? Buy it.{remark}",
)
NUM_TASKS = {"train": 1_000_000, "test": 10_000}
SPLITS = ("train", "validation", "test", "unseen_types", "more_constraints", "other_phrasings")

_ONSETS = "b d f g h j k l m n p r s t v z br dr gr kr pl st tr".split()


@dataclass(frozen=True)
class Listing(Passage):
    """A product in the index of the search engine, as in WebShop: title, description, first bullet, options."""

    product: Product


class Shop:
    """A catalogue and its search engine. Customers of a generated one ask for products in `wanted`.

    Raises (from `search`): ImportError without the extra `search`.
    """

    def __init__(self, products: Sequence[Product], wanted: Sequence[Product] = ()) -> None:
        self.products, self.wanted = products, wanted
        self.by_id = {product.asin.lower(): product for product in products}

    @cached_property
    def retriever(self) -> BM25Retriever:
        """The index, built on first use."""
        return BM25Retriever(map(_listing, self.products))

    def search(self, query: str) -> list[Product]:
        """Return at most `HITS` products, best first; equal scores in the order of the catalogue."""
        (hits,) = self.retriever.search([query], HITS)
        return [listing.product for listing, _ in hits if isinstance(listing, Listing)]


def _listing(product: Product) -> Listing:
    options = ", and ".join(f"{kind}: {', '.join(values)}" for kind, values in product.options.items())
    return Listing(product.name, " ".join([product.description, *product.bullets[:1], options]), product)


@lru_cache(maxsize=1)
def brands() -> list[str]:
    """Return invented names, the same on every machine."""
    rng = np.random.default_rng(20_220_706)
    names: dict[str, None] = {}
    while len(names) < 6 * NUM_FAMILIES // MODELS:
        first, second = rng.choice(_ONSETS, 2)
        one, two = rng.choice(list("aeiou"), 2)
        names[f"{first}{one}{second}{two}{rng.choice(list('lnrsmkd'))}".capitalize()] = None
    return list(names)


@lru_cache(maxsize=4)
def generated_shop(seed: int) -> Shop:
    """Return the shop of the world family `seed`: 4,320 products, 108 of each of 40 types.

    Products are in families of six: one, one with another attribute, one with another value of an option, and each of
    these at a higher price, above any limit of a customer of the cheaper one. Attributes and values of the first option
    that distinguish a product from others of its family come first, because customers ask for them.
    """
    rng = np.random.default_rng([seed, 20_220_704])
    drafts = [draft for number in range(NUM_FAMILIES) for draft in _family(rng, list(TYPES)[number % len(TYPES)])]
    products, wanted = [], []
    for place, drawn in enumerate(rng.permutation(len(drafts)).tolist()):
        kind, attributes, options, price, cheap = drafts[drawn]
        asin = f"{brands()[place // MODELS]}{place % MODELS}"
        category, about = f"{TYPES[kind]} › {kind}", ", ".join(attributes)
        products.append(Product(asin, kind, kind, category, about, (), attributes, options, float(price)))
        wanted += products[-1:] if cheap else []
    return Shop(products, wanted)


@lru_cache(maxsize=2)
def loaded_shop(files: Files) -> Shop:
    """Return the shop of WebShop's own files."""
    return Shop(load_webshop(files)[0])


Draft = tuple[str, tuple[str, ...], dict[str, tuple[str, ...]], int, bool]


def _family(rng: np.random.Generator, kind: str) -> Iterator[Draft]:
    attributes = tuple(sample(rng, ATTRIBUTES, ATTRIBUTES_EACH + 1))
    first, second = KINDS[list(TYPES).index(kind) % len(KINDS)]
    values = {name: tuple(sample(rng, OPTIONS[name], VALUES_EACH + (name == first))) for name in (first, second)}
    usual = {name: values[name][:VALUES_EACH] for name in values}
    for about, options in (
        (attributes[:-1], usual),
        ((attributes[-1], *attributes[1:-1]), usual),
        (attributes[:-1], usual | {first: (values[first][-1], *values[first][1:-1])}),
    ):
        price = int(rng.integers(10, 40))
        yield kind, about, options, price, True
        yield kind, about, options, price + int(rng.integers(21, 41)), False


@lru_cache(maxsize=1024)  # the episodes of a group have the same task
def generate_task(seed: int, split: str, index: int) -> Task:
    """Generate task `index` of a split of the world family `seed`. The result is cached: do not change it.

    Splits: train, validation and test (two attributes, values of one or two options, and a limit), and the
    zero-shot variants unseen_types (types that no other split asks for), more_constraints (three attributes, both
    options), other_phrasings. `metadata`: goal (the fields of a `Goal`), search (the expert's query), item (its
    purchase), optimal_turns (with one call a turn).
    """
    shop = generated_shop(seed)
    rng = np.random.default_rng([seed, SPLITS.index(split), index])
    more = split == "more_constraints"
    while True:
        product = pick(rng, shop.wanted)
        own, others = product.attributes[0], product.attributes[1:]
        asked = [own, *sample(rng, others, 2 if more else 1)]
        attributes = tuple(sample(rng, asked, len(asked)))
        (first, values), (second, other_values) = product.options.items()
        options = {first: values[0]}
        if more or rng.random() < 0.5:
            options[second] = pick(rng, other_values)
        # One of the next two multiples of ten: WebShop has the next four, but a dearer twin shall be too dear.
        limit = 10 * (int(product.price) // 10 + 1 + int(rng.integers(2)))
        if (product.name in UNSEEN_TYPES) != (split == "unseen_types"):
            continue
        wording = pick(rng, OTHER_PHRASINGS) if split == "other_phrasings" else WORDING
        had = [kind for kind in UNSEEN_TYPES if kind != product.name]
        remark = REMARK.format(type=pick(rng, had)) if rng.random() < 0.2 else ""
        question = wording.format(
            type=product.name,
            attributes=", ".join(attributes),
            options=", ".join(f"{kind} {value}" for kind, value in options.items()),
            limit=limit,
            remark=remark,
        )
        goal = Goal(
            product.asin, product.name, product.query, product.category, question, attributes,
            tuple(options.values()), float(limit),
        )  # fmt: skip
        search = ", ".join([product.name, *attributes, *options.values()])
        for item in shop.search(search)[:FIRST_PAGE]:
            chosen = {kind: value for kind, value in options.items() if value in item.options.get(kind, ())}
            if purchase_score(item, goal, chosen).total == 1:
                turns = 3 + len(options)
                return shop_task(f"{split}-{seed}-{index}", goal, search, item.asin, optimal_turns=turns)


def shop_task(name: str, goal: Goal, search: str, item: str, **more: Any) -> Task:
    """Make the task of a goal: `metadata` has the goal's fields, the expert's query and purchase, and `more`."""
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(goal).items()}
    return Task(name, goal.instruction, [item], {"goal": plain, "search": search, "item": item} | more)
