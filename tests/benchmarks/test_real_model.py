"""benchmarks/real_model/real_model.py: its questions, jobs, record and report."""

import argparse
import gzip
import importlib
import json
import re
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import machine
import numpy as np
import pytest
import real_model
from real_model_parts import episodes, jobs, models, questions, record, report, suites

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "envs" / "agent_r1" / "policies" / "MultihopWorld-v0"


def test_learners_begin_with_the_adapters_that_are_evaluated(tmp_path):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    from llm_utils.setup.loading import load_policy, merge_adapters

    def policy(folder: Path = TINY):
        return load_policy(folder, torch.device("cpu"))

    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(policy(), config).save_pretrained(tmp_path / "adapters")
    models.merge(str(TINY), tmp_path / "adapters", tmp_path / "start")
    expected = merge_adapters(policy(), str(tmp_path / "adapters")).state_dict()
    written = policy(tmp_path / "start").state_dict()
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], weight) for name, weight in expected.items())
    assert (tmp_path / "start" / "tokenizer.json").is_file()


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_questions_of_a_real_model_end_where_their_lines_do(tmp_path, ending):
    """A line feed ends them, and none of the other characters at which Python splits lines (GSM8K has one)."""
    rows = [{"question": "one\u2028two\x85three"}, {"question": "four"}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    (tmp_path / f"train.jsonl{ending}").write_bytes(gzip.compress(text) if ending else text)
    assert questions.read_rows(tmp_path / "train.jsonl") == rows


def test_the_table_of_trainings_says_how_far_they_came():
    whole = {"charts/episodic_return": [0.1, 0.2, 0.3], "charts/episodic_return at episodes": [64.0, 128.0, 192.0],
             "charts/episodic_return at seconds": [30.0, 60.0, 90.0], "charts/exact_match": [0.0, 0.5, 1.0],
             "eval/em": [0.25, 0.5], "time/rollout": 60.0, "time/score": 10.0, "time/train": 29.0,
             "time/sync": 1.0, "sampler/gap_mean": 0.01}  # fmt: skip
    young = {"charts/episodic_return": [0.1], "charts/episodic_return at episodes": [1e4],
             "charts/episodic_return at seconds": [6.0]}  # fmt: skip
    table = report.runs_table({"GRPO": {"1": whole, "2": {"how": "not begun"}}, "PPO": {"1": young}})
    assert table.splitlines()[2:] == [
        "| GRPO | 1 | 192 | 1.5 | 60 %, 10 %, 29 % | 0.0100 | 0.100, 0.300 | 0.000, 1.000 | 0.250, 0.500 |",
        "| PPO | 1 | 10,000 | 0.1 | – | – | – | – | – |",
    ]


def test_reinforcement_of_a_real_model_trains_no_other_baseline_first():
    start, pairs, learner = suites.START, suites.PAIRS, ("GRPO", 1)
    everything = [(start, 1), (pairs, 1), learner]
    assert jobs.builds_on("sft", everything, []) == [start, pairs]
    assert jobs.builds_on("sft", everything, [], baselines=False) == [start]
    assert jobs.builds_on("rl", everything, [learner]) == jobs.builds_on("rl", everything, []) == [start]
    assert jobs.builds_on("evaluate", everything, [learner]) == [start, pairs]
    assert jobs.builds_on("evaluate", [(pairs, 1)], []) == [pairs]
    assert jobs.builds_on("evaluate", [learner], [learner]) == [start]


@pytest.mark.parametrize("flags", [["--eval-episodes", "0"], ["--eval_episodes=0"], []])
def test_a_run_without_evaluation_is_not_told_when_to_evaluate(tmp_path, flags):
    job = jobs.rl_job(suites.SUITES["gsm8k"], tmp_path, TINY, "GRPO", 1, flags)
    assert ("--eval-split" in job.words) == (not flags) and job.args["eval_episodes"] == (0 if flags else 200)


def test_a_learner_s_label_says_what_its_environment_pays(tmp_path):
    for label, (script, changed) in suites.LEARNERS.items():
        job = jobs.rl_job(suites.GSM8K, tmp_path, TINY, label, 1, [])
        assert script in job.words[1] and script.startswith(label[:3].lower())
        assert changed.items() <= json.loads(job.args["env_kwargs"]).items()
        assert ("step_found" in str(changed)) == ("steps" in label) and "0.0" not in str(changed.get("process_reward"))
        assert (changed == {}) == (label in ("GRPO", "PPO")) and ("unfinished_reward" in changed) == ("free" in label)


@pytest.mark.parametrize("engine", ["transformers", "vllm-server"])
def test_training_questions_are_profiled_as_training_samples_them(tmp_path, engine):
    suite, sampling = suites.SUITES["gsm8k"], {"num_envs": 16, "top_p": 0.9, "engine": engine, "cuda": False}
    flags = ["--num-envs=16", "--no-preflight", "--top-p", "0.9", "--engine", engine, "--no-cuda", "--num-threads", "1"]
    flags += ["--vllm-url", "http://there:1"] if engine == "vllm-server" else ["--dtype", "float32"]
    learner = jobs.rl_job(suite, tmp_path, TINY, "GRPO", 1, flags)
    job = jobs.profile_job(suite, tmp_path, learner, 3)
    sampling |= {"vllm_url": "http://there:1"} if engine == "vllm-server" else {"dtype": "float32"}
    assert job.args | sampling | {"samples": 3, "split": "train", "temperature": 1.0} == job.args
    assert str(tmp_path / "reinforced") in job.args["env_kwargs"] and job.threads == 1
    few = jobs.profile_job(suite, tmp_path, learner, 3, 50)
    assert (job.args["episodes"], few.args["episodes"]) == (1_000_000, 50)


def test_questions_that_were_drawn_by_pass_rate_are_part_of_how_a_policy_was_trained():

    def trained(**profile):
        args = SimpleNamespace(part="rl", rl_flags="", sft_flags="", baselines=False, **profile)
        return record.how_trained(suites.SUITES["gsm8k"], [("GRPO", 1)], {}, "hash", args)["GRPO", 1]

    every = trained(profile=2, profile_questions=None)
    assert every == trained(profile=None, profile_questions=None) | {"profile": 2}
    assert trained(profile=2, profile_questions=50) == every | {"profile_questions": 50}


def test_episodes_that_faults_ended_are_no_figures(tmp_path):
    row = {"tokens": [0, 1, 2], "action_mask": [0, 0, 1], "prompt_length": 1, "answer": "B", "task_index": 0}
    row |= {"stats": {"success": 0.0, "format": 1.0}, "fault": None}
    tokenizer = SimpleNamespace(decode=lambda tokens: "a b" if tokens == [1] else "")
    path = tmp_path / "trajectories.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"task_index": 1, "answer": "c"}) + "\n")
    assert [row["error"] for row in episodes.read_episodes(tmp_path, tokenizer)] == ["reasoning", "copying"]
    path.write_text(path.read_text() + json.dumps(row | {"fault": "retrieval"}) + "\n")
    with pytest.raises(ValueError, match=r"1 of 3 episodes were ended by faults \(retrieval\)"):
        episodes.read_episodes(tmp_path, tokenizer)


def test_what_is_prepared_is_prepared_once(tmp_path):
    note, done = tmp_path / "note.json", []
    for facts in (["a"], ["a"], ["b"]):
        with jobs.once(note, facts) as needed:
            done.append(needed)
    with suppress(ValueError), jobs.once(note, ["c"]):
        raise ValueError("interrupted")
    with jobs.once(note, ["c"]) as needed:
        done.append(needed)
    assert done == [True, False, True, True]


def test_adapters_are_of_the_run_that_is_named():
    assert real_model.name_and_folder("/a/b") == (suites.START, Path("/a/b"))
    assert real_model.name_and_folder("GRPO, outcome only=/a=b") == ("GRPO, outcome only", Path("/a=b"))
    with pytest.raises(argparse.ArgumentTypeError, match="'RLOO' is none of GRPO"):
        real_model.name_and_folder("RLOO=/a")
    given = real_model.in_order([("PPO", Path("a")), ("PPO", Path("b")), (suites.START, Path("c"))])
    assert list(given.items()) == [((suites.START, 1), Path("c")), (("PPO", 1), Path("a")), (("PPO", 2), Path("b"))]
    assert [jobs.merged(*one) for one in given] == ["start", "PPO", "PPO 2"]
    hashes = {one: str(folder) for one, folder in given.items()}
    args = SimpleNamespace(part="evaluate", rl_flags="", sft_flags="", baselines=False, profile=0, profile_questions=0)
    found = record.how_trained(suites.SUITES["wiki"], [("PPO", seed) for seed in (1, 2, 3)], hashes, "q", args)
    assert found["PPO", 2] == {"adapters": "c", "on_top": "b"} and "trained_on" in found["PPO", 3]
    args.part = "rl"  # trains, whatever adapters a learner has
    found = record.how_trained(suites.SUITES["wiki"], [("PPO", 1)], hashes, "q", args)
    assert found["PPO", 1] == {"adapters": "c", "rl_flags": "", "trained_on": "q"}


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """real_model's main(), on questions and adapters that are nothing but names; what it did, in order."""
    (tmp_path / "learner").symlink_to(ROOT / "learner")
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text(name)
    done, reported = [], []

    def merge(model, adapters, folder):
        done.append((Path(model).name, adapters.name, folder.name))
        shutil.copytree(TINY, folder, dirs_exist_ok=True)

    def evaluate(jobs, how, record, model, workers):
        done.append({key: Path(job.args["model"]).name for key, job in jobs.items()})

    def finish(jobs, workers):
        done.append([(job.args["exp_name"].rpartition("_")[2], job.args["seed"]) for job in jobs])
        assert not jobs, "to be trained"
        return []

    stand_ins = {"ROOT": tmp_path, "RESULTS": tmp_path / "results", "merge": merge, "evaluate": evaluate,
                 "finish": finish, "find_file": lambda path: path, "hash_of_files": lambda files: "q",
                 "split_questions": lambda suite, data, work: work.mkdir(parents=True),
                 "write_demonstrations": lambda *_: None,
                 "write_report": lambda suite, name, found, sets, start, _: reported.append((list(found), start)),
    }  # fmt: skip
    for name, value in stand_ins.items():
        for module in (real_model, record):
            if name in vars(module):
                monkeypatch.setattr(module, name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)

    def run(*words):
        done.clear()
        monkeypatch.setattr(sys, "argv", ["real_model.py", "--part", "evaluate", "--suite", "gsm8k", "--data", ".",
                                          "--model", str(TINY), "--no-baselines", *words])  # fmt: skip
        real_model.main()
        return done

    run.done, run.reported = done, reported
    return run


def test_each_seed_is_played_with_its_own_adapters(prepared, tmp_path):
    start, words = "SFT on demonstrations", ["--learners", "PPO", "--seeds", "2", "--adapters", "a", "PPO=b", "PPO=c"]
    first = [(TINY.name, "a", "start"), ("start", "b", "PPO"), ("start", "c", "PPO 2")]
    played = {(start, "GSM8K", 1): "start", ("PPO", "GSM8K", 1): "PPO", ("PPO", "GSM8K", 2): "PPO 2"}
    assert prepared(*words) == [*first, [], [], played]
    assert prepared(*words) == [[], [], played]
    (tmp_path / "c" / "adapter_model.safetensors").write_text("another")
    assert prepared(*words) == [first[2], [], [], played]
    with pytest.raises(AssertionError, match="to be trained"):
        prepared("--learners", "PPO", "--seeds", "3", *words[4:])
    assert prepared.done[-1] == [("ppo", 3)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--learners", "PPO", "PPO"], "--learners has 'PPO' 2 times"),
        (["--rl-flags", "--bogus 3"], "Unrecognized"),
        (["--rl-flags", "--learning-rate -1"], "--learning-rate must be at least 0"),
        (["--rl-flags", "--total-episodes 63"], "--total-episodes 63 is not a multiple of"),
        (["--rl-flags", "'open"], "No closing quotation"),
        (["--evaluate-flags", "--bogus 4"], "Unrecognized"),
        (["--evaluate-flags", "--top-p 0.5"], "--top-p does nothing without a --temperature above 0"),
        (["--sft-flags", "--bogus 5"], "Unrecognized"),
        (["--against", "nobody"], "--against nobody: it has no SFT on demonstrations"),
        (["--name", ""], "--name is empty"),
        (["--hours", "1e9"], "at most 8760"),
    ],
)
def test_what_a_later_part_would_refuse_is_refused_before_anything_is_trained(prepared, capsys, words, said):
    with pytest.raises(SystemExit) as refused:
        prepared("--learners", "PPO", "--adapters", "a", *words)
    captured = capsys.readouterr()
    assert said in f"{refused.value} {captured.err} {captured.out}"
    with pytest.raises(SystemExit):  # whatever comes first
        prepared("--learners", "PPO", "--adapters", "a", *words, "--part", "rl")
    assert not [what for what in prepared.done if isinstance(what, list)]  # no call of `finish`


def test_adapters_of_a_learner_are_no_start(prepared, tmp_path):
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    (tmp_path / "b" / "adapter_config.json").write_text('{"base_model_name_or_path": "../a"}')
    with pytest.raises(SystemExit, match="/b go on top of .*a: give that one, and LEARNER=.*/b"):
        prepared("--learners", "PPO", "--adapters", "b")
    assert not prepared.done


def test_adapters_of_a_learner_that_began_elsewhere_are_refused(prepared, tmp_path):
    words = ["--learners", "PPO", "--adapters", "a", "PPO=b"]
    config = tmp_path / "b" / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": "../c"}))
    (tmp_path / "c" / "adapter_config.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"PPO=.*/b go on top of others than .*/a$"):
        prepared(*words)
    shutil.copy(tmp_path / "a" / "adapter_model.safetensors", tmp_path / "c")  # the same under another name
    assert prepared(*words)


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("--evaluate-flags", "--model tiny"), ("--evaluate-flags", "--mode=closed_book"),
        ("--evaluate-flags", "--env_kwargs '{}'"), ("--evaluate-flags", "--seed 3"),
        ("--evaluate-flags", "--samples 2"),
        ("--rl-flags", "--no-save-model"), ("--rl-flags", "--seed 7"), ("--rl-flags", "--resume runs/x"),
        ("--rl-flags", "--split dev"), ("--rl-flags", "--eval-split dev"), ("--rl-flags", "--sample-by-pass-rate x"),
        ("--sft-flags", "--data x"),
    ],
)  # fmt: skip
def test_what_makes_a_run_the_one_of_its_label_is_no_further_flag(flag, word, prepared, capsys):
    with pytest.raises(SystemExit):
        prepared(f"{flag}={word}")
    name = word.replace("=", " ").split()[0]
    assert f"{flag}: {name} is what real_model.py sets itself" in " ".join(capsys.readouterr().err.split())


def test_adapters_that_are_added_otherwise_are_others(tmp_path):
    """The hashes in the records are of weights alone, which learners add with a lora_alpha of 2 r."""
    (tmp_path / "adapter_model.safetensors").write_text("weights")
    alone, plain = models.hash_of_files([tmp_path / "adapter_model.safetensors"]), {"r": 4, "lora_alpha": 8}
    found = []
    for settings in ({}, {"alpha_pattern": {}, "base_model_name_or_path": "x"}, {"lora_alpha": 16}, {"lora_alpha": 8.5},
                     {"r": 8}, {"alpha_pattern": {"q_proj": 1}}, {"use_rslora": True}, {"use_dora": True},
                     {"rank_pattern": {"q_proj": 4}}, {"fan_in_fan_out": True}, {"lora_alpha": None}):  # fmt: skip
        (tmp_path / "adapter_config.json").write_text(json.dumps(plain | settings))
        found.append(models.hash_of_adapters(tmp_path))
    assert found[:2] == [alone, alone] and len(set(found)) == len(found) - 1
    (tmp_path / "adapter_config.json").write_text("[")
    with pytest.raises(SystemExit, match="adapter_config.json is not JSON"):
        models.hash_of_adapters(tmp_path)
    recorded = ROOT / "benchmarks" / "results" / "real_model_wiki_curves.json"
    sft = models.ADAPTERS / "real_model_wiki"
    assert f'\\"adapters\\": \\"{models.hash_of_adapters(sft)}\\"' in recorded.read_text()


@pytest.mark.parametrize("name", json.loads((models.ADAPTERS / "deleted.json").read_text()))
def test_deleted_adapters_are_known_by_what_is_recorded_and_named_with_their_commands(name, prepared, monkeypatch):
    folder, page = models.ADAPTERS / name, (ROOT / "benchmarks/real_model/README.md").read_text().splitlines()
    gone = models.deleted(folder)
    results = ROOT / "benchmarks" / "results"
    rows = [json.loads(line) for path in results.glob("real_model_*_episodes.jsonl") for line in path.open()]
    assert any(gone["hash"] in (row.get("adapters"), row.get("on_top")) for row in rows)
    assert models.hash_of_adapters(folder) == gone["hash"] and gone["command"] in page
    start = models.ADAPTERS / gone["start"]
    assert models.hash_below(folder) == (models.hash_of_adapters(start) if gone["start"] else None)
    words = ["--adapters", str(start), f"PPO={folder}"] if gone["start"] else ["--adapters", str(folder)]
    with pytest.raises(SystemExit) as refused:
        prepared("--learners", "PPO", *words)
    said = str(refused.value)
    first = models.deleted(start)
    assert "not in the repository any more" in said and (first or gone)["command"] in said and not prepared.done
    prepared("--part", "report", "--learners", "PPO", *words)
    assert prepared.reported[-1][1] == {"adapters": models.hash_of_adapters(start if gone["start"] else folder)}


def test_a_report_s_command_names_adapters_that_are_known():
    """Those that are in the repository, and those that were."""
    known = json.loads((models.ADAPTERS / "deleted.json").read_text())
    known |= {str(path.parent.relative_to(models.ADAPTERS)): {} for path in models.ADAPTERS.rglob("*.safetensors")}
    text = "".join(path.read_text() for path in (ROOT / "benchmarks" / "results").glob("real_model_*.md"))
    named = set(re.findall(r"benchmarks/real_model/adapters/([\w/]+)", text))
    assert named == known.keys() and "benchmarks/adapters" not in text


def test_a_report_is_of_those_that_began_with_its_start(prepared, tmp_path):
    new, old = ({"adapters": models.hash_of_adapters(tmp_path / name)} for name in "ac")
    row = {"set": "GSM8K", "model": models.hash_of_model(str(TINY)), "questions": "q", "evaluate_flags": ""}
    for label, seed, start in ((suites.START, 1, new), ("GRPO", 1, old), ("PPO", 1, new), ("PPO", 2, old)):
        line = row | {"policy": label, "seed": seed} | start
        machine.append_line(tmp_path / "results" / "mine_episodes.jsonl", line)
    prepared("--part", "report", "--name", "mine", "--adapters", "a", "--learners")
    assert prepared.reported == [([(suites.START, "GSM8K", 1), ("PPO", "GSM8K", 1)], new)]
    runs = {"how": json.dumps({**new, "rl_flags": ""})}, {"how": json.dumps(old)}
    curves = {"GRPO": {"1": runs[1]}, "PPO": {"1": runs[0], "2": runs[1]}}
    assert report.begun_with(new, curves) == {"PPO": {"1": runs[0]}}


def test_what_adapters_were_added_to_here_is_known(prepared, tmp_path):
    """A learner's run notes the model that the start was merged into."""
    work = tmp_path / "prepared"
    work.mkdir()
    (tmp_path / "b" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(work / "start")}))
    assert models.hash_below(tmp_path / "b") is None
    for damaged in ("[1]", "{}", "no JSON"):
        (work / "start.json").write_text(damaged)
        assert models.hash_below(tmp_path / "b") is None
    for name in "ca":
        facts = ["model", "weights", "hash of the start", models.hash_of_adapters(tmp_path / name)]
        (work / "start.json").write_text(json.dumps(facts))
        if name == "c":
            with pytest.raises(SystemExit, match="PPO=.*/b go on top of others than .*/a$"):
                prepared("--learners", "PPO", "--adapters", "a", "PPO=b")
    assert prepared("--learners", "PPO", "--adapters", "a", "PPO=b")


def test_flags_that_are_fixed_are_flags_of_the_scripts():
    for name, script in (("sft_flags", "sft_llm"), ("rl_flags", "grpo_llm"), ("evaluate_flags", "evaluate_llm")):
        args = {one.replace("_", "-") for one in vars(importlib.import_module(script).Args())}
        assert jobs.FIXED[name] <= args
    free = {"cuda", "num-threads", "dtype", "engine", "vllm-url", "num-envs", "temperature", "top-p"}
    assert args - jobs.FIXED["evaluate_flags"] == free


def test_a_learner_that_began_elsewhere_is_not_compared_with_this_start(capsys):
    sets, start = {"GSM8K": {"model": "m"}}, {"adapters": "new"}
    row = {"model": "m", "adapters": "old"}
    found = {(suites.START, "GSM8K", 1): row | start, ("PPO", "GSM8K", 1): row, ("GRPO", "GSM8K", 1): row | start}
    found["base tool call", "GSM8K", 1] = {"model": "m"}  # which begins with nothing
    assert [label for label, *_ in record.alike(found, sets, start)] == [suites.START, "GRPO", "base tool call"]
    assert "PPO, seed 1, is left out" in capsys.readouterr().err


def test_a_record_that_is_cut_off_is_named_and_goes_on(tmp_path):
    path = tmp_path / "results" / "episodes.jsonl"
    path.parent.mkdir()
    path.touch()
    machine.append_line(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"a": 2, "b"')  # killed
    machine.append_line(path, {"a": 3})
    with pytest.raises(SystemExit, match=r"episodes.jsonl: line 2 is no whole record"):
        machine.read_lines(path)
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"b"' not in line))
    assert machine.read_lines(path) == [{"a": 1}, {"a": 3}] and machine.read_lines(tmp_path / "none") == []


def test_a_file_of_a_set_that_is_cut_off_is_named(tmp_path):
    whole = gzip.compress(json.dumps([{"a": 1}] * 50).encode())
    for name, content in (("a.json.gz", whole[:-9]), ("b.json", b'[{"a": 1}, {"a'), ("c.jsonl", b'{"a": 1}\n{"a'),
                          ("d.jsonl", b"\xff\xfe{}"), ("e.json.gz", b"[]")):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SystemExit, match=f"{name}: this is no whole file of the set"):
            questions.read_rows(tmp_path / name.removesuffix(".gz"))
        if name.endswith(".gz"):  # the first to read it
            with pytest.raises(SystemExit, match=f"{name}: this is no whole file of the set"):
                questions.hash_of_files([tmp_path / name])


def test_a_report_s_command_names_the_adapters_of_the_repository_only(tmp_path):
    ours = models.ADAPTERS
    given = {(suites.START, 1): ours / "one", ("PPO", 1): ours / "two"}
    given |= {("PPO", 2): tmp_path, ("PPO", 3): ROOT / "runs"}
    where = "benchmarks/real_model/adapters"
    words = [f"{where}/one", f"PPO={where}/two", "PPO=ADAPTERS", "PPO=ADAPTERS"]
    assert report.adapters_as_words(given) == words


def test_a_learner_of_another_suite_is_refused_at_once(monkeypatch, capsys):
    words = ["real_model.py", "--part", "rl", "--model", "m", "--data", ".", "--learners", "GRPO, steps paid"]
    words.append("--suite")
    monkeypatch.setattr(sys, "argv", [*words, "gsm8k"])
    assert real_model.arguments().suite == "gsm8k" and suites.ONLY.keys() < suites.LEARNERS.keys()
    monkeypatch.setattr(sys, "argv", [*words, "wiki"])
    with pytest.raises(SystemExit):
        real_model.arguments()
    assert "--learners 'GRPO, steps paid' is for --suite gsm8k" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("adapters", "said"),
    [
        (["a", "GRPO=b"], "--adapters of GRPO, which isn't among --learners"),
        (["a", "b"], "--adapters: 2 folders of SFT on demonstrations, and there is 1"),
        (["a", "PPO=b", "PPO=c", "PPO=a"], "--adapters: 3 folders of PPO, and --seeds 2"),
        (["PPO=b"], "--adapters of a learner come on top of those of the training on demonstrations; give both"),
        (["a", "PPO=b", "PPO=b"], "/b and /b are the same, of two runs"),
    ],
)
def test_adapters_that_belong_to_no_run_are_refused(adapters, said, prepared, tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        prepared("--learners", "PPO", "--seeds", "2", "--adapters", *adapters)
    assert said in f"{refused.value} {capsys.readouterr().err}".replace(str(tmp_path), "").replace("\n", " ")


def test_curves_of_runs_that_are_not_finished_are_recorded(tmp_path, monkeypatch):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for name, scalars in {
        "new": [("eval/em", 0)],  # stopped after the evaluation before training
        "one": [("eval/em", 0), ("charts/episodes", 5), ("charts/episodic_return", 5)],
        "two": [
            ("eval/em", 0), ("charts/episodes", 5), ("charts/episodic_return", 5), ("eval/em", 5), ("time/train", 5),
        ],
    }.items():  # fmt: skip
        with tensorboard.SummaryWriter(str(tmp_path / name)) as writer:
            for tag, step in scalars:
                writer.add_scalar(tag, 8.0, step)
    monkeypatch.setattr(report, "find", lambda job: (job and tmp_path / job, False))
    path = tmp_path / "results" / "curves.json"

    def made(how):
        return dict.fromkeys([("GRPO", 1), ("GRPO", 2), ("PPO", 1)], how)

    assert report.record_curves({("GRPO", 1): "new", ("PPO", 1): None}, made("a"), path) == {}
    report.record_curves({("GRPO", 1): "one", ("GRPO", 2): "new"}, made("a"), path)
    found = report.record_curves({("GRPO", 2): "two"}, made("a"), path)
    assert json.loads(path.read_text()) == found and {k: list(v) for k, v in found.items()} == {"GRPO": ["1", "2"]}
    assert found["GRPO"]["2"]["time/train"] == 8 and "time/train" not in found["GRPO"]["1"]
    assert found["GRPO"]["2"]["eval/em at episodes"] == [0, 8] and "charts/exact_match" not in found["GRPO"]["1"]
    played = {"em": [0.0, 1.0, 1.0]}
    recorded = {(policy, "MuSiQue", 1): played for policy in (suites.START, "GRPO", "PPO")}
    for dev in ({}, recorded, {key: row for key, row in recorded.items() if key[0] == "GRPO"}):
        report.plot(found, dev, tmp_path / "curves.png")
        assert (tmp_path / "curves.png").stat().st_size > 1_000
    two = recorded | {("GRPO", "MuSiQue", 2): {"em": [0.0, 0.0, 1.0]}}
    plt = importlib.import_module("matplotlib.pyplot")
    axes = plt.figure().add_subplot()
    report.plot_dev(axes, "GRPO", 8, two, "C0")
    _, after = axes.containers[0].lines[2][0].get_segments()  # the strokes of both intervals
    plt.close("all")
    assert after[:, 1] == pytest.approx(report.proportion(np.array([played["em"], [0.0, 0.0, 1.0]]))[1:])
    report.check_curves(made("a"), path)
    report.check_curves({("PPO", 1): "b"}, path)
    with pytest.raises(SystemExit, match=r"curves.json has GRPO of another model, .*; give --name, or delete that"):
        report.check_curves(made("b"), path)


def test_hours_stand_above_the_episodes_that_they_took():
    plt = pytest.importorskip("matplotlib.pyplot")
    axes = plt.figure().add_subplot()
    axes.set_xlim(-10, 210)
    run = {"charts/episodic_return at episodes": [50, 200], "charts/episodic_return at seconds": [5400, 7200]}
    hours = report.hours_axis(axes, run)
    hours.figure.canvas.draw()
    for episode, hour in ((0, 0), (50, 1.5), (200, 2)):  # it stands where it belongs
        places = [one.transData.transform((x, 0))[0] for one, x in ((hours, hour), (axes, episode))]
        assert places[0] == pytest.approx(places[1], abs=1)
    plt.close("all")


def test_a_recorded_training_is_found_by_its_command():
    files = list((ROOT / "benchmarks" / "results").glob("real_model_*_curves.json"))
    trained = [json.loads(run["how"]) for file in files for runs in json.loads(file.read_text()).values()
               for run in runs.values()]  # fmt: skip
    assert len(files) > 2 and all(how["rl_flags"] == jobs.without_speed(how["rl_flags"]) for how in trained)


def test_a_recorded_figure_names_what_it_stands_on(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = models.hash_of_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert models.hash_of_model(str(tmp_path)) != first and models.hash_of_model("org/name") == "org/name"
    (tmp_path / "dev.json").write_text("{}")
    (tmp_path / "dev.json.gz").write_bytes(gzip.compress(b"{}"))
    packed, plain = (questions.hash_of_files([tmp_path / name]) for name in ("dev.json.gz", "dev.json"))
    assert packed == plain
    words = "--num-threads 1 --seed 2 --num-threads=3 --num-envs 8 --dtype float32 --num_threads  4"
    assert jobs.without_speed(words) == "--seed 2 --dtype float32" and jobs.without_speed("") == ""
    path, key = tmp_path / "episodes.jsonl", ("GRPO", "MuSiQue", 1)
    path.write_text(json.dumps({"policy": "GRPO", "set": "MuSiQue", "seed": 1, "model": first}) + "\n")
    for other in ({"model": "org/name"}, {"model": first, "on_top": "x"}):
        with pytest.raises(SystemExit, match="of another model"):
            record.read_record(path, {key: other})
    assert key in record.read_record(path, {key: {"model": first}})


TASKS = {7: SimpleNamespace(answers=["Ada", "Eve"])}


def test_what_is_recorded_of_a_real_model_is_not_played_again(tmp_path, monkeypatch):
    WIKI = suites.SUITES["wiki"]
    key, other = ("GRPO", "HotpotQA", 1), ("GRPO", "MuSiQue", 1)
    rows = [
        {"stats": {"em": 1.0, "f1": 1.0, "success": 1.0, "format": 1.0}, "error": None},
        {"stats": {"em": 0.0, "f1": 0.5, "success": 0.0, "format": 0.0}, "error": "format"},
    ]
    call = {"function": {"name": "search", "arguments": '{"query": "Ada"}'}}
    messages = [{"role": "system"}, {"role": "user"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "content": "Ada\nis `here` " + "x" * 500}]
    rows[1] |= {"messages": messages, "task_id": "t7", "task_index": 7, "question": "Who <img src=x>?\n\nNow."}
    monkeypatch.setattr(record, "make_env", lambda args: SimpleNamespace(make_task=TASKS.__getitem__))
    (tmp_path / "evaluation.json").write_text('{"args": {}}')
    monkeypatch.setattr(record, "read_episodes", lambda folder, tokenizer: rows)
    started = []

    def interrupted(jobs, workers):  # after the first of two
        started.append(jobs)
        raise SystemExit(130)

    monkeypatch.setattr(record, "finish", interrupted)
    monkeypatch.setattr(record, "find", lambda job: (tmp_path, job == "first"))
    how = {key: {"rl_flags": "--seed 1"}, other: {"rl_flags": "--seed 1"}}
    path = tmp_path / "episodes.jsonl"
    for _ in range(2):
        with pytest.raises(SystemExit):
            record.evaluate({key: "first", other: "second"}, how, path, str(TINY), 1)
    assert started == [["first", "second"], ["second"]]
    found = record.read_record(path, how)
    assert list(found) == [key] and found[key]["em"] == [1.0, 0.0] and found[key]["format"] == [1.0, 0.0]
    table, numbers = report.tables(WIKI, {"GRPO": {"HotpotQA": [found[key]]}})
    assert numbers["metrics"]["GRPO"]["HotpotQA"]["support_recall"] == [None]  # JSON has no NaN
    assert "| GRPO | HotpotQA | 2 | 0.500" in table and numbers["errors"]["GRPO"]["HotpotQA"]["format"] == 1
    table, _ = report.tables(WIKI, {"GRPO": {"HotpotQA": [found[key] | {"tool_calls": [0.0, 0.0]}]}})
    assert "EM where" not in table  # nobody searched
    searched = {"support_recall": [0.0, 0.5, 0.5, 1.0], "tool_calls": [0.0, 2.0, 2.0, 3.0], "em": [0.0, 0.0, 1.0, 1.0]}
    unsearched = searched | {"support_recall": [np.nan] * 4}  # what nobody looks up
    lines, numbers = report.search_table({"GRPO": {"HotpotQA": [searched], "GSM8K": [unsearched]}})
    by_calls = "0.000 of 1 | 0.500 of 2 | 1.000 of 1"
    assert lines[-2] == f"| GRPO | HotpotQA | 0.000 of 1 | 0.500 of 2 | 1.000 of 1 | {by_calls} |"
    assert lines[-1] == f"| GRPO | GSM8K | – | – | – | {by_calls} |"
    assert list(numbers["GRPO"]["HotpotQA"].values()) == [[0, 1], [1, 2], [1, 1]] * 2
    assert numbers["GRPO"]["GSM8K"]["EM, calls: 2"] == [1, 2]
    lines, _ = report.search_table({"GRPO": {"GSM8K": [unsearched]}})
    assert lines[1] == "| policy | set | EM, calls: at most 1 | EM, calls: 2 | EM, calls: 3 and more |"
    em = np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
    assert report.won_and_lost(em, em[:1]) == ", 2 won, 1 lost" and report.won_and_lost(em, em) == ""
    partly = {suites.START: {"HotpotQA": [found[key]]}, "GRPO": {x: [found[key]] for x in ("HotpotQA", "MuSiQue")}}
    table, _ = report.tables(WIKI, partly)
    assert "| GRPO | +0.000 [-0.573, +0.573], 0 won, 0 lost | – | – | – | – |" in table  # two questions
    two = {"GRPO": {"HotpotQA": [found[key]] * 2, "2WikiMultihopQA": [found[key]]}}
    whole = {suites.START: {x: [found[key]] for x in WIKI.sets}}
    table, numbers = report.tables(WIKI, whole | two)  # one seed lacks a set
    assert list(numbers["differences"]["GRPO"]) == ["HotpotQA", "2WikiMultihopQA"]
    others = {"HotpotQA": {"model": "a"}}
    assert record.alike({key: found[key] | {"model": "a"}}, others) and not record.alike(found, others)
    assert not record.alike(found, {})  # of another suite
    with pytest.raises(SystemExit, match="nothing of typo is recorded"):
        report.write_report(WIKI, "typo", {}, {}, {}, SimpleNamespace())
    table, numbers = report.tables(WIKI, partly, {"greedy": whole})
    assert "| EM against SFT on demonstrations of greedy |" in table
    assert numbers["differences"]["GRPO against greedy"].keys() == {"HotpotQA", "MuSiQue", "out of domain"}
    assert "SFT on demonstrations against greedy" in numbers["differences"]
    (example,) = found[key]["examples"]
    assert episodes.story(example).splitlines() == [
        "**format**, task `t7`: `Who <img src=x>? Now.`", "", '- assistant: `search({"query": "Ada"})`',
        f"- tool: `Ada is 'here' {'x' * 286} ...`", "- right: `Ada; Eve`",
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="GRPO, HotpotQA, 1 of another model, other questions, or with other flags"):
        record.read_record(path, {key: {"rl_flags": "--seed 2"}})
