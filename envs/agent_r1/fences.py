"""Markdown fences: where the code of an answer is, and what language a fence names.

Programs, queries and the dialect of fenced code read them by the same rule. Nothing here parses or runs the code, which
a policy wrote: one linear pass tells strings and comments from the rest, and no string is nested.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

PYTHON = re.compile(r"(?:i|c)?py(?:thon)?-?[\d.]*")
SQL = re.compile(r"(?:t-?|pl/?|pl/pg|my|ms|ansi)?sql(?:ite)?-?[\d.]*|postgres(?:ql)?-?[\d.]*|mariadb|duckdb")
"""What fences of these languages say, in lower case."""

_TOKEN = re.compile(
    r"\\."
    r"|^[ \t]*(?:\#|--)[^\n]*"
    r'|"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\''
    r'|"(?:\\.|[^"\\\n])*+"'
    r"|(?<!\w)[rRbBfFuU]{0,2}'(?:\\.|[^'\\\n])*+'"  # after a letter it is an apostrophe
    r"|`{3,}(?P<inline>[^`\n]+)`{3,}"
    r"|(?P<indent>^[ \t]*)(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)$"
    r"|(?P<later>`{3,})(?P<rest>[^`\n]*)",
    re.MULTILINE | re.DOTALL,
)
_LANGUAGE = re.compile(r"[{.\s]*(?:lang(?:uage)?[-=])?([\w+#./-]*)[^\S\n]*")
_WHOLE = re.compile(r"(`{1,2})([^`]+)\1")


def language(info: str) -> str:
    """The language that a fence names, in lower case: "python" for "Python title=x" and "{.python}", "" for none."""
    match = _LANGUAGE.match(info)
    return match[1].lower() if match else ""


def find_code(text: str, languages: re.Pattern[str], holds: Callable[[str], bool]) -> str:
    r"""The code in an answer, without the fences and the text around it.

    A fence is three or more backticks or tildes outside strings and comments. Fences part the text, with or without
    a partner. Of the parts that hold what is asked for, blocks in the language come first, then blocks without a
    language, the text outside, and blocks in others; of equals the last counts, as it does among answers.

    Args:
        text: the answer.
        languages: the languages of the code, see `PYTHON` and `SQL`.
        holds: whether a part is what is asked for: it defines the function, say. If no part is, all are equal here.

    >>> find_code("So:\n```Python\nx = 1\n```\nDone.", PYTHON, lambda code: "x =" in code)
    'x = 1'
    """
    text = re.sub("^\ufeff+", "", text.replace("\r\n", "\n"), flags=re.MULTILINE)
    if (whole := _WHOLE.fullmatch(text.strip())) and holds(whole[2]):
        return whole[2].strip()
    best, code = (False, -1), text
    for name, part in _parts(text, languages, holds):
        part = part.strip("\n").rstrip()
        if not holds(part) and holds(flush := _flush(part)):
            part = flush
        rank = 1 if name is None else 3 if languages.fullmatch(name) else 0 if name else 2
        if part.strip() and (holds(part), rank) >= best:
            best, code = (holds(part), rank), part
    return code


def _parts(
    text: str, languages: re.Pattern[str], holds: Callable[[str], bool]
) -> Iterator[tuple[str | None, str]]:
    """The parts between fences, each with the language of its block; None outside of blocks."""
    name, start, indent = None, 0, ""
    for token in _TOKEN.finditer(text):
        if token.lastgroup not in ("inline", "info", "rest"):
            continue
        yield name, _without(indent, text[start : token.start()])
        opens, start, closes = name is None, token.end(), bool(token["later"])
        name, indent = None, ""
        if (inline := token["inline"]) is not None:
            word = language(inline)
            known = languages.fullmatch(word) and word
            match = _LANGUAGE.match(inline) if known else None
            yield known or "", inline[match.end() :] if match else inline
            continue
        info = token["rest"] if closes else token["info"]
        if not opens and (closes or not info.strip()):
            start -= len(info)  # what is behind a closing fence is text
            continue
        tag, indent = _LANGUAGE.match(info), token["indent"] or ""
        assert tag is not None  # it matches the empty text, too
        name = language(info)
        if holds(info.lstrip()):  # the code begins beside the fence
            name, start = "", start - len(info.lstrip())
        elif holds(info[tag.end() :]):
            start -= len(info) - tag.end()
    yield name, _without(indent, text[start:])


def _without(indent: str, code: str) -> str:
    """The code without the indentation of its fence, as far as its lines have it."""
    return re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", code, flags=re.MULTILINE) if indent else code


def _flush(code: str) -> str:
    """Code whose lines are all indented, at the margin. The first line may have lost its indentation before."""
    first, *rest = code.split("\n")
    margins = [line[: len(line) - len(line.lstrip())] for line in rest if line.strip()]
    margin = min(margins, key=len, default=first[: len(first) - len(first.lstrip())])
    if not all(line.startswith(margin) for line in margins):
        return code
    return "\n".join([first.lstrip(), *(line.removeprefix(margin) for line in rest)])
