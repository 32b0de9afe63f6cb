r"""The judge of mathematics beside the official string rules and math-verify alone, on the same answers.

    python benchmarks/environments/math_answers.py --data DATA                 # holds gsm8k/ and math/
    python benchmarks/environments/math_answers.py --data DATA --sets math500  # a piece: results/math_answers_math500.*

For problems drawn from each set: the gold answer and other ways to write it, which should be right; unsimplified
answers, from the official solutions; wrong ones (another number, another problem's gold answer), and two candidates at
a time, which should not be right; and formulas of the question, which were copied, plain and with ten edits that add
nothing. The last are judged as if there were no question, too, and by other rules against copying. Writes
results/math_answers.json and .md. Takes about ten minutes; it measures no speed, so the machine may be busy.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from math_and_code_data import altered_number, problems
from tqdm import tqdm

from agent_r1.judges.math_copying import copied_pieces, stands_in
from agent_r1.judges.math_notation import last_boxed
from agent_r1.judges.mathematics import judge
from agent_r1.task_data import DATA_SETS, DataNotFoundError, Problem

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "common"))
from machine import from_1, record_results
from two_candidates import candidates, fill

SETS = ("gsm8k", "math", "math500")
RIGHT = ("gold", "rewritten", "other notation", "unsimplified")  # the others should be wrong
EDITS = (
    "{}+0", "0+{}", "{}+1-1", "1-1+{}", r"({})\cdot 1", "-(-({}))", r"\frac{{2({})}}{{2}}", "x={}+1-1", "({})^1",
    r"\sqrt{{{}}}^2",
)  # fmt: skip
EDITED_PROBLEMS = 500  # all of MATH-500


# --- what is judged ---------------------------------------------------------------------------------------------------


def rewritten(gold: str, rng: random.Random) -> str:
    """The gold answer in another notation that people use."""
    ways = [f"${gold}$", rf"\boxed{{{gold}}}", f"{gold}.", rf"\({gold}\)"]
    if re.fullmatch(r"-?\d+", gold):
        ways += [f"{gold}.0", f"{int(gold):,}", f"x = {gold}", rf"{gold}\text{{ m}}"]
    if fraction := re.fullmatch(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}", gold):
        ways += ["{}{}/{}".format(*fraction.groups()), r"{}\dfrac{{{}}}{{{}}}".format(*fraction.groups())]
    if re.fullmatch(r"[^=<>]*[a-zA-Z][^=<>]*", gold) and "^" in gold:
        ways.append(gold.replace("^", "**"))
    return rng.choice(ways)


def other_notation(gold: str, rng: random.Random) -> str:
    """The gold answer in characters, powers of ten, words and orders that people and models write."""
    digits, texts = str.maketrans("0123456789", "０１２３４５６７８９"), "\\text" in gold
    ways = [f"**{gold}**", f"**${gold}$**", f"{gold}。"]
    if re.search(r"\d", gold):
        ways.append(gold.translate(digits))
    if "-" in gold and not texts:
        ways += [gold.replace("-", "–"), gold.replace("-", "−")]
    if re.fullmatch(r"-?\d+", gold):
        ways += [f"{gold} {noun}" for noun in ("dollars", "people", "books")]
        if len(gold.strip("-")) > 1:
            mantissa, exponent = f"{int(gold):.{len(gold)}e}".split("e")
            ways += [f"{mantissa.rstrip('0').rstrip('.')}e{exponent}"]
    if "\\infty)" in gold:
        ways += [gold.replace("\\infty)", "+\\infty)"), gold.replace("\\infty", "∞"), f"x \\in {gold}"]
    if "\\cup" in gold:
        ways += [r"\cup".join(gold.split("\\cup")[::-1]), gold.replace("\\cup", "∪")]
    return rng.choice(ways)


def unsimplified(problem: Problem) -> str | None:
    """What the official solution computes last, before it is computed; None where that can't be read off."""
    solution = problem.metadata.get("solution", "")
    if steps := re.findall(r"<<([^<>=]+)=([^<>]*)>>", solution):  # GSM8K: <<48/2=24>>
        expression, result = steps[-1]
        return expression if result.strip() == problem.answer else None
    before = solution[: solution.rfind("\\boxed")].rstrip(" &")
    if not before.endswith("="):
        return None
    expression = before[:-1].rpartition("=")[2].strip(" &\n")
    return expression if expression and not re.search(r"[$&\n]|\\\\|\\\[|\\begin", expression) else None


def formulas(problem: Problem, name: str) -> list[str]:
    """The formulas of a question as a policy may copy them, longest first; the numbers of GSM8K, the last one first."""
    if name == "gsm8k":
        return [number.rstrip(".,") for number in re.findall(r"\d[\d,./%]*", problem.question)[::-1]]
    found = re.findall(r"\$+([^$]+)\$+|\\\[(.+?)\\\]|\\\((.+?)\\\)", problem.question, re.DOTALL)
    return sorted({"".join(groups).strip().strip(".,?") for groups in found}, key=lambda text: (-len(text), text))


def pieces(formula: str) -> list[str]:
    """A formula and the sides of its equals signs."""
    return list(dict.fromkeys([formula, *(side.strip() for side in formula.split("=") if side.strip())]))


# --- other judges -----------------------------------------------------------------------------------------------------


def official(name: str) -> Callable[[str, str], bool]:
    """The official string rule of a data set."""
    return gsm8k_equal if name == "gsm8k" else math_equal


def gsm8k_equal(gold: str, answer: str) -> bool:
    """grade-school-math/dataset.py: the number behind ####, without commas, as text."""
    found = re.match(r"-?[0-9.,]+", answer)
    return bool(found) and found[0].replace(",", "") == gold


def math_equal(gold: str, answer: str) -> bool:
    """math_equivalence.py of hendrycks/math: equal texts, after both were brought to one notation."""
    try:
        return math_notation(gold) == math_notation(last_boxed(answer) or answer)
    except (ValueError, IndexError):  # where the official rule fails, it compares the texts
        return gold == answer


def math_notation(text: str) -> str:
    for old, new in (("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""),
                     ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")):  # fmt: skip
        text = text.replace(old, new)
    if "\\text{ " in text:  # a unit
        text, _ = text.split("\\text{ ")
    for old, new in (("\\%", ""), (" .", " 0."), ("{.", "{0.")):
        text = text.replace(old, new)
    if text.startswith("."):
        text = "0" + text
    if text.count("=") == 1 and len(text.split("=")[0]) <= 2:  # x = 7
        text = text.split("=")[1]
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def math_verify_alone(gold: str, answer: str) -> bool:
    """As its README shows; the answer is put between dollars where it has neither them nor a box."""
    from math_verify import parse, verify

    written = answer if re.search(r"\$|\\boxed|\\\(|\\\[", answer) else f"${answer}$"
    return bool(verify(parse(f"${gold}$"), parse(written)))


# --- rules against copying --------------------------------------------------------------------------------------------


def is_formula_of(question: str, gold: str, answer: str, name: str) -> bool:
    """The answer is a formula of the question, or a side of one, to the letter, and not the gold answer's text."""
    whole = {piece.replace(" ", "") for formula in formulas(Problem("", question, gold), name)
             for piece in pieces(formula)}  # fmt: skip
    return answer.replace(" ", "") in whole - {gold.replace(" ", "")}


def is_text_of(question: str, gold: str, answer: str, name: str) -> bool:
    """The answer's text stands in the question's, wherever, and is not the gold answer's."""
    return answer.replace(" ", "") in question.replace(" ", "") and answer.replace(" ", "") != gold.replace(" ", "")


def has_tokens_of(question: str, gold: str, answer: str, name: str) -> bool:
    """The answer's tokens stand in the question in a row."""
    return stands_in(question, gold, answer)


def has_right_piece_of(question: str, gold: str, answer: str, name: str) -> bool:
    """The rule of the judge: so do the tokens of a piece of it that alone is right."""
    pieces = copied_pieces(question, gold, answer)
    return stands_in(question, gold, answer) or any(judge(gold, piece).correct for piece in pieces)


RULES = {
    "none": lambda *_: False,
    "a whole formula, or a side of it, to the letter": is_formula_of,
    "a piece of the text, to the letter": is_text_of,
    "tokens in a row": has_tokens_of,
    "tokens in a row, or a right piece (the judge)": has_right_piece_of,
}


# --- tables -----------------------------------------------------------------------------------------------------------


def measure(name: str, everyone: list[Problem], most: int) -> dict[str, Any]:
    """Shares of answers that are right, for every kind of answer and judge; what the rules against copying refuse."""
    rng, draw = random.Random(0), random.Random(1)
    some = rng.sample(everyone, min(most, len(everyone)))
    templates = candidates()
    answers: dict[str, list[tuple[Problem, str]]] = {
        kind: [] for kind in (*RIGHT, "altered", "another gold", "two candidates")
    }
    for problem in some:
        other = altered_number(problem.answer, rng)
        others = [one.answer for one in draw.sample(everyone, min(9, len(everyone))) if one.answer != problem.answer]
        rows = {
            "gold": problem.answer, "rewritten": rewritten(problem.answer, rng), "unsimplified": unsimplified(problem),
            "other notation": other_notation(problem.answer, draw), "another gold": others[0] if others else None,
            "altered": other, "two candidates": fill(rng.choice(templates), *rng.sample([problem.answer, other], 2)),
        }  # fmt: skip
        for kind, answer in rows.items():
            if answer is not None:
                answers[kind].append((problem, answer))
    answers["longest formula"] = [(p, found[0]) for p in some if (found := formulas(p, name))]
    kinds = {}
    for kind, rows in answers.items():
        judged = [
            (p, answer, judge(p.answer, answer).correct, judge(p.answer, answer, p.question).correct)
            for p, answer in tqdm(rows, desc=f"{name}, {kind}")
        ]
        kinds[kind] = {
            "answers": len(rows),
            "official": sum(official(name)(p.answer, answer) for p, answer in rows),
            "math_verify": sum(math_verify_alone(p.answer, answer) for p, answer in rows),
            "judge_without_question": sum(right for _, _, right, _ in judged),
            "judge": sum(right for _, _, _, right in judged),
            "unexpected": [(p.answer, answer) for p, answer, _, right in judged if right != (kind in RIGHT)],
        }
        kinds[kind]["refused_by"] = {
            rule: sum(right and refuses(p.question, p.answer, answer, name) for p, answer, right, _ in judged)
            for rule, refuses in RULES.items()
        }
    any_formula = {rule: 0 for rule in RULES}
    for p in tqdm(some, desc=f"{name}, any formula"):
        copied = [piece for formula in formulas(p, name) for piece in pieces(formula)]
        right = [piece for piece in copied if judge(p.answer, piece).correct]
        for rule, refuses in RULES.items():
            any_formula[rule] += any(not refuses(p.question, p.answer, piece, name) for piece in right)
    is_there = sum(stands_in(p.question, "", p.answer) for p in some)  # and is right all the same
    return {
        "problems": len(some), "kinds": kinds, "any_formula": any_formula, "gold_in_question": is_there,
        "edits": edits(name, everyone[:EDITED_PROBLEMS]) if name != "gsm8k" else None,
    }  # fmt: skip


def edits(name: str, problems: list[Problem]) -> dict[str, Any]:
    """In how many problems a formula of the question is right, plain and edited, by rule against copying."""
    rules = {"none": RULES["none"], "tokens in a row": has_tokens_of}
    right = {edit: dict.fromkeys((*rules, "the judge"), 0) for edit in ("{}", *EDITS, "any edit")}
    for p in tqdm(problems, desc=f"{name}, edits"):
        copied = dict.fromkeys(piece for formula in formulas(p, name) for piece in pieces(formula))
        tried = [piece for piece in copied if not re.fullmatch(r"-?\d+|[a-zA-Z]", piece)]
        alone = [piece for piece in tried if judge(p.answer, piece).correct]
        any_edit = dict.fromkeys(right["{}"], False)
        for edit in ("{}", *EDITS):
            answers = [edit.format(piece) for piece in alone]
            counted = [answer for answer in answers if judge(p.answer, answer).correct]
            found = {
                rule: any(not refuses(p.question, p.answer, answer, name) for answer in counted)
                for rule, refuses in rules.items()
            }
            found["the judge"] = any(judge(p.answer, answer, p.question).correct for answer in answers)
            for rule, is_right in found.items():
                right[edit][rule] += is_right
                any_edit[rule] |= is_right and edit != "{}"
        for rule, is_right in any_edit.items():
            right["any edit"][rule] += is_right
    return {"problems": len(problems), "right": right}


def tables(results: dict[str, Any]) -> str:
    rows = ["| answers | of | number | official string rule | math-verify alone | the judge |", "|---" * 6 + "|"]
    for kind in next(iter(results.values()))["kinds"]:
        for name, result in results.items():
            row = result["kinds"][kind]
            shares = (f"{row[who] / max(1, row['answers']):.1%}" for who in ("official", "math_verify", "judge"))
            rows.append(f"| {kind} | {DATA_SETS[name].name} | {row['answers']:,} | {' | '.join(shares)} |")
    rows += ["", "| an answer is refused that is | of | gold answers | rewritten ones | in other notation "
             "| unsimplified ones | longest formula is right | any formula is right |", "|---" * 8 + "|"]  # fmt: skip
    for rule in RULES:
        for name, result in results.items():
            kinds = result["kinds"]
            refused = [kinds[kind]["refused_by"][rule] for kind in RIGHT]
            longest = kinds["longest formula"]
            left = longest["judge_without_question"] - longest["refused_by"][rule]
            rows.append(
                f"| {rule} | {DATA_SETS[name].name} | {' | '.join(map(str, refused))} | "
                f"{left} / {longest['answers']} | {result['any_formula'][rule]} / {result['problems']} |"
            )
    edited = {name: result["edits"] for name, result in results.items() if result["edits"]}
    if not edited:
        return "\n".join(rows)
    names = [f"{DATA_SETS[name].name}, {rule}" for name, one in edited.items() for rule in one["right"]["{}"]]
    rows += ["", f"| copied formula f | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for edit in ("{}", *EDITS, "any edit"):
        shares = [f"{count} / {one['problems']}" for one in edited.values() for count in one["right"][edit].values()]
        shown = edit if edit == "any edit" else f"`{edit.format('f')}`"
        rows.append(f"| {shown} | {' | '.join(shares)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with one folder per set")
    parser.add_argument("--problems", type=from_1, default=300, help="of each set")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    arguments = parser.parse_args()

    logging.disable()  # math-verify's warnings
    try:
        sets = {name: problems(arguments.data, name) for name in arguments.sets}
    except DataNotFoundError as error:
        sys.exit(str(error))
    results = {name: measure(name, everyone, arguments.problems) for name, everyone in sets.items()}
    table = tables(results)
    print(table)
    command, name = "python benchmarks/environments/math_answers.py --data DATA", "math_answers"
    if set(sets) != set(SETS):
        command, name = f"{command} --sets {' '.join(sets)}", "_".join([name, *sets])
    record_results(name, results, table, command)


if __name__ == "__main__":
    main()
