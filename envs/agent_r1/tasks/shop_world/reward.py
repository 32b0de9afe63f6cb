"""WebShop's reward (Yao et al. 2022, arXiv 2207.01206), as `web_agent_site/engine/goal.py` computes it.

    reward = r_type * (attributes found + options found + price in the limit) / (attributes + options + 1 asked for)

It has two dependencies there, whose part stands here:

- thefuzz 0.19 over python-Levenshtein (`token_set_ratio`): the same numbers.
- spaCy's en_core_web_lg, which says which words of a title are nouns. `title_nouns` is a rule in its place, and gives
  the scores of WebShop's own tests; with spaCy at hand pass `nouns=`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from agent_r1.task_data.webshop import Goal, Product

# In WebShop's order, because the first one that occurs in a text stands for it ("dark red" is dark).
COLORS = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel "
    "camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry "
    "cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey "
    "heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight "
    "mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow "
    "red rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal "
    "tiger turquoise violet walnut wheat white wine yellow"
).split()
FUZZY = 85  # texts that are more alike than this, of 100, are the same
EXACT_KINDS = ("size",)
NO_NOUNS = frozenset(
    "a an all and any are as at be but by can do each for from has have in into is it its my no non not of off on "
    "or our out over per so than that the their them these this those to under up use very via we will with within "
    "without you your".split()
)
Nouns = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Score:
    """The score of a purchase and its parts, each from 0 to 1; `option` is None if no option was requested.

    As in WebShop, `option`, and so `total`, may exceed 1 if more options than requested are chosen and match.
    """

    total: float
    type: float
    attribute: float
    option: float | None
    price: float
    title: float


def purchase_score(
    product: Product, goal: Goal, options: Mapping[str, str], nouns: Nouns | None = None
) -> Score:
    """Compute the score of buying `product` with these `options` (kind -> value) for a customer with `goal`."""
    attributes = sum(_has_attribute(product, wanted) for wanted in goal.attributes)
    chosen = sum(_is_wanted(product, goal.options, kind, value) for kind, value in options.items())
    price = float(product.price <= goal.price_upper)
    fits, title = _type_score(product, goal, nouns or title_nouns)
    asked = len(goal.attributes) + len(goal.options) + 1
    return Score(
        total=(attributes + chosen + price) / asked * fits,
        type=fits,
        attribute=attributes / len(goal.attributes),
        option=chosen / len(goal.options) if goal.options else None,
        price=price,
        title=title,
    )


def _type_score(product: Product, goal: Goal, nouns: Nouns) -> tuple[float, float]:
    """Return (r_type, share of the nouns in the wanted title that the bought one has)."""
    bought, wanted = ({part.strip() for part in text.split("›")} for text in (product.category, goal.category))
    names = nouns(goal.name)
    title = len(set(names) & set(nouns(product.name))) / len(names) if names else 0.2
    if title == 0:
        return 0.0, title
    if title < 0.1:
        return 0.1, title
    match = product.query == goal.query or len(bought & wanted) >= 2 or title > 0.2
    return (1.0 if match else 0.5), title


def title_nouns(title: str) -> list[str]:
    """Return the words of a title that count as nouns, in lower case.

    They are all words that begin with a letter, except function words and participles in -ed. In titles most words are
    nouns or names.
    """
    words = [word.rstrip(".") for word in re.findall(r"(?<!\w)[^\W\d_][\w.]*", title.lower())]
    return [word for word in words if word not in NO_NOUNS and not re.fullmatch(r"\w{2,}[^\We]ed", word)]


def _has_attribute(product: Product, wanted: str) -> bool:
    if any(token_set_ratio(attribute, wanted) > FUZZY for attribute in product.attributes):
        return True
    return _says(product, wanted)


def _is_wanted(product: Product, goal_options: Sequence[str], kind: str, value: str) -> bool:
    """Return whether a chosen option was requested, or is a word of the product's text."""
    value, wanted = normalize_color(value), [normalize_color(option) for option in goal_options]
    if kind.lower() in EXACT_KINDS:
        is_requested = value in wanted
    else:
        is_requested = any(token_set_ratio(option, value) > FUZZY for option in wanted)
    return is_requested or _says(product, value)


def _says(product: Product, text: str) -> bool:
    return any(text in part.lower() for part in (product.name, " ".join(product.bullets), product.description))


@lru_cache(maxsize=4096)
def normalize_color(text: str) -> str:
    """Return the first of WebShop's colors that occurs in the text, or else the text."""
    return next((color for color in COLORS if color in text), text)


@lru_cache(maxsize=65_536)
def token_set_ratio(first: str, second: str) -> int:
    """Compute thefuzz's `token_set_ratio`, the similarity of two texts as sets of words, 0 to 100.

    >>> token_set_ratio("essential oils", "essential oil"), token_set_ratio("powder snow", "cool powder snow")
    (96, 100)
    """
    one, two = set(_words(first)), set(_words(second))
    if not one or not two:
        return 0
    both = " ".join(sorted(one & two))
    all_one = f"{both} {' '.join(sorted(one - two))}".strip()
    all_two = f"{both} {' '.join(sorted(two - one))}".strip()
    return max(_ratio(both, all_one), _ratio(both, all_two), _ratio(all_one, all_two))


def _words(text: str) -> list[str]:
    """Return letters and digits in lower case, without non-ASCII characters of Latin-1, as thefuzz does."""
    return re.sub(r"\W", " ", re.sub("[\x80-\xff]", "", text)).lower().split()


def _ratio(first: str, second: str) -> int:
    """Compute Levenshtein's ratio in percent: twice the longest common subsequence over both lengths."""
    if first == second:
        return 100
    if not first or not second:
        return 0
    places: dict[str, int] = {}
    for place, character in enumerate(first):
        places[character] = places.get(character, 0) | 1 << place
    full = rest = (1 << len(first)) - 1  # a cleared bit is a character of the common subsequence (Hyyrö 2004)
    for character in second:
        here = rest & places.get(character, 0)
        rest = ((rest + here) | (rest - here)) & full
    return round(100 * (2 * (full ^ rest).bit_count() / (len(first) + len(second))))
