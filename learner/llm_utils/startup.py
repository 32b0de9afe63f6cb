"""The first import of every script: a missing package and Ctrl-C end it with a line, also while it imports."""

import sys
from pathlib import Path
from types import TracebackType

OF_TRAIN = ("torch", "transformers", "safetensors", "tyro", "tensorboard", "tqdm", "matplotlib")  # the extra's packages


def in_a_line(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """As `sys.excepthook`: SystemExit with a line for a package of the extra `train` that is missing, and for Ctrl-C.
    Everything else has its traceback."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in OF_TRAIN:
        print(f"{Path(sys.argv[0]).name} needs {package}: pip install 'agent-r1[train]'", file=sys.stderr)
        sys.exit(1)
    if issubclass(kind, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    sys.__excepthook__(kind, error, traceback)


if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parents[1]:  # a script of learner/, not its importer
    sys.excepthook = in_a_line
