"""Monty's worker processes. All sessions of this process share them."""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING, Any

from agent_r1_tools.python.launch import START_SECONDS
from agent_r1_tools.python.sandbox import SandboxError

if TYPE_CHECKING:
    import pydantic_monty

MAX_WORKERS = 256
"""The most runs at the same time; workers start when they are needed."""

_pools: list[Any] = []
_lock = threading.Lock()


def pool_of_workers() -> pydantic_monty.Monty:
    """Return the pool of this process."""
    if _abandoned:
        raise SandboxError(
            "monty doesn't work in a fork of a process that has used it; start processes with 'spawn', or use another "
            "backend"
        )
    with _lock:
        if not _pools:
            try:
                import pydantic_monty
            except ImportError as error:
                raise SandboxError('monty is not installed: pip install "agent-r1[python]"') from error
            pool = pydantic_monty.Monty(max_processes=MAX_WORKERS, checkout_timeout=START_SECONDS)
            pool.__enter__()
            _pools.append(pool)
        shared_pool: pydantic_monty.Monty = _pools[0]
        return shared_pool


@atexit.register
def _close_pool() -> None:
    while _pools:
        _pools.pop().__exit__(None, None, None)


def _forget_pool() -> None:
    """Forget the pool after a fork: the workers are the parent's, and so are the threads that would start others."""
    global _lock
    _lock = threading.Lock()
    _abandoned.extend(_pools)
    _pools.clear()


_abandoned: list[Any] = []  # never collected, because that would end the parent's workers
os.register_at_fork(after_in_child=_forget_pool)
