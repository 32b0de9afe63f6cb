"""A real model learns real questions: supervised on demonstrations, then by reinforcement, then judged on dev.

    python benchmarks/real_model.py --part sft --suite wiki --model FOLDER --data DATA
    python benchmarks/real_model.py --part rl --suite wiki --model FOLDER --data DATA         # begins with sft
    python benchmarks/real_model.py --part evaluate --suite wiki --model FOLDER --data DATA   # begins with both
    python benchmarks/real_model.py --part report --suite wiki --model FOLDER --data DATA     # of what is recorded

What the repository has recorded is of one model (docs/real_model.md): with another one, or other flags, give `--name`.

`--suite wiki` is HotpotQA, 2WikiMultihopQA and MuSiQue with a search tool (reinforcement on the first two), `--suite
gsm8k` is GSM8K with a calculator. FOLDER is a small chat model (SmolLM2-135M-Instruct), DATA holds hotpotqa/,
2wikimultihopqa/, musique/, gsm8k/ in the official formats. A tenth of the training questions is held out to choose by;
dev (GSM8K: test) is read by `--part evaluate` only. `--profile N` has reinforcement draw questions by how
often they are solved, those that always or never are rarely; `--profile-questions M` plays, and so draws, the first
M of them only.

Long work comes in pieces: after `--hours` (or Ctrl-C) the run under way writes its checkpoint, and the same command
goes on. Finished runs are not repeated (llm_utils/benchmark.py). Each evaluation that ends is a line of
results/NAME_episodes.jsonl, and what stands there is neither trained nor played again. `--adapters FOLDER` begins with
the adapters of a supervised training on demonstrations (RUN/checkpoint/policy of a run with --lora-rank) in place of
that run; `GRPO=FOLDER` beside it evaluates those of a learner, on top, in place of its run with seed 1, a second
`GRPO=FOLDER` in place of that with seed 2, and so on.
Tables and JSON go to results/, tables to docs/real_model.md, where it has marks of that name.
"""

import argparse
import importlib
import json
import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

from machine import DOCS, RESULTS, above_0, describe_machine, from_1, put_tables, record_results

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "learner"))
from real_model_parts.episodes import examples, figures, make_env, read_episodes, story  # noqa: E402
from real_model_parts.models import hash_of_adapters, hash_of_model, merge  # noqa: E402
from real_model_parts.questions import (  # noqa: E402
    env_kwargs,
    find_file,
    hash_of_files,
    split_questions,
    write_demonstrations,
)  # fmt: skip
from real_model_parts.report import Episodes, check_curves, plot, record_curves, runs_table, tables  # noqa: E402
from real_model_parts.suites import LEARNERS, ONLY, PAIRS, START, SUITES, Figures, Key, Suite  # noqa: E402

from llm_utils.benchmark import Job, find, finish, make_job  # noqa: E402
from llm_utils.earlier_runs import stack_of_adapters  # noqa: E402
from llm_utils.environments import plain_errors  # noqa: E402
from llm_utils.run_files import write_json  # noqa: E402
from llm_utils.sources import model_source  # noqa: E402

PARTS = ("sft", "rl", "evaluate", "report")
SAMPLING = ("engine", "vllm_url", "dtype", "num_envs", "temperature", "top_p")  # learners and evaluations have them


# ------------------------------------------------------------------------------------------------------- command line


def name_and_folder(text: str) -> tuple[str, Path]:
    """Whose adapters, and where they are, of "GRPO=FOLDER" or "FOLDER"."""
    name, given, folder = text.partition("=")
    if name in LEARNERS and given:
        return name, Path(folder).resolve()
    if given and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(LEARNERS)}")
    return START, Path(text).resolve()


def flags_type(text: str) -> str:
    """Flags in one text."""
    try:
        shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return text


def without_speed(flags: str) -> str:
    """Flags without those that change no figure but for rounding."""
    words, kept = iter(shlex.split(flags)), []
    for word in words:
        name, has_value, _ = word.partition("=")
        if name not in ("--num-threads", "--num-envs"):
            kept.append(word)
        elif not has_value:
            next(words, None)
    return shlex.join(kept)


# --------------------------------------------------------------------------------------------------------------- jobs


@contextmanager
def once(note: Path, facts: Any) -> Iterator[bool]:
    """Yields True where this wasn't done yet for these facts, and notes at the end that it is."""
    needed = not note.is_file() or json.loads(note.read_text()) != facts
    if needed:
        note.unlink(missing_ok=True)
    yield needed
    if needed:
        write_json(note, facts)


def merged(label: str, seed: int = 1) -> str:
    """The folder of a model with a policy's adapters in its weights."""
    return "start" if label == START else label + f" {seed}" * (seed > 1)


def sft_jobs(suite: Suite, model: str, work: Path, flags: Sequence[str]) -> dict[str, Job]:
    jobs = {}
    for label, kind, own in ((START, "agent", suite.sft), (PAIRS, "closed_book", suite.pairs)):
        words = ["python", "learner/sft_llm.py", "--exp-name", f"real_{work.name}_{kind}", "--model", model]
        words += ["--env-id", next(iter(suite.sets.values())).env_id, "--data", str(work / f"{kind}_train.jsonl")]
        words += ["--eval-data", str(work / f"{kind}_heldout.jsonl"), "--microbatch-tokens", "2048"]
        words += ["--eval-every", "56", "--checkpoint-every", "56"]
        jobs[label] = make_job([*words, *own, *flags])
    return jobs


def rl_job(suite: Suite, work: Path, start: Path, label: str, seed: int, flags: Sequence[str]) -> Job:
    script, changed = LEARNERS[label]
    first = suite.sets[suite.reinforced[0]]
    kwargs = env_kwargs(suite, work / "reinforced", **changed)
    name = re.sub(r"\W+", "_", f"real_{work.name}_{label.lower()}")
    words = ["python", f"learner/{script}", "--exp-name", name, "--seed", str(seed), "--env-id", first.env_id]
    words += ["--env-kwargs", kwargs, "--model", str(start), "--save-model"]
    if "--eval-episodes=0" not in flags and ("--eval-episodes", "0") not in zip(flags, flags[1:], strict=False):
        # with it the other two would do nothing
        words += ["--eval-split", first.split, "--eval-episodes", "200", "--eval-every", "8"]
    return make_job([*words, "--checkpoint-every", "8", *suite.rl, *flags])


def profile_job(suite: Suite, work: Path, learner: Job, times: int, questions: int | None = None) -> Job:
    """Every training question, or the first `questions`, so many times, sampled as this learner samples."""
    args = learner.args
    words = ["python", "learner/evaluate_llm.py", "--exp-name", f"real_{work.name}_profile", "--model", args["model"]]
    words += ["--env-id", args["env_id"], "--env-kwargs", env_kwargs(suite, work / "reinforced"), "--split", "train"]
    words += ["--episodes", str(questions or 1_000_000), "--profile", str(times)]
    words += ["--cuda" if args["cuda"] else "--no-cuda"]
    same = [name for name in SAMPLING if name != "dtype" or args["engine"] == "transformers"]
    words += [word for name in same for word in (f"--{name.replace('_', '-')}", str(args[name]))]
    return make_job([*words, *["--num-threads", str(learner.threads)] * (learner.threads is not None)])


def evaluation_job(suite: Suite, name: str, data: Path, questions: str, label: str, seed: int, model: str, mode: str,
                   flags: Sequence[str]) -> Job:  # fmt: skip
    """`questions` is the hash of their file: of another one a run is another."""
    data_set = suite.sets[name]
    exp_name = re.sub(r"\W+", "_", f"real_{label.lower()}_{name.lower()}_{questions}")
    words = ["python", "learner/evaluate_llm.py", "--exp-name", exp_name, "--seed", str(seed), "--model", model]
    words += ["--mode", mode, "--env-id", data_set.env_id, "--split", data_set.split, "--episodes", "1000000"]
    words += ["--env-kwargs", env_kwargs(suite, data / data_set.folder), "--num-envs", "32"]
    return make_job([*words, *flags])


# --------------------------------------------------------------------------------------------------------------- main


def check_jobs(jobs: Sequence[Job]) -> None:
    """SystemExit where a script would refuse its arguments: now, not after the hours of those before it."""
    for job in jobs:
        script = importlib.import_module(Path(job.words[1]).stem)
        script.check(script.Args(**job.args))


def builds_on(
    part: str, missing: Sequence[tuple[str, int]], reinforced: Sequence[tuple[str, int]], baselines: bool = True
) -> list[str]:
    """The supervised policies that a part needs: reinforcement begins with one, an evaluation plays what is missing."""
    if part == "sft":
        return [START, PAIRS] if baselines else [START]
    wanted = {START} if reinforced or part == "rl" else set()
    if part == "evaluate":
        wanted |= {label for label, _ in missing}
    return [label for label in (START, PAIRS) if label in wanted]


def evaluate(jobs: dict[Key, Job], how: dict[Key, dict[str, Any]], record: Path, model: str, workers: int) -> None:
    """Play what isn't recorded, and record a line of each evaluation that ends, also when others were interrupted.

    SystemExit, after all others, where faults ended some of the episodes.
    """
    from agent_r1.tokenizers import load_tokenizer

    there = read_record(record, how)
    jobs = {key: job for key, job in jobs.items() if key not in there}
    damaged = []
    try:
        finish(list(jobs.values()), workers)
    finally:
        for key, job in jobs.items():
            folder, finished = find(job)
            if finished:
                line = dict(zip(("policy", "set", "seed"), key, strict=True)) | how[key]
                line["machine"] = describe_machine()
                try:
                    rows = read_episodes(folder, load_tokenizer(model))
                except ValueError as error:
                    damaged.append(f"{folder}: {error}; delete the folder to play it again")
                    continue
                env = make_env(json.loads((folder / "evaluation.json").read_text())["args"])
                line |= figures(rows)
                line["examples"] = examples(rows, lambda index, env=env: env.make_task(index).answers)
                record.parent.mkdir(exist_ok=True)
                with record.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    if damaged:
        raise SystemExit("\n".join(damaged))


def by_policy(recorded: dict[Key, Figures]) -> Episodes:
    """The figures of every policy on every set, in the order of the record."""
    episodes: Episodes = {}
    for (label, which, _), found in recorded.items():
        episodes.setdefault(label, {}).setdefault(which, []).append(found)
    return episodes


def adapters_as_words(adapters: dict[tuple[str, int], Path]) -> list[str]:
    """As `--adapters` takes them; where somebody has them outside of the repository doesn't matter to others."""
    words = []
    for (label, _), folder in adapters.items():
        ours = folder.is_relative_to(ROOT / "benchmarks" / "adapters")
        where = str(folder.relative_to(ROOT)) if ours else "ADAPTERS"
        words.append(where if label == START else f"{label}={where}")
    return words


def recorded_elsewhere(sets: dict[str, dict[str, Any]], names: Sequence[str]) -> dict[str, Episodes]:
    """What is recorded under other names of this model and these questions. SystemExit where nothing is supervised."""
    same = {which: {x: how[x] for x in ("model", "questions") if x in how} for which, how in sets.items()}
    against = {of: by_policy(alike(read_record(RESULTS / f"{of}_episodes.jsonl", {}), same)) for of in names}
    for of in names:
        if START not in against[of]:
            raise SystemExit(f"--against {of}: it has no {START} of this model and these questions")
    return against


def write_report(
    suite: Suite, name: str, recorded: dict[Key, Figures], sets: dict[str, dict[str, Any]], args: argparse.Namespace
) -> None:
    """Write the tables of what is recorded, and episodes that went wrong. SystemExit where nothing is."""
    if not recorded:
        raise SystemExit(f"nothing of {name} is recorded; --part evaluate plays it")
    against = recorded_elsewhere(sets, args.against)
    to_read = [f"# Episodes that went wrong\n\nThe first of each kind, of the trained agents of `{name}.md`."]
    for (label, which, seed), found in recorded.items():
        if label == START or label in LEARNERS:
            to_read += [f"## {label}, {which}, seed {seed}", *map(story, found.get("examples", ()))]
    (RESULTS / f"{name}_examples.md").write_text("\n\n".join(to_read) + "\n")
    table, numbers = tables(suite, by_policy(recorded), against)
    curves = RESULTS / f"{name}_curves.json"
    if curves.is_file():
        found = json.loads(curves.read_text())
        plot(found, recorded, ROOT / "docs" / "images" / f"{name}.png")
        table += f"\n\n{runs_table(found)}"
    print(table)
    command = f"python benchmarks/real_model.py --part {args.part} --suite {args.suite} --model FOLDER"
    command += f" --data DATA --seeds {args.seeds}" + (f" --name {name}" if args.name else "")
    command += f" --learners {shlex.join(args.learners)}".rstrip()
    command += f" --profile {args.profile}" if args.profile else ""
    command += f" --profile-questions {args.profile_questions}" if args.profile_questions else ""
    command += f" --against {shlex.join(args.against)}" if args.against else ""
    if args.adapters:
        command += f" --adapters {shlex.join(adapters_as_words(args.adapters))}"
    command += "" if args.baselines else " --no-baselines"
    for flag in ("sft_flags", "rl_flags", "evaluate_flags"):
        if getattr(args, flag):
            command += f' --{flag.replace("_", "-")} "{getattr(args, flag)}"'
    record_results(name, numbers, table, command, merged=True)
    put_tables(DOCS / "real_model.md", name, table)


def how_trained(suite: Suite, reinforced: Sequence[tuple[str, int]], adapters: dict[tuple[str, int], str],
                questions: str, args: argparse.Namespace) -> dict[tuple[str, int], dict[str, Any]]:  # fmt: skip
    """Which training a figure is of, for each policy and seed: its flags and questions, or the hash of adapters."""
    sft = {"sft_flags": without_speed(args.sft_flags), "trained_on": questions}
    start = {"adapters": adapters[START, 1]} if adapters else sft
    found: dict[tuple[str, int], dict[str, Any]] = {(START, 1): start}
    if args.baselines:
        found = {(label, 1): {} for label in suite.modes} | {(PAIRS, 1): sft} | found
    for label, seed in reinforced:
        if args.part != "rl" and (label, seed) in adapters:
            found[label, seed] = start | {"on_top": adapters[label, seed]}
        else:
            found[label, seed] = start | {"rl_flags": without_speed(args.rl_flags), "trained_on": questions}
            told = {"profile": args.profile, "profile_questions": args.profile_questions}
            found[label, seed] |= {name: number for name, number in told.items() if number}
    return found


def how_played(suite: Suite, data: Path, model: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Which model, questions and flags a figure is of, for each set; nothing for a part that plays none of dev."""
    if args.part not in ("evaluate", "report"):
        return {which: {} for which in suite.sets}
    flags = without_speed(args.evaluate_flags)
    files = {which: find_file(data / one.folder / one.heldout) for which, one in suite.sets.items()}
    return {
        which: {"model": model, "questions": hash_of_files([file]), "evaluate_flags": flags}
        for which, file in files.items()
    }


def alike(recorded: dict[Key, Figures], sets: dict[str, dict[str, Any]]) -> dict[Key, Figures]:
    """What was played with these models, questions and flags."""
    return {
        key: row for key, row in recorded.items()
        if key[1] in sets and all(row.get(name) == value for name, value in sets[key[1]].items())
    }  # fmt: skip


def read_record(path: Path, how: dict[Key, dict[str, Any]]) -> dict[Key, Figures]:
    """What was recorded of these. SystemExit for a line that was made in another way."""
    found = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        row = json.loads(line)
        key = (row["policy"], row["set"], row["seed"])
        if key in how and any(row.get(name) != value for name, value in how[key].items()):
            said = f"{path} has {', '.join(map(str, key))} of another model, other questions, or with other flags"
            raise SystemExit(f"{said}; delete that line, or give --name")
        found[key] = row
    return found


def in_order(given: Sequence[tuple[str, Path]]) -> dict[tuple[str, int], Path]:
    """Adapters by label and seed, those of the supervised policy first: a label's first folder is of seed 1."""
    times = Counter[str]()
    found = {}
    for label, folder in sorted(given, key=lambda one: one[0] != START):
        times[label] += 1
        found[label, times[label]] = folder
    return found


def arguments() -> argparse.Namespace:
    """What the command line says; `adapters` by label and seed, that of the supervised policy first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True, help="how far to go; what a part builds on comes first")
    parser.add_argument("--suite", choices=list(SUITES), required=True)
    parser.add_argument("--model", required=True, help="the chat model to begin with: a folder or a Hugging Face name")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds the data sets' folders")
    parser.add_argument("--adapters", type=name_and_folder, nargs="*", default=[], metavar="[LEARNER=]FOLDER",
                        help="in place of training on demonstrations; with a learner's name, of its run (that of "
                        "its first seed, then the second's; a seed without one is trained)")
    parser.add_argument("--learners", nargs="*", choices=list(LEARNERS), default=["GRPO"],
                        help="of parts rl and evaluate; without a name only what comes before is evaluated")
    parser.add_argument("--baselines", action=argparse.BooleanOptionalAction, default=True,
                        help="also the model as it comes, and with question-answer pairs")
    parser.add_argument("--profile", type=from_1, metavar="N",
                        help="play each training question N times before reinforcement, which then draws them by what "
                        "share succeeded (--sample-by-pass-rate)")
    parser.add_argument("--profile-questions", type=from_1, metavar="M",
                        help="with --profile: the first M training questions alone are played, and drawn")
    parser.add_argument("--against", nargs="*", default=[], metavar="NAME",
                        help="results of other names whose supervised policy is compared with, too")
    parser.add_argument("--seeds", type=from_1, default=1, help="runs of each learner")
    parser.add_argument("--workers", type=from_1, default=1, help="runs at the same time")
    parser.add_argument("--hours", type=above_0, default=2.0,
                        help="stop after so many hours (default: 2); the same command goes on")
    parser.add_argument("--sft-flags", type=flags_type, default="",
                        help="further flags of sft_llm.py, in quotation marks")
    parser.add_argument("--rl-flags", type=flags_type, default="",
                        help="further flags of the learners, in quotation marks")
    parser.add_argument("--evaluate-flags", type=flags_type, default="",
                        help="further flags of evaluate_llm.py, in quotation marks")
    parser.add_argument("--name", help="of the results and of the folder below runs/ (default: real_model_SUITE)")
    args = parser.parse_args()
    if args.hours > 8760:
        parser.error(f"--hours {args.hours:g}: at most 8760, a year")
    for label, number in Counter(args.learners).items():
        if number > 1:
            parser.error(f"--learners has {label!r} {number} times; --seeds gives it further runs")
        if ONLY.get(label, args.suite) != args.suite:
            parser.error(f"--learners {label!r} is for --suite {ONLY[label]}: {args.suite} has nothing like it")
    for label, number in Counter(label for label, _ in args.adapters).items():
        if label not in (START, *args.learners):
            parser.error(f"--adapters of {label}, which isn't among --learners")
        most, of = (1, "there is") if label == START else (args.seeds, "--seeds")
        if number > most:
            parser.error(f"--adapters: {number} folders of {label}, and {of} {most}")
    args.adapters = in_order(args.adapters)
    if args.adapters and (START, 1) not in args.adapters:
        parser.error("--adapters of a learner come on top of those of the training on demonstrations; give both")
    if args.name is not None and ("/" in args.name or args.name in ("", ".", "..")):
        parser.error(f"--name {args.name}: a name, not a path" if args.name else "--name is empty: give one, or none")
    if args.profile_questions and not args.profile:
        parser.error("--profile-questions says how many --profile plays; give that, too")
    return args


def main() -> None:
    args = arguments()
    adapters: dict[tuple[str, int], Path] = args.adapters
    suite, data = SUITES[args.suite], args.data.resolve()
    env_id = next(iter(suite.sets.values())).env_id
    model = model_source(args.model, env_id)
    model = str(Path(model).resolve()) if Path(model).is_dir() else model
    name = args.name or f"real_model_{args.suite}"
    os.chdir(ROOT)
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C: the run under way writes its checkpoint
    signal.setitimer(signal.ITIMER_REAL, args.hours * 3600)
    if (START, 1) in adapters and len(stack := stack_of_adapters(str(adapters[START, 1]))) > 1:
        raise SystemExit(f"--adapters {stack[-1]} go on top of {stack[-2]}: give that one, and LEARNER={stack[-1]}")
    hashes = {one: hash_of_adapters(folder) for one, folder in adapters.items()}
    for one, other in combinations(hashes, 2):
        if hashes[one] == hashes[other]:
            raise SystemExit(f"--adapters {adapters[one]} and {adapters[other]} are the same, of two runs")
    weights = hash_of_model(model)
    questions = hash_of_files([find_file(data / one.folder / one.train) for one in suite.sets.values()])
    work = ROOT / "runs" / "prepared" / f"{name}_{questions}"  # with other questions, runs are others
    if args.part != "report":
        with once(work / "prepared.json", [model, weights, args.suite]) as needed:
            if needed:
                split_questions(suite, data, work)
                with plain_errors(env_id):
                    write_demonstrations(suite, model, work)
        for one, folder in adapters.items():  # START is the first one
            below = model if one[0] == START else str(work / merged(START))
            with once(work / f"{merged(*one)}.json", [model, weights, hashes[START, 1], hashes[one]]) as needed:
                if needed:
                    merge(below, folder, work / merged(*one))
    # what is recorded needs no run
    wanted = [(label, seed) for label in args.learners for seed in range(1, args.seeds + 1)]
    trained = how_trained(suite, wanted, hashes, questions, args)
    policies = list(trained)
    sets = how_played(suite, data, weights, args)
    how = {(label, which, seed): sets[which] | trained[label, seed] for label, seed in policies for which in sets}
    record = RESULTS / f"{name}_episodes.jsonl"
    recorded = read_record(record, how) if args.part in ("evaluate", "report") else {}
    missing = [(label, seed) for label, seed in policies if any((label, x, seed) not in recorded for x in suite.sets)]
    if args.part == "report":
        write_report(suite, name, alike(recorded, sets), sets, args)
        return
    rl_wanted = [one for one in wanted if args.part == "rl" or (one in missing and one not in adapters)]
    recorded_elsewhere(sets, args.against)
    rl_flags, evaluate_flags = shlex.split(args.rl_flags), shlex.split(args.evaluate_flags)

    def evaluations_of(played: Sequence[tuple[str, int]], by: Callable[[str, int], tuple[str, str]]) -> dict[Key, Job]:
        return {
            (label, which, seed): evaluation_job(suite, which, data, sets[which].get("questions", ""), label, seed,
                                                 *by(label, seed), evaluate_flags)
            for label, seed in played for which in suite.sets
        }  # fmt: skip

    # train
    runs: dict[tuple[str, int], tuple[str, str]] = {(label, 1): (model, mode) for label, mode in suite.modes.items()}
    jobs = sft_jobs(suite, model, work, shlex.split(args.sft_flags))
    runs |= {one: (str(work / merged(*one)), "agent") for one in adapters}
    to_train = [label for label in builds_on(args.part, missing, rl_wanted, args.baselines) if (label, 1) not in runs]
    planned = [jobs[label] for label in to_train]  # with the model as it comes in place of what isn't trained yet
    planned += [rl_job(suite, work, Path(model), *one, rl_flags) for one in wanted]
    check_jobs([*planned, *evaluations_of(policies, lambda *_: (model, "agent")).values()])
    for label, folder in zip(to_train, finish([jobs[label] for label in to_train], args.workers), strict=True):
        runs[label, 1] = (str(folder), "closed_book" if label == PAIRS else "agent")
        report = json.loads((folder / "summary.json").read_text())
        print(f"{label}: loss {report['eval/expert_token_loss_first']:.3f} -> "
              f"{report['eval/expert_token_loss_last']:.3f} on held-out questions, "
              f"{report['train_seconds'] / 60:.0f} minutes; {folder}")  # fmt: skip
    if args.part == "sft":
        return
    start = Path(runs[START, 1][0]) if rl_wanted else work
    made = {one: json.dumps(trained[one] | {"model": weights}) for one in rl_wanted}
    check_curves(made, RESULTS / f"{name}_curves.json")
    if args.profile and rl_wanted:
        learner = rl_job(suite, work, start, *rl_wanted[0], rl_flags)
        [folder] = finish([profile_job(suite, work, learner, args.profile, args.profile_questions)], 1)
        rl_flags += ["--sample-by-pass-rate", str(folder / "pass_rates.json")]
    rl_jobs = {one: rl_job(suite, work, start, *one, rl_flags) for one in rl_wanted}
    try:
        folders = finish(list(rl_jobs.values()), args.workers)
    finally:
        if found := record_curves(rl_jobs, made, RESULTS / f"{name}_curves.json"):
            plot(found, {}, ROOT / "docs" / "images" / f"{name}.png")
    for (label, seed), folder in zip(rl_wanted, folders, strict=True):
        runs[label, seed] = (str(folder), "agent")
        report = json.loads((folder / "summary.json").read_text())
        heldout = [f"{report[f'eval/exact_match_{end}']:.3f}" for end in ("first", "last")
                   if f"eval/exact_match_{end}" in report]  # fmt: skip
        print(f"{label}: " + (f"held-out EM {' -> '.join(heldout)}, " if heldout else "")
              + f"{report['train_seconds'] / 3600:.1f} hours; {folder}")  # fmt: skip
    if args.part == "rl":
        return

    # evaluate
    evaluations = evaluations_of(missing, lambda *one: runs[one])
    evaluate(evaluations, how, record, model, args.workers)
    write_report(suite, name, alike(read_record(record, how), sets), sets, args)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted, or --hours are over; the same command goes on", file=sys.stderr)
        sys.exit(130)
