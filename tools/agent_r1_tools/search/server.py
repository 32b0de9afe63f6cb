"""A retrieval server: one index in one process, for environments in many.

    python -m agent_r1_tools.search.server --corpus corpus.jsonl --port 8000

It answers POST /retrieve (Search-R1's protocol), GET and POST /search (Agent-R1's) and GET /health. Queries that arrive
within a few milliseconds of each other go to the retriever together. A request that is too large or malformed gets
status 422, and so does one that the retriever refuses. There is no authentication: let it listen on an address that
only the training machines reach.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeAlias, TypeVar

from agent_r1_tools.search.http import MAX_QUERIES
from agent_r1_tools.search.passages import Hit, Passage, QueryRefused, Retriever, load_corpus

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request
    from pydantic import BaseModel, Field, StringConstraints, ValidationError
except ImportError as missing:
    raise ImportError('the retrieval server needs fastapi and uvicorn: pip install "agent-r1[server]"') from missing

BATCH_WINDOW = 0.003
"""Seconds that the first query of a batch waits for others."""
MAX_QUERY_CHARS = 8192
MAX_TOP_K = 100
MAX_BODY_BYTES = 8 * 1024 * 1024

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


Body = TypeVar("Body", bound=BaseModel)
Waiting: TypeAlias = tuple[list[str], int, asyncio.Future[list[list[Hit]]]]  # queries, top_k, and their hits


class Batcher:
    """Gathers the queries of concurrent requests into one call of the retriever, which runs in a thread of its own."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._waiting: asyncio.Queue[Waiting] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(max_workers=1)

    async def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        future: asyncio.Future[list[list[Hit]]] = asyncio.get_running_loop().create_future()
        await self._waiting.put((queries, top_k, future))
        return await future

    async def run(self) -> None:
        """Answer forever."""
        while True:
            requests = [await self._waiting.get()]
            await asyncio.sleep(BATCH_WINDOW)
            while not self._waiting.empty() and sum(len(queries) for queries, _, _ in requests) < MAX_QUERIES:
                requests.append(self._waiting.get_nowait())
            if len(requests) > 1 and await self._answer(requests) is None:
                continue
            for request in requests:  # alone, or one among them is to blame
                error = await self._answer([request])
                if error is not None and not request[2].done():
                    request[2].set_exception(error)

    async def _answer(self, requests: list[Waiting]) -> HTTPException | None:
        """Search for these together; the error where that fails, and then nobody has an answer."""
        queries = [query for part, _, _ in requests for query in part]
        most = max(top_k for _, top_k, _ in requests)  # the best 3 are the first 3 of the best 5
        search = asyncio.get_running_loop().run_in_executor(self._thread, self._retriever.search, queries, most)
        try:
            found = iter(await search)
        except QueryRefused as error:
            return HTTPException(422, f"the retriever refuses the query: {error}")
        except Exception as error:
            return HTTPException(500, f"the retriever failed: {type(error).__name__}: {error}")
        for part, top_k, future in requests:
            hits = [next(found)[:top_k] for _ in part]
            if not future.done():  # a client that went away has cancelled it
                future.set_result(hits)
        return None


def create_app(retriever: Retriever, default_top_k: int = 3) -> FastAPI:
    """The server as an ASGI application.

    Args:
        retriever: what finds the passages.
        default_top_k: how many passages /retrieve gives when a request doesn't say.
    """
    batcher = Batcher(retriever)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()

    app = FastAPI(title="agent_r1_tools retrieval server", lifespan=lifespan)

    @app.post("/retrieve")
    async def retrieve(request: Request) -> dict[str, Any]:
        body = await _read(request, RetrieveRequest)
        found = await batcher.search(body.queries, body.topk or default_top_k)
        if body.return_scores:
            return {"result": [[{"document": _document(p), "score": score} for p, score in hits] for hits in found]}
        return {"result": [[_document(p) for p, _ in hits] for hits in found]}

    @app.post("/search")
    async def search(request: Request) -> dict[str, Any]:
        body = await _read(request, SearchRequest)
        return _query_results(body.queries, await batcher.search(body.queries, body.top_k))

    @app.get("/search")
    async def search_one(query: Query, top_k: TopK = 10) -> dict[str, Any]:
        return _query_results([query], await batcher.search([query], top_k))

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy", "retriever": type(retriever).__name__}

    return app


async def _read(request: Request, form: type[Body]) -> Body:
    """The body of a request, never more of it than `MAX_BODY_BYTES`."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise HTTPException(422, f"the body is larger than {MAX_BODY_BYTES} bytes; send fewer queries")
    try:
        return form.model_validate_json(bytes(data))
    except ValidationError as error:
        raise HTTPException(422, error.errors(include_url=False, include_input=False, include_context=False)) from None


def _query_results(queries: list[str], found: list[list[Hit]]) -> dict[str, Any]:
    return {
        "query_results": [
            {"query": query, "results": [{"score": score, "document": _document(p)} for p, score in hits]}
            for query, hits in zip(queries, found, strict=True)
        ]
    }


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
    uvicorn.run(create_app(retriever), host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
