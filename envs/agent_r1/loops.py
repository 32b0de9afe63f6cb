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
from typing import TYPE_CHECKING, Any, Literal

from agent_r1.dialects import Call
from agent_r1.dialects.json_reader import MAX_DEPTH, is_too_deep
from agent_r1.episode import MAX_CALLS, Made, OpenTurn, PendingCall
from agent_r1.remote import RemoteEnv
from agent_r1.text.chat import Message, chat_messages
from agent_r1.text.tokenizers import control_tokens, render_chat, replace_surrogates
from agent_r1_tools import ToolFault, ToolResult

if TYPE_CHECKING:
    from agent_r1.tool_env import ToolEnv

Form = Literal["schemas", "text"]

ENDED = "The task has ended. Tools do not run any more."
TOO_MANY = "This episode has had too many calls. Tools do not run any more."
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

    Faults are retried. A call fails with a text that the policy can read if there is no such tool, if its arguments are
    nested deeper than 64, if the task has ended, or after `max_turns` * `MAX_CALLS` calls. Raises ToolFault for a fault
    that persists, and RuntimeError if the episode has turns, or if the tools run elsewhere (`RemoteEnv`).
    """
    episode = env.episode
    if episode.over or episode.turns:
        raise RuntimeError("call_tool() is for an episode that another loop plays; call reset() before its first call")
    if episode.fault is not None:
        raise ToolFault(episode.fault)
    if _is_full(env):
        return ToolResult(TOO_MANY, ok=False)
    if is_too_deep(arguments):  # malformed in `score_messages`, too
        return ToolResult(f"Error: the arguments are nested deeper than {MAX_DEPTH}.", ok=False)
    if any(_ends(result) for _, _, result in episode.made):
        episode.made.append((name, arguments, ToolResult(ENDED, ok=False)))
        return episode.made[-1][2]
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


def _is_full(env: ToolEnv) -> bool:
    """Return whether the episode has had as many calls as its turns can have: a loop must not fill the memory."""
    return len(env.episode.made) >= env.episode.max_turns * MAX_CALLS


def _ends(result: ToolResult) -> bool:
    return result.done or result.fault is not None


def take_result(made: list[Made], call: Call) -> ToolResult | None:
    """Remove and return the result of a call that was made, or None. The other loop may have read its arguments
    differently ("3" for 3), so a call of the same tool is taken if none is equal."""
    named = [i for i, (name, _, _) in enumerate(made) if name == call.name]
    equal = [i for i in named if made[i][1] == call.arguments]
    return made.pop((equal or named)[0])[2] if named else None


def score_messages(env: ToolEnv, messages: Sequence[Any]) -> tuple[float, dict[str, Any]]:
    """Return the return of a conversation that another loop played in this episode, and the last info.

    The turns are judged as in `step`, but no tool runs. Judges see the results that `call_tool` returned. The state has
    the texts that the messages show for them. `info["turn_rewards"]` has the reward of each turn. A last turn whose
    calls were never made is left out: the other loop has stopped before it. A conversation without an answer is
    unfinished.

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
    made, full = list(env.episode.made), _is_full(env)
    left = list(made)
    for reply, _ in turns[:-1]:
        _results(_read(env, reply), left, full)
    if env.episode.fault is None and not all(_results(_read(env, turns[-1][0]), left, full)):
        del turns[-1]
    env.episode.max_turns = min(env.episode.max_turns, max(len(turns), 1))  # the other loop ended the episode here
    rewards: list[float] = []
    info: dict[str, Any] = {}
    for number, (reply, shown) in enumerate(turns or [({"content": ""}, [])]):
        turn = env._begin_turn(env.encode_reply(reply))
        _show(turn, reply, shown)
        results: list[ToolResult] = []
        for pending, result in zip(turn.waiting, _results(turn, made, full), strict=True):
            if result is None:
                raise ValueError(
                    f"turn {number} calls {pending.call.name}, but no such call was made; the other loop must call "
                    "call_tool, after env.reset"
                )
            results.append(result)
        _, reward, terminated, truncated, info = env._end_turn(turn, results)
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


def _read(env: ToolEnv, reply: Any) -> OpenTurn:
    return OpenTurn.read(env.dialect.parse(env.encode_reply(reply).tolist(), env.schemas), env.tools, closed=True)


def _results(turn: OpenTurn, made: list[Made], full: bool) -> list[ToolResult | None]:
    """Return the results of a turn's calls that have a tool, taken from `made`; None for a call that was not made.

    A refused call needs none: where the turn ended the task, or if the episode had too many calls (`full`).
    """
    results = [take_result(made, pending.call) for pending in turn.waiting]
    for call in turn.skipped:  # the other loop made them: a later turn must not get their results
        calls = [(name, arguments) for name, arguments, _ in made]
        if (call.name, call.arguments) in calls:
            del made[calls.index((call.name, call.arguments))]
    ended = any(result is not None and _ends(result) for result in results)
    if not ended and not full:
        return results
    return [result or ToolResult(ENDED if ended else TOO_MANY, ok=False) for result in results]


def _show(turn: OpenTurn, reply: Any, shown: list[tuple[str | None, str]]) -> None:
    """Note the text that the messages show for each call of a turn, by its id; for equal ids, in their order."""
    fields = reply.model_dump() if hasattr(reply, "model_dump") else reply
    calls = [*(fields.get("tool_calls") or []), *(fields.get("invalid_tool_calls") or [])]
    ids = [call.get("id") if isinstance(call, Mapping) else None for call in calls]
    texts: dict[str, list[str]] = {}
    for call_id, text in shown:
        texts.setdefault(str(call_id), []).append(text)
    for pending, call_id in zip(turn.calls, ids, strict=False):
        if waiting := texts.get(str(call_id)):
            pending.shown = replace_surrogates(waiting.pop(0))
