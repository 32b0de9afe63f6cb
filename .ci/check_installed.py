"""Checks an installed wheel or sdist: it imports with the core dependencies alone, quickly, carries its data, plays
what the registry says that it plays, and its commands start."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).parents[1]

OPTIONAL = ["bm25s", "datasets", "faiss", "fastapi", "httpx", "sentence_transformers", "torch", "transformers", "vllm"]


def import_seconds(statement: str) -> float:
    """Processor time, the best of five fresh interpreters, so that a busy machine doesn't decide."""
    code = f"import time; start = time.process_time(); {statement}; print(time.process_time() - start)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return min(float(run.stdout) for run in runs)


def check_environments() -> None:
    """Check that every environment plays with the core alone or names the extra of its registry row."""
    import gymnasium as gym

    import agent_r1
    from agent_r1.validation.probes import expert, play
    from agent_r1_tools.python import SandboxError

    sys.path.insert(0, str(ROOT / "benchmarks" / "common"))
    from made_up_data import write_made_up_data

    with tempfile.TemporaryDirectory() as folder:
        os.environ["AGENT_R1_DATA"] = str(write_made_up_data(Path(folder)))
        for env_id, entry in agent_r1.ENVIRONMENTS.items():
            try:
                for env in (gym.make(env_id).unwrapped, gym.make_vec(env_id, num_envs=1).envs[0]):
                    assert play(env, 0, expert).success, env_id
                    env.close()
                assert not entry.extra, f"{env_id} plays without [{entry.extra}]; the registry says otherwise"
            except SandboxError as error:
                assert env_id == "AgentR1/Terminal-v0", error
                print(f"{env_id} was not played: {error}")
            except ImportError as error:
                named = re.search(r"agent-r1\[(\w+)\]", str(error))
                assert named and named[1] == entry.extra, f"{env_id} needs {error}; the registry says {entry.extra}"


def check_commands() -> None:
    """The commands start, and one validates a world on a few tasks."""
    worlds = ["AgentR1/ArithmeticWorld-v0", "--tasks", "4"]
    for words in (["show", "--help"], ["validate", "--help"], ["validate", *worlds]):
        command = [sys.executable, "-m", f"agent_r1.{words[0]}", *words[1:]]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout}{ran.stderr}"


def main() -> None:
    there = [name for name in OPTIONAL if importlib.util.find_spec(name)]
    assert not there, f"this is meant to run without the extras, but found {there}"

    import agent_r1

    assert ROOT not in Path(agent_r1.__file__).parents, f"{agent_r1.__file__} is not installed"
    for package in ("agent_r1", "agent_r1_tools"):
        assert (files(package) / "py.typed").is_file(), f"{package}/py.typed is not in the wheel"
    for world in ("AgentR1/MultihopWorld-v0", "AgentR1/ArithmeticWorld-v0"):
        agent_r1.tiny_policy(world)  # raises where the policy's files are missing
    check_environments()
    check_commands()
    added = import_seconds("import gymnasium, agent_r1") - import_seconds("import gymnasium")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    print(f"Python {version}: whole. `import agent_r1` adds {added:.2f} s to `import gymnasium` (aim: at most 0.2 s).")


if __name__ == "__main__":
    main()
