"""AgentR1/Remote-v0: an environment on another machine (`python -m agent_r1.serve`); docs/server.md has a program.

    env = gym.make("AgentR1/Remote-v0", url="http://10.0.0.7:8080", env_id="AgentR1/MultihopWorld-v0")

It is a `ToolEnv`, so learners, wrappers and `gym.make_vec` take it. A turn is one request, which a vector environment
makes in a thread. Tokens, rewards, flags, infos and messages are those of the environment on the server.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from agent_r1.arguments import ArgumentError
from agent_r1.dialects import Call
from agent_r1.episode import Episode, OpenTurn, PendingCall, Task, Tokens
from agent_r1.faults import fault_line
from agent_r1.text.tokenizers import fingerprint, load_tokenizer
from agent_r1.tool_env import Step, ToolEnv
from agent_r1_tools import Tool, ToolFault, ToolResult

TOKEN_VARIABLE = "AGENT_R1_SERVER_TOKEN"
CHOSEN = ("max_turns", "max_context_tokens", "max_action_tokens", "unfinished_reward")
"""The arguments whose values the server tells, defaults included."""
GONE = "the server has no such session any more: it was restarted, or the session was idle for too long"


class Unreachable(ToolFault):
    """A server that does not answer. `ran` is True if it has lost the session, so that no answer can come."""


class _Turn(Tool):
    """The request of a turn, as a tool: so a vector environment makes it in a thread."""

    concurrency_safe = False  # one session
    repeatable = False  # `_act` repeats it

    def __init__(self, env: RemoteEnv, timeout: float) -> None:
        self.name, self.description = "turn", "Send a turn to the server."
        self.parameters = {"type": "object", "properties": {}}
        self.timeout, self.timeout_is_fault = timeout + 5.0, True
        self._env = env

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        """Send the last span. A server that is gone, or has lost the session, is a fault."""
        start, end = self._env.episode.turns[-1]
        tokens = self._env.episode.buffer[start:end].tolist() + self._env._beyond
        return ToolResult("", data=self._env._act("step", tokens=tokens))


class RemoteEnv(ToolEnv):
    """An environment that runs on a server. Further arguments are those of `ToolEnv` that `serve.ALLOWED` names.

    Args:
        url: the address of a server, or a list of them (or one text with commas): an environment takes the server with
            the most free sessions, and another one if its server is gone when an episode begins.
        env_id: one of the ids that the server has.
        token: what the server wants; None: the value of AGENT_R1_SERVER_TOKEN.
        timeout: seconds that a request may take, a turn with all its tools for example.
        tokenizer: as in `ToolEnv`. The server must have an equal one.

    Snapshots are kept by the server, and continue there only. A server that is gone is an infrastructure error of its
    episodes. Raises ArgumentError if no server answers, or if it rejects the arguments.
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
        self._token = token if token is not None else os.environ.get(TOKEN_VARIABLE)
        tokenizer = load_tokenizer(tokenizer, chat_template)
        local = {name: kwargs.pop(name) for name in self._local if name in kwargs}
        self._fingerprint, self._kwargs = fingerprint(tokenizer), kwargs
        self._client: Any = None
        self._session: str | None = None
        self.url = ""
        try:
            about = self._open_session()
        except ToolFault as fault:
            raise ArgumentError(str(fault)) from None
        self._about = about
        self.splits = about["splits"]  # type: ignore[misc]
        self._shown: list[dict[str, Any]] = about["schemas"]
        super().__init__(
            tokenizer=tokenizer, dialect=about["dialect"], split=about["split"],
            **{name: about[name] for name in CHOSEN}, **local,
        )  # fmt: skip
        self._turn_tool = _Turn(self, timeout)
        self._number = 0
        self._asked: tuple[int | None, Any] = (None, None)
        self._beyond: list[int] = []  # tokens of the last span without room: the server cuts it, too

    @classmethod
    def has_split(cls, split: str, **kwargs: Any) -> bool:
        """Return whether the server's environment has this split."""
        token = kwargs.get("token") or os.environ.get(TOKEN_VARIABLE)
        for url in _urls(kwargs.get("url", "http://127.0.0.1:8080")):
            try:
                env_id = kwargs.get("env_id", "AgentR1/MultihopWorld-v0")
                return split in _request(_client(token, 60.0), "GET", f"{url}/splits?env_id={env_id}")["splits"]
            except (ToolFault, ArgumentError):
                continue
        return False

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
        try:
            if self._session is None:
                self._reopen()
            begun = self._act("reset", patient=False, **body)
        except Unreachable:
            self._reopen()
            begun = self._act("reset", patient=False, **body)
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

    def _try_turn(self, turn: OpenTurn, results: Sequence[ToolResult]) -> Step:
        """Take over the server's answer."""
        episode = self.episode
        fault = turn.fault or (fault_line("server", results[0].fault) if results and results[0].fault else None)
        if fault is not None:
            start, end = episode.turns[-1]
            text = self.tokenizer.decode(episode.buffer[start:end].tolist())
            episode.messages.append({"role": "assistant", "content": text})
            return super()._try_turn(OpenTurn(fault=fault), [])
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
        """Return a snapshot, which any environment of the same arguments at the same server can continue from."""
        if len(self.episode.turns) > len(self.episode.rewards):
            raise RuntimeError("get_state() in the middle of a turn; call it after the turn has its results")
        kept = self._act("snapshot")["snapshot"]
        return {"url": self.url, "snapshot": kept, "episode": copy.deepcopy(self.episode), "task": self._task}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a snapshot. Raises ValueError for one that this server does not have."""
        if state["url"] != self.url:
            raise ValueError(f"the snapshot is kept by {state['url']}, this environment is at {self.url}")
        if self._session is None:
            self._reopen()
        self._act("restore", snapshot=state["snapshot"])
        self._episode, self._task = copy.deepcopy(state["episode"]), state["task"]

    def close(self) -> None:
        """Close the session on the server."""
        session, self._session = self._session, None
        if session is not None:
            try:
                _request(self._client, "DELETE", f"{self.url}/sessions/{session}", seconds=5.0)
            except (ToolFault, ArgumentError, ValueError):
                pass  # it closes idle sessions itself
        if self._client is not None:
            self._client.close()
            self._client = None
        super().close()

    # ------------------------------------------------------------------ the server

    def _open_session(self) -> dict[str, Any]:
        """Open a session at the server with the most free ones. Raises ToolFault if none answers."""
        if self._client is None:
            self._client = _client(self._token, self._timeout)
        free: list[tuple[int, int, str]] = []
        problems: list[str] = []
        for url in self.urls:
            try:
                health = _request(self._client, "GET", f"{url}/health", seconds=10.0)
                free.append((health["sessions"] - health["max_sessions"], len(free), url))
            except ToolFault as fault:
                problems.append(f"{url}: {fault}")
        body = {"env_id": self.env_id, "kwargs": self._kwargs, "tokenizer": self._fingerprint}
        for _, _, url in sorted(free):
            try:
                about: dict[str, Any] = _request(self._client, "POST", f"{url}/sessions", body)
            except ToolFault as fault:  # full since then
                problems.append(f"{url}: {fault}")
                continue
            self.url, self._session = url, about["session"]
            return about
        raise ToolFault(f"no environment server has a session for us: {'; '.join(problems)}", ran=False)

    def _reopen(self) -> None:
        """Open a session again, after the server lost it or was lost."""
        self._session = None
        about = self._open_session()
        if any(about[name] != self._about[name] for name in about.keys() - {"session", "schemas"}):
            raise ArgumentError(f"{self.url} has another {self.env_id} than the server before; start both alike")
        self._number = 0

    def _act(self, what: str, patient: bool = True, **body: Any) -> Any:
        """Make a request that the server acts on once, however often it is sent.

        Raises ToolFault if the server is gone (Unreachable at the first attempt, if not `patient`) or the environment
        there faulted, and ValueError and RuntimeError as the environment raises them.
        """
        self._number += 1
        body["number"] = self._number
        end = time.monotonic() + min(self.fault_deadline, self._timeout)
        while True:
            try:
                if self._session is None:
                    raise Unreachable(GONE, ran=True)
                return _request(self._client, "POST", f"{self.url}/sessions/{self._session}/{what}", body)
            except Unreachable as error:
                if not patient:
                    raise
                if error.ran or time.monotonic() > end:
                    self._session = None  # the next episode has another one
                    raise ToolFault(f"{self.url}: {error}", ran=True) from None
                time.sleep(0.2)


def _urls(url: str | Sequence[str]) -> list[str]:
    urls = url.split(",") if isinstance(url, str) else list(url)
    urls = [one.strip().rstrip("/") for one in urls if one.strip()]
    if not urls or not all(one.startswith(("http://", "https://")) for one in urls):
        raise ArgumentError(f"url must be http://HOST:PORT of python -m agent_r1.serve, or a list of them, got {url!r}")
    return urls


def _client(token: str | None, timeout: float) -> Any:
    try:
        import httpx
    except ImportError as error:
        raise ImportError(f'{error}: AgentR1/Remote-v0 needs pip install "agent-r1[http]"') from error
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(headers=headers, timeout=httpx.Timeout(timeout, connect=5.0), trust_env=False)


def _request(client: Any, method: str, url: str, body: Any = None, seconds: float | None = None) -> Any:
    """Return the answer of a request.

    Raises Unreachable if the server or the session is gone, ToolFault if the environment there faulted, ArgumentError
    for what the server does not serve, and ValueError and RuntimeError as the environment raises them.
    """
    import httpx

    extra = {} if seconds is None else {"timeout": seconds}
    try:
        response = client.request(method, url, json=body, **extra)
    except httpx.TransportError as error:
        raise Unreachable(f"{type(error).__name__}: {error}") from None
    status, of_session = response.status_code, "/sessions/" in url
    if status < 300:
        return response.json()
    try:
        detail: Any = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        detail = response.text[:300]
    if status == 404 and of_session:
        raise Unreachable(GONE, ran=True)
    if status in (429, 502, 503, 504) and not isinstance(detail, dict):
        raise Unreachable(f"status {status}: {detail}")
    if status in (500, 503):  # the server has tried again for long enough
        raise ToolFault(str(detail["fault"] if isinstance(detail, dict) else detail), ran=True)
    if status == 409:
        raise RuntimeError(detail)
    if of_session:
        raise ValueError(detail)
    raise ArgumentError(f"{url}: status {status}: {detail}")
