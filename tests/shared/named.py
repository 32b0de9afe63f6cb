"""What tests name as module:function."""

import json

PI = 3.14


def nothing_right(answer, row):
    """A reward function."""
    return float(not answer)


def echo(messages):
    """A user who says what was said."""
    return json.dumps(messages)
