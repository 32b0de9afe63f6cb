"""A bar on a terminal, plain lines in a file."""

import fcntl
import os
import select
import struct
import sys
import termios
from contextlib import contextmanager

import pytest

from llm_utils.records import progress
from llm_utils.records.progress import Progress


@contextmanager
def terminal(monkeypatch, columns):
    """Standard error is a terminal of this width. Yields a function that returns what was written."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with monkeypatch.context() as patch, os.fdopen(slave, "w") as stream:
        patch.setattr(sys, "stderr", stream)
        patch.setenv("TERM", "xterm")

        def written():
            parts = []
            while select.select([master], [], [], 0.2)[0]:  # one read may return a part
                parts.append(os.read(master, 100_000))
            return b"".join(parts).decode()

        yield written
    os.close(master)


@pytest.mark.parametrize("columns", [12, 100])
def test_a_terminal_has_a_bar_of_its_width(monkeypatch, columns):
    with terminal(monkeypatch, columns) as written:
        bar = Progress(20, "episode", "iteration 0/2", lines=0, with_clock=False)
        for _ in range(20):
            bar.update()
        bar.show("return 0.50, {success} 0.20, 01:10 left", "iteration 2/2")
        bar.write("warning: careful", sys.stderr)
        bar.close()
        text = written()
    assert "warning: careful" in text
    frames = [line.strip("\n") for line in text.replace("\n", "\r").split("\r")]
    assert max(map(len, frames)) <= max(columns, len("warning: careful"))
    if columns == 100:
        assert any(line.startswith("iteration 2/2 100%|█") and line.endswith("01:10 left") for line in frames)
        assert "{success}" in text
    assert "\033[3" not in text  # no color


def test_a_file_has_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    with Progress(1000, "step", "sft", initial=100) as bar:
        bar.show("loss 0.25")
        for _ in range(900):
            bar.update()
        bar.write("a table")
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "a table\n" and "\r" not in err
    assert lines[0] == "sft: 100/1000 steps" and lines[-1] == "sft: 1000/1000 steps, loss 0.25"
    assert 20 <= len(lines) <= 50 and all(line.endswith(" left") for line in lines[1:-1])


def test_lines_come_seldom_and_the_last_always(capsys):
    with Progress(1000, "step", "sft") as bar:
        for _ in range(100):
            bar.update(10)
    assert capsys.readouterr().err == "sft: 1000/1000 steps\n"  # it took less than the seconds between two lines


def test_the_time_of_something_else_does_not_count(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = Progress(10, "step", "sft", lines=10)
    now[0] = 500.0  # an evaluation
    bar.unpause()
    now[0] = 510.0
    bar.update()
    assert capsys.readouterr().err == "sft: 1/10 steps, 01:30 left\n"
