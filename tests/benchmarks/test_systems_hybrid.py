"""The part of systems.py about prices of extra calls."""

import pytest
from systems_parts import hybrid
from systems_parts.hybrid import against_free, beyond


def test_calls_are_counted_over_successes_and_compared_by_seed():
    def row(price, seed, extra):
        return {"price": price, "seed": seed, "success": [1, 1, 0], "beyond": [extra, 0, 9], "calls": [4, 3, 12]}

    free, priced = ([row(price, seed, extra + seed) for seed in (1, 2)] for price, extra in ((0.0, 2), (0.1, 0)))
    assert [beyond(one) for one in free] == [1.5, 2.0]
    success, less = against_free(priced, free)
    assert success[0] == 0.0 and less == pytest.approx((-1.0, -1.0, -1.0))
    with pytest.raises(SystemExit, match="price 0.1, seed 1: no episode succeeded"):
        beyond(row(0.1, 1, 0) | {"success": [0, 0, 0]})


def test_a_price_is_the_only_process_term():
    weights = hybrid.kwargs_of(0.02)["process_reward"]
    assert {name: weight for name, weight in weights.items() if weight} == {"extra_call": -0.02}
    assert hybrid.kwargs_of(0.0) == {"process_reward": False}
