"""Java programs with a chosen start of their random numbers, in any process.

`new Random()` mixes a counter with the time. Here the class `java.util.Random` of the installed Java gets a call with a
constant result instead of `System.nanoTime()`, and the counter can be set. Hash codes of objects, which order sets,
become constant by an option. Nothing else changes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

JAVA_OPTIONS = [
    "-Xmx512m", "-Xss4m", "-XX:+UseSerialGC",
    "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2",
    "-XX:MaxDirectMemorySize=64m",  # the constant result
    "--add-opens", "java.base/java.util=ALL-UNNAMED",
]  # fmt: skip
CLASS = ("java", "util", "Random.class")
CONSTANT = (b"jdk/internal/misc/VM", b"maxDirectMemory")  # static long maxDirectMemory()
SIZES = {3: 5, 4: 5, 5: 9, 6: 9, 7: 3, 8: 3, 9: 5, 10: 5, 11: 5, 12: 5, 15: 4, 16: 3, 17: 5, 18: 5, 19: 3, 20: 3}
FIRST = 8682522807148012, 902739396  # a counter, and the first number of the generator after it


def without_time(code: bytes) -> bytes:
    """Return a class file in which another method replaces the only call of nanoTime.

    Raises ValueError without such a call, or with several.
    """
    (count,) = struct.unpack_from(">H", code, 8)
    at, number, pool = 10, 1, {}
    while number < count:
        tag = code[at]
        size = 3 + struct.unpack_from(">H", code, at + 1)[0] if tag == 1 else SIZES[tag]
        pool[number] = tag, at, size
        at, number = at + size, number + (2 if tag in (5, 6) else 1)

    def two(entry: int, offset: int) -> int:
        return int(struct.unpack_from(">H", code, pool[entry][1] + offset)[0])

    def name(entry: int) -> bytes:
        _, start, size = pool[entry]
        return code[start + 3 : start + size]

    calls = [entry for entry, (tag, _, _) in pool.items() if tag == 10 and name(two(two(entry, 3), 1)) == b"nanoTime"]
    if len(calls) != 1:
        raise ValueError(f"java.util.Random reads the time {len(calls)} times, not once")
    words = b"".join(struct.pack(">BH", 1, len(word)) + word for word in CONSTANT)
    kind = struct.pack(">BH", 7, count)  # the class, then the method's name and type: that of nanoTime
    method = struct.pack(">BHH", 12, count + 1, two(two(calls[0], 3), 3))
    patched = bytearray(code)
    struct.pack_into(">HH", patched, pool[calls[0]][1] + 1, count + 2, count + 3)
    struct.pack_into(">H", patched, 8, count + 4)
    return bytes(patched[:at]) + words + kind + method + bytes(patched[at:])


def patched_random() -> str:
    """Return a folder for `--patch-module java.base=`. Raises RuntimeError for a Java that cannot be patched."""
    folder = _patched(os.getpid())
    if not Path(folder, *CLASS).is_file():  # the folder was cleaned
        _patched.cache_clear()
        folder = _patched(os.getpid())
    return folder


@contextlib.contextmanager
def watched(seconds: float) -> Iterator[None]:
    """End Java processes that py4j starts in the context if the start takes too long or fails: py4j waits for ever.

    One context at a time, because it changes the package's way to start processes.
    """
    from py4j import java_gateway

    plain, started = java_gateway.Popen, []

    def start(*args: Any, **kwargs: Any) -> Any:
        started.append(plain(*args, **kwargs))
        return started[-1]

    def end() -> None:
        for process in started:
            process.kill()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    try:
        java_gateway.Popen = start
        timer.start()
        yield
    except BaseException:
        end()
        for process in started:
            process.wait()
            process.stdin.close()
        raise
    finally:
        timer.cancel()
        java_gateway.Popen = plain


@cache
def _patched(owner: int) -> str:
    from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

    port, process = launch_gateway(die_on_exit=True, return_proc=True)
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
    try:
        random = gateway.jvm.java.lang.Class.forName("java.util.Random")
        code = without_time(bytes(random.getResourceAsStream("Random.class").readAllBytes()))
    except (KeyError, ValueError) as error:
        raise RuntimeError(f"this Java's random numbers cannot be seeded ({error}); Java 17 was checked") from error
    finally:
        gateway.shutdown()
        process.kill()
        process.wait()
        process.stdin.close()
    folder = tempfile.mkdtemp(prefix="java_random")
    atexit.register(_remove, folder, owner)
    path = Path(folder, *CLASS)
    path.parent.mkdir(parents=True)
    path.write_bytes(code)
    return folder


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # in a fork the parent removes it
        shutil.rmtree(folder, ignore_errors=True)


def seed_java(gateway: Any, seed: int) -> Callable[[], Any]:
    """Return a function that sets the counter of new generators in a Java process with `JAVA_OPTIONS` and the patch.

    Raises RuntimeError if the random numbers are not the expected ones.
    """
    java = gateway.jvm.java
    handles = java.lang.invoke.MethodHandles
    field = java.lang.Class.forName("java.util.Random").getDeclaredField("seedUniquifier")
    field.setAccessible(True)
    counter = java.lang.Class.forName("java.util.concurrent.atomic.AtomicLong")
    setter = next(method for method in counter.getMethods() if method.getName() == "set")
    # py4j would turn the counter into a number; so Java itself joins getting and setting it.
    join = handles.collectArguments(
        handles.publicLookup().unreflect(setter), 0, handles.publicLookup().unreflectGetter(field)
    )

    def put(value: int) -> None:
        arguments = java.util.ArrayList()
        arguments.add(value)
        join.invokeWithArguments(arguments)

    put(FIRST[0])
    if java.util.Random().nextInt() != FIRST[1]:
        raise RuntimeError("this Java's random numbers cannot be seeded; Java 17 was checked")
    return partial(put, seed)
