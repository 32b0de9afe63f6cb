"""Episodes that the loop of another program plays: their prompt, their tool calls, their return.

    env.reset(options={"task_index": 3})
    messages = other_loop(prompt_messages(env), env.schemas, partial(call_tool, env))
    total, info = score_messages(env, messages)

The other loop samples the turns, makes the calls through `call_tool`, and tells the policy the results. It
knows no rewards. `score_messages` pays its conversation afterwards, with the results of these calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from agent_r1.dialects import Call
from agent_r1.episode import Made, OpenTurn, PendingCall
from agent_r1.remote import RemoteEnv
from agent_r1.text.chat import Message, chat_messages
from agent_r1.text.tokenizers import control_tokens, render_chat
from agent_r1_tools import ToolFault, ToolResult

if TYPE_CHECKING:
    from agent_r1.tool_env import ToolEnv

Form = Literal["schemas", "text"]

ENDED = "The task has ended. Tools do not run any more."
_SYSTEM = "ZQsystemQZ"
_ROLES = {"ai": "assistant", "AIMessageChunk": "assistant", "tool": "tool", "human": "user", "system": "system"}


# ------------------------------------------------------------------ what the policy reads


def prompt_messages(env: ToolEnv, tools: Form = "schemas") -> list[Message]:
    """Return the messages before the first turn.

    With "schemas" they are in the form of chat APIs, and the tools are given beside them (`ToolEnv.schemas`). With
    "text" they explain the tools, so that the chat template makes the same prompt without schemas if that is possible.
    Names of control tokens in a text get a space, because whoever gets the text encodes it.
    """
    _check_form(tools)
    first = next((i for i, m in enumerate(env.episode.messages) if m["role"] == "assistant"), None)
    messages = env.episode.messages[:first]
    return chat_messages(messages) if tools == "schemas" else explain_tools(env, messages)


def new_messages(env: ToolEnv, tools: Form = "schemas") -> list[Message]:
    """Return the messages that the last step appended after the policy's turn: results, a hint or a user's reply.

    The list is empty before the first turn, and if an episode ended without a text. With "schemas" the messages are the
    last ones of `ToolEnv.messages`. With "text" results are one message of the user.
    """
    _check_form(tools)
    messages = chat_messages(env.episode.messages) if tools == "schemas" else env.episode.messages
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        return []
    new = messages[turns[-1] + 1 :]
    if tools == "schemas":
        return new
    new = [plain(env, message) for message in new]
    if new and new[0]["role"] == "tool":
        new = [{"role": "user", "content": "\n".join(env.dialect.result_text(m["content"]) for m in new)}]
    return new


def explain_tools(env: ToolEnv, messages: Sequence[Message]) -> list[Message]:
    """Return messages from which the chat template makes the environment's prompt without being given the tools.

    If the template explains tools at a place that no message reaches, the dialect's own instructions replace that text.
    """
    messages = [plain(env, message) for message in messages]
    if not env.schemas:
        return messages
    if env.dialect.native:
        full = render_chat(env.tokenizer, messages, env.schemas, True)
        marked = [{"role": "system", "content": _SYSTEM}, *messages[1:]]
        before, _, after = render_chat(env.tokenizer, marked, None, True).partition(_SYSTEM)
        explained = [{"role": "system", "content": full[len(before) : len(full) - len(after)]}, *messages[1:]]
        if render_chat(env.tokenizer, explained, None, True) == full:
            return explained
    return env.dialect.with_instructions(messages, env.dialect.instructions(env.schemas))


def plain(env: ToolEnv, message: Message) -> Message:
    """Return a message with a space in the names of control tokens: others encode it as text of the template."""
    names = "|".join(map(re.escape, control_tokens(env.tokenizer)))
    if not names:
        return message
    return {key: re.sub(names, lambda token: f"{token[0][0]} {token[0][1:]}", text) for key, text in message.items()}


def _check_form(tools: str) -> None:
    if tools not in ("schemas", "text"):
        raise ValueError(f"tools must be 'schemas' or 'text', got {tools!r}")


# ------------------------------------------------------------------ what the policy does


def call_tool(env: ToolEnv, name: str, arguments: Any) -> ToolResult:
    """Make a call for an episode that the loop of another program plays; `score_messages` pays it.

    Faults are retried. A call of a tool that does not exist, or after the end of the task, fails with a text that the
    policy can read. Raises ToolFault for a fault that persists, and RuntimeError if the episode has turns, or if the
    tools run elsewhere (`RemoteEnv`).
    """
    episode = env.episode
    if episode.over or episode.turns:
        raise RuntimeError("call_tool() is for an episode that another loop plays; call reset() before its first call")
    if episode.fault is not None:
        raise ToolFault(episode.fault)
    if any(result.done or result.fault is not None for _, _, result in episode.made):
        return ToolResult(ENDED, ok=False)
    if not env.tools and env.schemas:
        raise RuntimeError("call_tool() needs the tools, which run elsewhere; play with step() or step_message()")
    if name not in env.tools:
        return ToolResult(f"Error: there is no tool named {str(name)[:64]!r}. Tools: {', '.join(env.tools)}.", ok=False)
    results = env._in_order([PendingCall(Call(name, arguments), env.tools[name])]).run()
    assert results is not None
    episode.made.append((name, arguments, results[0]))
    if results[0].fault is not None:
        raise ToolFault(f"tool {name}: {results[0].fault}", ran=results[0].ran)
    return results[0]


def take_result(made: list[Made], call: Call) -> ToolResult | None:
    """Remove and return the result of a call that was made, or None. The other loop may have read its arguments
    differently ("3" for 3), so a call of the same tool is taken if none is equal."""
    named = [i for i, (name, _, _) in enumerate(made) if name == call.name]
    equal = [i for i in named if made[i][1] == call.arguments]
    return made.pop((equal or named)[0])[2] if named else None


def score_messages(env: ToolEnv, messages: Sequence[Any]) -> tuple[float, dict[str, Any]]:
    """Return the return of a conversation that another loop played in this episode, and the last info.

    The turns are judged as in `step`, but no tool runs: the results are those that `call_tool` returned, with the text
    that the messages show. `info["turn_rewards"]` has the reward of each turn. A last turn whose calls were never made
    is left out: the other loop has stopped before it. A conversation without an answer is unfinished.

    Args:
        env: the environment, after `reset` and the loop's calls.
        messages: the conversation in chat form, with or without its prompt: dicts, or the objects of a client library.

    Raises:
        ValueError: there is no turn, a call before the last turn was not made by `call_tool`, or the task has a user
            (`user_turn`), whom only `step_message` asks.
        RuntimeError: the episode has turns already, or its turns run elsewhere (`RemoteEnv`).
        TypeError: a message has another form.
    """
    if isinstance(env, RemoteEnv):
        raise RuntimeError("score_messages() needs the judges, which run elsewhere; play with step() or step_message()")
    if env.episode.turns or env.episode.over:
        raise RuntimeError("score_messages() after the first turn; call reset() before the other loop begins")
    if env._has_user:
        raise ValueError(f"{type(env).__name__} has a user, who replies to step_message() only; play with that")
    turns = _turns(messages)
    if not turns:
        raise ValueError("the messages have no turn of an assistant")
    made = list(env.episode.made)
    left = list(made)
    for turn_before in turns[:-1]:
        _results(env, *turn_before, left, n=None)
    if env.episode.fault is None and not all(_results(env, *turns[-1], left, n=None)):
        del turns[-1]
    env.episode.max_turns = min(env.episode.max_turns, max(len(turns), 1))  # the other loop ended the episode here
    rewards: list[float] = []
    info: dict[str, Any] = {}
    for number, (reply, shown) in enumerate(turns or [({"content": ""}, [])]):
        turn = env._begin_turn(env.encode_reply(reply))
        results = _results(env, reply, shown, made, n=number)
        _, reward, terminated, truncated, info = env._end_turn(turn, [r for r in results if r is not None])
        rewards.append(reward)
        if terminated or truncated:
            break
    return float(sum(rewards)), info | {"turn_rewards": rewards}


def _turns(messages: Sequence[Any]) -> list[tuple[Any, list[tuple[str | None, str]]]]:
    """Return each turn of the assistant, with the results that follow it: id of the call, and text."""
    turns: list[tuple[Any, list[tuple[str | None, str]]]] = []
    for message in messages:
        fields = message.model_dump() if hasattr(message, "model_dump") else message
        if not isinstance(fields, Mapping):
            raise TypeError(f"a message must be a dict or an object of a client library, got {message!r:.200}")
        role = fields.get("role") or _ROLES.get(str(fields.get("type")))
        if role not in ("assistant", "tool", "user", "system", "developer"):
            raise TypeError(f"a message must have a role, got {message!r:.200}")
        if role == "assistant":
            turns.append((message, []))
        elif role == "tool" and turns:
            turns[-1][1].append((fields.get("tool_call_id"), _text(fields.get("content"))))
    return turns


def _text(content: Any) -> str:
    if isinstance(content, list | tuple):
        content = "".join(p.get("text", "") if isinstance(p, Mapping) else str(p) for p in content)
    return content if isinstance(content, str) else ""


def _results(
    env: ToolEnv, reply: Any, shown: list[tuple[str | None, str]], made: list[Made], n: int | None
) -> list[ToolResult | None]:
    """Return the results of a reply's calls that have a tool, taken from `made`. With a turn's number `n`, raise
    ValueError for a call that was not made."""
    span = env.encode_reply(reply)
    turn = OpenTurn.read(env.dialect.parse(span.tolist(), env.schemas), env.tools, closed=True)
    texts = _texts(reply, shown, len(turn.calls))
    results: list[ToolResult | None] = []
    for pending, text in zip(turn.calls, texts, strict=True):
        if pending.tool is None:
            continue
        result = take_result(made, pending.call)
        if result is None and n is not None:
            raise ValueError(
                f"turn {n} calls {pending.call.name}, but no such call was made; the other loop must call "
                "call_tool, after env.reset"
            )
        results.append(result if result is None or text is None else replace(result, content=text))
    return results


def _texts(reply: Any, shown: list[tuple[str | None, str]], number: int) -> list[str | None]:
    """Return the text that the messages show for each of the calls of a reply; None where they show none."""
    fields = reply.model_dump() if hasattr(reply, "model_dump") else reply
    calls = [*(fields.get("tool_calls") or []), *(fields.get("invalid_tool_calls") or [])]
    ids = [call.get("id") if isinstance(call, Mapping) else None for call in calls]
    by_id = {str(call_id): text for call_id, text in shown if call_id is not None}
    return [by_id.get(str(ids[i])) if i < len(ids) else None for i in range(number)]
