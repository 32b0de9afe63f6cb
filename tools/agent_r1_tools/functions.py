"""Functions as tools: plain functions, async functions, and functions whose arguments are pydantic models."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from agent_r1_tools.event_loop import event_loop
from agent_r1_tools.schemas import check_schema, function_schema, read_docstring
from agent_r1_tools.text import as_text
from agent_r1_tools.tool import Tool, ToolResult


class FunctionTool(Tool):
    """The tool that `Tool.from_function` returns.

    Attributes:
        hidden: parameters that a subclass passes itself. They are no arguments of the policy. With such parameters the
            policy reads only the type of an exception, whose text may quote their values.
    """

    hidden: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None,
        description: str | None,
        parameters: dict[str, Any] | None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"from_function takes a function (f, and not the result of f(...)), got {function!r:.200}")
        self.function = function
        self.name = name if name is not None else getattr(function, "__name__", "")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", self.name):
            refusal = f"{self.name!r} cannot be a tool's name ({function!r:.200})"
            raise ValueError(f"{refusal}; pass from_function(..., name='my_tool')")
        text, argument_texts = read_docstring(inspect.getdoc(function) or "")
        self.description = description if description is not None else text
        self._models: dict[str, Any] = {}
        if parameters is None:
            parameters, self._models = function_schema(function, self.name, argument_texts, self.hidden)
        else:
            check_schema(parameters, self.name)
        self.parameters = parameters

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        """Call the function, and wait for it if it is async."""
        for name in self._models.keys() & arguments.keys():
            from pydantic import ValidationError

            try:
                arguments = arguments | {name: self._models[name].validate_json(json.dumps(arguments[name]))}
            except ValidationError as error:
                problems = [f"'{'.'.join(map(str, (name, *e['loc'])))}' {e['msg']}" for e in error.errors()[:3]]
                content = f"Error in {self.name}: {'; '.join(problems)}. {self.expected()}"
                return ToolResult(content, ok=False, data={"error": "bad_arguments"})
        value = self.function(**arguments)
        if inspect.isawaitable(value):
            value = wait_for(value, self.timeout)
        return value if isinstance(value, ToolResult) else ToolResult(as_text(value), data=value)


def wait_for(awaitable: Any, timeout: float) -> Any:
    """Return or raise the result of an awaitable. It is cancelled when its time is over and no caller waits for it."""

    async def bounded() -> Any:
        limit = None if timeout == math.inf else float(timeout) + 1  # `run_tool` says at `timeout` that it is late
        return await asyncio.wait_for(awaitable, limit)

    coroutine: Coroutine[Any, Any, Any] = bounded()
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop("tool-event-loop")).result()
