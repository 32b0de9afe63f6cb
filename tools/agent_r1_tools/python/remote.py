"""A SandboxFusion server, asked over HTTP.

SandboxFusion (github.com/bytedance/SandboxFusion) runs programs in its own containers:

    POST /run_code  {"code": ..., "language": "python", "run_timeout": 10, "memory_limit_MB": 1024}
    {"status": "Success", "message": "", "run_result": {"status": "Finished", "return_code": 0, "stdout": ..., ...}}

It keeps no sessions, so every run sends the earlier cells along. How well it contains what it runs is its own business.
It is trusted with its answer only: one deadline, a limit of bytes, UTF-8, no redirections (`agent_r1_tools.exchange`).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1_tools.python.launch import GUEST
from agent_r1_tools.python.process import BROKEN, call_result, check_arguments, encodable, outcome, parsed
from agent_r1_tools.python.sandbox import (
    ENDED,
    LOST,
    OUT_OF_TIME,
    UNCHANGED,
    CallError,
    Cell,
    Functions,
    Limits,
    Run,
    Sandbox,
    SandboxError,
    Session,
    State,
    shown,
)

RETRIES = 3
"""Attempts after the first one, where the server doesn't answer or says that it is at fault."""
SLACK_SECONDS = 30.0
"""The extra time, beyond that of the program, until the server's answer must be complete."""
ANSWER_BYTES = 16 << 20
"""The longest answer that is read, besides what the cells print: a value of 4 MiB, as JSON in JSON."""


class Refused(Exception):
    """A server does not take this program, and takes others."""


class Remote(Sandbox):
    """Sessions on a SandboxFusion server.

    The limits that its API knows are wall time and memory; output is cut here, the others are the server's.

    Args:
        url: its address, such as "http://127.0.0.1:8080".
        limits: what holds for every run.

    Raises:
        ImportError: httpx is not installed.
        ValueError: the address is none.
    """

    def __init__(self, url: str, limits: Limits) -> None:
        from agent_r1_tools.exchange import Exchange, is_address

        if not is_address(url):
            raise ValueError(f"{url!r} is not an address; write something like 'http://127.0.0.1:8080'")
        self.limits = limits
        self.backend = "remote"
        self._endpoint = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self._exchange = Exchange(limits.wall_seconds + SLACK_SECONDS)

    def session(self) -> RemoteSession:
        return RemoteSession(self)

    def post(self, code: str, cells: int = 1) -> dict[str, Any]:
        """Run a program of so many cells: `run_result` of the answer.

        Raises:
            SandboxError: the server did not answer, or not as the protocol says, and not for another program either.
            Refused: it runs other programs, but not this one.
        """
        body = {
            "code": code,
            "language": "python",
            "run_timeout": self.limits.wall_seconds,
            "memory_limit_MB": self.limits.memory >> 20,
        }
        for attempt in range(RETRIES + 1):
            if attempt:
                time.sleep(0.5 * 2 ** (attempt - 1))
            status, reply = self._attempt(body, cells)
            if isinstance(reply, dict):
                return reply
            if 200 <= status < 500 and status != 429:
                break  # asked again it would say the same
        if status != 429 and isinstance(self._attempt(body | {"code": "1 + 1"})[1], dict):
            if not 400 <= status < 500:  # unless the server has just come back
                again = self._attempt(body, cells)[1]
                if isinstance(again, dict):
                    return again
            reason = f"status {status}" if status >= 400 else "it gets no answer that can be read"
            raise Refused(f"the sandbox does not take this program ({reason})")
        raise SandboxError(f"{self._endpoint} failed ({reply})")

    def _attempt(self, body: dict[str, Any], cells: int = 1) -> tuple[int, dict[str, Any] | str]:
        """Return the status, 0 for no answer; and `run_result`, or the error."""
        most = ANSWER_BYTES + 12 * self.limits.output * cells  # a character is two escapes of six bytes at most
        try:
            status, coding, data = self._exchange.post(self._endpoint, json.dumps(body).encode(), most)
        except ConnectionError as error:
            return 0, str(error)
        if status != 200:
            return status, f"status {status}: {data[:200].decode(errors='replace')}"
        if coding != "identity":
            return 200, f"its answer is encoded as {coding[:40]!r}, which nobody asked for"
        if len(data) > most:
            return 200, f"its answer has more than {most} bytes"
        try:
            answer = json.loads(data.decode())
            if answer["status"] == "SandboxError":
                return 500, f"the server reports an error: {str(answer.get('message'))[:200]}"
            result: dict[str, Any] = answer["run_result"]
            return 200, {
                "status": str(result["status"]),
                "return_code": result.get("return_code"),
                "stdout": str(result.get("stdout") or ""),
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return 200, f"it doesn't answer as SandboxFusion does: {repr(error)[:200]}"


class RemoteSession(Session):
    """A session that is replayed by every run."""

    def __init__(self, sandbox: Remote) -> None:
        self._sandbox = sandbox
        self._limits = sandbox.limits
        self._cells: list[Cell] = []

    def run(self, code: str, functions: Functions | None = None) -> Run:
        begun = time.monotonic()
        if functions:
            raise SandboxError("a remote sandbox cannot call functions of this process; use another backend for that")
        code = encodable(code)
        try:
            printed, answer, restored = self._ask([*self._codes(), code], None)
            if self._cells and not restored:
                self._cells.clear()
                printed, answer, _ = self._ask([code], None)
                printed = LOST + printed
        except Refused as refused:
            seconds = time.monotonic() - begun
            return Run(UNCHANGED.format(refused), "exception", str(refused), self._sandbox.backend, seconds)
        status, error, ending = outcome(answer) if answer is not None else ("died", ENDED, "")
        if status in ("timeout", "died"):
            ending = UNCHANGED.format(error)
        else:
            self._cells.append(Cell(code))
        output = shown(printed, self._limits.output, ending)
        return Run(output, status, error, self._sandbox.backend, time.monotonic() - begun)

    def call(self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        try:
            _, answer, _ = self._ask(self._codes(), [name, check_arguments(args, kwargs)])
        except Refused as refused:
            raise CallError("Refused", str(refused)) from None
        if answer is None:
            raise CallError("Died", ENDED)
        return call_result(answer)

    def get_state(self) -> State:
        return State(tuple(self._cells))

    def set_state(self, state: State | None) -> None:
        self._cells = list(state.cells) if state is not None else []

    def close(self) -> None:
        pass

    def _codes(self) -> list[str]:
        if any(cell.functions for cell in self._cells):
            raise SandboxError("this session called functions of this process, which a remote sandbox cannot replay")
        return [cell.code for cell in self._cells]

    def _ask(self, cells: list[str], call: list[Any] | None) -> tuple[str, dict[str, Any] | None, bool]:
        """Run the cells on the server.

        Returns:
            The output of the last cell (or the call); the guest's answer, or None if it is nonsense; True if the
            earlier cells ran to their end."""
        mark = secrets.token_hex(16)
        limits = self._limits
        arguments = (cells, call, limits.output, limits.cpu_seconds, mark)
        program = GUEST.read_text(encoding="utf-8").partition("\nif __name__ ==")[0]
        program += f"\nreplay(*{arguments!r})\n"
        result = self._sandbox.post(program, len(cells) + 1)
        _, begun, rest = result["stdout"].partition(f"\n{mark}\n")
        output, ended, last = rest.partition(f"\n{mark}")
        if result["status"] == "TimeLimitExceeded":
            late = {"error": ["Timeout", OUT_OF_TIME.format(limits.wall_seconds)], "timeout": True}
            return output, late, bool(begun) or not result["stdout"]  # some servers send nothing then
        if result["return_code"] != 0:  # even where it has answered: killed in that moment, it may not replay
            return output, None, bool(begun)
        try:
            answer = parsed(last.splitlines()[0]) if begun and ended else None
            if answer is not None and (call is None or "value" not in answer):
                outcome(answer)
        except BROKEN:
            answer = None
        return output, answer, bool(begun)
