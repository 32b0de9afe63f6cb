"""MiniWoB++: scripts do its tasks in a real browser, which never outlives whoever uses it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest

pytest.importorskip("miniwob")
if not (shutil.which("chromedriver") and (shutil.which("chromium") or shutil.which("google-chrome"))):
    pytest.skip("MiniWoB needs Chromium: apt-get install chromium chromium-driver", allow_module_level=True)

import psutil
from bridge_cases import check_others_play_the_same, check_package, forgotten

from agent_r1 import ArgumentError, ToolFault
from agent_r1.bridges.miniwob import page as miniwob_page
from agent_r1.bridges.miniwob.environment import MiniWoBEnv, first_view
from agent_r1.bridges.miniwob.page import BROWSERS, Page
from agent_r1.bridges.miniwob.scripts import SCRIPTS
from agent_r1.validation import probes


@pytest.fixture(scope="module")
def env():
    made = MiniWoBEnv(max_action_tokens=30_000)
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def leave_no_process():
    others = set(browsers(os.getpid()))  # what other modules' environments keep
    yield
    BROWSERS.clear()
    wait_for(lambda: set(browsers(os.getpid())) <= others)


def browsers(pid):
    """The processes below one."""
    return psutil.Process(pid).children(recursive=True)


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


def call(env, tool, **arguments):
    return env.step(probes.span(env, env.dialect.tool_call(tool, arguments)))


def begin(name, **kwargs):
    env = MiniWoBEnv(tasks=[name], **kwargs)
    env.reset(options={"task_index": 0})
    return env


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_scripts_do_their_tasks(env, number):
    name = list(SCRIPTS)[number]
    for index in (number, number + len(SCRIPTS)):
        episode = probes.play(env, index, probes.expert)
        assert env.task.id == f"{name}-{index}"
        assert episode.success and sum(episode.rewards) == 1 and episode.infos[-1]["metrics"] == {"reward": 1}


def test_pages_of_the_test_split_are_others():
    train, test = (MiniWoBEnv(tasks=["click-checkboxes-transfer"], split=split) for split in ("train", "test"))
    asked = [[env.make_task(index).question.count(",") for index in range(12)] for env in (train, test)]
    assert max(asked[0]) <= 2 and min(asked[1]) >= 3  # at most three boxes, at least four: MiniWoB's own rule
    assert probes.play(test, 3, probes.expert).success
    train.close(), test.close()


def test_what_is_wrong_pays_minus_one():
    env = begin("focus-text-2")
    wrong = [one.ref for one in env.world.elements if one.tag == "input_text"]
    ((_, arguments),) = SCRIPTS["focus-text-2"](env.world.utterance, env.world.elements)
    wrong.remove(arguments["element"])
    *_, reward, terminated, _, info = call(env, "click", element=wrong[0])
    assert terminated and reward == -1 and not info["is_success"] and info["metrics"] == {"reward": -1}
    env.close()


def test_what_is_done_in_part_pays_in_part():
    env = begin("odd-or-even")
    *turns, last = env.demonstration()
    for text in [*turns[:-1], last]:
        *_, reward, terminated, _, info = env.step(probes.span(env, text))
    assert terminated and 0 < reward < 1 and not info["is_success"]
    env.close()


def test_no_time_runs_out_on_a_page():
    env = begin("click-test")
    time.sleep(11)  # MiniWoB gives it ten seconds
    *_, reward, terminated, _, info = env.step(probes.span(env, env.demonstration()[0]))
    assert terminated and reward == 1 and info["is_success"]
    env.close()


def test_keys_type_and_move():
    env = begin("enter-text")
    (field,) = [one for one in env.world.elements if one.tag == "input_text"]
    call(env, "type", element=field.ref, text="ab cd")
    assert 'with "ab cd", focused' in env.messages[-1]["content"]
    call(env, "press", key="Backspace")
    call(env, "press", key="Home")
    call(env, "press", key="Delete")
    assert 'with "b c"' in env.messages[-1]["content"]
    call(env, "press", key="Control+a")
    call(env, "press", key="Backspace")
    assert 'with ""' in env.messages[-1]["content"]
    env.close()


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("click", {"element": 99_999}), ("click", {"element": 10**400}), ("click", {"element": -1}), ("click", {}),
        ("click", {"element": "7); core.endEpisode(1); (0"}), ("click", {"element": 4.5}),
        ("type", {"element": 99_999, "text": "a"}), ("type", {"element": 5, "text": "x" * 20_000}),
        ("type", {"element": 5, "text": "\ue006"}), ("type", {"element": 5, "text": "a\nb"}),
        ("type", {"element": 5, "text": "\ud800"}), ("type", {"element": 5, "text": "\U0001f600"}),
        ("select", {"element": 5, "option": "'); core.endEpisode(1); ('"}),
        ("select", {"element": 99_999, "option": ""}), ("press", {"key": "F12"}), ("press", {"key": "Control+w"}),
    ],
)  # fmt: skip
def test_what_can_t_be_done_is_said(env, tool, arguments):
    number = list(SCRIPTS).index("choose-list")
    env.reset(options={"task_index": number})
    *_, terminated, truncated, info = call(env, tool, **arguments)
    assert not terminated and not truncated and not info["tool_calls"][0]["ok"]
    assert 0 < len(env.messages[-1]["content"]) < 2_000
    assert probes.play(env, number, probes.expert).success


def test_what_is_typed_is_a_text():
    env = begin("enter-text")
    (field,) = [one for one in env.world.elements if one.tag == "input_text"]
    text = "'); core.endEpisode(1); //<script>core.endEpisode(1)</script>"
    *_, terminated, _, info = call(env, "type", element=field.ref, text=text)
    assert not terminated and info["tool_calls"][0]["ok"] and text in env.messages[-1]["content"]
    env.close()


def test_saying_nothing_and_giving_up_pay_nothing(env):
    for probe in (probes.null, probes.copying, probes.stuffing):
        episode = probes.play(env, 3, probe, max_turns=3)
        assert not episode.success and sum(episode.rewards) <= 0


def test_a_killed_browser_costs_nothing_but_time():
    env = begin("odd-or-even")
    turns = env.demonstration()
    for number, text in enumerate(turns):
        if number == 2:
            for process in browsers(env.world.loan.held.process.pid):
                process.kill()
        *_, info = env.step(probes.span(env, text))
    assert info["is_success"]
    env.close()


def test_two_episodes_share_nothing_and_a_snapshot_goes_on():
    env, other = begin("odd-or-even"), begin("odd-or-even")
    turns = env.demonstration()
    alone = [env.step(probes.span(env, text))[0].tolist() for text in turns]
    env.reset(options={"task_index": 0})
    mixed = []
    for number, text in enumerate(turns):
        if number == 2:
            env.set_state(env.get_state())
        mixed.append(env.step(probes.span(env, text))[0].tolist())
        if number < 2:
            call(other, "press", key="Tab")
    assert mixed == alone
    assert env.world.loan.held is not other.world.loan.held
    env.close(), other.close()


def test_another_process_plays_the_same():
    check_others_play_the_same("AgentR1/MiniWoB-v0", 10, 26)


@pytest.mark.parametrize("how", [signal.SIGKILL, None])
def test_the_end_of_a_program_ends_its_browser(how):
    program = (
        "from agent_r1.bridges.miniwob.page import Page\n"
        "page = Page('click-test', 1, 'train'); print(page.loan.held.folder, flush=True); input()"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"]}
    run = [sys.executable, "-c", program]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        folder = process.stdout.readline().strip()
        below = browsers(process.pid)
        assert len(below) > 3
        process.send_signal(how) if how else process.communicate("\n")
    assert psutil.wait_procs(below, timeout=30)[1] == []
    wait_for(lambda: not os.path.exists(folder))


def test_browsers_are_used_again_and_only_some_wait(monkeypatch):
    BROWSERS.clear()
    monkeypatch.setattr(BROWSERS, "most_idle", 1)
    pages = [Page("click-test", 1, "train"), Page("click-test", 2, "train")]
    held = [page.loan.held for page in pages]
    for page in pages:
        page.close()
    assert [browser.alive() for browser in held] == [True, False]
    page = Page("click-button", 1, "train")
    assert page.loan.held is held[0]
    page.close()


def test_a_browser_in_which_a_call_is_stuck_serves_nobody_else():
    BROWSERS.clear()
    page = Page("click-test", 1, "train")
    browser = page.loan.held

    def stuck():
        with contextlib.suppress(ToolFault), page._browser() as held:
            held.driver.execute_script("while (true) {}")

    thread = threading.Thread(target=stuck, daemon=True)
    thread.start()
    wait_for(lambda: page.loan.busy)
    page.close()
    assert not browser.alive() and len(BROWSERS) == 0
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_pages_reach_no_network():
    page = Page("click-test", 1, "train")
    with page._browser() as browser:
        script = "return fetch(arguments[0]).then(() => 'reached', error => String(error));"
        assert "Failed to fetch" in browser.driver.execute_script(script, "http://example.org/")
    page.close()


def test_bad_arguments_are_named():
    with pytest.raises(ArgumentError, match="tasks must be some of .*click-button"):
        MiniWoBEnv(tasks=["click-nothing"])
    with pytest.raises(ArgumentError, match="list of names"):
        MiniWoBEnv(tasks="click-test")
    env = MiniWoBEnv(tasks=["tic-tac-toe"])
    env.reset(seed=1)
    with pytest.raises(ValueError, match="no script for tic-tac-toe"):
        env.demonstration()
    env.close()


def test_without_a_browser_it_is_said_what_to_install():
    with forgotten(miniwob_page.find_chromium) as patched:
        patched.setattr(shutil, "which", lambda name: None)
        patched.delenv("MINIWOB_CHROME_BINARY", raising=False)
        with pytest.raises(ImportError, match="apt-get install chromium chromium-driver"):
            MiniWoBEnv()


@pytest.mark.parametrize("name", ["MINIWOB_CHROME_BINARY", "MINIWOB_CHROMEDRIVER"])
def test_a_browser_that_does_not_run_is_said_at_once(name, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no library of this name >&2\nexit 127\n")
    broken.chmod(0o755)
    for path, words in ((broken, "no library of this name"), ("/nowhere/chrome", "No such file")):
        with forgotten(miniwob_page.find_chromium) as patched:
            patched.setenv(name, str(path))
            with pytest.raises(ImportError, match=f"apt-get install chromium.*{path} --version.*{words}"):
                MiniWoBEnv()


def test_a_missing_package_and_another_version_are_said():
    for package, series in (("miniwob", "1.1"), ("selenium", "4")):
        check_package(MiniWoBEnv, [miniwob_page.find_chromium], "miniwob", series, module=package, package=package)


def test_every_page_can_be_read():
    """All of MiniWoB's, not only those with a script."""
    for name in miniwob_page.task_names():
        asked, page = first_view(name, 0, "train")
        assert asked and len(page) < 20_000, name


def test_what_stands_in_any_field_is_shown():
    page = Page("enter-date", 1, "train")
    (field,) = [one for one in page.elements if one.tag == "input_date"]
    page.act("type", {"element": field.ref, "text": "01022015"})
    assert 'with "2015-01-02"' in str(page)
    page.close()


def test_a_second_choice_takes_an_option_of_several_back():
    page = Page("click-scroll-list", 1, "train")
    (field,) = [one for one in page.elements if one.tag == "select"]
    for chosen in (True, False):
        page.act("select", {"element": field.ref, "option": field.options[0]})
        (now,) = [one for one in page.elements if one.tag == "select"]
        assert (field.options[0] in now.chosen) is chosen
    page.close()


def test_a_page_that_runs_what_is_typed_is_no_task():
    with pytest.raises(ArgumentError, match="tasks must be some of"):
        MiniWoBEnv(tasks=["terminal"])


@pytest.mark.parametrize("reward", ["9", "NaN", "-1.01"])
def test_no_page_pays_what_miniwob_does_not(reward):
    page = Page("click-test", 1, "train")
    browser = page.loan.held
    browser.driver.execute_script(f"core.endEpisode({reward});")
    with pytest.raises(ToolFault, match="the page paid"):
        page.act("press", {"key": "Tab"})
    assert not browser.alive()


def test_a_page_that_does_not_load_is_a_fault_and_a_bug_of_ours_is_not(monkeypatch):
    from miniwob.selenium_instance import SeleniumInstance

    with monkeypatch.context() as patch:
        patch.setattr(SeleniumInstance, "RESET_BLOCK_MAX_ATTEMPT", 0)
        with pytest.raises(ToolFault, match="the page did not load: .*does not load properly"):
            Page("click-test", 1, "train")

    def bug(self):
        raise RuntimeError("a bug")

    page = Page("click-test", 1, "train")
    browser = page.loan.held
    monkeypatch.setattr(miniwob_page.Browser, "result", bug)
    with pytest.raises(RuntimeError, match="a bug"):
        page.act("press", {"key": "Tab"})
    assert not browser.alive()  # nobody knows what became of it


def test_a_browser_that_does_not_start_is_a_fault(monkeypatch):
    BROWSERS.clear()
    chromium, driver = miniwob_page.find_chromium()
    others = set(browsers(os.getpid()))
    for broken in (("/bin/false", driver), (chromium, "/bin/false")):
        monkeypatch.setattr(miniwob_page, "find_chromium", lambda broken=broken: broken)
        with pytest.raises(ToolFault, match="did not start"):
            Page("click-test", 1, "train")
    wait_for(lambda: set(browsers(os.getpid())) <= others)


def test_a_driver_that_cannot_be_started_leaves_no_folder(monkeypatch, tmp_path):
    BROWSERS.clear()
    chromium, _ = miniwob_page.find_chromium()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(miniwob_page, "find_chromium", lambda: (chromium, "/nowhere/driver"))
    begun = time.monotonic()
    with pytest.raises(ToolFault, match="did not start"):
        Page("click-test", 1, "train")
    assert not list(tmp_path.iterdir()) and time.monotonic() - begun < miniwob_page.REQUEST_TIMEOUT / 2


def test_a_guard_that_is_killed_at_its_start_harms_nobody(monkeypatch):
    """Before it has said which group of processes the browser is: 0 would be our own."""
    BROWSERS.clear()
    monkeypatch.setattr(miniwob_page, "GUARD", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setattr(os, "killpg", lambda *given: pytest.fail(f"killpg{given}"))
    with pytest.raises(ToolFault, match="chromedriver did not start"):
        Page("click-test", 1, "train")


def test_a_guard_that_cannot_start_is_a_fault_and_leaves_no_folder(monkeypatch, tmp_path):
    BROWSERS.clear()
    monkeypatch.setattr(miniwob_page.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(miniwob_page.sys, "executable", "/nowhere/python")
    with pytest.raises(ToolFault, match="the browser did not start"):
        Page("click-test", 1, "train")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGUSR1, signal.SIGSTOP])
def test_a_killed_guard_leaves_no_browser(how, monkeypatch):
    BROWSERS.clear()
    page = Page("click-test", 1, "train")
    monkeypatch.setattr(miniwob_page, "REQUEST_TIMEOUT", 2)  # so long it waits for a guard that is stopped
    browser = page.loan.held
    below = browsers(browser.process.pid)
    assert len(below) > 3
    browser.process.send_signal(how)
    if how != signal.SIGSTOP:
        browser.process.wait()
    browser.end()
    assert psutil.wait_procs(below, timeout=30)[1] == []
    wait_for(lambda: not os.path.exists(browser.folder))


def test_a_forked_child_holds_no_browser_back():
    BROWSERS.clear()
    page = Page("click-test", 1, "train")
    if not (child := os.fork()):
        time.sleep(60)
        os._exit(0)
    began = time.monotonic()
    browser = page.loan.held
    browser.end()
    assert time.monotonic() - began < 15 and not browser.alive()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
