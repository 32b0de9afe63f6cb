"""The end of a turn: what its results mean, what the policy reads next, and whether the episode ends.

`ToolEnv._try_turn` makes a `TurnEnd`, which asks the environment's judges and changes nothing but itself:

    judge_turn       judge_result or user_turn; the flags; results, reply or hint, cut to the room in the context
    judge_episode    judge_answer and judge_end, where the episode ends

The environment then takes over its values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent_r1.dialects import Call
from agent_r1.episode import MAX_CALLS, End, OpenTurn, Outcome, PendingCall, UserTurn
from agent_r1.faults import MADE_ONCE, fault_line
from agent_r1.text.tokenizers import replace_surrogates
from agent_r1_tools import ToolResult

if TYPE_CHECKING:
    from agent_r1.tool_env import ToolEnv

CUT = "... [cut to fit the context]"
NO_ACTION_HINT = "Neither a tool call nor an answer was found. Call a tool, or answer as <answer>your answer</answer>."


class TurnEnd:
    """The result of a turn.

    Args:
        env: the environment whose judges are asked. The notes of the judges in its memory are the only change to it.
        turn: the turn, with the early replies of its judge or user.
        reserve: the minimum of context tokens that is kept for the next turn.

    Attributes:
        fault: a fault that counts. Nothing is judged then, and the notes of the judges must be taken back.
        asked: "judge" or "user": the one asked last, as a fault names it.
        calls: the calls that were made, as in `info["tool_calls"]`.
        keys: a key of each call, for `repeated_call`.
        malformed: True if one of the calls was malformed.
        tokens: the next tokens that the policy reads. They are appended to the state, `messages` to the conversation.
        terms: weighted reward terms by name.
        outcome: the entries of `info` for an episode that ended.
    """

    def __init__(self, env: ToolEnv, turn: OpenTurn, reserve: int) -> None:
        self.env, self.turn, self.reserve = env, turn, reserve
        self.fault, self.asked = turn.fault, "judge"
        self.calls: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.malformed = False
        self.tokens: Sequence[int] = ()
        self.messages: list[dict[str, Any]] = []
        self.terms: dict[str, float] = {}
        self.terminated = self.truncated = False
        self.outcome: dict[str, Any] = {}
        self._amounts: dict[str, float] = {}  # amounts of process terms, before their weights
        self._end: End | None = None
        self._reason: str | None = None  # truncation reason

    def judge_turn(self, results: Sequence[ToolResult]) -> None:
        """Judge the results, one for each call with a tool, and write the text that the policy reads next.

        Raises ValueError if a judge names a term without a weight or returns something that is not a number, and if a
        tool ends the task but `judge_result` returns no `End`. Exceptions of judges are raised as well.
        """
        turn = self.turn
        responses: list[tuple[str, str]] = []
        waiting = iter(results)
        for pending in turn.calls:
            call = pending.call
            result = ToolResult(pending.error or "", ok=False) if pending.tool is None else next(waiting)
            if result.fault is not None:  # after an end the loop has stopped, so a later fault does not count
                self.fault = self.fault or self._tool_fault(pending, result)
            elif self.fault is None:
                self._judge_call(call, result)
            error = call.error or (None if result.ok else result.content)
            record = {"name": call.name, "arguments": pending.arguments, "ok": result.ok}
            self.calls.append(record | ({"error": error} if error else {}))
            responses.append((call.name, result.content if pending.shown is None else pending.shown))
            if result.fault is not None or self._end is not None:
                break
        if self.fault is not None:
            self._end_by_fault()
            return
        read = [pending.call for pending in turn.calls[: len(self.calls)]]  # up to an end: calls after it do not count
        if turn.skipped and self._end is None:
            read += turn.skipped
            responses.append(("", f"{len(turn.skipped)} more calls were not run: at most {MAX_CALLS} in one turn."))
            self._add("failed_call", 1)
        self.malformed = any(call.error is not None for call in read)
        reply = None if turn.calls or turn.answers or turn.overflow else self._hear_user()
        self._write(responses, reply)
        self.terms = self._process_terms()

    def judge_episode(self) -> None:
        """Compute the outcome reward, choose its name, and fill `outcome`. Raises as `judge_turn` does."""
        env, turn, end = self.env, self.turn, self._end
        answer = turn.answers[-1].strip() if turn.answers else ""
        if end is not None:
            score, metrics = judged(env, (end.score, end.metrics))
        elif turn.judged is not None:
            score, metrics = turn.judged
        else:
            score, metrics = judged(env, env.judge_answer(answer))
            score = score if answer else 0.0
        answer_ok = end is not None or sum(bool(text.strip()) for text in turn.answers) == len(turn.answers) == 1
        calls_ok = not env.episode.malformed
        paid = env.judge_end(score, answer=answer, answer_ok=answer_ok, calls_ok=calls_ok)
        outcome = paid if isinstance(paid, Outcome) else Outcome(paid)
        self._add_judged(outcome.amounts)
        besides: Any = outcome.besides
        if not isinstance(besides, Mapping):
            raise TypeError(f"judge_end of {type(env).__name__}: besides must be a dict of amounts, got {besides!r}")

        unfinished, value = not turn.answers and end is None, outcome.value
        cut_short = unfinished or (end is not None and end.truncation_reason is not None)
        if cut_short and env.unfinished_reward is not None:
            unfinished, value = True, env.unfinished_reward
        name = "outcome/unfinished" if unfinished else env.outcome_term if answer_ok and calls_ok else "outcome/format"
        self.terms = self._process_terms()
        self.terms[name] = _finite(env, "the value of judge_end", value)
        for extra, amount in besides.items():
            if f"outcome/{extra}" in self.terms:
                raise ValueError(
                    f"judge_end of {type(env).__name__}: besides must not contain the outcome itself, {extra!r}"
                )
            self.terms[f"outcome/{extra}"] = _finite(env, f"besides[{extra!r}] of judge_end", amount)
        self.outcome = {"is_success": bool(score >= 1), "answer": answer if turn.answers else None, "metrics": metrics}
        if self.truncated:
            self.outcome["truncation_reason"] = self._reason

    # ------------------------------------------------------------------ calls

    def _judge_call(self, call: Call, result: ToolResult) -> None:
        env = self.env
        if call.error is not None:
            self._add("malformed_call", 1)
            return
        parts = [call.name, call.arguments]
        if call.name in env.depends_on:
            parts.append(env.memory.get(env.depends_on[call.name]))
        key = json.dumps(json.loads(json.dumps(parts), parse_float=_number), sort_keys=True)  # 2.0 equals 2
        if key in env.episode.seen_calls or key in self.keys:
            self._add("repeated_call", 1)
        self.keys.add(key)
        if not result.ok:
            self._add("failed_call", 1)
        judgement = env.judge_result(call, result)
        self._end = judgement if isinstance(judgement, End) else None
        self._add_judged(judgement.amounts if isinstance(judgement, End) else judgement)
        if result.done and self._end is None:
            raise ValueError(
                f"the tool {call.name!r} ended the task (done=True), but {type(env).__name__}.judge_result returned no "
                "End; return End(score) there, or leave done=True out of the result"
            )

    def _tool_fault(self, pending: PendingCall, result: ToolResult) -> str:
        assert result.fault is not None
        may_repeat = pending.tool is None or pending.tool.may_repeat(result.ran)
        made_once = self.env.fault_deadline > 0 and not may_repeat
        return fault_line(f"tool {pending.call.name}", result.fault, MADE_ONCE if made_once else "")

    def _end_by_fault(self) -> None:
        """End the episode after an infrastructure error: nothing is judged and nothing is paid."""
        answers = self.turn.answers
        self.truncated = True
        self.outcome = {
            "fault": self.fault,
            "truncation_reason": "fault",
            "is_success": False,
            "answer": answers[-1].strip() if answers else None,
            "metrics": {},
        }

    # ------------------------------------------------------------------ what the policy reads next

    def _hear_user(self) -> str | None:
        """Return the user's reply to plain speech, or a hint; None if the user ends the episode."""
        turn, env = self.turn, self.env
        self.asked = "user"
        (reply,) = turn.heard or (env.user_turn(turn.said) if turn.said else None,)
        self.asked = "judge"
        if isinstance(reply, UserTurn):
            self._add_judged(reply.amounts)
            reply = reply.reply
        if isinstance(reply, End):
            self._end = reply
            self._add_judged(reply.amounts)
            return None
        if reply is None:
            self._add("no_action", 1)
            return NO_ACTION_HINT
        if not isinstance(reply, str):
            forms = "a text, a UserTurn, an End or None"
            raise TypeError(f"user_turn of {type(env).__name__} must return {forms}, got {reply!r:.200}")
        return replace_surrogates(reply)

    def _write(self, results: list[tuple[str, str]], reply: str | None) -> None:
        """Set the flags, and write results or reply. A terminated episode gets no text, a truncated one still does."""
        turn, env, end = self.turn, self.env, self._end
        episode = env.episode
        cut_short = end.truncation_reason if end is not None else None
        self.terminated = bool(turn.answers) or (end is not None and cut_short is None)
        reason = cut_short or ("context" if turn.overflow else None)
        room = env.max_context_tokens - episode.length
        if not self.terminated and not turn.overflow and (results or reply is not None):
            if not self._write_within(room - (self.reserve if episode.turn < episode.max_turns else 0), results, reply):
                reason = reason or "context"
            if cut_short is None and episode.turn >= episode.max_turns:
                reason = "turns"
                self.terminated = episode.max_turns == 1  # a one-turn task terminates: nothing was cut short
        elif not turn.closed and (self.terminated or not turn.overflow):
            closing = env.dialect.close()
            self.tokens = closing if len(closing) <= room else ()
        self.truncated = reason is not None and not self.terminated
        self._reason = reason

    def _write_within(self, room: int, results: list[tuple[str, str]], reply: str | None) -> bool:
        """Write results, or else a reply, cut to `room` tokens. Return False if even the cut text does not fit."""
        turn, dialect = self.turn, self.env.dialect

        def bridge_of(shown: list[tuple[str, str]]) -> list[int]:
            return dialect.bridge(turn.closed, shown) if reply is None else dialect.hint(turn.closed, shown[0][1])

        shown = responses = results if reply is None else [("", reply)]
        self.tokens = bridge_of(responses)
        if len(self.tokens) > room:
            shortest, longest, self.tokens = 0, max(len(content) for _, content in responses), ()
            while shortest <= longest:  # the largest number of characters per text with which the bridge fits
                middle = (shortest + longest) // 2
                cut = [(name, text if len(text) <= middle else text[:middle] + CUT) for name, text in responses]
                tokens = bridge_of(cut)
                if len(tokens) <= room:
                    self.tokens, shown, shortest = tokens, cut, middle + 1
                else:
                    longest = middle - 1
            if not self.tokens:
                return False
        if reply is None:
            self.messages = [{"role": "tool", "name": name, "content": content} for name, content in shown]
        else:
            self.messages = [{"role": "user", "content": shown[0][1]}]
        return True

    # ------------------------------------------------------------------ terms

    def _add(self, name: str, amount: float) -> None:
        self._amounts[name] = self._amounts.get(name, 0.0) + amount

    def _add_judged(self, amounts: Mapping[str, float]) -> None:
        env = self.env
        if not isinstance(amounts, Mapping):
            raise TypeError(f"a judge of {type(env).__name__} returned {amounts!r}; return a dict of amounts, or {{}}")
        for name, amount in amounts.items():
            if name not in env.PROCESS_WEIGHTS:
                raise ValueError(
                    f"a judge returned the term {name!r}, but {type(env).__name__}.PROCESS_WEIGHTS has only "
                    f"{', '.join(env.PROCESS_WEIGHTS)}; give it a weight there"
                )
            self._add(name, _finite(env, f"the amount of {name!r}", amount))

    def _process_terms(self) -> dict[str, float]:
        return {
            f"process/{name}": self.env.process_weights[name] * amount + 0.0  # + 0.0 turns -0.0 into 0.0
            for name, amount in self._amounts.items()
            if name in self.env.process_weights
        }


def judged(env: ToolEnv, judgement: Any) -> tuple[float, dict[str, Any]]:
    """Return a judgement as `info` can hold it: the score, and metrics, each a number or None.

    Raises ValueError for anything else.
    """
    name = type(env).__name__
    try:
        score, metrics = judgement
    except (TypeError, ValueError):
        form = "judge_answer must return a pair (score, metrics), such as (1.0, {}) or (0.5, {'f1': 0.5})"
        raise ValueError(f"{name}: {form}, got {judgement!r:.200}") from None
    problem = f"{name} returned the judgement {judgement!r:.200}; "
    try:
        score = _finite(env, "a score", score)
    except ValueError:
        score = -1.0
    if not 0 <= score <= 1:
        raise ValueError(f"{problem}its first part, the score, must be a number from 0 to 1")
    try:
        entries = dict(metrics or {}).items()
        return score, {key: None if value is None else _finite(env, "a metric", value) for key, value in entries}
    except (TypeError, ValueError):
        raise ValueError(f"{problem}its second part, the metrics, must be a dict of numbers, or None") from None


def _finite(env: ToolEnv, name: str, value: Any) -> float:
    """Return a judge's value as a float: a Python or numpy number, or a bool. Raises ValueError for anything else."""
    try:
        if math.isfinite(value):  # rejects texts, which float() would accept
            return float(value)
    except (TypeError, OverflowError):
        pass
    raise ValueError(f"{type(env).__name__}: {name} must be a finite number, got {value!r}")


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number
