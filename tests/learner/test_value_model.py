"""learner/llm_utils/value_model.py: the critic that a run leaves, and who can load it."""

import json
from types import SimpleNamespace

import pytest
import torch

from llm_utils.value_model import Critic, load_critic, save_critic, weights_digest

ARGS = SimpleNamespace(gradient_checkpointing="off", env_id="AgentR1/MultihopWorld-v0", chat_template=None)


@pytest.fixture
def saved(policy_folder, policy, vocab_size, tmp_path):
    """A critic with a trained head, in the folder of a run."""
    critic = Critic(str(policy_folder), ARGS, torch.float32).eval()
    torch.nn.init.normal_(critic.head.weight)
    save_critic(critic, policy, tmp_path, ARGS, None, vocab_size)
    return critic, tmp_path


def test_a_loaded_critic_gives_the_same_values(saved, policy, vocab_size):
    critic, folder = saved
    loaded, facts = load_critic(folder)
    ids = torch.arange(30).view(2, 15)
    with torch.no_grad():
        assert torch.equal(loaded(ids), critic(ids)) and loaded(ids).any()
    assert (facts.vocab_size, facts.env_id) == (vocab_size, ARGS.env_id)
    rounded = ((name, x.bfloat16()) for name, x in policy.named_parameters())  # a file of another type
    assert facts.policy == weights_digest(rounded)


def test_a_digest_names_weights(policy):
    weights = {name: x.clone() for name, x in policy.state_dict().items()}
    before = weights_digest(weights.items())
    next(iter(weights.values()))[0, 0] += 1
    assert weights_digest(weights.items()) != before


def test_no_critic_and_a_damaged_one(saved, tmp_path):
    with pytest.raises(SystemExit, match="has no critic: give the folder of a run of ppo_llm.py"):
        load_critic(tmp_path / "elsewhere")
    file = saved[1] / "critic" / "critic.json"
    file.write_text(json.dumps({"env_id": "x"}))
    with pytest.raises(SystemExit, match=r"the critic of .* cannot be read: TypeError"):
        load_critic(saved[1])
