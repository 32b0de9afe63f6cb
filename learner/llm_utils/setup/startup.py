"""The first import of every script: end the program with one line, not a traceback, if a package is missing or Ctrl-C
is pressed, also during the imports."""

# ruff: noqa: E402
import os
import signal
import sys


def end_in_a_line(number: int, frame: object) -> None:
    """Handle SIGINT during imports. KeyboardInterrupt would become another error in some packages.

    `agent_r1.interrupts` has the same function. It cannot be imported here: its package imports numpy first.
    """
    os.write(2, b"\ninterrupted\n")
    os._exit(130)


def imported() -> None:
    """End the handling of SIGINT by `end_in_a_line`, because the imports are done."""
    if signal.getsignal(signal.SIGINT) is end_in_a_line:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# A script of learner/, not its importer.
IS_SCRIPT = os.path.dirname(os.path.realpath(sys.argv[0])) == os.path.realpath(f"{__file__}/../../..")
if IS_SCRIPT and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_in_a_line)

from pathlib import Path
from types import TracebackType

# Our packages and what they need; packages of the extra `train`.
OURS = ("agent_r1", "agent_r1_tools", "gymnasium", "numpy", "tokenizers", "jinja2", "jsonschema")
OF_TRAIN = ("torch", "transformers", "safetensors", "tyro", "yaml", "tensorboard", "tqdm", "matplotlib")


def in_a_line(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Replace `sys.excepthook`: print one line for Ctrl-C, for a failure of the user's function, and for a missing
    package, one of ours or of the extra `train`. Every other error keeps its traceback."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in OURS + OF_TRAIN:
        remedy = f"pip install -e '.[train]' in {Path(__file__).resolve().parents[3]}"
        print(f"{Path(sys.argv[0]).name} needs {package}: {remedy}", file=sys.stderr)
        sys.exit(1)
    if issubclass(kind, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    if (arguments := sys.modules.get("agent_r1.arguments")) and issubclass(kind, arguments.FunctionError):
        print(error, *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        sys.exit(1)
    sys.__excepthook__(kind, error, traceback)


if IS_SCRIPT:
    sys.excepthook = in_a_line
