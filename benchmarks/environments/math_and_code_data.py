"""The judges of mathematics and programming on the real data: what is right passes, what is wrong does not.

    python benchmarks/environments/math_and_code_data.py --data DATA     # holds gsm8k/, math/, humaneval/, mbpp/

Mathematics: every gold answer against itself ("right"; "computed" without the shortcuts for equal texts and words), and
300 altered ones. Programming: every canonical solution; mutants of them, whose verdict must be that of the official
procedure, which runs program and test in one process; an answer that equals everything; and trivial programs (the first
argument, a constant), which pass some tasks of MBPP; canonical solutions and failing mutants in the wrappings that
models write around programs; and what a lookup table of the shown tests earns. Writes results/math_and_code_data.json
and .md. Takes about twenty minutes; it measures no speed, so the machine may be busy.
"""

import argparse
import ast
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import gymnasium as gym
from tqdm import tqdm

from agent_r1.judges.math_notation import unwrap
from agent_r1.judges.math_text import read
from agent_r1.judges.mathematics import judge, server
from agent_r1.judges.programs import check_program, judge_sandbox
from agent_r1.task_data import DATA_SETS, DataNotFoundError, Problem, load_questions
from agent_r1.tasks.programming import complete_program, humaneval_task, mbpp_task
from agent_r1.tool_env import Task
from agent_r1.validation import probes
from agent_r1_tools.python import Sandbox

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "common"))
from machine import from_0, record_results

EQUAL_TO_ALL = """
class Everything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __contains__ = __lt__
    def __bool__(self): return True
    def __len__(self): return 1
    def __abs__(self): return 0
    def __hash__(self): return 0
    def __iter__(self): return iter([])
    def __sub__(self, other): return self
    __rsub__ = __add__ = __radd__ = __mul__ = __mod__ = __getitem__ = __call__ = __sub__
    def __getattr__(self, name): return self
def {name}(*args, **kwargs): return Everything()
"""


def problems(data: Path, name: str) -> list[Problem]:
    """The problems of all splits that are there. Raises DataNotFoundError where there is none."""
    found: list[Problem] = []
    missing: list[DataNotFoundError] = []
    for split in DATA_SETS[name].files:
        try:
            found += load_questions(name, split, data / DATA_SETS[name].folder)
        except DataNotFoundError as error:
            missing.append(error)
    if not found:
        raise missing[0]
    return found


def altered_number(answer: str, rng: random.Random) -> str:
    """The answer with another number in it."""
    numbers = list(re.finditer(r"\d+", answer))
    if not numbers:
        return answer + "+1"
    number = rng.choice(numbers)
    return answer[: number.start()] + str(int(number[0]) + rng.randint(1, 9)) + answer[number.end() :]


def altered(answer: str, rng: random.Random) -> str:
    """An answer that is not the gold one any more: another number in it, or one candidate among others."""
    other = altered_number(answer, rng)
    return rng.choice([other, f"{other} or {answer}", f"{answer} or {other}", f"{other}, {answer}"])


def reads_itself(gold: str) -> bool:
    """Whether the gold answer is found equal to itself without the shortcuts for equal texts and words."""
    reading = read(unwrap(gold), unwrap(gold))
    return reading is not None and server.ask(reading).correct


def mathematics(sets: dict[str, list[Problem]]) -> tuple[dict[str, Any], list[str]]:
    rng = random.Random(0)
    results: dict[str, Any] = {}
    rows = [
        "| gold answers | problems | right | computed | 100 altered ones that pass |",
        "|---|---|---|---|---|",
    ]
    for name, everyone in sets.items():
        golds = [problem.answer for problem in everyone]
        right = sum(judge(gold, gold).correct for gold in golds)
        alone = {gold: reads_itself(gold) for gold in tqdm(dict.fromkeys(golds), desc=name)}
        some = rng.sample(golds, min(100, len(golds)))
        passed = [(gold, wrong) for gold in some if judge(gold, wrong := altered(gold, rng)).correct]
        results[name] = {
            "problems": len(golds),
            "judge": right / len(golds),
            "computed": sum(alone[gold] for gold in golds) / len(golds),
            "not_computed": sorted(gold for gold, correct in alone.items() if not correct),
            "altered_that_pass": passed,
        }
        rows.append(
            f"| {DATA_SETS[name].name} | {len(golds):,} | {results[name]['judge']:.2%} | "
            f"{results[name]['computed']:.2%} | {len(passed)} |"
        )
        print(rows[-1], *passed, flush=True)
    return results, rows


FLOORS = {  # programs that read nothing of the task; beside them, the result of the first assert of the prompt
    "first argument": "lambda *a, **k: a[0]",
    "last argument": "lambda *a, **k: a[-1]",
    **{constant: f"lambda *a, **k: {constant}" for constant in ("None", "True", "False", "0", "1", "[]", "''", "{}")},
}
TRY_FLOORS = """
import json
passed = []
for name, source in {floors!r}.items():
    try:
        scope = {{}}
        exec({setup!r}, scope)
        scope.update(dict.fromkeys({names!r}, eval(source)))
        for test in {tests!r}:
            exec(test, scope)
        passed.append(name)
    except Exception:
        pass
print(json.dumps(passed))
"""


def floors(sandbox: Sandbox, task: Task) -> list[str]:
    """The names of the trivial programs that pass all tests of a task, run in one process, as officially."""
    tests, tried = task.metadata["hidden"], dict(FLOORS)
    match [node for test in task.metadata["shown"].tests[:1] for node in ast.parse(test).body]:
        case [ast.Assert(test=ast.Compare(ops=[ast.Eq()], comparators=[result]))]:
            tried["result of the shown test"] = f"lambda *a, **k: {ast.unparse(result)}"
    code = TRY_FLOORS.format(floors=tried, setup=tests.setup, names=tests.names, tests=tests.tests)
    with sandbox.session() as session:
        run = session.run(code)
    return json.loads(run.output) if run.ok else []


class Mutate(ast.NodeTransformer):
    """Changes one place of a program: place number `at` of those that it could change."""

    SWAPS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE,
             ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And}  # fmt: skip

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def visit(self, node: ast.AST) -> ast.AST:
        node = self.generic_visit(node)
        swap = self.SWAPS.get(type(node))
        number = isinstance(node, ast.Constant) and type(node.value) is int
        if swap is None and not number:
            return node
        self.seen += 1
        if self.seen - 1 != self.at:
            return node
        return ast.Constant(node.value + 1) if number else swap()


def mutant(code: str, rng: random.Random) -> str | None:
    """The code with one operator or number changed; None where there is none."""
    count = Mutate(-1)
    count.visit(ast.parse(code))
    if not count.seen:
        return None
    return ast.unparse(ast.fix_missing_locations(Mutate(rng.randrange(count.seen)).visit(ast.parse(code))))


WRAPPINGS = {
    "none": "{program}",
    "a fence": "```python\n{program}\n```",
    "`python3`, `Python`, `{.py}`": tuple(f"```{tag}\n{{program}}\n```" for tag in ("python3", "Python", "{.py}")),
    "tildes, four backticks": ("~~~python\n{program}\n~~~", "````\n{program}\n````"),
    "attributes": "```python title=\"a.py\"\n{program}\n```",
    "CRLF": "```python\r\n{program}\r\n```",
    "an unpaired fence": ("```python\n{program}", "{program}\n```"),
    "a fence in a docstring": ('"""\n```\nx\n```\n"""\n{program}', '```python\n"""\n```\nx\n```\n"""\n{program}\n```'),
    "text around": "It's this:\n\n```python\n{program}\n```\nThat's it.",
    "the second fence": "Use:\n```python\nprint(1)\n```\nProgram:\n```python\n{program}\n```",
    "an output block behind it": "```python\n{program}\n```\n```output\n3\n```",
    "a future import": "from __future__ import annotations\n\n{program}",
    "a main block that reads or exits": (
        '{program}\n\nif __name__ == "__main__":\n    print(int(input()))\n',
        '{program}\n\nif __name__ == "__main__":\n    raise SystemExit(1)\n',
    ),
}

NUM_WRAPPED = 60  # tasks of each set


def wrap(program: str, forms: str | tuple[str, ...]) -> list[str]:
    """The program as an answer in each form of a wrapping."""
    answers = [form.replace("{program}", program) for form in ([forms] if isinstance(forms, str) else forms)]
    return [answer.replace("\r\n", "\n").replace("\n", "\r\n") if "\r" in answer else answer for answer in answers]


def wrappings(name: str, tasks: list[Task], programs: list[str], mutants: dict[int, str]) -> dict[str, list[int]]:
    """Of each wrapping: solutions in it that pass, of how many; failing mutants in it that pass, of how many.

    `programs` pass and `mutants`, by the index of their task, fail without a wrapping. A program that comes out of its
    wrapping as it was is not run again.
    """
    sandbox, counts = judge_sandbox("auto"), {}

    def passing(index: int, program: str, forms: str | tuple[str, ...], plain: bool) -> list[bool]:
        task, verdicts = tasks[index], []
        for answer in wrap(program, forms):
            read = complete_program(task, answer)
            same = read.strip() == complete_program(task, program).strip()
            verdicts.append(plain if same else check_program(sandbox, read, task.metadata["hidden"]).passed)
        return verdicts

    for wrapping, forms in tqdm(WRAPPINGS.items(), desc=f"{name}, wrappings"):
        right = [passed for index in mutants for passed in passing(index, programs[index], forms, plain=True)]
        wrong = [passed for index, mutant in mutants.items() for passed in passing(index, mutant, forms, plain=False)]
        counts[wrapping] = [sum(right), len(right), sum(wrong), len(wrong)]
    return counts


def lookup_tables(env_id: str, data: Path) -> dict[str, Any]:
    """Play a lookup table of the shown tests in the default split: tasks that it solves, its mean process
    reward, and that reward if the shown tests were paid."""
    env: Any = gym.make(f"AgentR1/{env_id}-v0", data_dir=data / env_id.lower()).unwrapped
    solved, process, shown = [], [], []
    for index in tqdm(range(env.num_tasks), desc=f"{env_id}, lookup tables"):
        played = probes.play(env, index, probes.shortcuts(env)["lookup_table"])
        solved += [env.task.id] if played.success else []
        process.append(played.process)
        shown.append(env.process_weights["tests_passed"] * played.infos[-1]["metrics"]["shown_tests_passed"])
    env.close()
    return {"tasks": len(process), "solved": solved, "process": fmean(process), "process_if_shown_paid": fmean(shown)}


def programming(name: str, tasks: list[Task], num_mutants: int) -> tuple[dict[str, Any], str]:
    sandbox, rng = judge_sandbox("auto"), random.Random(0)

    def passes(task: Task, program: str, official: bool = False) -> bool:
        tests = task.metadata["hidden"]
        if official:  # without the prompt before the test, which would define the function anew
            tests = replace(tests, one_process=True, setup=tests.setup.removeprefix(task.metadata["prefix"]))
        return check_program(sandbox, program, tests).passed

    programs = [complete_program(task, task.answers[0].strip()) for task in tasks]
    broken = [
        task.id
        for task, program in zip(tqdm(tasks, desc=f"{name}, canonical"), programs, strict=True)
        if not passes(task, program)
    ]
    mutants, failed, disagree = 0, 0, []
    failing: dict[int, str] = {}
    chosen = sorted(rng.sample(range(len(tasks)), min(num_mutants, len(tasks))))
    for index in tqdm(chosen, desc=f"{name}, mutants"):
        if (changed := mutant(programs[index], rng)) is not None:
            ours, official = passes(tasks[index], changed), passes(tasks[index], changed, official=True)
            mutants, failed = mutants + 1, failed + (not ours)
            failing |= {} if ours else {index: changed}
            disagree += [tasks[index].id] if ours != official else []
    some = dict(rng.sample(sorted(failing.items()), min(NUM_WRAPPED, len(failing))))
    cheated: dict[str, list[str]] = {"ours": [], "official": []}
    for index in tqdm(chosen, desc=f"{name}, equal to all"):
        program = programs[index] + EQUAL_TO_ALL.format(name=tasks[index].metadata["entry_point"])
        cheated["ours"] += [tasks[index].id] if passes(tasks[index], program) else []
        cheated["official"] += [tasks[index].id] if passes(tasks[index], program, official=True) else []
    low = {task.id: found for task in tqdm(tasks, desc=f"{name}, floors") if (found := floors(sandbox, task))}
    result = {
        "tasks": len(tasks),
        "floors": low,
        "canonical_that_fail": broken,
        "one_process": [task.id for task in tasks if task.metadata["hidden"].one_process],
        "mutants": mutants,
        "mutants_that_fail": failed,
        "verdicts_unlike_the_official": disagree,
        "wrappings": wrappings(name, tasks, programs, some),
        "equal_to_all": {"tried": len(chosen), "pass": cheated["ours"], "pass_officially": len(cheated["official"])},
    }
    row = (
        f"| {name} | {len(tasks) - len(broken)} / {len(tasks)} | {failed} / {mutants} | {len(disagree)} | "
        f"{len(cheated['ours'])} / {len(chosen)} | {len(cheated['official'])} / {len(chosen)} | {len(low)} |"
    )
    print(row, result, flush=True)
    return result, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with one folder per set")
    parser.add_argument("--mbpp-mutants", type=from_0, default=300)
    arguments = parser.parse_args()

    data = arguments.data
    try:  # of all sets, before the first is judged
        sets = {name: problems(data, name) for name in ("gsm8k", "math", "math500")}
        human = [humaneval_task(program) for program in load_questions("humaneval", "test", data / "humaneval")]
        splits = DATA_SETS["mbpp"].files
        mbpp = [mbpp_task(program, 1) for split in splits for program in load_questions("mbpp", split, data / "mbpp")]
    except DataNotFoundError as error:
        sys.exit(str(error))
    results, rows = mathematics(sets)
    rows += [
        "",
        "| programs | canonical that pass | mutants that fail | verdicts unlike the official | "
        "`__eq__` always true passes | in the official procedure | tasks that a trivial program passes |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, tasks, mutants in (("HumanEval", human, len(human)), ("MBPP", mbpp, arguments.mbpp_mutants)):
        results[name.lower()], row = programming(name, tasks, mutants)
        rows.append(row)
    rows += [
        "",
        "| wrapping | HumanEval: solutions that pass | failing mutants that pass | MBPP: solutions | failing mutants |",
        "|---|---|---|---|---|",
    ]
    for wrapping in WRAPPINGS:
        counts = [results[name]["wrappings"][wrapping] for name in ("humaneval", "mbpp")]
        rows.append(f"| {wrapping} | " + " | ".join(f"{a} / {b} | {c} / {d}" for a, b, c, d in counts) + " |")
    rows += [
        "",
        "| lookup table of the shown tests | tasks | solved | process reward | if the shown tests paid |",
        "|---|---|---|---|---|",
    ]
    for name in ("HumanEval", "MBPP"):
        found = results[name.lower()]["lookup_table"] = lookup_tables(name, data)
        rows.append(
            f"| {name} | {found['tasks']} | {len(found['solved'])} | {found['process']:.3f} | "
            f"{found['process_if_shown_paid']:.3f} |"
        )
    command = "python benchmarks/environments/math_and_code_data.py --data DATA"
    record_results("math_and_code_data", results, "\n".join(rows), command)


if __name__ == "__main__":
    main()
