"""Conversion between episodes and chat APIs: the conversation as messages, and replies as turns of the policy.

Use it through `ToolEnv.messages` and `ToolEnv.step_message`; docs/chat_apis.md shows the loop.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agent_r1.dialects import Call, Dialect, read_json
from agent_r1.dialects.calls import fit_arguments, function_of_tool, needs_nothing, read_arguments
from agent_r1.dialects.json_calls import ARGUMENT_KEYS
from agent_r1.text.tokenizers import replace_surrogates

if TYPE_CHECKING:
    from agent_r1.episode import Tokens
    from agent_r1.tool_env import ToolEnv

Message = dict[str, Any]
_CALL_PARTS = ("tool_use", "function_call", "tool_call")  # of a content, as APIs name them
_ARGUMENT_KEYS = (*ARGUMENT_KEYS, "args", "input")  # as LangChain and Anthropic name them
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")


def chat_messages(messages: Sequence[Message]) -> list[Message]:
    """Return a copy of an episode's messages, in which arguments are objects, in the form of chat APIs.

    Calls get ids, which their results name, and arguments as JSON text. A turn with calls and without text has the
    content None. Names of unknown tools may contain characters that APIs reject; these become underscores. Results of a
    turn that was kept as plain text are a user's message, because no call in chat form belongs to them.
    """
    shown: list[Message] = []
    number = 0
    for is_result, group in itertools.groupby(messages, key=lambda message: message["role"] == "tool"):
        if not is_result:
            shown += copy.deepcopy(list(group))
            calls = shown[-1].get("tool_calls", ())
            for call in calls:
                call["id"] = f"call{number:05d}"  # nine letters and digits: the only form that all templates accept
                name, given = call["function"]["name"], call["function"]["arguments"]
                call["function"]["name"] = _NO_NAME.sub("_", name)[:64]
                call["function"]["arguments"] = json.dumps(given, ensure_ascii=False)
                number += 1
            if calls:
                shown[-1]["content"] = shown[-1]["content"] or None
        elif calls:
            for message, call in zip(group, calls, strict=False):  # calls after an end have no results
                shown.append(message | {"name": call["function"]["name"], "tool_call_id": call["id"]})
        else:
            shown.append({"role": "user", "content": "\n".join(message["content"] for message in group)})
    return shown


def read_reply(reply: Any, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[tuple[str, dict[str, Any] | str]]]:
    """Read a chat API's reply: return its text, and its calls as names and arguments.

    `agent_r1.dialects.calls` defines a call. Arguments of another form are returned as a text that is not a JSON
    object. The text of a refusal counts as the text.

    Args:
        reply: a mapping with `content` and `tool_calls`, an object of a client library (`choices[0].message`), or
            LangChain's `AIMessage`, which names the arguments `args` and keeps unreadable calls separately. The old
            `function_call`, and the `tool_use` parts of a content, count as calls only if there are no others.
        tools: the tools' schemas.

    Raises:
        TypeError: the reply has another type, its content is not text, or one of its calls has another form.
    """
    if hasattr(reply, "model_dump"):
        reply = reply.model_dump()
    if not isinstance(reply, Mapping) or not {"content", "tool_calls", "function_call"} & reply.keys():
        raise TypeError(f"a reply must be a message with 'content' or 'tool_calls', got {reply!r:.200}")
    content = reply.get("content") or reply.get("refusal") or ""
    parts: list[Any] = []
    if isinstance(content, list | tuple):
        parts = [part for part in content if isinstance(part, Mapping) and part.get("type") in _CALL_PARTS]
        texts = (part.get("text") if isinstance(part, Mapping) else part for part in content)
        content = "".join(text for text in texts if isinstance(text, str))
    if not isinstance(content, str):
        raise TypeError(f"a reply must be a message whose 'content' is text, got {content!r:.200}")
    calls = []
    both = [reply.get(name) or [] for name in ("tool_calls", "invalid_tool_calls")]
    if not all(isinstance(given, list | tuple) for given in both):
        raise TypeError(f"a reply must be a message whose 'tool_calls' are a list, got {reply!r:.200}")
    old = reply.get("function_call")  # LangChain repeats calls in parts of the content: they are made once
    for call in [*both[0], *both[1]] or ([old] if old is not None else parts):
        function = call.get("function") or call if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise TypeError(f"a call in a reply must have a 'function' with 'name' and 'arguments', got {call!r:.200}")
        name = function.get("name")
        name = replace_surrogates(name) if isinstance(name, str) else ""
        calls.append((name, _arguments(name, [function[key] for key in _ARGUMENT_KEYS if key in function], tools)))
    return replace_surrogates(content), calls


def _arguments(name: str, values: list[Any], tools: Sequence[dict[str, Any]]) -> dict[str, Any] | str:
    """Return the arguments of a call from the values of their keys, or a text that is not a JSON object."""
    if len(values) > 1:
        return "(arguments under two names)"
    if not values and not needs_nothing(name, tools):
        return "(no arguments)"
    given = values[0] if values else None
    try:
        text = replace_surrogates(given) if isinstance(given, str) else json.dumps(given)
    except RecursionError:  # a policy wrote it, and a client library read it: malformed, as the same text would be
        return "(arguments nested too deeply)"
    except (TypeError, ValueError) as error:
        raise TypeError(f"the arguments of a call in a reply must be JSON, got {given!r:.200}") from error
    try:
        arguments = read_arguments(read_json(text) if text.strip() else None)
    except ValueError:
        return text
    return text if arguments is None else arguments


def reply_text(dialect: Dialect, reply: Any, tools: Sequence[dict[str, Any]] = ()) -> str:
    """Write a chat API's reply as a turn in the dialect; see `read_reply`.

    `tools` are the schemas. A call that the family cannot write is written so that it reads as malformed. The name of a
    stop token gets a space inside. A text that would hide the calls, because it opens a thought or a block, is put
    after them.
    """
    content, calls = read_reply(reply, tools)
    for name, token in dialect.codec.controls.items():
        if token in dialect.stop_token_ids:
            content = content.replace(name, f"{name[0]} {name[1:]}")
    writable: list[tuple[str, dict[str, Any] | str]] = []
    for name, arguments in calls:
        try:
            if isinstance(arguments, dict):
                fit_arguments(Call(name, arguments), tools)
                (read,) = _calls(dialect, dialect.write_turn(calls=[(name, arguments)]), tools)
                if function_of_tool(name, tools) and read.arguments != arguments:
                    raise ValueError("types that the family cannot tell apart")
        except ValueError:
            arguments = json.dumps(json.dumps(arguments))  # quoted twice, so it is not an object
        writable.append((name, arguments))
    text, alone = dialect.write_turn(content, writable), dialect.write_turn(calls=writable)
    expected = _calls(dialect, alone, tools)
    is_readable = _calls(dialect, text, tools)[-len(expected) :] == expected or not expected
    return text if is_readable else f"{alone}\n{content}"


def _calls(dialect: Dialect, text: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
    return dialect.parse(dialect.codec.encode_text(text), tools).calls


def encode_turn(env: ToolEnv, text: str, max_new_tokens: int) -> Tokens:
    """Return the span of an assistant turn that was written as text.

    Lone surrogates become U+FFFD. The end of turn is added if the text does not end with a stop token. The span is cut
    to `max_new_tokens`. Names of control tokens in the text become control tokens, because the text is the policy's.

    Raises: TypeError for anything but a str.
    """
    if not isinstance(text, str):
        raise TypeError(f"an action is a str here, got {type(text).__name__}; pass tokens to the environment itself")
    tokens = env.tokenizer.encode(replace_surrogates(text), add_special_tokens=False)
    if not tokens or tokens[-1] not in env.dialect.stop_token_ids:
        tokens = tokens + env.tokenizer.encode(env.dialect.end_of_turn, add_special_tokens=False)
    return np.asarray(tokens[:max_new_tokens], np.int32)


def action_span(
    env: ToolEnv, *, text: str | None = None, message: Message | None = None, tokens: Sequence[int] | None = None
) -> Tokens:
    """Return the span of a turn, as a server receives it: a text, the reply of a chat API, or token ids.

    Tokens may be longer than the room left. Raises ValueError unless exactly one of the three is given, or for ids
    outside the vocabulary, and TypeError for a message of another form.
    """
    if (text is None) + (message is None) + (tokens is None) != 2:
        raise ValueError("give one of text, message and tokens")
    if text is not None:
        return encode_turn(env, text, env.room)
    if message is not None:
        return env.encode_reply(message)
    return env.action_space.read(tokens)  # type: ignore[attr-defined]


def decode_state(env: ToolEnv, tokens: Tokens) -> str:
    """Return the text of a state, control tokens included."""
    return env.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
