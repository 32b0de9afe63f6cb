"""The contract of tools: schemas, validation, and calls that always answer."""

import errno
import functools
import gzip
import io
import json
import math
import os
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agent_r1_tools import Tool, ToolFault, ToolResult, run_batch, run_tool
from agent_r1_tools.running import at_work
from agent_r1_tools.schemas import Checker
from agent_r1_tools.text import clean_text
from agent_r1_tools.tool import POLICY_NUMBERS

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


class Echo(Tool):
    """Answers with its text; some texts make it misbehave."""

    name = "echo"
    description = "Says the text again."
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "times": {"type": "integer", "default": 1}},
        "required": ["text"],
        "additionalProperties": False,
    }
    timeout = math.inf

    def __init__(self) -> None:
        self.executed: list[str] = []

    def execute(self, arguments: dict[str, Any]) -> Any:
        text = arguments["text"]
        self.executed.append(text)
        if text == "raise":
            raise ValueError("no such thing")
        if text == "exit":
            raise SystemExit(3)
        if text == "unprintable":
            raise Unprintable
        if text == "sleep":
            time.sleep(60)
        if text == "none":
            return None
        if text == "number":
            return ToolResult(5)  # type: ignore[arg-type]
        return ToolResult(text * arguments.get("times", 1))


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class BatchEcho(Echo):
    """Answers a batch at once, and counts how often."""

    def __init__(self, broken: str = "") -> None:
        super().__init__()
        self.batches: list[int] = []
        self.broken = broken

    def batch_execute(self, batch: list[dict[str, Any]]) -> Any:
        self.batches.append(len(batch))
        results = [ToolResult(arguments["text"]) for arguments in batch]
        if self.broken == "raises":
            raise RuntimeError("the batch failed")
        if self.broken == "short":
            return results[:-1]
        if self.broken == "none":
            return None
        if self.broken == "one":
            return [5, *results[1:]]
        return results


# --- run_tool ---------------------------------------------------------------------------------------------------------


def test_a_good_call_gives_the_tools_own_result() -> None:
    assert run_tool(Echo(), {"text": "ab", "times": 2}) == ToolResult("abab")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "missing 'text'"),
        ({"text": 5}, "'text' must be string, not number"),
        ({"text": None}, "'text' must be string, not null"),
        ({"text": "a", "times": True}, "'times' must be integer, not boolean"),
        ({"text": "a", "times": 1.5}, "'times' must be integer"),
        ({"text": "a", "loud": 1}, "unknown 'loud'"),
        (5, "must be a JSON object, not number"),
        ("text", "must be a JSON object, not string"),
        (None, "must be a JSON object, not null"),
        ([{"text": "a"}], "must be a JSON object, not array"),
        ({1: "a"}, "argument names must be strings"),
    ],
)
def test_bad_arguments_are_named_and_not_executed(arguments: Any, says: str) -> None:
    tool = Echo()
    result = run_tool(tool, arguments)
    assert not result.ok
    assert result.data == {"error": "bad_arguments"}
    assert says in result.content
    assert "text (string), times (integer, optional)" in result.content or 1 in arguments
    assert tool.executed == []


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("raise", "exception", "ValueError: no such thing"),
        ("unprintable", "exception", "Unprintable"),
        ("none", "bad_result", "returned NoneType"),
    ],
)
@pytest.mark.parametrize("timeout", [math.inf, 20.0])
def test_failures_become_results(text: str, error: str, says: str, timeout: float) -> None:
    tool = Echo()
    tool.timeout = timeout
    result = run_tool(tool, {"text": text})
    assert (result.ok, result.data) == (False, {"error": error})
    assert says in result.content


def test_content_that_is_not_text_becomes_text() -> None:
    assert run_tool(Echo(), {"text": "number"}) == ToolResult("5")


def test_only_the_users_own_exit_passes_through() -> None:
    tool = Echo()
    with pytest.raises(SystemExit):
        run_tool(tool, {"text": "exit"})  # in the main thread, without a timeout
    tool.timeout = 20.0
    assert "SystemExit" in run_tool(tool, {"text": "exit"}).content
    tool.timeout = math.inf
    results: list[ToolResult] = []
    thread = threading.Thread(target=lambda: results.append(run_tool(tool, {"text": "exit"})))
    thread.start()
    thread.join()
    assert results[0].data == {"error": "exception"}


def test_a_slow_tool_is_left_behind() -> None:
    tool = Echo()
    tool.timeout = 0.05
    start = time.perf_counter()
    result = run_tool(tool, {"text": "sleep"})
    assert time.perf_counter() - start < 10
    assert (result.ok, result.data) == (False, {"error": "timeout"})
    assert "0.05 seconds" in result.content


def test_a_hung_tool_does_not_keep_the_interpreter() -> None:
    script = """
        import time
        from agent_r1_tools import Tool, run_batch, run_tool
        def hang(i: int) -> str:
            time.sleep(600)
        tool = Tool.from_function(hang, timeout=0.05)
        print(run_tool(tool, {"i": 0}).data, [r.data["error"] for r in run_batch(tool, [{"i": i} for i in range(3)])])
    """
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "{'error': 'timeout'} ['timeout', 'timeout', 'timeout']\n", done.stderr
    assert time.perf_counter() - start < 30


@settings(max_examples=200, deadline=None)
@given(arguments=JSON)
def test_any_arguments_get_an_answer(arguments: Any) -> None:
    result = run_tool(Tool.from_function(lambda x: x, name="f"), arguments)
    assert isinstance(result.content, str)
    result.content.encode()
    assert result.ok == (isinstance(arguments, dict) and arguments.keys() == {"x"})


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(categories=["L", "Nd", "Zs", "Cs", "Cc"]), max_size=60), limit=st.integers(0, 60))
def test_content_is_bounded_and_can_be_encoded(text: str, limit: int) -> None:
    cleaned = clean_text(text, limit)
    assert len(cleaned) <= limit
    cleaned.encode("utf-8")
    assert "\0" not in cleaned
    if len(text) <= limit:
        assert len(cleaned) == len(text)
        assert all(a == b or b == "\ufffd" for a, b in zip(text, cleaned, strict=True))


def test_a_cut_says_how_much_is_missing() -> None:
    tool = Echo()
    tool.max_result_chars = 100
    content = run_tool(tool, {"text": "ab" * 500}).content
    kept = content.split("...")[0]
    assert len(content) <= 100
    assert content == f"{kept}... [{1000 - len(kept)} characters cut]"


def test_surrogates_and_nul_are_replaced_but_the_rest_is_kept() -> None:
    assert run_tool(Echo(), {"text": "a\ud800b\0c\U0001f600é"}).content == "a\ufffdb\ufffdc\U0001f600é"


def test_a_broken_schema_is_reported() -> None:
    tool = Echo()
    tool.parameters = {"type": "nothing"}
    assert run_tool(tool, {"text": "a"}).data == {"error": "exception"}


# --- run_batch --------------------------------------------------------------------------------------------------------


def batch_of(*texts: str) -> list[dict[str, Any]]:
    return [{"text": text} for text in texts]


def test_a_batch_answers_in_order_and_equal_calls_once() -> None:
    tool = BatchEcho()
    results = run_batch(tool, [*batch_of("a", "b", "a"), {}, *batch_of("b")])
    assert [r.content for r in results[:3]] == ["a", "b", "a"]
    assert results[3].data == {"error": "bad_arguments"}
    assert results[4].content == "b"
    assert tool.batches == [2]


def test_calls_that_only_look_equal_are_told_apart() -> None:
    tool = Tool.from_function(lambda x: type(x).__name__, name="f", timeout=math.inf)
    results = run_batch(tool, [{"x": 1}, {"x": 1.0}, {"x": True}, {"x": "1"}])
    assert [r.content for r in results] == ["int", "float", "bool", "str"]


def test_a_tool_with_a_session_executes_every_call_in_order() -> None:
    tool = Echo()
    tool.concurrency_safe = False
    tool.timeout = 20.0
    assert [r.content for r in run_batch(tool, batch_of("a", "b", "a"))] == ["a", "b", "a"]
    assert tool.executed == ["a", "b", "a"]


@pytest.mark.parametrize("broken", ["raises", "short", "none"])
def test_a_broken_batch_is_made_one_by_one(broken: str) -> None:
    tool = BatchEcho(broken)
    results = run_batch(tool, batch_of("a", "raise", "b"))
    assert [r.content for r in results if r.ok] == ["a", "b"]
    assert results[1].data == {"error": "exception"}
    assert tool.executed == ["a", "raise", "b"]


def test_one_bad_result_in_a_batch_stands_alone() -> None:
    results = run_batch(BatchEcho("one"), batch_of("a", "b"))
    assert results[0].data == {"error": "bad_result"}
    assert results[1] == ToolResult("b")


def test_a_slow_call_in_a_batch_delays_nobody_else() -> None:
    tool = Echo()
    tool.timeout = 0.5
    start = time.perf_counter()
    results = run_batch(tool, batch_of("a", "sleep", "b", *(f"c{i}" for i in range(60))))
    assert time.perf_counter() - start < 10
    assert [r.ok for r in results] == [True, False] + [True] * 61
    assert [r.content for r in results[3:]] == [f"c{i}" for i in range(60)]


def test_blocking_calls_run_side_by_side() -> None:
    together = threading.Barrier(3)

    def meet(i: int) -> int:
        """Return when all three are here.

        Args:
            i: who comes.
        """
        together.wait(20)
        return i

    results = run_batch(Tool.from_function(meet, timeout=30), [{"i": i} for i in range(3)])
    assert [r.data for r in results] == [0, 1, 2]


def test_an_empty_batch() -> None:
    assert run_batch(Echo(), []) == []


@settings(max_examples=50, deadline=None)
@given(batch=st.lists(st.fixed_dictionaries({"text": JSON}) | JSON, max_size=6))
def test_a_batch_gives_what_single_calls_give(batch: list[Any]) -> None:
    tool = Tool.from_function(lambda text: f"<{text!r}>", name="f", timeout=math.inf)
    assert [r.content for r in run_batch(tool, batch)] == [run_tool(tool, call).content for call in batch]


# --- checking arguments -----------------------------------------------------------------------------------------------

PROPERTY = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["string", "integer", "number", "boolean", "array", ["string", "null"]]),
        "description": st.just("x"),
        "enum": st.just(["a", 1]),
        "minLength": st.just(2),
    },
)
SCHEMA = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from("abc"), PROPERTY | st.booleans())},
    optional={
        "required": st.lists(st.sampled_from("abcd"), unique=True, max_size=3),
        "additionalProperties": st.booleans() | st.just({"type": "string"}),
        "minProperties": st.just(2),
    },
)
ARGUMENTS = st.dictionaries(st.sampled_from("abcd"), JSON | st.sampled_from(["a", "ab", 1, 2.0, True]), max_size=4)


@settings(max_examples=400, deadline=None)
@given(schema=SCHEMA, arguments=ARGUMENTS)
def test_the_check_by_hand_agrees_with_jsonschema(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    checker = Checker(schema)
    valid = Draft202012Validator(schema).is_valid(arguments)
    assert valid or not checker.surely_valid(arguments)
    assert valid == (not checker.problems(arguments))


def test_the_check_by_hand_decides_the_common_case() -> None:
    assert Checker(Echo.parameters).surely_valid({"text": "a", "times": 3})


def test_a_parameter_of_several_types() -> None:
    def show(value: int | str) -> str:
        return repr(value)

    tool = Tool.from_function(show)
    assert [run_tool(tool, {"value": value}).content for value in (1, "a")] == ["1", "'a'"]
    assert "'value' must be integer or string, not array" in run_tool(tool, {"value": []}).content


def test_the_schema_form() -> None:
    assert Echo().schema == {
        "type": "function",
        "function": {"name": "echo", "description": "Says the text again.", "parameters": Echo.parameters},
    }


def test_tools_are_stateless_unless_they_say_otherwise() -> None:
    tool = Echo()
    tool.set_state(tool.get_state())
    assert tool.get_state() is None


# --- from_function ----------------------------------------------------------------------------------------------------


def book(
    city: str,
    nights: int,
    price: float = 80.0,
    quiet: bool = False,
    guests: list[str] | None = None,
    extras: Optional[dict[str, int]] = None,  # noqa: UP045  users write this
    room: Literal["single", "double"] = "single",
    floor: int | str = 1,
    anything: Any = None,
    plain: list = [],  # type: ignore[type-arg]  # noqa: B006
) -> str:
    """Book a hotel
    in a city.

    The booking is not binding.

    Args:
        city: Where,
            with the country: "Paris, France".
        nights (int): How many.
        room: The kind.

    Returns:
        A line of text: never a description of an argument.
    """
    return f"{nights} nights in {city}"


def test_a_function_becomes_a_tool() -> None:
    tool = Tool.from_function(book)
    assert tool.name == "book"
    assert tool.description == "Book a hotel in a city.\n\nThe booking is not binding."
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": 'Where, with the country: "Paris, France".'},
            "nights": {"type": "integer", "description": "How many."},
            "price": {"type": "number", "default": 80.0},
            "quiet": {"type": "boolean", "default": False},
            "guests": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
            "extras": {"anyOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "null"}]},
            "room": {"enum": ["single", "double"], "description": "The kind.", "default": "single"},
            "floor": {"type": ["integer", "string"], "default": 1},
            "anything": {},
            "plain": {"type": "array"},
        },
        "required": ["city", "nights"],
        "additionalProperties": False,
    }
    Draft202012Validator.check_schema(tool.parameters)
    json.dumps(tool.schema)
    assert run_tool(tool, {"city": "Rome", "nights": 2}) == ToolResult("2 nights in Rome", data="2 nights in Rome")
    assert run_tool(tool, {"city": "Rome", "nights": 2, "room": "triple"}).data == {"error": "bad_arguments"}


def test_values_and_results_of_functions() -> None:
    assert run_tool(Tool.from_function(lambda: 5, name="f"), {}) == ToolResult("5", data=5)
    result = ToolResult("no", ok=False, data=1)
    assert run_tool(Tool.from_function(lambda: result, name="f"), {}) is result


def test_methods_partials_and_callable_objects() -> None:
    class Greeter:
        def hello(self, who: str) -> str:
            """Greet someone."""
            return f"hello {who}"

        def __call__(self, who: str, loud: bool = False) -> str:
            return self.hello(who).upper() if loud else self.hello(who)

    method = Tool.from_function(Greeter().hello)
    assert (method.name, method.description) == ("hello", "Greet someone.")
    assert run_tool(method, {"who": "you"}).content == "hello you"
    loud = Tool.from_function(functools.partial(Greeter().__call__, loud=True), name="loud")
    assert run_tool(loud, {"who": "you"}).content == "HELLO YOU"
    assert Tool.from_function(Greeter(), name="greet").parameters["properties"]["who"] == {"type": "string"}


def takes_star(*names: str) -> None: ...
def takes_stars(**names: str) -> None: ...
def takes_position(name: str, /) -> None: ...
def takes_bytes(data: bytes) -> None: ...
def takes_unknown(data: "Missing") -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (takes_star, "given by name"),
        (takes_stars, "given by name"),
        (takes_position, "given by name"),
        (takes_bytes, "parameter 'data' of takes_bytes"),
        (takes_unknown, "cannot be resolved"),
    ],
)
def test_a_signature_without_a_schema_is_refused(function: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        Tool.from_function(function)


def test_a_function_without_a_name_needs_one() -> None:
    with pytest.raises(ValueError, match="pass from_function"):
        Tool.from_function(lambda: 1)


def test_importing_the_tools_is_cheap() -> None:
    heavy = ["numpy", "jsonschema", "bm25s", "httpx", "fastapi", "torch", "faiss", "sentence_transformers"]
    script = f"import sys, agent_r1_tools, agent_r1_tools.search; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


# --- faults -----------------------------------------------------------------------------------------------------------


def breaks(error: Any) -> Tool:
    """A tool that raises this, or returns it."""

    def break_() -> Any:
        if isinstance(error, BaseException):
            raise error
        return error

    return Tool.from_function(break_, name="break", timeout=math.inf)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ToolFault("the world is lost"), "ToolFault: the world is lost"),
        (ConnectionRefusedError("port 9"), "ConnectionRefusedError: port 9"),
        (TimeoutError(), "TimeoutError"),
        (OSError(24, "Too many open files"), "OSError: [Errno 24] Too many open files"),
        (ToolResult("?", fault="the index is gone"), "the index is gone"),
        (ToolResult("?", fault="x" * 10_000), "x" * 250),
    ],
)
def test_what_the_machinery_does_wrong_is_a_fault(error: Any, says: str) -> None:
    result = run_tool(breaks(error), {})
    assert not result.ok and result.fault is not None
    assert result.fault.startswith(says) and len(result.fault) <= 300


class Truncated(OSError):
    """As libraries write them: with a number of its own."""


MACHINERY = [
    OSError("the disk is gone"),
    *(OSError(getattr(errno, name), name) for name in ("EIO", "EBADF", "ENOSPC", "ENOMEM", "EMFILE", "ESRCH")),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    TimeoutError(errno.ETIMEDOUT, "too late"),
    urllib.error.URLError("refused"),
    socket.gaierror(errno.ENOEXEC, "no such host"),  # macOS has small positive numbers
    ssl.SSLEOFError(errno.ENOEXEC, "the server hung up"),  # SSL_ERROR_EOF
    ssl.SSLZeroReturnError(errno.ENXIO, "the server hung up"),
    ssl.SSLCertVerificationError(1, "expired"),  # a ValueError too
    Truncated(errno.EINVAL, "?"),
]


@pytest.mark.parametrize("error", MACHINERY, ids=lambda error: f"{type(error).__name__}-{error.errno}")
def test_an_oserror_that_arguments_do_not_cause_is_a_fault(error: OSError) -> None:
    assert run_tool(breaks(error), {}).fault is not None


def test_the_errors_of_requests_are_told_apart() -> None:
    requests = pytest.importorskip("requests").exceptions
    for kind, fault in {
        requests.ConnectionError: True,
        requests.Timeout: True,
        requests.HTTPError: True,
        requests.MissingSchema: False,
        requests.InvalidSchema: False,
        requests.InvalidURL: False,
    }.items():
        assert (run_tool(breaks(kind("x")), {}).fault is not None) == fault, kind


NUMBERS = [
    *("ENAMETOOLONG", "ELOOP", "EILSEQ", "ENOTEMPTY", "EXDEV", "EBUSY", "ETXTBSY", "EROFS"),
    *("ENXIO", "ENODEV", "ENOTTY", "ESPIPE", "EOPNOTSUPP", "ENOEXEC", "E2BIG"),
    *("EINVAL", "EDOM", "ERANGE", "EOVERFLOW", "EFBIG"),
]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_arguments_cause_is_the_policys(name: str) -> None:
    assert run_tool(breaks(OSError(getattr(errno, name), name)), {}).fault is None


def test_the_list_of_numbers_is_the_one_above() -> None:
    assert {getattr(errno, name) for name in NUMBERS} == POLICY_NUMBERS


FAR_OFF = 10**17
"""A time in seconds that no calendar has."""


def open_image(data: bytes) -> None:
    pytest.importorskip("PIL.Image").open(io.BytesIO(data))


def with_file(path: Path, use: Callable[[io.BufferedReader], Any]) -> None:
    with path.open("rb") as file:
        use(file)


def execute(path: Path) -> None:
    path.chmod(0o755)
    subprocess.run([path])


def seek_in_a_pipe() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb"), open(writing, "wb"):
        os.lseek(reading, 0, os.SEEK_SET)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other numbers for some of these")
@pytest.mark.parametrize(
    ("code", "call"),
    [
        (errno.EOVERFLOW, lambda folder: datetime.fromtimestamp(FAR_OFF)),
        (errno.EINVAL, lambda folder: with_file(folder / "file", lambda file: file.seek(-1))),
        (errno.EINVAL, lambda folder: os.rename(folder / "full", folder / "full" / "inside" / "x")),
        (errno.EINVAL, lambda folder: os.readlink(folder / "file")),
        (errno.ENOTEMPTY, lambda folder: os.rmdir(folder / "full")),
        (errno.EXDEV, lambda folder: os.rename(folder / "file", "/proc/x")),
        (errno.ENXIO, lambda folder: open(folder / "socket")),
        (errno.ELOOP, lambda folder: open(folder / "loop")),
        (errno.ENAMETOOLONG, lambda folder: open(folder / ("x" * 1000))),
        (errno.ENOTTY, lambda folder: with_file(folder / "file", lambda file: os.get_terminal_size(file.fileno()))),
        (errno.ESPIPE, lambda folder: seek_in_a_pipe()),
        (errno.ENOEXEC, lambda folder: execute(folder / "file")),
        (errno.E2BIG, lambda folder: subprocess.run([sys.executable, "x" * 10**6])),
        (None, lambda folder: shutil.copy(folder / "file", folder / "file")),
        (None, lambda folder: shutil.copytree(folder / "full", folder / "full", dirs_exist_ok=True)),
        (None, lambda folder: shutil.unpack_archive(folder / "file", folder / "new", "tar")),
        (None, lambda folder: shutil.copyfile(folder / "pipe", folder / "new")),
        (None, lambda folder: gzip.open(folder / "file").read()),
        (None, lambda folder: open_image(b"x")),
        (None, lambda folder: with_file(folder / "file", lambda file: file.write(b"x"))),
    ],
)
def test_what_a_value_of_the_policy_brings_about_is_a_failed_call(tmp_path: Path, code: int | None, call: Any) -> None:
    """Were it a fault, the policy could have its bad episodes left out."""
    (tmp_path / "file").write_text("hello")
    (tmp_path / "full" / "inside").mkdir(parents=True)
    (tmp_path / "full" / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    os.mknod(tmp_path / "socket", stat.S_IFSOCK | 0o600)
    with pytest.raises(OSError) as raised:
        call(tmp_path)
    assert raised.value.errno == code
    tool = Tool.from_function(lambda: call(tmp_path), name="call")
    result = run_tool(tool, {})
    assert (result.ok, result.fault, result.data) == (False, None, {"error": "exception"})


NAMED = [FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError, PermissionError]
"""What a path that the policy names may lead to."""


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("division by zero"), ValueError("no"), KeyError("x"), 5, None, *(e("x") for e in NAMED)]
)
def test_any_other_exception_is_a_failed_call(error: Any) -> None:
    result = run_tool(breaks(error), {})
    assert result.fault is None and result.ok == (not isinstance(error, Exception))


def test_a_path_that_the_policy_names_is_its_own(tmp_path: Path) -> None:
    def read(path: str) -> str:
        return Path(path).read_text()

    tool = Tool.from_function(read)
    for path in ("nope.txt", ".", f"{__file__}/x", "x" * 1000):
        result = run_tool(tool, {"path": str(tmp_path / path)})
        assert (result.ok, result.fault, result.data) == (False, None, {"error": "exception"})


def test_a_timeout_is_a_fault_only_of_a_tool_that_says_so() -> None:
    for is_fault in (False, True):
        tool = Tool.from_function(lambda: time.sleep(5), name="f", timeout=0.02, timeout_is_fault=is_fault)
        result = run_tool(tool, {})
        assert result.data == {"error": "timeout"} and (result.fault is not None) == is_fault


def test_a_call_waits_for_its_lane_before_its_time_runs() -> None:
    lanes = threading.Semaphore(0)

    class Lane(Echo):
        timeout = 0.1

        def lane(self) -> Any:
            return lanes

    threading.Timer(0.3, lanes.release).start()
    assert run_tool(Lane(), {"text": "a"}).content == "a"
    assert run_tool(Lane(), {"text": "sleep"}).data == {"error": "timeout"}
    assert lanes.acquire(timeout=0)  # who ran out of time has given it back


def test_a_call_that_ran_out_of_time_is_at_work_until_it_ends() -> None:
    end = threading.Event()
    hangs, idle = (Tool.from_function(end.wait, name=name, timeout=0.02) for name in ("hangs", "idle"))
    assert not at_work(hangs)
    run_tool(hangs, {})
    assert at_work(hangs) and not at_work(idle)
    end.set()
    while at_work(hangs):
        time.sleep(0.01)


def test_what_is_cut_or_cleaned_keeps_the_rest_of_the_result() -> None:
    tool = breaks(ToolResult("a\0b", data=3, done=True))
    assert run_tool(tool, {}) == ToolResult("a\ufffdb", data=3, done=True)


def test_a_batch_that_faults_is_made_one_by_one() -> None:
    class Batch(BatchEcho):
        def batch_execute(self, batch: list[dict[str, Any]]) -> Any:
            raise ConnectionError("reset by peer")

        def execute(self, arguments: dict[str, Any]) -> Any:
            if arguments["text"] == "raise":
                raise ConnectionError("refused")
            return super().execute(arguments)

    results = run_batch(Batch(), batch_of("a", "raise", "b"))
    assert [result.fault for result in results] == [None, "ConnectionError: refused", None]
