"""Weights & Biases for --track: a check before any work, and the start of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

REMEDY = "log in with `wandb login`, set WANDB_API_KEY, or log to files only with WANDB_MODE=offline"


def check_login() -> None:
    """Raise SystemExit unless wandb is installed, and logged in or offline. A key is checked at the server."""
    if find_spec("wandb") is None:
        raise SystemExit("--track needs wandb: pip install 'agent-r1[track]'")
    import wandb

    with one_line():
        if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
            return
        try:
            logged_in = wandb.login(prompt=False)
        except TypeError:  # older versions always ask, so this is left to the start
            return
    if not logged_in:
        raise SystemExit(f"--track: no API key of Weights & Biases is set; {REMEDY}")


def start(**settings: Any) -> None:
    """Start a run of W&B. Raise SystemExit if that is not possible."""
    import wandb

    with one_line():
        wandb.init(**settings)


@contextmanager
def one_line() -> Iterator[None]:
    """Turn errors of wandb into a SystemExit with the cause and the remedies."""
    import wandb

    try:
        yield
    except (wandb.errors.Error, OSError) as error:
        raise SystemExit(f"--track: wandb cannot start ({' '.join(str(error).split()):.300}); {REMEDY}") from None
