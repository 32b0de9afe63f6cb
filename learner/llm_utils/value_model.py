"""The critic: a value head on its own backbone. A PPO run leaves it in its folder, and others load it from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
from llm_utils.training.forward import train_checkpointed_layers

FOLDER, WEIGHTS, FACTS = "critic", "critic.safetensors", "critic.json"


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
    )
    try:
        (folder / FOLDER).mkdir(exist_ok=True)
        critic.backbone.config.save_pretrained(folder / FOLDER)
        save_file({name: x.cpu().contiguous() for name, x in state.items()}, folder / FOLDER / WEIGHTS)
        write_json(folder / FOLDER / FACTS, asdict(facts))
    except Exception as error:  # from the disk, in the writing library's words
        raise SaveError.of("the critic", error, folder) from error


def load_critic(run: str | Path, device: torch.device | None = None) -> tuple[Critic, CriticFacts]:
    """Return the critic that a run of ppo_llm.py left, and what it was trained for.

    Raise SystemExit if there is none, or if it cannot be read.
    """
    folder = Path(run) / FOLDER
    if not (folder / FACTS).is_file():
        raise SystemExit(f"{run} has no critic: give the folder of a run of ppo_llm.py that has ended (runs/...)")
    try:
        facts = CriticFacts(**json.loads((folder / FACTS).read_text()))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        critic = Critic.__new__(Critic)
        nn.Module.__init__(critic)
        critic._build(AutoModel.from_config(config, dtype=getattr(torch, facts.dtype), trust_remote_code=False))
        critic.load_state_dict(load_file(folder / WEIGHTS))
    except Exception as error:  # a damaged file, in the reading library's words
        raise SystemExit(f"the critic of {run} cannot be read: {type(error).__name__}: {error}") from error
    return critic.to(device).eval(), facts
