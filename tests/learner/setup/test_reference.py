"""--reference: the policy that the KL divergence is taken to."""

from types import SimpleNamespace

import pytest

import agent_r1
from llm_utils.run import reference_source

WORLD, CRAFT = "AgentR1/MultihopWorld-v0", "AgentR1/CraftWorld-v0"


def args(**given):
    return SimpleNamespace(**{"model": "tiny", "env_id": WORLD, "tokenizer": None, "reference": None} | given)


def test_a_reference_is_the_model_or_another_of_its_tokenizer(policy_folder):
    assert reference_source(args()) == agent_r1.tiny_policy(WORLD)
    assert reference_source(args(model=str(policy_folder), tokenizer="byte", reference=str(policy_folder)))


def test_a_reference_of_other_tokens_is_refused():
    with pytest.raises(SystemExit, match="has another tokenizer than --model tiny"):
        reference_source(args(reference=agent_r1.tiny_policy(CRAFT)))


def test_a_reference_that_is_none_is_named():
    with pytest.raises(SystemExit, match="--reference /nowhere"):
        reference_source(args(reference="/nowhere"))
