"""No span that a policy could write breaks an environment or a parser. fuzz_spans.py is the long version."""

import re

import numpy as np
import pytest
from fuzz_spans import KINDS, SpanMaker, fuzz

from agent_r1.dialects import DIALECTS, get_dialect
from agent_r1.text.tokenizers import load_tokenizer

SPANS = 500  # for each dialect; benchmarks/environments/fuzz_spans.py makes 100,000


@pytest.mark.parametrize("dialect", DIALECTS)
def test_spans(made_up_data, dialect):
    report = fuzz([dialect], made_up_data, 0, SPANS)
    assert report.failures == [] and report.spans == SPANS
    # It did meet what it is for ...
    assert min(report.calls, report.malformed, report.answers, report.cut, report.episodes) > 0
    # ... and nothing came near to quadratic time. A busy machine takes a few milliseconds at most.
    assert max(report.slowest_parse_ms, report.slowest_step_ms) < 2_000, report


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("max_turns", [1, 3])
def test_spans_against_the_end_of_turns(made_up_data, dialect, max_turns):
    report = fuzz([dialect], made_up_data, 0, 150, seed=1, max_turns=max_turns, max_context_tokens=3_000)
    assert report.failures == [] and report.episodes >= 150 / max_turns / 2


def test_spans_can_be_repeated_and_differ():
    dialect = get_dialect("hermes", load_tokenizer(None))
    first, again, other = SpanMaker(dialect, 3), SpanMaker(dialect, 3), SpanMaker(dialect, 4)
    spans = [first(index) for index in range(10 * len(KINDS))]
    assert all(kind == again(i)[0] and np.array_equal(span, again(i)[1]) for i, (kind, span) in enumerate(spans))
    assert sum(np.array_equal(span, other(index)[1]) for index, (_, span) in enumerate(spans)) < len(spans) / 4
    assert {kind for kind, _ in spans} == set(KINDS)
    assert len({span.tobytes() for _, span in spans}) > 8 * len(KINDS)


def test_a_failure_is_reported_so_that_it_can_be_repeated(made_up_data, monkeypatch):
    """The report must not hide what it found."""
    import fuzz_spans

    def refuse(*arguments):
        raise AssertionError("on purpose")

    monkeypatch.setattr(fuzz_spans, "check_step", refuse)
    report = fuzz(["react"], made_up_data, 7, 9)
    assert report.spans == 0 and len(report.failures) == 2
    assert re.fullmatch(r"span 7 of seed 0 \(\w+, react, \S+\): AssertionError: on purpose", report.failures[0])
