"""Rows through a model: a prompt that rows share is computed once, and nothing else changes."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llm_utils.training import forward


def policy_forward(model, rows, masks, *arguments):
    """`forward.policy_forward` where these masks say what is trained on."""
    for row, mask in zip(rows, masks, strict=True):
        row.train_mask = mask
    return forward.policy_forward(model, rows, *arguments)


def in_one_row(model, row, mask, vocab_size, temperature=1.0):
    """The log-probabilities of a row's masked tokens, from the plainest use of the model."""
    tokens = torch.from_numpy(row.tokens).long()
    logits = model(input_ids=tokens[None]).logits[0, :, :vocab_size].float() / temperature
    return torch.log_softmax(logits, -1)[:-1].gather(1, tokens[1:, None])[mask[1:], 0]


def gradient(model, logprobs, seed=0):
    """The gradient of a random sum of the log-probabilities."""
    weights = torch.from_numpy(np.random.default_rng(seed).normal(size=len(logprobs)).astype(np.float32))
    (logprobs * weights).sum().backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat


class Counting:
    """Counts the tokens, padding included, that a model embeds."""

    def __init__(self, model):
        self.tokens = 0
        model.get_input_embeddings().register_forward_hook(self.add)

    def add(self, module, inputs, output):
        self.tokens += inputs[0].numel()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["qwen2", "llama", "granite", "sliding window"])
def test_shared_prompts_change_neither_log_probabilities_nor_gradients(
    small_model, made_up_rows, vocab_size, kind, attention
):
    model = small_model(kind, attention).double()  # in float32 rounding alone makes 1e-6
    rows = made_up_rows(groups=3, size=5, prompts=(40, 60))
    assert len({row.prompt_length for row in rows}) == 3 and len({len(row.tokens) for row in rows}) > 6
    alike = rows[0].turns[0].start + 1  # episodes of a group may begin alike, or be the same
    rows[1].tokens[:alike] = rows[0].tokens[:alike]
    rows[6] = rows[5]
    for masks in (
        [row.action_mask for row in rows],
        [np.arange(len(row.tokens)) >= row.prompt_length for row in rows],  # the first token of a row predicts nothing
    ):
        plain = torch.cat([in_one_row(model, *both, vocab_size) for both in zip(rows, masks, strict=True)])
        count = Counting(model)
        shared = policy_forward(model, rows, masks, vocab_size, 1.0)[0]
        assert 2 * count.tokens <= len(rows) * max(len(row.tokens) for row in rows)  # the prompts were computed once
        torch.testing.assert_close(shared, plain, atol=1e-5, rtol=0)
        one, two = gradient(model, plain), gradient(model, shared)
        assert (one - two).norm() / one.norm() < 1e-6


def test_prompts_are_shared_in_half_precision_too(small_model, made_up_rows, vocab_size):
    """The mask that eager attention adds has the model's own type."""
    for attention in ("eager", "sdpa"):
        model, rows = small_model("qwen2", attention).bfloat16(), made_up_rows(prompts=(40, 60))
        masks = [row.action_mask for row in rows]
        shared = policy_forward(model, rows, masks, vocab_size, 1.0)[0]
        plain = torch.cat([in_one_row(model, *both, vocab_size) for both in zip(rows, masks, strict=True)])
        assert shared.dtype == torch.float32 and (shared - plain).abs().mean() < 0.05


@pytest.mark.parametrize("case", ["alone", "different prompts", "one token"])
def test_where_nothing_can_be_shared_rows_are_computed_whole(small_model, made_up_rows, vocab_size, case):
    model = small_model("qwen2")
    rows = made_up_rows(groups=4, size=1) if case == "different prompts" else made_up_rows(groups=1, size=4)
    if case == "alone":
        rows = rows[:1]
    if case == "one token":
        for row in rows:
            row.prompt_length, row.tokens[0] = 1, 5
    masks = [row.action_mask for row in rows]
    count = Counting(model)
    together = policy_forward(model, rows, masks, vocab_size, 0.7)[0]
    assert count.tokens == len(rows) * max(len(row.tokens) for row in rows)
    plain = torch.cat([in_one_row(model, *both, vocab_size, 0.7) for both in zip(rows, masks, strict=True)])
    torch.testing.assert_close(together, plain, atol=1e-5, rtol=0)


def test_rows_in_which_nothing_is_asked_for_give_nothing(small_model, made_up_rows, vocab_size):
    rows = made_up_rows(groups=1)
    masks = [np.zeros(len(row.tokens), bool) for row in rows]
    logprobs, entropies = policy_forward(small_model("qwen2"), rows, masks, vocab_size, 1.0)
    assert len(logprobs) == len(entropies) == 0 and logprobs.sum() == 0


def test_microbatches_keep_groups_together(made_up_rows):
    rows = made_up_rows(groups=6, size=4)
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    budget = 4 * max(len(row.tokens) for row in rows)
    batches = list(forward.microbatches(shuffled, budget))
    assert sorted(row.episode for batch in batches for row in batch) == list(range(24))
    for batch in batches:
        assert len(batch) * max(len(row.tokens) for row in batch) <= budget
    tasks = [row.task_index for batch in batches for row in batch]
    assert sum(a != b for a, b in zip(tasks, tasks[1:], strict=False)) == 5  # every group in one stretch


def test_scores_land_on_their_tokens(small_model, made_up_rows, vocab_size):
    model, rows = small_model("llama"), made_up_rows(groups=3, size=3, seed=1)
    masks = [np.arange(len(row.tokens)) >= row.prompt_length for row in rows]
    for row, mask in zip(rows, masks, strict=True):
        row.train_mask = mask
    batches = list(forward.microbatches([segment for row in rows for segment in row.segments()], 100))
    assert len(batches) > 1
    scored = forward.score(((batch, 1) for batch in batches), model, vocab_size, 1.0)
    for row, mask in zip(rows, masks, strict=True):
        with torch.no_grad():
            expected = in_one_row(model, row, mask, vocab_size).numpy()
        np.testing.assert_allclose(scored[row.episode][mask], expected, atol=1e-5)
        assert not scored[row.episode][~mask].any() and scored[row.episode].dtype == np.float32


# ------------------------------------------------------------------------------------------------- a head in parts


def all_of(model, rows, vocab_size, entropy_gradient):
    """Log-probabilities, entropies, and the gradient of a random sum of what has one."""
    masks = [np.arange(len(row.tokens)) >= row.prompt_length for row in rows]
    logprobs, entropies = policy_forward(model, rows, masks, vocab_size, 0.7, entropy_gradient)
    assert entropies.requires_grad == entropy_gradient
    both = torch.cat([logprobs, entropies]) if entropy_gradient else logprobs
    return logprobs.detach(), entropies.detach(), gradient(model, both)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "granite", "gemma2", "gpt2"])
def test_a_head_in_parts_gives_the_same(
    small_model, made_up_rows, vocab_size, kind, entropy_gradient, monkeypatch
):
    """Also where a model scales (granite) or caps (gemma2) its logits, and where rows share a prompt."""
    model = small_model(kind).double()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # so that a cap would be felt
    shared, alone = made_up_rows(groups=2, size=4, prompts=(40, 60)), made_up_rows(groups=5, size=1)
    for rows in (shared, alone):
        whole = all_of(model, rows, vocab_size, entropy_gradient)
        sizes = []
        head = model.get_output_embeddings()
        hook = head.register_forward_hook(lambda *x, sizes=sizes: sizes.append(x[2].numel() * 4))
        with monkeypatch.context() as patch:
            patch.setattr(forward, "LOGITS_BYTES", 4 * vocab_size * 7)
            parts = all_of(model, rows, vocab_size, entropy_gradient)
            with torch.no_grad():
                masks = [np.arange(len(row.tokens)) >= row.prompt_length for row in rows]
                scored = policy_forward(model, rows, masks, vocab_size, 0.7)
        hook.remove()
        assert 0 < max(sizes) <= 4 * vocab_size * 7 and len(sizes) > 6
        for one, two in zip(whole, parts, strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
        assert (whole[2] - parts[2]).norm() < 1e-6 * whole[2].norm()
        torch.testing.assert_close(torch.stack(scored), torch.stack(whole[:2]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("float32_head", [False, True])
def test_a_head_in_parts_goes_with_adapters_and_gradient_checkpointing(
    policy_folder, made_up_rows, vocab_size, monkeypatch, float32_head
):
    pytest.importorskip("peft")
    from types import SimpleNamespace

    from llm_utils.setup import loading

    found = []
    for size in (2**29, 4 * vocab_size * 7):
        monkeypatch.setattr(forward, "LOGITS_BYTES", size)
        for checkpointing in ("off", "on"):
            args = SimpleNamespace(lora_rank=2, gradient_checkpointing=checkpointing)
            torch.manual_seed(0)
            cpu = torch.device("cpu")
            model = loading.load_policy(policy_folder, cpu, args, dtype=torch.float32, float32_head=float32_head)
            found.append(all_of(model, made_up_rows(), vocab_size, True))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


class Operations(TorchDispatchMode):
    """Counts the operations by name."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count[operation.overloadpacket.__name__] += 1
        return operation(*args, **kwargs or {})


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_the_backward_pass_does_not_compute_entropies_without_a_gradient(
    small_model, made_up_rows, vocab_size, monkeypatch, entropy_gradient
):
    monkeypatch.setattr(forward, "LOGITS_BYTES", 4 * vocab_size * 7)
    model, rows = small_model("llama"), made_up_rows()
    masks = [row.action_mask for row in rows]
    logprobs, entropies = policy_forward(model, rows, masks, vocab_size, 1.0, entropy_gradient)
    with Operations() as backward:
        (logprobs.sum() + (entropies.sum() if entropy_gradient else 0)).backward()
    assert backward.count["_log_softmax"] > 3  # of every part again
    assert (backward.count["exp"] > 3) == entropy_gradient


def test_results_are_those_of_the_plain_formula_to_the_bit(small_model, made_up_rows, vocab_size):
    model, rows = small_model("llama"), made_up_rows(groups=1, size=1)
    ids, size = torch.from_numpy(rows[0].tokens).long(), len(rows[0].tokens)
    masks, index = [np.arange(size) > 0], (torch.zeros(size - 1, dtype=torch.long), torch.arange(size - 1))
    with forward.logits_only_at(model, index):
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[:, :vocab_size], -1)
    entropies = -(logprobs.exp() * logprobs).sum(-1).detach()
    chosen = logprobs[torch.arange(size - 1), ids[1:]]
    found = policy_forward(model, rows, masks, vocab_size, 1.0)
    assert torch.equal(found[0], chosen) and torch.equal(found[1], entropies)
    assert torch.equal(gradient(model, found[0]), gradient(model, chosen))
