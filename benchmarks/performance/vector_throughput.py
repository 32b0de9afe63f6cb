"""How fast are episodes with slow tools? Measures the vector environment, the single step, and memory.

    python benchmarks/performance/vector_throughput.py                      # all but the long memory run
    python benchmarks/performance/vector_throughput.py --episodes 100000    # memory over 100,000 episodes

Three questions: how many steps a second with a tool of 50 ms, by number of episodes; how many episodes a second with
heavy-tailed tools, waiting for all (`step`) or for whoever is ready (`send`/`recv`); what a step of the environment
itself costs at a state of 4,096 tokens.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from agent_r1 import Task, Tool, ToolEnv, ToolResult
from agent_r1.vector import ToolVectorEnv

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "common"))
from machine import from_0, record_results, require_quiet_machine, resident_mib

TURNS = 4
MEDIAN, MEAN, LONGEST = 0.075, 0.150, 5.0  # seconds of a heavy-tailed tool: lognormal, cut off at 5 s


class Wait(Tool):
    """Sleeps; a stand-in for a server."""

    name = "wait"
    description = "Wait."
    parameters = {
        "type": "object",
        "properties": {"seconds": {"type": "number"}, "number": {"type": "integer"}},
        "required": ["seconds", "number"],
    }

    def __init__(self, blocks: bool = True) -> None:
        self.timeout = 30.0 if blocks else float("inf")

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        if arguments["seconds"]:
            time.sleep(arguments["seconds"])
        return ToolResult("waited")


class WaitingEnv(ToolEnv):
    """Every turn calls `wait`; the episode ends after its turns."""

    num_tasks = 1_000_000

    def __init__(self, blocks: bool = True, prompt: int = 10, **kwargs: Any) -> None:
        super().__init__([Wait(blocks)], **kwargs)
        self.prompt = prompt

    def make_task(self, index: int) -> Task:
        return Task(str(index), "." * self.prompt, [])

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        return 0.0, {}


def call(env: ToolEnv, seconds: float, number: int) -> list[int]:
    """The span that waits so long; the number keeps equal calls from being answered once."""
    text = env.dialect.tool_call("wait", {"seconds": seconds, "number": number}) + env.dialect.end_of_turn
    return env.tokenizer.encode(text, add_special_tokens=False)


def steps_per_second(num_envs: int, steps: int) -> float:
    """Steps of all episodes together, with a tool of 50 ms, through `step`."""
    envs = ToolVectorEnv(WaitingEnv, num_envs, max_turns=steps + 2)
    envs.reset(seed=0)
    numbers = np.arange((steps + 1) * num_envs).reshape(steps + 1, num_envs).tolist()
    actions = [[call(envs.envs[0], 0.05, number) for number in row] for row in numbers]
    envs.step(actions[-1])  # starts the threads
    start = time.perf_counter()
    for i in range(steps):
        envs.step(actions[i])
    seconds = time.perf_counter() - start
    envs.close()
    return num_envs * steps / seconds


def episodes_per_second(num_envs: int, rounds: int, min_batch: int | None) -> float:
    """Episodes of four turns with heavy-tailed tools; `min_batch` None waits for all, in `step`."""
    sigma = np.sqrt(2 * np.log(MEAN / MEDIAN))
    waits = np.minimum(np.random.default_rng(0).lognormal(np.log(MEDIAN), sigma, 100_000), LONGEST)
    envs = ToolVectorEnv(WaitingEnv, num_envs, max_turns=TURNS, autoreset_mode="SameStep")
    envs.reset(seed=0)
    drawn = 0

    def actions(count: int) -> list[list[int]]:
        nonlocal drawn
        drawn += count
        return [call(envs.envs[0], float(waits[i % len(waits)]), i) for i in range(drawn - count, drawn)]

    finished, wanted = 0, num_envs * rounds
    start = time.perf_counter()
    if min_batch is None:
        while finished < wanted:
            _, _, terminated, truncated, _ = envs.step(actions(num_envs))
            finished += int((terminated | truncated).sum())
    else:
        envs.send(actions(num_envs))
        while finished < wanted:
            ids, _, _, terminated, truncated, _ = envs.recv(min_batch)
            finished += int((terminated | truncated).sum())
            envs.send(actions(len(ids)), ids)
    seconds = time.perf_counter() - start
    envs.close()
    return finished / seconds


def own_step_microseconds(state_tokens: int, repeats: int) -> dict[str, float]:
    """Median cost of `ToolEnv.step` at a state of so many tokens: in all, and without tokenizer and tool."""
    env = WaitingEnv(blocks=False)
    state, _ = env.reset(seed=0)
    env = WaitingEnv(blocks=False, prompt=10 + state_tokens - len(state))
    spent = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent += time.perf_counter() - start

        return wrapper

    span = np.array(call(env, 0.0, 0), np.int32)
    codec, tool = env.dialect.codec, env.tools["wait"]
    codec.encode_text, codec.decode = timed(codec.encode_text), timed(codec.decode)
    tool.execute = timed(tool.execute)  # type: ignore[method-assign]
    whole, own = [], []
    for seed in range(repeats):
        state, _ = env.reset(seed=seed)
        assert len(state) == state_tokens, len(state)
        spent = 0.0
        start = time.perf_counter()
        env.step(span)
        seconds = time.perf_counter() - start
        whole.append(seconds * 1e6)
        own.append((seconds - spent) * 1e6)
    return {"whole": statistics.median(whole), "own": statistics.median(own)}


def memory_over_episodes(episodes: int, num_envs: int = 64) -> list[tuple[int, float]]:
    """(episodes finished, resident MiB), ten times over so many episodes of MultihopWorld, three turns each."""
    envs = ToolVectorEnv("AgentR1/MultihopWorld-v0", num_envs, max_turns=3, autoreset_mode="SameStep")
    envs.reset(seed=0)
    text = envs.envs[0].dialect.tool_call("search", {"query": "mentor"}) + envs.envs[0].dialect.end_of_turn
    span = envs.envs[0].tokenizer.encode(text, add_special_tokens=False)
    samples, finished = [], 0
    for tenth in range(1, 11):
        while finished < episodes * tenth / 10:
            _, _, terminated, truncated, _ = envs.step([span] * num_envs)
            finished += int((terminated | truncated).sum())
        samples.append((finished, resident_mib()))
    envs.close()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, to see that it runs")
    parser.add_argument("--episodes", type=from_0, default=0, help="only measure memory, over so many episodes")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--no-record", action="store_true", help="print, but leave benchmarks/results as it is")
    args = parser.parse_args()
    if not args.episodes:  # others take time, but not this process's memory
        require_quiet_machine(args.force)
    command = "python benchmarks/performance/vector_throughput.py"
    if args.episodes:
        samples = memory_over_episodes(args.episodes)
        name, results = "vector_memory", {"samples": [{"episodes": n, "resident_mib": round(m, 1)} for n, m in samples]}
        rows = [("episodes finished", "resident MiB")] + [(f"{n:,}", f"{mib:.1f}") for n, mib in samples]
        command += f" --episodes {args.episodes}"
    else:
        name, rows = "vector_throughput", [("measured", "result")]
        results = {"steps_per_second": {}, "episodes_per_second": {}}
        cost = own_step_microseconds(4096, 200 if args.quick else 2000)
        results["step_microseconds_at_4096_tokens"] = {key: round(value, 1) for key, value in cost.items()}
        rows.append(("`ToolEnv.step` at 4,096 tokens", f"{cost['whole']:.0f} µs"))
        rows.append(("of it neither tokenizer nor tool", f"{cost['own']:.0f} µs"))
        for num_envs in (1, 8, 64, 256):
            rate = steps_per_second(num_envs, 3 if args.quick else 30)
            results["steps_per_second"][str(num_envs)] = round(rate, 1)
            rows.append((f"steps/s, tool of 50 ms, {num_envs} episodes", f"{rate:,.0f}"))
        rounds = 1 if args.quick else 6
        barrier = episodes_per_second(64, rounds, None)
        results["episodes_per_second"]["step"] = round(barrier, 1)
        rows.append(("episodes/s, heavy-tailed tool, 64 episodes, `step`", f"{barrier:.1f}"))
        for min_batch in (32, 8, 1):
            rate = episodes_per_second(64, rounds, min_batch)
            results["episodes_per_second"][f"recv({min_batch})"] = round(rate, 1)
            rows.append((f"the same, `send` and `recv(min_batch={min_batch})`", f"{rate:.1f} ({rate / barrier:.1f}x)"))
    table = "\n".join(f"| {left} | {right} |" for left, right in rows)
    table = table.replace("|\n", "|\n|---|---|\n", 1)
    print(table)
    if not (args.no_record or args.quick):
        record_results(name, results, table, command, forced=args.force)


if __name__ == "__main__":
    main()
