"""MultihopWorld: multi-hop question answering over a generated world, with nothing to download.

Every task has its own world: a dozen entities with a passage each, drawn from the task's seed. So a policy can learn no
fact by heart. A question follows two or three relations ("Who is the rival of the mentor of Kelvon?"). Each hop is one
search.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from agent_r1.arguments import integer
from agent_r1.tasks.draw import pick, sample
from agent_r1.tasks.question_answering import QuestionAnsweringEnv
from agent_r1.tool_env import Task
from agent_r1_tools import run_tool

# Words. The unseen ones occur in passages (as a remark), never as subject, relation or answer of a training task.
_ONSETS = "b d f g h j k l m n p r s t v z br dr gr kr pl st tr th".split()
_VOWELS = "a e i o u".split()
_CODAS = "l n r s m k d".split()
RELATIONS = (
    "mentor rival cousin captain deputy tailor banker doctor painter guard pilot barber lawyer tenant patron herald"
).split()
UNSEEN_RELATIONS = "jester miller keeper scribe".split()
NUM_NAMES, NUM_UNSEEN_NAMES = 1_200, 200

FACTS_PER_PASSAGE = 3
MOST_HOPS = 4
PHRASING = "Who is the {chain} of {start}?"
OTHER_PHRASINGS = (
    "Take {start}: who is the {chain}?",
    "I want to know about {start}. Name the {chain}.",
    "The {chain} of {start} is who?",
)
NUM_TASKS = {"train": 1_000_000, "test": 10_000}


@lru_cache(maxsize=1)
def names() -> tuple[list[str], list[str]]:
    """Return the world's (seen, unseen) entity names: 1,000 and 200 invented words, the same on every machine."""
    rng = np.random.default_rng(20_251_114)
    invented: dict[str, None] = {}
    while len(invented) < NUM_NAMES:
        onsets, vowels = rng.choice(_ONSETS, 2), rng.choice(_VOWELS, 2)
        invented[f"{onsets[0]}{vowels[0]}{onsets[1]}{vowels[1]}{rng.choice(_CODAS)}".capitalize()] = None
    everyone = list(invented)
    return everyone[NUM_UNSEEN_NAMES:], everyone[:NUM_UNSEEN_NAMES]


@lru_cache(maxsize=256)  # the episodes of a group have the same task
def generate_task(seed: int, split: str, index: int) -> Task:
    """Generate task `index` of a split of the world family `seed`. The result is cached: do not change it.

    Splits: train and test (2 or 3 hops), and the zero-shot variants more_hops (4), unseen_relations, unseen_entities,
    other_phrasings. `metadata`: supports (gold titles, in the order of the hops), relations, chain (entities from the
    start to the answer), hops, passages ((title, text) pairs).
    """
    splits = list(MultihopWorldEnv.splits)
    rng = np.random.default_rng([seed, splits.index(split), index])
    hops = 4 if split == "more_hops" else int(rng.integers(2, 4))
    seen, unseen = names()
    pool = unseen if split == "unseen_entities" else seen
    relation_pool = UNSEEN_RELATIONS if split == "unseen_relations" else RELATIONS
    entities = sample(rng, pool, 6 + 2 * hops)
    # The relations of the question also occur in passages off the chain: a relation alone does not name a passage.
    local = sample(rng, relation_pool, min(6, len(relation_pool)))
    path = sample(rng, local, hops)
    chain = entities[: hops + 1]
    passages = []
    for position, entity in enumerate(entities):
        others = [e for e in entities if e != entity]
        values = sample(rng, others, FACTS_PER_PASSAGE)
        relations = sample(rng, local, FACTS_PER_PASSAGE)
        if position < hops:
            goal = chain[position + 1]
            values = [v for v in values if v != goal][: FACTS_PER_PASSAGE - 1]
            relations = [r for r in relations if r != path[position]][: FACTS_PER_PASSAGE - 1]
            place = int(rng.integers(FACTS_PER_PASSAGE))
            values.insert(place, goal)
            relations.insert(place, path[position])
        # The subject is in the title and in the text, so that BM25 ranks its passage above mere mentions.
        text = f"{entity} has " + ", ".join(f"{r} {v}" for r, v in zip(relations, values, strict=True)) + "."
        if rng.random() < 0.2:
            # If the question has these relations, naming one twice would rank the passage above the right one.
            if rng.random() < 0.7 or split == "unseen_relations":
                text += f" Once met {pick(rng, unseen)}."
            else:
                text += f" Once a {pick(rng, UNSEEN_RELATIONS)} too."
        passages.append((entity, text))
    order = rng.permutation(len(passages))
    phrasing = PHRASING
    if split == "other_phrasings":
        phrasing = pick(rng, OTHER_PHRASINGS)
    return Task(
        id=f"{split}-{seed}-{index}",
        question=phrasing.format(chain=" of the ".join(reversed(path)), start=chain[0]),
        answers=[chain[-1]],
        metadata={
            "supports": chain[:-1],
            "relations": path,
            "chain": chain,
            "hops": hops,
            "passages": [passages[i] for i in order],
        },
    )


def expert(task: Task) -> list[tuple[str, str, str]]:
    """Return the scripted expert's turns, (thought, "search" or "answer", text): one search a hop, with notes."""
    relations, chain = task.metadata["relations"], task.metadata["chain"]
    notes = ["", *(f"{relation} {found}" for relation, found in zip(relations, chain[1:], strict=True))]
    searches = [f"{relation} of {entity}" for relation, entity in zip(relations, chain[:-1], strict=True)]
    return [
        *((note, "search", query) for note, query in zip(notes[:-1], searches, strict=True)),
        (notes[-1], "answer", chain[-1]),
    ]


class MultihopWorldEnv(QuestionAnsweringEnv):
    """Multi-hop questions over a generated world that is new in every task.

    ## Description
    A world has a dozen invented entities. Each entity has a passage with three facts. A question follows two or three
    relations from one entity to the answer, and each hop is one search. Nothing has to be downloaded.

    A policy can learn no fact by heart. It learns to search, to read, and to use a result in the next query.

    The environment needs the extra `search`.

    ## Tools
    `search(query)` returns the best passage of the task's world, by BM25. `lookup(title)` is optional, as in
    `HotpotQAEnv`.

    ## Arguments

    | argument | default | meaning |
    |---|---|---|
    | `split` | `"train"` | `train`, `test`, or a zero-shot variant (below) |
    | `world_seed` | `0` | the family of worlds |
    | `top_k` | `1` | the maximum number of passages in a search result |
    | `corpus` | `"own"` | the searched passages: `"own"`, a file, a server, or a `Retriever` |
    | `max_action_tokens` | `512` | the maximum number of tokens in a turn |

    The zero-shot variants are `more_hops`, `unseen_relations`, `unseen_entities` and `other_phrasings`. A task is a
    function of `world_seed`, split and index. The other arguments are those of `ToolEnv`.

    Rewards and baselines: docs/environments/multihop_world.md.
    """

    splits: ClassVar[Mapping[str, str]] = {
        name: name for name in ("train", "test", "more_hops", "unseen_relations", "unseen_entities", "other_phrasings")
    }
    yes_no_rule = False
    floor = 0.34  # the most frequent word after the last relation; docs/validation.md has its share
    choices = (2 * FACTS_PER_PASSAGE, 3 + 2 * MOST_HOPS)

    def __init__(self, *, world_seed: int = 0, top_k: int = 1, **kwargs: Any) -> None:
        kwargs.setdefault("max_action_tokens", 512)  # a turn is short here, and a policy that babbles should not stall
        super().__init__(top_k=top_k, **kwargs)
        self.world_seed = integer("world_seed", world_seed, least=0)

    @property
    def num_tasks(self) -> int:
        """The number of tasks: a million in train, ten thousand in every other split."""
        return NUM_TASKS.get(self.split, NUM_TASKS["test"])

    def make_task(self, index: int) -> Task:
        """Generate task `index`; nothing is stored."""
        return generate_task(self.world_seed, self.split, index)

    def demonstration(self, rng: np.random.Generator | None = None) -> list[str]:
        """Return the turns of the scripted expert on the current task as text; with `rng`, of a sloppy demonstrator.

        The sloppy demonstrator skips hops (asks the start for the last relation), or answers too early, with the first
        hop.
        """
        turns = expert(self.task)
        if rng is not None:
            turns = [turns[0], (turns[1][0], "answer", self.task.metadata["chain"][1])]
            if rng.random() < 0.3:
                relation = self.task.metadata["relations"][-1]
                query = f"{relation} of {self.task.metadata['chain'][0]}"
                shown = run_tool(self.tools["search"], {"query": query}).content
                if fact := re.search(rf"\b{relation} (\w+)", shown):
                    turns = [("", "search", query), (fact[0], "answer", fact[1])]
        spans = []
        for thought, kind, text in turns:
            act = self.dialect.tool_call("search", {"query": text}) if kind == "search" else f"<answer>{text}</answer>"
            spans.append((f"<think>{thought}</think>" if thought else "") + act)
        return spans

    def candidates(self) -> Sequence[tuple[str, Sequence[float]]]:
        """Return a search and an answer for each name of the newest passage; at first, for the name in the question.

        They use question and passage as the policy sees them. Features: 1; 1 for an answer; the hop of the name's
        relation in the question, one-hot (zeros for a relation outside the question); 1 for the last hop; the number of
        turns, one-hot.
        """
        known = (*RELATIONS, *UNSEEN_RELATIONS)
        words = re.findall(r"\w+", self.task.question)
        asked = [word for word in reversed(words) if word in known]
        newest = self.episode.messages[-1]
        pairs = re.findall(r"(\w+) ([A-Z]\w+)", newest["content"]) if newest["role"] == "tool" else []
        facts = [(relation, name) for relation, name in pairs if relation in known][:FACTS_PER_PASSAGE]
        turn = [float(self.episode.turn == number) for number in range(MOST_HOPS)]
        options: list[tuple[str, Sequence[float]]] = []
        for relation, name in facts or [("", next(word for word in words if any(word in group for group in names())))]:
            hop = [float(relation in asked[number : number + 1]) for number in range(MOST_HOPS)]
            last = float(relation == asked[-1])
            search = self.dialect.tool_call("search", {"query": name})
            options += [(search, [1, 0, *hop, last, *turn]), (f"<answer>{name}</answer>", [1, 1, *hop, last, *turn])]
        return options

    def rag_demonstration(self) -> list[str]:
        """Return the answer from passages alone: the farthest entity of the chain in them, else their last word."""
        words = re.findall(r"\w+", self.messages[-1]["content"].partition("\n\n")[0])
        named = [entity for entity in self.task.metadata["chain"][1:] if entity in words]
        return [f"<answer>{named[-1] if named else words[-1]}</answer>"]

    def shortcut_one_search(self, rng: np.random.Generator) -> list[str]:
        """Search for the last relation only, and answer with its value in the passage."""
        relation = self.task.metadata["relations"][-1]
        shown = run_tool(self.tools["search"], {"query": relation}).content
        values = _values(relation, shown) or ["unknown"]
        return [self.dialect.tool_call("search", {"query": relation}), f"<answer>{values[0]}</answer>"]

    def shortcut_most_frequent(self, rng: np.random.Generator) -> list[str]:
        """Answer with the most frequent word after the last relation in all passages."""
        text = " ".join(text for _, text in self.task.metadata["passages"])
        values = Counter(_values(self.task.metadata["relations"][-1], text))
        return [f"<answer>{values.most_common(1)[0][0]}</answer>"]

    @staticmethod
    def vocabulary() -> list[str]:
        """Return every word of the worlds, which a small tokenizer should keep whole."""
        return [name for group in names() for name in group] + RELATIONS + UNSEEN_RELATIONS


def _values(relation: str, text: str) -> list[str]:
    return re.findall(rf"\b{relation} (\w+)", text)
