"""Checks that every environment must pass, for `python -m agent_r1.validate`: a check is a line of `CHECKS`."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import gymnasium as gym
import numpy as np

from agent_r1.baselines import UnwrittenError, baselines_of
from agent_r1.ids import HELD_OUT
from agent_r1.tasks.draw import pick
from agent_r1.tool_env import ToolEnv
from agent_r1.validation import probes
from agent_r1.validation.probes import Probe, play
from agent_r1_tools import Tool, ToolResult

CONTEXT = 1 << 20  # tokens, for checks with long episodes
FARMED_TURNS = 200
HELD_OUT_TASKS, TRAIN_TASKS = 20, 500  # compared: the first of a held-out split, the first and the last of train
TRAIN_SECONDS = 20.0  # time limit for making these tasks
MARK = "QXhereXQ"


@dataclass
class Subject:
    """The subject of a check: an id, its arguments, and the number of tasks to run."""

    env_id: str
    kwargs: dict[str, Any]
    num_tasks: int

    def make(self, **kwargs: Any) -> Any:
        """Make the environment without gymnasium's wrappers, which would repeat checks."""
        return gym.make(self.env_id, disable_env_checker=True, **self.kwargs | kwargs).unwrapped

    def tasks(self, env: ToolEnv, maximum: int) -> list[int]:
        """Return indexes of tasks, spread over the split."""
        count = min(self.num_tasks, maximum, env.num_tasks)
        return [int(i) for i in np.linspace(0, env.num_tasks - 1, count)]


class Failed(Exception):
    """A failed check; the text names the problem and its place."""


def has_expert(subject: Subject, env: Any) -> bool:
    """Return whether the environment has a demonstration of its first task."""
    env.reset(seed=0, options={"task_index": 0})
    try:
        baselines_of(env).demonstration()
    except (ValueError, NotImplementedError):
        return False
    return True


def gymnasium_check(subject: Subject) -> None:
    """Run Gymnasium's own check."""
    from gymnasium.utils.env_checker import check_env

    env = subject.make()
    check_env(env, skip_render_check=True)
    env.close()


def farming(subject: Subject) -> None:
    """Check that 200 turns of repeated calls earn at most the process terms of the expert (without one: 1)."""
    env = subject.make(max_context_tokens=CONTEXT)
    expert = has_expert(subject, env)
    for index in subject.tasks(env, 2):
        bound = 1.0
        calls: list[str] = []
        if expert:
            bound = max(0.0, play(env, index, probes.expert).process)
            calls = [text for text in env.demonstration() if "<answer>" not in text][:3]
        env.reset(seed=0, options={"task_index": index})
        rng = np.random.default_rng(index)
        calls += [probes.random_call(env, rng, name) for name in list(env.tools)[:4]]
        for cycle in filter(None, [*([call] for call in calls), calls[:2], calls, [probes.NOTHING]]):
            episode = play(env, index, probes.repeated(cycle), max_turns=FARMED_TURNS)
            if episode.process > bound + 1e-6:
                earned = f"{FARMED_TURNS} turns of {cycle} earn {episode.process:.3f}"
                raise Failed(f"task {index}: {earned} in process terms, more than the limit of {bound:.3f}")
    env.close()


def injection(subject: Subject) -> None:
    """Check that special tokens, roles, calls and answers in a question or a tool result stay text.

    The calls are random ones, which may all fail, and those of the expert.
    """
    env = subject.make(max_context_tokens=CONTEXT)
    first = subject.tasks(env, 1)[0]
    known = list(env.demonstration())[:3] if has_expert(subject, env) else []
    seen: dict[str, Any] = {}
    calls: list[str] = []
    for text in ("harmless", probes.hostile_text(env)):
        _put_into_questions(env, f"{MARK} {text}")
        state, _ = env.reset(seed=0, options={"task_index": first, "max_turns": FARMED_TURNS})
        results = [_put_into_results(tool, f"{MARK} {text}") for tool in env.tools.values()]  # of this episode
        if MARK not in env.messages[1]["content"]:
            raise Failed("the text that was added to questions is missing in the conversation")
        specials: list[Any] = [_specials(env, state)]
        rng = np.random.default_rng(0)
        calls = calls or [*(probes.random_call(env, rng, name) for name in env.tools), *known]
        for call in calls:
            state, _, terminated, truncated, info = env.step(probes.span(env, call))
            if terminated or truncated:
                break
            records = info["tool_calls"]
            for record, message in zip(records, env.messages[-len(records) :], strict=False):
                if record["ok"] and MARK not in message["content"]:  # the text of a failed call is not a tool result
                    raise Failed("the text that was added to tool results is missing in the conversation")
            specials.append((_specials(env, state), [record["name"] for record in records]))
        seen[text] = (specials, env.episode.over)
        for undo in results:
            undo()
    harmless, injected = seen.values()
    if harmless != injected:
        raise Failed("control tokens and calls in a question or a tool result change the state, or the calls made")
    env.close()


def _put_into_questions(env: Any, text: str) -> None:
    make_task = type(env).make_task

    def with_text(self: Any, index: int) -> Any:
        task = make_task(self, index)
        return replace(task, question=f"{task.question} {text}")

    env.make_task = MethodType(with_text, env)


def _put_into_results(tool: Tool, text: str) -> Callable[[], None]:
    """Put a text before every result of a tool. Return a function that undoes this."""
    execute, batch_execute = tool.execute, tool.batch_execute

    def marked(result: ToolResult) -> ToolResult:
        return replace(result, content=f"{text} {result.content}")

    changed: Any = tool
    changed.execute = lambda arguments: marked(execute(arguments))
    changed.batch_execute = lambda batch: [marked(result) for result in batch_execute(batch)]

    def undo() -> None:
        del changed.execute, changed.batch_execute

    return undo


def _specials(env: ToolEnv, state: Any) -> list[int]:
    from agent_r1.text.tokenizers import control_tokens

    special = set(control_tokens(env.tokenizer).values())
    return [token for token in state.tolist() if token in special]


def splits_differ(subject: Subject) -> None:
    """Check that at most half of the first held-out tasks are among the first and last of train, under other ids."""
    with closing(subject.make()) as env:
        kwargs = {name: value for name, value in subject.kwargs.items() if name != "split"}
        names = [name for name in ("train", *HELD_OUT) if name in env.splits and env.has_split(name, **kwargs)]
        splits = list({env.splits[name]: name for name in reversed(names)}.values())[::-1]  # the first of two names
    if splits[:1] != ["train"] or len(splits) == 1:
        return
    train: set[str] = set()
    with closing(subject.make(split="train")) as env:
        until = time.monotonic() + TRAIN_SECONDS  # some bridges start a game to make its task
        for number in range(min(TRAIN_TASKS, env.num_tasks)):
            train |= {_content(env, number), _content(env, env.num_tasks - 1 - number)}
            if number >= HELD_OUT_TASKS and time.monotonic() > until:
                break
    for split in splits[1:]:
        with closing(subject.make(split=split)) as env:
            count = min(HELD_OUT_TASKS, env.num_tasks)
            shared = sum(_content(env, number) in train for number in range(count))
        if shared > count / 2:
            raise Failed(
                f"{shared} of the first {count} tasks of {split} are also tasks of train: make_task(index) must depend "
                "on self.split, too"
            )


def _content(env: ToolEnv, index: int) -> str:
    """Describe a task without its id. Arrays are written in full: numpy shortens those of over 1,000 elements."""
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        return repr(replace(env.make_task(index), id=""))


def determinism(subject: Subject) -> None:
    """Check that episodes are equal in another process, with another hash seed, time zone, clock and random state."""
    words = ["--digest", "--tasks", str(subject.num_tasks), "--env-kwargs", json.dumps(subject.kwargs)]
    here = digest(subject)
    for hash_seed, zone in (("1", "UTC"), ("2", "Asia/Tokyo")):
        child = subprocess.run(
            [sys.executable, "-m", "agent_r1.validate", subject.env_id, *words],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "TZ": zone, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        if child.returncode:
            raise Failed(f"a child process failed: {child.stderr.strip().splitlines()[-1:]}")
        if here not in child.stdout:  # a module may print when it is imported
            raise Failed(
                "episodes differ in another process with another hash seed, time zone, clock and global random state; "
                "draw from self.np_random"
            )


def digest(subject: Subject) -> str:
    """Compute a digest over a few episodes: states, rewards, infos."""
    env, hasher = subject.make(), hashlib.sha256()
    for index in subject.tasks(env, 5):
        for probe in _players(subject, env):
            episode = play(env, index, probe, seed=3)
            hasher.update(json.dumps([episode.states, episode.rewards, episode.infos], sort_keys=True).encode())
    env.close()
    return hasher.hexdigest()


def digest_elsewhere(subject: Subject) -> str:
    """Compute `digest` with another clock and other global random states."""
    random.seed(9)
    np.random.seed(9)
    now, later = time.time, 10 * 365 * 86_400.0
    time.time = lambda: now() + later
    return digest(subject)


def _players(subject: Subject, env: Any) -> list[Probe]:
    return [probes.random, *([probes.expert] if has_expert(subject, env) else [])]


def snapshots(subject: Subject) -> None:
    """Check that an episode restored from a pickled snapshot continues as if uninterrupted, in another environment."""
    env, other = subject.make(), subject.make()
    for index in subject.tasks(env, 2):
        for probe in _players(subject, env):
            texts: list[str] = []
            whole = play(env, index, _noting(probe, texts))
            for cut in range(len(texts)):
                play(env, index, _saying(texts[:cut]))
                other.set_state(pickle.loads(pickle.dumps(env.get_state())))
                for turn, text in enumerate(texts[cut:], cut + 1):
                    state, reward, _, _, info = other.step(probes.span(other, text))
                    restored = {"reward": reward} | info | {"state": state.tolist()}
                    expected = {"reward": whole.rewards[turn - 1]} | whole.infos[turn] | {"state": whole.states[turn]}
                    if restored != expected:
                        key = next(name for name in expected | restored if expected.get(name) != restored.get(name))
                        raise Failed(
                            f"task {index}: restoring the snapshot taken after turn {cut} changes the episode: `{key}` "
                            f"in turn {turn} is {restored.get(key)!r:.100}, expected {expected.get(key)!r:.100}. Keep "
                            "episode state in self.memory, or give the tool get_state and set_state."
                        )
    env.close()
    other.close()


def _noting(probe: Probe, texts: list[str]) -> Probe:
    def noted(env: Any, rng: np.random.Generator) -> Any:
        for text in probe(env, rng):
            texts.append(text)
            yield text

    return noted


def _saying(texts: list[str]) -> Probe:
    return lambda env, rng: texts


def demonstrations(subject: Subject) -> None:
    """Check that the expert shows every task, or none. What is written down for a task must always be shown."""
    env = subject.make()
    tasks = subject.tasks(env, subject.num_tasks)
    unwritten: list[str] = []
    without: list[str] = []
    for index in tasks:
        env.reset(seed=0, options={"task_index": index})
        try:
            list(probes.expert(env, np.random.default_rng(index)))
        except NotImplementedError:
            break
        except ValueError as error:
            (unwritten if isinstance(error, UnwrittenError) else without).append(str(error))
    if unwritten or 0 < len(without) < len(tasks):
        count = len(unwritten) + len(without)
        reason = f"such as: {[*unwritten, *without][0]}"
        raise Failed(f"demonstration() raises ValueError in {count} of {len(tasks)} tasks, {reason}")
    env.close()


def careless(subject: Subject) -> None:
    """Check that `demonstration(rng)` works in every task, or raises ValueError in all, for lack of a demonstrator."""
    env = subject.make()
    tasks, errors = subject.tasks(env, 20), 0
    for index in tasks:
        try:
            play(env, index, probes.careless)
        except NotImplementedError:
            break
        except ValueError:
            errors += 1
        except Exception as error:
            raise Failed(f"task {index}: demonstration(rng): {type(error).__name__}: {error}") from error
    if 0 < errors < len(tasks):
        raise Failed(f"demonstration(rng) raises ValueError in {errors} of {len(tasks)} tasks, which ends sft_llm.py")
    env.close()


def global_state(subject: Subject) -> None:
    """Check that Python's and numpy's global random states are not changed (`determinism` checks reads)."""
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), pickle.dumps(np.random.get_state())
    digest(subject)
    if before != (random.getstate(), pickle.dumps(np.random.get_state())):
        raise Failed("an episode changes the global random state; draw from self.np_random or your own Generator")


def broken_spans(subject: Subject) -> None:
    """Check that broken spans raise nothing, and that the state grows by the span.

    The spans are calls with wrong arguments, random tokens, torn and doubled calls, and deep brackets.
    """
    env = subject.make()
    rng = np.random.default_rng(0)
    tasks = list(subject.tasks(env, 10))
    env.reset(seed=0, options={"task_index": tasks[0]})
    misfits = [text for name in list(env.tools)[:20] for text in probes.misfits(env, name)]
    while misfits:
        state, _ = env.reset(seed=0, options={"task_index": tasks[0]})
        over = False
        while misfits and not over:
            state, over = _write(env, tasks[0], state, probes.span(env, misfits.pop()))
    for index in tasks:
        state, _ = env.reset(seed=0, options={"task_index": index})
        over = False
        while not over:
            call = probes.random_call(env, rng) if env.tools else "x"
            cut = int(rng.integers(len(call) + 1))
            torn = (call[:cut], call[cut:], call[:cut] + "\ud800\0" + call[cut:])
            texts = (*torn, call * 2, call * 9, "[" * 5_000, "{" * 900)
            span = probes.span(env, pick(rng, texts))
            if rng.random() < 0.2:
                span = rng.integers(env.action_space.vocab_size, size=int(rng.integers(1, 60)), dtype=np.int32)
            state, over = _write(env, index, state, span)
    env.close()


def _write(env: Any, index: int, before: Any, span: Any) -> tuple[Any, bool]:
    """Step with a span. Return the new state, and whether the episode is over."""
    state, _, terminated, truncated, info = env.step(span)
    accepted = min(len(span), len(state) - len(before))
    if not np.array_equal(state[: len(before) + accepted], np.concatenate([before, span[:accepted]])):
        raise Failed(f"task {index}: the new state does not begin with the old state and the span")
    json.dumps([info, env.messages], allow_nan=False)
    return state, terminated or truncated


CHECKS: dict[str, Callable[[Subject], None]] = {
    "gymnasium": gymnasium_check,
    "farming": farming,
    "injection": injection,
    "splits": splits_differ,
    "determinism": determinism,
    "snapshot": snapshots,
    "demonstrations": demonstrations,
    "careless": careless,
    "global state": global_state,
    "broken spans": broken_spans,
}
