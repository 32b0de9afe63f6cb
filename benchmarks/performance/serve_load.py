"""The environment server under load on loopback: sessions and steps a second, and the wait for an answer.

    python benchmarks/performance/serve_load.py

The server and its clients are processes of this machine. Each client has one session, and steps as fast as it gets
answers. The environment is CraftWorld, whose tools take no time. Two measurements are made for each number of clients:

    sessions/s    sessions that the clients open and close in a second, all together
    steps/s       steps of all clients in a second; a reset counts as a step
    p50, p99      half of the steps, and 99 of 100, are answered within these milliseconds

The same turns in one process, without a server, are the limit. The last column is the ratio of steps/s to it. With the
default flags a run takes about 80 seconds. It writes benchmarks/results/serve_load.json and serve_load.md.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import httpx
import numpy as np

import agent_r1
from agent_r1.text.tokenizers import fingerprint

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common")]
from machine import above_0, from_1, given_flags, record_results, require_quiet_machine

WORLD = "AgentR1/CraftWorld-v0"
_ = agent_r1  # registers the environments


def turns_of(tasks: int) -> list[list[list[int]]]:
    """Return the expert's spans of the first tasks."""
    env: Any = gym.make(WORLD).unwrapped
    found = []
    for index in range(tasks):
        env.reset(options={"task_index": index})
        found.append([env.encode_reply({"content": turn}).tolist() for turn in env.demonstration()])
    return found


def in_process(turns: list[list[list[int]]], seconds: float) -> float:
    """Return the steps of one environment in a second, without a server; a reset counts as a step."""
    env, steps, started = gym.make(WORLD).unwrapped, 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        index = steps % len(turns)
        env.reset(options={"task_index": index})
        for span in turns[index]:
            env.step(np.array(span, np.int32))
        steps += 1 + len(turns[index])
    return steps / (time.perf_counter() - started)


async def opener(http: httpx.AsyncClient, end: float) -> int:
    """Open and close sessions until a time, and return their number."""
    count = 0
    while time.perf_counter() < end:
        opened = await http.post("/sessions", json={"env_id": WORLD})
        closed = await http.delete(f"/sessions/{opened.raise_for_status().json()['session']}")
        closed.raise_for_status()
        count += 1
    return count


async def client(
    http: httpx.AsyncClient, path: str, turns: list[list[list[int]]], first: int, end: float, waits: list[float]
) -> None:
    """Play episodes in one session until a time, one at least. Add the seconds of each request to `waits`."""
    index, begun = first, False
    while time.perf_counter() < end or not begun:
        index, begun = (index + 1) % len(turns), True
        bodies: list[tuple[str, Any]] = [("reset", {"task_index": index})]
        for what, body in bodies + [("step", {"tokens": span}) for span in turns[index]]:
            started = time.perf_counter()
            answer = await http.post(f"{path}/{what}", json=body)
            waits.append(time.perf_counter() - started)
            answer.raise_for_status()


async def load(url: str, turns: list[list[list[int]]], clients: int, seconds: float) -> dict[str, float]:
    """Return sessions and steps a second of all clients, and percentiles of a step in milliseconds."""
    tokenizer = fingerprint(gym.make(WORLD).unwrapped.tokenizer)  # type: ignore[attr-defined]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as http:
        started = time.perf_counter()
        counts = await asyncio.gather(*(opener(http, started + seconds) for _ in range(clients)))
        sessions = sum(counts) / (time.perf_counter() - started)
        opened = [await http.post("/sessions", json={"env_id": WORLD, "tokenizer": tokenizer}) for _ in range(clients)]
        paths = [f"/sessions/{one.raise_for_status().json()['session']}" for one in opened]
        waits: list[float] = []
        started = time.perf_counter()
        end = started + seconds
        await asyncio.gather(*(client(http, path, turns, 7 * i, end, waits) for i, path in enumerate(paths)))
        steps = len(waits) / (time.perf_counter() - started)
        for path in paths:
            await http.delete(path)
    p50, p99 = np.percentile(waits, [50, 99]) * 1000
    return {"sessions_per_second": sessions, "steps_per_second": steps, "p50_ms": float(p50), "p99_ms": float(p99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=from_1, nargs="+", default=[1, 8, 64], help="numbers of clients")
    parser.add_argument("--seconds", type=above_0, default=10.0, help="of each measurement")
    parser.add_argument("--port", type=from_1, default=18_650, help="the port of the server")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    require_quiet_machine(args.force)
    turns, url = turns_of(50), f"http://127.0.0.1:{args.port}"
    words = [sys.executable, "-m", "agent_r1.serve", WORLD, "--port", str(args.port), "--max-sessions", "256"]
    server = subprocess.Popen(words)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and server.poll() is None:
            try:
                httpx.get(f"{url}/health", trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        alone = in_process(turns, args.seconds)
        results = {str(number): asyncio.run(load(url, turns, number, args.seconds)) for number in args.clients}
    finally:
        server.kill()
        server.wait()
    rows = [
        "| clients | sessions/s | steps/s | p50, ms | p99, ms | steps/s, of those in process |",
        "|---|---|---|---|---|---|",
    ]
    for number, found in results.items():
        opened, speed, p50, p99 = found.values()
        rows.append(f"| {number} | {opened:.0f} | {speed:.0f} | {p50:.1f} | {p99:.1f} | {speed / alone:.2f} |")
    print(f"in process: {alone:.0f} steps/s")
    print("\n".join(rows))
    values = {"in_process_steps_per_second": alone, "clients": results}
    command = "python benchmarks/performance/serve_load.py" + given_flags(parser, args, "clients", "seconds")
    record_results("serve_load", values, "\n".join(rows), command, args.force)


if __name__ == "__main__":
    main()
