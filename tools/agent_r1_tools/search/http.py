"""A retriever in another process or on another machine, asked over HTTP."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from typing import Any, Literal

from agent_r1_tools.search.passages import Hit, QueryRefused, RetrievalError, passage_from_row
from agent_r1_tools.text import printable

MAX_QUERIES = 256
"""The most queries in one request; larger batches are sent in parts."""
MAX_PASSAGES = 2560
"""The most passages that one request asks for, its queries together; batches for which this is too few, too."""
CONTROL = ["test"]
"""The query that tells whether a server rejects one query or all of them."""
MAX_BACKOFF = 8.0
"""The longest pause between two attempts, in seconds."""
MAX_ANSWER_BYTES = 1 << 26
"""The longest answer that is read, whatever was asked; see `most_bytes`."""


class HTTPRetriever:
    """A client of a retrieval server.

    Two protocols are in use. "retrieve" is Search-R1's (`search_r1/search/retrieval_server.py`):

        POST /retrieve  {"queries": [...], "topk": 5, "return_scores": true}
        {"result": [[{"document": {"contents": "\\"Title\\"\\ntext"}, "score": 1.0}, ...], ...]}

    and "search" is Agent-R1's (`scripts/kilt_search_server/search_api.py`):

        POST /search  {"queries": [...], "top_k": 5}
        {"query_results": [{"query": ..., "results": [{"document": {"title": ..., "contents": ...}, "score": 1.0}]}]}

    `python -m agent_r1_tools.search.server` speaks both. A request that fails (no connection, too slow, status 429 or
    5xx) is repeated after a pause that doubles each time; one that still fails raises `RetrievalError` and adds one to
    `faults`. A query that gets no answer, nonsense, or any status but 200 and 429, while the server answers another
    one, raises `QueryRefused`; so do several queries, at once, because one among them may be to blame. Proxy settings
    of the environment are respected and never changed.

    At most `most_bytes` of an answer are read, as UTF-8. A compressed answer is not unpacked and counts as nonsense.
    Redirections are not followed, and cookies are not kept.

    Args:
        url: the server's address, such as "http://127.0.0.1:8000".
        protocol: "retrieve" or "search".
        request_timeout: seconds that one attempt may take, from connecting to the last byte of the answer.
        retries: attempts after the first one.
        backoff: seconds before the second attempt, of which a random half is left out, so that clients spread.
        check: ask the server once now, and raise `RetrievalError` if it doesn't answer as it should.
    """

    def __init__(
        self,
        url: str,
        protocol: Literal["retrieve", "search"] = "retrieve",
        *,
        request_timeout: float = 30.0,
        retries: int = 3,
        backoff: float = 0.5,
        check: bool = True,
    ) -> None:
        from agent_r1_tools.exchange import Exchange, is_address

        if not is_address(url):
            raise ValueError(f"{url!r} is not an address; write something like 'http://127.0.0.1:8000'")
        if protocol not in ("retrieve", "search"):
            raise ValueError(f"unknown protocol {protocol!r}; use 'retrieve' (Search-R1) or 'search' (Agent-R1)")
        self.url = url.rstrip("/").removesuffix(f"/{protocol}")
        self.protocol = protocol
        self.faults = 0
        self._pauses: list[float] = [min(MAX_BACKOFF, backoff * 2**attempt) for attempt in range(retries)]
        self._request_timeout = request_timeout
        self._lock = threading.Lock()
        self._random = random.Random()  # its own: a pause must not move the random numbers of a run
        self._exchange = Exchange(request_timeout)
        if check:
            self.check()

    @property
    def timeout(self) -> float:
        """Seconds after which all attempts at one request are over, with the control question and one more try."""
        return (len(self._pauses) + 3) * self._request_timeout + sum(self._pauses) + 1.0

    def check(self) -> None:
        """Ask the server for one passage, once.

        Raises:
            RetrievalError: there is no server, or it speaks another protocol.
        """
        try:
            self._ask(CONTROL, 1, pauses=[])
        except RetrievalError as error:
            start = "python -m agent_r1_tools.search.server --corpus FILE --port PORT"
            raise RetrievalError(f"{error}. Check the address and the protocol, or start a server: {start}") from error

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """Return at most `top_k` hits for each query, in the order of the server.

        Raises:
            RetrievalError: the server did not answer, or not as the protocol says.
            QueryRefused: it answers, but it does not take one of these queries.
        """
        size = min(MAX_QUERIES, max(1, MAX_PASSAGES // max(1, top_k)))
        parts = [queries[start : start + size] for start in range(0, len(queries), size)]
        try:
            return [hits for part in parts for hits in self._ask(part, top_k, self._pauses)]
        except RetrievalError:
            with self._lock:
                self.faults += 1
            raise

    def close(self) -> None:
        """Close the connections."""
        self._exchange.close()

    def _ask(self, queries: list[str], top_k: int, pauses: list[float]) -> list[list[Hit]]:
        one = len(queries) == 1
        for attempt, pause in enumerate([*pauses, None]):
            status, reply = self._attempt(queries, top_k)
            if isinstance(reply, list):
                return reply
            last = pause is None or (200 <= status < 500 and status != 429)  # asked again it would say the same
            doubt = last or (attempt == 0 and not one)
            if doubt and status != 429 and queries != CONTROL and self._takes_others():
                if one and not 400 <= status < 500:  # unless the server has just come back
                    _, again = self._attempt(queries, top_k)
                    if isinstance(again, list):
                        return again
                raise QueryRefused(f"{self._endpoint} refuses the query ({reply})")
            if last or pause is None:
                break
            time.sleep(pause * self._random.uniform(0.5, 1.0))
        raise RetrievalError(f"{self._endpoint} failed ({reply})")

    def _attempt(self, queries: list[str], top_k: int) -> tuple[int, list[list[Hit]] | str]:
        """Make one attempt. Return the status (0 for no answer), and the result or the error."""
        body: dict[str, Any] = {"queries": queries}
        body |= {"topk": top_k, "return_scores": True} if self.protocol == "retrieve" else {"top_k": top_k}
        most = most_bytes(len(queries), top_k)
        try:
            status, coding, data = self._exchange.post(self._endpoint, json.dumps(body).encode(), most)
        except ConnectionError as error:
            return 0, str(error)
        begins = printable(data[:200].decode(errors="replace"))
        if status != 200:
            return status, f"status {status}: {begins}"
        if coding != "identity":
            return 200, f"its answer is encoded as {coding[:40]!r}, which nobody asked for"
        if len(data) > most:
            return 200, f"its answer has more than {most} bytes"
        try:
            answer = json.loads(data.decode())
        except (ValueError, RecursionError):
            return 200, f"it doesn't answer in JSON: {begins!r}"
        try:
            if self.protocol == "retrieve":
                lists = answer["result"]
            else:
                lists = [result["results"] for result in answer["query_results"]]
            hits = [[_hit(item) for item in items[:top_k]] for items in lists]
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            problem = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            return 200, f"it doesn't answer as the protocol says: {problem}"
        if len(hits) != len(queries):
            return 200, f"it gave {len(hits)} results for {len(queries)} queries"
        return 200, hits

    def _takes_others(self) -> bool:
        """Return True if the server answers a query of ours."""
        try:
            self._ask(CONTROL, 1, pauses=[])
        except RetrievalError:
            return False
        return True

    @property
    def _endpoint(self) -> str:
        return f"{self.url}/{self.protocol}"


def _hit(item: Any) -> Hit:
    """Read a result in either protocol. Without scores, Search-R1's server returns the bare document."""
    if isinstance(item, dict) and "document" in item:
        score = float(item.get("score", 0.0))
        if not math.isfinite(score):
            raise ValueError(f"a score is {score}")
        return passage_from_row(item["document"]), score
    return passage_from_row(item), 0.0


def most_bytes(queries: int, top_k: int) -> int:
    """Return the bound of an answer: 1 MiB, plus 256 KiB for each passage, but at most `MAX_ANSWER_BYTES`."""
    return min(MAX_ANSWER_BYTES, (1 << 20) + queries * top_k * (1 << 18))
