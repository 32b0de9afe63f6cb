"""An environment server: other machines and programs play the environments over HTTP; docs/server.md has the routes.

    python -m agent_r1.serve AgentR1/MultihopWorld-v0 --port 8080

Every session is one environment on its own thread. A client chooses among the served ids and changes their limits and
rewards. What could read files or import code is fixed by whoever starts the server. Nothing from the network is
unpickled: snapshots stay here, under names that cannot be guessed.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from agent_r1.arguments import ArgumentError, json_object
from agent_r1.remote import TOKEN_VARIABLE, read_token

try:
    from agent_r1.server.app import create_app
    from agent_r1.server.guard import is_loopback
    from agent_r1_tools.http_limits import Impatient
except ImportError as missing:
    if __name__ == "__main__":
        raise SystemExit(str(missing)) from None
    raise


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line and serve."""
    import uvicorn

    parser = argparse.ArgumentParser(prog="python -m agent_r1.serve", description="Serve environments over HTTP.")
    parser.add_argument("env_ids", nargs="+", metavar="ENV_ID", help='an id, or "module:id"')
    parser.add_argument("--env-kwargs", type=json_object, default={}, help="arguments of all environments, as JSON")
    parser.add_argument("--tokenizer", nargs="+", default=[], help="names or folders that clients may use")
    parser.add_argument("--host", default="127.0.0.1", help="another address than loopback needs a token")
    parser.add_argument("--port", type=int, default=8080, help="0: a free one")
    parser.add_argument("--token-file", type=Path, help=f"its first line is the token; default: ${TOKEN_VARIABLE}")
    parser.add_argument("--max-sessions", type=int, default=64)
    parser.add_argument("--idle-seconds", type=float, default=600.0, help="after which a silent session is closed")
    parser.add_argument("--openenv", action="store_true", help="also serve the first id to OpenEnv's clients")
    parser.add_argument("--mcp", action="store_true", help="also serve the first id's tools to MCP clients")
    args = parser.parse_args(words)
    token = os.environ.get(TOKEN_VARIABLE)
    if args.token_file is not None:
        try:
            token = args.token_file.read_text(encoding="utf-8").partition("\n")[0]
        except (OSError, ValueError) as error:
            raise SystemExit(f"--token-file cannot be read: {error}; give a text file") from None
        if not token.strip():
            raise SystemExit(f"--token-file {args.token_file} is empty")
    try:
        token = read_token(token or "") or None
    except ArgumentError as error:
        raise SystemExit(str(error)) from None
    if token is None and not is_loopback(f"[{args.host}]" if ":" in args.host else args.host):
        raise SystemExit(f"--host {args.host} is reached by others: set {TOKEN_VARIABLE}, or --token-file")
    if args.max_sessions < 1 or not args.idle_seconds > 0:
        raise SystemExit("--max-sessions must be at least 1, and --idle-seconds above 0")
    try:
        app = create_app(
            args.env_ids, args.env_kwargs, tokenizers=args.tokenizer, token=token, max_sessions=args.max_sessions,
            idle_seconds=args.idle_seconds, openenv=args.openenv, mcp=args.mcp,
        )  # fmt: skip
    except (ArgumentError, ImportError) as error:
        raise SystemExit(str(error)) from None
    listener = _listen(args.host, args.port)
    host, port = f"[{args.host}]" if ":" in args.host else args.host, listener.getsockname()[1]
    print(f"http://{host}:{port} serves {', '.join(args.env_ids)}", flush=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", http=Impatient))
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        return
    if not server.started:
        raise SystemExit("the server did not start; its messages are above")


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections: clients that connect early wait. Raises SystemExit if there is none."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else a body waits 40 ms after its headers
        return listener
    except (OSError, OverflowError) as error:
        remedy = "give an address of this machine, and a free port from 0 to 65535"
        raise SystemExit(f"--host {host} --port {port}: {error}; {remedy}") from None


if __name__ == "__main__":
    main()
