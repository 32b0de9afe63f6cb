"""The generated web of DeepSearch: pages about invented people, new in every task.

A question follows relations from one person to the next, and the fact for each hop is on a separate page:

- A person's page is found by a search for the name. Where there are two, they contradict each other, and the newer one
  is right; every task has at least one such pair on its way.
- Other pages have no name in them (a portrait of "this person") and are found by a link only.
- Some pages are long: `open` shows the beginning, and `find` the line with the fact.

The search shows title, year and first line of a page, and these contain no fact.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from agent_r1.tasks.draw import pick, sample
from agent_r1.tasks.multihop_world import OTHER_PHRASINGS, PHRASING, RELATIONS, UNSEEN_RELATIONS, names
from agent_r1.tool_env import Task

SPLITS = {  # name -> number of pages that a question needs
    "train": (2, 3),
    "test": (2, 3),
    "pages_2": (2,),
    "pages_3": (3,),
    "pages_4": (4,),
    "pages_6": (6,),
    "pages_8": (8,),
    "unseen_entities": (2, 3),
    "other_phrasings": (2, 3),
}
WINDOW = 8  # lines that `open` shows
FACTS = 3  # number of facts on a page
PORTRAIT = "Portrait"  # the title of a page without a name
YEARS = range(2001, 2025)
FILLERS = ("nothing happened", "it rained", "the harvest was good", "the winter was long", "a fair was held")
PAGE_IDS = tuple(f"p{number}" for number in range(10, 100))


@lru_cache(maxsize=256)  # the episodes of a group have the same task
def generate_task(seed: int, split: str, index: int) -> Task:
    """Generate task `index` of a split of the web family `seed`. The result is cached: do not change it.

    `metadata`: pages ([id, title, year, text]), supports (ids of the gold pages, in the order of the hops), older (for
    each gold page the id of the older page that contradicts it, or None), relations, chain (for each hop what its page
    says: a name, or the id of the page to open next), facts (id -> {relation: the same}), long (gold pages on which
    the fact lies beyond the window), optimal_turns (`search` for a name, `open`, `find` on a long page, and the answer,
    a turn each: no page can be read before its id was shown, and no fact before its page was opened).
    """
    rng = np.random.default_rng([seed, list(SPLITS).index(split), index])
    return _Web(rng, split).task(f"{split}-{seed}-{index}")


class _Web:
    """The pages of one task while they are written."""

    def __init__(self, rng: np.random.Generator, split: str) -> None:
        self.rng, self.split = rng, split
        self.hops = int(rng.choice(SPLITS[split]))
        seen, unseen = names()
        pool = unseen if split == "unseen_entities" else seen
        self.names = sample(rng, pool, 8 + 3 * self.hops)
        self.remarked = sample(rng, unseen, 4)
        relations = sample(rng, RELATIONS, max(6, self.hops))
        self.path, self.local = relations[: self.hops], relations
        self.ids = [PAGE_IDS[i] for i in rng.permutation(len(PAGE_IDS))]
        self.pages: list[list[Any]] = []
        self.facts: dict[str, dict[str, str]] = {}

    def task(self, task_id: str) -> Task:
        rng, hops = self.rng, self.hops
        # A page is reached by its name or, from the second on, by a link only.
        by_name = [True, *(bool(rng.random() < 0.5) for _ in range(hops - 1))]
        disputed = [named and bool(rng.random() < 0.4) for named in by_name]
        disputed[int(rng.choice([i for i in range(hops) if by_name[i]]))] = True
        long = [bool(rng.random() < 0.25) for _ in range(hops)]
        ids = [self.ids.pop() for _ in range(hops)]
        people = [self.names.pop() if named else None for named in by_name]
        answer = self.names.pop()
        chain = [*((people[i] or ids[i]) for i in range(1, hops)), answer]
        older: list[str | None] = []
        for hop in range(hops):
            years = sorted(int(year) for year in rng.choice(YEARS, 2, replace=False))
            facts = self._facts(self.path[hop], chain[hop])
            self._write(ids[hop], people[hop], years[1], facts, self.path[hop] if long[hop] else None)
            older.append(self._dispute(hop, people[hop], years[0], facts, long[hop]) if disputed[hop] else None)
        for _ in range(2):  # a portrait that no question leads to
            self._write(self.ids.pop(), None, None, self._facts())
        with_page = {title for _, title, _, _ in self.pages}
        mentioned = {value for facts in self.facts.values() for value in facts.values()}
        for person in sorted((mentioned | set(self.names)) - with_page - set(self.facts)):  # everyone has a page
            self._write(self.ids.pop(), person, None, self._facts())
        phrasing = PHRASING
        if self.split == "other_phrasings":
            phrasing = pick(rng, OTHER_PHRASINGS)
        return Task(
            id=task_id,
            question=phrasing.format(chain=" of the ".join(reversed(self.path)), start=people[0]),
            answers=[answer],
            metadata={
                "pages": [self.pages[i] for i in rng.permutation(len(self.pages))],
                "supports": ids,
                "older": older,
                "relations": self.path,
                "start": people[0],
                "chain": chain,
                "facts": self.facts,
                "long": [page for page, is_long in zip(ids, long, strict=True) if is_long],
                "hops": hops,
                "optimal_turns": sum(by_name) + hops + sum(long) + 1,
            },
        )

    def _dispute(self, hop: int, person: str | None, year: int, facts: dict[str, str], long: bool) -> str:
        """Write an older page on a person, with another value for the hop's relation, and a page for that value."""
        relation, page = self.path[hop], self.ids.pop()
        on = self._facts(self.path[hop + 1], None) if hop + 1 < self.hops else self._facts()
        decoy = self.names[-1]
        if is_page(facts[relation]):
            decoy = self.ids.pop()
            self._write(decoy, None, None, on)
        else:
            self._write(self.ids.pop(), self.names.pop(), None, on)
        self._write(page, person, year, facts | {relation: decoy}, relation if long else None)
        return page

    def _facts(self, relation: str | None = None, value: str | None = None) -> dict[str, str]:
        """Draw three facts; with a relation one of them is about it, at any position, with this value or any."""
        rng = self.rng
        others = [local for local in self.local if local != relation]
        chosen = sample(rng, others, FACTS - (relation is not None))
        if relation is not None:
            chosen.insert(int(rng.integers(FACTS)), relation)
        # Names from the end of the list are still to be used on the way; these are the bystanders.
        values = [self.names[i] for i in rng.choice(6, FACTS, replace=False)]
        pairs = zip(chosen, values, strict=True)
        return {name: value if name == relation and value else other for name, other in pairs}

    def _write(
        self, page: str, person: str | None, year: int | None, facts: dict[str, str], last: str | None = None
    ) -> None:
        """Write a page; with `last` it is long, and the fact for this relation lies beyond the window."""
        rng, who = self.rng, person or "this person"
        year = int(rng.choice(YEARS)) if year is None else year
        lines = {one: _line(one, who, value) for one, value in facts.items()}
        fillers = [
            f"In {int(rng.choice(YEARS))} {pick(rng, FILLERS)}."
            for _ in range(WINDOW if last else int(rng.integers(3)))
        ]
        if rng.random() < 0.2:
            extra = pick(rng, self.remarked)
            if rng.random() < 0.3:
                extra = f"a {pick(rng, UNSEEN_RELATIONS)}"
            fillers.append(f"Once {who} met {extra}.")
        body = [line for one, line in lines.items() if one != last] + fillers
        body = [body[i] for i in rng.permutation(len(body))] + ([lines[last]] if last else [])
        self.pages.append([page, person or PORTRAIT, year, "\n".join([f"Notes on {who}.", *body])])
        self.facts[page] = facts


def is_page(value: str) -> bool:
    """Return whether the value of a fact is the id of a page, not a name."""
    return value[:1] == "p" and value[1:].isdigit()


def _line(relation: str, who: str, value: str) -> str:
    if is_page(value):
        return f"The {relation} of {who} is described on page [{value}]."
    return f"The {relation} of {who} is {value}."
