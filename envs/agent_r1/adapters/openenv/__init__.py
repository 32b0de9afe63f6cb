"""The environments as OpenEnv servers, and a client; docs/openenv.md shows both.

    app = openenv_app("AgentR1/CraftWorld-v0")                        # uvicorn module:app --port 8000
    with OpenEnvClient("http://localhost:8000") as env:
        seen = env.reset(split="test", index=3).observation           # messages, tools, tokens
        result = env.step(OpenEnvAction(message="..."))               # or tokens=[...]
    python -m agent_r1.adapters.openenv AgentR1/CraftWorld-v0 --out FOLDER    # a folder for `openenv validate`

A session is one WebSocket and one environment. An infrastructure error is an error of the protocol, never a reward.
A state is sent as the actions that lead to it (`injected_state`), so nothing from the network is unpickled. Made for
OpenEnv 0.10.
"""

from agent_r1.adapters.openenv.client import OpenEnvAction, OpenEnvClient, OpenEnvObservation, OpenEnvState
from agent_r1.adapters.openenv.server import OpenEnvEnvironment, openenv_app

__all__ = [
    "OpenEnvAction", "OpenEnvClient", "OpenEnvEnvironment", "OpenEnvObservation", "OpenEnvState", "openenv_app",
]  # fmt: skip
