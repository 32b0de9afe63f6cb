"""How much of what a question needs does BM25 find with the question itself as the query? Recall of gold titles.

    python benchmarks/environments/retrieval_recall.py --data-dir DATA --corpus CORPUS.jsonl

DATA holds the folders hotpotqa, 2wikimultihopqa and musique in the official formats; CORPUS has JSON lines with title,
text and (optionally) source. A set is searched in the rows whose source its name begins with ("2wiki" for
2wikimultihopqa), or in all of them where there is no source. Recall is the mean over questions of found gold titles /
gold titles. Table and JSON go to results/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from agent_r1.task_data import DATA_SETS, DataNotFoundError, Question, load_questions, read_rows
from agent_r1_tools.search import BM25Retriever, Passage

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "common"))
from machine import record_results

SETS = ("hotpotqa", "2wikimultihopqa", "musique")
DEPTHS = (2, 5, 10)


def recall(retriever: BM25Retriever, questions: list[Question]) -> dict[str, float]:
    """Recall at each depth, and the number of questions."""
    totals = dict.fromkeys(DEPTHS, 0.0)
    for question in questions:
        (hits,) = retriever.search([question.question], max(DEPTHS))
        titles = [passage.title for passage, _ in hits]
        gold = set(question.support_titles)
        for depth in DEPTHS:
            totals[depth] += len(gold.intersection(titles[:depth])) / len(gold)
    return {"questions": len(questions)} | {f"recall@{k}": round(totals[k] / len(questions), 4) for k in DEPTHS}


def main() -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with one folder per set")
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines with title, text and source")
    parser.add_argument("--split", default="dev")
    arguments = parser.parse_args()

    if not arguments.corpus.is_file():
        sys.exit(f"--corpus {arguments.corpus}: there is no such file")
    try:
        questions = {
            name: load_questions(name, arguments.split, arguments.data_dir / DATA_SETS[name].folder) for name in SETS
        }
    except DataNotFoundError as error:
        sys.exit(str(error))
    corpus = list(read_rows(arguments.corpus))
    table = []
    lines = ["| data set | questions | passages | " + " | ".join(f"recall@{k}" for k in DEPTHS) + " |"]
    lines.append("|---" * (3 + len(DEPTHS)) + "|")
    for name in SETS:
        data_set = DATA_SETS[name]
        passages = [Passage(r["title"], r["text"]) for r in corpus if name.startswith(r.get("source", ""))]
        scores = recall(BM25Retriever(passages), questions[name])
        table.append({"set": data_set.name, "split": arguments.split, "passages": len(passages)} | scores)
        values = " | ".join(f"{scores[f'recall@{k}']:.3f}" for k in DEPTHS)
        lines.append(f"| {data_set.name} | {scores['questions']} | {len(passages)} | {values} |")
        print(lines[-1], flush=True)
    results = {"corpus": arguments.corpus.name, "rows": table}
    command = "python benchmarks/environments/retrieval_recall.py --data-dir DATA --corpus CORPUS"
    command += f" --split {arguments.split}"
    record_results("retrieval_recall", results, "\n".join(lines), command)
    return table


if __name__ == "__main__":
    main()
