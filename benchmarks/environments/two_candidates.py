r"""Answers that name two candidates: none may be right.

    python benchmarks/environments/two_candidates.py                      # all of them
    python benchmarks/environments/two_candidates.py --templates 1200     # a sample

A policy that is not sure writes both: `6 or \boxed{7}`, `\frac{1}{2} \lor \frac{1}{3}`, `7\phantom{6}`. Here are
templates of such answers (frames, around separators) and 20 pairs of a gold answer and another one. In every template
the two stand in both orders. Those of `candidates()` must be wrong for both; those of `statements()` say which one
holds, and must be wrong for the other; a gold answer alone is right. Writes results/two_candidates.json and .md. Takes
half an hour (the sample: a quarter) on one core; it measures no speed, so the machine may be busy.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from pathlib import Path

from tqdm import tqdm

from agent_r1.judges.mathematics import judge

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "common"))
from machine import from_1, record_results

PAIRS = [
    ("7", "6"), ("42", "-3"), ("1234", "2341"), ("0.5", "0.2"), (r"\frac{1}{2}", r"\frac{1}{3}"), (r"50\%", r"25\%"),
    (r"\$16", r"\$25"), (r"\sqrt{2}", r"\sqrt{3}"), (r"3\pi", r"2\pi"), (r"90^\circ", r"30^\circ"),
    (r"5\text{ cm}", r"6\text{ cm}"), ("x+1", "x-1"), ("x^2+2x", "x^2-2x"), ("(1,2)", "(2,3)"),
    ("[0,5]", "(0,3)"), (r"(-\infty,3)", r"(3,\infty)"), (r"\text{Evelyn}", r"\text{Carla}"),
    (r"\text{(C)}", r"\text{(D)}"), ("y=2x+3", "y=3x+2"), ("1110_2", "1011_2"),
]  # fmt: skip

WORDS = (
    "or, and/or, either, maybe, perhaps, possibly, alternatively, otherwise, else, but, but not, not, rather than, "
    "instead of, and not, is not, versus, vs, vs., then, also, plus maybe, unless, if not, wrong so, no wait, hmm, "
    "or maybe, or else, respectively, is wrong it is, equals, is, means, to, through, until, up to, between, oder, ou, "
    "o, och, eller, lub, veya, или, 或, または, it could be, could also be, my second guess is, final answer"
).split(", ")
COMMANDS = (
    r"\lor \land \vee \wedge \mid \parallel \nmid \to \rightarrow \Rightarrow \implies \iff \leftrightarrow \mapsto "
    r"\longrightarrow \leftarrow \gets \Leftrightarrow \neq \ne \not= \equiv \sim \simeq \cong \approx \asymp \doteq "
    r"\propto \leq \geq \le \ge \lt \gt \ll \gg \prec \succ \preceq \succeq \subset \supset \subseteq \supseteq \in "
    r"\ni \notin \perp \models \vdash \dashv \top \bot \neg \lnot \therefore \because \quad \qquad \, \; \: \! \ "
    r"\hspace{1cm} \hfill \dots \ldots \cdots \vdots \ddots \& \# \_ \backslash \setminus \smallsetminus \oplus "
    r"\otimes \odot \ominus \star \ast \bullet \circ \diamond \triangle \square \bigcirc \dagger \ddagger \amalg "
    r"\uplus \sqcup \sqcap \wr \colon \semicolon \comma \newline \par \linebreak \tab \cr \\ \\[1ex] \hline \over "
    r"\atop \choose \brace \brack \bmod \mod \pmod \oint \nabla \partial \forall \exists \prime \cup \cap"
).split()
SIGNS = [
    ",", ", ", ";", "; ", ":", " : ", "|", " | ", "||", "/ ", " // ", "~", "~=", " ~ ", "&", " & ", "&&", "@", "#", " ",
    "  ", "\n", "\n\n", "\t", "?", "? ", "! ", "...", "…", " - ", " -- ", "—", "–", "=", " = ", "==", "!=", "<>", "<",
    ">", "<=", ">=", "->", "=>", "<-", "<=>", "≠", "≈", "≡", "≤", "≥", "∨", "∧", "→", "⇒", "⇔", "∈", "∪", "∩", "•", "·",
    "、", "，", "；", "｜", "¦", "\u00a0", "\u2003", "\u200b", "\u200b\u200b", "\x0b", "\x0c", "\r", "\r\n", "`", "``",
    "'", "''", '"', '" "', "_", "__", "\\", "%", " % ", "\\%", "$", " $ ", "$$", "$ $", "\\$", "{}", "{,}", "{;}", "()",
    "[]", "(or)", "[or]", "{or}", " <br> ", "</answer><answer>", "<answer>", "**", " ** ", "^", ".", ". ", "..",
]  # fmt: skip

FRAMES = [  # {a} and {b} are the candidates, {s} what stands between them
    "{a}{s}{b}", r"\boxed{{{a}}}{s}{b}", r"{a}{s}\boxed{{{b}}}", "${a}${s}${b}$", r"\({a}\){s}\({b}\)",
    r"\boxed{{{a}{s}{b}}}", "{{{a}}}{s}{{{b}}}",
]  # fmt: skip
WORD_FRAMES = [
    "{a} {s} {b}", r"{a} {s} \boxed{{{b}}}", r"\boxed{{{a}}} {s} {b}", "${a}$ {s} ${b}$", r"{a}\text{{ {s} }}{b}",
    r"\boxed{{{a}}}\text{{ {s} }}\boxed{{{b}}}", "{a}, {s} {b}", "{a} ({s} {b})", r"{a}\mathrm{{{s}}}{b}",
    r"{a}\text{{ {s} {b}}}", r"{s} {a}, {b}", "{a}\n{s} {b}",
]  # fmt: skip
WHOLE = [
    r"{a}\phantom{{{b}}}", r"\phantom{{{b}}}{a}", r"{a}\hphantom{{{b}}}", r"{a}\vphantom{{{b}}}", r"{a}\tag{{{b}}}",
    r"{a}\label{{{b}}}", r"{a}\footnote{{{b}}}", r"{a}\hspace{{{b}}}", r"{a}\rule{{{b}}}{{0pt}}", r"{a}\color{{{b}}}",
    r"\color{{{b}}}{a}", r"\textcolor{{{b}}}{{{a}}}", r"{a}^{{\text{{{b}}}}}", r"{a}_{{\text{{{b}}}}}", "{a}_{{{b}}}",
    r"\stackrel{{{b}}}{{{a}}}", r"\overset{{{b}}}{{{a}}}", r"\underset{{{b}}}{{{a}}}", r"\overline{{{a}}}{b}",
    r"\underbrace{{{a}}}_{{{b}}}", r"\overbrace{{{a}}}^{{{b}}}", r"\cancel{{{b}}}{a}", r"\not{{{b}}} {a}",
    r"\sout{{{b}}} {a}", r"{a}\mathbf{{{b}}}", r"{a}\mathrm{{{b}}}", r"{a}\mathit{{{b}}}", r"{a}\mathsf{{{b}}}",
    r"{a}\mathtt{{{b}}}", r"{a}\textbf{{{b}}}", r"{a}\textit{{ {b}}}", r"{a}\mbox{{ {b}}}", r"{a}\hbox{{{b}}}",
    r"{a}\operatorname{{{b}}}", r"{a}\text{{{b}}}", r"\text{{{a}}}\text{{{b}}}", r"\text{{{a}}} {b}",
    r"\text{{{a} or {b}}}", r"\text{{{a}, {b}}}", r"{a}\text{{ cm}} or {b}\text{{ cm}}", "{a}\\text{{ cm}}, {b}",
    r"{a}\text{{ (not }} {b}\text{{)}}", r"{a}\text{{ is wrong, }} {b}", r"\text{{not }} {a}, {b}", "not {a}, {b}",
    r"\begin{{cases}} {a} \\ {b} \end{{cases}}", r"\begin{{matrix}} {a} \\ {b} \end{{matrix}}",
    r"\begin{{pmatrix}} {a} & {b} \end{{pmatrix}}", r"\begin{{array}}{{c}} {a} \\ {b} \end{{array}}",
    r"\begin{{aligned}} {a} \\ {b} \end{{aligned}}", r"\{{{a}, {b}\}}", r"\left\{{{a}; {b}\right\}}", "[{a}, {b}]",
    "({a}, {b})", "({a}; {b})", "<{a}, {b}>", "|{a}, {b}|", r"\langle {a}, {b} \rangle", r"\{{{a}\}} \cup \{{{b}\}}",
    r"\{{{a}, {b}\}} \setminus \{{{b}\}}", r"\{{{a}\}} \cap \{{{b}\}}", r"\max({a}, {b})", r"\min({a}, {b})",
    r"\gcd({a}, {b})", r"{a} \pm {b}", r"\pm {a}, {b}", r"x = {a}, x = {b}", r"x = {a} or x = {b}",
    r"x = {a}; y = {b}", r"x \in \{{{a}, {b}\}}", r"x = {a} = {b}", r"{a} = {b} = {a}", r"{a} = {a} = {b}",
    r"{b} = x = {a}", r"x \neq {b}, {a}", r"x \ne {a} = {b}", r"\frac{{{a}}}{{1}} {b}", "{a}}}{{{b}", r"}}{a}{{{b}",
    r"{a}}}\boxed{{{b}", r"{a}\}}, \{{{b}", r"{a}$, ${b}", r"{a}\), \({b}", r"\boxed{{{a}}}\boxed{{{b}}}",
    r"\boxed{{{a}}}, \boxed{{{b}}}", r"\boxed{{\boxed{{{a}}} {b}}}", r"\fbox{{{a}}} \boxed{{{b}}}",
    r"\boxed {a} \boxed {b}", r"\boxed{a}, {b}", r"The answer is {a}. Or {b}.", "answer: {a}\nanswer: {b}",
    "5, {a}, {b}", "{a} {b}", "{a}{b}", "{a}  {a} {b}", "{a}, {a}, {b}", "{a} or {b} or {a}", "{a} % {b}",
    "{a} %{b}\n", "{a} # {b}", "{a} // {b}", "{a} /* {b} */", "{a} <!-- {b} -->", "{a} '{b}'", '{a} "{b}"',
    "{a}\x00{b}", "{a}\x08{b}", "{a}\u202e{b}", "{a}\ufeff{b}", "{a} + 0 {b}", "{a} + 0 \\cdot {b}", "0({b}) + {a}",
    "{a} + ({b})\\cdot 0", "{a} \\cdot ({b})^0", "({b})^0 \\cdot {a}", "0{b} + {a}",
    r"\sqrt{{{a}}}, \sqrt{{{b}}}", r"f({b}) = {a}, {b}", "{a}! {b}", "{a} mod {b}", r"{a} \bmod {b}",
    r"{a} \pmod {{{b}}}", r"{a} \pmod {b}", r"{a} \equiv {b} \pmod 5", r"{a}\;({b})", r"{a} \,\, [{b}]",
]  # fmt: skip
# Where b is only mentioned, a may be right for a gold answer of a.
STATEMENTS = [
    r"f({b}) = {a}", r"x_{{{b}}} = {a}", r"x = {a} \approx {b}", r"{a} \approx {b}",
    "({b}) - ({b}) + {a}", "{a} + ({b}) - ({b})", r"\frac{{{a} ({b})}}{{{b}}}",
    r"P({b}) = {a}",
    r"{a}\text{{, not }} {b}", "not {b} but {a}", r"\text{{not }} {b}\text{{ but }} {a}", "{a} (not {b})", "{b} < {a}",
    r"{a} \neq {b}", "x = {a}, {b} < x",
]  # fmt: skip


def candidates() -> list[str]:
    """Templates, with {a} and {b}, of answers that leave it open which of the two holds."""
    spaced = [f" {sign} " for sign in COMMANDS]
    separated = [(frame, sign) for frame in FRAMES for sign in [*SIGNS, *spaced]]
    separated += [(frame, word) for frame in WORD_FRAMES for word in WORDS]
    found = [frame.format(a="{a}", b="{b}", s="{s}").replace("{s}", sign) for frame, sign in separated]
    found += [template.format(a="{a}", b="{b}") for template in WHOLE]
    return list(dict.fromkeys(found))


def statements() -> list[str]:
    """Templates that say that {a} holds, or at most mention {b}."""
    return [template.format(a="{a}", b="{b}") for template in STATEMENTS]


def fill(template: str, a: str, b: str) -> str:
    """The answer."""
    return re.sub(r"\{([ab])\}", lambda found: a if found[1] == "a" else b, template)


def passes(template: str, gold: str, other: str, states: bool = False) -> list[str]:
    """The answers of a template, in both orders, that are right for the gold answer and must not be."""
    answers = [fill(template, other, gold)] if states else [fill(template, gold, other), fill(template, other, gold)]
    return [answer for answer in answers if judge(gold, answer).correct]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", type=from_1, help="take so many of the templates, drawn with seed 0, not all")
    arguments = parser.parse_args()

    both, one = candidates(), statements()
    if arguments.templates is not None:
        both = random.Random(0).sample(both, min(arguments.templates, len(both)))
    pairs = [*PAIRS, *((other, gold) for gold, other in PAIRS)]
    passed = [
        (gold, answer)
        for states, templates in ((False, both), (True, one))
        for template in tqdm(templates, desc="statements" if states else "candidates")
        for gold, other in pairs
        for answer in passes(template, gold, other, states)
    ]
    alone = [gold for pair in PAIRS for gold in pair if not judge(gold, gold).correct]
    results = {
        "templates": len(both), "statements": len(one), "pairs": len(PAIRS),
        "answers": (2 * len(both) + len(one)) * len(pairs), "right": passed, "gold_alone_that_are_wrong": alone,
    }  # fmt: skip
    table = (
        "| templates of two candidates | that state one | pairs | answers | right |\n|---|---|---|---|---|\n"
        f"| {len(both):,} | {len(one)} | {len(PAIRS)} | {results['answers']:,} | {len(passed)} |"
    )
    print(table, *passed, *alone, sep="\n")
    command = "python benchmarks/environments/two_candidates.py"
    if arguments.templates is not None:
        command += f" --templates {arguments.templates}"
    record_results("two_candidates", results, table, command)


if __name__ == "__main__":
    main()
