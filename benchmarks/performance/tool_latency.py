"""Tools that answer slowly: what they cost an iteration of GRPO, on-policy and with bounded staleness.

    python benchmarks/performance/tool_latency.py    # instant tools, slow tools, slow tools with --max-staleness 2

MultihopWorld, but every search takes a while: lognormal, median 200 ms, mean 400 ms; the latency of a call is a
function of (seed, episode, call). The learning rate is 0, so that every iteration does the same work. On-policy, no
iteration can end before its slowest episode; with staleness, tools work while the trainer does.
"""

import argparse
import runpy
import sys
import tempfile
import time
from contextlib import chdir
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from agent_r1 import Task, Tool, ToolResult
from agent_r1.tasks.multihop_world import MultihopWorldEnv

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
from machine import from_1, record_results, require_quiet_machine

MEDIAN, SIGMA = 0.2, (2 * np.log(2)) ** 0.5  # seconds; with this sigma the mean is twice the median
TOOL_SECONDS: list[float] = []  # per episode in the order of their beginning: the sum of its calls' latencies

CONDITIONS: dict[str, tuple[bool, int]] = {  # slow tools?, --max-staleness
    "instant tools": (False, 0),
    "slow tools, on-policy": (True, 0),
    "slow tools, staleness 2": (True, 2),
}


class Slow(Tool):
    """A tool that answers late. It belongs to one episode, so calls are never shared between episodes."""

    def __init__(self, tool: Tool, episode: int) -> None:
        self.tool, self.episode = tool, episode
        self.name, self.description, self.parameters = tool.name, tool.description, tool.parameters
        self.timeout = 300.0
        self.latencies = np.random.default_rng([1, episode]).lognormal(np.log(MEDIAN), SIGMA, 100)
        self.calls = 0

    def execute(self, arguments: dict[str, Any]) -> ToolResult:
        latency = float(self.latencies[self.calls % 100])
        self.calls += 1
        TOOL_SECONDS[self.episode] += latency
        time.sleep(latency)
        return self.tool.execute(arguments)


class SlowMultihopWorldEnv(MultihopWorldEnv):
    """MultihopWorld with slow tools (`slow=True`) or as it is."""

    def __init__(self, *, slow: bool = True, **kwargs: Any) -> None:
        self.slow = slow
        super().__init__(**kwargs)

    def start_episode(self, task: Task) -> None:
        super().start_episode(task)
        if self.slow:
            TOOL_SECONDS.append(0.0)
            episode = len(TOOL_SECONDS) - 1
            self.tools = {name: Slow(tool, episode) for name, tool in self.tools.items()}


gym.register("SlowMultihopWorld-v0", SlowMultihopWorldEnv, vector_entry_point="agent_r1.vector:SlowMultihopWorld-v0")


def measure(slow: bool, staleness: int, episodes: int, iterations: int, threads: int) -> dict[str, Any]:
    """Run GRPO in this process. Seconds of its iterations but the first, from the end of one to the end of the next."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from agent_r1 import tiny_policy

    TOOL_SECONDS.clear()
    script = str(ROOT / "learner" / "grpo_llm.py")
    sys.argv = [script, "--env-id", "SlowMultihopWorld-v0", "--env-kwargs", f'{{"slow": {str(slow).lower()}}}',
                "--model", tiny_policy("AgentR1/MultihopWorld-v0"), "--max-staleness", str(staleness),
                "--num-envs", str(episodes), "--episodes-per-iteration", str(episodes),
                "--total-episodes", str(episodes * iterations), "--learning-rate", "0", "--eval-episodes", "0",
                "--checkpoint-every", "0", "--num-threads", str(threads)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        runpy.run_path(script, run_name="__main__")
        (run_dir,) = Path("runs").iterdir()
        events = EventAccumulator(str(run_dir)).Reload()
        ends = [event.wall_time for event in events.Scalars("time/train")]
        parts = {part: [event.value for event in events.Scalars(f"time/{part}")][1:]
                 for part in ("rollout", "score", "train", "sync")}  # fmt: skip
        stale = [event.value for event in events.Scalars("charts/staleness")]
    slowest = [max(TOOL_SECONDS[i * episodes : (i + 1) * episodes], default=0.0) for i in range(1, iterations)]
    return {"seconds": np.diff(ends).tolist(), "slowest_episode": slowest, "parts": parts, "staleness": stale}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=from_1, default=512, help="of an iteration; all run at the same time")
    parser.add_argument("--iterations", type=from_1, default=6, help="iterations of a run; the first is not counted")
    parser.add_argument("--threads", type=from_1, default=1, help="torch threads")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    if args.iterations < 2:
        parser.error("--iterations is at least 2: the first one is not counted")
    require_quiet_machine(args.force)
    results = {
        name: measure(*condition, args.episodes, args.iterations, args.threads)
        for name, condition in CONDITIONS.items()
    }
    instant, on_policy, stale = (np.array(result["seconds"]) for result in results.values())
    slowest = np.array(results["slow tools, on-policy"]["slowest_episode"])
    bound = np.maximum(instant, slowest)
    ratios = {"on-policy": on_policy.mean() / bound.mean(), "staleness 2": stale.mean() / instant.mean()}
    rows = ["| tools | seconds per iteration | rollout | training |", "|---|---|---|---|"]
    for name, result in results.items():
        columns = (result["seconds"], result["parts"]["rollout"], result["parts"]["train"])
        rows.append(f"| {name} | " + " | ".join(f"{np.mean(values):.2f}" for values in columns) + " |")
    latency = MEDIAN * np.exp(SIGMA**2 / 2)
    rows += [
        "",
        f"On-policy: {ratios['on-policy']:.2f} times the larger of instant tools and the slowest episode's tool time "
        f"({bound.mean():.2f} s; the slowest episode alone {slowest.mean():.2f} s).",
        f"Staleness 2: {ratios['staleness 2']:.2f} times the iteration with instant tools, which lasts "
        f"{instant.mean() / latency:.0f} times the mean latency of {latency:.2f} s.",
    ]
    table = "\n".join(rows)
    print(table)
    command = (f"python benchmarks/performance/tool_latency.py --episodes {args.episodes} "
               f"--iterations {args.iterations} --threads {args.threads}")  # fmt: skip
    record_results(
        f"tool_latency_{args.episodes}", {"conditions": results, "ratios": ratios}, table, command, args.force
    )


if __name__ == "__main__":
    main()
