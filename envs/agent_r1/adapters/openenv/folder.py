"""A folder for `openenv validate` and `docker build`: manifest, server, Dockerfile, oracle and probe."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, cast

import agent_r1
from agent_r1.adapters.openenv.server import counts_of, public_name
from agent_r1.arguments import ArgumentError, json_object
from agent_r1.baselines import baselines_of
from agent_r1.episode import MAX_CALLS
from agent_r1.ids import factory
from agent_r1.text.chat import encode_turn
from agent_r1.tool_env import ToolEnv

_APP = '''"""{env_id} as an OpenEnv server: `uvicorn server.app:app --port 8000` in the folder above."""

from agent_r1.adapters.openenv import openenv_app

app = openenv_app({env_id!r}, {kwargs!r})


def main() -> None:
    import uvicorn

    uvicorn.run(app, host="0.0.0.0", port=8000)


if __name__ == "__main__":
    main()
'''

_DOCKERFILE = """\
FROM python:3.12-slim
WORKDIR /app
# agent-r1 is not on PyPI: copy its wheel (`make wheel`, dist/*.whl) beside this file.
COPY . .
RUN pip install --no-cache-dir "$(ls ./*.whl)[{extras}]"
EXPOSE 8000
CMD ["uvicorn", "server.app:app", "--host", "0.0.0.0", "--port", "8000"]
"""


def write_folder(env_id: str, folder: str | Path, env_kwargs: dict[str, Any] | None = None) -> list[Path]:
    """Write the folder that `openenv validate` and `docker build` take, and return its files.

    The oracle is the expert's episode on the first task of the default split. OpenEnv declares one range of the reward
    of all steps, and the oracle must reach its maximum. So the server pays no process rewards, unless `env_kwargs` has
    `process_reward`.

    Raises: ArgumentError if the environment has no demonstration, or if the expert does not reach the maximum.
    """
    import yaml

    kwargs, folder = {"process_reward": False, **(env_kwargs or {})}, Path(folder)
    env = cast(ToolEnv, factory(env_id, kwargs)().unwrapped)
    env.reset(options={"task_index": 0})
    try:
        turns = baselines_of(env).demonstration()
    except (NotImplementedError, ValueError) as error:
        raise ArgumentError(f"{env_id} has no oracle to write: {error}") from error
    reward = [env.step(encode_turn(env, turn, env.room))[1] for turn in turns][-1]
    weights, unfinished = env.process_weights.values(), env.unfinished_reward or 0.0
    high = 1.0 + sum(max(weight, 0.0) for weight in weights)
    low = min(-1.0, unfinished) + MAX_CALLS * sum(min(weight, 0.0) for weight in weights)
    if not high - 0.1 <= reward <= high:  # OpenEnv's largest tolerance
        remedy = "leave out process_reward" if kwargs["process_reward"] else "it must solve task 0"
        raise ArgumentError(f"the expert's last turn pays {reward:.3f}, but a turn can pay {high:.3f}; {remedy}")
    split, actions = env.split, [{"message": turn} for turn in turns]
    env.close()
    begun = {"split": split, "index": 0, "actions": actions[: len(actions) // 2]}
    entry = (agent_r1.ENVIRONMENTS | agent_r1.BRIDGES).get(env_id)
    manifest = {
        "spec_version": 1,
        "name": public_name(env_id),
        "version": agent_r1.__version__,
        "type": "space",
        "runtime": "fastapi",
        "app": "server.app:app",
        "port": 8000,
        "validation": {
            "reward": {"range": [low, high], "oracle_tolerance": round(high - reward, 6), "floor_margin": 0.1},
            "resources": {"cpu": 1.0, "memory_mb": 1024, "disk_mb": 512, "episode_timeout_s": 300.0},
            "capabilities": {
                "oracle": {"form": "injected_state", "location": "validation/oracle.json"},
                "verifier": {"kind": "reward_channel"},
                "set_state": True,
                "task_api": True,
                "declared_task_count": counts_of(env_id, kwargs),
            },
            "types": {"tags": ["tool-use"]},
            "execution": {"probe_path": "validation/runtime.json", "dockerfile": "Dockerfile", "context": "."},
        },
    }
    plan = {
        "plan_schema_version": "1",
        "reset": {"episode_id": "probe", "seed": 0, "options": {"injected_state": begun}},
        "actions": actions[len(actions) // 2 :],
    }
    oracle = {"split": split, "index": 0, "actions": actions}
    extras = ",".join(["openenv", *([entry.extra] if entry and entry.extra else [])])
    texts = {
        "openenv.yaml": yaml.safe_dump(manifest, sort_keys=False),
        "server/app.py": _APP.format(env_id=env_id, kwargs=kwargs),
        "Dockerfile": _DOCKERFILE.format(extras=extras),
        ".dockerignore": "validation\n",  # the image must not hold the oracle
        "validation/runtime.json": json.dumps(plan, indent=2) + "\n",
        "validation/oracle.json": json.dumps(oracle, indent=2) + "\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def main() -> None:
    """Write the folder of an environment, from the command line."""
    parser = argparse.ArgumentParser(prog="python -m agent_r1.adapters.openenv", description=main.__doc__)
    parser.add_argument("env_id", help="an id, or MODULE:ID for your own environment")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the folder to write")
    parser.add_argument("--env-kwargs", type=json_object, default={}, help="arguments of the environment, as JSON")
    args = parser.parse_args()
    try:
        for path in write_folder(args.env_id, args.out, args.env_kwargs):
            print(path)
    except (ArgumentError, ImportError, FileNotFoundError) as error:
        parser.error(str(error))
