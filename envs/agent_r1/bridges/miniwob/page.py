"""A page of MiniWoB++ in its own Chromium: its text, and the actions on it."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from agent_r1.bridges.bridge import check_version
from agent_r1.bridges.miniwob.elements import Element, elements
from agent_r1.bridges.pool import Pool
from agent_r1_tools import ToolFault, ToolResult

REQUEST_TIMEOUT = 20  # seconds, for a request to the browser
CALL_TIMEOUT = 120.0  # seconds, for a call including repeated earlier calls
MOST_IDLE = 4  # maximum number of idle browsers; each takes .2 to .3 GB
MOST_TEXT = 200  # maximum number of characters typed in one call
UNSAFE = ("terminal",)  # its page executes typed text: it sets innerHTML
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio",
    "--window-size=500,500", "--disable-extensions", "--disable-background-networking", "--disable-component-update",
    "--disable-crash-reporter", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
KEYS = (
    "Enter", "Tab", "Backspace", "Delete", "Escape", "Space", "ArrowLeft", "ArrowUp", "ArrowRight", "ArrowDown",
    "Home", "End", "PageUp", "PageDown", "Control+a",
)  # fmt: skip
"""The allowed keys. No key copies or cuts, because a clipboard outlives an episode."""

# The time of a page never runs out, because a policy is slower than a person. Animations jump to their end.
BEGIN = "core.EPISODE_MAX_TIME = 2147483647; if (window.jQuery) jQuery.fx.off = true;"
LOOK = """
const lists = {}, dom = core.getDOMInfo();
for (const [ref, element] of Object.entries(core.previousDOMInfo))
  if (element instanceof HTMLSelectElement)
    lists[ref] = {options: Array.from(element.options, one => one.text),
                  chosen: Array.from(element.selectedOptions, one => one.text)};
return {utterance: core.getUtterance(), dom: dom, lists: lists};
"""
SELECT = """
const list = core.previousDOMInfo[arguments[0]];
if (!(list instanceof HTMLSelectElement)) return false;
const option = Array.from(list.options).find(one => one.text.trim() === arguments[1]);
if (option === undefined) return false;
option.selected = !(list.multiple && option.selected);
for (const name of ["input", "change"]) list.dispatchEvent(new Event(name, {bubbles: true}));
return true;
"""

# A guard process between us and the browser: it ends the browser and removes its files after any end of this process.
# It reports the browser's process group, which we end if the guard itself was killed.
GUARD = """
import os, shutil, signal, subprocess, sys
folder, *command = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
browser = None
try:
    browser = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    print("group", browser.pid, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the browser alone holds it: where it ends, who reads knows
    sys.stdin.read()
finally:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if browser is not None:
        try:
            os.killpg(browser.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        browser.wait()
    for _ in range(50):  # its children write until they are gone
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
"""


class Page:
    """A running task of MiniWoB, in a browser that no one else uses meanwhile."""

    def __init__(self, name: str, seed: int, mode: str) -> None:
        self.loan = BROWSERS.lend()
        with self._browser() as browser:
            self.utterance, self.elements = browser.begin(name, seed, mode)

    def act(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Click, type, select or press, and return the new page. `data["reward"]` comes with its end."""
        said, ok = "", True
        with self._browser() as browser:
            if name == "press":
                browser.press(arguments["key"])
            else:
                ref = int(arguments["element"])
                if ref not in {element.ref for element in self.elements}:  # outer elements have numbers, too
                    ok = False
                elif name == "click":
                    ok = browser.click(ref)
                elif name == "select":
                    ok = browser.select(ref, " ".join(arguments["option"].split()))
                else:
                    text = arguments["text"]
                    if len(text) > MOST_TEXT or not text.isprintable() or max(text, default="") > "\uffff":
                        what = f"A text is one line of at most {MOST_TEXT} letters that a keyboard has."
                        return ToolResult(f"{what} Other keys are pressed.", ok=False)
                    ok = browser.click(ref)
                    if ok:
                        browser.type(text)
            if not ok:
                what = f"option {arguments['option'][:40]!r} at {ref}" if name == "select" else f"element {ref}"
                said = f"There is no {what}.\n"
            done, reward = browser.result()
            if done:
                return ToolResult("The task is over.", data={"reward": reward}, done=True)
            self.utterance, self.elements = browser.look()
        return ToolResult(f"{said}{self}", ok=ok)

    def __str__(self) -> str:
        return "\n".join(map(str, self.elements)) or "The page is empty."

    def close(self) -> None:
        self.loan.close()

    def _browser(self) -> contextlib.AbstractContextManager[Browser]:
        from selenium.common.exceptions import WebDriverException
        from urllib3.exceptions import HTTPError

        return self.loan.at_work(WebDriverException, HTTPError, OSError)


class Browser:
    """A headless Chromium with one page, driven by MiniWoB's own functions, and the processes that belong to it."""

    def __init__(self) -> None:
        chromium, chromedriver = find_chromium()
        from selenium import webdriver
        from selenium.webdriver.common.proxy import Proxy, ProxyType
        from selenium.webdriver.remote.client_config import ClientConfig

        self.folder, self.group = tempfile.mkdtemp(prefix="miniwob-"), 0
        guard = [sys.executable, "-I", "-S", "-c", GUARD, self.folder, chromedriver, "--port=0"]
        try:
            self.process = subprocess.Popen(
                guard, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "TMPDIR": self.folder, "HOME": self.folder},
            )  # fmt: skip
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise ToolFault(f"the browser did not start: {error!r:.300}") from error
        try:
            address = f"http://127.0.0.1:{self._port()}"
            options = webdriver.ChromeOptions()
            options.binary_location = chromium
            for flag in (*FLAGS, f"--user-data-dir={self.folder}/user"):
                options.add_argument(flag)
            options.set_capability("unhandledPromptBehavior", "dismiss")
            direct = Proxy({"proxyType": ProxyType.DIRECT})  # whatever the environment says
            config = ClientConfig(remote_server_addr=address, proxy=direct, timeout=REQUEST_TIMEOUT)
            self.driver: Any = webdriver.Remote(address, options=options, client_config=config)
            self.driver.set_script_timeout(REQUEST_TIMEOUT / 2)
            self.driver.set_page_load_timeout(REQUEST_TIMEOUT / 2)
        except BaseException as error:
            self.end()
            if isinstance(error, Exception):  # too little memory, a version that doesn't fit, ...
                raise ToolFault(f"the browser did not start: {error!r:.300}") from error
            raise

    def begin(self, name: str, seed: int, mode: str) -> tuple[str, list[Element]]:
        """Load a task, and return the instruction and the page."""
        from miniwob.selenium_instance import SeleniumInstance

        task = SeleniumInstance(0, name, headless=True, data_mode=mode, field_extractor=lambda asked: [])
        task.driver = self.driver
        self.driver.get(task.url)
        self.driver.execute_script(BEGIN)
        try:
            task.begin_task(seed)
        except RuntimeError as error:  # miniwob has no own class for it
            raise ToolFault(f"the page did not load: {error!r:.300}") from error
        self.task = task
        return self.look()

    def result(self) -> tuple[bool, float]:
        """Return whether the task is over, and its reward. Raises ToolFault for a reward outside -1 to 1."""
        metadata = self.task.get_metadata()
        reward = metadata["raw_reward"]
        if not isinstance(reward, int | float) or not -1 <= reward <= 1:
            raise ToolFault(f"the page paid {reward!r:.60}")
        return bool(metadata["done"]), float(reward)

    def look(self) -> tuple[str, list[Element]]:
        """Return the instruction and the page."""
        page = self.driver.execute_script(LOOK)
        asked = page["utterance"]
        asked = asked["utterance"] if isinstance(asked, dict) else asked
        return asked, list(elements(page["dom"], page["lists"]))

    def click(self, ref: int) -> bool:
        """Click on an element of the last view. Return whether it exists."""
        return self.driver.execute_script("return core.elementClick(arguments[0]);", ref) is True

    def select(self, ref: int, option: str) -> bool:
        """Choose from a list. Return whether the option exists."""
        return bool(self.driver.execute_script(SELECT, ref, option))

    def type(self, text: str) -> None:
        """Type into the focused element."""
        from miniwob.selenium_actions import execute_type_text

        execute_type_text(text, self.driver)

    def press(self, key: str) -> None:
        """Press one of `KEYS`."""
        from miniwob.selenium_actions import execute_press_key

        execute_press_key(key.replace("Control+", "C-") if "+" in key else f"<{key}>", self.driver)

    def alive(self) -> bool:
        """Return True if its guard runs."""
        return self.process.poll() is None

    def end(self) -> None:
        """Kill it in any state."""
        self.process.terminate()  # the guard does it; a forked child may hold its stdin open
        try:
            self.process.wait(REQUEST_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.returncode != 0:  # the guard was killed
            if self.group:  # 0 until the guard has reported it; group 0 would be our own
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.group, signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.stdout.close()  # type: ignore[union-attr]

    def _port(self) -> int:
        """Return the port that chromedriver reports."""
        pipe, output = self.process.stdout, b""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)  # type: ignore[arg-type]
            deadline = time.monotonic() + REQUEST_TIMEOUT
            while (left := deadline - time.monotonic()) > 0 and selector.select(left):
                more = os.read(pipe.fileno(), 4096)  # type: ignore[union-attr]
                output += more
                if group := re.search(rb"^group (\d+)\n", output, re.MULTILINE):
                    self.group = int(group[1])
                port = re.search(rb"successfully on port (\d+)", output)
                if port and self.group:
                    return int(port[1])
                if not more:
                    break
        raise ToolFault(f"chromedriver did not start: {output.decode(errors='replace')[-300:]!r}")


BROWSERS = Pool(Browser, MOST_IDLE)


@cache
def find_chromium() -> tuple[str, str]:
    """Return the paths of browser and driver. Raises ImportError if they or the packages are missing, or do not run."""
    try:
        import miniwob  # noqa: F401
        import selenium  # noqa: F401
    except ImportError as error:
        raise ImportError(f'MiniWoB needs miniwob ({error}): pip install "agent-r1[miniwob]"') from error
    check_version("miniwob", "1.1")
    check_version("selenium", "4")
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = os.environ.get("MINIWOB_CHROME_BINARY") or next(filter(None, map(shutil.which, names)), None)
    driver = os.environ.get("MINIWOB_CHROMEDRIVER") or shutil.which("chromedriver")
    needed = (
        'MiniWoB needs Chromium and chromedriver, beside pip install "agent-r1[miniwob]": apt-get install chromium '
        "chromium-driver, or MINIWOB_CHROME_BINARY and MINIWOB_CHROMEDRIVER with their paths"
    )
    if browser is None or driver is None:
        raise ImportError(needed)
    for program in (browser, driver):
        try:
            subprocess.run([program, "--version"], check=True, capture_output=True, timeout=REQUEST_TIMEOUT)
        except subprocess.TimeoutExpired:
            pass  # on a busy machine; starting it reports the error
        except (OSError, subprocess.CalledProcessError) as error:
            said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
            raise ImportError(f"{needed}; {program} --version doesn't run: {said[-200:] or error}") from error
    return browser, driver


@cache
def task_names() -> tuple[str, ...]:
    """Return MiniWoB's tasks whose pages are files, except `UNSAFE`."""
    find_chromium()
    from miniwob.selenium_instance import HTML_DIR

    return tuple(sorted(path.stem for path in Path(HTML_DIR, "miniwob").glob("*.html") if path.stem not in UNSAFE))
