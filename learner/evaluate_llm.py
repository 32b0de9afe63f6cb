# docs and results: docs/learners/evaluate_llm.md
"""Evaluation of a policy on held-out tasks, as an agent or as a baseline without tools.

    python learner/evaluate_llm.py                                         # the shipped policy
    python learner/evaluate_llm.py --model runs/RUN                        # a run's policy, on its own environment
    python learner/evaluate_llm.py --model runs/RUN --mode base_tool_call  # the model that the run started from
    python learner/evaluate_llm.py --model NAME --env-id AgentR1/HotpotQA-v0 --split dev --mode naive_rag
    python learner/evaluate_llm.py --api https://api.openai.com/v1 --api-model NAME --num-envs 8
    python learner/evaluate_llm.py --samples 8 --temperature 1             # pass@k over 8 episodes of each task
    python learner/evaluate_llm.py --temperature 1 --decode value-turn --critic runs/RUN  # a critic picks each turn
    python learner/evaluate_llm.py --resume runs/EVALUATION                # continue a stopped evaluation
"""

import llm_utils.setup.startup  # noqa: F401  isort: skip  (reports a missing package in one line)

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import comb
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np

import agent_r1  # noqa: F401  (registers the environments)
from agent_r1.baselines import BASELINES, baseline
from agent_r1.vector import ToolVectorEnv
from agent_r1_tools.text import printable
from llm_utils import arguments, config_file, distributed
from llm_utils.records import commands, run_files
from llm_utils.records.displays import interval
from llm_utils.records.earlier_runs import fill_environment, stack_of_adapters, summary_of_run
from llm_utils.records.evaluation_files import REPORT, Episodes, load_args
from llm_utils.records.intervals import proportion
from llm_utils.records.logger import run_name
from llm_utils.records.progress import Progress
from llm_utils.sampling.decoding import CandidateEngine, best_of, check_decoding, end_of_actions, load_score
from llm_utils.sampling.engine import EngineDied
from llm_utils.sampling.make_engine import make_chat_engine, make_engine
from llm_utils.sampling.rollout import Sampler, check_playable
from llm_utils.setup import threads
from llm_utils.setup.environments import env_kwargs, environment_spec, plain_errors, print_defaults
from llm_utils.setup.loading import check_adapter_folder, choose_dtype, load_policy, merge_adapters
from llm_utils.setup.model_checks import check_context, check_vocabulary
from llm_utils.setup.pass_rates import write_pass_rates
from llm_utils.setup.sources import fingerprint, fit_environment, model_files, source_of, tokenizer_source


@dataclass
class Args:
    # run
    exp_name: str = Path(__file__).stem
    """name of this experiment"""
    seed: int = 1
    """seed of sampling and of the bootstrap"""
    resume: str | None = None
    """folder of an evaluation: run the missing episodes, in the same folder, with its arguments"""

    # machine
    cuda: bool = True
    """use a GPU if there is one"""
    num_threads: int = 0
    """CPU threads of torch (0: as many as there are free cores)"""

    # environment
    env_id: str | None = None
    """id of the environment (None: the one that a run in --model was trained on, else AgentR1/MultihopWorld-v0)"""
    split: str | None = None
    """split of the tasks (None: that run's --eval-split, if the environment is its own; else test, validation or dev if
    there is one, else train)"""
    data_dir: str | None = None
    """folder of the data set, for environments that have one"""
    env_kwargs: str | None = None
    """further arguments of the environment, as JSON, e.g. '{"max_turns": 4}' (None: that run's; '{}': none)"""

    # model
    model: str = "tiny"
    """Hugging Face name, folder, run folder, or "tiny": the policy shipped for the environment"""
    api: str | None = None
    """address of a chat API, up to /v1, to evaluate instead of --model; its key is in OPENAI_API_KEY"""
    api_model: str | None = None
    """name of the model at the API of --api"""
    adapter: str | None = None
    """folder of LoRA adapters for --model, e.g. runs/RUN/checkpoint/policy (without --model: for that run's own
    --model); with --engine transformers"""
    tokenizer: str | None = None
    """name or folder of a tokenizer (None: the model's own, with --api "byte"; "byte": the built-in byte tokenizer)"""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template; a base model needs one (None: that of the run)"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the model's computations (auto: float32 on a CPU, bfloat16 on a GPU)"""

    # engine
    engine: Literal["transformers", "vllm", "vllm-server"] = "transformers"
    """sampling engine: transformers or vLLM in this process, or running `vllm serve` processes"""
    vllm_url: str = "http://localhost:8000"
    """address of the server of --engine vllm-server"""

    # episodes
    mode: Literal["agent", "base_tool_call", "naive_rag", "closed_book"] = "agent"
    """agent: with tools, as trained. base_tool_call: the same with the model that a run started from. naive_rag: one
    retrieval with the question, the passages in the prompt, one answer, no tools. closed_book: the question alone, one
    answer"""
    episodes: int = 1000
    """number of tasks (fewer if the split has fewer)"""
    first_episode: int = 0
    """index of the first task, counted from 0, e.g. another one for each seed"""
    samples: int = 1
    """number of episodes of each task; above 1, also report pass@k, and write pass rates for --sample-by-pass-rate"""
    num_envs: int = 128
    """number of parallel episodes"""
    temperature: float = 0.0
    """sampling temperature (0: greedy)"""
    top_p: float | None = None
    """nucleus sampling (1: off; None: off, or the server's default with --api)"""

    # decoding
    decode: Literal["plain", "value-turn", "best-of-n"] = "plain"
    """plain: one span a turn. value-turn: the critic picks one of several spans in every turn. best-of-n: it picks one
    of several episodes of a task; without --critic the environment picks, an upper bound"""
    candidates: int = 4
    """number of spans or episodes to pick from"""
    critic: str | None = None
    """folder of the PPO run whose critic picks (ppo_llm.py, e.g. with --critic-only)"""


def check_api(args: Args) -> None:
    """Raise SystemExit for arguments that do nothing with --api, or are missing. Values taken from a run are not
    checked."""
    if args.api is not None:
        if args.api_model is None:
            raise SystemExit("--api needs --api-model, the model's name at the API")
        if args.mode == "base_tool_call":
            raise SystemExit("--mode base_tool_call needs a run; with --api use --mode agent")
        for name in ("model", "adapter", "dtype", "engine", "decode"):
            if getattr(args, name) != getattr(Args, name):
                raise SystemExit(f"{arguments.flag(name)} does nothing with --api")


def check(args: Args) -> None:
    """Raise SystemExit for arguments that are out of range, or do nothing, before any work."""
    arguments.check_each(args)
    if args.top_p is not None and args.top_p < 1 and args.temperature == 0:
        raise SystemExit("--top-p does nothing without a --temperature above 0")
    if args.samples > 1 and args.temperature == 0:
        raise SystemExit("--samples needs a --temperature above 0: a greedy policy always gives the same answer")
    check_decoding(args)
    if args.engine != "transformers" and args.dtype != "auto":
        raise SystemExit(f"--dtype does nothing with --engine {args.engine}")
    if args.mode == "base_tool_call" and args.adapter is not None:
        raise SystemExit("--mode base_tool_call evaluates a run's initial model, without adapters: leave out --adapter")
    if args.engine != "transformers" and args.adapter is not None:
        raise SystemExit("--adapter needs --engine transformers; for vLLM use peft's merge_and_unload()")
    if args.adapter is not None:
        check_adapter_folder(args.adapter)
    arguments.check_machine(args)


# ----------------------------------------------------------------------------------------------------------- statistics


def well_formed(reward_terms: Mapping[str, float]) -> bool:
    """Return True if an episode with these terms ended properly: one answer, and no malformed call before it."""
    paid = {name for name in reward_terms if name.startswith("outcome/")}  # none if gymnasium's limit ended it
    return bool(paid) and not paid & {"outcome/format", "outcome/unfinished"}


def summarize(rows: Sequence[Any], seed: int) -> dict[str, dict[str, float]]:
    """Return mean and 95 % interval of every statistic in the `stats` of the rows, over those that have it.

    If tasks ran several times, the means of tasks are used, so that intervals generalise over tasks.
    """
    names = {"em": "exact_match", "f1": "f1", "success": "success", "format": "format", "return": "return"}
    names |= {name: name for row in rows for name in row.stats if name not in names}
    table = {}
    for name, shown in names.items():
        of_tasks: dict[int, list[float]] = {}
        for row in rows:
            if name in row.stats:
                of_tasks.setdefault(row.task_index, []).append(float(row.stats[name]))
        values = [float(np.mean(of_task)) for of_task in of_tasks.values()]
        if values and shown not in table:  # our statistics come first
            table[shown] = dict(zip(("mean", "low", "high"), interval(name, values, seed), strict=True))
    return table


def pass_at(k: int, samples: int, successes: int) -> float:
    """Return the unbiased estimate of pass@k from a task's samples (Chen et al. 2021, arXiv 2107.03374).

    It is the share of all subsets of k samples that hold a success. It needs k <= samples.
    """
    return 1 - comb(samples - successes, k) / comb(samples, k)


def pass_table(rows: Sequence[Any], times: int) -> dict[str, dict[str, float]]:
    """Return mean@K and pass@k for K = `times` and k = 1, 2, 4, ... and K, with 95 % intervals and numbers of tasks.

    A task whose episodes were dropped has fewer than K samples. It counts in pass@k up to that number.
    """
    of_tasks: dict[int, list[bool]] = {}
    for row in rows:
        of_tasks.setdefault(row.task_index, []).append(bool(row.stats["success"]))
    columns = {f"mean@{times}": [float(np.mean(wins)) for wins in of_tasks.values()]}
    for k in [*(2**i for i in range(times.bit_length()) if 2**i < times), times]:
        columns[f"pass@{k}"] = [pass_at(k, len(wins), sum(wins)) for wins in of_tasks.values() if len(wins) >= k]
    table: dict[str, dict[str, float]] = {}
    for name, values in columns.items():
        if values:
            value, low, high = proportion(np.array(values))
            table[name] = {"mean": value, "low": low, "high": high, "tasks": len(values)}
    return table


# ----------------------------------------------------------------------------------------------------------------- main


if __name__ == "__main__":
    args: Any = load_args(arguments.read(Args))
    check_api(args)
    for line in fill_environment(args):
        print(line, file=sys.stderr)
    check(args)
    print_defaults(fit_environment(args), args)
    run_dir = Path(args.resume or Path("runs") / run_name(args, args.mode))
    device = distributed.device(args.cuda)
    threads.use(args)

    # model and environments
    source = source_of(args)
    stack = stack_of_adapters(args.adapter) if args.adapter is not None else []
    trained_on = summary_of_run(args.adapter).get("model_files") if args.adapter is not None else None
    if trained_on not in (None, fingerprint(source)):
        print(f"{source} may not be the initial model of {args.adapter} (other names or times)", file=sys.stderr)
    tokenizer = tokenizer_source(args.tokenizer or ("byte" if args.api is not None else None), source, args.env_id)
    spec = environment_spec(args.env_id)
    kwargs = {"tokenizer": tokenizer, "split": args.split, **env_kwargs(args), "observation": "new"}
    with plain_errors(args.env_id):
        if args.mode in BASELINES:
            envs: Any = ToolVectorEnv(baseline(spec.id, args.mode), args.num_envs, **kwargs)
        else:
            envs = gym.make_vec(spec, num_envs=args.num_envs, **kwargs)
    check_playable(envs)
    if args.first_episode >= (available := envs.envs[0].num_tasks):
        raise SystemExit(f"--first-episode {args.first_episode}: the split {args.split} has {available} tasks")
    vocab_size, longest = envs.single_action_space.vocab_size, envs.single_observation_space.max_len
    policy = None
    if args.engine == "transformers" and args.api is None:
        policy = load_policy(source, device, dtype=choose_dtype(args.dtype, device))
        check_vocabulary(policy, vocab_size)
        check_context(policy.config, longest)
        for adapters in stack:
            policy = merge_adapters(policy, adapters)
    if args.api is not None:
        engine: Any = make_chat_engine(args, envs)
    else:
        slots = args.num_envs * (args.candidates if args.decode == "value-turn" else 1)
        engine = make_engine(replace(args, num_envs=slots), source, vocab_size, policy, tokenizer, longest)
    score, critic = load_score(args, tokenizer, vocab_size, policy, device)
    if args.decode == "value-turn" and score is not None:
        engine = CandidateEngine(engine, args.candidates, score)

    # episodes; each is saved when it ends
    first, times = args.first_episode, args.candidates if args.decode == "best-of-n" else args.samples
    num_tasks = min(args.episodes, envs.envs[0].num_tasks - first)
    tasks = {number: first + number // times for number in range(num_tasks * times)}
    if num_tasks < args.episodes:
        print(f"the split {args.split} has {num_tasks} tasks from {first} on, fewer than --episodes", file=sys.stderr)
    if args.resume is None and run_dir.exists():
        raise SystemExit(f"{run_dir}: another evaluation has this name; start again, or use another --exp-name")
    run_files.claim(run_dir)
    model_name = f"{source} with {' and '.join(stack)}" if stack else source
    model = {"model": model_name, "model_files": model_files(args, args.chat_template), **critic}
    episodes, started = Episodes(run_dir, tasks.get, model["model_files"]), time.time()
    report: dict[str, Any] = {**model, "finished": False, "seconds": episodes.seconds, "args": asdict(args)}
    labels = {"mode": args.mode, "env_id": args.env_id, "model": model_name}
    with episodes.keeping(len(tasks)):
        run_files.write_json(run_dir / REPORT, report)
        config_file.write(run_dir, args)
        sampler = Sampler(envs, engine, args.seed)
        sampler.add(item for item in tasks.items() if item[0] not in episodes.played)
        with Progress(len(tasks), "episode", "evaluation", len(episodes.played)) as bar:
            try:
                for row in sampler.stream():
                    if not row.fault:
                        row.stats["format"] = float(well_formed(row.reward_terms))
                        if args.decode == "best-of-n" and score is not None:
                            row.stats["critic_value"] = float(score([end_of_actions(row)])[0])
                    episodes.add(row, **labels)
                    bar.update()
            except EngineDied as error:
                raise SystemExit(str(error)) from error
        engine.close()
        envs.close()
        played = episodes.close()
        seconds = episodes.seconds + time.time() - started

        # figures
        rows = [episode for episode in played if not episode.fault]
        if len(rows) < len(played):
            fault = next(episode.fault for episode in played if episode.fault)
            failed = f"{len(played) - len(rows)} of {len(played)} episodes"
            print(f"{failed} failed because of infrastructure errors and are not counted: {fault}")
        if not rows:
            raise SystemExit("no episode is left to evaluate")
        if args.decode == "best-of-n":
            rows = best_of(rows)
        table = summarize(rows, args.seed)
        if args.samples > 1:
            table |= pass_table(rows, times)
            write_pass_rates(run_dir / "pass_rates.json", rows, first + num_tasks, args)
        counts = {"episodes": len(rows), "faults": len(played) - len(rows)}
        report = {**model, **counts, "seconds": seconds, "metrics": table, "args": asdict(args)}
        run_files.write_json(run_dir / REPORT, report | {"finished": True})
    played_on = printable(f"{args.env_id}, {args.split}: {len(rows)} episodes of {model_name}")
    print(f"{played_on} as {args.mode}, {seconds:.0f} s")
    for shown, value in table.items():
        counted = f"   {value['tasks']} tasks" if "tasks" in value else ""
        print(f"  {shown:16} {value['mean']:9.4f}   [{value['low']:.4f}, {value['high']:.4f}]{counted}")
    print(printable(f"written to {run_dir}; {commands.show(run_dir)} prints episodes"))
