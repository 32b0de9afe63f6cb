"""Choice of a sandbox: names, probes, and the choice that "auto" makes."""

from __future__ import annotations

import builtins
import os
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1_tools.python.bubblewrap import Bubblewrap
from agent_r1_tools.python.fork_server import ForkServer
from agent_r1_tools.python.monty import MAX_MEMORY, Monty
from agent_r1_tools.python.remote import Remote
from agent_r1_tools.python.sandbox import CallError, Functions, Limits, Run, Sandbox, SandboxError, Session, State
from agent_r1_tools.python.unsafe import BareProcess


@dataclass(frozen=True)
class Backend:
    """A kind of sandbox on this machine.

    Attributes:
        open: makes one; SandboxError where it can't.
        remedy: what would help where it doesn't work.
        all_of_python: whether it runs CPython; where not, "auto" needs another for the programs that want more.
        network: whether it can allow network.
        only_linux: whether it needs Linux.
    """

    open: Callable[[Limits], Sandbox]
    remedy: str
    all_of_python: bool = True
    network: bool = False
    only_linux: bool = True


LOCAL = {
    "monty": Backend(Monty, 'pip install "agent-r1[python]"', all_of_python=False, only_linux=False),
    "bubblewrap": Backend(
        Bubblewrap,
        "apt-get install bubblewrap; in a container it needs user namespaces, or root with CAP_SYS_ADMIN",
        network=True,
    ),
    "fork_server": Backend(
        ForkServer, "needs Linux with Landlock and seccomp, and user namespaces, or root with CAP_SYS_ADMIN"
    ),
}
"""The sandboxes of this machine, in the order in which "auto" looks at them: the safest first."""

# What a sandbox must not let through; the function runs inside of it.
PROBE = """
def probe(path, port):
    try:
        open(path).close()
        return "a program can read files outside"
    except OSError:
        pass
    try:
        import socket
        socket.create_connection(("127.0.0.1", port), 1).close()
        return "a program can open connections"
    except (OSError, ImportError):
        return "contained"
"""


def open_sandbox(
    backend: str = "auto", limits: Limits | None = None, *, unsafe: bool = False, url: str | None = None
) -> Sandbox:
    """Open a sandbox for untrusted code.

    Args:
        backend: "monty", "bubblewrap", "fork_server" (the names in `LOCAL`), "remote" (a SandboxFusion server at
            `url`), "subprocess" (no sandbox: needs `unsafe=True`), or "auto": monty, and for programs that need more
            than it knows bubblewrap, or the fork server where there is no bubblewrap. What was picked is in
            `Sandbox.backend`.
        limits: what a program may use; None for the defaults of `Limits`.
        unsafe: the word that "subprocess" needs.
        url: the address of the server of "remote".

    Raises:
        SandboxError: the backend doesn't work here (a probe program has been tried); says what to install and what else
            would work.
        ValueError: arguments that don't fit together.
    """
    limits = limits or Limits()
    if backend == "subprocess":
        if not unsafe:
            raise ValueError(
                "backend='subprocess' is no sandbox: the program may do whatever you may. "
                f"Write unsafe=True if you trust it, or use a sandbox ({_present()})"
            )
        return BareProcess(limits)
    if backend == "remote":
        if url is None:
            raise ValueError("backend='remote' needs the address of a server, such as url='http://127.0.0.1:8080'")
        remote = Remote(url, limits)
        _try(remote)
        return remote
    if backend == "auto":
        return _pick(limits)
    local = LOCAL.get(backend)
    if local is None:
        raise ValueError(f"unknown backend {backend!r}; use auto, {', '.join(LOCAL)}, remote, subprocess")
    problem = probe(backend)
    if problem is not None:
        raise SandboxError(f"{backend} doesn't work here: {problem}. Remedy: {local.remedy}. Otherwise: {_present()}")
    return local.open(limits)


def probe(backend: str) -> str | None:
    """Run a program in a local sandbox. Return None if it was contained, else the reason. It runs once per process."""
    with _lock:
        if backend not in _probed:
            _probed[backend] = _problem(backend)
        return _probed[backend]


_probed: dict[str, str | None] = {}
_lock = threading.Lock()


def _forget_probes() -> None:
    """Forget the probes after a fork: some backends no longer work there."""
    global _lock
    _lock = threading.Lock()
    _probed.clear()


os.register_at_fork(after_in_child=_forget_probes)


def _problem(backend: str) -> str | None:
    if sys.platform != "linux" and LOCAL[backend].only_linux:
        return "it needs Linux"
    try:
        _try(LOCAL[backend].open(Limits()))
    except (SandboxError, OSError) as error:
        return str(error)
    return None


def _try(sandbox: Sandbox) -> None:
    """Run the probe.

    Raises:
        SandboxError: it didn't run, or was not contained.
    """
    with (
        tempfile.NamedTemporaryFile("w", prefix="agent-r1-probe-") as planted,
        socket.create_server(("127.0.0.1", 0)) as server,
        sandbox.session() as session,
    ):
        ran = session.run(PROBE)
        if not ran.ok:
            raise SandboxError(f"the probe program failed: {ran.output[-300:]}")
        os.chmod(planted.name, 0o644)
        try:
            answer = session.call("probe", [planted.name, server.getsockname()[1]])
        except CallError as error:
            raise SandboxError(f"the probe program failed: {error}") from error
    if answer != "contained":
        raise SandboxError(f"it does not contain the programs that it runs: {answer}")


def _present() -> str:
    working = [name for name in LOCAL if probe(name) is None]
    if not working:
        return "no other sandbox works here; a SandboxFusion server would (backend='remote')"
    return f"here work {', '.join(working)}"


def _pick(limits: Limits) -> Sandbox:
    fitting = (local for name, local in LOCAL.items() if _fits(name, limits))
    first = next(fitting, None)
    if first is not None:
        full = None if first.all_of_python else next((local for local in fitting if local.all_of_python), None)
        return Auto(first.open(limits), full.open(limits)) if full else first.open(limits)
    problems = "; ".join(
        f"{name}: {probe(name)} ({local.remedy})" if _may(local, limits) else f"{name}: cannot allow network"
        for name, local in LOCAL.items()
    )
    raise SandboxError(f"no sandbox works here. {problems}. A SandboxFusion server would do (backend='remote')")


def _fits(name: str, limits: Limits) -> bool:
    return _may(LOCAL[name], limits) and probe(name) is None


def _may(local: Backend, limits: Limits) -> bool:
    return local.network or not limits.network


# --- monty first, then all of Python ----------------------------------------------------------------------------------

# What Monty raises where it lacks something. Programs raise these too, so what CPython says is heard before it counts.
_LACKS = re.compile(
    "ModuleNotFoundError|ImportError|NotImplementedError|SyntaxError|AttributeError|TypeError|MemoryError"
    "|PermissionError|FileNotFoundError|OSError|RuntimeError: .*(?:monty|not supported)|ValueError: pow\\(\\)"
)
_UNKNOWN_NAME = re.compile("NameError: name '(\\w+)' is not defined")
_SUBSTITUTES = re.compile(r"\bsubn?\b")


class Auto(Sandbox):
    """Monty, and a sandbox with all of Python for programs that need more."""

    def __init__(self, first: Sandbox, full: Sandbox) -> None:
        self.limits = first.limits
        self.backend = f"{first.backend}, then {full.backend}"
        self.first = first
        self.full = full

    def session(self) -> AutoSession:
        return AutoSession(self)


class AutoSession(Session):
    """A session that begins in Monty. A cell that seems to need more runs again in CPython, after all earlier cells.

    If CPython fails in the same way, Monty was right and the session stays there. Otherwise it continues in CPython.
    """

    def __init__(self, sandbox: Auto) -> None:
        self._sandbox = sandbox
        self._session = sandbox.first.session()
        self._in_first = True

    def run(self, code: str, functions: Functions | None = None) -> Run:
        before = self._session.get_state()
        if self._in_first and _misread(before, code):
            self._go_on(before)
        ran = self._session.run(code, functions)
        if not self._in_first or not (_lacks(ran.error) or (ran.status == "died" and self._has_more())):
            return ran
        full = self._sandbox.full.session()
        full.set_state(State(before.cells))
        again = full.run(code, functions)
        if again.status == "exception" and _kind(again.error) == _kind(ran.error):
            full.close()
        else:
            self._session, self._in_first = full, False
        return again

    def call(self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        state = self._session.get_state()
        if not self._in_first or not _misread(state, repr((args, kwargs))):
            try:
                return self._session.call(name, args, kwargs)
            except CallError as error:
                lacks = _lacks(str(error)) or error.kind == "NotLiteral" or (error.kind == "Died" and self._has_more())
                if not self._in_first or not lacks:
                    raise
        self._go_on(state)
        return self._session.call(name, args, kwargs)

    def _go_on(self, state: State) -> None:
        """Continue in CPython."""
        self._session.close()
        self._session, self._in_first = self._sandbox.full.session(), False
        self._session.set_state(State(state.cells))

    def _has_more(self) -> bool:
        """Return True if CPython may use more memory than Monty."""
        return self._sandbox.limits.memory > MAX_MEMORY

    def get_state(self) -> State:
        return self._session.get_state()

    def set_state(self, state: State | None) -> None:
        self._session.close()
        self._in_first = state is None or state.dump is not None or not state.cells
        self._session = (self._sandbox.first if self._in_first else self._sandbox.full).session()
        self._session.set_state(state)

    def close(self) -> None:
        self._session.close()


def _kind(error: str | None) -> str:
    return (error or "").partition(":")[0]


def _lacks(error: str | None) -> bool:
    if error is None:
        return False
    name = _UNKNOWN_NAME.match(error)
    return hasattr(builtins, name[1]) if name else _LACKS.match(error) is not None


def _misread(state: State, code: str) -> bool:
    """Return True if this may be an `re.sub` replacement with a backslash, which Monty reads differently."""
    codes = [*(cell.code for cell in state.cells), code]
    return any(map(_SUBSTITUTES.search, codes)) and any("\\" in code for code in codes)
