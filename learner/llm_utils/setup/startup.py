"""The first import of every script: a missing package and Ctrl-C end it with a line, also while it imports."""

import sys
from pathlib import Path
from types import TracebackType

OURS = ("agent_r1", "agent_r1_tools", "gymnasium", "numpy", "tokenizers", "jinja2", "jsonschema")  # and what they need
OF_TRAIN = ("torch", "transformers", "safetensors", "tyro", "tensorboard", "tqdm", "matplotlib")  # the extra's packages


def in_a_line(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """As `sys.excepthook`: SystemExit with a line for a package that is missing, ours or of the extra `train`, and for
    Ctrl-C. Everything else has its traceback."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in OURS + OF_TRAIN:
        how = f"pip install -e '.[train]' in {Path(__file__).resolve().parents[3]}"
        print(f"{Path(sys.argv[0]).name} needs {package}: {how}", file=sys.stderr)
        sys.exit(1)
    if issubclass(kind, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    sys.__excepthook__(kind, error, traceback)


if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parents[2]:  # a script of learner/, not its importer
    sys.excepthook = in_a_line
