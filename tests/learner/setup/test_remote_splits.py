"""Learners take every split of a remote environment's server."""

import json
from types import SimpleNamespace

import pytest
from environment_server import Server

from llm_utils.setup.environments import check_splits, evaluation_split


def test_learners_take_the_splits_of_the_server():
    server = Server(["AgentR1/CraftWorld-v0"])
    env_kwargs = json.dumps({"url": server.url, "env_id": "AgentR1/CraftWorld-v0"})
    flags = {"env_id": "AgentR1/Remote-v0", "env_kwargs": env_kwargs, "data_dir": None, "chat_template": None}
    args = SimpleNamespace(**flags, split="train", eval_split="test")
    check_splits(args)
    assert evaluation_split(args, "train") == "test"
    args.eval_split = "nothing"
    with pytest.raises(SystemExit, match="--eval-split nothing: .* has no split 'nothing'; it has train, test"):
        check_splits(args)
    server.stop()
