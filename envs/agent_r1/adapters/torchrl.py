"""The environments in TorchRL: importing this module registers `TokenSpan` with `torchrl.envs.GymWrapper`.

    import agent_r1.adapters.torchrl
    env = GymWrapper(gym.make("AgentR1/MultihopWorld-v0"))
    episode = env.rollout(6, policy)

A span is a tensor of int32 of variable length: a spec of shape (-1,). TorchRL then stores the steps of a rollout or of
a collector without padding; docs/torchrl.md shows how a learner pads them. Made for TorchRL 0.14.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from agent_r1.spaces import TokenSpan

try:
    import torch
    from torchrl.data import Bounded, Composite, Unbounded
    from torchrl.envs import register_gym_spec_conversion
    from torchrl.envs.gym_like import default_info_dict_reader
except ImportError as error:
    raise ImportError('agent_r1.adapters.torchrl needs TorchRL: pip install "agent-r1[torchrl]"') from error


# Bounded, not Categorical: GymWrapper would turn a Categorical with one token into a plain int.
@register_gym_spec_conversion(TokenSpan)
def token_spec(space: TokenSpan, device: Any = None, **_: Any) -> Any:
    """Return the spec of a space of spans: int32 token ids, shape (-1,)."""
    return Bounded(0, space.vocab_size - 1, shape=(-1,), device=device, dtype=torch.int32)


class InfoReader(default_info_dict_reader):
    """A reader of numbers in `info`, for `env.set_info_dict_reader(InfoReader())`.

    Each is a float32 tensor of shape (1,), and 0 if the step's info lacks it. They are `max_new_tokens`, the room of
    the next span; at the end `is_success`, and the named metrics (`InfoReader("em", "f1")`).
    """

    def __init__(self, *metrics: str) -> None:
        names = ["max_new_tokens", "is_success", *metrics]
        super().__init__(names, Composite({name: Unbounded((1,)) for name in names}))

    def __call__(self, info: dict[str, Any], tensordict: Any) -> Any:
        """Write the numbers of a step into its tensordict."""
        entries = info | info.get("metrics", {})
        values = {name: np.array([entries[name]], np.float32) for name in self.keys if name in entries}
        return super().__call__(values, tensordict)
