"""Warnings about a run that learns nothing, or soon will not.

They depend on the logged figures of an iteration and on a small state, which is part of the checkpoints. A warning is
given once in a run, also if the run is resumed. A false alarm is worse than silence: in doubt there is no warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A gradient of this norm is rounding: the gradients of runs that learn have norms from 0.01 to 1.
NO_GRADIENT = 1e-9
# Iterations without a success until the first warning. It also waits until returns no longer rise: a policy that is
# paid for something else first, such as the format, still learns.
PATIENCE = 10
# Entropy in nats per token. The shipped policies begin at 0.06 and end at 0.01 when they solve 95 % of their tasks.
# Chat models begin at 0.2 to 0.6. Below both limits the episodes of a task are nearly equal; if the policy solves its
# tasks, that is convergence.
ENTROPY_SHARE, ENTROPY, SOLVED = 0.1, 0.005, 0.9
# Mean distance of a token's log-probability between sampler and trainer. Recorded runs have at most 0.013, in bfloat16
# through vLLM. Other weights or another template give more than 0.5.
GAP = 0.1

LOOK = "look at failures with `{show} --failed`"


def of_iteration(figures: Mapping[str, float], state: dict[str, Any], args: Any, show: str) -> dict[str, str]:
    """Return the new warnings of an iteration by name, and update `state`, a dict that is empty at the start.

    `figures` are the logged scalars by name, `show` the command that prints the run's episodes ("" if none are
    recorded). A warning has two lines: the fact, then the remedy.
    """
    found: dict[str, str] = {}
    state["iterations"] = number = state.get("iterations", 0) + 1
    success, mean_return = figures.get("charts/success"), figures.get("charts/episodic_return")
    if success is None or mean_return is None:
        return {}  # infrastructure errors only

    state["updated"] = state.get("updated", False) or figures.get("losses/grad_norm", 0.0) > NO_GRADIENT
    if not _has_signal(figures, args):
        kind = "solved" if success == 1 else "silent"
        state[kind] = state.get(kind, 0) + 1
        if kind == "silent":
            means = f"(return {mean_return:.2f}, success {success:.2f})"
            who = "the episodes of each group" if _in_groups(args) else "all episodes"
            fact = f"{who} have equal returns {means}, so there is nothing to learn from"
            found["signal"] = f"{fact}\n{_remedy(args, show)}"

    state["success"] = state.get("success", False) or success > 0
    returns = [*state.get("returns", []), mean_return]
    state["returns"] = returns = returns[: PATIENCE // 2] + returns[PATIENCE // 2 :][-PATIENCE // 2 :]
    half = PATIENCE // 2
    if number >= PATIENCE and not state["success"] and sum(returns[-half:]) <= sum(returns[:half]):
        fact = f"no episode succeeded in {number} iterations, and the mean return does not rise"
        found["success"] = f"{fact}\n{_advice(show, 'begin with sft_llm.py, or with easier tasks')}"

    if (entropy := figures.get("losses/entropy")) is not None:
        first = state.setdefault("entropy", entropy)
        low = entropy < min(ENTROPY, ENTROPY_SHARE * first) and success < SOLVED
        state["low_entropy"] = state.get("low_entropy", 0) + 1 if low else 0
        if state["low_entropy"] == 3:
            fact = f"the entropy fell from {first:.2g} to {entropy:.2g}: the episodes of a task are nearly equal"
            found["entropy"] = f"{fact}\nlower --learning-rate, or pay for entropy with --ent-coef 0.01"

    gap = figures.get("sampler/gap_mean", 0.0)
    if gap > GAP and not args.max_staleness and args.top_p == 1:  # these two cause gaps by themselves
        fact = f"sampler and trainer differ by {gap:.2g} in a token's log-probability (mean; usual is below {GAP})"
        cause = "serve the model that is trained" if args.engine == "vllm-server" else "use --dtype float32"
        found["gap"] = f"{fact}\n{cause}, or leave out episodes that are far off: --reject-ratio 1.1"

    shortened = "charts/horizon" in figures or getattr(args, "truncation", "outcome") == "bootstrap"
    if figures.get("charts/truncated") == 1 and success == 0 and not shortened:
        fact = "every episode ran out of turns or context before an answer"
        found["truncated"] = f"{fact}\n{_advice(show, 'raise max_turns or max_context_tokens in --env-kwargs')}"

    given = state.setdefault("given", [])
    new = {name: text for name, text in found.items() if name not in given}
    given += new
    return {name: f"warning: iteration {number}: {text.replace(chr(10), chr(10) + '  ')}" for name, text in new.items()}


def at_end(state: Mapping[str, Any], args: Any, show: str) -> str | None:
    """Return the warning at the end of a run if most of its iterations had no signal, else None."""
    number, silent, solved = state.get("iterations", 0), state.get("silent", 0), state.get("solved", 0)
    if number and solved + silent == number and solved > silent:
        fact = f"every episode succeeded in {solved} of {number} iterations: nothing was left to learn"
        return f"warning: {fact}\n  use harder tasks, or draw them with --sample-by-pass-rate"
    if 2 * silent <= number:
        return None
    had = "no group had a signal" if _in_groups(args) else "all returns were equal"
    rest = ""
    if silent == number:
        rest = ": the rewards taught nothing" if state.get("updated") else ": nothing was trained"
    return f"warning: {had} in {silent} of {number} iterations{rest}\n  {_remedy(args, show)}"


def _has_signal(figures: Mapping[str, float], args: Any) -> bool:
    """Return False if the rewards of this iteration say nothing about the policy."""
    if "losses/policy_loss" in figures and figures.get("losses/grad_norm", 1.0) < NO_GRADIENT:
        return False  # the policy was updated with nothing
    if "charts/groups_with_signal" in figures:  # of the first batch; further ones may have some
        return figures["charts/groups_with_signal"] > 0 or getattr(args, "dynamic_sampling", 0) > 0
    discounts = getattr(args, "gamma", 1.0), getattr(args, "gamma_turn", 1.0)  # equal returns at different times
    return figures.get("charts/return_std", 1.0) > 1e-6 or discounts != (1.0, 1.0)


def _in_groups(args: Any) -> bool:
    return hasattr(args, "group_size") and getattr(args, "baseline", True)


def _remedy(args: Any, show: str) -> str:
    groups = "use a larger --group-size or " if _in_groups(args) else "use "
    return _advice(show, f"begin with sft_llm.py; {groups}a higher --temperature")


def _advice(show: str, advice: str) -> str:
    return f"{LOOK.format(show=show)}; {advice}" if show else advice
