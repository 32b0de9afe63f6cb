"""Time, memory and processes of an environment: one episode after the other, and many at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from machine import resident_mib

from agent_r1.validation.probes import span


def experts_turns(env: Any, count: int) -> list[list[Any]]:
    """The spans of the expert for the first tasks."""
    turns = []
    for index in range(count):
        env.reset(options={"task_index": index})
        turns.append([span(env, text) for text in env.demonstration()])
    return turns


def alone(env: Any, turns: list[list[Any]]) -> dict[str, float]:
    """Medians of the milliseconds of a reset and of a step, one episode after the other."""
    resets, steps = [], []
    for index, texts in enumerate(turns):
        start = time.perf_counter()
        env.reset(options={"task_index": index})
        resets.append(time.perf_counter() - start)
        for text in texts:
            start = time.perf_counter()
            *_, info = env.step(text)
            steps.append(time.perf_counter() - start)
        assert info["is_success"], f"task {index}: the expert failed"
    return {
        "reset_ms": 1e3 * float(np.median(resets)),
        "step_ms": 1e3 * float(np.median(steps)),
        "steps_per_second": len(steps) / sum(steps),
    }


def together(env_id: str, turns: list[list[Any]]) -> dict[str, float]:
    """Steps a second of one episode for each list of turns, all at once; their memory, the most processes."""
    count = len(turns)
    before, tasks = resident_mib(), np.arange(count)
    envs: Any = gym.make_vec(env_id, num_envs=count)
    envs.reset(seed=0, options={"reset_mask": np.ones(count, bool), "task_index": tasks.tolist()})
    steps, successes, most, below = 0, 0, 0, None
    start = time.perf_counter()
    envs.send([texts[0] for texts in turns])
    played, flying = [1] * count, count
    while flying:
        ids, _, _, terminated, truncated, infos = envs.recv(1)
        steps, flying, most = steps + len(ids), flying - len(ids), max(most, len(children()))
        if below is None and steps >= count:  # about a step each
            below = sum(map(proportional_mib, children()))
        over = terminated | truncated
        successes += sum(bool(info.get("is_success")) for info in infos)
        going = [int(i) for i, ended in zip(ids, over, strict=True) if not ended]
        if going:
            envs.send([turns[i][played[i]] for i in going], going)
            flying += len(going)
        for i in going:
            played[i] += 1
    seconds = time.perf_counter() - start
    found = {"steps_per_second": steps / seconds, "memory_mb": resident_mib() - before, "processes": most}
    found["processes_mb"] = below or 0.0
    envs.close()
    assert successes == count, f"{env_id}: {successes} of {count} episodes of the expert succeeded"
    return found


def proportional_mib(pid: str) -> float:
    """Memory of a process, what it shares with others by halves, thirds, ... (Linux's PSS)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has just ended
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 2**10


def children() -> list[str]:
    """The processes below this one, whatever they are called."""
    parents: dict[str, list[str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(stat.read_text().rpartition(")")[2].split()[1], []).append(stat.parent.name)
        except OSError:  # it has just ended
            continue
    found, waiting = [], [Path("/proc/self").resolve().name]
    while waiting:
        below = parents.get(waiting.pop(), [])
        found, waiting = found + below, waiting + below
    return found


def measure(env_id: str, episodes: int) -> dict[str, Any]:
    """What `alone` and `together` find with the first tasks, and the processes that are left behind."""
    env: Any = gym.make(env_id).unwrapped
    turns = experts_turns(env, min(episodes, env.num_tasks))
    one = alone(env, turns)
    env.close()
    together(env_id, turns)
    idle = set(children())  # of pools that serve every episode, such as SQL's
    many = together(env_id, turns)
    time.sleep(0.5)
    return {"alone": one, "together": many, "left_behind": len(set(children()) - idle)}
