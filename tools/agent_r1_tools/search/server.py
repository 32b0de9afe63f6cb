"""A retrieval server: one index in one process, for environments in many.

    python -m agent_r1_tools.search.server --corpus corpus.jsonl --port 8000

It answers POST /retrieve (Search-R1's protocol), GET and POST /search (Agent-R1's) and GET /health. Queries that arrive
within a few milliseconds of each other go to the retriever together, the queries of large requests in slices, so that
no request waits long for others. A malformed request gets status 422, and so does one that the retriever rejects. A
body that is too large gets 413, one without room 429, one that does not arrive 408. A client that does not take its
answer is dropped, and the queries of a client that left are not searched. There is no authentication: let the server
listen on an address that only the training machines reach.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any

from agent_r1_tools.search.http import MAX_PASSAGES, MAX_QUERIES
from agent_r1_tools.search.passages import Hit, Passage, QueryRefused, Retriever, load_corpus

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request, Response
    from pydantic import BaseModel, Field, StringConstraints

    from agent_r1_tools.http_limits import Bodies, Form, Impatient, read_form
except ImportError as missing:
    needed = 'the retrieval server needs fastapi and uvicorn: pip install "agent-r1[server]"'
    if __name__ == "__main__":
        raise SystemExit(needed) from None
    raise ImportError(needed) from missing

BATCH_WINDOW = 0.003
"""Seconds that the first query of a batch waits for others."""
SLICE_CHARS = 16_384
"""Characters of queries that one call of the retriever gets; the query that passes this is the last one."""
MAX_QUERY_CHARS = 8192
MAX_TOP_K = 100
MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_WAITING_CHARS = 16 * 1024 * 1024
"""The maximum of all waiting queries. Each requested passage counts as `HIT_CHARS`, for the memory of a hit."""
HIT_CHARS = 100
MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""The maximum of all answers that were written but not taken, beyond the first `PIECE_BYTES` of each."""
PIECE_BYTES = 65_536
"""The size of the pieces in which an answer is handed over. An answer that is no larger always has room."""

Query = Annotated[str, StringConstraints(max_length=MAX_QUERY_CHARS)]
Queries = Annotated[list[Query], Field(min_length=1, max_length=MAX_QUERIES)]
TopK = Annotated[int, Field(ge=1, le=MAX_TOP_K)]


class RetrieveRequest(BaseModel):
    """The body of POST /retrieve."""

    queries: Queries
    topk: TopK | None = None
    return_scores: bool = False


class SearchRequest(BaseModel):
    """The body of POST /search."""

    queries: Queries
    top_k: TopK = 10


@dataclass(eq=False)
class _Waiting:
    """A request, how many of its queries have been asked, and what was found for them."""

    queries: list[str]
    top_k: int
    answer: asyncio.Future[list[list[Hit]]]
    asked: int = 0
    found: list[list[Hit]] = field(default_factory=list)


class Batcher:
    """A collector of queries: it joins those of concurrent requests into calls of the retriever, in its own thread.

    A call takes a query of each request in turn, up to `MAX_QUERIES` and `SLICE_CHARS`.
    """

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._waiting: deque[_Waiting] = deque()
        self._chars = 0  # of all queries of requests that aren't answered
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1)

    async def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        hits = len(queries) * top_k
        if hits > MAX_PASSAGES:
            problem = f"{len(queries)} queries with {top_k} passages each ask for more than {MAX_PASSAGES} passages"
            raise HTTPException(422, f"{problem}; send fewer queries")
        chars = sum(map(len, queries)) + HIT_CHARS * hits
        if self._chars and self._chars + chars > MAX_WAITING_CHARS:
            raise HTTPException(429, "too many queries are waiting")
        request = _Waiting(queries, top_k, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._chars += chars
        self._arrived.set()
        try:
            return await request.answer
        finally:
            self._chars -= chars
            if request.asked < len(queries):  # it failed, or its client went away: its texts take no room for longer
                with contextlib.suppress(ValueError):
                    self._waiting.remove(request)

    async def run(self) -> None:
        """Answer forever."""
        while True:
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
                await asyncio.sleep(BATCH_WINDOW)
            taken = self._take()
            if len(taken) > 1 and await self._answer(taken) is None:
                continue
            for request, queries in taken.items():  # alone, or one among them is to blame
                error = await self._answer({request: queries})
                if error is not None and not request.answer.done():
                    request.answer.set_exception(error)

    def _take(self) -> dict[_Waiting, list[str]]:
        """Take the next queries, by request."""
        taken: dict[_Waiting, list[str]] = {}
        count = chars = 0
        while self._waiting and count < MAX_QUERIES and chars < SLICE_CHARS:
            request = self._waiting.popleft()
            if request.answer.done():  # it failed, or its client went away
                continue
            query = request.queries[request.asked]
            request.asked += 1
            taken.setdefault(request, []).append(query)
            count, chars = count + 1, chars + len(query)
            if request.asked < len(request.queries):
                self._waiting.append(request)
        return taken

    async def _answer(self, taken: dict[_Waiting, list[str]]) -> HTTPException | None:
        """Search for these together. Return the error if that fails: then no request has an answer."""
        queries = [query for part in taken.values() for query in part]
        most = max((request.top_k for request in taken), default=0)  # the best 3 are the first 3 of the best 5
        search = asyncio.get_running_loop().run_in_executor(self._thread, self._retriever.search, queries, most)
        try:
            found = iter(await search)
        except QueryRefused as error:
            return HTTPException(422, f"the retriever refuses the query: {error}")
        except Exception as error:
            return HTTPException(500, f"the retriever failed: {type(error).__name__}: {error}")
        for request, part in taken.items():
            request.found += [next(found)[: request.top_k] for _ in part]
            if len(request.found) == len(request.queries) and not request.answer.done():  # done: its client went away
                request.answer.set_result(request.found)
        return None


def create_app(retriever: Retriever, default_top_k: int = 3) -> FastAPI:
    """Create the server as an ASGI application.

    Args:
        retriever: it finds the passages.
        default_top_k: the number of passages that /retrieve returns if a request does not name one.
    """
    batcher = Batcher(retriever)
    bodies, answers = Bodies(MAX_BODY_BYTES), _Answers()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()

    app = FastAPI(title="agent_r1_tools retrieval server", lifespan=lifespan)

    async def read(request: Request, form: type[Form]) -> Form:
        data = await bodies.read(request.receive)
        try:
            return read_form(form, data)
        finally:
            bodies.free(data)

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        body = await read(request, RetrieveRequest)
        found = await _unless_gone(request, batcher.search(body.queries, body.topk or default_top_k))
        scored = body.return_scores
        return await answers.write("result", (_retrieved(hits, scored) for hits in found))

    @app.post("/search")
    async def search(request: Request) -> Response:
        body = await read(request, SearchRequest)
        return await search_all(request, body.queries, body.top_k)

    @app.get("/search")
    async def search_one(request: Request, query: Query, top_k: TopK = 10) -> Response:
        return await search_all(request, [query], top_k)

    async def search_all(request: Request, queries: list[str], top_k: int) -> Response:
        hits = await _unless_gone(request, batcher.search(queries, top_k))
        found = zip(queries, hits, strict=True)
        return await answers.write("query_results", ({"query": q, "results": _retrieved(hits)} for q, hits in found))

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy", "retriever": type(retriever).__name__}

    return app


async def _unless_gone(request: Request, search: Coroutine[Any, Any, list[list[Hit]]]) -> list[list[Hit]]:
    """Return the search's result. Cancel the search if the client disconnects."""

    async def wait_until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    searching, leaving = asyncio.create_task(search), asyncio.create_task(wait_until_gone())
    try:
        await asyncio.wait((searching, leaving), return_when=asyncio.FIRST_COMPLETED)
        if searching.done():
            return searching.result()
        raise HTTPException(499, "the client has gone")  # no client reads it
    finally:
        searching.cancel()
        leaving.cancel()


class _Answers:
    """A writer of answers, one at a time and in another thread.

    No answer is larger than `MAX_ANSWER_BYTES`. The answers that were not taken yet, except the first `PIECE_BYTES` of
    each, are together no larger than `MAX_UNSENT_BYTES`.
    """

    def __init__(self) -> None:
        self.unsent = 0  # bytes
        self._turn = asyncio.Lock()

    async def write(self, name: str, parts: Iterable[Any]) -> Response:
        """Write the JSON object whose one field has these parts."""
        async with self._turn:
            body = await asyncio.to_thread(_json, name, parts)
            excess = max(0, len(body) - PIECE_BYTES)
            if excess and self.unsent + excess > MAX_UNSENT_BYTES:
                raise HTTPException(429, "too many answers have not been taken")
            self.unsent += excess
            return _Answer(body, self, excess)


class _Answer(Response):
    """A response in pieces, as the client takes them. This object holds the rest, and not the connection."""

    media_type = "application/json"

    def __init__(self, body: bytearray, answers: _Answers, excess: int) -> None:
        super().__init__(memoryview(body))
        self._answers, self._excess = answers, excess

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size = len(self.body)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, size, PIECE_BYTES):
                end = start + PIECE_BYTES
                await send({"type": "http.response.body", "body": bytes(self.body[start:end]), "more_body": end < size})
                await asyncio.sleep(0)  # others have their turn
        finally:
            self._answers.unsent -= self._excess


def _json(name: str, parts: Iterable[Any]) -> bytearray:
    """Encode part by part, because `dumps` lets no other thread run."""
    body = bytearray(f'{{"{name}":['.encode())
    for n, part in enumerate(parts):
        text = json.dumps(part, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        body += ("," * (n > 0) + text).encode()
        if len(body) > MAX_ANSWER_BYTES:
            raise HTTPException(422, f"the answer is larger than {MAX_ANSWER_BYTES} bytes; send fewer queries")
    body += b"]}"
    return body


def _retrieved(hits: list[Hit], scored: bool = True) -> list[dict[str, Any]]:
    return [{"document": _document(p), "score": score} if scored else _document(p) for p, score in hits]


def _document(passage: Passage) -> dict[str, str]:
    contents = f'"{passage.title}"\n{passage.text}'
    return {"title": passage.title, "text": passage.text, "contents": contents}


def main() -> None:
    """Read the command line, build or load the index, and serve."""
    parser = argparse.ArgumentParser(prog="python -m agent_r1_tools.search.server", description="A retrieval server.")
    parser.add_argument("--corpus", help="a JSON Lines file of passages (.gz too); not needed with --index")
    parser.add_argument("--source", help="take only the rows of this source")
    parser.add_argument("--retriever", choices=["bm25", "dense"], default="bm25")
    parser.add_argument("--index", help="a folder written by DenseRetriever.save")
    parser.add_argument("--model", help="the encoder of --retriever dense, a name or a folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    if (arguments.corpus is None) == (arguments.index is None):
        parser.error("give either --corpus or --index")
    retriever: Retriever
    if arguments.index is not None:
        from agent_r1_tools.search.dense import DenseRetriever

        retriever = DenseRetriever.load(arguments.index)
    elif arguments.retriever == "dense":
        from agent_r1_tools.search.dense import DEFAULT_MODEL, DenseRetriever

        passages = load_corpus(arguments.corpus, arguments.source)
        retriever = DenseRetriever(passages, arguments.model or DEFAULT_MODEL)
    else:
        from agent_r1_tools.search.bm25 import BM25Retriever

        retriever = BM25Retriever(load_corpus(arguments.corpus, arguments.source))
    uvicorn.run(create_app(retriever), host=arguments.host, port=arguments.port, log_level="warning", http=Impatient)


if __name__ == "__main__":
    main()
