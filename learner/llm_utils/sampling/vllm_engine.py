"""vLLM in the trainer's process, and what it shares with the client of a vLLM server (`vllm_client.py`).

vLLM is imported when an engine is made, not before: everything else here runs without it.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch

from llm_utils.sampling.engine import VLLM_SHARE, EngineDied, Span

Array = np.ndarray
Likeliest = tuple[Any, Any]  # of n tokens: the k most likely ones [n, k] and their log-probabilities [n, k], or more

OLDEST = (0, 32)  # the first vLLM that reports the weight version of every token
MASKED = -1e30  # added to the logits of rows that the embedding has beyond the tokenizer; their probability is then 0
MOST_MASKED = 1024  # vLLM's limit of biased tokens in a request
MOST_LOGPROBS = 20  # of one token
NO_LOGPROB = -9999.0  # how a server writes NaN and minus infinity


class TokenEngine:
    """The rows of all slots, everything fed and sampled, tokens in and tokens out. Nothing is ever tokenised again.

    A subclass has `_submit(slot, tokens, sampling)` start a request and gives what came of it to `_end`.

    Spans carry, on request, the `top_logprobs` most likely tokens (at most 20: vLLM reports no more), and `entropies`.
    An entropy knows the `known` likeliest tokens only (20, less where a server allows less) and takes all others as
    one, which makes it a lower bound. Both are of the distribution that was sampled from, temperature and top-p
    included; what top-p leaves out has the log-probability minus infinity.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        temperature: float,
        top_p: float,
        config: Any,
        max_model_len: int,
        entropies: bool = False,
        top_logprobs: int = 0,
        known: int = MOST_LOGPROBS,
        seeded: bool = True,
    ) -> None:
        """`config` is that of the (text) model in transformers, `max_model_len` the longest row in tokens.

        `seeded`: does every request get a seed of its own?
        """
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
        self.num_slots, self.vocab_size, self.max_model_len, self.seeded = num_slots, vocab_size, max_model_len, seeded
        self.entropies, self.top_logprobs = entropies, top_logprobs
        self.known = max(known if entropies else 0, top_logprobs)  # how many of the likeliest tokens are asked for
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
        """A second view on the same weights, with its own rows and temperature, without top-p and entropies."""
        other = copy.copy(self)
        other.temperature, other.top_p = temperature, 1.0
        other.entropies, other.top_logprobs, other.known = False, 0, 0
        other._forget()
        return other

    @property
    def busy(self) -> bool:
        """Is something being sampled, or waiting to be returned by `step`?"""
        return bool(self.requests or self.done)

    def feed(
        self, slot: int, tokens: Array, max_new_tokens: int, stop_token_ids: Sequence[int], seed: Any = None
    ) -> None:
        """Append `tokens` to the slot's row and have the next span sampled. `seed` begins a new row.

        ValueError where the row and the span would not fit into `max_model_len`; the row then stays as it was.
        """
        row = ([] if seed is not None else self.rows[slot]) + np.asarray(tokens).tolist()
        if len(row) + max_new_tokens > self.max_model_len:
            raise ValueError(
                f"a row of {len(row)} tokens and {max_new_tokens} new ones don't fit into vLLM's max_model_len "
                f"{self.max_model_len}: raise it, or lower the environment's limits"
            )
        self.rows[slot] = row
        if seed is not None:
            self.seeds[slot] = np.random.SeedSequence(seed)
        sampling = {
            "max_tokens": int(max_new_tokens),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": int(self.seeds[slot].spawn(1)[0].generate_state(1)[0]) if self.seeded else None,
            "stop_token_ids": [int(token) for token in stop_token_ids],
            "ignore_eos": True,  # stop_token_ids say all
            "logprobs": self.known,  # besides that of the sampled token
            "detokenize": False,
            "logit_bias": self.logit_bias,
        }
        self._submit(slot, row, sampling)

    def fork(self, slot: int, new: int, seed: Any) -> None:
        """Let the slot `new` go on from a copy of `slot`'s row. ValueError while one of them is being sampled."""
        if busy := {slot, new}.intersection(self.requests.values()):
            raise ValueError(f"slot {min(busy)} is being sampled: only rows that wait for `feed` can be forked")
        self.rows[new], self.seeds[new] = list(self.rows[slot]), np.random.SeedSequence(seed)

    def _submit(self, slot: int, tokens: list[int], sampling: dict[str, Any]) -> None:
        raise NotImplementedError

    def _end(
        self,
        slot: int,
        tokens: Iterable[int],
        logprobs: Any,
        versions: Iterable[tuple[str | int, int, int]],
        likeliest: Likeliest,
    ) -> None:
        """A span is complete. `versions` are (version, first token, one past the last)."""
        ids, values = np.asarray(list(tokens), np.int32), np.asarray(logprobs, np.float32)
        if not (np.isfinite(values) & (values > NO_LOGPROB)).all():
            raise FloatingPointError("the policy's logits are not finite", [])
        self.rows[slot] += ids.tolist()
        sampled_under = np.zeros(len(ids), np.int32)
        for version, start, end in versions:
            sampled_under[start:end] = int(version)
        span = Span(slot, ids, values, sampled_under)
        if self.known:
            top_tokens, top_logprobs = _sorted(*likeliest, self.known)
            if self.entropies:
                span.entropies = entropy_bound(top_logprobs)
            if self.top_logprobs:
                span.top_tokens = top_tokens[:, : self.top_logprobs]
                span.top_logprobs = top_logprobs[:, : self.top_logprobs]
        self.done.append(span)

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


def _sorted(tokens: Any, logprobs: Any, k: int) -> tuple[Array, Array]:
    """The first k of each row, the likeliest first."""
    ids, values = np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32)
    values = np.where(values > NO_LOGPROB, values, -np.inf).astype(np.float32)
    order = np.argsort(-values, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)


def entropy_bound(logprobs: Array) -> Array:
    """Lower bounds float32 [n], in nats, of the entropies of which the k largest log-probabilities [n, k] are known.

    All other tokens count as one.
    """
    probs = np.exp(logprobs.astype(np.float64))
    probs = np.concatenate([probs, np.clip(1 - probs.sum(1, keepdims=True), 0, 1)], 1)
    return -(probs * np.log(np.where(probs > 0, probs, 1))).sum(1).astype(np.float32)


def check_top_logprobs(top_logprobs: int) -> None:
    """SystemExit where vLLM doesn't report so many."""
    if not 0 <= top_logprobs <= MOST_LOGPROBS:
        raise SystemExit(f"vLLM gives at most {MOST_LOGPROBS} log-probabilities of a token, not {top_logprobs}")


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
        memory: float = VLLM_SHARE,
        entropies: bool = False,
        top_logprobs: int = 0,
    ) -> None:
        """Load `model`, a Hugging Face name or a folder, in bfloat16 on a GPU and float32 on a CPU.

        `max_model_len` None means what the model and the memory allow; `memory` is vLLM's share of the GPU's memory
        (on a CPU the environment variable VLLM_CPU_KVCACHE_SPACE, GiB, says how large the key-value cache is).
        """
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise SystemExit(
                "--engine vllm runs in a single process. With torchrun give vLLM GPUs of its own: --engine vllm-server"
            )
        check_top_logprobs(top_logprobs)
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
                    # A prompt in parts sets the request's random numbers back, which stops vLLM on a CPU. Prompts come
                    # in parts above all after an update, when everything is computed again.
                    enable_chunked_prefill=None if gpu else False,
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
        super().__init__(num_slots, vocab_size, temperature, top_p, config, longest, entropies, top_logprobs)

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
                shape = (len(out.token_ids), -1)  # of each token: the sampled one, then the likeliest
                ids, logprobs = (np.reshape(x, shape) for x in (out.logprobs.token_ids, out.logprobs.logprobs))
                slot, likeliest = view.requests.pop(output.request_id), (ids[:, 1:], logprobs[:, 1:])
                view._end(slot, out.token_ids, logprobs[:, 0], versions, likeliest)
        return self._take()

    def release(self) -> None:
        """Forget all rows; on a GPU vLLM then sleeps until the next `feed` or `update`."""
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
