"""A real chat model on the real data sets: the paper's two baselines, and problems of mathematics and programming.

    python benchmarks/environments/real_data.py --model FOLDER --data DATA  # holds hotpotqa/, musique/, gsm8k/
    python benchmarks/environments/real_data.py --model FOLDER --data DATA --parts problems

Evaluations that are finished are not repeated. Tables and JSON go to results/. real_model.py trains such a model.
"""

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
from machine import from_0, from_1, given_flags, record_results

SETS = {"HotpotQA": "hotpotqa", "2WikiMultihopQA": "2wikimultihopqa", "MuSiQue": "musique"}
PROBLEMS = {"GSM8K": ("gsm8k", "test"), "MATH": ("math", "math500"), "HumanEval": ("humaneval", "test"),
            "MBPP": ("mbpp", "test")}  # folder and split
PARTS = ["evaluate", "problems"]
MODES = {"naive RAG": "naive_rag", "base tool call": "base_tool_call"}
BOUNDS = {"max_turns": 2, "max_action_tokens": 64, "top_k": 2, "max_context_tokens": 4096}  # for a small model on a CPU
PROBLEM_BOUNDS = {"max_turns": 2, "max_action_tokens": 96, "max_context_tokens": 4096}


def evaluation(arguments: dict) -> dict:
    """The report of an evaluation with these arguments: what was measured is not measured again."""
    from sweep import finish, make_job

    options = [f"--{key.replace('_', '-')}={value}" for key, value in arguments.items()]
    (run,) = finish([make_job(["python", "learner/evaluate_llm.py", *options])], 1)
    return json.loads((run / "evaluation.json").read_text())


def interval(metric: dict[str, float], scale: float = 100) -> str:
    return f"{scale * metric['mean']:.1f} [{scale * metric['low']:.1f}, {scale * metric['high']:.1f}]"


def evaluate(model: str, data: Path, episodes: int, only: list[str], threads: int) -> tuple[dict, str]:
    rows = ["| data set | mode | questions | EM % | F1 % | right format % | turns | tool errors | seconds |",
            "|---|---|---|---|---|---|---|---|---|"]
    results = {}
    for name, folder in SETS.items():
        if name not in only:
            continue
        for label, mode in MODES.items():
            arguments = {"model": model, "env_id": f"AgentR1/{name}-v0", "split": "dev", "mode": mode,
                         "data_dir": str(data / folder), "episodes": episodes, "num_envs": 34, "num_threads": threads,
                         "env_kwargs": json.dumps(BOUNDS)}
            report = evaluation(arguments)
            metrics = report["metrics"]
            results[f"{name}, {label}"] = {"metrics": metrics, "seconds": report["seconds"]}
            rows.append(f"| {name} | {label} | {report['episodes']} | {interval(metrics['exact_match'])} | "
                        f"{interval(metrics['f1'])} | {interval(metrics['format'])} | {metrics['turns']['mean']:.2f} | "
                        f"{metrics['tool_errors']['mean']:.2f} | {report['seconds']:.0f} |")
            print(rows[-1], flush=True)
    return results, "\n".join(rows)


def problems(model: str, data: Path, only: list[str]) -> tuple[dict, str]:
    """50 problems of each set, with tools, on one thread."""
    rows = ["| data set | split | problems | right % | right format % | turns | tool calls | tool errors | seconds |",
            "|---|---|---|---|---|---|---|---|---|"]
    results = {}
    for name, (folder, split) in PROBLEMS.items():
        if name not in only:
            continue
        report = evaluation({"model": model, "env_id": f"AgentR1/{name}-v0", "split": split, "num_threads": 1,
                             "data_dir": str(data / folder), "episodes": 50, "num_envs": 25,
                             "env_kwargs": json.dumps(PROBLEM_BOUNDS)})
        metrics = report["metrics"]
        results[name] = {"split": split, "metrics": metrics, "seconds": report["seconds"]}
        rows.append(f"| {name} | {split} | {report['episodes']} | {interval(metrics['success'])} | "
                    f"{interval(metrics['format'])} | {metrics['turns']['mean']:.2f} | "
                    f"{metrics['tool_calls']['mean']:.2f} | {metrics['tool_errors']['mean']:.2f} | "
                    f"{report['seconds']:.0f} |")
        print(rows[-1], flush=True)
    return results, "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or name of a chat model, e.g. SmolLM2-135M-Instruct")
    parser.add_argument("--data", required=True, type=Path, help="folder that holds the data sets' folders")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    sets = [*SETS, *PROBLEMS]
    parser.add_argument("--sets", nargs="+", choices=sets, default=sets, help="data sets to evaluate on")
    parser.add_argument("--episodes", type=from_1, default=100, help="questions per data set and baseline")
    parser.add_argument("--threads", type=from_0, default=0, help="torch threads (0: default); problems take one")
    args = parser.parse_args()
    command = "python benchmarks/environments/real_data.py --model FOLDER --data DATA"
    command += given_flags(parser, args, "sets", "threads")
    data = args.data.resolve()
    os.chdir(ROOT)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "evaluate" in args.parts:
        results, table = evaluate(args.model, data, args.episodes, args.sets, args.threads)
        print(table)
        record_results("real_data_baselines", results, table, f"{command} --parts evaluate --episodes {args.episodes}")
    if "problems" in args.parts:
        results, table = problems(args.model, data, args.sets)
        print(table)
        record_results("real_data_problems", results, table, f"{command} --parts problems")


if __name__ == "__main__":
    main()
