"""tests/leave_nothing.py finds what outlives a command."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "leave_nothing.py"
LEAVES = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"


def run(code, seconds):
    """Exit status and messages of the script over a Python command, with so many seconds to wait."""
    words = f"import sys; sys.argv = ['', {sys.executable!r}, '-c', {code!r}]; "
    words += f"sys.path.append({str(SCRIPT.parent)!r}); import leave_nothing; "
    words += f"leave_nothing.SECONDS = {seconds}; sys.exit(leave_nothing.main())"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("status", [0, 3])
def test_a_command_that_leaves_nothing_keeps_its_status(status):
    assert run(f"import subprocess, sys; subprocess.run(['true']); sys.exit({status})", 5) == (status, "")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_is_left_behind_is_named_and_ended():
    status, said = run(LEAVES, 0.5)
    assert status == 1 and "a process was left behind: " in said and "time.sleep(60)" in said
    pid = int(said.partition("behind: ")[2].split()[0])
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_is_left_behind_leaves_nothing():
    status, said = run("import subprocess; subprocess.Popen(['sh', '-c', 'sleep 61 & sleep 62 & wait'])", 0.5)
    assert status == 1 and "sleep 61" in said and "sleep 62" in said


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_signal_ends_the_command():
    words = [sys.executable, str(SCRIPT), sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    process.stdout.readline()
    process.terminate()
    assert process.wait(20) == 256 - 15 or process.returncode == -15


@pytest.mark.skipif(sys.platform != "linux", reason="waits for a process without burying it")
def test_a_signal_leaves_the_command_that_has_just_ended_to_be_waited_for(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import leave_nothing

    command = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    os.waitid(os.P_PID, command.pid, os.WEXITED | os.WNOWAIT)
    leave_nothing.pass_on(signal.SIGTERM, command)
    assert os.waitstatus_to_exitcode(os.waitpid(command.pid, 0)[1]) == 3
    leave_nothing.pass_on(signal.SIGTERM, command)  # there is none any more


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_ends_soon_is_not_left_behind():
    assert run(LEAVES.replace("60", "0.5"), 20) == (0, "")
