"""Records of episodes as JSON rows: `RecordTrajectories` and the learners write them, `agent_r1.show` prints them."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from agent_r1.text.tokenizers import Tokenizer, control_tokens, fast_codec
from agent_r1_tools.text import printable

if TYPE_CHECKING:
    from agent_r1.tool_env import ToolEnv


def episode_record(env: ToolEnv, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of the episode that `env` has just ended with `info`, without its tokens and rewards.

    It has `task_id`, `task_index`, `seed` (of the reset, or None), `split`, `question`, `messages` (the conversation
    in chat form), `tokenizer` (a name), `reward_terms` and `tool_calls` (an entry for each turn). It also has
    `truncation_reason`, `fault`, `is_success`, `answer` and `metrics`, each None if missing.
    """
    episode = env.episode
    record = {
        "task_id": env.task.id,
        "task_index": episode.task_index,
        "seed": episode.seed,
        "split": env.split,
        "question": env.task.question,
        "messages": env.messages,
        "tokenizer": getattr(env.tokenizer, "name_or_path", None) or type(env.tokenizer).__name__,
        "reward_terms": [dict(terms) for terms in episode.rewards],
        "tool_calls": list(episode.tool_calls),
    }
    return record | {name: info.get(name) for name in OUTCOME}


OUTCOME = ("truncation_reason", "fault", "is_success", "answer", "metrics")


def episode_row(
    env: ToolEnv, info: Mapping[str, Any], turn_rewards: Sequence[float], terminated: bool, truncated: bool
) -> dict[str, Any]:
    """Return `episode_record` with the tokens of the state at the end.

    `action_mask` (1 for sampled tokens) and `rewards` (a turn's reward is on its last token) have an entry for each
    token. `turns` (first token, one past the last) and `turn_rewards` have one for each turn.
    """
    episode = env.episode
    mask, rewards = [0] * episode.length, [0.0] * episode.length
    carried = 0.0  # an empty span has no token for its reward: the previous turn gets it, or else the next
    last: int | None = None
    for (start, end), reward in zip(episode.turns, turn_rewards, strict=True):
        mask[start:end] = [1] * (end - start)
        last = end - 1 if end > start else last
        carried += float(reward)
        if last is not None:
            rewards[last] += carried
            carried = 0.0
    tokens = {
        "tokens": episode.buffer[: episode.length].tolist(),
        "action_mask": mask,
        "rewards": rewards,
        "turns": [list(turn) for turn in episode.turns],
        "turn_rewards": [float(reward) for reward in turn_rewards],
    }
    return episode_record(env, info) | tokens | {"terminated": bool(terminated), "truncated": bool(truncated)}


def append_row(path: str | os.PathLike[str], row: Mapping[str, Any]) -> None:
    """Append a line to a file of JSON lines, in one write.

    So an interrupt never leaves half a line, and several environments may write to one file. Raises OSError if the
    disk is full; nothing is added then.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        line = json.dumps(row).encode() + b"\n"
        if (written := os.write(file, line)) < len(line):
            os.ftruncate(file, os.lseek(file, 0, os.SEEK_CUR) - written)
            raise OSError(errno.ENOSPC, f"the disk took {written} of {len(line)} bytes of a row", str(path))
    finally:
        os.close(file)


def _call(name: str, arguments: Any) -> str:
    """Format a call as a marked line. Chat APIs give its arguments as JSON text."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return "-> " + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def say(text: str) -> None:
    """Print text from any source. Characters that standard output cannot encode are escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


UNREAD = "(the episode had ended: no policy read the rest)"
MARKS = re.compile(rf"\\*(?:-> |    reward |\[(?:system|user|assistant|tool)[ \]]|-{{20}}|{re.escape(UNREAD)})")
UNSEEN = re.compile(  # characters that are invisible on a terminal but needed in some scripts: `printable` keeps them
    "[\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200c\u200d\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0080-\U000e0fff]"
)


def _escape_marks(text: str, marks: re.Pattern[str] = MARKS) -> str:
    """Put a backslash before each line that looks like a role, a call, a reward or an end: like one of `marks`."""
    lines = text.split("\n")
    return "\n".join("\\" * bool(marks.match(UNSEEN.sub("", line))) + line for line in lines)


def transcript(messages: Sequence[Mapping[str, Any]], rewards: Sequence[Mapping[str, float]], first: int = 0) -> str:
    """Format the messages from `first` on as text for a terminal, with the reward terms below each turn.

    A line of a message that looks like a role, a call, a reward or the end of an episode begins with a backslash.
    """
    lines, turn = [], sum(message["role"] == "assistant" for message in messages[:first])
    for message in messages[first:]:
        role = message["role"]
        name = json.dumps(message.get("name") or "", ensure_ascii=False)[1:-1]  # an unknown tool may have any name
        lines.append(f"[{role}{f' {name[:64]}' * bool(name)}]")
        if message["content"]:
            lines.append(_escape_marks(message["content"]))
        lines += [_call(**call["function"]) for call in message.get("tool_calls") or ()]
        if role == "assistant":
            if turn < len(rewards):
                terms = rewards[turn]
                named = ", ".join(f"{name} {value:+.2f}" for name, value in terms.items())
                lines.append(f"    reward {sum(terms.values()):+.2f}" + (f"  ({named})" if named else ""))
            turn += 1
    return printable("\n".join(lines))


SAMPLED = "\u27ea", "\u27eb"  # marks around a sampled span: double angle brackets
SEPARATOR = re.compile(r"\\*-{20}")


def _breaker(names: Mapping[str, int]) -> Callable[[str], str]:
    """Return a function that puts a backslash behind the first character of each name in a text."""
    lengths: dict[str, set[int]] = {}
    for name in names:
        lengths.setdefault(name[0], set()).add(len(name))
    first = re.compile("|".join(map(re.escape, lengths)) or "(?!)")

    def broken(match: re.Match[str]) -> str:
        text, start = match.string, match.start()
        begins = any(text[start : start + length] in names for length in lengths[match[0]])
        return match[0] + "\\" * begins

    return lambda text: first.sub(broken, text)


def raw_transcript(row: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """Format the tokens of a row as text for a terminal, control tokens included. Sampled spans are between the marks
    SAMPLED. A line of dashes separates the segments of a context that was rewritten.

    The name of a control token is unbroken only where the token is: other text that has this name gets a backslash
    inside it. In other text the marks are escaped, and a line that looks like a separator begins with a backslash.
    Invisible characters are escaped too. Raises ValueError if `segment_starts` do not grow from 0 to below the length.
    """
    tokens, mask = row["tokens"], row["action_mask"]
    decode, names = fast_codec(tokenizer)[1], control_tokens(tokenizer)
    break_names = _breaker(names)
    controls = {token: name for name, token in names.items()}
    name_of = getattr(tokenizer, "convert_ids_to_tokens", str)
    segments, starts = [], row.get("segment_starts") or [0]
    if starts[0] != 0 or any(start >= end for start, end in pairwise([*starts, max(1, len(tokens))])):
        raise ValueError(f"`segment_starts` must grow from 0 to below {len(tokens)}, the number of tokens")
    for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        text, before = "", False
        pairs = zip(tokens[start:end], mask[start:end], strict=True)
        for (sampled, is_control), run in groupby(pairs, lambda pair: (bool(pair[1]), pair[0] in controls)):
            ids = [token for token, _ in run]
            if sampled != before:
                text += SAMPLED[0] if sampled else SAMPLED[1]
            piece = "".join(controls[token] for token in ids) if is_control else decode(ids)
            if not is_control and str(name_of(ids[0])).startswith("\u2581") and not piece.startswith(" "):
                piece = f" {piece}"  # SentencePiece's decoder drops the space of the first token
            if not is_control:
                piece = break_names(piece)
            for mark in SAMPLED:
                piece = piece.replace(mark, f"\\u{ord(mark):x}")
            text, before = text + piece, sampled
        text = UNSEEN.sub(lambda unseen: unseen[0].encode("unicode_escape").decode(), text + SAMPLED[1] * before)
        segments.append(_escape_marks(text, SEPARATOR))
    return printable(f"\n{'-' * 20} the context was rewritten {'-' * 20}\n".join(segments))
