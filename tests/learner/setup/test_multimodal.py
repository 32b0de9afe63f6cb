"""The text models of checkpoints that hold a model of images, too."""

from types import SimpleNamespace

import multimodal
import numpy as np
import ppo_llm
import pytest
import torch

from llm_utils import distributed
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.sampling.vllm_engine import TokenEngine
from llm_utils.setup import loading

CPU, VOCABULARY = torch.device("cpu"), 120


@pytest.fixture(params=multimodal.FAMILIES)
def checkpoint(request, tmp_path):
    """The whole model, and the folder that holds it."""
    return multimodal.save(request.param, tmp_path / "model"), tmp_path / "model"


def test_the_text_model_is_loaded_and_sampled(checkpoint):
    whole, folder = checkpoint
    policy = loading.load_policy(folder, CPU)
    row = np.random.default_rng(0).integers(3, 110, 30).astype(np.int32)
    with torch.no_grad():
        ours, its = (model(torch.tensor(row[None]).long()).logits.log_softmax(-1) for model in (policy, whole))
        assert (ours - its).abs().max() < 1e-5
        engine = TransformersEngine(policy, 1, VOCABULARY)
        engine.feed(0, row, 8, [], seed=1)
        spans = []
        while engine.busy:
            spans += engine.step()
        row = torch.tensor(np.concatenate([row, spans[0].tokens])).long()
        ours = policy(row[None]).logits[0, -9:-1].log_softmax(-1).gather(1, row[-8:, None])[:, 0].numpy()
    assert np.abs(ours - spans[0].logprobs).max() < 1e-4


def test_vllm_gets_the_names_of_the_checkpoint(checkpoint):
    """vLLM runs the whole model, so a text model's own names would be unknown to it."""
    whole, folder = checkpoint
    engine = TokenEngine(1, VOCABULARY, 1.0, 1.0, loading.read_config(folder), 512)
    weights = dict(engine._complete(distributed.weights(loading.load_policy(folder, CPU))))
    state = whole.state_dict()
    trained = {name for name, _ in whole.named_parameters() if not name.startswith("model.visual.")}
    assert weights.keys() == trained | {"lm_head.weight"}, "vLLM would not update a head that is tied to the embedding"
    assert all(torch.equal(weights[name], state[name]) for name in weights)


def test_the_critic_has_the_width_of_the_text_model(checkpoint):
    _, folder = checkpoint
    critic = ppo_llm.Critic(str(folder), SimpleNamespace(gradient_checkpointing=False), torch.float32)
    assert critic(torch.arange(3, 23)[None]).shape == (1, 20)


@pytest.mark.parametrize("kind, added", [("llama", []), ("qwen2", ["lm_head.weight"]), ("gemma2", [])])
def test_other_checkpoints_keep_their_names(kind, added, small_model, vocab_size):
    """Llama's head is not tied here, and vLLM's class for Gemma 2 has none."""
    model = small_model(kind)
    model.config.tie_word_embeddings = kind != "llama"
    model.tie_weights()
    weights = list(distributed.weights(model))
    engine = TokenEngine(1, vocab_size, 1.0, 1.0, model.config, 512)
    assert [name for name, _ in engine._complete(weights)] == [name for name, _ in weights] + added
