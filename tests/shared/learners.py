"""Which scripts there are in learner/, read off the folder, so that a new one is tested like the others."""

from pathlib import Path

_SOURCES = {path.stem: path.read_text() for path in sorted((Path(__file__).parents[2] / "learner").glob("*_llm.py"))}
ALL = tuple(_SOURCES)
PLAY = tuple(name for name, source in _SOURCES.items() if "\ndef compute_advantages(" in source)
"""Those that train on episodes of their own."""
