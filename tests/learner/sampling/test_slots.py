"""Slots: many growing episodes in one cache have the logits that each would have alone."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch

from llm_utils.sampling import graphs, slots


@torch.no_grad()
def alone(model, tokens, vocab_size):
    """The logits after these tokens, without a cache."""
    return model(input_ids=torch.from_numpy(np.asarray(tokens))[None], use_cache=False).logits[0, -1, :vocab_size]


def prefill(model_slots, pending):
    """The logits of the next token of each slot."""
    parts = [zip(some.tolist(), logits, strict=True) for some, logits in model_slots.prefill(pending)]
    return {slot: logits for part in parts for slot, logits in part}


@pytest.fixture
def small_stores(monkeypatch):
    """Stores from 8 tokens on, so that rows of a few dozen tokens lie in several, and no memory is kept."""
    monkeypatch.setattr(slots.SlotModel, "CAPACITY", 8)
    monkeypatch.setattr(slots.SlotCache, "KEPT_BYTES", 0)


@pytest.fixture
def recorded(monkeypatch):
    """Forwards of all rows as a GPU has them, of whole multiples of 8 columns, replayed: how many there were."""
    counts = {"recorded": 0, "replayed": 0}

    def record(run, *_):
        def replay():
            counts["replayed"] += 1
            run()

        counts["recorded"] += 1
        return replay

    monkeypatch.setattr(slots.SlotModel, "RECORDED", ("cpu",))
    monkeypatch.setattr(graphs.Graphs, "STEP", 8)
    monkeypatch.setattr(graphs, "record", record)
    return counts


@pytest.mark.parametrize("forwards", ["each asked for", "recorded"])
@pytest.mark.parametrize("stores", ["one store", "small stores", "room for all"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["qwen2", "granite", "sliding window"])
def test_whatever_grows_beside_it_a_slot_goes_on_as_it_would_alone(
    request, small_model, vocab_size, kind, attention, stores, forwards
):
    if stores == "small stores":
        request.getfixturevalue("small_stores")
    counts = request.getfixturevalue("recorded") if forwards == "recorded" else {}
    model, rng = small_model(kind, attention), np.random.default_rng(1)
    longest_row = 500 if stores == "room for all" else math.inf
    model_slots, texts = slots.SlotModel(model, 5, vocab_size, longest_row), {}
    seen = set()
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
        if step % 9 == 8:  # an episode is forked
            source, target = rng.permutation(sorted(texts))[0], int(rng.integers(5))
            model_slots.copy(int(source), target)
            texts[target] = texts[source]
        seen.add(sum(bool(store.slots) for store in model_slots.cache.stores.values()))
    assert max(seen) > 2 if stores == "small stores" else seen == {1}
    assert not counts or counts["replayed"] >= counts["recorded"] > 2
    sizes = {store.size for store in model_slots.cache.stores.values()}
    assert (sizes == {(5, 501)}) == (stores == "room for all" and forwards == "recorded")


def test_rows_that_stay_where_they_are_are_recorded_once_for_a_width(small_model, vocab_size, recorded):
    model = small_model("llama")
    model_slots, everyone = slots.SlotModel(model, 3, vocab_size), np.arange(3)
    prefill(model_slots, {slot: np.arange(58 + slot) for slot in range(3)})
    for _ in range(7):  # 61 to 64 columns, 65 to 67: there is memory for 68
        model_slots.decode(everyone, everyone)
    assert recorded == {"recorded": 2, "replayed": 2 + 1}


def test_a_forward_that_cant_be_recorded_is_asked_for_each_time(small_model, vocab_size, recorded, monkeypatch):
    def refuse(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nsee the docs")

    monkeypatch.setattr(graphs, "record", refuse)
    model, text = small_model("llama"), np.arange(41)
    model_slots = slots.SlotModel(model, 2, vocab_size)
    prefill(model_slots, {0: text, 1: text[:4]})
    for token in (3, 4):
        model_slots.decode(np.array([0]), np.array([token]))
    assert model_slots.replays
    with pytest.warns(UserWarning, match="cannot be captured.*: operation not permitted when stream is capturing$"):
        model_slots.decode(np.array([0]), np.array([5]))
    assert not model_slots.replays
    logits = model_slots.decode(np.array([0]), np.array([6]))
    torch.testing.assert_close(logits[0], alone(model, [*text, 3, 4, 5, 6], vocab_size), atol=1e-4, rtol=1e-4)


def test_what_stays_between_rollouts_is_replayed_and_what_is_new_is_recorded(small_model, vocab_size, recorded):
    """The logits that all graphs write to went, while the graphs stayed with their small store."""
    model, text = small_model("llama"), np.arange(60)
    model_slots, before = slots.SlotModel(model, 1, vocab_size), 0
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]):  # four with up to 64 columns, and two beyond, or three
        model_slots.clear()
        prefill(model_slots, {0: text})
        for i, token in enumerate(tokens):
            logits = model_slots.decode(np.array([0]), np.array([token]))
            torch.testing.assert_close(
                logits[0], alone(model, [*text, *tokens[: i + 1]], vocab_size), atol=1e-4, rtol=1e-4
            )
        assert model_slots.replays and recorded["recorded"] > before
        before = recorded["recorded"]


def test_between_rollouts_nothing_holds_the_memory_of_a_large_store(small_model, vocab_size, small_stores, recorded):
    model_slots = slots.SlotModel(small_model("llama"), 2, vocab_size)
    prefill(model_slots, {0: np.arange(9), 1: np.arange(30)})
    for _ in range(4):
        model_slots.decode(np.arange(2), np.arange(2))
    stores = [weakref.ref(store) for store in model_slots.cache.stores.values()]
    assert recorded["replayed"] and len(stores) > 1
    model_slots.clear()
    gc.collect()  # without a GPU, what is replayed refers to its store
    assert not any(store() for store in stores)


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

    from llm_utils.setup import loading

    args = SimpleNamespace(lora_rank=0, gradient_checkpointing="on")
    model = loading.load_policy(policy_folder, torch.device("cpu"), args)
    assert model.is_activation_checkpointing
    tokens = np.random.default_rng(0).integers(vocab_size, size=12)
    model_slots = slots.SlotModel(model, 2, vocab_size)
    prefill(model_slots, {0: tokens[:10]})
    model.train()  # as the trainer leaves it
    for token in tokens[10:]:
        logits = model_slots.decode(np.array([0]), np.array([token]))
    torch.testing.assert_close(logits[0], alone(model, tokens, vocab_size), atol=1e-4, rtol=1e-4)


def test_one_long_row_does_not_make_the_others_long(small_model, vocab_size, monkeypatch):
    """Memory follows the sum of the lengths, not slots x longest row, at every step of uneven growth."""
    monkeypatch.setattr(slots.SlotCache, "KEPT_BYTES", 0)
    monkeypatch.setattr(slots.SlotModel, "CAPACITY", 16)
    model, rng = small_model("qwen2"), np.random.default_rng(0)
    size = slots.bytes_per_token(model.config, model.dtype)
    model_slots = slots.SlotModel(model, 64, vocab_size)
    prefill(model_slots, {slot: rng.integers(vocab_size, size=10) for slot in range(64)})
    prefill(model_slots, {7: rng.integers(vocab_size, size=1900)})
    assert model_slots.cache.nbytes < 2.5 * size * (63 * 16 + 1910)
    for step in range(200):
        some = np.flatnonzero(rng.random(64) < np.linspace(0.05, 0.9, 64))
        if len(some):
            model_slots.decode(some, rng.integers(vocab_size, size=len(some)))
        if step % 50 == 0:  # an episode begins anew in a slot that was long
            slot = int(rng.integers(64))
            model_slots.length[slot] = 0
            prefill(model_slots, {slot: rng.integers(vocab_size, size=10)})
        held = np.maximum(model_slots.length, 16)
        assert model_slots.cache.nbytes <= 2.5 * size * held.sum(), step
    model_slots.clear()
    assert model_slots.cache.nbytes == 0


def test_episodes_that_have_not_parted_yet_are_computed_once(small_model, vocab_size):
    """A group's episodes that wrote the same call get the same result; another token, or other weights, part them."""
    model, rng, embedded = small_model("qwen2"), np.random.default_rng(0), []
    prompt, result = rng.integers(vocab_size, size=20), rng.integers(vocab_size, size=30)
    model_slots = slots.SlotModel(model, 5, vocab_size)
    prefill(model_slots, {slot: prompt for slot in range(4)})
    model_slots.copy(0, 4)
    for tokens in ([3, 3, 3, 4, 3], [5, 5, 6, 5, 5]):
        model_slots.decode(np.arange(5), np.array(tokens))
    hook = model.get_input_embeddings().register_forward_hook(lambda _, ids, __: embedded.append(ids[0].numel()))
    found = prefill(model_slots, dict.fromkeys(range(5), result))
    assert sum(embedded) == 3 * 30  # slots 0, 1 and 4 are one
    for slot, said in enumerate(([3, 5], [3, 5], [3, 6], [4, 5], [3, 5])):
        expected = alone(model, [*prompt, *said, *result], vocab_size)
        torch.testing.assert_close(found[slot], expected, atol=2e-4, rtol=1e-4)
    model_slots.forget_shared_prefixes()
    embedded.clear()
    prefill(model_slots, {slot: result[:10] for slot in (0, 1)})
    assert sum(embedded) == 2 * 10
    prefill(model_slots, {slot: result[:10] for slot in (0, 1)})
    assert sum(embedded) == 4 * 10
    hook.remove()


def test_the_same_bytes_of_two_widths_are_other_tokens(small_model, vocab_size):
    model, alike = small_model("qwen2"), {0: np.array([5, 7], np.int64), 1: np.array([5, 0, 7, 0], np.int32)}
    for slot, logits in prefill(slots.SlotModel(model, 2, vocab_size), dict(alike)).items():
        torch.testing.assert_close(logits, alone(model, alike[slot].astype(np.int64), vocab_size), atol=2e-4, rtol=1e-4)


def test_128_slots_of_a_3b_model_with_a_32k_row_take_little_more_than_their_rows():
    """On the meta device: sizes without memory. All slots as long as the longest row would take 155 GB."""
    cache = slots.SlotCache(128, torch.device("meta"), 256)
    like = torch.empty(1, 2, 1, 128, dtype=torch.bfloat16, device="meta")
    lengths = np.full(128, 900)
    cache.reserve(np.arange(128), np.zeros(128, int), lengths)
    for store in cache.stores.values():
        store.reserve(900)
        for index in range(36):
            store.layer(index, [like, like])
    cache.reserve(np.arange(5, 6), lengths[:1], np.array([32_768]))
    cache.stores[32_768].reserve(32_767)
    size = 36 * 2 * 2 * 128 * 2
    assert size * 128 * 32_768 > 154e9
    assert 5e9 < cache.nbytes < 1.5 * size * (127 * 900 + 32_768)


def test_attention_reads_a_heads_columns_side_by_side(small_model, vocab_size, monkeypatch):
    """Columns of several heads in turn took a CPU up to three times as long."""
    model, seen = small_model("qwen2"), []
    model_slots = slots.SlotModel(model, 4, vocab_size)
    update = model_slots.cache.update
    monkeypatch.setattr(model_slots.cache, "update", lambda *given: seen.append(update(*given)) or seen[-1])
    prefill(model_slots, {slot: np.arange(5 + slot) for slot in range(4)})
    model_slots.decode(np.arange(4), np.arange(4))  # all rows, in place
    model_slots.decode(np.array([2]), np.array([7]))  # copies of some
    assert len(seen) >= 3 * model.config.num_hidden_layers
    assert all(x.stride()[2:] == (x.shape[3], 1) for pair in seen for x in pair)


def test_a_prompt_longer_than_a_forward_may_be_is_read_in_parts(small_model, vocab_size, monkeypatch):
    monkeypatch.setattr(slots.SlotModel, "PREFILL_TOKENS", 20)
    model, rng, embedded = small_model("qwen2"), np.random.default_rng(0), []
    prompt, other = rng.integers(vocab_size, size=70), rng.integers(vocab_size, size=50)
    model_slots = slots.SlotModel(model, 4, vocab_size)
    hook = model.get_input_embeddings().register_forward_hook(lambda _, ids, __: embedded.append(ids[0].numel()))
    found = prefill(model_slots, {0: prompt, 1: other, 3: prompt})
    hook.remove()
    assert max(embedded) <= 20 and sum(embedded) == 120  # equal prompts were computed once
    for slot, tokens in ((0, prompt), (1, other), (3, prompt)):
        torch.testing.assert_close(found[slot], alone(model, tokens, vocab_size), atol=2e-4, rtol=1e-4)
        new = model_slots.decode(np.array([slot]), np.array([5]))
        torch.testing.assert_close(new[0], alone(model, [*tokens, 5], vocab_size), atol=2e-4, rtol=1e-4)


def test_a_float32_head_gives_float32_logits_to_sampler_and_trainer(policy_folder, made_up_rows, vocab_size):
    """The same hidden states, and no rounding after them: bf16 logits alone would differ by up to 1 part in 256."""
    from llm_utils.setup import loading
    from llm_utils.training import forward

    cpu = torch.device("cpu")
    policy = loading.load_policy(policy_folder, cpu, dtype=torch.bfloat16, float32_head=True)
    plain = loading.load_policy(policy_folder, cpu, dtype=torch.bfloat16)
    row = made_up_rows(groups=1, size=1)[0]
    row.train_mask = np.arange(len(row.tokens)) == len(row.tokens) - 1
    states = plain.model(torch.from_numpy(row.tokens[:-1]).long()[None]).last_hidden_state[0, -1]
    exact = (plain.get_input_embeddings().weight.float() @ states.float())[:vocab_size].log_softmax(-1)
    trained = forward.policy_forward(policy, [row], vocab_size, 1.0)[0]
    torch.testing.assert_close(trained[0], exact[row.tokens[-1]], atol=1e-5, rtol=1e-5)
    rounded = forward.policy_forward(plain, [row], vocab_size, 1.0)[0]
    assert abs(rounded[0] - exact[row.tokens[-1]]) > 1e-4
    trained.sum().backward()
    assert policy.get_input_embeddings().weight.grad.dtype == policy.get_output_embeddings().weight.dtype
    sampled = prefill(slots.SlotModel(policy, 1, vocab_size), {0: row.tokens[:-1]})[0]
    assert sampled.dtype == torch.float32
    assert (sampled.bfloat16().float() != sampled).any()


@pytest.fixture
def computed(small_model):
    """A model, and the numbers of tokens in each of its forwards, as they come."""
    model, sizes = small_model("qwen2"), []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, __: sizes.append(ids[0].numel()))
    return model, sizes


def begin(model_slots, texts):
    """What `prefill` is given where these episodes begin. Others go on writing before it reads them."""
    for slot in texts:
        model_slots.begin(slot)
    return dict(texts)


@pytest.mark.parametrize("stores", ["one store", "small stores"])
def test_what_new_episodes_begin_with_is_computed_once(request, computed, vocab_size, monkeypatch, stores):
    if stores == "small stores":
        request.getfixturevalue("small_stores")
    monkeypatch.setattr(slots.SlotModel, "PREFILL_TOKENS", 64)
    (model, sizes), rng = computed, np.random.default_rng(0)
    instructions = rng.integers(vocab_size, size=100)  # more than one forward takes

    def ask(length):
        return np.concatenate([instructions, rng.integers(vocab_size, size=length)])

    texts = {0: ask(5), 1: ask(7), 3: ask(4), 4: ask(30)}
    texts[5] = texts[1]
    model_slots = slots.SlotModel(model, 6, vocab_size)
    found = prefill(model_slots, begin(model_slots, texts))
    assert sum(sizes[:2]) == 100 and sum(sizes[2:]) <= 2 * (5 + 7 + 4 + 30)
    for _ in range(2):
        for slot, logits in found.items():
            torch.testing.assert_close(logits, alone(model, texts[slot], vocab_size), atol=2e-4, rtol=1e-4)
        # they go on, and then others begin in the same slots, some at a time, with the instructions still there
        model_slots.decode(np.array([1, 5]), np.array([3, 4]))
        sizes.clear()
        some = {1: ask(9), 5: ask(200)}
        some[4] = some[1]
        texts |= some
        found = prefill(model_slots, begin(model_slots, some))
        assert sum(sizes) <= 2 * 9 + 200 + 64
        found |= prefill(model_slots, begin(model_slots, {0: texts[0]}))  # the very same: one token predicts
        assert sizes[-1] == 1
    for slot in texts:
        token = np.array([slot])
        expected = alone(model, [*texts[slot], slot], vocab_size)
        torch.testing.assert_close(model_slots.decode(token, token)[0], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("end", ["forget_shared_prefixes", "clear"])
def test_new_weights_know_nothing_of_older_beginnings(computed, vocab_size, end):
    (model, sizes), text = computed, np.arange(60) % vocab_size
    model_slots = slots.SlotModel(model, 2, vocab_size)
    prefill(model_slots, begin(model_slots, {0: text}))
    getattr(model_slots, end)()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    sizes.clear()
    found = prefill(model_slots, begin(model_slots, {0: text}))
    assert sum(sizes) == 60
    torch.testing.assert_close(found[0], alone(model, text, vocab_size), atol=2e-4, rtol=1e-4)


def test_what_only_keeps_others_company_leaves_the_beginning_alone(computed, vocab_size):
    """Between the end of an episode and the first tokens of the next one others write, in the same forward."""
    (model, sizes), rng = computed, np.random.default_rng(0)
    texts = dict(enumerate(rng.integers(vocab_size, size=(4, 50))))
    model_slots = slots.SlotModel(model, 4, vocab_size)
    prefill(model_slots, begin(model_slots, texts))
    pending = begin(model_slots, {0: np.concatenate([texts[0][:40], texts[1][:20]])})
    for token in range(3):
        model_slots.decode(np.arange(1, 4), np.full(3, token))
    sizes.clear()
    found = prefill(model_slots, dict(pending))
    assert sum(sizes) == 20
    torch.testing.assert_close(found[0], alone(model, pending[0], vocab_size), atol=2e-4, rtol=1e-4)


def test_episodes_that_begin_otherwise_leave_the_others_their_beginning(computed, vocab_size):
    (model, sizes), rng = computed, np.random.default_rng(0)
    one, two, three = rng.integers(vocab_size, size=(3, 90))
    texts = {slot: np.append(text, slot) for slot, text in enumerate((one, two, one, three, two, one))}
    model_slots = slots.SlotModel(model, 6, vocab_size)
    found = prefill(model_slots, begin(model_slots, texts))
    assert sum(sizes) == 90 + 90 + 91 + 5
    for slot, logits in found.items():
        torch.testing.assert_close(logits, alone(model, texts[slot], vocab_size), atol=2e-4, rtol=1e-4)
