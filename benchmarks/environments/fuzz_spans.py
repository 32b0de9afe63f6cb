"""Throw spans at environments and parsers that no decent policy would write, and measure what they cost.

    python benchmarks/environments/fuzz_spans.py                    # 200,000 spans
    python benchmarks/environments/fuzz_spans.py --spans 5000 --seed 7 --dialects react
    python benchmarks/environments/fuzz_spans.py --spans 100000 \
        --ids CraftWorld ShopWorld SQLWorld PharmaSim DeepSearch Terminal \
        --name fuzz_worlds

Every span goes through `parse` of every dialect and through `env.step` of one environment, in turn: a box of tools with
strict arguments and every id, those that read data on made-up questions, in each dialect over the byte tokenizer.
`check_step` then looks at what came back. Span number i is a function of (seed, i) and, where it calls an environment's
own tools, of its episode so far: the same command repeats what was reported. Writes benchmarks/results/NAME.json, .md.

The generators (`SpanMaker`) and the checks (`check_step`) also serve tests/.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

import agent_r1
from agent_r1.dialects import DIALECTS, Dialect, get_dialect
from agent_r1.tasks.draw import pick
from agent_r1.text.tokenizers import added_tokens, load_tokenizer
from agent_r1.validation.probes import random_call
from agent_r1_tools import Tool
from agent_r1_tools.python import SandboxError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "common"))
from made_up_data import write_made_up_data

Tokens = NDArray[np.int32]

# ---------------------------------------------------------------------- environments


def measure(text: str, times: int = 1, scale: float = 1.0, unit: Literal["cm", "inch"] = "cm") -> str:
    """Measure a text.

    Args:
        text: What to measure.
        times: How often to repeat it.
        scale: What to multiply with.
        unit: The unit.
    """
    if times > 1_000:
        raise OverflowError(f"{times} times is too often")
    return f"{len(text) * times * scale} {unit}"


def arrange(items: list[str], labels: dict[str, int] | None = None) -> str:
    """Sort items by label."""
    return ", ".join(sorted(items, key=lambda item: (labels or {}).get(item, 0)))


class ToolboxEnv(agent_r1.ToolEnv):
    """One task, tools with arguments of every type, one of which always fails."""

    def __init__(self, **kwargs: Any) -> None:
        tools = [Tool.from_function(function, timeout=math.inf) for function in (measure, arrange)]
        tools.append(Tool.from_function(self.fail, name="fail", description="Fails.", timeout=math.inf))
        super().__init__(tools, **kwargs)

    num_tasks = 1

    @staticmethod
    def fail(reason: str) -> str:
        raise RuntimeError(reason)

    def make_task(self, index: int) -> agent_r1.Task:
        return agent_r1.Task("toolbox", "How long is a piece of string?", ["twice half"])

    def judge_answer(self, answer: str) -> tuple[float, dict[str, float]]:
        return float(answer == "twice half"), {}


def environments(
    dialect: str, data: Path, ids: Sequence[str] = (), **kwargs: Any
) -> Iterator[tuple[str, agent_r1.ToolEnv]]:
    """Every environment that is fuzzed, by name, in one dialect over the byte tokenizer; of `ids` only, where given."""
    # Short contexts, so that they run out too; many turns, so that a span seldom costs a new episode.
    kwargs = {"dialect": dialect, "max_turns": 30, "max_context_tokens": 8_192} | kwargs
    if not ids:
        yield "Toolbox", ToolboxEnv(**kwargs)
    for env_id in ids or agent_r1.ENVIRONMENTS:
        folder = env_id.removeprefix("AgentR1/").removesuffix("-v0").lower()
        given = {"data_dir": str(data / folder)} if (data / folder).is_dir() else {}
        try:
            env = gym.make(env_id, **kwargs, **given).unwrapped
        except SandboxError:  # Terminal, where there is no bubblewrap
            continue
        assert isinstance(env, agent_r1.ToolEnv)
        yield env_id, env


# ---------------------------------------------------------------------- spans


_SNIPPETS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<answer>",
    "</answer>", "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|python_tag|>", "<|im_start|>assistant\n", "<|im_",
    "end|>", "Action: ", "Action Input: ", "Observation: ", "Thought: ", "Action: search\nAction Input: {}\n", "\n",
    "```", "```\n", "```python\n", "```json\n", "```tool_call\n", "<function=", "<function=search>", "</function>",
    "<parameter=query>", "</parameter>", "{", "}", "[", "]", '"', "\\", ":", ",", ";", '{"name": ', '"arguments": ',
    '"parameters": ', "null", "true", "NaN", "Infinity", "-0", "1e999", "9" * 5_000, "-" + "7" * 400, "\\ud800",
    "\\u0000", "\\", "\0", "\x1b[2J", "\u2028", "\u202e", "\ufeff", "\ufffd", "\U0010f8a0",
    "\U0010f8a3search\U0010f8a4", "\U0010ffff", "e\u0301", "日本", "\N{GRINNING FACE}", "system\n", "user\n", "ZQ0QZ",
    "ZQassistantQZ", " ", "\t", "\r\n",
)  # fmt: skip
_WORDS = ("Ada Quill", "River Lorn", "mentor of", "twice half", "text", "query", "items", "no", "", "the")
_VALUES: tuple[Any, ...] = (
    "Ada Quill", "", "x" * 3_000, 0, -1, 1.5, True, None, [], {}, [1, "a", None], {"a": {"b": [{}]}}, 10**300, 1e308,
    "5", "\u0000", "<|im_end|>", "</tool_call>", "<answer>no</answer>", "```", "</parameter>", "\n\nAction: fail",
)  # fmt: skip
_TOOLS = (
    "search", "lookup", "measure", "arrange", "fail", "calculator", "python", "browse", "Search", "", "schema", "query",
    "shell", "submit",
)  # fmt: skip
_KEYS = (
    "query", "text", "items", "reason", "times", "scale", "unit", "labels", "code", "title", "", "sql", "table",
    "command",
)  # fmt: skip


@dataclass
class SpanMaker:
    """Makes spans of every kind in `KINDS`; span `index` is a function of (seed, index) and of the episode of `env`.

    `kind(rng)` gives token ids. Mutations start from a call or an answer as a policy should write it; with `env` half
    of the calls are of its tools, in words of its conversation.
    """

    dialect: Dialect
    seed: int = 0
    env: agent_r1.ToolEnv | None = None
    added: list[str] = field(init=False)
    vocab_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.added = list(added_tokens(self.dialect.tokenizer))
        self.vocab_size = len(self.dialect.tokenizer)

    def __call__(self, index: int) -> tuple[str, Tokens]:
        """(kind, span) number `index`."""
        rng = np.random.default_rng([self.seed, index])
        kind = list(KINDS)[index % len(KINDS)]
        return kind, np.asarray(KINDS[kind](self, rng), np.int32).reshape(-1)

    def encode(self, text: str) -> list[int]:
        return list(self.dialect.tokenizer.encode(text, add_special_tokens=False))

    def call_text(self, rng: np.random.Generator) -> str:
        """A well-formed call of some tool, which may not be there, with arguments that may not fit."""
        if self.env is not None and self.env.tools and rng.random() < 0.5:
            with suppress(ValueError):  # this family cannot write it
                return random_call(self.env, rng)
        if rng.random() < 0.5:
            name, arguments = "search", {"query": str(pick(rng, _WORDS))}
        else:
            name = pick(rng, _TOOLS)
            arguments = {pick(rng, _KEYS): pick(rng, _VALUES) for _ in range(int(rng.integers(4)))}
        try:
            return self.dialect.tool_call(name, arguments)
        except ValueError:  # this family cannot write it
            return self.dialect.tool_call("search", {"query": "Ada Quill"})

    def good_text(self, rng: np.random.Generator) -> str:
        """A turn as it should be: maybe a thought, then a call, several calls or (less often) an answer."""
        text = "<think>" + pick(rng, _WORDS) + "</think>" if rng.random() < 0.3 else ""
        if rng.random() < 0.15:
            text += f"<answer>{pick(rng, _WORDS)}</answer>"
        else:
            text += "\n".join(self.call_text(rng) for _ in range(pick(rng, (1, 1, 1, 2, 12))))
        return text + self.dialect.end_of_turn

    def good(self, rng: np.random.Generator) -> list[int]:
        return self.encode(self.good_text(rng))

    def empty(self, rng: np.random.Generator) -> list[int]:
        return []

    def random_ids(self, rng: np.random.Generator) -> list[int]:
        """Uniform over the vocabulary: for the byte tokenizer mostly invalid UTF-8."""
        return rng.integers(self.vocab_size, size=int(rng.integers(1, 300))).tolist()

    def random_text(self, rng: np.random.Generator) -> list[int]:
        top = pick(rng, (0x80, 0x800, 0x10000, 0x110000))
        points = rng.integers(top, size=int(rng.integers(1, 200)))
        return self.encode("".join(chr(p) for p in points.tolist() if not 0xD800 <= p < 0xE000))

    def soup(self, rng: np.random.Generator) -> list[int]:
        """Snippets of every family's markup in any order."""
        size = int(rng.integers(1, 40))
        return self.encode("".join(pick(rng, _SNIPPETS) for _ in range(size)))

    def truncated(self, rng: np.random.Generator) -> list[int]:
        ids = self.good(rng)
        return ids[: int(rng.integers(len(ids)))]

    def spliced(self, rng: np.random.Generator) -> list[int]:
        """Pieces deleted, doubled, moved and replaced, in tokens."""
        ids = self.good(rng)
        for _ in range(int(rng.integers(1, 6))):
            start, end = sorted(rng.integers(len(ids) + 1, size=2).tolist())
            piece = ids[start:end]
            ids = pick(
                rng,
                (
                    ids[:start] + ids[end:],
                    ids[:end] + piece + ids[end:],
                    ids[:start] + ids[end:] + piece,
                    ids[:start] + rng.integers(self.vocab_size, size=min(len(piece), 20)).tolist() + ids[end:],
                    ids[:start] + piece[::-1] + ids[end:],
                ),
            )[:3_000]
        return ids

    def with_snippets(self, rng: np.random.Generator) -> list[int]:
        """Markup and control characters inside a turn as it should be."""
        text = self.good_text(rng)
        for _ in range(int(rng.integers(1, 6))):
            place = int(rng.integers(len(text) + 1))
            text = text[:place] + pick(rng, _SNIPPETS) + text[place:]
        return self.encode(text)

    def with_special_tokens(self, rng: np.random.Generator) -> list[int]:
        ids = self.good(rng)
        for _ in range(int(rng.integers(1, 6))):
            place = int(rng.integers(len(ids) + 1))
            ids[place:place] = self.encode(pick(rng, self.added))
        return ids

    def with_bytes(self, rng: np.random.Generator) -> list[int]:
        """Bytes that are no UTF-8, where the vocabulary has bytes."""
        ids = self.good(rng)
        for _ in range(int(rng.integers(1, 10))):
            ids[int(rng.integers(len(ids)))] = int(rng.integers(128, 256)) % self.vocab_size
        return ids

    def nested(self, rng: np.random.Generator) -> list[int]:
        """Calls inside calls, in arguments and between tags, and answers in between."""
        text = self.call_text(rng)
        for _ in range(int(rng.integers(1, 5))):
            inner = text
            quoted = json.dumps(inner)
            text = pick(
                rng,
                (
                    f"<tool_call>{inner}</tool_call>",
                    f'<tool_call>\n{{"name": "search", "arguments": {{"query": {quoted}}}}}\n</tool_call>',
                    f"<answer>{inner}</answer>",
                    f"<think>{inner}",
                    f"Action: search\nAction Input: {quoted}\nAction Input: {inner}",
                    f"```json\n{inner}\n```",
                    f'{{"name": "search", "parameters": {inner}}}',
                    f"<function=search>\n<parameter=query>\n{inner}\n</parameter>\n</function>",
                ),
            )[:6_000]
        return self.encode(text + self.dialect.end_of_turn)

    def repeated(self, rng: np.random.Generator) -> list[int]:
        """One snippet over and over: what makes a careless parser quadratic."""
        piece = pick(rng, _SNIPPETS) + pick(rng, _SNIPPETS)
        return self.encode(piece * (4_000 // max(1, len(piece))))[:4_000]

    def deep(self, rng: np.random.Generator) -> list[int]:
        """Brackets nested up to a thousand deep, closed or not, as arguments of a call."""
        depth = int(rng.integers(1, 1_000))
        opening, closing = pick(rng, (("[", "]"), ('{"a":', "}"), ('[{"a":', "}]"), ("(", ")")))
        value = opening * depth + "1" + closing * pick(rng, (depth, depth - 1, 0))
        form = pick(
            rng,
            (
                '<tool_call>\n{{"name": "search", "arguments": {}}}\n</tool_call>',
                '{{"name": "search", "parameters": {}}}',
                "Action: search\nAction Input: {}",
                "```json\n{}\n```",
                "<tool_call>\n<function=arrange>\n<parameter=items>\n{}\n</parameter>\n</function>\n</tool_call>",
            ),
        )
        return self.encode(form.format(value) + self.dialect.end_of_turn)


KINDS: dict[str, Callable[[SpanMaker, np.random.Generator], Sequence[int]]] = {
    function.__name__: function
    for function in (
        SpanMaker.good,
        SpanMaker.empty,
        SpanMaker.random_ids,
        SpanMaker.random_text,
        SpanMaker.soup,
        SpanMaker.truncated,
        SpanMaker.spliced,
        SpanMaker.with_snippets,
        SpanMaker.with_special_tokens,
        SpanMaker.with_bytes,
        SpanMaker.nested,
        SpanMaker.repeated,
        SpanMaker.deep,
    )
}


# ---------------------------------------------------------------------- checks


def check_step(env: agent_r1.ToolEnv, before: Tokens, span: Tokens, outcome: tuple[Any, ...]) -> None:
    """What must hold after every step, whatever was written. Raises AssertionError."""
    after, reward, terminated, truncated, info = outcome
    taken = min(span.size, env.max_action_tokens, env.max_context_tokens - before.size)
    assert after.dtype == np.int32 and env.observation_space.contains(after), "the state is no observation"
    assert after.flags.owndata, "the state is a view of something that changes"
    assert np.array_equal(after[: before.size], before), "the past was changed"
    assert np.array_equal(after[before.size : before.size + taken], span[:taken]), "the span was changed"
    assert type(reward) is float and math.isfinite(reward), f"reward {reward!r}"
    assert reward == sum(info["reward_terms"].values()), "the reward is not the sum of its terms"
    assert type(terminated) is bool and type(truncated) is bool and not (terminated and truncated)
    assert plain(info), "info holds something that is not plain"
    assert json.loads(json.dumps(info)) == info, "info does not survive JSON"
    over = terminated or truncated
    assert over == ("is_success" in info) == ("answer" in info) == ("metrics" in info)
    assert truncated == (info.get("truncation_reason") in ("turns", "context"))
    if taken < span.size:
        assert truncated and info["truncation_reason"] == "context" and after.size == before.size + taken
    if over:
        assert json.loads(json.dumps(env.messages)) == env.messages, "the conversation does not survive JSON"
    else:
        assert info["max_new_tokens"] == min(env.max_action_tokens, env.max_context_tokens - after.size) >= 1


def plain(value: Any) -> bool:
    """Whether a value is made of str, int, float, bool, None, lists and dicts with str keys, and nothing else."""
    if type(value) is dict:
        return all(type(key) is str and plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(plain, value))
    return value is None or type(value) in (str, int, float, bool)


@dataclass
class Report:
    """What a run of `fuzz` measured."""

    spans: int = 0
    seconds: float = 0.0
    """Processor time inside `parse` (of every dialect) and `step`; what others do on the machine doesn't count."""
    episodes: int = 0
    calls: int = 0
    malformed: int = 0
    answers: int = 0
    cut: int = 0
    """Episodes that ended because the context was full."""
    slowest_parse_ms: float = 0.0
    slowest_parse: str = ""
    slowest_step_ms: float = 0.0
    slowest_step: str = ""
    failures: list[str] = field(default_factory=list)


def fuzz(
    dialects: Sequence[str], data: Path, first: int, last: int, seed: int = 0, ids: Sequence[str] = (), **kwargs: Any
) -> Report:
    """Spans `first` to `last` - 1, in turn through every dialect and environment. `kwargs` go to the environments."""
    report = Report()
    tokenizer = load_tokenizer(None)
    parsers = {name: get_dialect(name, tokenizer) for name in DIALECTS}
    places = [(name, *place) for name in dialects for place in environments(name, data, ids, **kwargs)]
    makers = [SpanMaker(parsers[name], seed, env) for name, _, env in places]
    states: dict[int, Tokens] = {}
    for index in range(first, last):
        # Kinds and places have different periods, so that all pairs come up.
        number = (index // len(KINDS)) % len(places)
        dialect, env_id, env = places[number]
        if number not in states:
            states[number] = env.reset(seed=index)[0]
            report.episodes += 1
        kind, span = makers[number](index)
        name = f"span {index} of seed {seed} ({kind}, {dialect}, {env_id})"
        before = states[number]
        try:
            for other, parser in parsers.items():
                start = time.process_time()
                parser.parse(span)
                spent = time.process_time() - start
                report.seconds += spent
                if spent * 1e3 > report.slowest_parse_ms:
                    report.slowest_parse_ms, report.slowest_parse = spent * 1e3, f"{name}, parsed as {other}"
            start = time.process_time()
            outcome = env.step(span)
            spent = time.process_time() - start
            report.seconds += spent
            if spent * 1e3 > report.slowest_step_ms:
                report.slowest_step_ms, report.slowest_step = spent * 1e3, name
            check_step(env, before, span, outcome)
        except Exception as error:
            report.failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            states.pop(number)
            continue
        states[number], _, terminated, truncated, info = outcome
        report.spans += 1
        report.calls += len(info["tool_calls"])
        report.malformed += sum(call["arguments"] is None for call in info["tool_calls"])
        report.answers += terminated
        report.cut += info.get("truncation_reason") == "context"
        if terminated or truncated:
            states.pop(number)
    return report


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> int:
    from machine import busy, from_0, from_1, given_flags, record_results

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=from_1, default=200_000)
    parser.add_argument("--seed", type=from_0, default=0)
    parser.add_argument("--dialects", nargs="+", default=list(DIALECTS), choices=list(DIALECTS))
    names = [env_id.removeprefix("AgentR1/").removesuffix("-v0") for env_id in agent_r1.ENVIRONMENTS]
    parser.add_argument("--ids", nargs="+", default=[], choices=names, metavar="ID", help="only these environments")
    parser.add_argument("--name", default="fuzz_spans", help="of the results")
    parser.add_argument("--no-record", action="store_true", help="print, but leave benchmarks/results as it is")
    arguments = parser.parse_args()
    share = busy()
    with tempfile.TemporaryDirectory() as folder:
        data = write_made_up_data(Path(folder))
        warm_up = min(arguments.spans, 5_000)  # caches and the allocator's pools are full after this
        ids = [f"AgentR1/{name}-v0" for name in arguments.ids]
        fuzz(arguments.dialects, data, 0, warm_up, arguments.seed, ids)
        memory = _peak_megabytes()
        report = fuzz(arguments.dialects, data, 0, arguments.spans, arguments.seed, ids)
        growth = _peak_megabytes() - memory
    results = {
        "spans": report.spans,
        "failures": len(report.failures),
        "spans_per_second": round(report.spans / report.seconds),  # of processor time, as all times here
        "slowest_parse_ms": round(report.slowest_parse_ms, 1),
        "slowest_parse": report.slowest_parse,
        "slowest_step_ms": round(report.slowest_step_ms, 1),
        "slowest_step": report.slowest_step,
        "peak_memory_mb": round(memory + growth),
        "peak_memory_growth_mb": round(growth, 1),
        "episodes": report.episodes,
        "calls": report.calls,
        "malformed_calls": report.malformed,
        "answers": report.answers,
        "out_of_context": report.cut,
        "cores_in_use_by_others": round(share, 2),
    }
    for failure in report.failures[:20]:
        print(failure, file=sys.stderr)
    print(json.dumps(results, indent=2))
    if not arguments.no_record:
        rows = "".join(f"| {name.replace('_', ' ')} | {value} |\n" for name, value in results.items())
        command = f"python benchmarks/environments/fuzz_spans.py --spans {arguments.spans} --seed {arguments.seed}"
        command += given_flags(parser, arguments, "ids", "name")
        record_results(arguments.name, results, f"| figure | value |\n|---|---|\n{rows}", command)
    return int(bool(report.failures))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
