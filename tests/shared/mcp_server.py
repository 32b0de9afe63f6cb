"""An MCP server made with the SDK, run as a process: `python mcp_server.py [stdio | PORT]`."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

server = MCPServer("counter", log_level="ERROR")
counts: dict[object, int] = {}


class Point(BaseModel):
    x: int
    y: int = 0


def session_of(context: Context) -> object:
    """What tells sessions apart: over HTTP one process has many."""
    request = context.request_context.request
    return request.headers.get("mcp-session-id") if request is not None else None


@server.tool()
async def add(number: Annotated[int, Field(description="What to add.")], context: Context) -> str:
    """Add to the count, and read it."""
    key = session_of(context)
    counts[key] = counts.get(key, 0) + number
    return f"The count is {counts[key]}."


@server.tool()
def move(point: Point) -> Point:
    """Move a point."""
    return Point(x=point.x + 1, y=point.y)


@server.tool()
def fail(why: str) -> str:
    """Raise."""
    raise ToolError(why)


@server.tool()
async def wait(seconds: float) -> str:
    """Wait, and let others in."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def repeat(text: str, times: int) -> str:
    """Repeat a text."""
    return text * times


@server.tool()
def picture() -> Image:
    """A picture."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
def process() -> dict[str, str]:
    """What the server knows of its process."""
    return {"pid": str(os.getpid()), "secret": os.environ.get("SECRET", ""), "home": os.environ.get("PLACE", "")}


@server.tool()
def keep(text: str) -> list[str]:
    """Write a file into the folder of the session, and list it."""
    folder = Path(os.environ["PLACE"])
    (folder / text).write_text(text)
    return sorted(path.name for path in folder.iterdir())


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["stdio"]):
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]), json_response="json" in sys.argv)
