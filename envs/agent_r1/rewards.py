"""Named reward terms: scores of answers and formats, and the weights of process terms.

Pure functions, no environment and no tokens. The scores follow the official evaluation scripts:

    HotpotQA         hotpot_evaluate_v1.py               github.com/hotpotqa/hotpot
    2WikiMultihopQA  2wikimultihop_evaluate_v1.1.py      github.com/Alab-NII/2wikimultihop
    MuSiQue          metrics/answer.py                   github.com/StonyBrookNLP/musique

A match is equality of normalised strings, never containment: listing candidates, "no" inside "nothing" or "yes"
inside "eyes" earn nothing, and neither does anything against an answer that normalises to "" (such as "A").
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping

from agent_r1.arguments import ArgumentError, finite

PROCESS_WEIGHTS: Mapping[str, float] = {
    "support_found": 0.3,  # times newly found gold paragraphs / all gold paragraphs
    "malformed_call": -0.1,
    "failed_call": -0.05,
    "repeated_call": -0.05,
    "no_action": 0.0,
    "unsound_thought": -0.05,  # thoughts that the model of `think_judge` rejects
    "extra_call": 0.0,  # calls beyond the expert's number, in a success
}
"""Process terms of the question answering environments and what one unit of each pays."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
ANSWER = re.compile(r"<answer>((?:[^<]++|<(?!/?answer>))*+)</answer>")
"""An answer in a visible text; its group is the content. See `find_answers`."""

_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


def normalize_answer(text: str) -> str:
    """Lower the case, drop ASCII punctuation, articles (a, an, the) and extra whitespace, in the official order."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: str | Iterable[str]) -> float:
    """Return 1.0 if the normalised prediction equals one of the normalised answers, else 0.0. A text is one answer.

    As in the official scripts, two texts that both normalise to "" are equal. That an episode with an empty answer
    scores 0 is the environment's rule, not this function's.
    """
    predicted = normalize_answer(prediction)
    return float(any(predicted == normalize_answer(answer) for answer in _each(answers)))


def f1(prediction: str, answers: str | Iterable[str], yes_no_rule: bool = True) -> float:
    """Compute the best token F1 between the prediction and one of the answers, from 0 to 1.

    Args:
        prediction: the predicted answer.
        answers: the gold answer and its aliases; without any the score is 0. A text is one answer.
        yes_no_rule: True for the score of HotpotQA and 2WikiMultihopQA: it is 0 if one side is "yes", "no" or
            "noanswer" and the other differs, and 0 for two empty texts. False for the score of MuSiQue, which has
            neither rule and gives 1 for two empty texts.
    """
    predicted = normalize_answer(prediction)
    return max((_f1(predicted, normalize_answer(answer), yes_no_rule) for answer in _each(answers)), default=0.0)


def _each(answers: str | Iterable[str]) -> Iterable[str]:
    """Return the answers as a list. A text is one answer, not a list of letters."""
    return [answers] if isinstance(answers, str) else answers


def _f1(predicted: str, gold: str, yes_no_rule: bool) -> float:
    if yes_no_rule and predicted != gold and (predicted in _CLOSED_ANSWERS or gold in _CLOSED_ANSWERS):
        return 0.0
    predicted_tokens, gold_tokens = predicted.split(), gold.split()
    if not predicted_tokens or not gold_tokens:
        return float(not yes_no_rule and predicted_tokens == gold_tokens)
    same = sum((Counter(predicted_tokens) & Counter(gold_tokens)).values())
    # 2PR / (P + R) with P = same / predicted and R = same / gold
    return 2.0 * same / (len(predicted_tokens) + len(gold_tokens))


def find_answers(text: str) -> list[str]:
    """Return the content of each `<answer>...</answer>` of a visible text, in order. Never raises; linear time.

    An answer runs from an opening tag to the next closing tag. Of nested answers the innermost counts, because an
    opening tag starts again. A tag without its partner is text.

    >>> find_answers("<answer>Paris</answer> or <answer>a <answer>Lyon</answer></answer> or <answer>Nice")
    ['Paris', 'Lyon']
    """
    return ANSWER.findall(text)


def format_score(*, answer_ok: bool, calls_ok: bool) -> float:
    """Compute r_format = (a + c) / 2, which is 0, 0.5 or 1.

    Args:
        answer_ok: a, the last turn has exactly one `<answer>`, and it is not empty.
        calls_ok: c, no call of the episode was malformed (also without any call).
    """
    return (answer_ok + calls_ok) / 2


def paper_outcome(score: float, *, answer_ok: bool, calls_ok: bool) -> float:
    """Compute equation 6 of Agent-R1 (arXiv 2511.14460): the score if the format is right, else r_format - 1.

    `score` is the exact match in question answering (0 or 1); other tasks may pass any score from 0 to 1. The
    result is -1 or -0.5 for a wrong format, so a wrong format never pays more than a wrong answer.
    """
    r_format = format_score(answer_ok=answer_ok, calls_ok=calls_ok)
    return float(score) if r_format == 1 else r_format - 1


def shaping_term(gamma: float, before: float, after: float, over: bool) -> float:
    """Compute potential-based shaping, gamma * Phi(s') - Phi(s) (Ng, Harada and Russell 1999).

    `before` is Phi(s) and `after` Phi(s'). `over` is True if the episode ends in s', truncation included: Phi(s') is
    then 0. So the discounted sum over an episode is -Phi of its first state, and the optimal policies stay the same.
    """
    return gamma * (0.0 if over else after) - before + 0.0  # + 0.0 turns -0.0 into 0.0


def process_weights(
    process_reward: bool | Mapping[str, float], defaults: Mapping[str, float] = PROCESS_WEIGHTS
) -> dict[str, float]:
    """Return the weights for the argument `process_reward` of an environment.

    True gives the defaults. False gives no weights: no term is paid or listed. A dict changes some of the defaults.
    Raises ArgumentError for an unknown name, with the known ones, and for a weight that is not a number.
    """
    if isinstance(process_reward, Mapping):
        unknown = sorted(map(str, set(process_reward) - set(defaults)))
        if unknown:
            raise ArgumentError(
                f"no process reward is named {', '.join(map(repr, unknown))}; there are {', '.join(defaults)}"
            )
        return {**defaults, **{name: finite(f"process_reward[{name!r}]", w) for name, w in process_reward.items()}}
    if not isinstance(process_reward, bool):
        raise ArgumentError(f"process_reward must be True, False or a dict of weights, got {process_reward!r}")
    return dict(defaults) if process_reward else {}


def known(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the metrics without those that an episode lacks (None), as loggers of other packages need them."""
    return {name: float(value) for name, value in metrics.items() if value is not None}
