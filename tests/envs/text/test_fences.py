"""Code in answers and blocks in turns: programs, queries and the dialect `fenced` share what a fence is."""

import json
import random
import time

import numpy as np
import pytest

from agent_r1.dialects import get_dialect
from agent_r1.task_data import Program
from agent_r1.tasks.programming import complete_program, humaneval_task, mbpp_task
from agent_r1.tasks.sql_world.environment import SQLWorldEnv, _is_query
from agent_r1.tasks.sql_world.generator import generate_task
from agent_r1.text.fences import PYTHON, SQL, blocks, find_code, language
from agent_r1.text.tokenizers import load_tokenizer

TOTAL = "def total(xs):\n    return sum(xs)\n"
OTHER = "def total(xs):\n    return len(xs)\n"
USE = "print(total([1]))\n"
FENCED_DOC = 'def total(xs):\n    """Adds up.\n\n    ```{tag}\n    total([1])\n    ```\n    """\n    return sum(xs)\n'
PROMPT = (
    "from typing import List\n\n\n"
    'def total(xs: List[int]) -> int:\n    """The sum.\n\n    >>> total([1, 2])\n    3\n    """\n'
)
TASKS = {
    "MBPP": mbpp_task(Program("MBPP/1", "Add.", "", TOTAL, "", ("assert total([1, 2]) == 3",)), 1),
    "HumanEval": humaneval_task(
        Program("H/0", PROMPT, "total", "    return sum(xs)\n", "", ("def check(f):\n    assert f([2]) == 2\n",))
    ),
}


def works(task, answer):
    """Whether the program in an answer adds up. The answers are ours, so no sandbox is needed."""
    names = {}
    try:
        exec(complete_program(TASKS[task], answer), names)
        return names["total"]([1, 2, 5]) == 8
    except Exception:
        return False


RIGHT = {
    "plain": TOTAL,
    **{
        f"tag {tag}": f"```{tag}\n{TOTAL}```"
        for tag in (
            "",
            "python",
            "Python",
            "PYTHON",
            "py",
            "py3",
            "python3",
            "python3.11",
            "Python 3",
            " python",
            "python\t",
            "{.python}",
            "{python, echo=FALSE}",
            'python title="a.py"',
            "python:a.py",
            "python,ignore",
            "python {1,3}",
            "language-python",
            "ipython",
            "text",
            "pyhton",
        )
    },
    "tildes": f"~~~\n{TOTAL}~~~",
    "tildes with a tag": f"~~~ python\n{TOTAL}~~~\n",
    "four backticks": f"````python\n{TOTAL}````",
    "a longer end": f"```python\n{TOTAL}`````",
    "CRLF": f"```python\n{TOTAL}```".replace("\n", "\r\n"),
    "CRLF without a fence": TOTAL.replace("\n", "\r\n"),
    "byte order mark": f"\ufeff```python\n\ufeff{TOTAL}```",
    "byte order mark without a fence": f"\ufeff{TOTAL}",
    "end on the last line": f"```python\n{TOTAL.strip()}```",
    "begin behind text": f"Here's Bob's program: ```python\n{TOTAL}``` It's fine.",
    "code beside the fence": f"```{TOTAL}```",
    "code beside the tag": f"```python {TOTAL}```",
    "on one line": "```def total(xs): return sum(xs)```",
    "on one line with a tag": "```python def total(xs): return sum(xs)```",
    "inline": "`def total(xs): return sum(xs)`",
    "an alias": f"```python\n{TOTAL.replace('total', 'add')}total = add\n```",
    "a lambda": "```python\ntotal = lambda xs: sum(xs)\n```",
    "a typed lambda": "```\ntotal: object = lambda xs: sum(xs)\n```",
    "never closed": f"```python\n{TOTAL}",
    "never opened": f"{TOTAL}```",
    "never opened, and text": f"{TOTAL}```\nThis adds up.",
    "never closed before another": f"```python\n{TOTAL}\n```python\n{USE}```",
    "text around": f"I'd say:\n\n```python\n{TOTAL}```\n\nThat's \"it\".",
    "headings around": f"# Program\n\n```python\n{TOTAL}```\n## Notes: don't\n",
    "the second": f"Use:\n```python\n{USE}```\nProgram:\n```python\n{TOTAL}```",
    "the first": f"```python\n{TOTAL}```\nUse:\n```python\n{USE}```",
    "the last of two programs": f"First:\n```python\n{OTHER}```\nBetter:\n```python\n{TOTAL}```",
    "the second without a tag": f"```python\n{USE}```\n```\n{TOTAL}```",
    "output behind": f"```python\n{TOTAL}```\n```output\ntotal = 3\n```",
    "bash before": f"```bash\npython total.py\n```\n```python\n{TOTAL}```",
    "text block without a tag behind": f"```python\n{TOTAL}```\n```\n3\n```",
    "an empty one before": f"```python\n```\n```python\n{TOTAL}```",
    "an empty one behind": f"```python\n{TOTAL}```\n```python\n\n```",
    "a fence within a fence": f"````markdown\n```python\n{TOTAL}```\n````",
    "in a list": "1. So:\n   ```python\n   def total(xs):\n       return sum(xs)\n   ```\n",
    "indented by tabs": "\t```python\n\tdef total(xs):\n\t\treturn sum(xs)\n\t```",
    "indented within": "```python\n    import math\n    def total(xs):\n        return sum(xs)\n```",
    "indented without a fence": "import math\n    def total(xs):\n        return sum(xs)",
    "tabs": "```python\ndef total(xs):\n\treturn sum(xs)\n```",
    "docstring": FENCED_DOC.format(tag=""),
    "docstring with a tag": FENCED_DOC.format(tag="python"),
    "docstring in a fence": f"```python\n{FENCED_DOC.format(tag='')}```",
    "docstring with a tag in a fence": f"So:\n```python\n{FENCED_DOC.format(tag='python')}```\nDone.",
    "docstring in a fence that is never closed": f"```python\n{FENCED_DOC.format(tag='py')}",
    "docstring, fence never opened": f"{FENCED_DOC.format(tag='')}```",
    "docstring at the margin": FENCED_DOC.format(tag="").replace("    ```", "```"),
    "docstring of tildes": FENCED_DOC.format(tag="").replace("```", "~~~"),
    "docstring of single quotes": FENCED_DOC.format(tag="").replace('"""', "'''"),
    "docstring with quotes in it": FENCED_DOC.format(tag="").replace("Adds up.", 'Adds \\""" "up".'),
    "fences in a string": f"```python\nfence = '```'\nother = \"```python\"\n{TOTAL}```",
    "fences in comments": f"# ```\n# total([1])\n# ```\n{TOTAL}",
    "future import": f"from __future__ import annotations\n{TOTAL}",
    "future import in a fence": f"```python\nfrom __future__ import annotations\n\n{TOTAL}```",
    "future imports in brackets": f"from __future__ import (\n    annotations,\n    division,\n)\n{TOTAL}",
    "future import after a docstring": f'"""Adds."""\n# So:\nfrom __future__ import annotations; import math\n{TOTAL}',
    "two future imports": f"from __future__ import division\n# And:\nfrom __future__ import annotations\n{TOTAL}",
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("form", RIGHT)
def test_a_right_program_is_found(form, task):
    assert works(task, RIGHT[form])


WRONG = {
    "plain": OTHER,
    "fence": f"```python\n{OTHER}```",
    "a right one that is not the last": f"```python\n{TOTAL}```\nBetter:\n```python\n{OTHER}```",
    "a right one in a comment": "# " + TOTAL.replace("\n", "\n# ") + f"\n{OTHER}",
    "a right one in a docstring": 'def total(xs):\n    """\n    ```python\n    '
    + TOTAL.replace("\n", "\n    ")
    + '```\n    """\n    return 0\n',
    "a right one in a block of output": f"```python\n{OTHER}```\n```output\n{TOTAL}```",
    "another name": f"```python\n{TOTAL.replace('total', 'sums')}```",
    "a method": f"```python\nclass Solution:\n    {TOTAL.replace('return', '    return')}```",
    "text in the fence": f"```python\nThe program is:\n{TOTAL}```",
    "text without a fence": f"The program is:\n{TOTAL}",
    "cut off": f"```python\n{TOTAL[:-8]}",
    "halves": f"```python\n{TOTAL[:16]}```\n```python\n{TOTAL[16:]}```",
    "a future import that is not the first": f"```python\nimport math\nfrom __future__ import annotations\n{TOTAL}```",
    "an exit": f"```python\n{TOTAL}\nraise Exception\n```",
    "a fence": "```",
    "an empty block": "```python\n```",
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("form", WRONG)
def test_a_wrong_program_stays_wrong(form, task):
    assert not works(task, WRONG[form])


@pytest.mark.parametrize(
    "answer",
    [
        "return sum(xs)",
        "    return sum(xs)",
        "```python\nreturn sum(xs)\n```",
        "```\n    return sum(xs)\n```",
        "So:\n```py3\n    total = 0\n    for x in xs:\n        total += x\n    return total\n```",
        "```python\nn = 0\nfor x in xs:\n    n += x\nreturn n\n```",
        "n = 0\n    for x in xs:\n        n += x\n    return n",
        "if xs:\n        return sum(xs)\n    return 0",
        "total = 0\n    for x in xs:\n        total += x\n    return total",
    ],
)
def test_a_body_alone_continues_the_prompt(answer):
    assert works("HumanEval", answer) and not works("MBPP", answer)


QUERIES = {
    "plain": "{q}",
    "semicolon": "{q};",
    "fence": "```sql\n{q}\n```",
    "no tag": "```\n{q};\n```",
    "SQL": "```SQL\n{q}\n```",
    "sqlite": "```sqlite\n{q}\n```",
    "sqlite3": "```sqlite3\n{q}```",
    "postgres": "```postgres\n{q}\n```",
    "postgresql": "~~~postgresql\n{q}\n~~~",
    "mysql": "```mysql {q}```",
    "attributes": '```sql title="a"\n{q}\n```',
    "one line": "```sql {q}```",
    "one line without a tag": "```{q}```",
    "inline": "`{q}`",
    "two ticks": "``{q}``",
    "never closed": "```sql\n{q}",
    "never opened": "{q}\n```",
    "end on the last line": "```sql\n{q}```",
    "begins beside the tag": "```sql {q}\n```",
    "CRLF": "```sql\r\n{q}\r\n```",
    "byte order mark": "\ufeff```sql\n{q}\n```",
    "tildes": "~~~sql\n{q}\n~~~",
    "four": "````sql\n{q}\n````",
    "indented": "  ```sql\n  {q}\n  ```",
    "text around": "It's this query:\n```sql\n{q}\n```\nIt gives what is asked.",
    "comment": "```sql\n-- the ```query```\n{q}\n```",
    "the second": "First:\n```sql\nSELECT 1\n```\nthen\n```sql\n{q}\n```",
    "the tables before": "```\nid | name\n```\n```sql\n{q}\n```",
    "output behind": "```sql\n{q}\n```\n```output\n3\n```",
    "an empty one behind": "```sql\n{q}\n```\n```sql\n```",
    "prose that begins as a query": "With this one:\n```\n{q}\n```\nSelect it.",
    "lower case": "```sql\n{lower}\n```",
}


def judged(text):
    env = SQLWorldEnv()
    env.reset(options={"task_index": 3})
    span = env.tokenizer.encode(f"<answer>{text}</answer>{env.dialect.end_of_turn}", add_special_tokens=False)
    return env.step(np.asarray(span, np.int32))[4]["is_success"]


@pytest.mark.parametrize("form", QUERIES)
def test_a_right_query_is_found(form):
    gold = generate_task(0, "train", 3).answers[0]
    lower = gold.replace("SELECT", "select").replace("FROM", "from")
    assert judged(QUERIES[form].replace("{q}", gold).replace("{lower}", lower))


@pytest.mark.parametrize(
    "form",
    [
        "```sql\n{wrong}\n```",
        "```sql\n{q}\n```\nor\n```sql\n{wrong}\n```",
        "```sql\n{wrong}\n```\n```output\n{q}\n```",
        "{q}; {wrong}",
        "The query is {q}",
        "```sql\n-- {q}\n```",
        "```sql\n```",
        "```",
        "``",
        "`{wrong}`",
    ],
)
def test_a_wrong_query_stays_wrong(form):
    gold = generate_task(0, "train", 3)
    assert not judged(form.replace("{q}", gold.answers[0]).replace("{wrong}", gold.metadata["mistakes"][0]))


MARGIN_DOC = FENCED_DOC.format(tag="").replace("    ```", "```")
BLOCKS = {
    "python": f"```python\n{TOTAL}```",
    "json": "```json\n[1, 2]\n```",
    "a call": '```tool_call\n{"name": "f", "arguments": {}}\n```',
    "tildes": f"~~~python\n{TOTAL}~~~",
    "never closed": f"```python\n{TOTAL}",
    "two": f"```python\n{USE}```\n```py\n{TOTAL}```",
    "broken JSON": "```json\n{\n```",
    "CRLF": f"```python\r\n{TOTAL}```",
    "an empty one": "```python\n```",
    "tag": f"```Python3 a\n{TOTAL}```",
    "docstring": f"```python\n{FENCED_DOC.format(tag='')}```",
}


@pytest.mark.parametrize("gap", ["", "\n", "It is:\n\n"])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_in_an_answer_is_no_call(block, gap):
    dialect = get_dialect("fenced", load_tokenizer(None))
    answer = f"<answer>{gap}{BLOCKS[block]}{gap}</answer>"
    for text in (answer, f"<think>hm</think>\nSo: {answer}\nDone.", f"```text\nx\n```\n{answer}"):
        turn = dialect.parse(dialect.tokenizer.encode(text + dialect.end_of_turn), [])
        assert turn.calls == [] and answer in turn.content


@pytest.mark.parametrize(
    "text, codes",
    [
        ("```python\nprint('<answer>')\n```", ["print('<answer>')"]),
        ("```python\nprint('<answer>x</answer>')\n```", ["print('<answer>x</answer>')"]),
        ("<answer>1</answer>\n```python\nx\n```\n<answer>2</answer>", ["x"]),
        ("</answer>\n```python\nx\n```\n</answer>", ["x"]),
        ("<answer>\n```python\nx\n```", ["x"]),  # a tag without its partner is text
        ("```python\nx = '<answer>'\n```\n```python\ny = '</answer>'\n```", ["x = '<answer>'", "y = '</answer>'"]),
        ("<answer>\n```\n1\n```\n</answer>\n```Python title=a\nx\n```", ["x"]),
        ("~~~python3\nx\n~~~", ["x"]),
        ("~~~python\n```\n~~~", ["```"]),
        ("```{.python}\nx\n```", ["x"]),
        (f"```python\n{MARGIN_DOC}```", [MARGIN_DOC[:-1]]),
        (f"```python\n{MARGIN_DOC.replace('```', '~~~')}```\nDone.", [MARGIN_DOC[:-1].replace("```", "~~~")]),
        (f"~~~py\n{MARGIN_DOC}~~~", [MARGIN_DOC[:-1]]),
        ("```python\nx = '''\n```python\n'''\n```", ["x = '''\n```python\n'''"]),
        ("```python\nx = '```'\n# ```\n```", ["x = '```'\n# ```"]),
        ("```python print(1)\n```", ["print(1)"]),
        ("```python print(1)\nprint(2)\n```", ["print(1)\nprint(2)"]),
        ("```python import math\nprint(math.pi)\n```", ["import math\nprint(math.pi)"]),
        ("```python x = '''\n```\n'''\n```", ["x = '''\n```\n'''"]),
        ("```python x\n```", ["x"]),
        ("```python {1,3}\nx\n```", ["x"]),
        ('```python title="a b.py" numbers\nx\n```', ["x"]),
        ("```python print(1)```", ["print(1)"]),
        ("So:\n  ```py print(1)```\nDone.", ["print(1)"]),
        ("1. So:\n   ```python\n   if x:\n       y\n   ```\n2. So", ["if x:\n    y"]),
        ("1. ```python\n   if x:\n       y\n   ```\n2. So", ["if x:\n    y"]),
        ("\t```python\n\tif x:\n\t\ty\n\t```", ["if x:\n\ty"]),
        ("```python\n    if x:\n        y\n```", ["if x:\n    y"]),
        ("```python\nif x:\n    y\n    ```", ["if x:\n    y"]),
        ("Here it is: ```python\nx\n``` ", ["x"]),
        ("Bob's 3\" code: ```python\nx\n```\nIt's it.", ["x"]),
        ("```python\nx```", ["x"]),
        ("```python\nx\n``` It's x.\n```py\ny\n```.", ["x", "y"]),
        ("```python\nx  # a ``` here\n```", ["x  # a ``` here"]),
        ("```{.python #x}\nx\n```", ["x"]),
        ("```python\r\nx\r\ny\r\n```\r\n", ["x\ny"]),
        ("```python \r\nx\r\n```\r\n```py\r\ny\r\n```", ["x", "y"]),
        ("\ufeff```python\n\ufeffx\n```", ["x"]),
        ('I write """ first.\n```python\n"""Doc."""\n```', ['"""Doc."""']),
        ("```text\n'''\n```\n```python\nx = '''y'''\n```", ["x = '''y'''"]),
        ("```text\nx ``` y\n```\n```python\nx\n```", ["x"]),
        ("I use ``` and ~~~ as fences.\n```python\nx\n```", ["x"]),
        ("I use ```python blocks for code.\n```python\nx\n```", ["x"]),
        ("I use `x` and ```python x``` here.", []),
        ('The fence "```python" opens it.', []),
        ("````markdown\n```python\nx\n```\n````", []),
    ],
)
def test_a_block_outside_of_answers_is_a_call(text, codes):
    dialect = get_dialect("fenced", load_tokenizer(None))
    turn = dialect.parse(dialect.tokenizer.encode(text + dialect.end_of_turn), [])
    assert [call.arguments["code"] for call in turn.calls] == codes


@pytest.mark.parametrize(
    "text",
    [
        "```tool_call CALL```",
        "```json CALL```",
        "```tool_call\r\nCALL\r\n```",
        "So: ```tool_call\nCALL\n```",
        "1. So:\n   ```json\n   CALL\n   ```",
        "```tool_call CALL\n```",
        '```json {\n"name": "f", "arguments": {"text": "x"}}\n```',
        "~~~tool_call\nCALL\n~~~",
        "```tool_call\nCALL```",
    ],
)
def test_a_json_block_is_a_call_wherever_it_stands(text):
    dialect = get_dialect("fenced", load_tokenizer(None))
    value = "```" if "\nCALL" in text else "x"
    call = json.dumps({"name": "f", "arguments": {"text": value}})
    turn = dialect.parse(dialect.tokenizer.encode(text.replace("CALL", call) + dialect.end_of_turn), [])
    assert [(call.name, call.arguments) for call in turn.calls] == [("f", {"text": value})]


PIECES = [
    "```", "~~~", "````", "python", "tool_call", "\n", "\r\n", " ", "    ", "\t", "'''", '"""', "'", '"', "#", "--",
    "\\", "x", "def f():\n", "print(1)", "{", "}", "<answer>", "</answer>", "\ufeff", "é",
]  # fmt: skip


def test_code_that_is_written_is_read_back():
    """Whatever it is, and whatever calls stand before and behind it."""
    dialect, choose = get_dialect("fenced", load_tokenizer(None)), random.Random(0)
    for _ in range(1_500):
        codes = ["".join(choose.choices(PIECES, k=choose.randrange(9))) for _ in range(3)]
        turn = dialect.write_turn("So.", [("python", {"code": code}) for code in codes])
        read = dialect.parse(dialect.codec.encode_text(turn), [])
        assert [call.arguments for call in read.calls] == [{"code": code} for code in codes] and read.content == "So."
    for code in (MARGIN_DOC, FENCED_DOC.format(tag="python"), "x = '```'", "# ```\nx"):
        text = dialect.tool_call("python", {"code": code})
        assert text.endswith(f"python\n{code}\n````")


@pytest.mark.parametrize("info, name", [("", ""), ("Python", "python"), (" {.r #x}", "r"), ("C++ x", "c++"), ("=", "")])
def test_the_language_of_a_fence(info, name):
    assert language(info) == name


@pytest.mark.parametrize(
    "piece",
    [
        '"\\"',
        '\\"""\n',
        '"""',
        "'''\n\"",
        "```",
        "`",
        "```a``",
        "```\n",
        "~~~\n",
        "\n    ",
        "# ```\n",
        "'a\n",
        '"\\\n',
        "((",
        "-- \n",
        "/*",
        "/* */ ",
        "```python\n",
        "```python x",
        "\n```python x```",
        "```python\n'''\n```\n",
        '~~~py\n"""\\\n~~~\n',
        "\n```python a=",
        "`` ```json\n",
        "r'",
        '"""\\',
    ],
)
def test_the_time_grows_with_the_length(piece):
    text, start = (piece * 30_000)[:30_000], time.process_time()
    find_code(text, SQL, _is_query)
    find_code(text, PYTHON, lambda code: "\ndef f" in code)
    list(blocks(text, PYTHON))
    assert time.process_time() - start < 2


@pytest.mark.parametrize("piece", ["\n", " \n", "return\n", "from __future__ import (\n", "def f\n"])
def test_the_time_of_a_program_grows_with_its_length(piece):
    """Lines without a word took the square of their number: 20 s for 40,000."""
    start = time.process_time()
    complete_program(next(iter(TASKS.values())), "x" + (piece * 60_000)[:60_000] + "y")
    assert time.process_time() - start < 2
