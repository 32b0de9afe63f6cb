"""The statistics behind the benchmarks' tables."""

import importlib

import paper_table
import pytest
import tyro

from llm_utils import arguments


@pytest.mark.parametrize("label", [*paper_table.ALGORITHMS, *paper_table.ABLATIONS])
def test_a_learner_accepts_the_flags_of_every_row(label):
    script, flags = paper_table.learner_flags(paper_table.MULTIHOP, "tiny", label)
    learner = importlib.import_module(script.removesuffix(".py"))
    getattr(learner, "check", arguments.check)(tyro.cli(learner.Args, args=flags))
