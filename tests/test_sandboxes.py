"""The suite without bubblewrap: what needs it is skipped, and the last lines say how to install it."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_what_needs_a_missing_sandbox_is_skipped_and_one_line_says_how_to_install_it():
    """Tests that name it by a mark, and one that has an environment as a parameter and knows nothing of sandboxes."""
    files = ["tests/tools/python/test_python_seccomp.py", "tests/envs/tasks/test_demonstrators.py"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files, "-k", "internet or Terminal"]
    environment = os.environ | {"PATH": "/nowhere"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (said,) = (line for line in ran.stdout.splitlines() if line.startswith("sandboxes that don't work here"))
    assert re.search(r"bubblewrap \(\d+ tests; apt-get install bubblewrap;", said), said
