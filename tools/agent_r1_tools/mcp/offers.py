"""Reading of an MCP server's offers and answers. They are bounded; an offer that makes no tool is rejected."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from agent_r1_tools.schemas import check_schema
from agent_r1_tools.text import as_text, clean_text, encodable

MAX_NAME = 64
MAX_DESCRIPTION = 4000
MAX_SCHEMA = 32_000
"""Characters of a schema, as JSON."""
MAX_DEPTH = 24


@dataclass(frozen=True)
class Offer:
    """A tool of a server.

    Attributes:
        name: what the policy calls it; `remote` is the server's own name.
        parameters: the schema that the policy reads.
        checked: what of it is checked before the server is asked: a part of it that can be checked in little time,
            whatever the server wrote. The rest is the server's to check.
        known: the names of all its arguments.
        repeatable: the server says that the tool changes nothing, or nothing more when it is called again.
    """

    name: str
    remote: str
    description: str
    parameters: dict[str, Any]
    checked: dict[str, Any]
    known: frozenset[str]
    repeatable: bool


def read_offer(tool: Any, prefix: str = "", fixed: Collection[str] = ()) -> Offer:
    """Read a tool as the SDK lists it, without the arguments in `fixed`.

    Raises ValueError (TypeError if it is no schema); the message says why it is rejected.
    """
    name = prefix + re.sub(r"[^A-Za-z0-9_-]", "_", str(tool.name))
    name = name if re.match(r"[A-Za-z_]", name) else f"_{name}"
    if len(name) > MAX_NAME:
        raise ValueError(f"its name is longer than {MAX_NAME} characters")
    schema: dict[str, Any] = {"type": "object", "properties": {}} | tool.input_schema
    if _depth(schema) > MAX_DEPTH:
        raise ValueError(f"its schema is nested more than {MAX_DEPTH} deep")
    text = encodable(json.dumps(schema, ensure_ascii=False, allow_nan=False))
    if len(text) > MAX_SCHEMA:
        raise ValueError(f"its schema has {len(text)} characters, more than {MAX_SCHEMA}")
    schema = json.loads(text)
    check_schema(schema, name)
    properties = {key: _plain(value) for key, value in schema["properties"].items()}
    known = frozenset(properties)
    schema["properties"] = {key: value for key, value in properties.items() if key not in fixed}
    if "required" in schema:
        schema["required"] = [key for key in schema["required"] if key not in fixed]
    description = clean_text(str(tool.description or tool.title or ""), MAX_DESCRIPTION)
    hints = tool.annotations
    repeatable = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
    return Offer(name, str(tool.name), description, schema, checked(schema), known, repeatable)


_KEPT = (
    "type", "enum", "required", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength",
    "maxLength", "minItems", "maxItems",
)  # fmt: skip


def checked(schema: Any) -> dict[str, Any]:
    """Return the part of a schema that is quick to check: no patterns, no references, no branches."""
    if not isinstance(schema, dict):
        return {}
    if "$ref" in schema:  # keywords beside it may change its meaning
        return {}
    supported = {key: schema[key] for key in _KEPT if key in schema}
    if isinstance(schema.get("items"), dict):
        supported["items"] = checked(schema["items"])
    if isinstance(schema.get("properties"), dict):
        supported["properties"] = {key: checked(value) for key, value in schema["properties"].items()}
    if schema.get("additionalProperties") is False and "patternProperties" not in schema:
        supported["additionalProperties"] = False
        supported.setdefault("properties", {})
    return supported


def result_text(content: list[Any], structured: Any) -> str:
    """Return the text of a result for the policy, and a short note for each part that is no text."""
    parts: list[str] = []
    for block in content:
        resource = getattr(block, "resource", block)
        if isinstance(text := getattr(resource, "text", None), str):
            parts.append(text)
        elif isinstance(getattr(resource, "data", getattr(resource, "blob", None)), str):
            parts.append(f"[{block.type}: {getattr(resource, 'mime_type', None) or 'data'}]")
        else:
            parts.append(f"[{block.type}: {getattr(resource, 'uri', '')}]")
    return "\n".join(parts) if parts or structured is None else as_text(structured)


def _plain(schema: Any) -> Any:
    """Return a schema whose branches are objects. True and false are schemas too, but few readers know that."""
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            schema[key] = [_plain(branch) for branch in schema[key]]
    return schema


def _depth(value: Any) -> int:
    """Return the depth of nested JSON. It may be very deep."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        level = [
            inside
            for one in level
            if isinstance(one, dict | list)
            for inside in (one.values() if isinstance(one, dict) else one)
        ]
        depth += 1
    return depth
