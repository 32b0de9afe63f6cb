"""The choice of engine: what is passed on, and what is refused before any work."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from llm_utils.sampling import vllm_engine
from llm_utils.sampling.make_engine import check_updates, make_engine

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ARGS = {"engine": "vllm", "num_envs": 3, "temperature": 0.7, "top_p": None}


def test_vllm_makes_room_for_the_longest_row(monkeypatch):
    made = {}
    monkeypatch.setattr(vllm_engine, "VLLMEngine", lambda *args, **kwargs: made.update(kwargs))
    for longest, expected in [((), None), ((700,), 700)]:
        make_engine(SimpleNamespace(**ARGS, cuda=True), "any", 10, None, None, *longest)
        assert made["max_model_len"] == expected and not made["entropies"]
    make_engine(SimpleNamespace(**ARGS, cuda=True), "any", 10, None, None, entropies=True, top_logprobs=4)
    assert made["entropies"] and made["top_logprobs"] == 4


def test_vllm_on_a_gpu_is_refused_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit, match="--engine vllm would use the GPU in spite of --no-cuda"):
        make_engine(SimpleNamespace(**ARGS, cuda=False), "any", 10, None, None)


@pytest.mark.parametrize(
    "kind, engine, device, refused",
    [
        ("GptOss", "vllm", GPU, "of gpt-oss"),
        ("GptOss", "vllm-server", CPU, "of gpt-oss"),
        ("GptOss", "transformers", CPU, None),
        ("Qwen3Moe", "vllm", CPU, "on a CPU"),
        ("Qwen3Moe", "vllm", GPU, None),
        ("Qwen3Moe", "vllm-server", CPU, None),
        ("DeepseekV3", "vllm", CPU, "on a CPU"),
        ("Qwen3", "vllm", CPU, None),
        ("GraniteMoeHybrid", "vllm", CPU, "on a CPU"),
    ],
)
def test_weights_that_vllm_does_not_update_are_refused(kind, engine, device, refused):
    config = getattr(transformers, f"{kind}Config")()
    if refused is None:
        check_updates(engine, config, device)
    else:
        with pytest.raises(SystemExit, match=f"--engine {engine}: vLLM 0.32 does not update the experts {refused}"):
            check_updates(engine, config, device)
