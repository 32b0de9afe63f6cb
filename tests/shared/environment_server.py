"""An environment server for tests, in a thread of this process."""

import socket
import threading
import time
from typing import Any

import httpx
import uvicorn

from agent_r1.serve import create_app


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """Listens on a free port of this machine until `stop`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.server = uvicorn.Server(uvicorn.Config(create_app(*args, **kwargs), port=port, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)

    @property
    def sessions(self) -> int:
        return int(httpx.get(f"{self.url}/health").json()["sessions"])
