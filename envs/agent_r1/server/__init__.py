"""The environment server behind `python -m agent_r1.serve`.

| module | content |
|---|---|
| `app` | the routes, as an ASGI application |
| `sessions` | environments on their threads |
| `snapshots` | states of episodes, by names that cannot be guessed |
| `wire` | the bodies of requests, and what an environment answers |
| `guard` | the checks before every request |
"""

try:
    import fastapi  # noqa: F401
    import pydantic  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as missing:
    needed = 'the environment server needs fastapi and uvicorn: pip install "agent-r1[server]"'
    raise ImportError(needed) from missing
