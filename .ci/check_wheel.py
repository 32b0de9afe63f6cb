"""Checks an installed wheel: it imports with the core dependencies alone, quickly, and carries its data."""

import importlib.util
import subprocess
import sys
from importlib.resources import files

OPTIONAL = ["bm25s", "datasets", "faiss", "fastapi", "httpx", "sentence_transformers", "torch", "transformers", "vllm"]


def import_seconds(statement: str) -> float:
    """Processor time, the best of five fresh interpreters, so that a busy machine doesn't decide."""
    code = f"import time; start = time.process_time(); {statement}; print(time.process_time() - start)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return min(float(run.stdout) for run in runs)


def main() -> None:
    there = [name for name in OPTIONAL if importlib.util.find_spec(name)]
    assert not there, f"this is meant to run without the extras, but found {there}"

    import gymnasium as gym

    import agent_r1

    for package in ("agent_r1", "agent_r1_tools"):
        assert (files(package) / "py.typed").is_file(), f"{package}/py.typed is not in the wheel"
    for world in ("AgentR1/MultihopWorld-v0", "AgentR1/ArithmeticWorld-v0"):
        agent_r1.tiny_policy(world)  # raises where the policy's files are missing
    gym.make("AgentR1/ArithmeticWorld-v0").reset(seed=0)  # needs no extra
    try:
        gym.make("AgentR1/MultihopWorld-v0").reset(seed=0)
    except ImportError as error:  # search is an extra, and whoever needs it is told so
        assert 'pip install "agent-r1[search]"' in str(error), error
    added = import_seconds("import gymnasium, agent_r1") - import_seconds("import gymnasium")
    print(f"The wheel is whole. `import agent_r1` adds {added:.2f} s to `import gymnasium` (aim: at most 0.2 s).")


if __name__ == "__main__":
    main()
