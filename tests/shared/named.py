"""What tests name as module:function."""

import asyncio
import json
from functools import cache, partial
from os import system  # noqa: F401  (a function of Python itself, under another module's name)
from subprocess import Popen  # noqa: F401

PI = 3.14
bound, write = partial(partial(exec)), [].append


@cache
def cached(answer):
    """A function in one of Python's objects."""
    return answer


half = partial(cached)


def nothing_right(answer, row):
    """A reward function."""
    return float(not answer)


def echo(messages):
    """A user who says what was said."""
    return json.dumps(messages)


def look_up(key: str, row: dict) -> str:
    """Look a key up in the row.

    Args:
        key: The key.
    """
    return row["facts"].pop(key)  # the row is a copy


async def look_up_later(row, key: str) -> str:
    """Look a key up in the row, slowly."""
    await asyncio.sleep(0.05)
    return row["facts"][key]
