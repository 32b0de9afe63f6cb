"""Code of this package that runs inside Monty, around a program."""

from __future__ import annotations

import ast
import re
import warnings

MAX_PARSED = 100_000
"""Characters of the longest cell whose last expression is shown: this process looks for it."""

_NAMES = (
    "type, isinstance, print, repr, hex, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, "
    "TypeError, RecursionError"
)
# What every session begins with: the program may use these names for something else.
FIRST = f"_builtins_ = ({_NAMES})"
# What a session needs to talk to us; only then, because it makes snapshots larger. See `guest.encode`.
PRELUDE = (
    f"def _begin_({_NAMES}):"
    + """
    import json
    groups = {list: None, tuple: 'tuple', set: 'set', frozenset: 'frozenset'}
    bases = [list, tuple, dict, set, frozenset]

    def _encode_(value):
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -(2**53) < value < 2**53 else {'int': hex(value)}
        if kind is float:
            return value if value - value == 0 else {'float': repr(value)}
        if kind in groups:
            items = [_encode_(item) for item in value]
            return {groups[kind]: items} if groups[kind] else items
        if kind is dict:
            return {'dict': [[_encode_(key), _encode_(item)] for key, item in value.items()]}
        if kind is bytes:
            return {'bytes': value.hex()}
        if kind is complex:
            return {'complex': [_encode_(value.real), _encode_(value.imag)]}
        for base in bases:
            if isinstance(value, base):
                return _encode_(base(value))
        raise TypeError(f'a value of type {kind.__name__} is not a built-in literal')

    def answer(value):
        try:
            return json.dumps({'value': _encode_(value)})
        except (TypeError, RecursionError) as error:
            return json.dumps({'error': f'{error}'})

    def proxy(name):
        def _proxied_(*args, **kwargs):
            message = json.dumps(_encode_([name, args, kwargs]))
            _tell_()
            print(message, end='')
            return _ask_()
        return _proxied_

    return answer, proxy

_answer_, _proxy_ = _begin_(*_builtins_)
"""
)
OURS = ("_encode_", "_proxied_")

# What a session must have memory left for.
SOME_ROOM = "len([None] * 100_000)"
# How the value of a last expression is shown: by lines of ours, which end with None or a text whatever the value is.
MARK = "_shown_ = "
SHOW = """
if _shown_ is not None:
    _ = _shown_
None if _shown_ is None else (f"{{_shown_!r}}"[:{}], _shown_ := None)[0]
"""


def mark_value(code: str) -> str | None:
    """Change a cell to keep the value of its last expression. Return None if it has none or does not parse here."""
    if len(code) > MAX_PARSED:
        return None
    try:
        body = ast.parse(code, _PARSED_FILE).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not body or not isinstance(body[-1], ast.Expr):
        return None
    lines = re.split("(?<=\n)|(?<=\r)(?!\n)", code)
    line, column = body[-1].lineno - 1, body[-1].col_offset
    encoded = lines[line].encode()
    lines[line] = encoded[:column].decode() + MARK + encoded[column:].decode()
    return "".join(lines)


_PARSED_FILE = "agent_r1_cell"
warnings.filterwarnings("ignore", module=_PARSED_FILE)  # what Python thinks of a program's escapes is not for our user
