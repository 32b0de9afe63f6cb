"""Users whom a policy talks with: any function of chat messages that gives a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent_r1.arguments import ArgumentError, named_function
from agent_r1_tools import ToolFault
from agent_r1_tools.running import describe, is_strict
from agent_r1_tools.tool import is_fault

User = Callable[[list[dict[str, str]]], str]
"""Reads a conversation from the user's side, in which "assistant" is the user, and gives what the user says next."""


def find_user(user: Any, what: str = "user") -> Any:
    """The function, also by its name "module:function", or None. Raises ArgumentError for anything else, and one not
    found."""
    if isinstance(user, str):
        user = named_function(what, user)
    if user is None or callable(user):
        return user
    raise ArgumentError(f"{what} is a function, or module:function; got {user!r}")


def ask_user(user: User, messages: list[dict[str, str]], strict: bool | None = None) -> str:
    """What a user says next. Raises ToolFault for what goes wrong there; with `strict` what it was."""
    try:
        reply = user(messages)
        if not isinstance(reply, str):
            raise TypeError(f"a user gives a text, not {type(reply).__name__}")
        return reply
    except Exception as error:
        if is_fault(error) or is_strict(strict):
            raise
        raise ToolFault(describe(error)) from error  # clients have exceptions of their own
