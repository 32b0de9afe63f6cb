"""vLLM in the trainer's process, and the code shared with the client of a vLLM server (`vllm_client.py`).

vLLM is imported when an engine is made. Everything else here runs without it.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from llm_utils.sampling.engine import VLLM_SHARE, EngineDied, Span, check_fork
from llm_utils.setup.loading import read_config

Array = np.ndarray
Likeliest = tuple[Any, Any]  # for n tokens: at least the k most likely ones [n, k] and their log-probabilities [n, k]

OLDEST = (0, 32)  # the first vLLM that reports the weight version of every token
MASKED = -1e30  # added to the logits of embedding rows beyond the tokenizer, whose probability becomes 0
MOST_MASKED = 1024  # vLLM's limit of biased tokens in a request
MOST_LOGPROBS = 20  # per token
NO_LOGPROB = -9999.0  # a server's value for NaN and minus infinity
STATES = ("conv_", "linear_conv_", "mamba_")  # fields of configs with recurrent layers or convolutions begin so
HEADLESS = ("gemma2", "gemma3n_text")  # vLLM's classes that have no head of their own, only the tied embedding


class TokenEngine:
    """The rows of all slots with everything fed and sampled, tokens in and tokens out. Nothing is ever re-tokenised.

    A subclass starts requests in `_submit(slot, tokens, sampling)` and passes their results to `_end`.

    On request, spans carry the `top_logprobs` most likely tokens (at most 20, vLLM's limit) and `entropies`. An entropy
    uses only the `known` most likely tokens (20, or the server's lower limit) and treats all others as one, so it is a
    lower bound. Both describe the distribution that was sampled from, with temperature and top-p. Tokens outside top-p
    have the log-probability minus infinity.
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
        """Take `config`, the checkpoint's in transformers, and `max_model_len`, the longest row in tokens.

        `seeded`: True if every request gets its own seed.
        """
        text = config.get_text_config()
        self.trains_part = trains_part(config)
        model_rows = text.vocab_size
        if vocab_size > model_rows:
            raise SystemExit(
                f"the tokenizer has {vocab_size} tokens, but vLLM's model has only {model_rows}. "
                "Give vLLM the model that is trained"
            )
        if model_rows - vocab_size > MOST_MASKED:
            raise SystemExit(
                f"the model has {model_rows - vocab_size} rows beyond the tokenizer's {vocab_size} tokens, but vLLM "
                f"can exclude at most {MOST_MASKED} from sampling. Use --engine transformers, or resize the embedding"
            )
        self.num_slots, self.vocab_size, self.max_model_len, self.seeded = num_slots, vocab_size, max_model_len, seeded
        self.entropies, self.top_logprobs = entropies, top_logprobs
        self.known = max(known if entropies else 0, top_logprobs)  # number of most likely tokens to request
        tied = any(getattr(level, "tie_word_embeddings", False) for level in (config, text))
        self.tied = tied and text.model_type not in HEADLESS
        self.temperature, self.top_p = temperature, top_p
        self.logit_bias = {token: MASKED for token in range(vocab_size, model_rows)} or None
        self._forget()

    def _forget(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.seeds: dict[int, np.random.SeedSequence] = {}  # of the episode; every turn spawns its own seed
        self.requests: dict[Any, int] = {}  # running request -> its slot
        self.done: list[Span] = []

    def twin(self, temperature: float) -> Self:
        """Return an evaluation engine: the same weights and figures, its own rows and temperature."""
        other = copy.copy(self)
        other.temperature = temperature
        other._forget()
        return other

    @property
    def busy(self) -> bool:
        """Return True while a span is being sampled, or waits to be returned by `step`."""
        return bool(self.requests or self.done)

    def feed(
        self, slot: int, tokens: Array, max_new_tokens: int, stop_token_ids: Sequence[int], seed: Any = None
    ) -> None:
        """Append `tokens` to the slot's row and request the next span. `seed` begins a new row.

        Raise ValueError if the row and the span exceed `max_model_len`. The row then stays unchanged.
        """
        row = ([] if seed is not None else self.rows[slot]) + np.asarray(tokens).tolist()
        if len(row) + max_new_tokens > self.max_model_len:
            raise ValueError(
                f"a row of {len(row)} tokens and {max_new_tokens} new ones do not fit into vLLM's max_model_len "
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
            "ignore_eos": True,  # only stop_token_ids count
            "logprobs": self.known,  # in addition to that of the sampled token
            "detokenize": False,
            "logit_bias": self.logit_bias,
        }
        self._submit(slot, row, sampling)

    def fork(self, slot: int, new: int, seed: Any) -> None:
        """Copy `slot`'s row to the slot `new`. Raise RuntimeError while one of them is being sampled."""
        check_fork(slot, new, self.requests.values())
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
        """Complete a span. `versions` are (version, first token, one past the last)."""
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
        """Yield `weights` by their names in the checkpoint, and the head that is tied to the embedding, which vLLM 0.32
        would not update otherwise."""
        embedding = None
        for name, tensor in weights:
            if self.trains_part:
                name = re.sub(r"^model\.", "model.language_model.", name)
            if name.endswith("embed_tokens.weight"):
                embedding = tensor
            elif name.endswith("lm_head.weight"):
                embedding = None
            yield name, tensor
        if self.tied and embedding is not None:
            yield "lm_head.weight", embedding


def trains_part(config: Any) -> bool:
    """Return True if transformers loads only the text model of a multimodal checkpoint, as of Qwen3.5.

    vLLM runs the multimodal model, in which the weights of the text model have longer names.
    """
    trained = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return trained is not None and trained.config_class is not type(config)


def spare_the_trainer(model: Any) -> None:
    """Undo, for the trainer's models, what vLLM changes in a class of transformers that it runs itself.

    vLLM runs some families (SmolLM3, OLMo 3) with these classes. It then calls all their instances in its own way, and
    the trainer's lack an attribute that it reads.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and "do_not_compile" in vars(module):
            type(module).do_not_compile = True  # vLLM's instances have a value of their own


def _sorted(tokens: Any, logprobs: Any, k: int) -> tuple[Array, Array]:
    """Return the first k of each row, the most likely first."""
    ids, values = np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32)
    values = np.where(values > NO_LOGPROB, values, -np.inf).astype(np.float32)
    order = np.argsort(-values, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)


def entropy_bound(logprobs: Array) -> Array:
    """Return lower bounds float32 [n], in nats, of entropies with known k largest log-probabilities [n, k].

    All other tokens count as one.
    """
    probs = np.exp(logprobs.astype(np.float64))
    probs = np.concatenate([probs, np.clip(1 - probs.sum(1, keepdims=True), 0, 1)], 1)
    return -(probs * np.log(np.where(probs > 0, probs, 1))).sum(1).astype(np.float32)


def check_top_logprobs(top_logprobs: int) -> None:
    """Raise SystemExit if vLLM does not report so many."""
    if not 0 <= top_logprobs <= MOST_LOGPROBS:
        raise SystemExit(f"vLLM gives at most {MOST_LOGPROBS} log-probabilities per token, not {top_logprobs}")


def import_vllm() -> Any:
    """Import vllm and return the module. Raise SystemExit with the remedy if it is missing or too old."""
    # One process, because weights are passed as tensors. No thread binding, because the trainer needs the cores too.
    # Both are read when vLLM is imported.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
    except ImportError as error:
        raise SystemExit(
            f"--engine vllm: {error}. Install vLLM with pip install 'agent-r1[vllm]' (on a CPU: see docs/engines.md)"
        ) from error
    if tuple(int(part) for part in vllm.__version__.split(".")[:2]) < OLDEST:
        raise SystemExit(f"--engine vllm needs vLLM {OLDEST[0]}.{OLDEST[1]} or newer, but this is {vllm.__version__}")
    return vllm


class Host:
    """The vLLM engine of this process, shared by several views."""

    def __init__(self, llm: Any, sleeps: bool) -> None:
        self.llm, self.sleeps, self.asleep = llm, sleeps, False
        self.views: dict[str, VLLMEngine] = {}  # request -> the view it belongs to
        self.count = 0

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call vLLM. Raise EngineDied for any exception: vLLM's state is then unknown."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise EngineDied(f"vLLM stopped with {type(error).__name__}: {error}") from error

    def sleep(self) -> None:
        """Free the GPU's memory for the trainer; the weights stay in main memory."""
        if self.sleeps and not self.asleep and not self.views:
            self.call(self.llm.sleep, level=1)
            self.asleep = True

    def wake(self) -> None:
        """Take the GPU's memory back."""
        if self.asleep:
            torch.cuda.empty_cache()  # vLLM does not see the reserve of the trainer's allocator
            self.call(self.llm.wake_up)
            self.asleep = False


class VLLMEngine(TokenEngine):
    """An engine that runs vLLM in this process, step by step. A turn joins the batch as soon as it is fed.

    Requests that run during an update continue under the new weights, and their keys and values are recomputed.
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

        `max_model_len` None means the maximum of model and memory. `memory` is vLLM's share of the GPU's memory. On a
        CPU the environment variable VLLM_CPU_KVCACHE_SPACE sets the size of the key-value cache in GiB.
        """
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise SystemExit(
                "--engine vllm runs in a single process. With torchrun, give vLLM its own GPUs: --engine vllm-server"
            )
        check_top_logprobs(top_logprobs)
        vllm = import_vllm()
        config, gpu = read_config(model), torch.cuda.is_available()
        # of recurrent layers and convolutions, which vLLM keeps with a cached prefix only if prompts come in parts
        states = any(key.startswith(STATES) for key in config.get_text_config().to_dict())
        set_num_threads = torch.set_num_threads
        # vLLM 0.32 for CPUs inspects every module and fails on this one, which numba imports (through bm25s)
        llvmlite_ffi = sys.modules.pop("llvmlite.binding.ffi", None)
        with torch.random.fork_rng():  # vLLM seeds torch again
            try:
                llm = vllm.LLM(
                    model,
                    skip_tokenizer_init=True,
                    language_model_only=True,  # a multimodal model then needs no processor, and no memory for images
                    generation_config="vllm",  # our sampling settings, not those of the model's folder
                    dtype="bfloat16" if gpu else "float32",
                    max_model_len=max_model_len or -1,
                    max_num_seqs=num_slots,
                    gpu_memory_utilization=memory,
                    enforce_eager=not gpu,  # compiling for a CPU takes longer than it saves here
                    distributed_executor_backend="uni",
                    enable_sleep_mode=gpu,
                    enable_prefix_caching=gpu or not states,
                    logprobs_mode="processed_logprobs",
                    # A prompt in parts resets the request's random numbers, which stops vLLM on a CPU. Prompts come in
                    # parts mostly after an update, when everything is recomputed.
                    enable_chunked_prefill=None if gpu else False,
                    # the rotation of vLLM for CPUs is wrong for models that pass it heads apart (LFM2, DeepSeek V3)
                    compilation_config=None if gpu else {"custom_ops": ["all", "-rotary_embedding"]},
                )
            except Exception as error:
                raise SystemExit(f"--engine vllm cannot load {model}: {type(error).__name__}: {error}") from error
        torch.set_num_threads = set_num_threads  # on a CPU vLLM replaces it
        if llvmlite_ffi is not None:
            sys.modules["llvmlite.binding.ffi"] = llvmlite_ffi
        longest = llm.llm_engine.model_config.max_model_len
        self.host, self.sampling_params = Host(llm, sleeps=gpu), vllm.SamplingParams
        self.final_only = vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        llm.llm_engine.set_weight_version("0")
        llm.apply_model(spare_the_trainer)
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
        """Run one forward of vLLM. Return the spans completed by it."""
        if self.requests:
            for output in self.host.call(self.host.llm.llm_engine.step):
                view = self.host.views.pop(output.request_id)
                out = output.outputs[0]
                versions = [(span.version, span.start, span.end) for span in out.weight_versions]
                shape = (len(out.token_ids), -1)  # for each token: the sampled one, then the most likely
                ids, logprobs = (np.reshape(x, shape) for x in (out.logprobs.token_ids, out.logprobs.logprobs))
                slot, likeliest = view.requests.pop(output.request_id), (ids[:, 1:], logprobs[:, 1:])
                view._end(slot, out.token_ids, logprobs[:, 0], versions, likeliest)
        return self._take()

    def release(self) -> None:
        """Forget all rows. On a GPU vLLM then sleeps until the next `feed` or `update`."""
        if self.requests:
            self.host.call(self.host.llm.llm_engine.abort_request, list(self.requests))
        for name in self.requests:
            del self.host.views[name]
        self._forget()
        self.host.sleep()

    def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load `weights`, unsharded tensors by their names in the state dict of the Hugging Face model, in place."""
        self.host.wake()
        llm, call = self.host.llm, self.host.call
        call(llm.collective_rpc, "reload_weights", kwargs={"weights_iterator": self._complete(weights)})
        call(llm.reset_prefix_cache, reset_running_requests=True)
        llm.llm_engine.set_weight_version(str(version))

    def close(self) -> None:
        """Shut vLLM down and free its memory."""
        self._forget()
        self.host.llm.llm_engine.engine_core.shutdown()
