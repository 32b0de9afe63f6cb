"""A client of `vllm serve`: the server samples on its own GPUs while the trainer trains.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs

vLLM itself is imported only to send weights over NCCL.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from llm_utils.sampling.engine import EngineDied, Span
from llm_utils.sampling.vllm_engine import MOST_LOGPROBS, TokenEngine, check_top_logprobs
from llm_utils.sampling.vllm_replies import Body, member, parse, read_span
from llm_utils.setup.loading import read_config

ROUTES = {"/inference/v1/generate", "/pause", "/resume", "/collective_rpc", "/update_weight_version", "/server_info"}
# One connection per slot. The server closes idle ones after 5 s, so they expire earlier here.
PLAIN = {"Accept-Encoding": "identity"}  # a compressed answer may expand to any size
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2)
SILENCE = 60.0  # seconds without an answer before the server's health is checked
PAGE_SECONDS, UPDATE_SECONDS = 60.0, 600.0  # time limits for a whole page, and for the answer to a weight update
PAGE_BYTES, TOKEN_BYTES = 2**24, 2**9  # limits of an answer: in total, and per token and log-probability of a span
DROPPED = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)  # connection lost without an answer
PAUSES = (0.5, 2.0)  # seconds before a dropped request is sent again


@dataclass
class Abilities:
    """The limits that a server's configuration sets."""

    longest: int  # maximum tokens of a row
    logprobs: int  # maximum log-probabilities of a token
    seeded: bool  # True if requests may have seeds
    nccl: bool  # True if weights can be sent over NCCL


class Server:
    """One `vllm serve`, and the transfer of weights to it."""

    def __init__(self, url: str) -> None:
        self.url, self.http = url.rstrip("/"), httpx.Client(timeout=None, limits=LIMITS, headers=PLAIN)
        self.nccl: Any = None  # vLLM's sender, made by `connect`

    def ask(self, method: str, path: str, seconds: float, **kwargs: Any) -> tuple[int, bytes]:
        """Return status and content of an answer, which must arrive within `seconds`. Raise httpx's errors."""
        body, timeout = Body(PAGE_BYTES, seconds), httpx.Timeout(seconds, connect=10)
        with self.http.stream(method, self.url + path, timeout=timeout, **kwargs) as answer:
            for chunk in answer.iter_raw():
                body.add(chunk)
            return answer.status_code, body.content

    def call(self, method: str, path: str, seconds: float | None = None, **kwargs: Any) -> Any:
        """Return an answer as JSON. Raise EngineDied if there is no answer, no success (a redirect, an error), or no
        JSON.

        A request whose connection was lost is repeated: all requests sent here are idempotent.
        """
        for pause in (*PAUSES, None):
            try:
                status, content = self.ask(method, path, seconds or UPDATE_SECONDS, **kwargs)
                break
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                if pause is None or not isinstance(error, DROPPED):
                    raise self.died(f"does not answer {path}: {error!r}") from None
                time.sleep(pause)
        if not 200 <= status < 300:
            raise self.died(f"answered {path} with {status}: {_message(content)}")
        try:
            return parse(content) if content else None
        except ValueError as error:
            raise self.died(f"answered {path} without JSON: {error}") from None

    def died(self, event: str) -> EngineDied:
        """Return the error that names the event, the server's current health, and the place to look for the cause."""
        try:
            health = self.ask("GET", "/health", 10)[0]
            state = "reports that it is healthy" if health == 200 else f"answers /health with {health}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            state = f"cannot be reached ({error})"
        return EngineDied(
            f"the vLLM server {self.url} {event}. Now it {state}. Look for the cause in the server's own log"
        )

    def check(self, model: str, tokenizer: str | None) -> Abilities:
        """Return the server's abilities. Raise SystemExit with the remedy if they do not suffice for training."""
        pages = []
        try:
            for path in ("/openapi.json", "/version"):
                status, content = self.ask("GET", path, PAGE_SECONDS)
                if status != 200:
                    raise ValueError(f"{path} answers with {status}")
                pages.append(parse(content))
            routes, version = member(pages[0], "paths", dict), member(pages[1], "version", str)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise self.misfit(f"no vLLM server answers at this address ({error!r})", model) from error
        if missing := sorted(ROUTES.difference(routes)):
            raise self.misfit(f"vLLM {version} lacks {', '.join(missing)}; version 0.32 or newer is needed", model)
        answer = self.call("GET", "/server_info", PAGE_SECONDS, params={"config_format": "json"})
        try:
            config = member(answer, "vllm_config", dict)
            server_model, scheduler = member(config, "model_config", dict), member(config, "scheduler_config", dict)
            max_logprobs = member(server_model, "max_logprobs", int)
            # Only a CPU server with chunked prefill stops at a seeded request.
            on_cpu = member(config, "device_config", dict).get("device") == "cpu"
            abilities = Abilities(
                longest=member(server_model, "max_model_len", int),
                logprobs=MOST_LOGPROBS + 1 if max_logprobs < 0 else max_logprobs,  # -1 means all
                seeded=not (on_cpu and scheduler.get("enable_chunked_prefill")),
                nccl=(config.get("weight_transfer_config") or {}).get("backend") == "nccl",
            )
            name, mode = member(server_model, "model", str), member(server_model, "logprobs_mode", str)
        except (ValueError, AttributeError) as error:
            raise self.misfit(f"the description of vLLM {version} has an unknown form: {error}", model) from error
        if mode != "processed_logprobs":
            raise self.misfit(f"it reports {mode}, not the log-probabilities of the sampled tokens", model)
        self._check_model(name, model)
        if tokenizer is not None and not server_model.get("skip_tokenizer_init"):
            trainers = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
            text = trainers.decode(
                list(range(0, len(trainers), 1 + len(trainers) // 300))
            )  # of the whole vocabulary
            body = {"prompt": text, "add_special_tokens": False}
            answer = self.call("POST", "/tokenize", PAGE_SECONDS, json=body)
            if not isinstance(answer, dict) or answer.get("tokens") != trainers.encode(
                text, add_special_tokens=False
            ):
                problem = f"its tokenizer {server_model.get('tokenizer')} is not the trainer's, {tokenizer}"
                raise self.misfit(problem, model)
        return abilities

    def misfit(self, problem: str, model: str) -> SystemExit:
        """Return the error that names the problem with the server, and the command that starts a suitable one."""
        return SystemExit(
            f"--vllm-url {self.url}: {problem}. Start the server with\n"
            f"  VLLM_SERVER_DEV_MODE=1 vllm serve {model} --enable-scale-out --logprobs-mode processed_logprobs"
        )

    def _check_model(self, server_model: str, our_model: str) -> None:
        """Compare the shapes of two models if the server's folder is on this machine; otherwise the first update fails.

        The server's config is read as text: a file that a server names is not loaded.
        """
        try:
            content = parse((Path(server_model) / "config.json").read_bytes())
        except (OSError, ValueError):
            return
        config, content = read_config(our_model), content if isinstance(content, dict) else {}
        shapes = [config.get_text_config(), config]  # a file may hold the text model's sizes at either level
        for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers"):
            value, known = content.get(name), [getattr(shape, name, None) for shape in shapes]
            if value is not None and value not in known:
                difference = f"whose {name} is {str(value)[:80]}, but the trainer's {our_model} has {known[0]}"
                raise self.misfit(f"it runs {server_model}, {difference}", our_model)

    def connect(self, source: Any) -> None:
        """Join an NCCL group with the server's workers over vLLM's weight-transfer API. Untested so far: it needs
        GPUs."""
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_ip, get_open_port

        size = 1 + self.call("GET", "/get_world_size")["world_size"]
        info = NCCLTrainerInitInfo(rank=0, master_address=get_ip(), master_port=get_open_port(), world_size=size)
        client = HTTPVLLMWeightSyncClient(self.url)
        self.nccl = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def _message(content: bytes) -> str:
    """Return the server's error message."""
    try:
        text = str(parse(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        text = content.decode(errors="replace")
    return text[:500].rstrip(".\n") or "nothing"


class Weights:
    """The weights being sent, in the form that vLLM's weight transfer requests (its WeightSource)."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, torch.Tensor]] = []
        self.version = 0  # of the newest weights sent so far

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.pairs]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.pairs:
            yield name, tensor.to("cuda")


class VLLMClient(TokenEngine):
    """An engine that samples with one or several `vllm serve`. Every turn is its own request, sent as soon as it is
    fed.

    Requests that run during an update are frozen. They continue under the new weights, and their keys and values are
    recomputed.

    A request whose connection is lost is sent again, at most twice: tokens go in and out, and the seed is the same.
    Requests have no seed if a server is on a CPU and computes prompts in parts (`enable_chunked_prefill`), because vLLM
    stops there when it must reset a request's random numbers. Samples then differ from run to run.
    """

    overlaps = True  # the server samples between calls of step()

    def __init__(
        self,
        url: str | Sequence[str],
        model: str,
        num_slots: int,
        vocab_size: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        tokenizer: str | None = None,
        entropies: bool = False,
        top_logprobs: int = 0,
    ) -> None:
        """Check the servers at `url` (several: a list, or separated by commas) against the trainer's `model`.

        `tokenizer` (name or folder) is compared with the servers'. Raise SystemExit if something does not fit.
        """
        check_top_logprobs(top_logprobs)
        urls = url.split(",") if isinstance(url, str) else url
        self.servers = [Server(address.strip()) for address in urls]
        abilities = [server.check(model, tokenizer) for server in self.servers]
        config = read_config(model)
        longest = min(server.longest for server in abilities)
        # The sampled token takes one of the places if it is not among the most likely.
        known = min(MOST_LOGPROBS, *(server.logprobs - 1 for server in abilities))
        if top_logprobs > known:
            raise SystemExit(f"top_logprobs {top_logprobs} needs vLLM servers with --max-logprobs {top_logprobs + 1}")
        seeded = all(server.seeded for server in abilities)
        if not seeded:
            print(
                "vLLM on a CPU cannot seed requests with chunked prefill, so samples will differ from run to run. "
                "Start the server with --no-enable-chunked-prefill to make them follow the seed",
                file=sys.stderr,
            )
        super().__init__(
            num_slots, vocab_size, temperature, top_p, config, longest, entropies, top_logprobs, known, seeded
        )
        self.weights = Weights()
        self.over_nccl = all(server.nccl for server in abilities)
        self.folder = tempfile.TemporaryDirectory(prefix="agent-r1-weights-")
        for server in self.servers:
            server.call("POST", "/update_weight_version", json={"new_version": "0"})
        # All requests wait in one thread. It is a daemon, so that a hanging server cannot block the trainer's exit.
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.http = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=10), limits=LIMITS, headers=PLAIN)

    def _forget(self) -> None:
        super()._forget()
        self.arrived: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self.rooms: dict[int, int] = {}  # slot -> token limit of its span
        self.arrival = self.heard = time.monotonic()  # time of the last span, and of the last answer

    def _submit(self, slot: int, tokens: list[int], sampling: dict[str, Any]) -> None:
        server = self.servers[slot % len(self.servers)]  # an episode stays with the server that caches its prefix
        sampling["logprobs"] = self.known and self.known + 1
        self.rooms[slot] = sampling["max_tokens"]
        body = {"token_ids": tokens, "sampling_params": sampling}
        max_bytes = PAGE_BYTES + TOKEN_BYTES * sampling["max_tokens"] * (2 + sampling["logprobs"])
        request = asyncio.run_coroutine_threadsafe(self._generate(server.url, body, max_bytes), self.loop)
        self.requests[request] = slot
        request.add_done_callback(self.arrived.put)

    async def _generate(self, url: str, body: dict[str, Any], max_bytes: int) -> tuple[int, bytes]:
        for pause in PAUSES:
            try:
                return await self._ask(url, body, max_bytes)
            except DROPPED:
                await asyncio.sleep(pause)
        return await self._ask(url, body, max_bytes)

    async def _ask(self, url: str, body: dict[str, Any], max_bytes: int) -> tuple[int, bytes]:
        """Wait for sampling without a time limit, but at most `PAGE_SECONDS` for the rest of an answer that has
        begun."""
        async with self.http.stream("POST", url + "/inference/v1/generate", json=body) as answer:
            content = Body(max_bytes, PAGE_SECONDS)
            try:
                async with asyncio.timeout(PAGE_SECONDS):
                    async for chunk in answer.aiter_raw():
                        content.add(chunk)
            except TimeoutError:
                raise content.late() from None
            return answer.status_code, content.content

    def step(self) -> list[Span]:
        """Return the spans that have arrived. Wait up to 5 ms if there are none."""
        try:
            while self.requests:
                self._read(self.arrived.get(timeout=0.0 if self.done else 0.005))
        except queue.Empty:
            pass
        now = time.monotonic()
        if self.done or not self.requests:
            self.arrival = self.heard = now
        elif now - self.heard > SILENCE:
            for server in self.servers:
                server.call("GET", "/health", 10)
            self.heard = time.monotonic()
            if now - self.arrival > 2 * SILENCE:
                waited = f"{len(self.requests)} spans for {(now - self.arrival) / 60:.0f} minutes"
                urls = ", ".join(server.url for server in self.servers)
                print(f"\nwaiting for {waited}; vLLM at {urls} reports that it is healthy", file=sys.stderr)
        return self._take()

    def _read(self, request: Future[Any]) -> None:
        slot = self.requests.pop(request)
        server = self.servers[slot % len(self.servers)]
        try:
            status, content = request.result()
        except httpx.HTTPError as error:
            raise server.died(f"did not answer: {error!r}") from None
        if not 200 <= status < 300:
            raise server.died(f"failed with {status}: {_message(content)}")
        try:
            span = read_span(
                content, max_tokens=self.rooms[slot], vocab_size=self.vocab_size, newest=self.weights.version,
                likeliest=max(self.top_logprobs, 1) if self.known else 0,
            )  # fmt: skip
        except ValueError as error:
            raise server.died(f"sent an invalid span: {error}") from None
        self._end(slot, *span)

    def release(self) -> None:
        """Forget all episodes. The server drops the spans that it still samples for them."""
        for request in self.requests:
            request.cancel()
        self._forget()

    def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load `weights`, unsharded tensors by their names in the state dict of the Hugging Face model, in place.

        They are sent over NCCL if the servers were started for it, otherwise as a file in a folder that the servers can
        read.
        """
        self.weights.version = version
        # Whole weights would fill the trainer's GPU. Copies, because a file cannot hold a tied tensor under two names.
        self.weights.pairs = [(name, t.detach().to("cpu", copy=True)) for name, t in self._complete(weights)]
        if not self.over_nccl:
            new = Path(self.folder.name) / "new"
            save_file({name: tensor.contiguous() for name, tensor in self.weights.pairs}, new)
            os.replace(new, new.with_name("model.safetensors"))
        for server in self.servers:
            server.call("POST", "/pause", params={"mode": "keep", "clear_cache": "true"})
            if self.over_nccl:
                self._send(server)
            else:
                kwargs = {"weights_path": self.folder.name}
                server.call("POST", "/collective_rpc", json={"method": "reload_weights", "kwargs": kwargs})
            server.call("POST", "/update_weight_version", json={"new_version": str(version)})
            server.call("POST", "/resume")
        self.weights.pairs = []

    def _send(self, server: Server) -> None:
        try:
            if server.nccl is None:
                server.connect(self.weights)
            server.nccl.send_weights()
        except Exception as error:  # from NCCL, from requests, from the server
            raise EngineDied(f"the weights could not be sent to {server.url}: {error!r}") from error

    def close(self) -> None:
        """Cancel running requests and close the connections. The servers keep running."""
        self.release()
        asyncio.run_coroutine_threadsafe(self.http.aclose(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        for server in self.servers:
            server.http.close()
        self.folder.cleanup()
