"""Scores of a run: by the number of the episode."""

from types import SimpleNamespace

import pytest


def test_rows_that_share_an_episode_number_are_not_scored(as_run, policy, made_up_rows):
    rows = made_up_rows()
    run = as_run(SimpleNamespace(microbatch_tokens=4096, temperature=1.0, max_staleness=0), policy)
    with pytest.raises(AssertionError, match="the same episode number"):
        run._score([*rows, rows[0]], policy)
    assert run._score(rows, policy).keys() == {row.episode for row in rows}
