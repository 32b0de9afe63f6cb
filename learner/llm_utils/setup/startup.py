"""The first import of every script: end the program with one line, not a traceback, if a package is missing or Ctrl-C
is pressed, also during the imports."""

import sys
from pathlib import Path
from types import TracebackType

# Our packages and what they need; packages of the extra `train`.
OURS = ("agent_r1", "agent_r1_tools", "gymnasium", "numpy", "tokenizers", "jinja2", "jsonschema")
OF_TRAIN = ("torch", "transformers", "safetensors", "tyro", "yaml", "tensorboard", "tqdm", "matplotlib")


def in_a_line(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Replace `sys.excepthook`: print one line for Ctrl-C and for a missing package, one of ours or of the extra
    `train`. Every other error keeps its traceback."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in OURS + OF_TRAIN:
        remedy = f"pip install -e '.[train]' in {Path(__file__).resolve().parents[3]}"
        print(f"{Path(sys.argv[0]).name} needs {package}: {remedy}", file=sys.stderr)
        sys.exit(1)
    if issubclass(kind, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    sys.__excepthook__(kind, error, traceback)


if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parents[2]:  # a script of learner/, not its importer
    sys.excepthook = in_a_line
