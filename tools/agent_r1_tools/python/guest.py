"""The program inside a sandbox: it keeps the names of a session, runs its cells, and answers over one socket.

Standard library only, and nothing of this project: the sandboxes see this file and no other. The code that it runs
shares the process, so no answer of this program is trusted: a program that forges an answer only fools itself.

A message is four bytes (its length, big-endian), and marshal on the way in, JSON on the way out, which is safe to read
whoever wrote it. The outside sends {"run": code, "functions": names} or {"call": name, "arguments": encoded}; the
answer is {"error": null or [type, message], "shown": traceback, "timeout": true} or {"value": encoded}. In between,
{"invoke": name, "arguments": encoded} asks the outside to run one of its functions. All messages of an exchange have
the same "id".

The imports are few and small, because every session waits for them.
"""

from __future__ import annotations

import _ast
import _signal as signal  # type: ignore[import-not-found]
import builtins
import io
import marshal
import os
import resource
import sys
from _json import encode_basestring_ascii as quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_MESSAGE = 4 << 20
"""Bytes of the longest message, either way."""
MAX_PARTS = 1 << 18
"""Brackets and commas between the texts of a message out of here: reading a million lists takes seconds, in which no
thread runs."""
MAX_COLLISIONS = 100
"""Members of a set, or keys of a dict, that may have the hash of another."""
MAX_RUNS = 100
"""A session has the processor time of so many runs; only a program that continues after its runs needs more."""
MAX_FRAMES = 8
"""Lines of a traceback that are shown: the first, and the last ones."""
ENDS_LOOPS = (StopIteration, StopAsyncIteration, GeneratorExit)
ONLY_AST = 0x400  # ast.PyCF_ONLY_AST, without importing ast


# --- literals: how values cross, both ways ----------------------------------------------------------------------------


class NotLiteral(TypeError):
    """A value is not made of built-in literals."""


def encode(value: Any) -> Any:
    """Encode a value made of built-in literals as JSON; a subclass becomes its built-in base type.

    Literals are None, bool, int, float, complex, str, bytes, list, tuple, dict, set and frozenset.

    Raises:
        NotLiteral: there is something else in it.
        RecursionError: it is nested too deeply, or contains itself.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -(2**53) < value < 2**53 else {"int": hex(value)}
    if kind is float:
        return value if value - value == 0 else {"float": repr(value)}
    if kind is list:
        return [encode(item) for item in value]
    if kind is tuple or kind is set or kind is frozenset:
        return {kind.__name__: [encode(item) for item in value]}
    if kind is dict:
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is complex:
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, str):
        return str.__str__(value)
    base: Any
    for base in (int, float, bytes, list, tuple, dict, set, frozenset):
        if isinstance(value, base):
            return encode(base(value))
    raise NotLiteral(f"a value of type {kind.__name__} is not a built-in literal")


def decode(data: Any) -> Any:
    """Return the value that `encode` wrote.

    Raises:
        ValueError, TypeError, KeyError, OverflowError or RecursionError: the data were not written by `encode`.
    """
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float(content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*(decode(part) for part in content))
    if kind == "dict":
        keys = _hashable([decode(key) for key, _ in content])
        return dict(zip(keys, [decode(item) for _, item in content], strict=True))
    items = [decode(item) for item in content]
    return tuple(items) if kind == "tuple" else {"set": set, "frozenset": frozenset}[kind](_hashable(items))


def _hashable(items: list[Any]) -> list[Any]:
    """Return the items. A large set of items with equal hashes would take minutes to make."""
    if len(items) - len({hash(item) for item in items}) > MAX_COLLISIONS:
        raise ValueError(f"more than {MAX_COLLISIONS} values of a set or keys of a dict have the hash of another")
    return items


def exception(kind: str, message: str) -> Exception:
    """Return the exception of this name, or a RuntimeError if it is not built in or would end an iteration.

    PEP 479 says the same of generators: `all(map(f, items))` would pass where f raises StopIteration.
    """
    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception) and not issubclass(known, ENDS_LOOPS):
        try:
            return known(message)
        except TypeError:  # UnicodeDecodeError wants more than a message
            pass
    return RuntimeError(f"{kind}: {message}")


# --- messages ---------------------------------------------------------------------------------------------------------


def send(fd: int, message: dict[str, Any]) -> None:
    text = to_json(message)  # is ASCII
    check_size(text)
    data = text.encode()
    data = len(data).to_bytes(4, "big") + data
    while data:
        data = data[os.write(fd, data) :]


def check_size(text: str) -> None:
    """Raise NotLiteral if a message is too long or has too many parts."""
    if len(text) > MAX_MESSAGE:
        raise NotLiteral(f"the value is larger than {MAX_MESSAGE} bytes")
    if _parts(text) > MAX_PARTS and _parts(_without_texts(text)) > MAX_PARTS:
        raise NotLiteral(f"the value has more than {MAX_PARTS} brackets and commas")


def _parts(text: str) -> int:
    return text.count("[") + text.count("{") + text.count(",")


def _without_texts(text: str) -> str:
    """Return JSON without the contents of its strings. Of invalid JSON, keep all that is read before the mistake."""
    return "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])


def receive(fd: int) -> dict[str, Any] | None:
    """Return the next message, or None if the outside has hung up."""
    head = _read(fd, 4)
    body = _read(fd, int.from_bytes(head, "big")) if head else None
    message: dict[str, Any] | None = marshal.loads(body) if body else None
    return message


def to_json(value: Any) -> str:
    """Return the JSON of an encoded value. The module json would import half the library."""
    if value is None:
        return "null"
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, str):
        return str(quote(value))
    if isinstance(value, list):
        return f"[{','.join([to_json(item) for item in value])}]"
    if isinstance(value, dict):
        return "{" + ",".join([f"{quote(key)}:{to_json(item)}" for key, item in value.items()]) + "}"
    return repr(value)


def _read(fd: int, count: int) -> bytes | None:
    parts = []
    while count:
        part = os.read(fd, count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


# --- running ----------------------------------------------------------------------------------------------------------


class OutOfTime(BaseException):
    """The processor time of this run is used up."""


class Output(io.TextIOWrapper):
    """sys.stdout and sys.stderr. Output beyond the limit is dropped here, where it costs nothing."""

    left = 0

    def write(self, text: str) -> int:
        if self.left > 0:
            super().write(text[: self.left])
        self.left -= len(text)
        return len(text)


class Guest:
    """A session: names, and the cells that changed them."""

    def __init__(self, output: int, cpu_seconds: float, control: int | None = None) -> None:
        self.control = control
        self.output_limit = output
        self.cpu_seconds = cpu_seconds
        self.cells = 0
        self.exchange = 0
        self.main = type(sys)("__main__")
        self.out = Output(io.FileIO(1, "w"), encoding="utf-8", errors="backslashreplace", line_buffering=True)
        sys.stdin = open(os.devnull)
        sys.stdout = sys.stderr = self.out
        sys.modules["__main__"] = self.main
        sys.argv = [""]
        self.sources: dict[str, list[str]] = {}
        self.seeded: set[str] = set()

    def run(self, code: str, functions: list[str] = []) -> dict[str, Any]:  # noqa: B006
        """Run a cell as a notebook would: the value of a last expression is shown, an exception as a traceback."""
        self.cells += 1
        name = f"<cell {self.cells}>"
        self.sources[name] = code.splitlines()
        self._seed(code)
        for function in functions:
            self.main.__dict__[function] = self._proxy(function)
        return self._attempt(lambda: self._execute(code, name))

    def _seed(self, code: str) -> None:
        """Draw the same random numbers in every session, so that a session can be replayed."""
        for name, wanted in (("random", True), ("numpy.random", "numpy" in code or "numpy" in sys.modules)):
            if "random" in code and wanted and name not in self.seeded:
                self.seeded.add(name)
                try:
                    __import__(name)
                    sys.modules[name].seed(0)
                except Exception:  # it isn't here, or the program has been at it
                    pass

    def _execute(self, code: str, name: str) -> dict[str, Any]:
        tree: Any = compile(code, name, "exec", ONLY_AST, dont_inherit=True)
        last = tree.body[-1] if tree.body and type(tree.body[-1]).__name__ == "Expr" else None
        names = self.main.__dict__
        if last is None:
            exec(compile(tree, name, "exec", dont_inherit=True), names)
            return {"error": None}
        tree.body.pop()
        exec(compile(tree, name, "exec", dont_inherit=True), names)
        value = eval(compile(_ast.Expression(last.value), name, "eval", dont_inherit=True), names)
        if value is not None:
            names["_"] = value
            print(repr(value))
        return {"error": None}

    def call(self, name: str, arguments: Any) -> dict[str, Any]:
        """Call a function of the session; the error is [type, message]."""
        args, kwargs = decode(arguments)
        answer = self._attempt(lambda: {"value": encode(self._lookup(name)(*args, **kwargs))}, show=False)
        return answer

    def _lookup(self, name: str) -> Any:
        try:
            return self.main.__dict__[name]
        except KeyError:
            raise NameError(f"name {name!r} is not defined") from None

    def _proxy(self, name: str) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            assert self.control is not None
            send(self.control, {"id": self.exchange, "invoke": name, "arguments": encode((args, kwargs))})
            answer = receive(self.control)
            if answer is None:
                os._exit(1)
            if "value" in answer:
                return decode(answer["value"])
            raise exception(*answer["raise"])

        function.__name__ = function.__qualname__ = name
        return function

    def _attempt(self, action: Any, show: bool = True) -> dict[str, Any]:
        """Return the action's result, or its error as a notebook shows it."""
        signal.signal(signal.SIGXCPU, _out_of_time)  # the program may have set another
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soft = int(used.ru_utime + used.ru_stime + self.cpu_seconds) + 1
        if hard == resource.RLIM_INFINITY or soft <= hard:
            resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
        self.out.left = self.output_limit + 1  # one more, so that the outside sees that something was cut
        try:
            answer: dict[str, Any] = action()
        except OutOfTime:
            answer = {"error": ["Timeout", f"more than {self.cpu_seconds:g} CPU seconds"], "timeout": True}
        except BaseException as error:
            answer = {"error": _describe(error)}
            if show:
                answer["shown"] = self._traceback(error)
        try:
            self.out.flush()
        except (OSError, ValueError):  # the program has closed it
            pass
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)  # nothing of the program runs between its runs
        return answer

    def _traceback(self, error: BaseException) -> str:
        """Return a traceback of the program's own lines. Lines of libraries do not help its author."""
        lines: list[str] = []
        trace = error.__traceback__
        while trace is not None:
            name, number = trace.tb_frame.f_code.co_filename, trace.tb_lineno
            source = self.sources.get(name)
            if trace.tb_frame.f_code is Guest._execute.__code__:
                lines.clear()  # what comes before is this file, whatever it is called here
            elif source is not None:
                text = source[number - 1].strip()[:200] if number <= len(source) else ""
                lines.append(f"  line {number}, in {trace.tb_frame.f_code.co_name}\n    {text}")
            trace = trace.tb_next
        if isinstance(error, SyntaxError) and error.filename in self.sources:
            lines.append(f"  line {error.lineno}\n    {(error.text or '').strip()[:200]}")
        if len(lines) > MAX_FRAMES:
            lines[1 : 1 - MAX_FRAMES] = [f"  ... {len(lines) - MAX_FRAMES} more"]
        kind, message = _describe(error)
        head = ["Traceback (most recent call last):"] if lines else []
        return "\n".join([*head, *lines, f"{kind}: {message}" if message else kind])


def _describe(error: BaseException) -> list[str]:
    """Return [type, message]. An exception of the program may do anything when it is asked."""
    kind = type(error).__name__
    try:
        message = str(error.msg) if isinstance(error, SyntaxError) else str(error)
    except BaseException:
        message = "(its message cannot be shown)"
    return [str(kind)[:100], message[:1000]]


def _out_of_time(number: int, frame: Any) -> None:
    raise OutOfTime


# --- entry points -----------------------------------------------------------------------------------------------------


def tmp_options(files: int) -> str:
    """Return the mount options of /tmp. Names, links and empty files cost memory too, which `size` does not count."""
    return f"size={max(files, 4096)},nr_inodes=1024,mode=1777"


def limit_resources(memory: int, processes: int, files: int) -> None:
    """Set the limits that hold for the rest of this process's life."""
    if sys.platform == "linux":
        ask_kernel("prctl", 41, 1, 0, 0, 0)  # no huge pages: limits count addresses, and one byte would take 2 MiB
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (64, 64))  # for signals that wait, the kernel has memory
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (files, files))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that is too large is an OSError, not the end


def serve(control: int, settings: dict[str, Any]) -> None:
    """Answer until the outside hangs up."""
    guest = Guest(settings["output"], settings["cpu_seconds"], control)
    most = int(MAX_RUNS * settings["cpu_seconds"]) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    send(control, {"id": 0})
    while (message := receive(control)) is not None:
        guest.exchange = message["id"]
        if "run" in message:
            answer = guest.run(message["run"], message["functions"])
        else:
            answer = guest.call(message["call"], message["arguments"])
        try:
            send(control, answer | {"id": message["id"]})
        except (NotLiteral, ValueError, RecursionError) as error:
            send(control, {"id": message["id"], "error": ["NotLiteral", str(error)[:200]]})


def ask_kernel(call: str, *arguments: int | bytes) -> int:
    """Call a function of the C library; importing ctypes for that would take as long as all the rest."""
    import _ctypes

    library = _ctypes.dlopen(None, os.RTLD_NOW)  # type: ignore[arg-type]
    result: int = _ctypes.call_cdeclfunction(_ctypes.dlsym(library, call), arguments)
    return result


def main() -> None:
    """Run the process of one session. Its socket is standard input, which the program cannot see."""
    control = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    settings = receive(control)
    if settings is None:
        return
    uid, mounts = settings["uid"], settings["mounts"]
    for folder in mounts:  # NOSUID, NODEV; where that is forbidden, the folder stays read-only
        ask_kernel("mount", b"tmpfs", folder.encode(), b"tmpfs", 6, tmp_options(settings["files"]).encode())
    if settings["child"] and (child := os.fork()):
        wait_as_process_1(child, control)
    if uid is not None:  # started by root: its own user, who owns nothing and runs nothing else
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if mounts:
        give_up_capabilities()
        os.chdir(mounts[0])
    limit_resources(settings["memory"], settings["processes"], settings["files"])
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)] + settings["path"]
    serve(control, settings)
    os._exit(0)


def give_up_capabilities() -> None:
    if ask_kernel("capset", (0x20080522).to_bytes(8, "little"), bytes(24)):
        raise OSError("the right to mount could not be given up")


def wait_as_process_1(child: int, control: int) -> None:
    """Act as process 1 of the namespace for a guest of another user: wait for all processes, and end with the guest.

    bwrap's own process 1 does the same, but the outer bwrap ends before it, and then no process waits for it.
    """
    give_up_capabilities()
    os.close(control)
    while os.wait()[0] != child:
        pass
    os._exit(0)


def replay(cells: list[str], call: list[Any] | None, output: int, cpu_seconds: float, mark: str) -> None:
    """Run cells, then show what the last one (or the call after them) did, between two lines that begin with `mark`.

    For servers without sessions: they return standard output only.
    """
    guest = Guest(output, cpu_seconds)
    for cell in cells[:-1] if call is None else cells:
        guest.run(cell)
    guest.out.left = len(mark) + 2
    print(f"\n{mark}")
    answer = guest.run(cells[-1]) if call is None else guest.call(call[0], call[1])
    text = to_json(answer)
    try:
        check_size(text)
    except NotLiteral as error:
        text = to_json({"error": _describe(error)})
    guest.out.left = len(mark) + len(text) + 2
    print(f"\n{mark}{text}")
    guest.out.flush()


if __name__ == "__main__":
    main()
