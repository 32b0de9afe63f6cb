"""Compare dialects with the `renderers` package, and check their invariants, on real tokenizers.

    python benchmarks/environments/check_dialects.py --tokenizer FOLDER_OR_NAME [FOLDER_OR_NAME ...]

For each tokenizer, in its own dialect: prompts, bridges and parsed calls are compared with the hand-written renderer of
the family (`renderers`, an independent implementation), on texts without the strings of control tokens, because
renderers lets those through; prompts and bridges also with the chat template itself, rendered by transformers. In every
dialect: calls come back from `parse`, texts full of control-token strings add no control token, and over whole episodes
of MultihopWorld each state begins with the one before and the span. Times are medians.

Prints one table (checks: equal / cases) and writes it to benchmarks/results/check_dialects.{json,md}. Exits with 1 if
anything differs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import agent_r1  # noqa: F401  (registers the environments)
from agent_r1.dialects import DIALECTS, Dialect, get_dialect
from agent_r1.text.tokenizers import control_tokens, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "common"))
from machine import from_1, record_results, require_quiet_machine

RENDERERS = {"hermes": "Qwen3Renderer", "qwen_xml": "Qwen35Renderer", "llama3_json": "Llama3Renderer"}
SENTENCES = [
    "Jane Austen wrote Emma in 1815; the capital of France is Paris.",
    "def f(x):\n    return x < 3 and x | 1\n\n\n",
    'He said: "It\'s 5 < 7 & 8 > 3"\t\\ and left',
    "naïve café, Ωμέγα, 東京都, 🙂🙂 and e\u0301",
    "  indented,   spaced  \n\n  and broken\r\n lines ",
    '{"json": [1, 2.5, null], "nested": {"a": "b"}}',
    "12345678901234567890 1,000,000.00 3.14159",
]


def texts(count: int, seed: int) -> list[str]:
    """Texts of one to six sentences, without control-token strings."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(SENTENCES, k=rng.randint(1, 6))) for _ in range(count)]


def schemas() -> list[dict[str, Any]]:
    """Two tools as a chat template gets them."""
    tools = []
    for name, key in (("search", "query"), ("python", "code")):
        parameters = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
        function = {"name": name, "description": f"Runs {name}, é.", "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


Cases = Iterator[tuple[Any, Any]]


def conversation(system: str, user: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def open_thinking(dialect: Dialect) -> str:
    """What a span begins with where the prompt has opened the policy's thinking."""
    return "I think.\n</think>\n\n" if dialect.starts_thinking else ""


def prompts(dialect: Dialect, other: Callable[..., list[int]], samples: list[str]) -> Cases:
    for system, user in zip(samples, samples[1:], strict=False):
        for tools in (schemas(), []):
            messages = conversation(system, user)
            yield dialect.render(messages, tools), other(messages, tools)


def template_bridges(dialect: Dialect, tokenizer: Any, samples: list[str]) -> Cases:
    """Against the chat template: the whole conversation, from the end of the first turn on."""
    turn = [*conversation("Be brief.", "Hello."), {"role": "assistant", "content": "ZZZ"}]
    for a, b in zip(samples, samples[1:], strict=False):
        results = dialect.result_messages([("search", a), ("search", b)])
        text = tokenizer.apply_chat_template(
            [*turn, *results], tools=schemas(), add_generation_prompt=True, tokenize=False
        )
        after = tokenizer.encode(text.partition("ZZZ")[2], add_special_tokens=False)
        yield [*dialect.close(), *dialect.bridge(True, [("search", a), ("search", b)])], after


def renderer_bridges(dialect: Dialect, renderer: Any, samples: list[str]) -> Cases:
    tokenizer = dialect.tokenizer
    prompt = dialect.render(conversation("Be brief.", "Hello."), schemas())
    for a, b in zip(samples, samples[1:], strict=False):
        call = open_thinking(dialect) + dialect.tool_call("search", {"query": "Emma"}) + dialect.end_of_turn
        span = tokenizer.encode(call, add_special_tokens=False)
        messages = [{"role": "tool", "content": a}, {"role": "tool", "content": b}]
        theirs = renderer.bridge_to_next_turn(prompt, span, messages)
        yield prompt + span + dialect.bridge(True, [("search", a), ("search", b)]), theirs and theirs.token_ids


def renderer_calls(dialect: Dialect, renderer: Any, samples: list[str]) -> Cases:
    prompt = dialect.render(conversation("Be brief.", "Hello."), schemas())
    for text in samples:
        call = open_thinking(dialect) + dialect.tool_call("search", {"query": text}) + dialect.end_of_turn
        span = dialect.tokenizer.encode(call, add_special_tokens=False)
        theirs = renderer.parse_response(span, tools=schemas(), prompt_ids=prompt)
        ours = dialect.parse(span, schemas())
        yield (
            [(call.name, call.arguments) for call in ours.calls] + [ours.content],
            [(call.name, call.arguments) for call in theirs.tool_calls] + [theirs.content],
        )


def calls_come_back(dialect: Dialect, samples: list[str]) -> Cases:
    for text in samples:
        try:
            call = dialect.tool_call("search", {"query": text})
        except ValueError:  # XML cannot escape a character that the tokenizer normalizes
            continue
        span = dialect.tokenizer.encode(open_thinking(dialect) + call + dialect.end_of_turn, add_special_tokens=False)
        yield [(c.name, c.arguments) for c in dialect.parse(span, schemas()).calls], [("search", {"query": text})]


def guarded(dialect: Dialect, samples: list[str]) -> Cases:
    """The control tokens of prompts and bridges: with texts made of pieces of control tokens, with harmless ones."""
    controls = control_tokens(dialect.tokenizer)
    ids = frozenset(controls.values())
    rng = random.Random(1)
    pieces = [piece for token in controls for piece in (token, token, token[1:], token[:-1], token[:2])] + samples

    def count(tokens: list[int]) -> list[int]:
        return [token for token in tokens if token in ids]

    for _ in range(len(samples)):
        a, b = ("".join(rng.choices(pieces, k=rng.randint(1, 6))) for _ in range(2))
        yield (
            count(dialect.render(conversation(a, b), schemas())),
            count(dialect.render(conversation("a", "b"), schemas())),
        )
        yield (
            count(dialect.bridge(False, [("search", a), ("search", b)])),
            count(dialect.bridge(False, [("search", "a"), ("search", "b")])),
        )


def episodes(name: str, tokenizer: Any, count: int) -> Cases:
    """Every state of an episode begins with the state before it and the span."""
    env = gym.make("AgentR1/MultihopWorld-v0", tokenizer=tokenizer, dialect=name, max_turns=6)
    unwrapped: Any = env.unwrapped
    dialect = unwrapped.dialect
    rng = random.Random(2)
    for seed in range(count):
        state, _ = env.reset(seed=seed)
        over = False
        while not over:
            query = rng.choice([unwrapped.task.question, "Emma", "5 < 7"])
            text = open_thinking(dialect) + rng.choice(
                [
                    "I look it up.\n" + dialect.tool_call("search", {"query": query}),
                    dialect.tool_call("search", {"wrong": 1}) + "\n" + dialect.tool_call("nothing", {}),
                    dialect.tool_call("search", {"query": query})[:-7],
                    "Hm.",
                    *(["<answer>Emma</answer>"] if rng.random() < 0.2 else []),
                ]
            )
            text += rng.choice([dialect.end_of_turn, ""])
            span = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
            expected = [*state.tolist(), *span.tolist()]
            state, _, terminated, truncated, _ = env.step(span)
            yield state[: len(expected)].tolist(), expected
            over = terminated or truncated
    env.close()


def microseconds(function: Callable[[], Any], repeats: int = 300) -> float:
    """The median time of a call."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def equal(cases: Cases) -> tuple[int, int]:
    """How many pairs are equal, and how many there are."""
    results = [ours == theirs for ours, theirs in cases]
    return sum(results), len(results)


def check(name: str, count: int) -> dict[str, Any]:
    """All checks on one tokenizer: ``{check: (equal, cases)}`` by dialect, and times in microseconds."""
    tokenizer: Any = load_tokenizer(name)
    native = get_dialect(None, tokenizer)
    report: dict[str, Any] = {"tokenizer": Path(name).name, "dialect": native.name, "native": native.native}
    samples = texts(count, seed=0)
    checks: dict[str, tuple[int, int]] = {}

    def template(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        return list(tokenizer.encode(text, add_special_tokens=False))

    if native.native:
        checks["prompts = chat template"] = equal(prompts(native, template, samples))
        checks["bridges = chat template"] = equal(template_bridges(native, tokenizer, samples))
        import renderers

        renderer = getattr(renderers, RENDERERS[native.name])(tokenizer)

        def rendered(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
            return list(renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True))

        checks["prompts = renderers"] = equal(prompts(native, rendered, samples))
        checks["bridges = renderers"] = equal(renderer_bridges(native, renderer, samples))
        checks["parsed turns = renderers"] = equal(renderer_calls(native, renderer, samples))
    for family in DIALECTS:
        dialect = get_dialect(family, tokenizer)
        checks[f"{family}: calls come back"] = equal(calls_come_back(dialect, samples))
        checks[f"{family}: no control token from text"] = equal(guarded(dialect, samples))
        checks[f"{family}: states begin with states"] = equal(episodes(family, tokenizer, count // 10))
    report["checks"] = checks

    thought = "I should look for the author of the book first, and then for where that author was born."
    call = native.tool_call("search", {"query": "author of Emma"})
    opened = "" if native.starts_thinking else "<think>"
    span = tokenizer.encode(f"{opened}{thought}</think>\n\n{call}{native.end_of_turn}", add_special_tokens=False)
    passages = " ".join(SENTENCES * 2)
    results = [("search", passages)]
    report["span_tokens"] = len(span)
    report["bridge_tokens"] = len(native.bridge(True, results))
    report["us"] = {
        "parse": microseconds(lambda: native.parse(span, schemas())),
        "bridge": microseconds(lambda: native.bridge(True, results)),
        "encoding the bridge's text alone": microseconds(lambda: tokenizer.encode(passages, add_special_tokens=False)),
        "render": microseconds(lambda: native.render(conversation("Be brief.", "Hello."), schemas())),
    }
    return report


def table(reports: list[dict[str, Any]]) -> str:
    """One row per check, one column per tokenizer."""
    names = list(dict.fromkeys(name for report in reports for name in report["checks"]))
    lines = ["| | " + " | ".join(report["tokenizer"] for report in reports) + " |", "|---" * (len(reports) + 1) + "|"]
    lines.append(
        "| recognised as | "
        + " | ".join(r["dialect"] + ("" if r["native"] else " (by instructions)") for r in reports)
        + " |"
    )
    for name in names:
        cells = ["{}/{}".format(*report["checks"][name]) if name in report["checks"] else "-" for report in reports]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for name in reports[0]["us"]:
        sizes = {"parse": "span_tokens", "bridge": "bridge_tokens"}
        cells = []
        for report in reports:
            size = f" ({report[sizes[name]]} tokens)" if name in sizes else ""
            cells.append(f"{report['us'][name]:.0f} µs{size}")
        lines.append(f"| time of: {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", nargs="+", required=True, help="Hugging Face names or folders")
    parser.add_argument("--count", type=from_1, default=200, help="texts per check")
    parser.add_argument("--force", action="store_true", help="measure times on a busy machine, too")
    args = parser.parse_args()
    for name in args.tokenizer:
        try:
            load_tokenizer(name)
        except (OSError, ValueError) as error:
            sys.exit(f"--tokenizer {name}: {error}")
    require_quiet_machine(args.force)
    reports = [check(name, args.count) for name in args.tokenizer]
    shown = table(reports)
    print(shown)
    names = " ".join(Path(name).name for name in args.tokenizer)
    record_results(
        "check_dialects", reports, shown,
        f"python benchmarks/environments/check_dialects.py --tokenizer {names}", args.force,
    )
    if any(good < cases for report in reports for good, cases in report["checks"].values()):
        sys.exit("some checks found differences")


if __name__ == "__main__":
    main()
