"""Made-up data in the official format of every data set, on which fuzzing and tests run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MadeUp = tuple[str, str, list[tuple[str, list[str], bool]]]
"""A question, its answer, and its passages: title, sentences, and whether it is a gold one."""

QUESTIONS: list[MadeUp] = [
    (
        "Which river flows through the town where Ada Quill was born?",
        "River Lorn",
        [
            ("Ada Quill", ["Ada Quill, a playwright, was born in Lornby."], True),
            ("Lornby", ["Lornby is a town.", "The River Lorn flows through it."], True),
            ("Oat Mill", ["The Oat Mill is a mill near Pell."], False),
        ],
    ),
    (
        "Is Bram Otter older than Cleo Finch?",
        "no",
        [
            ("Bram Otter", ["Bram Otter, a sculptor, was born in 1950."], True),
            ("Cleo Finch", ["Cleo Finch, an engraver, was born in 1920."], True),
            ("Pell", ["Pell is a village.", "It has a mill."], False),
        ],
    ),
]


def wiki_row(number: int, made_up: MadeUp, between: str) -> dict[str, Any]:
    """A row of HotpotQA and 2WikiMultihopQA, whose sentences differ in the space between them."""
    question, answer, passages = made_up
    return {
        "_id": f"q{number}",
        "question": question,
        "answer": answer,
        "type": "bridge",
        "context": [
            [title, [between * (i > 0) + sentence for i, sentence in enumerate(sentences)]]
            for title, sentences, _ in passages
        ],
        "supporting_facts": [[title, 0] for title, _, gold in passages if gold],
    }


def musique_row(number: int, made_up: MadeUp) -> dict[str, Any]:
    """A row of MuSiQue."""
    question, answer, passages = made_up
    return {
        "id": f"2hop__{number}",
        "question": question,
        "answer": answer,
        "answer_aliases": [],
        "answerable": True,
        "paragraphs": [
            {"idx": i, "title": title, "paragraph_text": " ".join(sentences), "is_supporting": gold}
            for i, (title, sentences, gold) in enumerate(passages)
        ],
    }


def mbpp_row(number: int) -> dict[str, Any]:
    """A row of MBPP; the number decides its split."""
    name = f"add_{number}"
    return {
        "task_id": number,
        "text": f"Write a function to add {number} to a number.",
        "code": f"def {name}(x):\r\n  return x + {number}",
        "test_setup_code": "",
        "test_list": [f"assert {name}({x}) == {x + number}" for x in range(3)],
        "challenge_test_list": [],
    }


def humaneval_row(number: int) -> dict[str, Any]:
    """A row of HumanEval."""
    name = f"times_{number}"
    docstring = f'"""Multiply x by {number}.\n\n    >>> {name}(2)\n    {2 * number}\n    """'
    asserts = [f"    assert candidate({x}) == {x * number}\n" for x in (3, -1)]
    return {
        "task_id": f"HumanEval/{number}",
        "prompt": f"def {name}(x: int) -> int:\n    {docstring}\n",
        "entry_point": name,
        "canonical_solution": f"    return {number} * x\n",
        "test": "def check(candidate):\n" + "".join(asserts),
    }


def write_made_up_data(root: Path) -> Path:
    """Write two questions of every data set for every split, in the official formats, as AGENT_R1_DATA expects them."""
    files: dict[str, list[dict[str, Any]]] = {}
    for split in ("train_v1.1", "dev_distractor_v1"):
        files[f"hotpotqa/hotpot_{split}.json"] = [wiki_row(*numbered, " ") for numbered in enumerate(QUESTIONS)]
    for split in ("train", "dev"):
        files[f"2wikimultihopqa/{split}.json"] = [wiki_row(*numbered, "") for numbered in enumerate(QUESTIONS)]
        files[f"musique/musique_ans_v1.0_{split}.jsonl"] = [musique_row(*numbered) for numbered in enumerate(QUESTIONS)]
    for split in ("train", "test"):
        files[f"rows/{split}.jsonl"] = [{"question": f"Name {n}.", "answer": ["Ada", n], "level": n} for n in (1, 2)]
        files[f"gsm8k/{split}.jsonl"] = [
            {"question": f"What is {n} and {n}?", "answer": f"It is <<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}"}
            for n in (2, 600)
        ]
        files[f"math/{split}.jsonl"] = [
            {
                "problem": f"Halve {n}.",
                "level": "Level 1",
                "type": "Algebra",
                "solution": f"It is $\\boxed{{\\frac{{{n}}}{{2}}}}$.",
            }
            for n in (3, 5)
        ]
    files["math/math500.jsonl"] = [
        {
            "problem": f"Halve {n}.",
            "solution": "...",
            "answer": f"\\frac{{{n}}}{{2}}",
            "subject": "Algebra",
            "level": 1,
            "unique_id": f"test/{n}.json",
        }
        for n in (3, 5)
    ]
    files["humaneval/HumanEval.jsonl"] = [humaneval_row(number) for number in (2, 3)]
    files["mbpp/mbpp.jsonl"] = [mbpp_row(number) for number in (1, 2, 11, 12, 511, 512, 601, 602)]
    for name, rows in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(lines if path.suffix == ".jsonl" else json.dumps(rows), encoding="utf-8")
    return root
