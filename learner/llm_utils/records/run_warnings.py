"""Warnings about a run that learns nothing, or soon will not.

They depend on the logged figures of an iteration and on a small state, which is part of the checkpoints. A warning is
given once in a run, also if the run is resumed. A false alarm is worse than silence: in doubt there is no warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llm_utils.setup.curriculum import stages

# A gradient of this norm is rounding: the gradients of runs that learn have norms from 0.01 to 1.
NO_GRADIENT = 1e-9
# An episode's part in the gradient is its advantage. Equal returns give rounding, at most 1e-10.
NO_ADVANTAGE = 1e-6
# A critic knows the returns of earlier batches, so equal returns of one batch still teach PPO. It learns nothing from
# the same return in this many iterations and episodes in a row.
SAME_ITERATIONS, SAME_EPISODES = 3, 100
# Iterations without a success until the warning. It gives the mean returns: a policy that is paid for something else
# first, such as the format, may still learn.
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

    `figures` are the logged scalars by name, and two more: `batch/valid`, the number of episodes without an
    infrastructure error, and `batch/advantage`, the largest absolute advantage of a trained token. `show` is the
    command that prints the run's episodes ("" if none are recorded). A warning has two lines: the fact, then the
    remedy.
    """
    found: dict[str, str] = {}
    state["iterations"] = number = state.get("iterations", 0) + 1
    success, mean_return = figures.get("charts/success"), figures.get("charts/episodic_return")
    if success is None or mean_return is None:
        return {}  # infrastructure errors only

    only_critic = number <= getattr(args, "critic_warmup", 0) or getattr(args, "critic_only", False)
    if figures["batch/valid"] > 1 and not only_critic:
        found |= _without_signal(figures, state, args, show)

    state["success"] = state.get("success", False) or success > 0
    if not state["success"] and not _shortened(number, args):
        state["failing"] = state.get("failing", 0) + 1
        first_return = state.setdefault("first_return", mean_return)
        if state["failing"] == PATIENCE:
            means = f"(mean return {first_return:.2f} at first, now {mean_return:.2f})"
            fact = f"no episode succeeded in {PATIENCE} iterations {means}"
            found["success"] = f"{fact}\n{_advice(show, 'begin with sft_llm.py, or with easier tasks')}"

    if (entropy := figures.get("losses/entropy")) is not None:
        first = state.setdefault("entropy", entropy)
        low = entropy < min(ENTROPY, ENTROPY_SHARE * first) and success < SOLVED
        state["low_entropy"] = state.get("low_entropy", 0) + 1 if low else 0
        if state["low_entropy"] == 3:
            fact = f"the entropy fell from {first:.2g} to {entropy:.2g}: the episodes of a task are nearly equal"
            found["entropy"] = f"{fact}\nlower --learning-rate, or pay for entropy with --ent-coef 0.01"

    gap = figures.get("sampler/gap_mean", 0.0)
    causes_itself = args.max_staleness or args.top_p < 1
    if gap > GAP and not causes_itself and "untrained" not in found:
        fact = f"sampler and trainer differ by {gap:.2g} in a token's log-probability (mean; usual is below {GAP})"
        found["gap"] = f"{fact}\n{_same_model(args)}, or leave out episodes that are far off: --reject-ratio 1.1"

    shortened = "charts/horizon" in figures or getattr(args, "truncation", "outcome") == "bootstrap"
    if figures.get("charts/truncated") == 1 and success == 0 and _all_equal(figures) and not shortened:
        fact = "every episode ran out of turns or context before an answer"
        found["truncated"] = f"{fact}\n{_advice(show, 'raise max_turns or max_context_tokens in --env-kwargs')}"

    given = state.setdefault("given", [])
    new = {name: text for name, text in found.items() if name not in given}
    given += new
    return {name: f"warning: iteration {number}: {text.replace(chr(10), chr(10) + '  ')}" for name, text in new.items()}


def _without_signal(figures: Mapping[str, float], state: dict[str, Any], args: Any, show: str) -> dict[str, str]:
    """Count an iteration that may update the policy. Return a warning if nothing was trained, or without a signal."""
    state["judged"] = state.get("judged", 0) + 1
    if "losses/policy_loss" not in figures or figures.get("charts/rejected") == 1:
        state["untrained"] = state.get("untrained", 0) + 1
        fact, remedy = _untrained(args)
        return {"untrained": f"{fact}\n{_advice(show, remedy)}"}
    state["updated"] = state.get("updated", False) or figures.get("losses/grad_norm", 0.0) > NO_GRADIENT
    success, mean_return = figures["charts/success"], figures["charts/episodic_return"]
    without = 1
    if hasattr(args, "critic_warmup"):
        without = _same_returns(figures, state, args)
    elif _has_signal(figures, args):
        without = 0
    if not without:
        return {}
    kind = "solved" if success == 1 else "silent"
    state[kind] = state.get(kind, 0) + without
    if kind == "solved":
        return {}
    means = f"(return {mean_return:.2f}, success {success:.2f})"
    who = "the episodes of each group" if _in_groups(args) else "all episodes"
    fact = f"{who} have equal returns {means}, so there is nothing to learn from"
    return {"signal": f"{fact}\n{_remedy(args, show)}"}


def _has_signal(figures: Mapping[str, float], args: Any) -> bool:
    """Return False if the rewards of this iteration say nothing about the policy of a learner without a critic."""
    if figures.get("losses/grad_norm", 1.0) < NO_GRADIENT or figures["batch/advantage"] < NO_ADVANTAGE:
        return False
    # of the first batch; further ones may have some. With --kl-in reward, advantages have the KL divergence as well.
    return figures.get("charts/groups_with_signal", 1.0) > 0 or getattr(args, "dynamic_sampling", 0) > 0


def _same_returns(figures: Mapping[str, float], state: dict[str, Any], args: Any) -> int:
    """Return the number of iterations that are now known to have taught PPO nothing: 0, 1, or more at once."""
    if figures.get("losses/grad_norm", 1.0) < NO_GRADIENT:
        state["same"] = [0, 0, 0.0]
        return 1
    mean_return = figures["charts/episodic_return"]
    equal_in_time = (args.gamma, args.gamma_turn) == (1.0, 1.0) or mean_return == 0  # else early returns differ
    iterations, episodes, value = state.get("same", [0, 0, 0.0])
    if not _all_equal(figures) or not equal_in_time:
        iterations = episodes = 0
    elif iterations and abs(value - mean_return) < 1e-6:
        iterations, episodes = iterations + 1, episodes + int(figures["batch/valid"])
    else:
        iterations, episodes = 1, int(figures["batch/valid"])
    known = state.get("same_known", False) and iterations > 1
    state["same"] = [iterations, episodes, mean_return]
    state["same_known"] = iterations >= SAME_ITERATIONS and episodes >= SAME_EPISODES
    return (1 if known else iterations) if state["same_known"] else 0


def _shortened(number: int, args: Any) -> bool:
    """Return True if the episodes of iteration `number` are shorter than those of --horizon-schedule's last stage."""
    schedule = getattr(args, "horizon_schedule", None)
    return schedule is not None and (number - 1) // args.horizon_every < len(stages(schedule)) - 1


def _all_equal(figures: Mapping[str, float]) -> bool:
    return figures["batch/valid"] > 1 and figures.get("charts/return_std", 1.0) < 1e-6


def _untrained(args: Any) -> tuple[str, str]:
    """Return the fact that nothing was trained, and the remedy."""
    if getattr(args, "reject_ratio", 0):
        fact = f"--reject-ratio {args.reject_ratio:g} dropped every episode, so nothing was trained"
        return fact, f"use a larger one, or {_same_model(args)}"
    if getattr(args, "drop_void_turns", False):
        fact = "--drop-void-turns left no episode to train on, so nothing was trained"
        return fact, "begin with sft_llm.py, so that turns have a call or an answer"
    return "no episode has a token to train on, so nothing was trained", "raise max_context_tokens in --env-kwargs"


def _same_model(args: Any) -> str:
    return "serve the model that is trained" if args.engine == "vllm-server" else "use --dtype float32"


def at_end(state: Mapping[str, Any], args: Any, show: str) -> str | None:
    """Return the warning at the end of a run if most iterations that train the policy had no signal, else None."""
    number, silent, solved = state.get("judged", 0), state.get("silent", 0), state.get("solved", 0)
    if 2 * (untrained := state.get("untrained", 0)) > number:
        fact, remedy = _untrained(args)
        return f"warning: in {untrained} of {number} iterations {fact}\n  {remedy}"
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


def _in_groups(args: Any) -> bool:
    return hasattr(args, "group_size") and getattr(args, "baseline", True)


def _remedy(args: Any, show: str) -> str:
    groups = "use a larger --group-size or " if _in_groups(args) else "use "
    return _advice(show, f"begin with sft_llm.py; {groups}a higher --temperature")


def _advice(show: str, advice: str) -> str:
    return f"{LOOK.format(show=show)}; {advice}" if show else advice
