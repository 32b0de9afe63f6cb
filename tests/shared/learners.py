"""Which scripts there are in learner/, read off the folder, so that a new one is tested like the others."""

from pathlib import Path
from typing import Any

_SOURCES = {path.stem: path.read_text() for path in sorted((Path(__file__).parents[2] / "learner").glob("*_llm.py"))}
ALL = tuple(_SOURCES)
PLAY = tuple(name for name, source in _SOURCES.items() if "\ndef compute_advantages(" in source)
"""Those that train on episodes of their own."""

WITH_ENVIRONMENT = tuple(name for name, source in _SOURCES.items() if name in PLAY or "\n    env_kwargs: " in source)
"""Those that make environments."""


def filled(args: Any) -> Any:
    """Return a script's arguments as it checks them: evaluate_llm.py first fills those of its environment."""
    if hasattr(args, "mode"):
        from llm_utils.records.earlier_runs import fill_environment

        fill_environment(args)
    return args
