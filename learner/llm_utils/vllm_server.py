"""A client of `vllm serve`: the server samples on its own GPUs while the trainer trains.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs

vLLM itself is imported only to send weights over NCCL.
"""

from __future__ import annotations

import asyncio
import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from llm_utils.engine import EngineDied
from llm_utils.vllm_engine import Span, TokenEngine

ROUTES = {"/inference/v1/generate", "/pause", "/resume", "/collective_rpc", "/update_weight_version", "/server_info"}
# As many connections as slots. An idle one is not used again when the server, after 5 s, may be closing it.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2)
SILENCE = 60.0  # seconds without an answer after which the server is asked whether it is well


class Server:
    """One `vllm serve` and how weights get to it."""

    def __init__(self, url: str) -> None:
        self.url, self.http = url.rstrip("/"), httpx.Client(timeout=httpx.Timeout(600, connect=10), limits=LIMITS)
        self.nccl: Any = None  # vLLM's sender, once there is one

    def call(self, method: str, path: str, **kwargs: Any) -> Any:
        """An answer as JSON. EngineDied where there is none, or an error."""
        try:
            answer = self.http.request(method, self.url + path, **kwargs)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineDied(f"the vLLM server {self.url} doesn't answer: {error!r}") from error
        if answer.is_error:
            raise EngineDied(f"the vLLM server {self.url} refused {path}: {answer.status_code} {answer.text[:500]}")
        return answer.json() if answer.content else None

    def check(self, model: str, tokenizer: str | None) -> dict[str, Any]:
        """The server's configuration. SystemExit with the remedy where it can't do what training needs."""
        try:
            routes = self.call("GET", "/openapi.json")["paths"]
            version = self.call("GET", "/version")["version"]
        except (EngineDied, ValueError, KeyError) as error:
            raise self.misfit(f"no vLLM server answers there ({error})", model) from error
        if missing := sorted(ROUTES.difference(routes)):
            raise self.misfit(f"vLLM {version} has no {', '.join(missing)} there, 0.32 or newer is needed", model)
        config = self.call("GET", "/server_info", params={"config_format": "json"})["vllm_config"]
        theirs = config["model_config"]
        if theirs["logprobs_mode"] != "processed_logprobs":
            raise self.misfit(f"it reports {theirs['logprobs_mode']}, not those of what was sampled", model)
        self._check_model(theirs["model"], model)
        if tokenizer is not None and not theirs["skip_tokenizer_init"]:
            ours = AutoTokenizer.from_pretrained(tokenizer)
            text = ours.decode(list(range(0, len(ours), 1 + len(ours) // 300)))  # something of the whole vocabulary
            answer = self.call("POST", "/tokenize", json={"prompt": text, "add_special_tokens": False})
            if answer["tokens"] != ours.encode(text, add_special_tokens=False):
                raise self.misfit(f"its tokenizer {theirs['tokenizer']} is not the trainer's, {tokenizer}", model)
        return config

    def misfit(self, what: str, model: str) -> SystemExit:
        """The error that says what is wrong with the server, and how to start one that fits."""
        return SystemExit(
            f"--vllm-url {self.url}: {what}. Start the server with\n"
            f"  VLLM_SERVER_DEV_MODE=1 vllm serve {model} --enable-scale-out --logprobs-mode processed_logprobs"
        )

    def _check_model(self, theirs: str, ours: str) -> None:
        """Compare the shapes of two models, where the server's can be read here; else the first update shows it."""
        try:
            shapes = [AutoConfig.from_pretrained(name).get_text_config() for name in (theirs, ours)]
        except (OSError, ValueError):
            return
        for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers"):
            a, b = (getattr(shape, name, None) for shape in shapes)
            if a != b:
                raise self.misfit(f"it runs {theirs}, whose {name} is {a}, not {b} as the trainer's {ours}", ours)

    def connect(self, source: Any) -> None:
        """Join an NCCL group with the server's workers, over vLLM's weight-transfer API. Not tried yet: needs GPUs."""
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_ip, get_open_port

        size = 1 + self.call("GET", "/get_world_size")["world_size"]
        info = NCCLTrainerInitInfo(rank=0, master_address=get_ip(), master_port=get_open_port(), world_size=size)
        client = HTTPVLLMWeightSyncClient(self.url)
        self.nccl = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


class Weights:
    """What is being sent, in the form in which vLLM's weight transfer asks for it (its WeightSource)."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, torch.Tensor]] = []

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.pairs]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.pairs:
            yield name, tensor.to("cuda")


class VLLMServerEngine(TokenEngine):
    """Samples with one or several `vllm serve`. Every turn is a request of its own, sent the moment it is fed.

    Requests that run during an update are frozen, go on under the new weights, their keys and values computed again.
    """

    overlaps = True  # the server goes on while nobody polls step()

    def __init__(
        self,
        url: str | Sequence[str],
        model: str,
        num_slots: int,
        vocab_size: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        tokenizer: str | None = None,
    ) -> None:
        """Check the servers at `url` (several: a list, or separated by commas) against the trainer's `model`.

        `tokenizer` (name or folder) is compared with the servers'. SystemExit where something doesn't fit.
        """
        urls = url.split(",") if isinstance(url, str) else url
        self.servers = [Server(one.strip()) for one in urls]
        configs = [server.check(model, tokenizer) for server in self.servers]
        config = AutoConfig.from_pretrained(model).get_text_config()
        longest = min(one["model_config"]["max_model_len"] for one in configs)
        super().__init__(num_slots, vocab_size, temperature, top_p, config, longest)
        self.weights = Weights()
        self.over_nccl = all((one["weight_transfer_config"] or {}).get("backend") == "nccl" for one in configs)
        self.folder = tempfile.TemporaryDirectory(prefix="agent-r1-weights-")
        for server in self.servers:
            server.call("POST", "/update_weight_version", json={"new_version": "0"})
        # All requests wait in one thread. It is a daemon: a server that hangs doesn't keep the trainer from exiting.
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.http = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=10), limits=LIMITS)

    def _forget(self) -> None:
        super()._forget()
        self.arrived: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self.heard = time.monotonic()

    def _submit(self, slot: int, tokens: list[int], sampling: dict[str, Any]) -> None:
        server = self.servers[slot % len(self.servers)]  # an episode stays where its prefix is cached
        body = {"token_ids": tokens, "sampling_params": sampling}
        request = asyncio.run_coroutine_threadsafe(
            self.http.post(server.url + "/inference/v1/generate", json=body), self.loop
        )
        self.requests[request] = slot
        request.add_done_callback(self.arrived.put)

    def step(self) -> list[Span]:
        """The spans that have arrived; waits up to 5 ms where there are none."""
        try:
            while self.requests:
                self._read(self.arrived.get(timeout=0.0 if self.done else 0.005))
        except queue.Empty:
            pass
        if self.done or not self.requests:
            self.heard = time.monotonic()
        elif time.monotonic() - self.heard > SILENCE:
            for server in self.servers:
                server.call("GET", "/health", timeout=10)
            self.heard = time.monotonic()
        return self._take()

    def _read(self, request: Future[Any]) -> None:
        slot = self.requests.pop(request)
        server = self.servers[slot % len(self.servers)]
        try:
            answer = request.result()
        except httpx.HTTPError as error:
            raise EngineDied(f"the vLLM server {server.url} is gone: {error!r}") from error
        if answer.is_error:
            raise EngineDied(f"the vLLM server {server.url} failed: {answer.status_code} {answer.text[:500]}")
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            raise EngineDied(f"the vLLM server {server.url} ended a request with {choice['finish_reason']!r}")
        versions = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]
        self._end(slot, choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]], versions)

    def release(self) -> None:
        """Forget all episodes; the server drops what it still samples for them."""
        for request in self.requests:
            request.cancel()
        self._forget()

    def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load `weights`, unsharded tensors under their names in the state dict of the Hugging Face model, in place.

        Over NCCL where the servers were started for it, else as a file in a folder that the servers can read.
        """
        # Whole weights would crowd the trainer's GPU. Copies, because a file can't hold a tied tensor under two names.
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
        except Exception as error:  # of NCCL, of requests, of the server
            raise EngineDied(f"the weights could not be sent to {server.url}: {error!r}") from error

    def close(self) -> None:
        """Drop what is being sampled and close the connections; the servers go on."""
        self.release()
        asyncio.run_coroutine_threadsafe(self.http.aclose(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        for server in self.servers:
            server.http.close()
        self.folder.cleanup()
