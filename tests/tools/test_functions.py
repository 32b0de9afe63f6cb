"""Tools from what people have: async functions, pydantic models, Annotated, a JSON schema; and results as JSON."""

import asyncio
import copy
import dataclasses
import datetime
import functools
import json
import math
import pickle
import re
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from agent_r1_tools import Tool, ToolResult, run_batch, run_tool
from agent_r1_tools.running import at_work
from agent_r1_tools.text import as_text
from agent_r1_tools.threads import OneThread
from agent_r1_tools.whole_numbers import whole_numbers

pydantic = pytest.importorskip("pydantic")
typing_extensions = pytest.importorskip("typing_extensions")
Field = pydantic.Field

# --- async functions --------------------------------------------------------------------------------------------------


async def double(x: int) -> int:
    """Twice a number.

    Args:
        x: The number.
    """
    await asyncio.sleep(0)
    return 2 * x


@pytest.mark.parametrize("timeout", [20.0, math.inf])
def test_an_async_function_becomes_a_tool(timeout: float) -> None:
    tool = Tool.from_function(double, timeout=timeout)
    assert tool.description == "Twice a number." and tool.parameters["properties"]["x"]["type"] == "integer"
    assert run_tool(tool, {"x": 4}) == ToolResult("8", data=8)
    assert run_tool(tool, {"x": "a"}).data == {"error": "bad_arguments"}
    assert run_tool(Tool.from_function(functools.partial(double, x=3), name="six", timeout=timeout), {}).data == 6


def test_async_calls_share_a_loop_and_overlap() -> None:
    """A client that belongs to a loop, as those of httpx and aiohttp do, can be made once and serve every call."""
    here: list[Any] = []
    both = asyncio.Semaphore(0)

    async def meet(i: int) -> int:
        here.append(asyncio.get_running_loop())
        both.release()
        while len(here) < 3:  # the others are under way, too
            await asyncio.sleep(0.01)
        await both.acquire()
        return i

    assert [r.data for r in run_batch(Tool.from_function(meet, timeout=30), [{"i": i} for i in range(3)])] == [0, 1, 2]
    assert len(set(here)) == 1


def test_an_async_call_that_is_late_or_raises_is_as_any_other() -> None:
    ended = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    async def refuse(error: str) -> None:
        raise {"fault": ConnectionError, "own": KeyError}[error]("x")

    late = Tool.from_function(hang, timeout=0.05)
    assert run_tool(late, {}).data == {"error": "timeout"}
    assert ended.wait(20)  # nobody waits for it: it is cancelled, and goes on for no longer than a second
    tool = Tool.from_function(refuse)
    assert run_tool(tool, {"error": "fault"}).fault == "ConnectionError: x"
    assert run_tool(tool, {"error": "own"}) == ToolResult(
        "Error in refuse: KeyError: 'x'", ok=False, data={"error": "exception"}
    )


def test_an_async_tool_can_be_called_inside_of_a_loop() -> None:
    """Notebooks have a loop that runs in the main thread."""

    async def notebook() -> Any:
        return run_tool(Tool.from_function(double, timeout=math.inf), {"x": 2}).data

    assert asyncio.run(notebook()) == 4


# --- bounds of calls --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, -1, math.nan, None, "5", True])
def test_a_timeout_that_no_call_keeps_is_refused(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout of the tool double must be .* above 0 \(math.inf .*\), got"):
        Tool.from_function(double, timeout=timeout)
    Tool.from_function(double, timeout=1)


@pytest.mark.parametrize("timeout", [np.float32(3), np.int64(3), Fraction(1, 2), np.float64("inf")])
def test_a_timeout_may_be_any_real_number(timeout: Any) -> None:
    for function in (double, lambda x: 2 * x):
        tool = Tool.from_function(function, timeout=timeout, name="f", parameters={})
        assert [result.data for result in (run_tool(tool, {"x": 3}), *run_batch(tool, [{"x": 4}] * 2))] == [6, 8, 8]
    late = Tool.from_function(lambda: time.sleep(5), name="f", timeout=Fraction(1, 2))
    assert run_tool(late, {}).content == "Error in f: no result within 0.5 seconds"


def test_a_tool_without_a_name_is_said() -> None:
    class Greet(Tool):
        parameters = {"type": "object"}

        def execute(self, arguments: dict[str, Any]) -> ToolResult:
            return ToolResult("Hello.")

    class Named(Greet):
        def __init__(self) -> None:
            self.name, self.description = "greet", "Greet."

    for use in (lambda: run_tool(Greet(), {}), lambda: Greet().schema):
        with pytest.raises(AttributeError, match="the tool Greet has no name; a Tool sets name, description and param"):
            use()
    assert not hasattr(Greet, "description") and run_tool(copy.deepcopy(Named()), {}).content == "Hello."


@pytest.mark.parametrize("most", [0, -1, None, 2.5])
def test_results_that_would_all_be_empty_are_refused(most: Any) -> None:
    with pytest.raises(ValueError, match="max_result_chars of the tool double must be an integer, at least 1, got"):
        Tool.from_function(double, max_result_chars=most)
    Tool.from_function(double, max_result_chars=1)


# --- whole numbers ----------------------------------------------------------------------------------------------------


def test_a_whole_float_is_an_int_where_the_hint_says_so() -> None:
    def kinds(
        a: int, b: float, c: list[int], d: dict[str, int], e: int | None, f: list[int] | None, g: float | int, h: Any
    ) -> str:
        return json.dumps([a, b, c, d, e, f, g, h])

    given = {"a": 2.0, "b": 2.0, "c": [1.0, 2], "d": {"x": 3.0}, "e": -1.0, "f": [4.0], "g": 5.0, "h": [6.0]}
    before = json.dumps(given)
    tool = Tool.from_function(kinds)
    expected = '[2, 2.0, [1, 2], {"x": 3}, -1, [4], 5.0, [6.0]]'
    assert run_tool(tool, given).content == expected and json.dumps(given) == before
    assert [one.content for one in run_batch(tool, [given, given | {"a": 2}])] == [expected] * 2
    assert run_tool(Tool.from_function(lambda n: list(range(n)), name="f", parameters={
        "type": "object", "properties": {"n": {"type": "integer", "minimum": 0}}}), {"n": 3.0}).data == [0, 1, 2]
    assert "must be integer" in run_tool(tool, given | {"a": 2.5}).content


def picked(schema: dict[str, Any], value: Any, **more: Any) -> str:
    """What a tool gets as `n` where a policy gives `value`."""
    parameters = {"type": "object", "properties": {"n": schema}, **more}
    return run_tool(Tool.from_function(lambda n: repr(n), name="f", parameters=parameters), {"n": value}).content


def test_a_whole_float_is_the_int_that_a_literal_names() -> None:
    def pick(n: Literal[1, 2], m: Literal[3] | None) -> str:
        return "abc"[n] + "x" * (m or 0)

    assert run_tool(Tool.from_function(pick), {"n": 2.0, "m": 3.0}).content == "cxxx"
    assert picked({"const": 2}, 2.0) == "2" and picked({"type": "number", "enum": [1, 2, "2"]}, 2.0) == "2"
    assert picked({"enum": [1.5, 2.0]}, 2.0) == "2.0" and picked({"enum": ["a", True, 1.0]}, 1.0) == "1.0"


def test_a_whole_float_is_an_int_where_what_a_schema_names_says_so() -> None:
    whole, some = {"type": "integer"}, {"type": "number"}
    definitions = {"$defs": {"a/b": whole, "tree": {"type": "object", "properties": {
        "size": {"$ref": "#/$defs/a~1b"}, "below": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}}}
    assert picked({"allOf": [{"minimum": 0}, whole]}, 2.0) == "2"
    assert picked({"oneOf": [{"type": "string"}, {"allOf": [whole]}]}, 2.0) == "2"
    assert picked({"oneOf": [{"type": "string"}, some]}, 2.0) == picked({"anyOf": [whole, some]}, 2.0) == "2.0"
    assert picked({"$ref": "#/$defs/a~1b"}, 2.0, **definitions) == "2"
    tree = {"size": 1.0, "below": [{"size": 2.0, "below": []}]}
    assert picked({"$ref": "#/$defs/tree"}, tree, **definitions) == "{'size': 1, 'below': [{'size': 2, 'below': []}]}"
    kinds = [{"properties": {"kind": {"const": kind}, "x": x}} for kind, x in (("a", whole), ("b", some))]
    assert picked({"anyOf": kinds}, {"kind": "a", "x": 2.0}) == "{'kind': 'a', 'x': 2}"
    assert picked({"oneOf": kinds}, {"kind": "b", "x": 2.0}) == "{'kind': 'b', 'x': 2.0}"
    assert picked({"prefixItems": [some], "items": whole}, [1.0, 2.0]) == "[1.0, 2]"
    deep: Any = 2.0
    for _ in range(5_000):
        deep = [deep]
    assert whole_numbers({"properties": {"n": {}}}, {"n": deep})["n"][0] is deep[0]
    lost = {"$ref": "#/nowhere"}  # nobody follows it: the first fits
    assert picked({"anyOf": [whole, lost]}, 2.0) == "2"


def test_a_schema_that_names_itself_ends() -> None:
    """jsonschema gives up on it; a number beside it, which it never comes to, is looked at."""
    loop = {"$ref": "#/$defs/loop"}
    definitions = {"loop": {"allOf": [loop, loop]}}
    assert whole_numbers({"allOf": [loop, {"type": "integer"}], "$defs": definitions}, 2.0) == 2
    many = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{j}"} for j in range(12)]} for i in range(12)}
    assert whole_numbers({"$ref": "#/$defs/d0", "$defs": many}, [2.0]) == [2.0]


# --- Annotated --------------------------------------------------------------------------------------------------------


class Documented:
    """As typing_extensions.Doc, and as the marks of a library that nobody knows."""

    documentation = "How fast."
    metadata = 5


def annotated(
    city: Annotated[str, "Where."],
    nights: Annotated[int, Field(ge=1, lt=30, description="How many.")],
    code: Annotated[str, Field(pattern="^[a-z]+$", min_length=2, max_length=4)] = "ab",
    speed: Annotated[float | None, Documented(), Field(gt=0, multiple_of=0.5)] = None,
    guests: Annotated[list[Annotated[str, "A name."]], Field(min_length=1, max_length=2)] = ["you"],  # noqa: B006
) -> str:
    """Book.

    Args:
        city: Not this: what stands at the type comes first.
        code: A code.
    """
    return f"{city} {nights}"


def test_annotated_gives_descriptions_and_bounds() -> None:
    tool = Tool.from_function(annotated)
    assert tool.parameters["properties"] == {
        "city": {"type": "string", "description": "Where."},
        "nights": {"type": "integer", "description": "How many.", "minimum": 1, "exclusiveMaximum": 30},
        "code": {
            "type": "string", "description": "A code.", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 4,
            "default": "ab",
        },
        "speed": {
            "type": ["number", "null"], "description": "How fast.", "exclusiveMinimum": 0, "multipleOf": 0.5,
        },
        "guests": {
            "type": "array", "items": {"type": "string", "description": "A name."}, "minItems": 1, "maxItems": 2,
        },
    }  # fmt: skip
    Draft202012Validator.check_schema(tool.parameters)
    assert run_tool(tool, {"city": "Rome", "nights": 2, "speed": 1.5, "guests": ["me"]}).ok
    for wrong, says in (
        ({"nights": 0}, "0 is less than the minimum of 1"),
        ({"nights": 30}, "maximum of 30"),
        ({"nights": 2, "code": "A1"}, "does not match"),
        ({"nights": 2, "guests": []}, "non-empty"),
        ({"nights": 2, "speed": 0.7}, "multiple of 0.5"),
    ):
        result = run_tool(tool, {"city": "Rome", **wrong})
        assert result.data == {"error": "bad_arguments"} and says in result.content


def test_the_bounds_of_annotated_types_are_read() -> None:
    kinds = pytest.importorskip("annotated_types")

    def f(
        x: Annotated[int, kinds.Interval(ge=1, le=5)],
        y: Annotated[str, kinds.Len(1, 3), kinds.Predicate(str.isalpha)],
    ) -> None: ...

    properties = Tool.from_function(f).parameters["properties"]
    assert properties["x"] == {"type": "integer", "minimum": 1, "maximum": 5}
    assert properties["y"] == {"type": "string", "minLength": 1, "maxLength": 3}


def test_a_field_as_a_default_is_refused() -> None:
    def f(x: int = Field(3, ge=1)) -> int:
        return x

    with pytest.raises(TypeError, match=r"parameter 'x' of f.*Annotated"):
        Tool.from_function(f)


# --- pydantic models --------------------------------------------------------------------------------------------------


class Room(pydantic.BaseModel):
    kind: Literal["single", "double"] = "single"
    day: datetime.date


class Order(pydantic.BaseModel):
    """What is booked."""

    rooms: list[Room] = Field(min_length=1)
    note: Optional[str] = None  # noqa: UP045  users write this

    @pydantic.field_validator("note")
    @classmethod
    def is_short(cls, note: str) -> str:
        if len(note) > 5:
            raise ValueError("a note is short")
        return note


def book(order: Order, more: list[Room] | None = None, again: Room | None = None) -> Order:
    """Book rooms."""
    assert isinstance(order, Order) and isinstance(order.rooms[0].day, datetime.date)
    assert again is None or isinstance(again, Room)
    return order.model_copy(update={"rooms": order.rooms + (more or [])})


ROOM = {"kind": "double", "day": "2026-11-22"}


def test_a_pydantic_model_is_an_argument_and_a_result() -> None:
    tool = Tool.from_function(book)
    Draft202012Validator.check_schema(tool.parameters)
    order = tool.parameters["properties"]["order"]
    assert order["description"] == "What is booked." and order["properties"]["rooms"]["items"] == {
        "$ref": "#/$defs/Room"
    }
    assert tool.parameters["$defs"].keys() == {"Room"} and tool.parameters["required"] == ["order"]
    json.dumps(tool.schema)
    result = run_tool(tool, {"order": {"rooms": [ROOM]}, "more": [{"day": "2026-11-23"}], "again": ROOM})
    assert json.loads(result.content) == {"rooms": [ROOM, {"kind": "single", "day": "2026-11-23"}], "note": None}
    assert isinstance(result.data, Order)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ({"rooms": []}, "'order.rooms' [] should be non-empty"),
        ({"rooms": [{"kind": "triple", "day": "2026-11-22"}]}, "'order.rooms.0.kind'"),
        ({"rooms": [{"day": "tomorrow"}]}, "'order.rooms.0.day' "),  # what JSON schemas don't check
        ({"rooms": [ROOM], "note": "much too long"}, "'order.note' Value error, a note is short"),
        ({"rooms": [ROOM], "note": "\ud800"}, "Error in book"),
        ("a room", "'order' must be object, not string"),
    ],
)
def test_what_does_not_fit_a_model_is_a_bad_argument(order: Any, says: str) -> None:
    result = run_tool(Tool.from_function(book), {"order": order}, strict=True)
    assert result.data == {"error": "bad_arguments"} and says in result.content and result.fault is None
    assert result.content.endswith("Expected: order (object), more (any, optional), again (any, optional).")


def test_models_are_described_and_told_apart() -> None:
    other = pydantic.create_model("Room", size=(int, ...))

    def described(a: Room, b: Annotated[Room, "Told."], c: Annotated[Room, Field(description="Said.")]) -> None:
        """Book.

        Args:
            a: The first.
        """

    properties = Tool.from_function(described).parameters["properties"]
    assert [properties[name]["description"] for name in "abc"] == ["The first.", "Told.", "Said."]

    def f(a: list[Room], b: list[other]) -> None: ...  # type: ignore[valid-type]

    with pytest.raises(TypeError, match="two models are named Room"):
        Tool.from_function(f)


def test_models_are_asked_for_nothing_until_there_is_one() -> None:
    script = """
        import sys
        from typing import Annotated
        from agent_r1_tools import Tool, run_tool
        def f(x: Annotated[int, "A number."]) -> dict: return {"x": x}
        print(run_tool(Tool.from_function(f), {"x": 1}).content, "pydantic" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout == '{"x": 1} False\n', done.stderr


# --- a JSON schema and a callable -------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"to": {"type": "string"}, "from": {"type": "string"}}, "required": ["to"]}


def test_a_schema_and_a_callable_make_a_tool() -> None:
    tool = Tool.from_function(lambda **words: words, name="travel", description="Go.", parameters=SCHEMA)
    assert tool.schema["function"] == {"name": "travel", "description": "Go.", "parameters": SCHEMA}
    assert run_tool(tool, {"to": "Oslo", "from": "Rome"}).data == {"to": "Oslo", "from": "Rome"}
    assert "missing 'to'" in run_tool(tool, {"from": "Rome"}).content
    same = Tool.from_function(lambda **words: words, **tool.schema["function"])  # what chat APIs call a function
    assert same.schema == tool.schema
    assert Tool.from_function(lambda: 1, name="f", parameters={}).parameters == {}


WRONG = [{"a": {"type": "number"}}, {"type": {"type": "string"}}]  # the wrapper is forgotten


@pytest.mark.parametrize(
    "schema", [[], {"type": "string"}, {"properties": 5}, {"type": "object", "required": "to"}, *WRONG]
)
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(TypeError, match="the parameters of f (must be|are)"):
        Tool.from_function(lambda **words: words, name="f", parameters=schema)


@pytest.mark.parametrize("function", [None, 6, "double"])
def test_what_is_no_function_is_refused(function: Any) -> None:
    for options in ({}, {"name": "f"}, {"name": "f", "parameters": {}}):
        with pytest.raises(TypeError, match=r"from_function takes a function \(f, .*\), got"):
            Tool.from_function(function, **options)


# --- results ----------------------------------------------------------------------------------------------------------


class Color(Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    where: Path


def paint(color: Color, at: list[Point], more: Color | None = None) -> str:
    """Paint."""
    assert isinstance(color, Color) and all(isinstance(one, Point) for one in at) and more in (None, Color.RED)
    return f"{color.name} {at[0].x}"


def test_an_enum_and_a_dataclass_are_arguments() -> None:
    tool = Tool.from_function(paint)
    Draft202012Validator.check_schema(tool.parameters)
    assert tool.parameters["properties"]["color"]["enum"] == ["red"]
    assert run_tool(tool, {"color": "red", "at": [{"x": 3.0, "where": "a"}], "more": "red"}).content == "RED 3"
    refused = run_tool(tool, {"color": "blue", "at": [{"x": 1}]}, strict=True)
    assert refused.data == {"error": "bad_arguments"}
    assert "'color' 'blue' is not one of ['red']" in refused.content and "'at.0' missing 'where'" in refused.content


class Place(typing_extensions.TypedDict):
    city: str
    nights: typing_extensions.NotRequired[int]


def test_a_typed_dict_is_an_argument() -> None:
    def stay(at: Place, more: list[Place] | None = None) -> int:
        return at.get("nights", 1) + len(more or [])

    tool = Tool.from_function(stay)
    Draft202012Validator.check_schema(tool.parameters)
    assert run_tool(tool, {"at": {"city": "Oslo", "nights": 2.0}, "more": [{"city": "Rome"}]}).data == 3
    assert "'at' missing 'city'" in run_tool(tool, {"at": {"nights": 2}}).content
    with pytest.raises(TypeError, match="an Enum, a dataclass, a TypedDict or a pydantic model"):
        Tool.from_function(hinted_otherwise)


def hinted_otherwise(x: complex) -> None: ...


def test_the_form_that_fits_best_says_what_is_wrong() -> None:
    def f(tags: Optional[list[Literal["x", "y"]]] = None) -> None: ...  # noqa: UP045  users write this

    tool = Tool.from_function(f)
    assert "'tags.0' 'z' is not one of ['x', 'y']." in run_tool(tool, {"tags": ["z"]}).content
    assert "'tags' must be array or null, not string." in run_tool(tool, {"tags": "z"}).content


def test_what_has_no_name_is_named_as_it_is() -> None:
    class Painter:
        def __call__(self) -> None: ...

    for function in (functools.partial(paint, Color.RED), Painter()):
        with pytest.raises(ValueError, match="cannot be a tool's name .*[pP]aint"):
            Tool.from_function(function)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("text 'as' it is", "text 'as' it is"),
        (b"bytes \xff", "bytes \ufffd"),
        ({"a": [1, 2.5, True, None, "é"]}, '{"a": [1, 2.5, true, null, "é"]}'),
        (None, "null"),
        (True, "true"),
        (12, "12"),
        ((1, "a"), '[1, "a"]'),
        ({"b", "a", "c"}, '["a", "b", "c"]'),
        (Point(1, Path("a/b")), '{"x": 1, "where": "a/b"}'),
        ([Color.RED, Decimal("1.50")], '["red", "1.50"]'),
        (datetime.date(2026, 11, 22), '"2026-11-22"'),
        (np.arange(3), "[0, 1, 2]"),
        ({"mean": np.float32(0.5)}, '{"mean": 0.5}'),
        (deque([1, 2]), "[1, 2]"),
        ((i for i in range(2)), "[0, 1]"),
        ({"a": 1}.keys(), '["a"]'),
        (Counter("aab"), '{"a": 2, "b": 1}'),
        ({datetime.date(2026, 1, 2): {(1, 2): 3}}, '{"2026-01-02": {"[1, 2]": 3}}'),
        (Room(day=datetime.date(2026, 1, 2)), '{"kind": "single", "day": "2026-01-02"}'),
        ([sqlite3.connect(":memory:").execute("select 1, 'a'").fetchone()], '[[1, "a"]]'),
    ],
    ids=lambda value: re.sub(r"\W+", "-", repr(type(value).__name__)),
)
def test_what_is_not_text_becomes_json(value: Any, text: str) -> None:
    result = run_tool(Tool.from_function(lambda: value, name="f"), {})
    assert (result.ok, result.content) == (True, text) and result.data is value


def test_a_content_that_is_not_text_becomes_json() -> None:
    tool = Tool.from_function(lambda: ToolResult({"a": True}), name="f")  # type: ignore[arg-type]
    assert run_tool(tool, {}).content == '{"a": true}'


def test_a_table_becomes_its_rows() -> None:
    pandas = pytest.importorskip("pandas")
    assert as_text(pandas.DataFrame({"a": [1, 2], "b": ["x", "y"]})) == '[{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]'


def test_what_has_no_json_form_is_a_failed_call() -> None:
    """Its repr would be an address, another one in every run."""
    result = run_tool(Tool.from_function(object, name="f", parameters={}), {})
    assert not result.ok and "object has no JSON form" in result.content


# --- methods ----------------------------------------------------------------------------------------------------------


def test_a_method_of_an_object_is_taken_to_have_a_session() -> None:
    class Shop:
        def sell(self) -> None: ...
        @classmethod
        def name(cls) -> None: ...
        @staticmethod
        def tax() -> None: ...
        def __call__(self) -> None: ...

    def safe(*functions: Any) -> list[bool]:
        return [Tool.from_function(f, name="f", parameters={}).concurrency_safe for f in functions]

    assert safe(Shop.name, Shop.tax, annotated, lambda: 1, Shop, len, functools.partial(annotated)) == [True] * 7
    assert safe(Shop().sell, Shop(), functools.partial(Shop().sell), [].append) == [False] * 4
    assert Tool.from_function(Shop().sell, concurrency_safe=True).concurrency_safe


# --- one thread -------------------------------------------------------------------------------------------------------


def test_one_thread_is_one_until_a_call_is_stuck_in_it() -> None:
    one, end = OneThread(), threading.Event()
    tool = Tool.from_function(lambda wait: (wait and end.wait(20), threading.get_ident())[1], name="f", timeout=5)
    tool.concurrency_safe = False

    def ident(wait: bool = False) -> Any:
        return run_tool(tool, {"wait": wait}, thread=one).data

    first = ident()
    assert ident() == first == one.run(threading.get_ident) != threading.get_ident()
    assert one.run(one.run, threading.get_ident) == first  # inside of itself
    with pytest.raises(ZeroDivisionError):
        one.run(lambda: 1 / 0)
    tool.timeout = 0.05
    assert ident(wait=True) == {"error": "timeout"} and at_work(tool)
    second = one.run(threading.get_ident)
    assert second != first
    tool.timeout = 5
    assert ident() == second  # and stays the one
    end.set()
    while at_work(tool):
        time.sleep(0.01)
    assert ident() == second and one.free


def test_a_late_call_that_has_ended_leaves_the_thread_the_one() -> None:
    one = OneThread()
    tool = Tool.from_function(lambda: time.sleep(0.3), name="f", timeout=0.05, concurrency_safe=False)
    before = one.run(threading.get_ident)
    assert run_tool(tool, {}, thread=one).data == {"error": "timeout"}
    while at_work(tool):
        time.sleep(0.01)
    assert one.run(threading.get_ident) == before


def test_threads_end_with_what_they_are_of() -> None:
    one = OneThread()
    one.run(int)
    thread = one._thread
    assert thread is not None and pickle.loads(pickle.dumps(one)).free
    del one
    thread.join(20)
    assert not thread.is_alive()


# --- strict -----------------------------------------------------------------------------------------------------------


def broken(x: int) -> int:
    return {}[x]  # type: ignore[no-any-return]


def test_whole_numbers_take_little_time():
    """Branches are told apart by type and form, not by patterns of a stranger's, and not again at every level."""
    hostile = {"anyOf": [{"type": "string", "pattern": "^(a+)+$"}, {"type": "number"}, {"type": "integer"}]}
    rows = {"properties": {"x": {"anyOf": [{"type": "array", "items": hostile}, {"type": "string"}]}}}
    tree = {"$defs": {"node": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/node"}}]}},
            "properties": {"x": {"$ref": "#/$defs/node"}}}  # fmt: skip
    deep: Any = [2.0]
    for _ in range(150):
        deep = [deep, *range(20), 3.0]
    start = time.process_time()
    assert whole_numbers(rows, {"x": ["a" * 50 + "!", 1.0]}) == {"x": ["a" * 50 + "!", 1.0]}
    found = whole_numbers(tree, {"x": deep})["x"]
    assert type(found[-1]) is int and time.process_time() - start < 1.0
    assert whole_numbers({"properties": {"x": {"type": "integer"}}}, {"x": 2.0}) == {"x": 2}
    for _ in range(2000):
        deep = [deep]
    assert whole_numbers(tree, {"x": deep}) == {"x": deep}
    broken = {"type": "object", "anyOf": [{"type": "object"}, {"$ref": "#/default"}], "default": {"required": 3}}
    assert whole_numbers(broken, {"a": 1.0}) == {"a": 1.0}


def test_only_whole_floats_become_whole_numbers():
    """One of them beside others leaves those as they are, whatever their schemas allow."""

    def f(count: int, label: int | str, flag: int | bool, note: int | None, share: int | float, most: int | str) -> str:
        return repr((count, label, flag, note, share, most))

    tool = Tool.from_function(f)
    given = {"count": 2.0, "label": "12", "flag": True, "note": None, "share": 1.5, "most": "abc"}
    result = run_tool(tool, given)
    assert result.ok and result.content == repr((2, "12", True, None, 1.5, "abc"))
    schema = tool.parameters
    assert whole_numbers(schema, given | {"share": math.inf})["share"] == math.inf
    assert whole_numbers({"prefixItems": {"a": 1}}, [2.0]) == [2.0]
    assert whole_numbers({"$ref": {"a": 1}}, [2.0]) == [2.0]
    long = {"items": {"$ref": "#" + "/a" * 200_000}}
    start = time.process_time()
    assert whole_numbers(long, [2.0] * 3000) == [2.0] * 3000
    assert time.process_time() - start < 1.0


def test_branches_times_items_times_names_end():
    names = {f"n{number}": {"enum": list(range(30))} for number in range(100)}
    branches = {"anyOf": [{"type": "object", "properties": names} for _ in range(100)]}
    item = dict.fromkeys(names, 29.0)
    schema = {"properties": {"x": {"type": "array", "items": branches}}}
    start = time.process_time()
    whole_numbers(schema, {"x": [item] * 3000})
    assert time.process_time() - start < 5.0
    assert {type(value) for value in whole_numbers(schema, {"x": [item]})["x"][0].values()} == {int}
    names = {"properties": {"n": {"type": "integer"}, "ids": {"items": {"type": "integer", "enum": list(range(5000))}}}}
    few = whole_numbers(names, {"n": 3.0, "ids": [4.0] * 1000})
    assert type(few["n"]) is int and type(few["ids"][-1]) is int


def test_a_schema_without_a_type_at_its_top_is_one():
    class Node(pydantic.BaseModel):
        value: int
        children: list["Node"] = []

    for schema in (Node.model_json_schema(), {"additionalProperties": False}, {"anyOf": [{"required": ["x"]}]}):
        assert Tool.from_function(lambda **x: "", name="t", description="d", parameters=schema).parameters == schema
    with pytest.raises(TypeError, match="must be the JSON schema of an object"):
        Tool.from_function(lambda **x: "", name="t", description="d", parameters={"a": {"type": "number"}})


@pytest.mark.parametrize("timeout", [20.0, math.inf])
@pytest.mark.parametrize("how", ["argument", "variable"])
def test_strict_raises_a_tools_own_bug(monkeypatch: pytest.MonkeyPatch, how: str, timeout: float) -> None:
    tool = Tool.from_function(broken, timeout=timeout)
    assert run_tool(tool, {"x": 1}).data == {"error": "exception"}
    if how == "variable":
        monkeypatch.setenv("AGENT_R1_STRICT", "1")
    strict = True if how == "argument" else None
    for call in (run_tool, lambda tool, x, **how: run_batch(tool, [x] * 3 + [{"x": 2}], **how)):
        with pytest.raises(KeyError) as raised:
            call(tool, {"x": 1}, strict=strict)
        assert any(frame.name == "broken" for frame in traceback.extract_tb(raised.value.__traceback__))
        assert any("tool broken" in note for note in raised.value.__notes__)
    assert run_tool(tool, {"x": "a"}, strict=strict).data == {"error": "bad_arguments"}  # the policy's
    assert run_tool(tool, {"x": 1}, strict=False).data == {"error": "exception"}


def test_the_variable_of_strict_has_four_values(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Tool.from_function(broken)
    for value in ("0", "false", ""):
        monkeypatch.setenv("AGENT_R1_STRICT", value)
        assert run_tool(tool, {"x": 1}).data == {"error": "exception"}
    monkeypatch.setenv("AGENT_R1_STRICT", "True")
    with pytest.raises(KeyError):
        run_tool(tool, {"x": 1})
    monkeypatch.setenv("AGENT_R1_STRICT", "off")
    with pytest.raises(ValueError, match="AGENT_R1_STRICT must be 0, 1, true or false, got 'off'"):
        run_tool(tool, {"x": 1})


def test_strict_raises_wrong_results_and_batches_and_schemas() -> None:
    class Wrong(Tool):
        name, description, parameters = "wrong", "", {"type": "object"}

        def execute(self, arguments: dict[str, Any]) -> Any:
            return 5

        def batch_execute(self, batch: list[dict[str, Any]]) -> Any:
            return []

    with pytest.raises(TypeError, match="returned int instead of a ToolResult"):
        run_tool(Wrong(), {}, strict=True)
    with pytest.raises(TypeError, match="must return a list of 2 results"):
        run_batch(Wrong(), [{}, {"a": 1}], strict=True)
    tool = Wrong()
    tool.parameters = {"type": "nothing"}
    with pytest.raises(Exception, match="nothing"):
        run_tool(tool, {}, strict=True)


def test_faults_and_late_calls_are_no_bugs() -> None:
    def fails(late: bool) -> None:
        if late:
            time.sleep(5)
        raise ConnectionError("down")

    tool = Tool.from_function(fails, timeout=0.1)
    assert run_tool(tool, {"late": True}, strict=True).data == {"error": "timeout"}
    tool.timeout = 20
    assert run_tool(tool, {"late": False}, strict=True).fault == "ConnectionError: down"


# --- a tool that mostly fails -----------------------------------------------------------------------------------------


def calls(
    name: str, outcomes: str, wrap: Callable[[Any], Any] = lambda step: step
) -> list[warnings.WarningMessage]:
    """The warnings of a tool whose calls fail ("x"), succeed ("."), have bad arguments ("?") or fault ("!")."""
    todo = iter(outcomes.replace("?", ""))

    def step(n: int, m: int = 0) -> str:
        outcome = next(todo)
        if outcome != ".":
            raise {"x": sqlite3.ProgrammingError("made in another thread"), "!": ConnectionError()}[outcome]
        return outcome

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for outcome in outcomes:
            tool = Tool.from_function(wrap(step), name=name)  # every episode has its own
            run_tool(tool, {} if outcome == "?" else {"n": 1})
    return caught


def test_a_tool_that_mostly_fails_is_warned_about_once() -> None:
    (warning,) = calls("mostly_fails", "." * 50 + "x" * 30)
    text = str(warning.message)
    assert "mostly_fails failed in 6 of its last 10 calls" in text and "made in another thread" in text
    assert "AGENT_R1_STRICT=1" in text and warning.filename == __file__
    (warning,) = calls("with_an_argument", "x" * 30, wrap=lambda step: functools.partial(functools.partial(step), m=1))
    assert warning.filename == __file__ and warning.lineno > 1
    assert not calls("half", ".x" * 30) and not calls("bad_arguments", "?" * 30) and not calls("down", "!" * 30)
    assert not calls("seldom_called", "x" * 9)
