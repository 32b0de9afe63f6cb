"""Digests of what environments show, to compare two versions of the code.

    python benchmarks/environments/episode_digests.py --data DATA --out before.json      # 200 episodes of each
    python benchmarks/environments/episode_digests.py --data DATA --against before.json  # 1 where one differs

An episode's digest is over all that a policy or a learner sees: prompt, spans, states, rewards, flags, infos. Experts
play, and so do others who do much wrong. Some of the episodes are played again in a vector environment, which must show
the same. DATA holds a folder for each data set, as AGENT_R1_DATA does; nothing is downloaded.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import load_env_creator

import agent_r1

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from digest import LeftOut, digest, measure
from machine import from_1

DIALECTS = ("hermes", "react", "fenced", "qwen_xml", "llama3_json")  # with bytes as tokens
KINDS = ("expert", "sloppy", "teacher", "malformed", "unknown", "misfit", "guess", "silent", "turns", "context",
         "together", "answer_and_call", "twice", "many", "unclosed", "torn", "tokens")  # fmt: skip
ROWS = [{"question": f"What is {n} * {n + 3}?", "answer": [f"{n * (n + 3)}", f"{n * (n + 3)}.0"]} for n in range(30)]
ROWS += [{**row, "id": f"r{n}", "system": "Calculate.", "tools": ["calculator"]} for n, row in enumerate(ROWS[:15])]
PASSAGES = [{"title": f"Table {n}", "text": f"{n} times {n + 3} is {n * (n + 3)}."} for n in range(30)]
QA = [{}, {"tools": ["search", "lookup"], "top_k": 2}, {"corpus": "pooled", "process_reward": False}]
ARGUMENTS: dict[str, list[dict[str, Any]]] = {  # of an environment; others have none, and then another world
    "HotpotQA": QA, "2WikiMultihopQA": QA, "MuSiQue": QA, "HumanEval": [{}, {"tools": ["run_tests"]}],
    "GSM8K": [{}, {"tools": ["calculator"], "unfinished_reward": -0.5}], "MATH": [{}, {"tools": ["python"]}],
    "MBPP": [{}, {"shown_tests": 2, "process_reward": {"failed_call": -0.3}}],
    "DeepSearch": [{}, {"world_seed": 7}, {"questions": "hotpotqa"}, {"questions": "musique", "corpus": "pooled"}],
    "ShopWorld": [{}, {"world_seed": 7, "page_size": 2}],
}  # fmt: skip


def guess(schema: dict[str, Any], words: list[str], rng: np.random.Generator) -> Any:
    """A value for an argument, of the type that its schema says, mostly."""
    word = words[int(rng.integers(len(words)))]
    number = int(rng.integers(-2, 9))
    values = {"integer": number, "number": number / 2, "boolean": number > 3, "array": [word], "object": {word: number}}
    return values.get(str(schema.get("type")), (schema.get("enum") or [word])[0])


def write(env: Any, kind: str, number: int, room: int) -> list[np.ndarray]:
    """The spans of one kind of episode for the task at hand."""
    rng, call, end = np.random.default_rng([number, 1]), env.dialect.tool_call, env.dialect.end_of_turn
    expert = list(env.demonstration())
    names, words = list(env.tools), str(env.messages[-1]["content"]).split() or ["x"]
    tool = env.tools[names[number % len(names)]]
    fields = tool.parameters.get("properties", {})
    guesses = [call(tool.name, {name: guess(of, words, rng) for name, of in fields.items()}) for _ in range(5)]
    torn = guesses[0][: int(rng.integers(1, len(guesses[0])))]
    turns = {
        "expert": lambda: expert,
        "sloppy": lambda: env.demonstration(np.random.default_rng(number)),
        "teacher": lambda: env.demonstration(rng, teacher=env.teachers[number % len(env.teachers)]),
        "malformed": lambda: [call(names[0], {"x": 1}).replace("{", "{oops ").replace("x", "x{"), *expert],
        "unknown": lambda: [call("no_such_tool", {"x": [1, None]}), *expert],
        "misfit": lambda: [call(tool.name, {}), call(tool.name, dict.fromkeys(fields, [{}])),
                           call(tool.name, {"no_such_argument": 1}), *expert],
        "guess": lambda: [*guesses, f"<answer>{words[-1]}</answer>"],
        "silent": lambda: ["", "Let me see.", *expert[:1], "<think>Hm.</think>", "<answer></answer>"],
        "turns": lambda: ["Let me see.", *expert, *expert],
        "context": lambda: ["word " * (3_000 if number % 2 else 120) + turn for turn in expert * 3],
        "together": lambda: ["".join(expert[:2]), *expert[2:]],
        "answer_and_call": lambda: [f"<answer>{words[0]}</answer>{expert[0]}", *expert[1:]],
        "twice": lambda: [expert[0] * 2, expert[0], *expert],
        "many": lambda: [guesses[0] * 3 + guesses[1] * 9, *expert],
        "unclosed": lambda: [f"So: {expert[0]}", *expert[1:]],
        "torn": lambda: [torn, guesses[0][len(torn) :], f"{torn}\0{guesses[0]}", *expert],
    }  # fmt: skip
    try:
        texts = [f"{turn}{end}" for turn in turns[kind]()] if kind != "tokens" else []
    except (ValueError, ZeroDivisionError):  # nobody here errs: an expert who forgets a turn
        texts = [f"{turn}{end}" for turn in expert[1:]]
    if kind == "unclosed":
        texts[0] = texts[0].removesuffix(end)
    texts += [f"<answer>{words[0]}</answer>{end}", f"I do not know.{end}"]
    spans = [np.array(env.tokenizer.encode(text, add_special_tokens=False), np.int32) for text in texts]
    if kind == "tokens":
        spans = [rng.integers(len(env.tokenizer), size=rng.integers(60), dtype=np.int32) for _ in range(4)] + spans
    return [span[:room] if kind == "context" and number % 3 else span for span in spans]


def play(env: Any, kind: str, number: int) -> dict[str, Any]:
    """An episode: its digest, that of what else is to be seen, and what it takes to play it again.

    The seed draws every second task; the others are named.
    """
    task = int(np.random.default_rng(number).integers(env.unwrapped.num_tasks)) if number % 2 else None
    options = {"task_index": task, "max_turns": 1 + number % 3 if kind == "turns" else None}
    state, info = env.reset(seed=number, options=options)
    shown, besides = [state], [info, env.unwrapped.messages, env.unwrapped.instructions]
    spans: list[np.ndarray] = []
    for span in write(env.unwrapped, kind, number, info["max_new_tokens"]):
        spans.append(span)
        shown.append([span, *env.step(span)])
        if shown[-1][3] or shown[-1][4]:  # terminated, truncated
            break
        with suppress(NotImplementedError):
            besides.append(env.unwrapped.candidates())
    besides.append(env.unwrapped.messages)
    return {"seed": number, "options": options, "spans": spans, "digest": digest(shown), "besides": digest(besides)}


def play_together(env_id: str, arguments: dict[str, Any], episodes: list[dict[str, Any]]) -> list[str]:
    """Digests of the same episodes, played at the same time."""
    envs: Any = gym.make_vec(env_id, num_envs=len(episodes), **arguments)
    options = {name: [one["options"][name] for one in episodes] for name in ("task_index", "max_turns")}
    states, _ = envs.reset(seed=[one["seed"] for one in episodes], options=options)
    shown = [[state] for state in states]
    left = {i: list(one["spans"]) for i, one in enumerate(episodes)}
    while left := {i: spans for i, spans in left.items() if spans}:
        now = {i: spans.pop(0) for i, spans in left.items()}
        envs.send(list(now.values()), list(now))
        for i, *seen in zip(*envs.recv(len(now)), strict=True):
            shown[i].append([now[i], *seen])
    envs.close()
    return [digest(one) for one in shown]


def places(env_id: str, data: str | None, folder: Path) -> list[dict[str, Any]]:
    """Arguments of an environment: its own, every split and every dialect, as far as they can be made here."""
    made: Any = load_env_creator(gym.spec(env_id).entry_point)
    name = env_id.removeprefix("AgentR1/").removesuffix("-v0")
    worlds = [{}, {"world_seed": 7}] if env_id in agent_r1.generated_worlds() else [{}]
    given = [{"data": str(folder / "rows.jsonl"), "tools": ["calculator", "search"], "reward": reward,
              "corpus": str(folder / "passages.jsonl")} for reward in ("exact_match", "f1", "math")]  # fmt: skip
    tokenizers: list[Any] = [{"dialect": dialect} for dialect in DIALECTS]
    try:
        tokenizers += [{"tokenizer": agent_r1.tiny_policy(env_id)}]
    except ValueError:  # there is none for this environment
        pass
    others = sorted(Path(data, "tokenizers").glob("*/tokenizer.json")) if data else []
    tokenizers += [{"tokenizer": str(path.parent)} for path in others]
    found, reasons = [], []
    variants = given if name == "Rows" else ARGUMENTS.get(name, worlds)
    for split, arguments in itertools.product(dict.fromkeys(made.splits.values()), variants):
        try:
            gym.make(env_id, split=split, **arguments).close()
            found += [{"split": split, **arguments, **tokenizer} for tokenizer in tokenizers]
        except (OSError, ImportError, ValueError, RuntimeError) as error:
            reasons.append(f"{type(error).__name__}: {error}".splitlines()[0][:120])
    if not found:
        raise LeftOut(reasons[0])
    return found


def digest_episodes(env_id: str, count: int, data: str | None, folder: Path) -> dict[str, Any]:
    """Play so many episodes of an environment, each kind in turn, in places that are drawn."""
    where, envs = places(env_id, data, folder), {}
    first: Any = gym.make(env_id, **where[0]).unwrapped
    told = [len(where), dict(first.splits), first.teachers, first.vocabulary(), first.max_turns]
    episodes: dict[str, list[dict[str, Any]]] = {}
    for number in range(count):
        kind, place = KINDS[number % len(KINDS)], where[int(np.random.default_rng(number).integers(len(where)))]
        arguments = {**place, "max_context_tokens": 2_000} if kind == "context" else place
        if (key := json.dumps(arguments)) not in envs:
            envs[key], episodes[key] = gym.make(env_id, **arguments), []
            env: Any = envs[key].unwrapped
            told += [env.num_tasks, [tool.schema for tool in env.tools.values()]]
        episodes[key].append(play(envs[key], kind, number))
    for env in envs.values():
        env.close()
    differ: list[int] = []
    for key in sorted(envs, key=lambda key: -len(episodes[key]))[: max(1, count // 16)]:
        some = (episodes[key] * 4)[:4]
        again = play_together(env_id, json.loads(key), some)
        differ += [one["seed"] for one, other in zip(some, again, strict=True) if one["digest"] != other]
    if differ:
        print(f"{env_id}: a vector environment plays episodes {differ} otherwise", flush=True)
    played = sorted((one for some in episodes.values() for one in some), key=lambda one: one["seed"])
    names = [f"{one['seed']} {KINDS[one['seed'] % len(KINDS)]}" for one in played]
    parts = {name: digest([one["digest"], one["besides"]]) for name, one in zip(names, played, strict=True)}
    return {"count": count, "digest": digest([told, parts]), "vector": differ, "parts": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ids = list(agent_r1.ENVIRONMENTS)
    parser.add_argument("--names", nargs="+", choices=ids, default=ids, metavar="NAME", help="those to digest")
    parser.add_argument("--out", type=Path, help="a file for the digests, as JSON")
    parser.add_argument("--against", type=Path, help="such a file of another version: what differs?")
    parser.add_argument("--data", default=os.environ.get("AGENT_R1_DATA"), help="the data sets")
    parser.add_argument("--episodes", type=from_1, default=200, help="of each environment")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ |= {"AGENT_R1_DATA": args.data} if args.data else {}
    with tempfile.TemporaryDirectory() as folder:
        for name, content in (("rows", ROWS), ("passages", PASSAGES)):
            Path(folder, f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in content))
        take = partial(digest_episodes, count=args.episodes, data=args.data, folder=Path(folder))
        sys.exit(measure(take, args, "episodes") > 0)


if __name__ == "__main__":
    main()
