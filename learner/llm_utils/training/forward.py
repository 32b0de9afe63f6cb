"""Batches of finished token sequences, and the log-probabilities of chosen tokens under a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from llm_utils.setup.model_checks import Layers, layers_of
from llm_utils.training import cudnn_attention
from llm_utils.trajectory import Segment

Array = np.ndarray


class Row(Protocol):
    """A training sequence: a segment of a trajectory, or a demonstration."""

    @property
    def tokens(self) -> Array:
        """Token ids, int32 [tokens]."""

    @property
    def train_mask(self) -> Array:
        """True for tokens to train on, bool [tokens]."""

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first that may be trained on."""

    @property
    def task_index(self) -> int:
        """A key that is equal for rows that are likely to share their first tokens."""


AnyRow = TypeVar("AnyRow", bound=Row)


def microbatches(rows: Sequence[AnyRow], budget: int, device: torch.device | str = "cpu") -> Iterator[list[AnyRow]]:
    """Yield batches of rows of similar length, with rows of the same prompt side by side. A batch has at most `budget`
    tokens with the padding on this device, but at least one row."""
    longest: dict[int, int] = {}
    for row in rows:
        longest[row.task_index] = max(longest.get(row.task_index, 0), len(row.tokens))
    batch: list[AnyRow] = []
    for row in sorted(rows, key=lambda row: (-longest[row.task_index], row.task_index, -len(row.tokens))):
        if batch and cudnn_attention.width(longest[batch[0].task_index], device) * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def pad(arrays: Sequence[Array], device: torch.device | str = "cpu") -> torch.Tensor:
    """Stack arrays of different lengths to [B, T], with zeros on the right.

    With right padding a causal model needs no attention mask: no real token attends to padding.
    """
    out = np.zeros((len(arrays), max(map(len, arrays))), bool if arrays[0].dtype == bool else np.int64)
    for target, array in zip(out, arrays, strict=True):
        target[: len(array)] = array
    return torch.from_numpy(out).to(device)


class TokenTree:
    """Rows as a tree of their tokens, in which a shared prefix occurs once.

    `ids`, `parents` (-1: none) and `depths` [N] describe the nodes; `paths` holds the nodes of each row.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        index: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        self.paths: list[Array] = []
        for row in rows:
            node, path = -1, []
            for token in row.tokens.tolist():
                node = index.setdefault((node, token), len(index))
                path.append(node)
            self.paths.append(np.array(path))
        self.parents, self.ids = np.array(list(index)).T
        self.depths = np.zeros(len(index), np.int64)
        for nodes in self.paths:
            self.depths[nodes] = np.arange(len(nodes))

    def mask(self) -> Array:
        """Return the attention mask [N, N]: a node attends to itself and to the nodes before it in its rows."""
        sees = np.eye(len(self.ids), dtype=bool)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                sees[node] |= sees[parent]
        return sees


MOST_NODES = 8192  # maximum nodes of a tree, as its mask grows with their square


def token_trees(model: PreTrainedModel, rows: Sequence[Row]) -> tuple[list[TokenTree], list[tuple[int, int]]]:
    """Return a tree for each prompt, and for each row the number of its tree and its index in it. Return nothing if
    trees do not halve the tokens to compute, or if a mask cannot make them right."""
    groups: dict[bytes, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.tokens[: row.prompt_length].tobytes(), []).append(i)
    longest = max(len(row.tokens) for row in rows)
    if len(groups) == len(rows) or (layers := layers_of(model.config, longest)).states or layers.refused:
        return [], []
    trees = [TokenTree([rows[i] for i in group]) for group in groups.values()]
    nodes = max(len(tree.ids) for tree in trees)
    if 2 * len(trees) * nodes > len(rows) * longest or nodes > MOST_NODES:
        return [], []
    places = {i: (u, k) for u, group in enumerate(groups.values()) for k, i in enumerate(group)}
    return trees, [places[i] for i in range(len(rows))]


LOGITS_BYTES = 2**29  # of float32 logits at once; results computed from them take about five times as much


@contextmanager
def logits_only_at(model: PreTrainedModel, index: tuple[torch.Tensor, ...]) -> Iterator[None]:
    """Make `model(...).logits` [N, vocabulary]: the head sees only the hidden states at `index` (rows, columns).

    With a large vocabulary the head costs more than the layers, and most positions predict nothing needed.
    """
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0][index],))
    try:
        yield
    finally:
        hook.remove()


def attention_mask(
    model: PreTrainedModel, sees: torch.Tensor, layers: Layers, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor | dict[str, Any]:
    """Return the mask of visible tokens in the form that the model takes: one, or one for each kind of layers.

    `sees` [rows, 1, queries, keys] is True for a token itself and those before it in its row. `queries` [rows, 1,
    queries, 1] and `keys` [..., keys] are positions; a layer with a window or chunks sees only near ones of these
    tokens. The mask is added to the scores, as eager attention cannot take another one.
    """
    seen = {}
    for kind in layers.kinds if layers.windows or layers.chunks else [""]:
        seen[kind] = sees
        if kind in layers.windows:
            seen[kind] = sees & (keys > queries - layers.windows[kind])
        elif kind in layers.chunks:
            seen[kind] = sees & (keys // layers.chunks[kind] == queries // layers.chunks[kind])
    lowest = torch.finfo(model.dtype).min
    masks = {kind: torch.zeros_like(x, dtype=model.dtype).masked_fill_(~x, lowest) for kind, x in seen.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def log_probabilities(
    logits: torch.Tensor, node_index: torch.Tensor, targets: torch.Tensor,
    vocab_size: int, temperature: float, entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return log-probabilities of `targets` [N] and entropies [N], float32, at the rows `node_index` [N] of logits
    [n, vocabulary]."""
    logits = logits[:, :vocab_size].float()
    all_logprobs = torch.log_softmax(logits if temperature == 1 else logits / temperature, -1)
    chosen = all_logprobs[node_index, targets]  # before the entropies: a recompute without theirs ends here
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return chosen, entropies[node_index]


def masks_of_windows(model: PreTrainedModel, columns: int) -> dict[str, Any]:
    """Return the `attention_mask` of rows of at most `columns` tokens if a layer has a window or chunks, else nothing.

    Without it SDPA makes a mask for each row in each of these layers, and keeps it for the backward pass. Layers that
    see all get none: attention is faster without.
    """
    layers = layers_of(model.config, columns)
    short = {*layers.windows, *layers.chunks}
    if not short or layers.states or layers.refused or model.config._attn_implementation != "sdpa":
        return {}
    places = torch.arange(columns, device=model.device)
    masks = attention_mask(model, (places <= places[:, None])[None, None], layers, places[:, None], places)
    if isinstance(masks, dict):
        masks |= {kind: None for kind in layers.kinds if kind not in short}
    return {"attention_mask": masks}


def policy_forward(
    model: PreTrainedModel, rows: Sequence[Row], vocab_size: int, temperature: float, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities [N] of the tokens where `train_mask` is True, row by row, and entropies [N], float32.

    A prefix shared by rows with the same prompt is computed once if that halves the work. Logits beyond LOGITS_BYTES
    are computed in parts, and recomputed in the backward pass.
    """
    train_checkpointed_layers(model)
    masks = [row.train_mask for row in rows]
    targets = np.concatenate([row.tokens[mask] for row, mask in zip(rows, masks, strict=True)]).astype(np.int64)
    inputs: dict[str, Any] = {"use_cache": False}
    trees, places = token_trees(model, rows)
    if trees:
        n = max(len(tree.ids) for tree in trees)
        sees = np.tile(np.eye(n, dtype=bool), (len(trees), 1, 1, 1))  # padding attends to itself
        for mask, tree in zip(sees, trees, strict=True):
            mask[0, : len(tree.ids), : len(tree.ids)] = tree.mask()
        ids, depths = (pad(x, model.device) for x in ([t.ids for t in trees], [t.depths for t in trees]))
        layers = layers_of(model.config, max(len(row.tokens) for row in rows))
        visible = torch.from_numpy(sees).to(model.device)
        seen = attention_mask(model, visible, layers, depths[:, None, :, None], depths[:, None, None])
        inputs |= {"position_ids": depths, "attention_mask": seen}
        paths = [u * n + trees[u].paths[k] for u, k in places]
    else:
        ids = cudnn_attention.widen(pad([row.tokens for row in rows], model.device), model)
        n = ids.shape[1]
        inputs |= masks_of_windows(model, n)
        paths = [i * n + np.arange(len(row.tokens)) for i, row in enumerate(rows)]
    predicting = np.concatenate([path[:-1][mask[1:]] for path, mask in zip(paths, masks, strict=True)])
    nodes, node_index = np.unique(predicting, return_inverse=True)  # sorted: nodes[node_index] = predicting
    at, node_index, targets = (torch.from_numpy(x).to(model.device) for x in (nodes, node_index.reshape(-1), targets))
    index = (at // n, at % n)

    settings = vocab_size, temperature, entropy_gradient
    results_of = getattr(model, "compiled_log_probabilities", log_probabilities)
    chunk = max(1, LOGITS_BYTES // (4 * vocab_size))  # positions
    if len(at) <= chunk:
        with logits_only_at(model, index):
            logits = model(input_ids=ids, **inputs).logits
        return results_of(logits, node_index, targets, *settings)

    hidden, head = hidden_states(model, index, input_ids=ids, **inputs)
    logprobs, entropies = (torch.empty(len(node_index), device=model.device) for _ in range(2))

    def logprobs_of_chunk(states: torch.Tensor, node_index: torch.Tensor, targets: torch.Tensor) -> Any:
        return results_of(head(states), node_index, targets, *settings)

    for first in range(0, len(at), chunk):
        inside = ((node_index >= first) & (node_index < first + chunk)).nonzero()[:, 0]
        arguments = hidden[first : first + chunk], node_index[inside] - first, targets[inside]
        if torch.is_grad_enabled():
            results = checkpoint(logprobs_of_chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            results = logprobs_of_chunk(*arguments)
        logprobs, entropies = (x.index_copy(0, inside, y) for x, y in zip((logprobs, entropies), results, strict=True))
    return logprobs, entropies


def without_head(model: Any) -> Any:
    """Return the part of a causal model that computes the states."""
    return getattr(model, model.base_model_prefix, None) or model.model  # Llama 4 has another prefix than its attribute


def hidden_states(
    model: Any, index: tuple[torch.Tensor, ...], **inputs: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the states [N, hidden] that the head gets at `index` (rows, columns), and a function that computes the
    logits [n, vocabulary] of some of them [n, hidden].

    A model may scale or cap its logits. So the function runs the model's own forward, with layers that return these
    states.
    """
    model_itself = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = without_head(model_itself)
    seen: list[Any] = []
    hook = layers.register_forward_hook(lambda _, __, output: seen.append(output))
    nothing = torch.zeros(0, dtype=torch.long, device=model.device)
    try:
        with logits_only_at(model, (nothing, nothing)):
            model(**inputs)
    finally:
        hook.remove()
    output, names = seen[0], {name: value for name, value in inputs.items() if name != "attention_mask"}

    def head(states: torch.Tensor) -> torch.Tensor:
        layers.forward = lambda *_, **__: type(output)(**{**output, "last_hidden_state": states[None]})
        try:
            return model_itself.forward(**names).logits[0]
        finally:
            del layers.forward

    return output.last_hidden_state[index], head


def train_checkpointed_layers(model: torch.nn.Module) -> None:
    """Put layers with gradient checkpointing into training mode, as it works only there. Modules inside them stay as
    they are, because training mode may change their results."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            model.training = module.training = True  # the whole model's flag tells a sampler to switch back


def check_finite(loss: torch.Tensor, rows: Sequence[Segment]) -> torch.Tensor:
    """Return the loss. Raise FloatingPointError with its trajectories if it is not finite and would destroy the
    weights."""
    if not torch.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss.item()}", list(dict.fromkeys(row.trajectory for row in rows)))
    return loss


@torch.no_grad()
def score(
    batches: Iterable[tuple[Sequence[Segment], float]], model: PreTrainedModel, vocab_size: int, temperature: float
) -> dict[int, Array]:
    """Return log-probabilities of the trained tokens by episode number: float32 [tokens], 0 where `train_mask` is
    False."""
    scored: dict[int, Array] = {}
    for batch, _ in batches:
        logprobs = policy_forward(model, batch, vocab_size, temperature)[0].cpu().numpy()
        ends = np.cumsum([int(row.train_mask.sum()) for row in batch])[:-1]
        for row, part in zip(batch, np.split(logprobs, ends), strict=True):
            whole = scored.setdefault(row.trajectory.episode, np.zeros(len(row.trajectory.tokens), np.float32))
            whole[row.start : row.end][row.train_mask] = part
    return scored
