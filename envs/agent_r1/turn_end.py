"""The end of a turn: what its results mean, what is said next, and whether the episode ends (`ToolEnv.end_turn`).

The environment's judges say what things are worth; here stands in which order they are asked, what counts, and what
the policy reads: results, the user's reply, or a hint, cut to the room that the context has left.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agent_r1.dialects import Call
from agent_r1.episode import End, OpenTurn, UserTurn
from agent_r1.faults import MADE_ONCE, fault_line
from agent_r1.text.tokenizers import replace_surrogates
from agent_r1_tools import ToolResult

if TYPE_CHECKING:
    from agent_r1.tool_env import ToolEnv

MAX_CALLS = 8  # tool calls that are run in one turn
CUT = "... [cut to fit the context]"
NO_ACTION_HINT = "Neither a tool call nor an answer was found. Call a tool, or answer as <answer>your answer</answer>."


@dataclass(frozen=True)
class TurnEnd:
    """What came of a turn.

    Attributes:
        calls: the calls that were made, as in `info["tool_calls"]`.
        terms: reward terms by name, weighted.
        outcome: what `info` says of an episode that ended.
    """

    calls: list[dict[str, Any]]
    terms: dict[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    outcome: dict[str, Any] = field(default_factory=dict)


def settle(env: ToolEnv, turn: OpenTurn, results: Sequence[ToolResult], reserve: int) -> TurnEnd:
    """Decide what the results of a turn mean, and append what the policy reads next.

    Notes in `turn.fault` what a result's fault was, if it counts: then nothing is judged, and what judges have changed
    until then is to be taken back. `reserve`: tokens of the context that the next turn has at least.

    Raises ValueError if a judge names a term without a weight or gives what is no number, and what judges raise.
    """
    episode = env.episode
    amounts: dict[str, float] = {}
    records: list[dict[str, Any]] = []
    responses: list[tuple[str, str]] = []
    end: End | None = None
    waiting = iter(results)
    for pending in turn.calls:
        call = pending.call
        result = ToolResult(pending.error or "", ok=False) if pending.tool is None else next(waiting)
        if result.fault is not None:  # an end before it counts, and the fault doesn't
            once = pending.tool is not None and env.fault_deadline > 0 and not pending.tool.may_repeat(result.ran)
            turn.fault = turn.fault or fault_line(f"tool {call.name}", result.fault, MADE_ONCE if once else "")
        elif turn.fault is None:
            end = _judge_call(env, call, result, amounts)
        error = call.error or (None if result.ok else result.content)
        record = {"name": call.name, "arguments": pending.arguments, "ok": result.ok}
        records.append(record | ({"error": error} if error else {}))
        responses.append((call.name, result.content))
        if result.fault is not None or end is not None:
            break
    if turn.fault is not None:
        return _end_by_fault(turn, records)
    read = turn.calls[: len(records)]  # up to an end: what stands after it doesn't count
    episode.malformed |= any(pending.call.error is not None for pending in read)
    if turn.skipped and end is None:
        episode.malformed |= any(call.error is not None for call in turn.skipped)
        responses.append(("", f"{len(turn.skipped)} more calls were not run: at most {MAX_CALLS} in one turn."))
        _add(amounts, "failed_call", 1)
    answered = bool(turn.answers)
    reply = None  # of the user, or a hint
    if not (turn.calls or answered or turn.overflow):
        turn.asked = "user"
        (heard,) = turn.heard or (env.user_turn(turn.said) if turn.said else None,)
        turn.asked = "judge"
        if isinstance(heard, UserTurn):
            _add_judged(env, heard.amounts, amounts)
            heard = heard.reply
        if isinstance(heard, End):
            end = heard
            _add_judged(env, end.amounts, amounts)
        elif heard is None:
            reply = NO_ACTION_HINT
            _add(amounts, "no_action", 1)
        elif isinstance(heard, str):
            reply = replace_surrogates(heard)
        else:
            forms = "a text, a UserTurn, an End or None"
            raise TypeError(f"user_turn of {type(env).__name__} must give {forms}, got {heard!r:.200}")

    # The end comes before the text: a terminated episode gets no results appended, a truncated one those that it has.
    cut_short = end.truncation_reason if end is not None else None
    terminated = answered or (end is not None and cut_short is None)
    reason = cut_short or ("context" if turn.overflow else None)
    says = bool(responses) or reply is not None
    if not terminated and not turn.overflow and says:
        if not _append_responses(env, turn, responses, reply, reserve):
            reason = reason or "context"
        if cut_short is None and episode.turn >= episode.max_turns:
            reason = "turns"
            terminated = episode.max_turns == 1  # a one-turn task ends by itself: nothing was cut short
    elif not turn.closed and (terminated or not turn.overflow):
        episode.append_within(env.max_context_tokens, env.dialect.close())
    truncated = reason is not None and not terminated
    if terminated or truncated:
        _add_judged(env, env.judge_end(turn.answers[-1].strip() if answered else ""), amounts)
    terms = {
        f"process/{name}": env.process_weights[name] * amount + 0.0  # and not -0.0
        for name, amount in amounts.items()
        if name in env.process_weights
    }
    outcome: dict[str, Any] = {}
    if terminated or truncated:
        outcome = _outcome(env, turn, end, terms)
        if truncated:
            outcome["truncation_reason"] = reason
    return TurnEnd(records, terms, terminated, truncated, outcome)


def _end_by_fault(turn: OpenTurn, records: list[dict[str, Any]]) -> TurnEnd:
    """The machinery is broken: nothing is judged and nothing paid."""
    outcome: dict[str, Any] = {
        "fault": turn.fault,
        "truncation_reason": "fault",
        "is_success": False,
        "answer": turn.answers[-1].strip() if turn.answers else None,
        "metrics": {},
    }
    return TurnEnd(records, truncated=True, outcome=outcome)


def _judge_call(env: ToolEnv, call: Call, result: ToolResult, amounts: dict[str, float]) -> End | None:
    if call.error is not None:
        _add(amounts, "malformed_call", 1)
        return None
    key = json.dumps(json.loads(json.dumps(env.call_key(call)), parse_float=_number), sort_keys=True)  # 2.0 is 2
    if key in env.episode.seen_calls:
        _add(amounts, "repeated_call", 1)
    env.episode.seen_calls.add(key)
    if not result.ok:
        _add(amounts, "failed_call", 1)
    judged = env.judge_result(call, result)
    _add_judged(env, judged.amounts if isinstance(judged, End) else judged, amounts)
    return judged if isinstance(judged, End) else None


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _add_judged(env: ToolEnv, judged: Mapping[str, float], amounts: dict[str, float]) -> None:
    if not isinstance(judged, Mapping):
        raise TypeError(f"a judge of {type(env).__name__} returned {judged!r}; it gives a dict of amounts, or {{}}")
    for name, amount in judged.items():
        if name not in env.PROCESS_WEIGHTS:
            raise ValueError(
                f"a judge names the term {name!r}, but {type(env).__name__}.PROCESS_WEIGHTS has only "
                f"{', '.join(env.PROCESS_WEIGHTS)}; give it a weight there"
            )
        _add(amounts, name, _finite(env, f"the amount of {name!r}", amount))


def _finite(env: ToolEnv, what: str, value: Any) -> float:
    """What a judge gives as a float: a number of Python's or numpy's, or a truth. Raises ValueError for else."""
    try:
        if math.isfinite(value):  # refuses texts, which float() reads
            return float(value)
    except (TypeError, OverflowError):
        pass
    raise ValueError(f"{type(env).__name__}: {what} must be a finite number, got {value!r}")


def _add(amounts: dict[str, float], name: str, amount: float) -> None:
    amounts[name] = amounts.get(name, 0.0) + amount


def judged(env: ToolEnv, found: Any) -> tuple[float, dict[str, Any]]:
    """What a judge says of an answer or an end, as `info` can hold it: the score, and metrics, each a number or None.

    Raises ValueError for anything else.
    """
    wrong = f"{type(env).__name__} judges with {found!r}; a score is from 0 to 1, metrics are numbers"
    try:
        score, metrics = found
        score = _finite(env, "a score", score)
        given = dict(metrics or {}).items()
        metrics = {name: None if value is None else _finite(env, "a metric", value) for name, value in given}
    except (TypeError, ValueError):
        raise ValueError(wrong) from None
    if not 0 <= score <= 1:
        raise ValueError(wrong)
    return score, metrics


def _outcome(env: ToolEnv, turn: OpenTurn, end: End | None, terms: dict[str, float]) -> dict[str, Any]:
    """What the end pays, as `judge_outcome` says, under the name that fits; and what came of the episode."""
    answers = turn.answers
    if end is not None:
        turn.judged = judged(env, (end.score, end.metrics))
    right = end is not None or sum(bool(answer.strip()) for answer in answers) == len(answers) == 1
    answer = answers[-1].strip() if answers else None
    if turn.judged is None:
        turn.judged = judged(env, env.judge_answer(answer) if answer else (0.0, env.final_metrics()))
    score, metrics = turn.judged
    calls_ok = not env.episode.malformed
    unfinished = not answers and end is None
    cut_short = unfinished or (end is not None and end.truncation_reason is not None)
    if cut_short and env.unfinished_reward is not None:
        unfinished = True
        value = env.unfinished_reward
    else:
        value = env.judge_outcome(score, answer_ok=right, calls_ok=calls_ok)
    name = "outcome/unfinished" if unfinished else env.outcome_term if right and calls_ok else "outcome/format"
    terms[name] = _finite(env, "what judge_outcome pays", value)
    besides = env.judge_besides()
    if not isinstance(besides, Mapping):
        raise TypeError(f"judge_besides of {type(env).__name__} must give a dict of amounts, or {{}}, got {besides!r}")
    for also, amount in besides.items():
        terms[f"outcome/{also}"] = _finite(env, "what judge_besides pays", amount)
    return {"is_success": bool(score >= 1), "answer": answer, "metrics": metrics}


def _append_responses(
    env: ToolEnv, turn: OpenTurn, results: list[tuple[str, str]], reply: str | None, reserve: int
) -> bool:
    """Append what the environment says next, tools' results or a user's reply, cut to the room left; False where not
    even that fits."""

    def bridge_of(shown: list[tuple[str, str]]) -> list[int]:
        if reply is None:
            return env.dialect.bridge(turn.closed, shown)
        return env.dialect.hint(turn.closed, shown[0][1])

    episode = env.episode
    most = env.max_context_tokens - (reserve if episode.turn < episode.max_turns else 0)
    responses = results if reply is None else [("", reply)]
    shown = responses
    if not episode.append_within(most, bridge_of(responses)):
        shortest, longest, bridge = 0, max(len(content) for _, content in responses), []
        while shortest <= longest:  # the most characters of each with which the bridge fits
            middle = (shortest + longest) // 2
            cut = [(name, text if len(text) <= middle else text[:middle] + CUT) for name, text in responses]
            tokens = bridge_of(cut)
            if episode.length + len(tokens) <= most:
                bridge, shown, shortest = tokens, cut, middle + 1
            else:
                longest = middle - 1
        if not bridge:
            return False
        episode.append(bridge)
    if reply is None:
        episode.messages.extend({"role": "tool", "name": name, "content": content} for name, content in shown)
    else:
        episode.messages.append({"role": "user", "content": shown[0][1]})
    return True
