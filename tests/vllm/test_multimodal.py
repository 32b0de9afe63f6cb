"""Text models of multimodal checkpoints through real vLLM, each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from llm_utils import distributed
from llm_utils.sampling.vllm_engine import VLLMEngine
from llm_utils.setup.loading import load_policy

SHARED = Path(__file__).resolve().parents[1] / "shared"
VOCABULARY, SLOTS, LENGTH = 110, 3, 12  # the embedding has ten rows more


def gaps(folder: str) -> list[float]:
    """Return the largest difference of a log-probability from the trainer's, with first and with other weights."""
    policy, found = load_policy(folder, torch.device("cpu")), []
    engine = VLLMEngine(folder, SLOTS, VOCABULARY, max_model_len=128)
    for version in range(2):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02 * version)
        engine.update(distributed.weights(policy), version)
        rows = [
            np.random.default_rng(slot).integers(3, VOCABULARY, 30 + slot).astype(np.int32) for slot in range(SLOTS)
        ]
        for slot, row in enumerate(rows):
            engine.feed(slot, row, LENGTH, [], seed=[version, slot])
        spans = []
        while engine.busy:
            spans += engine.step()
        engine.release()
        assert len(spans) == SLOTS and all((span.versions == version).all() for span in spans)
        for span in spans:
            row = torch.tensor(np.concatenate([rows[span.slot], span.tokens])).long()
            with torch.no_grad():
                logprobs = policy(row[None]).logits[0, -LENGTH - 1 : -1, :VOCABULARY].log_softmax(-1)
            ours = logprobs.gather(1, row[-LENGTH:, None])[:, 0].numpy()
            found.append(float(np.abs(ours - span.logprobs).max()))
    engine.close()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["Gemma 3", "Gemma 4", "Mistral 3"])
def test_its_tokens_are_those_of_the_trainer_under_new_weights(family, tmp_path):
    """Qwen3.5 is missing: on a CPU vLLM computes its layers in bfloat16 only."""
    pytest.importorskip("torchvision", reason="vLLM imports it here", exc_type=(ImportError, RuntimeError))
    sys.path.insert(0, str(SHARED))
    import multimodal

    multimodal.save(family, tmp_path / "model")
    command = [sys.executable, __file__, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(json.loads(done.stdout.splitlines()[-1])) < 2e-4


if __name__ == "__main__":
    print(json.dumps(gaps(sys.argv[1])), flush=True)
