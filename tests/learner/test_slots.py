"""Slots: many growing episodes in one cache have the logits that each would have alone."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
slots = pytest.importorskip("llm_utils.slots")


@torch.no_grad()
def alone(model, tokens, vocab_size):
    """The logits after these tokens, without a cache."""
    return model(input_ids=torch.from_numpy(np.asarray(tokens))[None], use_cache=False).logits[0, -1, :vocab_size]


def prefill(model_slots, pending):
    """The logits of the next token of each slot."""
    parts = [zip(some.tolist(), logits, strict=True) for some, logits in model_slots.prefill(pending)]
    return {slot: logits for part in parts for slot, logits in part}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["qwen2", "granite"])
def test_whatever_grows_beside_it_a_slot_goes_on_as_it_would_alone(small_model, vocab_size, kind, attention):
    model, rng = small_model(kind, attention), np.random.default_rng(1)
    model_slots, texts = slots.SlotModel(model, 5, vocab_size), {}
    for step in range(60):
        if step % 7 == 0:  # new tokens for some slots: a new episode, or more of an old one
            pending = {}
            for slot in rng.permutation(5)[: int(rng.integers(1, 5))].tolist():
                new = rng.integers(vocab_size, size=int(rng.integers(1, 30)))
                if slot not in texts or rng.random() < 0.4:
                    texts[slot], model_slots.length[slot] = new, 0
                else:
                    texts[slot] = np.concatenate([texts[slot], new])
                pending[slot] = new
            got = prefill(model_slots, pending)
            assert not pending
        else:  # one token each, for few slots or for most of them
            some = np.array(sorted(texts))[: 1 + step % len(texts)]
            new = rng.integers(vocab_size, size=len(some))
            for slot, token in zip(some.tolist(), new, strict=True):
                texts[slot] = np.append(texts[slot], token)
            got = dict(zip(some.tolist(), model_slots.decode(some, new), strict=True))
        for slot, logits in got.items():
            torch.testing.assert_close(logits, alone(model, texts[slot], vocab_size), atol=2e-4, rtol=1e-4)
        assert all(model_slots.length[slot] == len(text) for slot, text in texts.items())


def test_equal_prompts_are_computed_once_and_then_go_their_own_ways(small_model, vocab_size):
    model, rng = small_model("llama"), np.random.default_rng(0)
    one, two = rng.integers(vocab_size, size=20), rng.integers(vocab_size, size=17)
    model_slots = slots.SlotModel(model, 6, vocab_size)
    embedded = []
    handle = model.get_input_embeddings().register_forward_hook(lambda _, ids, __: embedded.append(ids[0].shape))
    prompts = {0: one, 1: two, 2: one, 3: one, 5: two}
    logits = prefill(model_slots, dict(prompts))
    handle.remove()
    assert embedded == [(2, 20)]
    for slot, prompt in prompts.items():
        expected = prefill(slots.SlotModel(model, 1, vocab_size), {0: prompt})
        torch.testing.assert_close(logits[slot], expected[0], atol=1e-5, rtol=0)
    active = np.array(sorted(prompts))
    new = rng.integers(vocab_size, size=(4, len(active)))
    assert len(set(new[0].tolist())) == len(active)
    for tokens in new:
        last = model_slots.decode(active, tokens)
    for i, slot in enumerate(active.tolist()):
        expected = alone(model, np.concatenate([prompts[slot], new[:, i]]), vocab_size)
        torch.testing.assert_close(last[i], expected, atol=1e-4, rtol=1e-4)


def test_new_tokens_of_different_episodes_are_not_taken_for_equal(small_model, vocab_size):
    """What a tool answers may be the same for two episodes, what stands before it is not."""
    model, rng = small_model("qwen2"), np.random.default_rng(0)
    model_slots, texts = slots.SlotModel(model, 2, vocab_size), [rng.integers(vocab_size, size=9) for _ in range(2)]
    prefill(model_slots, dict(enumerate(texts)))
    answer = rng.integers(vocab_size, size=5)
    for slot, logits in prefill(model_slots, {0: answer, 1: answer}).items():
        expected = alone(model, np.concatenate([texts[slot], answer]), vocab_size)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_long_and_short_prompts_are_not_padded_to_one_length(small_model, vocab_size, monkeypatch):
    model = small_model("qwen2")
    monkeypatch.setattr(slots.SlotModel, "PREFILL_TOKENS", 120)
    sizes, embedded = [100, 60, 55, 20, 12, 3], []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, __: embedded.append(ids[0].numel()))
    rng = np.random.default_rng(0)
    pending = {slot: rng.integers(vocab_size, size=size) for slot, size in enumerate(sizes)}
    assert sorted(prefill(slots.SlotModel(model, 6, vocab_size), pending)) == list(range(6))
    assert max(embedded) <= 120 and sum(embedded) < 1.5 * sum(sizes)


def test_gradient_checkpointing_does_not_make_a_slot_forget(policy_folder, vocab_size):
    """In training mode such layers drop the cache, and say so only in a warning."""
    from types import SimpleNamespace

    from llm_utils import forward, models

    args = SimpleNamespace(lora_rank=0, gradient_checkpointing=True)
    model = models.load_policy(policy_folder, torch.device("cpu"), args)
    assert forward.computes_anew(model)
    tokens = np.random.default_rng(0).integers(vocab_size, size=12)
    model_slots = slots.SlotModel(model, 2, vocab_size)
    prefill(model_slots, {0: tokens[:10]})
    model.train()  # as the trainer leaves it
    for token in tokens[10:]:
        logits = model_slots.decode(np.array([0]), np.array([token]))
    torch.testing.assert_close(logits[0], alone(model, tokens, vocab_size), atol=1e-4, rtol=1e-4)
