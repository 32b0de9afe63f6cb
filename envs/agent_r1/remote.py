"""AgentR1/Remote-v0: an environment on another machine (`python -m agent_r1.serve`); docs/server.md has a program.

    env = gym.make("AgentR1/Remote-v0", url="http://10.0.0.7:8080", env_id="AgentR1/MultihopWorld-v0")

It is a `ToolEnv`, so learners, wrappers and `gym.make_vec` take it. A turn is one request, which a vector environment
makes in a thread. Tokens, rewards, flags, infos and messages are those of the environment on the server.
"""

from __future__ import annotations

import atexit
import copy
import itertools
import json
import os
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

import numpy as np

from agent_r1.arguments import ArgumentError
from agent_r1.dialects import Call
from agent_r1.episode import Episode, OpenTurn, PendingCall, Task, Tokens
from agent_r1.faults import fault_line
from agent_r1.remote_answers import (
    ANSWER_BYTES,
    FORMS,
    check_prompt,
    check_session,
    check_turn,
    problem_of,
    read_json,
    size_problem,
)  # fmt: skip
from agent_r1.text.tokenizers import fingerprint, load_tokenizer
from agent_r1.tool_env import Step, ToolEnv
from agent_r1_tools import Tool, ToolFault, ToolResult
from agent_r1_tools.text import clean_text, printable

if TYPE_CHECKING:
    from agent_r1_tools.exchange import Exchange

TOKEN_VARIABLE = "AGENT_R1_SERVER_TOKEN"
CHOSEN = ("max_turns", "max_context_tokens", "max_action_tokens", "unfinished_reward")
"""The arguments whose values the server tells, defaults included."""
LEAVE_SECONDS = 5.0
"""The time for closing a session, and at the end of the program for closing all."""
OTHER = "the server's answer cannot be used"
DETAIL_CHARS = 2000
"""The most that is quoted of a server's explanation, as much as our servers write."""
GONE = "the server has no such session any more: it was restarted, or the session was idle for too long"


class Unreachable(ToolFault):
    """A server that gives no answer, or one that cannot be used. `ran` is True if asking again would not help."""


class _Turn(Tool):
    """The request of a turn, as a tool: so a vector environment makes it in a thread."""

    concurrency_safe = False  # one session
    repeatable = False  # `_act` repeats it

    def __init__(self, env: RemoteEnv, timeout: float) -> None:
        self.name, self.description = "turn", "Send a turn to the server."
        self.parameters = {"type": "object", "properties": {}}
        self.timeout, self.timeout_is_fault = timeout + 5.0, True
        self._env = weakref.proxy(env)  # an environment that is dropped is collected at once

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        """Send the last span. A server that is gone, or has lost the session, is a fault.

        The data is the answer, or the ValueError or RuntimeError of the environment, which the step raises.
        """
        try:
            return ToolResult("", data=self._env._send_turn())
        except (ValueError, RuntimeError) as error:
            return ToolResult("", data=error)


class RemoteEnv(ToolEnv):
    """An environment that runs on a server. Further arguments are those of `ToolEnv` in
    `agent_r1.server.sessions.ALLOWED`.

    Args:
        url: the address of a server, or a list of them (or one text with commas): an environment takes the server with
            the most free sessions, and another one if its server is gone when an episode begins.
        env_id: one of the ids that the server has.
        token: what the server wants; None: the value of AGENT_R1_SERVER_TOKEN.
        timeout: seconds that a request may take, a turn with all its tools for example.
        tokenizer: as in `ToolEnv`. The server must have an equal one.

    Snapshots are kept by the server, and continue there only: the environment moves to it. A server that is gone is an
    infrastructure error of its episodes. A bug of the environment there is a RuntimeError here. Raises ArgumentError if
    no server answers, or if it rejects the arguments.
    """

    _local: ClassVar[tuple[str, ...]] = ("fault_deadline", "strict", "render_mode")

    def __init__(
        self,
        url: str | Sequence[str] = "http://127.0.0.1:8080",
        env_id: str = "AgentR1/MultihopWorld-v0",
        *,
        token: str | None = None,
        timeout: float = 600.0,
        tokenizer: Any = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.urls = _urls(url)
        self.env_id, self._timeout = env_id, timeout
        self._exchange = _exchange(token, timeout)
        tokenizer = load_tokenizer(tokenizer, chat_template)
        local = {name: kwargs.pop(name) for name in self._local if name in kwargs}
        self._fingerprint, self._kwargs = fingerprint(tokenizer), kwargs
        self._session: str | None = None
        self._leave: Callable[[], Future[Any] | None] | None = None  # closes the session
        self._about: dict[str, Any] = {}
        self.url = self._avoided = ""  # the server, and one whose answers could not be used
        try:
            self._open_session()
        except ToolFault as fault:
            raise ArgumentError(str(fault)) from None
        about = self._about
        self.splits = about["splits"]  # type: ignore[misc]
        self._shown: list[dict[str, Any]] = about["schemas"]
        try:
            super().__init__(
                tokenizer=tokenizer, dialect=about["dialect"], split=about["split"],
                **{name: about[name] for name in CHOSEN}, **local,
            )  # fmt: skip
        except BaseException:
            self._leave_session()
            raise
        self._turn_tool = _Turn(self, timeout)
        self._asked: tuple[int | None, Any] = (None, None)
        self._beyond: list[int] = []  # tokens of the last span without room: the server cuts it, too

    @classmethod
    def has_split(cls, split: str, **kwargs: Any) -> bool:
        """Return whether the server's environment has this split. Raises ArgumentError if no server answers."""
        if split in server_task_counts(**kwargs):
            return True
        server = {name: kwargs[name] for name in ("url", "env_id", "token", "timeout") if name in kwargs}
        try:
            cls(**server, split=split).close()  # another name of a split
        except ArgumentError:
            return False
        return True

    @property
    def num_tasks(self) -> int:
        """The number of tasks of the split on the server."""
        return int(self._about["num_tasks"])

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as the prompt shows them. They run on the server, so `tools` is empty here."""
        return self._shown

    # ------------------------------------------------------------------ gymnasium

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tokens, dict[str, Any]]:
        """Begin an episode on the server; see `ToolEnv.reset`."""
        self._asked = (seed, (options or {}).get("task_index"))
        _, info = super().reset(seed=seed, options=options)
        return self._observation(), self._first_info | info if self.episode.fault else self._first_info

    def _begin(self, index: int, max_turns: int) -> None:
        """Begin the episode: with the seed and the task that the caller gave, so that the server draws as we would."""
        seed, asked = self._asked
        self._task, self._first_info = None, {}
        body = {"seed": seed, "task_index": None if asked is None else index, "max_turns": max_turns}
        most, span = self.max_context_tokens, self.max_action_tokens
        for another in (True, False):
            if self._session is None:
                self._open_session()
            try:
                begun = self._act("reset", lambda got: check_prompt(got, len(self.tokenizer), most, span), **body)
                break
            except ToolFault as fault:
                if self._session is not None:  # the environment there faulted
                    raise
                if not another:
                    raise ToolFault(str(fault), ran=False) from None
        tokens = np.array(begun["tokens"], np.int32)
        self._task = Task(begun["info"]["task_id"], begun["question"], [], instructions=begun["instructions"])
        self._episode = Episode(begun["task_index"], begun["max_turns"], np.empty(2 * len(tokens), np.int32))
        self._episode.append(tokens)
        self._episode.messages, self._shown = begun["messages"], begun["schemas"]
        self._first_info = begun["info"]

    def _begin_turn(self, span: Tokens) -> OpenTurn:
        """Append a span. The server reads it."""
        episode, room = self.episode, self.room
        episode.turns.append((episode.length, episode.length + len(span[:room])))
        episode.append(span[:room])
        self._beyond = span[room:].tolist()
        episode.turn += 1
        if episode.fault is not None:
            return OpenTurn(fault=episode.fault)
        return OpenTurn(calls=[PendingCall(Call("turn", {}), self._turn_tool)])

    def _send_turn(self) -> dict[str, Any]:
        """Send the last span and return the server's answer. Raises as `_act` does."""
        episode, (start, end) = self.episode, self.episode.turns[-1]
        room, span, size = self.max_context_tokens - end, self.max_action_tokens, len(self.tokenizer)
        tokens = episode.buffer[start:end].tolist() + self._beyond
        answer: dict[str, Any] = self._act(
            "step", lambda got: check_turn(got, size, room, span, episode.turn, end - start), tokens=tokens
        )
        return answer

    def _try_turn(self, turn: OpenTurn, results: Sequence[ToolResult]) -> Step:
        """Take over the server's answer."""
        episode = self.episode
        fault = turn.fault or (fault_line("server", results[0].fault) if results and results[0].fault else None)
        if fault is not None:
            start, end = episode.turns[-1]
            text = self.tokenizer.decode(episode.buffer[start:end].tolist())
            episode.messages.append({"role": "assistant", "content": text})
            return super()._try_turn(OpenTurn(fault=fault), [])
        if isinstance(results[0].data, Exception):
            raise results[0].data
        answer: dict[str, Any] = results[0].data
        info = answer["info"]
        episode.append(answer["new"])
        episode.messages += answer["messages"]
        episode.rewards.append(info["reward_terms"])
        episode.tool_calls.append(info["tool_calls"])
        episode.over = answer["terminated"] or answer["truncated"]
        self._shown = answer["schemas"]
        return self._observation(), answer["reward"], answer["terminated"], answer["truncated"], info

    def cut_off(self) -> dict[str, Any]:
        """Return the final info entries of an episode that something else cuts off."""
        try:
            found: dict[str, Any] = self._act("cut_off")
        except ToolFault:
            return {"is_success": False, "answer": None, "metrics": {}}
        return found

    def get_state(self) -> dict[str, Any]:
        """Return a snapshot. Environments of the same arguments can continue from it while the server keeps it."""
        if len(self.episode.turns) > len(self.episode.rewards):
            raise RuntimeError("get_state() in the middle of a turn; call it after the turn has its results")
        kept = self._act("snapshot")["snapshot"]
        episode = copy.deepcopy(self.episode)
        return {"url": self.url, "snapshot": kept, "episode": episode, "task": self._task, "schemas": self._shown}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a snapshot, at the server that keeps it.

        Raises ToolFault if that server is gone, is full or has dropped the snapshot, and ValueError for a snapshot of
        an environment with other arguments.
        """
        url = state["url"]
        if url not in self.urls:
            raise ValueError(f"the snapshot is kept by {url}, this environment has {', '.join(self.urls)}")
        if self._session is None or url != self.url:
            self._leave_session()
            if (problem := self._open_at(url)) is not None:
                raise ToolFault(f"{url}, which keeps the snapshot, has no session for us: {problem}", ran=False)
        self._act("restore", snapshot=state["snapshot"])
        self._episode, self._task = copy.deepcopy(state["episode"]), state["task"]
        self._shown = state["schemas"]

    def close(self) -> None:
        """Close the session on the server."""
        left = self._leave_session()
        if left is not None:
            with suppress(Exception):  # the server closes idle sessions itself
                left.result(LEAVE_SECONDS)
        self._exchange.close()
        super().close()

    # ------------------------------------------------------------------ the server

    def _open_session(self) -> None:
        """Open a session at the server with the most free ones. One whose answers could not be used comes last.

        A server that gives no session is skipped with a warning. Raises ToolFault if there is no other.
        """
        free: list[tuple[bool, int, int, str]] = []
        skipped: list[str] = []
        full: list[str] = []
        for url in self.urls:
            try:
                health = _request(self._exchange, "GET", f"{url}/health", "health", seconds=10.0)
            except (ToolFault, ArgumentError) as error:
                skipped.append(f"{url}: {error}")
                continue
            used, bound = health["sessions"], health["max_sessions"]
            if used < bound:
                free.append((url == self._avoided, used - bound, len(free), url))
            else:
                full.append(f"{url}: all {bound} sessions are in use")
        for *_, url in sorted(free):
            problem = self._open_at(url)
            if problem is None:
                for line in skipped:
                    warnings.warn(f"a server was skipped: {line}", RuntimeWarning, stacklevel=2)
                return
            skipped.append(f"{url}: {problem}")
        problems = "; ".join([*skipped, *full])
        remedy = f"start one with python -m agent_r1.serve {self.env_id}{' --max-sessions N' if full else ''}"
        raise ToolFault(f"no environment server has a session for us: {problems}; {remedy}", ran=False)

    def _open_at(self, url: str) -> str | None:
        """Open a session at a server; return None, or why that is not possible."""
        body = {"env_id": self.env_id, "kwargs": self._kwargs, "tokenizer": self._fingerprint}
        try:
            about = _request(self._exchange, "POST", f"{url}/sessions", "opened", body)
        except (ToolFault, ArgumentError) as error:
            return str(error)
        self.url, self._session, self._number = url, about["session"], 0
        address, pid = f"{url}/sessions/{self._session}", os.getpid()
        _open_sessions[address] = pid, self._exchange.headers
        self._leave = leave = weakref.finalize(self, _leave, self._exchange, address, pid)
        leave.atexit = False  # see `_leave_all`
        problem = problem_of(about, FORMS["sessions"]) or check_session(about)  # a session to close in any case
        before = self._about or about
        if problem is not None:
            problem = f"{OTHER}: {problem}"
        elif any(about.get(name) != before[name] for name in before.keys() - {"session", "schemas"}):
            problem = f"it has another {self.env_id} than the server before; start both alike"
        else:
            self._about = about
            return None
        self._leave_session()
        return problem

    def _leave_session(self) -> Future[Any] | None:
        """Begin to close the session, if there is one."""
        leave, self._leave, self._session = self._leave, None, None
        return None if leave is None else leave()

    def _act(self, what: str, problem_in: Callable[[Any], str | None] | None = None, **body: Any) -> Any:
        """Make a request that the server acts on once, however often it is sent, and return the answer.

        A request without an answer is sent again for `fault_deadline` seconds, and a reset once. After that the session
        is left. Raises ToolFault then, or if the environment there faulted, and ValueError and RuntimeError as the
        environment raises them.

        Args:
            what: the end of the route, which is the name of the answer's form.
            problem_in: a function that returns why an answer cannot be used, or None.
            body: the request.
        """
        self._number += 1
        body["number"] = self._number
        end = time.monotonic() + min(self.fault_deadline, self._timeout)
        for attempt in itertools.count(1):
            try:
                if self._session is None:
                    raise Unreachable(GONE, ran=True)
                address = f"{self.url}/sessions/{self._session}/{what}"
                answer = _request(self._exchange, "POST", address, what, body)
                problem = problem_in(answer) if problem_in is not None else None
                if problem is None:
                    return answer
                raise Unreachable(f"{OTHER}: {problem}", ran=True)
            except Unreachable as error:
                if error.ran or (attempt > 1 if what == "reset" else time.monotonic() > end):
                    self._leave_session()  # the next episode has another one
                    self._avoided = "" if error.args == (GONE,) else self.url
                    raise ToolFault(f"{self.url}: {error}", ran=True) from None
                time.sleep(0.2)


_open_sessions: dict[str, tuple[int, dict[str, str]]] = {}  # address -> the process that opened it, and its headers


def _leave(exchange: Exchange, address: str, pid: int) -> Future[Any] | None:
    """Begin to close a session. It does not wait, because the garbage collector may call it in any thread."""
    if os.getpid() != pid:  # a fork: the session is its parent's
        return None
    asked = exchange.start("DELETE", address, b"", ANSWER_BYTES, LEAVE_SECONDS)
    asked.add_done_callback(lambda _: _open_sessions.pop(address, None))  # the program may end before
    return asked


@atexit.register
def _leave_all() -> None:
    """Close the sessions of environments that are still open when the program ends, where no thread can be started."""
    mine = [(address, headers) for address, (pid, headers) in list(_open_sessions.items()) if pid == os.getpid()]
    if mine:
        from agent_r1_tools.exchange import send_at_exit

        send_at_exit("DELETE", mine, LEAVE_SECONDS)


def server_task_counts(
    url: str | Sequence[str] = "http://127.0.0.1:8080",
    env_id: str = "AgentR1/MultihopWorld-v0",
    *,
    token: str | None = None,
    timeout: float = 600.0,
    **others: Any,
) -> dict[str, int]:
    """Return the number of tasks of each split of an environment on a server, the first one that answers.

    The arguments are those of `RemoteEnv`; `others` change nothing. Raises ArgumentError if no server answers.
    """
    problems = []
    exchange = _exchange(token, timeout)
    try:
        for one in _urls(url):
            try:
                address = f"{one}/splits?env_id={quote(env_id, safe='')}"
                return dict(_request(exchange, "GET", address, "splits")["splits"])
            except (ToolFault, ArgumentError) as error:
                problems.append(f"{one}: {error}")
    finally:
        exchange.close()
    remedy = f"start one with python -m agent_r1.serve {env_id}"
    raise ArgumentError(f"no environment server tells its splits: {'; '.join(problems)}; {remedy}")


def _urls(url: str | Sequence[str]) -> list[str]:
    from agent_r1_tools.exchange import is_address

    urls = url.split(",") if isinstance(url, str) else list(url)
    urls = [one.strip().rstrip("/") for one in urls if one.strip()]
    if not urls or not all(map(is_address, urls)):
        raise ArgumentError(f"url must be http://HOST:PORT of python -m agent_r1.serve, or a list of them, got {url!r}")
    return urls


def read_token(token: str) -> str:
    """Return a token without white space around it.

    Raises ArgumentError for one that no header can carry. The message does not quote it.
    """
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise ArgumentError("the token must consist of printable ASCII characters, which a header can carry")
    return token


def _exchange(token: str | None, timeout: float) -> Exchange:
    from agent_r1_tools.exchange import Exchange

    token = read_token(token if token is not None else os.environ.get(TOKEN_VARIABLE, ""))
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return Exchange(timeout, headers, connect_seconds=5.0, trust_env=False)


def _request(
    exchange: Exchange, method: str, url: str, form: str, body: Any = None, seconds: float | None = None
) -> dict[str, Any]:
    """Return the answer of a request, which has the form of this name (see `FORMS`).

    Raises Unreachable if there is no answer, if it cannot be read, or if the session is gone; ToolFault if the
    environment there faulted; ArgumentError for what the server does not serve; and ValueError and RuntimeError as the
    environment raises them.
    """
    from agent_r1_tools.exchange import ExchangeError

    sent = b"" if body is None else json.dumps(body).encode()
    try:
        status, coding, content = exchange.send(method, url, sent, ANSWER_BYTES, seconds)
    except ExchangeError as error:
        raise Unreachable(_quoted(str(error))) from None
    if coding != "identity":
        raise Unreachable(f"{OTHER}: it is encoded as {coding!r:.40}, which nobody asked for")
    if (problem := size_problem(content)) is not None:
        raise Unreachable(f"{OTHER}: {problem}", ran=True)
    answer = read_json(content)
    if 200 <= status < 300:
        if answer is None:
            raise Unreachable(f"{OTHER}: it is no JSON, but {content[:100]!r}")
        if (problem := problem_of(answer, FORMS[form])) is not None:
            raise Unreachable(f"{OTHER}: {problem}", ran=True)
        return dict(answer)
    detail = answer.get("detail") if isinstance(answer, dict) else None
    if isinstance(detail, str):
        _raise_detail(status, _quoted(detail), "/sessions/" in url)
    if status == 503 and isinstance(detail, dict) and isinstance(detail.get("fault"), str):
        raise ToolFault(_quoted(detail["fault"]), ran=True)  # the server has tried again for long enough
    said = detail if isinstance(detail, str) else content[:200].decode(errors="replace")
    raise Unreachable(f"status {status}: {_quoted(said)}")


def _quoted(text: str) -> str:
    """Return the printable beginning of a text."""
    return clean_text(printable(text), DETAIL_CHARS)


def _raise_detail(status: int, detail: str, of_session: bool) -> None:
    """Raise the error that a server explains, except for a status that says nothing about the request."""
    if of_session and status == 404:
        raise Unreachable(GONE, ran=True)
    if of_session and status in (409, 500):  # 500: a bug of the environment, which would end a local program too
        raise RuntimeError(detail)
    if of_session and status == 422:
        raise ValueError(detail)
    if of_session and status in (410, 413):  # a lost snapshot, one that is too large
        raise ToolFault(detail, ran=True)
    if not of_session and status in (401, 403, 404, 422):
        raise ArgumentError(f"status {status}: {detail}")
