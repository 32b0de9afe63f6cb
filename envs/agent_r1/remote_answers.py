"""The forms of an environment server's answers. A server that is broken, or of another version, is found out here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_r1.dialects import DIALECTS
from agent_r1.text.tokenizers import replace_surrogates

ANSWER_BYTES = 16 << 20
"""The longest answer that is read: 262,144 tokens and their text take less."""
MAX_REWARD = 1e6
"""The largest reward, term and metric: sums over a batch must not overflow. Servers let a client set no larger one."""
MAX_INT = 2**31 - 1
"""The largest integer. It is the number of tasks of an environment without end."""
MAX_MARKS = 2**21
"""The most commas and opening brackets: eight for each of 262,144 tokens. Each may cost 100 bytes when it is read."""

Form = Mapping[str, Callable[[Any], bool]]
"""The entries that an answer must have, each with its check. An answer may have others."""


def problem_of(answer: Any, form: Form) -> str | None:
    """Return why an answer does not have a form, in a few words, or None if it has."""
    if not isinstance(answer, dict):
        return f"it is no JSON object, but {answer!r:.100}"
    for name, is_right in form.items():
        if name not in answer:
            return f"it has no {name}"
        if not is_right(answer[name]):
            return f"its {name} is {answer[name]!r:.100}"
    return None


def size_problem(content: bytes) -> str | None:
    """Return why an answer is too large to be read, or None."""
    if len(content) > ANSWER_BYTES:
        return f"it has more than {ANSWER_BYTES} bytes"
    if sum(map(content.count, (b",", b"[", b"{"))) > MAX_MARKS:
        return f"it has more than {MAX_MARKS} commas and brackets"
    return None


def read_json(content: bytes) -> Any:
    """Return the value of a JSON text, or None for anything else. Lone surrogates become U+FFFD."""
    try:
        text = content.decode()  # a surrogate that is not escaped is an error
        value = json.loads(text)
        if "\\u" in text:
            plain = json.dumps(value, ensure_ascii=False)
            if (clean := replace_surrogates(plain)) != plain:
                return json.loads(clean)
        return value
    except (ValueError, RecursionError):  # the second: nested too deeply
        return None


def are_tokens(value: Any, vocab_size: int = MAX_INT, most: int = MAX_INT) -> bool:
    """Return whether a value is a list of at most `most` token ids below `vocab_size`."""
    if not isinstance(value, list) or len(value) > most or not set(map(type, value)) <= {int}:
        return False
    return not value or (min(value) >= 0 and max(value) < vocab_size)


def is_number(value: Any) -> bool:
    """Return whether a value is a number from -MAX_REWARD to MAX_REWARD."""
    return type(value) in (int, float) and -MAX_REWARD <= value <= MAX_REWARD  # NaN is not


def _is_int(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value <= MAX_INT


def _is_bound(value: Any) -> bool:
    return _is_int(value, 1)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.replace("-", "").replace("_", "").isalnum() and len(value) <= 200


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _all(value: Any, is_right: Callable[[Any], bool]) -> bool:
    """Return whether a value is a list or a dict whose entries are right."""
    entries = value.values() if isinstance(value, dict) else value
    return isinstance(value, list | dict) and all(map(is_right, entries))


def _or_none(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


def _dict_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and _all(value, is_right)


def _list_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and _all(value, is_right)


def _has(**form: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: problem_of(value, form) is None


def _is_message(value: Any) -> bool:
    if not _has(role=_is_text, content=_is_text)(value):
        return False
    calls = value.get("tool_calls", [])
    return _list_of(_has(function=_has(name=_is_text, arguments=lambda _: True)))(calls)


_is_schema = _has(function=_has(name=_is_text, parameters=_dict_of(lambda _: True)))
_has_turn = _has(turn=_is_int, task_id=_is_text, max_new_tokens=_is_int, stop_token_ids=are_tokens,
                 reward_terms=_dict_of(is_number), tool_calls=_list_of(_has(name=_is_text, ok=_is_bool)))  # fmt: skip
END: Form = {"is_success": _is_bool, "answer": _or_none(_is_text), "metrics": _dict_of(_or_none(is_number))}
"""The entries of `info` at the end of an episode."""

FORMS: Mapping[str, Form] = {
    "health": {"sessions": _is_int, "max_sessions": _is_int},
    "splits": {"splits": lambda value: value != {} and _dict_of(_is_bound)(value)},
    "opened": {"session": _is_name},
    "sessions": {
        "session": _is_name, "num_tasks": _is_bound, "splits": _dict_of(_is_text), "split": _is_text,
        "dialect": _is_text, "schemas": _list_of(_is_schema), "max_turns": _is_bound, "max_context_tokens": _is_bound,
        "max_action_tokens": _is_bound, "unfinished_reward": _or_none(is_number),
    },
    "reset": {
        "tokens": are_tokens, "info": _has_turn, "schemas": _list_of(_is_schema), "messages": _list_of(_is_message),
        "task_index": _is_int, "max_turns": _is_bound, "question": _is_text, "instructions": _is_text,
    },
    "step": {
        "span": _is_int, "new": are_tokens, "reward": is_number, "terminated": _is_bool, "truncated": _is_bool,
        "info": _has_turn, "schemas": _list_of(_is_schema), "messages": _list_of(_is_message),
    },
    "cut_off": END,
    "snapshot": {"snapshot": _is_text},
    "restore": {},
    "closed": {},
}  # fmt: skip
"""The form of each route's answer."""


def check_session(about: Mapping[str, Any]) -> str | None:
    """Return why the answer to a new session cannot be used here, or None.

    Args:
        about: an answer of the form "sessions".
    """
    if about["split"] not in about["splits"]:
        return f"its split {about['split']!r:.100} is not among its splits"
    if about["dialect"] not in DIALECTS:
        return f"its dialect {about['dialect']!r:.100} is unknown here"
    return None


def check_prompt(begun: Mapping[str, Any], vocab_size: int, most: int, span: int) -> str | None:
    """Return why the answer of a reset does not fit into the environment, or None.

    Args:
        begun: an answer of the form "reset".
        vocab_size: the number of tokens of the vocabulary.
        most: the maximum number of tokens of the state.
        span: the maximum number of tokens of a turn.
    """
    if not begun["tokens"] or not are_tokens(begun["tokens"], vocab_size, most - 1):
        return "its prompt is empty, too long, or has tokens that the tokenizer lacks"
    if begun["info"]["max_new_tokens"] != min(span, most - len(begun["tokens"])):
        return "its room for the first turn is not what the prompt leaves"
    return None


def check_turn(answer: Mapping[str, Any], vocab_size: int, room: int, span: int, turn: int, sent: int) -> str | None:
    """Return why the answer of a step does not fit into the episode, or None.

    Args:
        answer: an answer of the form "step".
        vocab_size: the number of tokens of the vocabulary.
        room: the tokens that the state has left after the turn.
        span: the maximum number of tokens of a turn.
        turn: the number of the turn.
        sent: the number of tokens of the turn.
    """
    info = answer["info"]
    if answer["span"] != sent or info["turn"] != turn:
        return "it is of another turn"
    if not are_tokens(answer["new"], vocab_size, room):
        return "its tokens are more than there is room for, or the tokenizer lacks some"
    if info["max_new_tokens"] != min(span, room - len(answer["new"])):
        return "its room for the next turn is not what the state leaves"
    over: Sequence[bool] = (answer["terminated"], answer["truncated"])
    if any(over) and (problem := problem_of(info, END)):
        return f"in the info at the end: {problem}"
    if answer["truncated"] and not isinstance(info.get("truncation_reason"), str):
        return "it is truncated without a reason"
    return None
