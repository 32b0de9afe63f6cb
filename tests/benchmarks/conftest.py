"""What tests of benchmarks share with those of learners, where the extra [train] is installed."""

from importlib.util import find_spec

if find_spec("torch"):
    from rows import make_row, one_thread  # noqa: F401  (fixtures)
