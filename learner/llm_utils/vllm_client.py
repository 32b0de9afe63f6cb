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
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from llm_utils.engine import EngineDied, Span
from llm_utils.vllm_engine import MOST_LOGPROBS, TokenEngine, check_top_logprobs

try:
    import httpx
except ImportError as error:
    raise SystemExit("--engine vllm-server needs httpx: pip install 'agent-r1[http]'") from error

ROUTES = {"/inference/v1/generate", "/pause", "/resume", "/collective_rpc", "/update_weight_version", "/server_info"}
# As many connections as slots. An idle one is not used again when the server, after 5 s, may be closing it.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2)
SILENCE = 60.0  # seconds without an answer after which the server is asked whether it is well
DROPPED = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)  # lost without an answer
PAUSES = (0.5, 2.0)  # seconds before a dropped request is sent again


class Server:
    """One `vllm serve` and how weights get to it."""

    def __init__(self, url: str) -> None:
        self.url, self.http = url.rstrip("/"), httpx.Client(timeout=httpx.Timeout(600, connect=10), limits=LIMITS)
        self.nccl: Any = None  # vLLM's sender, once there is one

    def call(self, method: str, path: str, **kwargs: Any) -> Any:
        """An answer as JSON. EngineDied where there is none, or an error.

        A dropped request is repeated: none of those that are sent does more when it is sent twice.
        """
        for pause in (*PAUSES, None):
            try:
                answer = self.http.request(method, self.url + path, **kwargs)
                break
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                if pause is None or not isinstance(error, DROPPED):
                    raise self.died(f"doesn't answer {path}: {error!r}") from None
                time.sleep(pause)
        if answer.is_error:
            raise self.died(f"answers {path} with {answer.status_code}: {_message(answer)}")
        return answer.json() if answer.content else None

    def died(self, what: str) -> EngineDied:
        """The error that says what happened, how the server is now, and where the cause can be read."""
        try:
            health = self.http.get(self.url + "/health", timeout=10).status_code
            now = "says that it is well" if health == 200 else f"answers /health with {health}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            now = f"can't be reached ({error})"
        return EngineDied(
            f"the vLLM server {self.url} {what}. Now it {now}. "
            "Look for the cause in the server's own log, where it was started"
        )

    def check(self, model: str, tokenizer: str | None) -> dict[str, Any]:
        """The server's configuration. SystemExit with the remedy where it can't do what training needs."""
        try:
            pages = [self.http.get(self.url + path).raise_for_status().json() for path in ("/openapi.json", "/version")]
            routes, version = pages[0]["paths"], pages[1]["version"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise self.misfit(f"no vLLM server answers there ({error!r})", model) from error
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


def _message(answer: httpx.Response) -> str:
    """What the server says went wrong."""
    try:
        text = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = answer.text
    return text[:500].rstrip(".\n") or "nothing"


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


def most_logprobs(config: dict[str, Any]) -> int:
    """How many log-probabilities of a token a server with this configuration reports at most."""
    most = config["model_config"]["max_logprobs"]
    return MOST_LOGPROBS + 1 if most < 0 else most  # -1 is all


def stops_at_seeds(config: dict[str, Any]) -> bool:
    """Would a seeded request stop a server with this configuration? Only on a CPU, with prompts in parts."""
    on_cpu = config["device_config"]["device"] == "cpu"
    return on_cpu and config["scheduler_config"]["enable_chunked_prefill"]


class VLLMClient(TokenEngine):
    """Samples with one or several `vllm serve`. Every turn is a request of its own, sent the moment it is fed.

    Requests that run during an update are frozen, go on under the new weights, their keys and values computed again.

    A request whose connection is lost is sent again, twice at most: tokens go in and out, and the seed is the same.
    Requests have no seed where a server is on a CPU and computes prompts in parts (`enable_chunked_prefill`): vLLM
    stops there when it has to set a request's random numbers back. Samples are then others from run to run.
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
        entropies: bool = False,
        top_logprobs: int = 0,
    ) -> None:
        """Check the servers at `url` (several: a list, or separated by commas) against the trainer's `model`.

        `tokenizer` (name or folder) is compared with the servers'. SystemExit where something doesn't fit.
        """
        check_top_logprobs(top_logprobs)
        urls = url.split(",") if isinstance(url, str) else url
        self.servers = [Server(one.strip()) for one in urls]
        configs = [server.check(model, tokenizer) for server in self.servers]
        config = AutoConfig.from_pretrained(model).get_text_config()
        longest = min(one["model_config"]["max_model_len"] for one in configs)
        # The sampled token takes one of the places where it is not among the likeliest.
        known = min(MOST_LOGPROBS, *(most_logprobs(one) - 1 for one in configs))
        if top_logprobs > known:
            raise SystemExit(f"top_logprobs {top_logprobs} needs vLLM servers with --max-logprobs {top_logprobs + 1}")
        seeded = not any(stops_at_seeds(one) for one in configs)
        if not seeded:
            print(
                "vLLM on a CPU can't seed requests whose prompts it computes in parts: samples will differ from run to "
                "run. Start the server with --no-enable-chunked-prefill to have them follow the seed",
                file=sys.stderr,
            )
        super().__init__(
            num_slots, vocab_size, temperature, top_p, config, longest, entropies, top_logprobs, known, seeded
        )
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
        sampling["logprobs"] = self.known and self.known + 1
        body = {"token_ids": tokens, "sampling_params": sampling}
        request = asyncio.run_coroutine_threadsafe(self._generate(server.url, body), self.loop)
        self.requests[request] = slot
        request.add_done_callback(self.arrived.put)

    async def _generate(self, url: str, body: dict[str, Any]) -> httpx.Response:
        for pause in PAUSES:
            try:
                return await self.http.post(url + "/inference/v1/generate", json=body)
            except DROPPED:
                await asyncio.sleep(pause)
        return await self.http.post(url + "/inference/v1/generate", json=body)

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
            raise server.died(f"gave no answer: {error!r}") from None
        if answer.is_error:
            raise server.died(f"failed with {answer.status_code}: {_message(answer)}")
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            raise server.died(f"ended a request with {choice['finish_reason']!r}")
        versions = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]
        content = choice["logprobs"]["content"]
        ids = [[top["token_id"] for top in token["top_logprobs"]] for token in content]
        logprobs = [[top["logprob"] for top in token["top_logprobs"]] for token in content]
        self._end(slot, choice["token_ids"], [token["logprob"] for token in content], versions, (ids, logprobs))

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
