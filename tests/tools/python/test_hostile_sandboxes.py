"""Sandbox servers that mean harm to their client: each is given up in bounded time and memory, as a fault of ours."""

import gzip
import json
import time
import tracemalloc

import pytest
from hostile_server import DRIPS, Send, answer, drip, flood, talking

from agent_r1_tools import run_tool
from agent_r1_tools.python import Limits, PythonTool, SandboxError, remote
from agent_r1_tools.python.remote import Remote

LIMITS = Limits(wall_seconds=0.3)


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that the machine may use must not see the loopback addresses."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(remote, "RETRIES", 0)


def ran(stdout: str, **more: object) -> bytes:
    result = {"status": "Finished", "return_code": 0, "stdout": stdout, **more}
    return json.dumps({"status": "Success", "message": "", "run_result": result}).encode()


def said_of(address: str) -> str:
    with pytest.raises(SandboxError) as raised:
        Remote(address, LIMITS).session().run("1")
    return str(raised.value)


def peak_of(address: str) -> tuple[str, int]:
    """What is said of an answer, and the memory that it took, in bytes."""
    tracemalloc.start()
    try:
        return said_of(address), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("what", DRIPS)
def test_a_drip_fed_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Every byte comes well within the time limit, the answer never."""
    monkeypatch.setattr(remote, "SLACK_SECONDS", 0.2)
    with talking(drip(DRIPS[what])) as address:
        began = time.monotonic()
        assert "no whole answer within 0.5 seconds" in said_of(address)
        assert time.monotonic() - began < 10  # two programs were sent


@pytest.mark.parametrize("coding", [b"gzip", b"deflate, gzip"])
def test_a_bomb_is_not_unpacked(coding: bytes) -> None:
    bomb = gzip.compress(bytes(100_000_000), 1)
    with talking(lambda send: send(answer(bomb, b"Content-Encoding: " + coding))) as address:
        said, peak = peak_of(address)
    assert "encoded as" in said and peak < 20_000_000


@pytest.mark.parametrize("status", [b"200 OK", b"500 Oops"])
def test_an_answer_without_end_is_cut_short(monkeypatch: pytest.MonkeyPatch, status: bytes) -> None:
    monkeypatch.setattr(remote, "ANSWER_BYTES", 1_000_000)
    with talking(flood(status)) as address:
        said, peak = peak_of(address)
    assert ("its answer has more than" if status == b"200 OK" else "status 500: xxx") in said
    assert peak < 20_000_000


def test_a_program_that_floods_its_output_is_a_failed_call() -> None:
    """It is the policy's: the server runs other programs."""
    floods = iter([True, False, True])  # the program, another one, and the program once more

    def talk(send: Send) -> None:
        send(answer(ran("x" * 20_000_000 if next(floods) else "2")))

    with talking(talk) as address:
        result = run_tool(PythonTool(Remote(address, Limits(wall_seconds=30))), {"code": "x"})
    assert not result.ok and result.fault is None and "does not take this program" in result.content


@pytest.mark.parametrize(
    "body",
    [
        *(opening.encode() + b"[" * 100_000 for opening in ("[", '{"status":', '{"status": "a", "run_result": ')),
        b'{"status": "Success", "run_result": {"status": "Finished", "return_code": ' + b"9" * 5_000 + b"}}",
        *(ran("2").decode().encode(charset) for charset in ("utf-16", "utf-32")),
        ran("\u00e9").replace(b"\\u00e9", b"\xe9"),
    ],
    ids=["deep", "deep status", "deep result", "digits", "utf-16", "utf-32", "latin-1"],
)
def test_what_is_no_json_in_utf8_is_a_fault(body: bytes) -> None:
    with talking(lambda send: send(answer(body))) as address:
        assert "it doesn't answer as SandboxFusion does" in said_of(address)


@pytest.mark.parametrize("charset", ["rot13", "base64", "no-such", "utf-16"])
def test_a_charset_is_not_heeded(charset: str) -> None:
    """Whatever the headers say; the bytes decide."""
    header = b"Content-Type: text/plain; charset=" + charset.encode()
    with talking(lambda send: send(answer("m\xe4h".encode(), header, status=b"400 Bad"))) as address:
        assert "status 400: m\xe4h" in said_of(address)


@pytest.mark.parametrize("last", ["[" * 100_000, "9" * 5_000, '{"error": []}', '{"value": [[]]}', "\ud800", "null"])
def test_a_guests_answer_that_makes_no_sense_is_no_answer(monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """The server may forge what the guest says; a run then ended without a result."""
    mark = "5" * 32
    monkeypatch.setattr(remote.secrets, "token_hex", lambda size: mark)
    with talking(lambda send: send(answer(ran(f"\n{mark}\n\n{mark}{last}\n")))) as address:
        assert Remote(address, LIMITS).session().run("1").status == "died"


@pytest.mark.parametrize("address", ["http://[", "http://127.0.0.1:99999999", "http://", "http://a:b", "http://\ud800"])
def test_an_address_that_is_none_is_said(address: str) -> None:
    with pytest.raises(ValueError, match="not an address"):
        Remote(address, LIMITS)


def test_a_redirection_is_not_followed() -> None:
    header = b"Location: http://127.0.0.1:1/"
    with talking(lambda send: send(answer(b"", header, status=b"307 Elsewhere"))) as address:
        assert "status 307" in said_of(address)
