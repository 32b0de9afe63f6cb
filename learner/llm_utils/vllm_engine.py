"""vLLM in the trainer's process, and what it shares with the client of a vLLM server (`vllm_server.py`).

vLLM is imported when an engine is made, not before: everything else here runs without it.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
import torch

from llm_utils.engine import EngineDied

Array = np.ndarray
Span = tuple[int, Array, Array, Array]  # slot, tokens int32, log-probabilities float32, weight versions int32

OLDEST = (0, 32)  # the first vLLM that reports the weight version of every token
MASKED = -1e30  # added to the logits of rows that the embedding has beyond the tokenizer; their probability is then 0
MOST_MASKED = 1024  # vLLM's limit of biased tokens in a request


class TokenEngine:
    """The rows of all slots, everything fed and sampled, tokens in and tokens out. Nothing is ever tokenised again.

    A subclass has `_submit(slot, tokens, sampling)` start a request and gives what came of it to `_end`.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        temperature: float,
        top_p: float,
        config: Any,
        max_model_len: int,
    ) -> None:
        """`config` is that of the (text) model in transformers, `max_model_len` the longest row in tokens."""
        model_rows = config.vocab_size
        if vocab_size > model_rows:
            raise SystemExit(
                f"the tokenizer has {vocab_size} tokens, vLLM's model only {model_rows}: they don't fit. "
                "Give vLLM the model that is trained"
            )
        if model_rows - vocab_size > MOST_MASKED:
            raise SystemExit(
                f"the model has {model_rows - vocab_size} rows beyond the tokenizer's {vocab_size} tokens, vLLM can "
                f"keep at most {MOST_MASKED} from being sampled. Use --engine transformers, or resize the embedding"
            )
        self.num_slots, self.max_model_len = num_slots, max_model_len
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        self.temperature, self.top_p = temperature, top_p
        self.logit_bias = {token: MASKED for token in range(vocab_size, model_rows)} or None
        self._forget()

    def _forget(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.seeds: dict[int, np.random.SeedSequence] = {}  # of the episode; every turn spawns its own
        self.requests: dict[Any, int] = {}  # what is being sampled -> its slot
        self.done: list[Span] = []

    def twin(self, temperature: float) -> Self:
        """A second view on the same weights, with its own episodes and temperature and without top-p."""
        other = copy.copy(self)
        other.temperature, other.top_p = temperature, 1.0
        other._forget()
        return other

    @property
    def busy(self) -> bool:
        """Is something being sampled, or waiting to be returned by `step`?"""
        return bool(self.requests or self.done)

    def feed(self, slot: int, tokens: Array, max_new_tokens: int, stop_token_ids: list[int], seed: Any = None) -> None:
        """Append `tokens` to the slot's episode and have the next span sampled. `seed` begins a new episode.

        ValueError where the row and the span would not fit into `max_model_len`.
        """
        if seed is not None:
            self.rows[slot], self.seeds[slot] = [], np.random.SeedSequence(seed)
        self.rows[slot] += np.asarray(tokens).tolist()
        longest = len(self.rows[slot]) + max_new_tokens
        if longest > self.max_model_len:
            raise ValueError(
                f"an episode of {longest - max_new_tokens} tokens and {max_new_tokens} new ones don't fit into vLLM's "
                f"max_model_len {self.max_model_len}: raise it, or lower the environment's limits"
            )
        sampling = {
            "max_tokens": int(max_new_tokens),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": int(self.seeds[slot].spawn(1)[0].generate_state(1)[0]),
            "stop_token_ids": [int(token) for token in stop_token_ids],
            "ignore_eos": True,  # stop_token_ids say all
            "logprobs": 0,  # of the sampled token only
            "detokenize": False,
            "logit_bias": self.logit_bias,
        }
        self._submit(slot, self.rows[slot], sampling)

    def _submit(self, slot: int, tokens: list[int], sampling: dict[str, Any]) -> None:
        raise NotImplementedError

    def _end(self, slot: int, tokens: Iterable[int], logprobs: Any, versions: Iterable[tuple[str, int, int]]) -> None:
        """A span is complete. `versions` are (version, first token, one past the last)."""
        ids, values = np.asarray(list(tokens), np.int32), np.asarray(logprobs, np.float32)
        if not (np.isfinite(values) & (values > -9999)).all():  # -9999 is how a server writes NaN
            raise FloatingPointError("the policy's logits are not finite", [])
        self.rows[slot] += ids.tolist()
        sampled_under = np.zeros(len(ids), np.int32)
        for version, start, end in versions:
            sampled_under[start:end] = int(version)
        self.done.append((slot, ids, values, sampled_under))

    def _take(self) -> list[Span]:
        done, self.done = self.done, []
        return done

    def _complete(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """`weights`, with the head that is tied to the embedding, which vLLM 0.32 would otherwise leave as it was."""
        embedding = None
        for name, tensor in weights:
            if name.endswith("embed_tokens.weight"):
                embedding = tensor
            elif name.endswith("lm_head.weight"):
                embedding = None
            yield name, tensor
        if self.tied and embedding is not None:
            yield "lm_head.weight", embedding


def import_vllm() -> Any:
    """The vllm module; SystemExit with the remedy where it is missing or too old."""
    # One process, because weights are handed over as tensors; no binding of threads, because the trainer needs the
    # cores too. Both are read at vLLM's import.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
    except ImportError as error:
        raise SystemExit(
            f"--engine vllm: {error}. Install vLLM with pip install 'agent-r1[vllm]' (on a CPU as docs/engines.md says)"
        ) from error
    if tuple(int(part) for part in vllm.__version__.split(".")[:2]) < OLDEST:
        raise SystemExit(f"--engine vllm needs vLLM {OLDEST[0]}.{OLDEST[1]} or newer, this is {vllm.__version__}")
    return vllm


class Host:
    """The vLLM engine of this process, which several views share."""

    def __init__(self, llm: Any, sleeps: bool) -> None:
        self.llm, self.sleeps, self.asleep = llm, sleeps, False
        self.views: dict[str, VLLMEngine] = {}  # request -> the view it belongs to
        self.count = 0

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call vLLM. What it raises means that its state is unknown from now on."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise EngineDied(f"vLLM stopped with {type(error).__name__}: {error}") from error

    def sleep(self) -> None:
        """Give the GPU's memory to the trainer; the weights wait in the machine's memory."""
        if self.sleeps and not self.asleep and not self.views:
            self.call(self.llm.sleep, level=1)
            self.asleep = True

    def wake(self) -> None:
        """Take the memory back."""
        if self.asleep:
            torch.cuda.empty_cache()  # vLLM does not see what the trainer's allocator keeps in reserve
            self.call(self.llm.wake_up)
            self.asleep = False


class VLLMEngine(TokenEngine):
    """Samples with a vLLM engine in this process, driven step by step; turns join the batch the moment they are fed.

    Requests that run during an update go on under the new weights, their keys and values computed again.
    """

    overlaps = False  # step() computes in the caller's thread

    def __init__(
        self,
        model: str,
        num_slots: int,
        vocab_size: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_model_len: int | None = None,
        memory: float = 0.4,
    ) -> None:
        """Load `model`, a Hugging Face name or a folder, in bfloat16 on a GPU and float32 on a CPU.

        `max_model_len` None means what the model and the memory allow; `memory` is vLLM's share of the GPU's memory
        (on a CPU the environment variable VLLM_CPU_KVCACHE_SPACE, GiB, says how large the key-value cache is).
        """
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise SystemExit(
                "--engine vllm runs in a single process. With torchrun give vLLM GPUs of its own: --engine vllm-server"
            )
        vllm = import_vllm()
        gpu = torch.cuda.is_available()
        set_num_threads = torch.set_num_threads
        # vLLM 0.32 for CPUs looks into every module and stops at this one, which numba, and with it bm25s, imports
        stumbling_block = sys.modules.pop("llvmlite.binding.ffi", None)
        with torch.random.fork_rng():  # vLLM seeds torch anew
            try:
                llm = vllm.LLM(
                    model,
                    skip_tokenizer_init=True,
                    generation_config="vllm",  # sampling is what we say, not what the model's folder recommends
                    dtype="bfloat16" if gpu else "float32",
                    max_model_len=max_model_len or -1,
                    max_num_seqs=num_slots,
                    gpu_memory_utilization=memory,
                    enforce_eager=not gpu,  # compiling for a CPU takes longer than it saves here
                    distributed_executor_backend="uni",
                    enable_sleep_mode=gpu,
                    enable_prefix_caching=True,
                    logprobs_mode="processed_logprobs",
                )
            except Exception as error:
                raise SystemExit(f"--engine vllm can't load {model}: {type(error).__name__}: {error}") from error
        torch.set_num_threads = set_num_threads  # on a CPU vLLM replaces it
        if stumbling_block is not None:
            sys.modules["llvmlite.binding.ffi"] = stumbling_block
        config, longest = llm.llm_engine.model_config.hf_text_config, llm.llm_engine.model_config.max_model_len
        self.host, self.sampling_params = Host(llm, sleeps=gpu), vllm.SamplingParams
        self.final_only = vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        llm.llm_engine.set_weight_version("0")
        super().__init__(num_slots, vocab_size, temperature, top_p, config, longest)

    def _submit(self, slot: int, tokens: list[int], sampling: dict[str, Any]) -> None:
        host = self.host
        host.wake()
        host.count += 1
        name = str(host.count)
        params = self.sampling_params(**sampling, flat_logprobs=True, output_kind=self.final_only)
        prompt = {"type": "token", "prompt_token_ids": list(tokens)}
        host.call(host.llm.llm_engine.add_request, name, prompt, params)
        host.views[name], self.requests[name] = self, slot

    def step(self) -> list[Span]:
        """One forward of vLLM. Returns the spans that were completed by it."""
        if self.requests:
            for output in self.host.call(self.host.llm.llm_engine.step):
                view = self.host.views.pop(output.request_id)
                out = output.outputs[0]
                versions = [(span.version, span.start, span.end) for span in out.weight_versions]
                view._end(view.requests.pop(output.request_id), out.token_ids, out.logprobs.logprobs, versions)
        return self._take()

    def release(self) -> None:
        """Forget all episodes; on a GPU vLLM then sleeps until the next `feed` or `update`."""
        if self.requests:
            self.host.call(self.host.llm.llm_engine.abort_request, list(self.requests))
        for name in self.requests:
            del self.host.views[name]
        self._forget()
        self.host.sleep()

    def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load `weights`, unsharded tensors under their names in the state dict of the Hugging Face model, in place."""
        self.host.wake()
        llm, call = self.host.llm, self.host.call
        call(llm.collective_rpc, "reload_weights", kwargs={"weights_iterator": self._complete(weights)})
        call(llm.reset_prefix_cache, reset_running_requests=True)
        llm.llm_engine.set_weight_version(str(version))

    def close(self) -> None:
        """Shut vLLM down and free its memory."""
        self._forget()
        self.host.llm.llm_engine.engine_core.shutdown()
