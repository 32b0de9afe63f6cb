"""Chat templates are foreign code: what they may use is bounded, and what they do to their process is no one else's."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from agent_r1.dialects import get_dialect
from agent_r1.text import templates
from agent_r1.text.tokenizers import ByteTokenizer, load_tokenizer, render_chat

MESSAGES = [{"role": "user", "content": "Who?"}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
GROWING = "{% set box = namespace(a=['x']) %}{% for i in range(60) %}{% set box.a = [box.a, box.a] %}{% endfor %}"

SLOW = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "one large number": "{{ (10 ** (10 ** 8)) % 7 }}",
    "a small loop over large steps": "{% for i in range(99999) %}{% set a = range(99999) | list %}{% endfor %}",
    "text without end": "{% for i in range(99999) %}{{ loop.index }}{% for j in range(9999) %}{% endfor %}{% endfor %}",
}
LARGE = {
    "a product": "{{ 'a' * 10**9 }}",
    "a product behind a condition": "{% if messages %}{% set a = messages[0].content * 10**9 %}{% endif %}",
    "a list": "{{ ([0] * 10**9) | length }}",
    "a width": "{{ 'a'.ljust(10**9) }}",
    "a format": "{{ '%1000000000d' % 1 }}",
    "another format": "{{ '{:>1000000000}'.format(1) }}",
    "a filter": "{{ 'a' | center(10**9) }}",
    "a replacement": "{% set a = 'a' * 10**5 %}{{ a.replace('a', a) }}",
    "lists that double": GROWING + "{{ box.a }}",
}
WORDY = "{% for i in range(30) %}{{ 'x' * 99999 }}{% endfor %}"


def template(text):
    return ByteTokenizer(chat_template=text)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch):
    monkeypatch.setattr(templates, "CPU_SECONDS", 0.2)
    monkeypatch.setattr(templates, "MEMORY", 200 << 20)


@pytest.mark.parametrize("name", SLOW)
def test_a_template_that_does_not_end_is_refused(name):
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"more than (0\.2 seconds|200 MiB)"):
        render_chat(template(SLOW[name]), MESSAGES)
    assert time.monotonic() - began < 30
    assert render_chat(template(PLAIN), MESSAGES) == "user: Who?"


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_takes_all_memory_is_refused(name):
    with pytest.raises(ValueError, match=r"more than (200 MiB of memory|0\.2 seconds)"):
        render_chat(template(LARGE[name]), MESSAGES)
    assert render_chat(template(PLAIN), MESSAGES) == "user: Who?"


def test_a_template_that_writes_much_more_than_it_reads_is_refused():
    with pytest.raises(ValueError, match="writes 2999970 characters"):
        render_chat(template(WORDY), MESSAGES)
    with pytest.raises(ValueError, match="more than 1000000 characters"):
        render_chat(template(PLAIN + " " * 1_000_000), MESSAGES)
    long = [{"role": "user", "content": "x" * 2_000_000}]
    assert len(render_chat(template(PLAIN), long)) == 2_000_006


def test_a_tokenizer_with_such_a_template_is_refused_in_time():
    """A dialect asks its template many things; one that took too long is asked no more."""
    began = time.monotonic()
    for _ in range(20):
        with pytest.raises(ValueError, match="chat template takes more than"):
            get_dialect(None, load_tokenizer(template(SLOW["nested loops"] + "{# mine #}")))
    assert time.monotonic() - began < 30


def test_what_a_template_says_comes_across_as_it_is():
    strange = 'é\u2028 \U0010f8a0 "quoted" \\ \n\r\t\0 <b> \ud800 \U0001f600'
    messages = [{"role": strange, "content": strange}, {"role": "a", "content": None, "n": [1, 2.5, True, {"k": "v"}]}]
    text = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.n | tojson }}{{ bos_token }}{% endfor %}"
    tokenizer = ByteTokenizer(chat_template=text.replace("{{ m.n | tojson }}", ""), bos_token="<think>")
    here = templates._render(tokenizer.chat_template, {"messages": messages, **tokenizer.special_tokens_map})
    assert render_chat(tokenizer, messages) == here


def test_our_own_template_needs_no_process(monkeypatch):
    renderer = templates._Renderer()
    monkeypatch.setattr(templates, "_renderer", renderer)
    assert "Who?" in render_chat(load_tokenizer(), MESSAGES) and renderer.process is None
    render_chat(template(PLAIN), MESSAGES)
    assert renderer.process is not None
    renderer.close()


def test_a_process_that_was_killed_is_started_again():
    assert render_chat(template(PLAIN), MESSAGES) == "user: Who?"
    for _ in range(2):
        templates._renderer.process.send_signal(signal.SIGKILL)
        assert render_chat(template(PLAIN), MESSAGES) == "user: Who?"


def test_threads_and_forks_get_their_own_answers():
    def ask(number, wrong):
        for i in range(30):
            content = f"{number} {i}"
            if render_chat(template(PLAIN), [{"role": "a", "content": content}]) != f"a: {content}":
                wrong.append(content)

    wrong = []
    threads = [threading.Thread(target=ask, args=(number, wrong)) for number in range(4)]
    for thread in threads:
        thread.start()
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            try:
                ask("child", wrong)
                os._exit(len(wrong))
            finally:
                os._exit(99)
        children.append(child)
    for thread in threads:
        thread.join()
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0] and not wrong


def test_an_interrupted_question_leaves_no_answer_behind(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    monkeypatch.setattr(templates, "CPU_SECONDS", 60)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            render_chat(template(SLOW["nested loops"] + "{# another #}"), MESSAGES)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert render_chat(template(PLAIN), MESSAGES) == "user: Who?"


def test_the_process_ends_with_its_parent():
    code = (
        "from agent_r1.text import templates as c; from agent_r1.text.tokenizers import ByteTokenizer\n"
        f"c.render_chat(ByteTokenizer(chat_template={PLAIN!r}), [])\n"
        "import os; print(c._renderer.process.pid, flush=True); os._exit(0)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.kill(int(done.stdout), 0)
            with open(f"/proc/{int(done.stdout)}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":  # ended; whoever adopted it hasn't looked yet
                    return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.05)
    raise AssertionError("it still runs")
