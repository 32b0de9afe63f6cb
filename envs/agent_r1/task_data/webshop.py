"""WebShop: its catalogue and its goals, from the official files (github.com/princeton-nlp/WebShop).

    items_shuffle.json, items_shuffle_1000.json    the products, a list
    items_ins_v2.json, items_ins_v2_1000.json      asin -> attributes and a synthetic instruction
    items_human_ins.json                           asin -> a list of instructions that people wrote

For the first two, the complete file is read if it exists, otherwise the file of a thousand. The order of the goals, and
so their numbers, is WebShop's: `random.Random(233).shuffle`. WebShop draws a price between two and a customer's limit
without a seed. Here they are drawn from the product's id, so they are equal in every process.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product as combinations
from pathlib import Path

from agent_r1.task_data.files import read_json
from agent_r1.task_data.records import DataFormatError, DataNotFoundError, Row, shown
from agent_r1_tools.tool import encodable

PRODUCTS = ("items_shuffle.json", "items_shuffle_1000.json")
ATTRIBUTES = ("items_ins_v2.json", "items_ins_v2_1000.json")
HUMAN = ("items_human_ins.json",)
NO_LIMIT = 1_000_000.0
MAX_COMBINATIONS = 100_000
"""The maximum number of combinations of a product's options, each a synthetic goal; more mean a damaged file."""


@dataclass(frozen=True)
class Product:
    """One product of the shop.

    Attributes:
        asin: its id, the argument of `open`.
        name: its title.
        query: the search words that found it; a part of its type.
        category: the path from the department down, separated by " › ".
        attributes: properties known to the judge; a customer may ask for them.
        options: kind ("color") -> the values to choose from.
        price: in dollars.
    """

    asin: str
    name: str
    query: str
    category: str
    description: str
    bullets: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: float


@dataclass(frozen=True)
class Goal:
    """A customer's request: a product (or a similar one), some of its attributes, values of its options, a limit."""

    asin: str
    name: str
    query: str
    category: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_upper: float


Files = tuple[tuple[Path, int, int], ...]
"""Path, time and size of each file: a changed file is read again."""


def find_webshop(data_dir: str | os.PathLike[str], human_goals: bool = True) -> Files:
    """Return the files of a folder, for `load_webshop`.

    Args:
        data_dir: the folder of the files above.
        human_goals: True for the instructions that people wrote; False for the synthetic ones.

    Raises DataNotFoundError.
    """
    wanted = [PRODUCTS, ATTRIBUTES, *([HUMAN] if human_goals else [])]
    paths = [_find(Path(data_dir), names) for names in wanted]
    return tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in paths)


@lru_cache(maxsize=2)
def load_webshop(files: Files) -> tuple[list[Product], list[Goal]]:
    """Return the products and the goals, in WebShop's order. They are read once per process; do not change the lists.

    Raises DataFormatError.
    """
    items, attributes, *human = (path for path, _, _ in files)
    about = _rows_by_asin(attributes)
    products: dict[str, Product] = {}
    rows = read_json(items)
    if not isinstance(rows, list):
        raise DataFormatError(f"{items}: expected a JSON list of products, found {shown(rows)}")
    for number, fields in enumerate(rows):
        if not isinstance(fields, dict):
            raise DataFormatError(f"{items}, row {number} (counting from 0): expected an object, found {shown(fields)}")
        product = _product(Row(fields, str(items), number), about)
        if product.asin != "nan" and len(product.asin) <= 10:  # as WebShop does
            products.setdefault(product.asin, product)
    if not products:
        raise DataFormatError(f"{items}: expected at least one product, found {len(rows)} rows without one")
    goals = list(_human_goals(human[0], products) if human else _synthetic_goals(about, products))
    if not goals:
        raise DataFormatError(f"{human[0] if human else attributes}: expected a goal of a product of {items.name}")
    random.Random(233).shuffle(goals)
    return list(products.values()), goals


def split_goals(goals: Sequence[Goal], split: str) -> Sequence[Goal]:
    """Return the goals of WebShop's split: test is the first 500 goals, validation the next 1,000, train the rest.

    With fewer than 4,000 goals, test and validation have at most a quarter each.
    """
    test = min(500, len(goals) // 4)
    validation = test + min(1_000, len(goals) // 4)
    return {"test": goals[:test], "validation": goals[test:validation], "train": goals[validation:]}[split]


def _find(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise DataNotFoundError(
        f"{folder} has no {' or '.join(names)}: data_dir is a folder with WebShop's files {PRODUCTS[0]}, "
        f"{ATTRIBUTES[0]} and {HUMAN[0]} (setup.sh of github.com/princeton-nlp/WebShop has their addresses); without "
        "data_dir the shop is generated"
    )


def _rows_by_asin(path: Path) -> dict[str, Row]:
    rows = read_json(path)
    if not isinstance(rows, dict):
        raise DataFormatError(f"{path}: expected a JSON object of products by asin, found {shown(rows)}")
    rows_by_asin = {}
    for number, (asin, fields) in enumerate(rows.items()):
        if not isinstance(fields, dict):
            raise DataFormatError(f"{path}, product {asin!r}: expected an object, found {shown(fields)}")
        rows_by_asin[asin] = Row(fields, str(path), number)
    return rows_by_asin


def _product(row: Row, about: Mapping[str, Row]) -> Product:
    asin = row.text("asin")
    bullets = row.fields.get("small_description")
    attributes = _texts(about[asin], "attributes") if asin in about else ()
    return Product(
        asin=encodable(asin),
        name=_text(row, "name"),
        query=_text(row, "query").lower().strip(),
        category=_text(row, "product_category"),
        description=_text(row, "full_description"),
        bullets=_texts(row, "small_description") if isinstance(bullets, list) else (_text(row, "small_description"),),
        attributes=attributes or ("DUMMY_ATTR",),
        options=_options(row),
        price=_price(row, asin),
    )


def _text(row: Row, name: str) -> str:
    value = row.fields.get(name)
    if value is not None and not isinstance(value, str):
        raise row.error(name, "a string")
    return encodable(value or "")


def _texts(row: Row, name: str) -> tuple[str, ...]:
    return tuple(encodable(text) for text in row.texts(name))


def _options(row: Row) -> dict[str, tuple[str, ...]]:
    """Return kinds and values in lower case, with " | " for "/", as in WebShop."""
    given = row.fields.get("customization_options") or {}
    options: dict[str, tuple[str, ...]] = {}
    try:
        for kind, contents in given.items():
            if contents is not None:
                values = (encodable(content["value"]).strip().replace("/", " | ").lower() for content in contents)
                options[encodable(kind).lower()] = tuple(values)
    except (AttributeError, KeyError, TypeError):
        raise row.error("customization_options", "an object of lists of objects with a text `value`") from None
    return options


def _price(row: Row, asin: str) -> float:
    """Return the price: for a range a price in it; 100 without a price."""
    prices = []
    for part in _text(row, "pricing").split("$")[1:]:
        try:
            prices.append(float(re.sub(r"[^\d.]", "", part)))
        except ValueError:
            raise row.error("pricing", "prices such as $10.99") from None
    if not all(map(math.isfinite, prices)):
        raise row.error("pricing", "prices such as $10.99")
    if len(prices) > 1:
        return round(random.Random(f"price {asin}").uniform(*prices[:2]), 2)
    return prices[0] if prices else 100.0


def price_limit(price: float, draw: random.Random) -> float:
    """Draw a customer's limit: the higher of two of the next four multiples of ten above the price (up to 990)."""
    above = [10.0 * number for number in range(1, 100) if 10.0 * number > price][:4]
    return max(draw.sample(above, 2)) if len(above) >= 2 else NO_LIMIT


def _limit(asin: str, number: int, price: float) -> tuple[float, str]:
    upper = price_limit(price, random.Random(f"limit {asin} {number}"))
    return upper, f", and price lower than {upper:.2f} dollars" if upper < NO_LIMIT else ""


def _goal(product: Product, text: str, attributes: tuple[str, ...], options: tuple[str, ...], upper: float) -> Goal:
    return Goal(product.asin, product.name, product.query, product.category, text, attributes, options, upper)


def _human_goals(path: Path, products: Mapping[str, Product]) -> Iterator[Goal]:
    rows = read_json(path)
    if not isinstance(rows, dict):
        raise DataFormatError(f"{path}: expected a JSON object of instructions by asin, found {shown(rows)}")
    for asin, product in products.items():  # in the order of the catalogue, which determines the shuffle
        instructions = rows.get(asin, [])
        if not isinstance(instructions, list):
            raise DataFormatError(f"{path}, product {asin!r}: expected a list, found {shown(instructions)}")
        for number, fields in enumerate(instructions):
            if not isinstance(fields, dict):
                raise DataFormatError(f"{path}, product {asin!r}: expected a list of objects, found {shown(fields)}")
            row = Row(fields, f"{path}, product {asin!r}", number)
            attributes = _texts(row, "instruction_attributes")
            if not attributes:  # WebShop skips such a goal
                continue
            options = fields.get("instruction_options")
            if isinstance(options, dict):
                row = Row({**fields, "instruction_options": list(options.values())}, row.file, number)
            upper, text = _limit(asin, number, product.price)
            instruction = encodable(row.text("instruction")).strip(".") + text
            yield _goal(product, instruction, attributes, _texts(row, "instruction_options"), upper)


def _synthetic_goals(about: Mapping[str, Row], products: Mapping[str, Product]) -> Iterator[Goal]:
    """Yield a goal for each combination of options of each product with an instruction."""
    for asin, product in products.items():
        row = about.get(asin)
        if row is None or row.fields.get("instruction") is None:
            continue
        instruction, attributes = encodable(row.text("instruction")), _texts(row, "instruction_attributes")
        if not attributes:
            raise row.error("instruction_attributes", "at least one attribute")
        kinds = sorted(product.options)
        if math.prod(len(product.options[kind]) for kind in kinds) > MAX_COMBINATIONS:
            raise DataFormatError(f"product {asin!r} has more than {MAX_COMBINATIONS} combinations of options")
        upper, limit = _limit(asin, 0, product.price)
        for values in combinations(*(product.options[kind] for kind in kinds)):
            chosen = ", and ".join(f"{kind}: {value}" for kind, value in zip(kinds, values, strict=True))
            text = instruction + (f" with {chosen}" if chosen else "") + limit
            yield _goal(product, text, attributes, values, upper)
