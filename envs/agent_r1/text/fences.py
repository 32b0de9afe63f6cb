"""Markdown fences: the code of an answer, the blocks of a turn, and the language of a fence.

`find_code` (programs and queries) and `blocks` (the dialect of fenced code) share the definition of a fence and its
language: a fence in a string or a comment does not count. They pair fences differently. An answer may be code without
any fence, so fences split it, and the best part is chosen. A turn is text, and a block in it ends with a fence of the
same kind.

Nothing here parses or runs the code, which a policy wrote. One linear pass separates strings and comments from the
rest, and no string is nested.
"""

from __future__ import annotations

import keyword
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

PYTHON = re.compile(r"(?:i|c)?py(?:thon)?-?[\d.]*")
SQL = re.compile(r"(?:t-?|pl/?|pl/pg|my|ms|ansi)?sql(?:ite)?-?[\d.]*|postgres(?:ql)?-?[\d.]*|mariadb|duckdb")
"""The language names in fences of Python and SQL, in lower case."""

_LONG_STRINGS = r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|'
_TOKENS = (
    r"\\."
    r"|^[ \t]*(?:\#|--)[^\n]*"
    r'|{}"(?:\\.|[^"\\\n])*+"'
    r"|(?<!\w)[rRbBfFuU]{{0,2}}'(?:\\.|[^'\\\n])*+'"  # after a letter it is an apostrophe
    r"|(?P<margin>^[ \t]*)?`{{3,}}(?P<inline>[^`\n]+)`{{3,}}"
    r"|(?P<indent>^[ \t]*)(?P<fence>`{{3,}}|~{{3,}})(?P<info>[^`\n]*)$"
    r"|(?P<later>`{{3,}})(?P<rest>[^`\n]*)"
)
_IN_CODE = re.compile(_TOKENS.format(_LONG_STRINGS), re.MULTILINE | re.DOTALL)
_IN_TEXT = re.compile(_TOKENS.format(""), re.MULTILINE | re.DOTALL)  # here three quotes open no string
_LANGUAGE = re.compile(r"[{.\s]*(?:lang(?:uage)?[-=])?([\w+#./-]*)[^\S\n]*")
_ATTRIBUTES = re.compile(r"[,:}].*|\{(?!\s*[\"'{]|$).*|(?:[\w.#}-]+(?:=(?:\"[^\"]*\"|[^\s\"'()\[\]]+))?(?:\s+|$))*")
_WHOLE = re.compile(r"(`{1,2})([^`]+)\1")


def language(info: str) -> str:
    """Return the language of a fence, in lower case: "python" for "Python title=x" and "{.python}", "" for none."""
    match = _LANGUAGE.match(info)
    return match[1].lower() if match else ""


def find_code(text: str, languages: re.Pattern[str], holds: Callable[[str], bool]) -> str:
    r"""Return the code in an answer, without the fences and the text around it.

    A fence is three or more backticks or tildes outside strings and comments. Fences split the text, with or without a
    partner. Among the parts that `holds` accepts, blocks in the language come first. Then come blocks without a
    language, the text outside, and blocks in other languages. Of equal parts the last counts, as among answers.

    Args:
        text: the answer.
        languages: the languages of the code, see `PYTHON` and `SQL`.
        holds: returns True for a part with the wanted code, for example a definition of the function. If it accepts no
            part, all parts are equal here.

    >>> find_code("So:\n```Python\nx = 1\n```\nDone.", PYTHON, lambda code: "x =" in code)
    'x = 1'
    """
    text = _clean(text)
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
    """Yield the parts between fences, each with the language of its block; None outside blocks."""
    name, start, indent = None, 0, ""
    for token in _fences(_IN_CODE, text):
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
            start -= len(info)  # the rest of a closing fence's line is text
            continue
        tag, indent = _LANGUAGE.match(info), token["indent"] or ""
        assert tag is not None  # it matches the empty text, too
        name = language(info)
        if holds(info.lstrip()):  # the code begins beside the fence
            name, start = "", start - len(info.lstrip())
        elif holds(info[tag.end() :]):
            start -= len(info) - tag.end()
    yield name, _without(indent, text[start:])


@dataclass(frozen=True)
class Block:
    """A block of fenced code in a text."""

    start: int
    end: int
    """The block is at `text[start:end]`, fences included."""
    language: str
    """See `language`."""
    body: str
    """The text between its fences."""
    indent: str = ""
    """The white space before its first fence."""
    closed: bool = True
    """False if the text ends before the block does."""

    @property
    def code(self) -> str:
        """The body as code: without the indentation of the block, carriage returns and byte order marks."""
        code = _without(self.indent, _clean(self.body))
        return textwrap.dedent(code) if code.startswith((" ", "\t")) else code


def blocks(text: str, languages: re.Pattern[str]) -> Iterator[Block]:
    r"""Yield the blocks of a text in these languages, in order. A block of another language contains none.

    A block ends with a fence of the same characters, at least as long, without a language, that begins or ends its
    line. Text after the language is code, unless it reads as attributes and the block has other lines. A fence inside a
    sentence opens a block only if the language or code ends its line. A block on one line is alone on that line.

    >>> [block.code for block in blocks("So:\n```python\nx = '''\n```\n'''\n```\n```python print(x)```", PYTHON)]
    ["x = '''\n```\n'''", 'print(x)']
    """
    position = 0
    while opens := next(_fences(_IN_TEXT, text, position), None):
        start = position = opens.end()
        info = opens["inline"] or opens["info"] or opens["rest"] or ""
        tag, name = _LANGUAGE.match(info), language(info)
        assert tag is not None  # it matches the empty text, too
        known, beside = bool(languages.fullmatch(name)), info[tag.end() :].strip()
        if opens["inline"]:
            if known and beside and opens["margin"] is not None:
                yield Block(opens.start(), position, name, beside)
            continue
        has_code = not _ATTRIBUTES.fullmatch(beside) or keyword.iskeyword(beside.split(" ")[0])
        if opens["later"] and not (known and (has_code or not beside)):
            continue
        if known and has_code:
            start -= len(info) - tag.end()
        mark = opens["fence"] or opens["later"]
        fences = _fences(_IN_CODE if known else _IN_TEXT, text, start)
        closes = next((fence for fence in fences if _ends(fence, mark)), None)
        position = closes.end("fence" if closes["fence"] else "later") if closes else len(text)
        if known:
            body = text[start : closes.start() if closes else position].removeprefix("\n")
            body = body.removesuffix("\n").removesuffix("\r") if body.strip() else beside or body.removesuffix("\n")
            yield Block(opens.start(), position, name, body, opens["indent"] or "", closes is not None)


def _fences(tokens: re.Pattern[str], text: str, position: int = 0) -> Iterator[re.Match[str]]:
    """Return the fences from a position on, outside strings and comments."""
    return (token for token in tokens.finditer(text, position) if token.lastgroup in ("inline", "info", "rest"))


def _ends(fence: re.Match[str], mark: str) -> bool:
    """Return whether this fence ends a block that the mark began."""
    if fence["later"]:
        return fence["later"].startswith(mark) and not fence["rest"].strip()
    return bool(fence["fence"]) and fence["fence"].startswith(mark) and not re.match(r"[\w{]", fence["info"])


def _clean(text: str) -> str:
    """Return the text without carriage returns at line ends, and without byte order marks."""
    return re.sub("^\ufeff+", "", text.replace("\r\n", "\n"), flags=re.MULTILINE)


def _without(indent: str, code: str) -> str:
    """Return the code without the indentation of its fence, on lines that have it."""
    return re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", code, flags=re.MULTILINE) if indent else code


def _flush(code: str) -> str:
    """Move code whose lines are all indented to the margin. The first line may have lost its indentation before."""
    first, *rest = code.split("\n")
    margins = [line[: len(line) - len(line.lstrip())] for line in rest if line.strip()]
    margin = min(margins, key=len, default=first[: len(first) - len(first.lstrip())])
    if not all(line.startswith(margin) for line in margins):
        return code
    return "\n".join([first.lstrip(), *(line.removeprefix(margin) for line in rest)])
