"""The suite without a sandbox: its tests are skipped, and the last lines say how to install it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_without_bubblewrap_tests_are_skipped_and_one_line_says_how_to_install_it():
    """An environment that needs it, as a parameter of a test that knows nothing of sandboxes."""
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/envs/tasks/test_demonstrators.py"]
    environment = os.environ | {"PATH": "/nowhere"}
    done = subprocess.run([*words, "-k", "Terminal"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "1 skipped" in done.stdout
    assert "sandboxes that don't work here: bubblewrap (1 tests; apt-get install bubblewrap" in done.stdout
