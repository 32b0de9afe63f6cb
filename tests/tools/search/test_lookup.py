"""Opening passages by title."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1_tools import LookupTool, ToolResult, run_tool
from agent_r1_tools.search import Passage

TOOL = LookupTool(
    [
        Passage("Marie Curie", "A physicist."),
        Passage("Pierre Curie", "Her husband."),
        Passage("Warsaw", "A city."),
        Passage("Warsaw", "Also\na film."),
        Passage("WARSAW", "A band."),
    ]
)


def look_up(title: str) -> ToolResult:
    return run_tool(TOOL, {"title": title})


def test_the_exact_title_comes_first() -> None:
    assert look_up("Marie Curie") == ToolResult(
        "Marie Curie: A physicist.", data={"titles": ["Marie Curie"], "texts": ["A physicist."]}
    )
    assert look_up("WARSAW").content == "WARSAW: A band."


def test_passages_that_share_a_title_are_all_shown() -> None:
    assert look_up("Warsaw").content == "Warsaw: A city.\nWarsaw: Also a film."


@pytest.mark.parametrize("title", ["marie curie", "MARIE CURIE", "  Marie   Curie\n"])
def test_case_and_spacing_do_not_matter(title: str) -> None:
    assert look_up(title).content == "Marie Curie: A physicist."


def test_a_title_that_fits_several_ways_opens_all_of_them() -> None:
    assert look_up("warsaw").data["titles"] == ["Warsaw", "Warsaw", "WARSAW"]


def test_an_unknown_title_gets_suggestions() -> None:
    result = look_up("Marie Curry")
    assert not result.ok
    assert result.data == {"error": "not_found", "suggestions": ["Marie Curie", "Pierre Curie"]}
    assert result.content == (
        "There is no passage with the title 'Marie Curry'. Titles like it: Marie Curie; Pierre Curie."
    )
    assert look_up("zzz").data["suggestions"] == []


def test_no_passages() -> None:
    assert run_tool(LookupTool([]), {"title": "x"}).data == {"error": "not_found", "suggestions": []}


@settings(max_examples=100, deadline=None)
@given(title=st.text(max_size=30))
def test_any_title_is_answered(title: str) -> None:
    result = look_up(title)
    assert result.ok == (result.data.get("error") is None)


def test_suggestions_in_a_large_corpus_stay_quick() -> None:
    tool = LookupTool([Passage(f"List of things number {i}", "") for i in range(20_000)] + [Passage("Marie Curie", "")])
    assert run_tool(tool, {"title": "Maria Curie"}).data["suggestions"][0] == "Marie Curie"
    start = time.perf_counter()
    result = run_tool(tool, {"title": "list of " * 10_000})
    assert time.perf_counter() - start < 5
    assert len(result.content) < 1000
