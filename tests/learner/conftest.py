"""A tiny random policy, and the real environment with the byte tokenizer."""

import os
from pathlib import Path

import gymnasium as gym
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import agent_r1  # noqa: E402, F401  (registers the environments)

ENV_ID = "AgentR1/MultihopWorld-v0"
ENV_KWARGS = {"max_turns": 3, "max_action_tokens": 12}


@pytest.fixture(autouse=True)
def one_thread():
    """Tests run side by side; OpenMP threads that wait for each other would slow all of them down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def vocab_size() -> int:
    return gym.make(ENV_ID).action_space.vocab_size


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory, vocab_size) -> Path:
    """A Qwen2 of about 30k parameters with grouped-query attention and 7 embedding rows that no token uses."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=vocab_size + 7,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("policy")
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def policy(policy_folder):
    return transformers.AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32).eval()


@pytest.fixture
def make_envs():
    """make_envs(n): n episodes of MultihopWorld with the byte tokenizer."""
    made = []

    def make(num_envs, **kwargs):
        made.append(gym.make_vec(ENV_ID, num_envs=num_envs, tokenizer=None, **{**ENV_KWARGS, **kwargs}))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


@pytest.fixture
def environment_of_scripts():
    """Environment variables for a learner that runs as a process of its own."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
