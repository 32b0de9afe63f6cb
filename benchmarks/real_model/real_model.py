"""A real model learns real questions: supervised on demonstrations, then by reinforcement, then judged on dev.

    python benchmarks/real_model/real_model.py --part sft --suite wiki --model FOLDER --data DATA
    python benchmarks/real_model/real_model.py --part rl --suite wiki --model FOLDER --data DATA  # begins with sft
    python benchmarks/real_model/real_model.py --part evaluate --suite wiki --model FOLDER --data DATA  # after both
    python benchmarks/real_model/real_model.py --part report --suite wiki --model FOLDER --data DATA  # of the record

What the repository has recorded is of one model (docs/real_model.md): with another one, or other flags, give `--name`.

`--suite wiki` is HotpotQA, 2WikiMultihopQA and MuSiQue with a search tool (reinforcement on the first two), `--suite
gsm8k` is GSM8K with a calculator. FOLDER is a small chat model (SmolLM2-135M-Instruct), DATA holds hotpotqa/,
2wikimultihopqa/, musique/, gsm8k/ in the official formats. A tenth of the training questions is held out to choose by;
dev (GSM8K: test) is read by `--part evaluate` only. `--profile N` has reinforcement draw questions by how
often they are solved, those that always or never are rarely; `--profile-questions M` plays, and so draws, the first
M of them only.

Long work comes in pieces: after `--hours` (or Ctrl-C) the run under way writes its checkpoint, and the same command
goes on. Finished runs are not repeated (sweep.py). Each evaluation that ends is a line of
results/NAME_episodes.jsonl, and what stands there is neither trained nor played again. `--adapters FOLDER` begins with
the adapters of a supervised training on demonstrations (RUN/checkpoint/policy of a run with --lora-rank) in place of
that run; `GRPO=FOLDER` beside it evaluates those of a learner, on top, in place of its run with seed 1, a second
`GRPO=FOLDER` in place of that with seed 2, and so on.
Tables and JSON are written to results/NAME.md and NAME.json, the picture to docs/images/NAME.png.
"""

import argparse
import json
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "common"), str(ROOT / "learner")]
from machine import RESULTS, above_0, from_1
from real_model_parts.jobs import (
    FIXED,
    builds_on,
    check_jobs,
    evaluation_job,
    flag_name,
    merged,
    once,
    profile_job,
    rl_job,
    sft_jobs,
)  # fmt: skip
from real_model_parts.models import hash_below, hash_of_adapters, hash_of_model, merge, require_weights
from real_model_parts.questions import find_file, hash_of_files, split_questions, write_demonstrations
from real_model_parts.record import (
    alike,
    evaluate,
    how_played,
    how_trained,
    read_record,
    recorded_elsewhere,
)  # fmt: skip
from real_model_parts.report import check_curves, plot, record_curves, write_report
from real_model_parts.suites import LEARNERS, ONLY, PAIRS, START, SUITES, Key
from sweep import Job, finish

from llm_utils.records.earlier_runs import stack_of_adapters
from llm_utils.setup.environments import plain_errors
from llm_utils.setup.sources import model_source

PARTS = ("sft", "rl", "evaluate", "report")


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
    for name, fixed in FIXED.items() if args.part != "report" else ():
        for word in shlex.split(getattr(args, name)):
            if word.startswith("--") and flag_name(word) in fixed:
                parser.error(f"--{name.replace('_', '-')}: {word.partition('=')[0]} is what {parser.prog} sets itself")
    if args.profile == 1:
        parser.error("--profile needs at least 2 samples of each question")
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
    for folder in adapters.values() if args.part != "report" else ():
        require_weights(folder)
    hashes = {one: hash_of_adapters(folder) for one, folder in adapters.items()}
    for (label, _), folder in adapters.items():
        if label != START and (below := hash_below(folder)) not in (None, hashes[START, 1]):
            raise SystemExit(f"--adapters {label}={folder} go on top of others than {adapters[START, 1]}")
        if label != START and below is None:
            print(f"--adapters {label}={folder}: nothing says whether {adapters[START, 1]} are below", file=sys.stderr)
    for one, other in combinations(hashes, 2):
        if hashes[one] == hashes[other]:
            raise SystemExit(f"--adapters {adapters[one]} and {adapters[other]} are the same, of two runs")
    weights = hash_of_model(model)
    questions = hash_of_files([find_file(data / one.folder / one.train) for one in suite.sets.values()])
    work = ROOT / "runs" / "prepared" / f"{name}_{questions}"  # with other questions, runs are others
    # what is recorded needs no run
    wanted = [(label, seed) for label in args.learners for seed in range(1, args.seeds + 1)]
    trained = how_trained(suite, wanted, hashes, questions, args)
    policies, start_how = list(trained), trained[START, 1]
    sets = how_played(suite, data, weights, args)
    how = {(label, which, seed): sets[which] | trained[label, seed] for label, seed in policies for which in sets}
    record = RESULTS / f"{name}_episodes.jsonl"
    recorded = read_record(record, how) if args.part in ("evaluate", "report") else {}
    missing = [(label, seed) for label, seed in policies if any((label, x, seed) not in recorded for x in suite.sets)]
    if args.part == "report":
        write_report(suite, name, alike(recorded, sets, start_how), sets, start_how, args)
        return
    recorded_elsewhere(sets, args.against)
    # prepare
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
    rl_wanted = [one for one in wanted if args.part == "rl" or (one in missing and one not in adapters)]
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
        if rl_jobs and (found := record_curves(rl_jobs, made, RESULTS / f"{name}_curves.json")):
            plot(found, {}, work / "curves.png")  # --part evaluate draws the page's
            print(f"the curves so far: {work / 'curves.png'}")
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
    write_report(suite, name, alike(read_record(record, how), sets, start_how), sets, start_how, args)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted, or --hours are over; the same command goes on", file=sys.stderr)
        sys.exit(130)
