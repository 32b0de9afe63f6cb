"""What tests name as module:function."""

import asyncio
import json
from os import system  # noqa: F401  (a function of Python itself, under another module's name)

PI = 3.14


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
