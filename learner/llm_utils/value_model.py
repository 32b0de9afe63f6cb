"""The critic: a value head on its own backbone. A PPO run leaves it in its folder, and others load it from there."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel

from agent_r1.text.tokenizers import fingerprint, load_tokenizer
from llm_utils import distributed
from llm_utils.records.run_files import write_json
from llm_utils.recovery.checkpoint import SaveError
from llm_utils.setup.loading import enable_gradient_checkpointing, without_bars, without_report_of_unused_weights
from llm_utils.training import cudnn_attention
from llm_utils.training.forward import pad, train_checkpointed_layers
from llm_utils.trajectory import Segment, Trajectory

if TYPE_CHECKING:
    from llm_utils.run import Run

FOLDER, WEIGHTS, FACTS = "critic", "critic.safetensors", "critic.json"
ANSWER_TOKENS = 64
FactsT = TypeVar("FactsT")


class Critic(nn.Module):
    """A value head on its own backbone, which starts as a copy of the policy's."""

    def __init__(self, source: str, args: Any, dtype: torch.dtype) -> None:
        super().__init__()
        with without_bars(), without_report_of_unused_weights():
            self._build(AutoModel.from_pretrained(source, dtype=dtype, trust_remote_code=False))
        if args.gradient_checkpointing == "on":
            enable_gradient_checkpointing(self.backbone)

    def _build(self, backbone: Any) -> None:
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map tokens [B, T] to values [B, T]: entry t is the value of the state that ends with token t."""
        train_checkpointed_layers(self.backbone)
        wide_ids = cudnn_attention.widen(ids, self.backbone)
        states = self.backbone(input_ids=wide_ids, use_cache=False).last_hidden_state[:, : ids.shape[1]]
        return self.head(states.float())[..., 0]


@dataclass(frozen=True)
class CriticFacts:
    """Facts about a saved critic: the environment and the models that it fits."""

    env_id: Any
    tokenizer: str  # the fingerprint of its tokenizer
    vocab_size: int  # tokens of that tokenizer
    policy: str  # the digest of the policy that it was trained with, with adapters merged
    dtype: str
    sees: str = "state"  # or "answer": it needs the gold answer, see `show_answers`


def weights_digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a hash of a model's weights, given by name. They are rounded to bf16, so that the type of a file does not
    matter."""
    digests = []
    for name, weight in weights:
        numbers = weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()
        digests.append((name, hashlib.sha256(numbers.tobytes()).hexdigest()))
    return hashlib.sha256(json.dumps(sorted(digests)).encode()).hexdigest()


def save_critic(critic: Critic, policy: Any, folder: Path, args: Any, tokenizer: str | None, vocab_size: int) -> None:
    """Write the critic of a run to `folder`/critic. All processes must call this together. Raise SaveError."""
    state, digest = distributed.collect_state(critic), weights_digest(distributed.weights(policy))
    if distributed.rank() > 0:
        return
    facts = CriticFacts(
        env_id=args.env_id,
        tokenizer=fingerprint(load_tokenizer(tokenizer, args.chat_template)),
        vocab_size=vocab_size,
        policy=digest,
        dtype=str(next(critic.backbone.parameters()).dtype).removeprefix("torch."),
        sees=getattr(args, "critic_sees", "state"),
    )
    try:
        write_critic(critic, state, folder / FOLDER, asdict(facts))
    except Exception as error:  # from the disk, in the writing library's words
        raise SaveError.of("the critic", error, folder) from error


def write_critic(critic: Critic, state: dict[str, torch.Tensor], folder: Path, facts: dict[str, Any]) -> None:
    """Write a value model with the weights `state` to `folder`, which has no other files, with facts about it."""
    folder.mkdir(exist_ok=True)
    critic.backbone.config.save_pretrained(folder)
    save_file({name: x.cpu().contiguous() for name, x in state.items()}, folder / WEIGHTS)
    write_json(folder / FACTS, facts)


def read_critic(folder: Path, kind: type[FactsT]) -> tuple[Critic, FactsT]:
    """Return the value model of `write_critic` on the CPU, and its facts. Raise any error for damaged files."""
    content = json.loads((folder / FACTS).read_text())
    facts = kind(**content)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    critic = Critic.__new__(Critic)
    nn.Module.__init__(critic)
    dtype = getattr(torch, content["dtype"])
    critic._build(AutoModel.from_config(config, dtype=dtype, trust_remote_code=False))
    critic.load_state_dict(load_file(folder / WEIGHTS))
    return critic, facts


def load_critic(run: str | Path, device: torch.device | None = None) -> tuple[Critic, CriticFacts]:
    """Return the critic that a run of ppo_llm.py left, and what it was trained for.

    Raise SystemExit if there is none, if it cannot be read, or if it needs the gold answer.
    """
    folder = Path(run) / FOLDER
    if not (folder / FACTS).is_file():
        raise SystemExit(f"{run} has no critic: give the folder of a run of ppo_llm.py that has ended (runs/...)")
    try:
        critic, facts = read_critic(folder, CriticFacts)
    except Exception as error:  # a damaged file, in the reading library's words
        raise SystemExit(f"the critic of {run} cannot be read: {type(error).__name__}: {error}") from error
    if facts.sees == "answer":
        raise SystemExit(f"the critic of {run} needs the gold answer (--critic-sees answer): only its run can use it")
    return critic.to(device).eval(), facts


# ------------------------------------------------------------------------------------------------------------ values


def values_of(critic: Any, rows: Sequence[Segment], device: torch.device) -> torch.Tensor:
    """Return the values of the rows' states, float32 [rows, tokens]: entry t is that of the state that ends with the
    row's token t. The critic reads a row's `critic_prefix` before it."""
    prefixes = [row.trajectory.critic_prefix for row in rows]
    pairs = zip(prefixes, rows, strict=True)
    values = critic(pad([np.concatenate([prefix, row.tokens]) for prefix, row in pairs], device))
    if not any(map(len, prefixes)):
        return values
    at = np.array([len(prefix) for prefix in prefixes])[:, None] + np.arange(max(len(row.tokens) for row in rows))
    return values.gather(1, torch.from_numpy(at).clamp(max=values.shape[1] - 1).to(device))


@torch.no_grad()
def score_values(rows: Sequence[Trajectory], run: Run) -> None:
    """Fill `values` and `value_last` of all trajectories."""
    local_rows = distributed.scatter(rows)
    for segments, _ in run.microbatches(local_rows):
        values = values_of(run.critic, segments, run.device).cpu().numpy()
        for segment, segment_values in zip(segments, values, strict=True):
            row, last = segment.trajectory, len(segment.tokens) - 1
            row.values[segment.start + 1 : segment.end] = segment_values[:last]
            if segment.end == len(row.tokens):
                row.value_last = float(segment_values[last])
    results = distributed.gather({row.episode: (row.values, row.value_last) for row in local_rows})
    for row in rows:
        row.values, row.value_last = results[row.episode]


# ----------------------------------------------------------------------------------------------------- gold answers


def check_answers(envs: Any) -> None:
    """Raise SystemExit if an environment's tasks have no gold answer. It looks at the first task."""
    for env in envs.kinds:
        try:
            answers = env.make_task(0).answers
        except NotImplementedError:  # the tasks are on a server
            answers = []
        if not answers:
            name = type(env).__name__
            raise SystemExit(f"--critic-sees answer: the tasks of {name} have no gold answer; leave it out")


def show_answers(rows: Sequence[Trajectory], run: Run) -> None:
    """Fill `critic_prefix` of all trajectories with the first gold answer, cut to ANSWER_TOKENS tokens.

    The text cannot become a control token. A prefix that exceeds the model's positions is cut, too. Raise SystemExit if
    a task has no answer.
    """
    if not rows:
        return
    codec = run.envs.kinds[0].dialect.codec
    positions = getattr(run.policy.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    for row in rows:
        if not row.answers:
            raise SystemExit(f"--critic-sees answer: task {row.record.get('task_id')} has no gold answer; leave it out")
        room = max(0, min(ANSWER_TOKENS, positions - len(row.tokens)))
        tokens = codec.encode(codec.guard_edges(f"The answer is {row.answers[0]}\n\n"))
        row.critic_prefix = np.array(tokens[:room], np.int32)
