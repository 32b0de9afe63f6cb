"""The `python` tool: code that the policy wrote, in a sandbox."""

from __future__ import annotations

from typing import Any

from agent_r1_tools.python.choose import open_sandbox
from agent_r1_tools.python.launch import START_SECONDS
from agent_r1_tools.python.process import REPLAY_RUNS
from agent_r1_tools.python.sandbox import MAX_ENDING, Limits, Sandbox, SandboxError, Session, State
from agent_r1_tools.running import describe
from agent_r1_tools.tool import Tool, ToolResult

MAX_CODE_CHARS = 100_000
QUICK_SECONDS = 1.0
"""A run that died later than that is not tried again: it would cost as much once more."""


class PythonTool(Tool):
    """Runs Python and shows what a notebook would: prints, the value of a last expression, a short traceback.

    Names are kept from call to call, until `set_state(None)` (which every `reset` of a `ToolEnv` calls) or, with
    `stateless`, not at all. `ToolResult.ok` says whether the program ended without an exception and in time, and `data`
    is `{"status": "ok" | "exception" | "timeout" | "died", "error": line or None, "backend": name, "seconds": number}`.
    Where the sandbox itself fails the result is a fault, and `data` is
    `{"error": "sandbox_unavailable", "message": why}`. A process that died within `QUICK_SECONDS` is tried once more,
    as something outside may have killed it; what dies twice dies of the code, and from then on all deaths of the
    session do: each attempt replays the session.

    Args:
        sandbox: where to run; None opens one with the next arguments (see `open_sandbox`).
        backend: which sandbox.
        limits: what a program may use.
        stateless: every call starts a new session.

    Raises:
        SandboxError: no sandbox like this works here.
    """

    name = "python"
    description = (
        "Run Python code and read what it prints and the value of its last line. "
        "Names are kept for the next call. There is no network."
    )
    parameters = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code to run."}},
        "required": ["code"],
        "additionalProperties": False,
    }
    timeout_is_fault = True  # code has its own limits, so it is the sandbox that hangs

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        backend: str = "auto",
        limits: Limits | None = None,
        stateless: bool = False,
    ) -> None:
        self.sandbox = sandbox if sandbox is not None else open_sandbox(backend, limits)
        self.concurrency_safe = stateless
        self._dies = False  # whether this session's code has ended its process
        self._session: Session | None = None if stateless else self.sandbox.session()
        limits = self.sandbox.limits
        # The sandbox keeps to its own time; this is for the case that it doesn't.
        self.timeout = 2 * ((REPLAY_RUNS + 2) * limits.wall_seconds + 2 * START_SECONDS)
        self.max_result_chars = limits.output + MAX_ENDING + 1000

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        code = arguments["code"]
        if len(code) > MAX_CODE_CHARS:
            content = f"The code was not run: it is longer than {MAX_CODE_CHARS} characters."
            return ToolResult(content, ok=False, data={"error": "code_too_long"})
        session = self._session
        run = self.sandbox.run if session is None else session.run
        try:
            ran = run(code)
            if ran.status == "died" and ran.seconds < QUICK_SECONDS and not self._dies:
                ran = run(code)  # the session is as it was before
                if session is self._session:  # and not left behind
                    self._dies = ran.status == "died" and session is not None
        except (SandboxError, OSError) as error:
            failed = {"error": "sandbox_unavailable", "message": str(error)}
            return ToolResult("Python is not available at the moment.", ok=False, data=failed, fault=describe(error))
        data = {"status": ran.status, "error": ran.error, "backend": ran.backend, "seconds": ran.seconds}
        return ToolResult(ran.output.rstrip("\n") or "[no output]", ok=ran.ok, data=data)

    def get_state(self) -> State | None:
        return self._session.get_state() if self._session is not None else None

    def set_state(self, state: State | None) -> None:
        if self._session is not None:
            self._session.set_state(state)
            self._dies = self._dies and state is not None

    def new_session(self) -> bool:
        if self._session is not None:  # not closed: whoever is at work in it does that, or the garbage collector
            self._session, self._dies = self.sandbox.session(), False
        return True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_session": self.get_state()}  # a process cannot be pickled or copied, its state can

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes | {"_session": None})
        if not self.concurrency_safe:
            self._session = self.sandbox.session()
            self._session.set_state(attributes["_session"])

    def close(self) -> None:
        """End the session's process; a later call starts it again."""
        if self._session is not None:
            self._session.close()
