"""Users that a policy talks to: any function from chat messages to a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent_r1.arguments import ArgumentError, named_function
from agent_r1_tools import ToolFault
from agent_r1_tools.running import describe, is_strict
from agent_r1_tools.tool import is_fault

User = Callable[[list[dict[str, str]]], str]
"""A function from the conversation, told from the user's side ("assistant" is the user), to the user's next text."""


def find_user(user: Any, argument: str = "user") -> Any:
    """Return the user: a function, the function named "module:function", or None.

    Raises ArgumentError for any other value, and where no function has that name.
    """
    if isinstance(user, str):
        user = named_function(argument, user)
    if user is None or callable(user):
        return user
    raise ArgumentError(f"{argument} must be a function or module:function, got {user!r}")


def ask_user(user: User, messages: list[dict[str, str]], strict: bool | None = None) -> str:
    """Return the user's next text. Raises ToolFault if the user fails; with `strict` the original exception."""
    try:
        reply = user(messages)
        if not isinstance(reply, str):
            raise TypeError(f"a user must return a text, not {type(reply).__name__}")
        return reply
    except Exception as error:
        if is_fault(error) or is_strict(strict):
            raise
        raise ToolFault(describe(error)) from error  # API clients raise their own exception types
