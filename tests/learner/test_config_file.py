"""--config: a YAML file of flags, and the one that every run writes to repeat it."""

import importlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import grpo_llm
import pytest
from learners import ALL, filled

from llm_utils import arguments, config_file
from llm_utils.run import prepare


@dataclass
class Args:
    """Every type of flag, also those that no script has yet."""

    exp_name: str = "x"
    resume: str | None = None
    env_kwargs: str | list[str] = "{}"
    env_id: str | list[str] = "a"
    rate: float | None = None
    count: int | Literal["all"] = 8
    mask: bool = True
    shares: list[float] | None = None
    kind: Literal["a", "b"] = "a"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """config(text): a file that holds it."""
    monkeypatch.chdir(tmp_path)

    def make(text, name="run.yaml"):
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return make


def read(kind, *words):
    return arguments.read(kind, args=[str(word) for word in words])


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(config):
    file = config("# mine\nrate: 1e-4\ncount: all\nexp-name: run 2\n")
    expected = Args(rate=1e-4, count="all", exp_name="run 2")
    assert read(Args, "--config", file) == read(Args, f"--config={file}") == expected
    for words in (["--config", file, "--rate", "3", "--no-mask"], ["--no-mask", "--rate", "3", "--config", file]):
        assert read(Args, *words) == replace(expected, rate=3.0, mask=False)
    start = Args(kind="b", exp_name="default")
    assert arguments.read(Args, start, args=["--config", file]) == replace(expected, kind="b")
    assert read(Args) == Args()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("env_kwargs: {lr: 1e-4, name: 'é'}", {"env_kwargs": '{"lr": 0.0001, "name": "é"}'}),
        ("env_kwargs:\n  max: 4\n  rows:\n    - {a: null}\n", {"env_kwargs": '{"max": 4, "rows": [{"a": null}]}'}),
        ("env_kwargs: '{\"max_turns\":4}'", {"env_kwargs": '{"max_turns":4}'}),
        ("env_kwargs:\n- {a: 1}\n- '{}'\nenv_id: [x, y]", {"env_kwargs": ['{"a": 1}', "{}"], "env_id": ["x", "y"]}),
        ("rate: 3\nshares: [1, .5]\nmask: no", {"rate": 3.0, "shares": [1.0, 0.5], "mask": False}),
        ("rate: null\ncount: 3\nkind: b\nexp_name: ''", {"rate": None, "count": 3, "kind": "b", "exp_name": ""}),
    ],
)  # fmt: skip
def test_values_have_the_types_of_the_flags(config, text, values):
    args = read(Args, "--config", config(text))
    assert args == replace(Args(), **values)
    assert type(args.rate) in (float, type(None)) and all(type(share) is float for share in args.shares or ())


WRONG = {
    "exp_nam: x": "there is no flag exp_nam; did you mean exp_name?",
    "--rate: 3": "there is no flag --rate; did you mean rate?",
    "zzz: 3": "there is no flag zzz; --help lists them",
    "no_mask: true": "there is no flag no_mask; write mask: false",
    "config: a.yaml": "there is no flag config",
    "resume: runs/RUN": "resume is no flag of a file; give --resume RUN alone, without --config$",
    "rate: fast": "rate takes a number or null, not 'fast'",
    "rate: true": "rate takes a number or null, not True",
    "count: 1.5": "count takes a whole number or all, not 1.5",
    "mask: 1": "mask takes true or false, not 1",
    "mask:": "mask takes true or false, not None",
    "exp_name: 2024-01-01": "exp_name takes a text, not datetime.*; put it in quotes",
    "exp_name: [a, b]": r"exp_name takes a text, not \['a', 'b'\]$",
    "kind: c": "kind takes a or b, not 'c'",
    "env_kwargs: 4": "env_kwargs takes a mapping, not 4",
    "env_kwargs: {a: 2024-01-01}": "env_kwargs takes a mapping, not",
    "shares: [1, x]": "shares takes a list, each a number or null",
    "rate: 1\nrate: 2": "line 2: rate is given twice",
    "exp-name: a\nexp_name: b": "exp_name is given twice, with - and with _",
    "rate: 1\ncount:\n\t3": "line 3: a tab, where YAML takes spaces only",
    "rate = 3": "the file has no flags; write one on each line, such as 'seed: 2'",
    "- rate": "the file has no flags",
    "": "the file has no flags",
    "rate: 1: 2": "line 1: mapping values are not allowed here",
    "env_kwargs: &a {x: 1}\nexp_name: *a": r"line 2: aliases \(\*name\) are not read",
    "exp_name: !!python/object/apply:os.system [ls]": r"line 1: tags \(!name\) are not read",
    'count: !!int ""': r"line 1: tags \(!name\) are not read",
    "<<: {rate: 3}\nrate: 1": "line 1: << is given twice",
    "env_kwargs: {a: .nan}": "env_kwargs takes a mapping, not",
    "env_kwargs: {a: 0x" + "f" * 20_000 + "}": "env_kwargs takes a mapping, not a number that is too long",
    'exp_name: "\\ud800"': "exp_name takes a text, not",
    "count: 2001-99-99": "this is not YAML",
    "{" + ",".join(map(str, range(20_000))) + "}": "there is no flag 0; --help lists them",  # in seconds
    "[" * 1000: "this is not YAML",
    "{[1]: 2}": "line 1: a name must be a text",
    b"\xff\xfe\x00": "this is not YAML",
    b"exp_name: \x1b[2J": "this is not YAML",
    "#" * (2**20 + 1): "the file is larger than 1 MiB",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:24])
def test_a_wrong_file_is_refused_in_a_line_that_names_it(config, text):
    with pytest.raises(SystemExit, match=f"^--config run.yaml(, |: ){WRONG[text]}") as ended:
        read(Args, "--config", config(text))
    assert "\n" not in str(ended.value) and "\x1b" not in str(ended.value)


def test_a_file_that_cannot_be_read_is_refused(config):
    config("rate: 1", config_file.NAME)
    for path, cause in (
        ("nowhere.yaml", "there is no such file"),
        (".", "this is a folder; give a file, config.yaml"),
        (f"{config_file.NAME}/x", "the file cannot be read: Not a directory"),
        ("x" * 300, "the file cannot be read: File name too long"),
    ):
        with pytest.raises(SystemExit, match=f"^--config {path}: {cause}$"):
            read(Args, "--config", path)


def test_a_resumed_run_takes_no_file(config):
    with pytest.raises(SystemExit, match="^--config run.yaml does nothing with --resume, .*; leave it out$"):
        read(Args, "--config", config("rate: 1"), "--resume", "runs/RUN")


def test_a_list_of_one_is_its_entry_where_several_are_allowed(config):
    """Names of runs, rows and reports have a text for one environment."""
    file = config("env_id: [x]\nenv_kwargs: [{a: 1}]\nshares: [1]")
    assert read(Args, "--config", file) == Args(env_id="x", env_kwargs='{"a": 1}', shares=[1.0])
    assert read(Args, "--config", file, "--env-id", "y").env_id == "y"
    assert read(Args, "--config", file, "--env-id", "y", "z").env_id == ["y", "z"]


def test_what_is_written_is_read_again_to_the_letter(config, tmp_path):
    texts = ["1e5", "3", "null", "yes", "2024-01-01", "a: b # c", " - x", "'", "é\n\t\x1b\x85", "0x1F", "~", "1:30", ""]
    kwargs = ["{}", '{"max": 4, "x": [1.0, null, "1e5"]}', '{"a":1}', '{"a": "\\u00fc"}', "x"]
    some = [Args("1e5", None, [*kwargs, *texts], texts, 1e-7, "all", False, [1e22, 0.1], "b")]
    some += [Args(text, env_kwargs=one, rate=float("inf")) for text, one in zip(texts, kwargs, strict=False)]
    for args in some:
        config_file.write(tmp_path, replace(args, resume="runs/RUN"))
        assert read(Args, "--config", tmp_path / config_file.NAME) == args


def test_a_written_file_reads_well(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["learner/grpo_llm.py"])
    config_file.write(tmp_path, Args(env_kwargs='{"max_turns": 4, "reward": "rows:score"}', rate=1e-5))
    text = (tmp_path / config_file.NAME).read_text()
    assert text.splitlines()[1].endswith(f"python learner/grpo_llm.py --config {tmp_path}/config.yaml")
    assert "\nenv_kwargs:\n  max_turns: 4\n  reward: rows:score\n" in text and "\nrate: 1.0e-05\n" in text


@pytest.mark.parametrize("script", ALL)
def test_a_file_of_all_defaults_is_accepted(script, tmp_path):
    """It gives every flag a value, also those that do nothing with these others."""
    module = importlib.import_module(script)
    config_file.write(tmp_path, module.Args())
    args = read(module.Args, "--config", tmp_path / config_file.NAME)
    assert asdict(args) == asdict(module.Args())
    module.check(filled(args))


TINY = ["--num-threads", 1, "--no-cuda", "--tokenizer", "byte"]
PLAYED = ["--num-envs", 4, "--env-kwargs", '{"max_turns": 2, "max_action_tokens": 8}']
TRAINED = ["--total-episodes", 8, "--episodes-per-iteration", 8, "--group-size", 4, "--num-minibatches", 1]
TAUGHT = ["--num-steps", 2, "--batch-size", 4, "--num-demonstrations", 8, "--eval-demonstrations", 2]
RUNS = {
    "grpo_llm": [*PLAYED, *TRAINED, "--eval-episodes", 0, "--log-trajectories", "all", "--learning-rate", 1e-5],
    "evaluate_llm": [*PLAYED, "--episodes", 4, "--temperature", 1],
    "sft_llm": [*TAUGHT, "--num-workers", 0],
}


@pytest.mark.parametrize("script", RUNS)
def test_a_run_is_repeated_by_the_file_that_it_wrote(learn, policy_folder, script):
    run = learn(script, *TINY, "--model", policy_folder, *RUNS[script])
    again = learn(script, "--config", run / config_file.NAME, "--exp-name", "again")
    assert again != run
    for name in ("trajectories.jsonl",) if script != "sft_llm" else ("model/model.safetensors",):
        assert (run / name).stat().st_size > 1000 and (run / name).read_bytes() == (again / name).read_bytes()
    files = [(folder / config_file.NAME).read_text().partition("\nexp_name:")[2] for folder in (run, again)]
    assert files[0].partition("\n")[2] == files[1].partition("\n")[2]
    report = next(json.loads(path.read_text()) for path in run.glob("*.json"))
    report["args"].pop("resume")
    values = asdict(read(importlib.import_module(script).Args, "--config", run / config_file.NAME))
    differing = {name for name, value in report["args"].items() if values[name] != value}
    assert all(values[name] in (None, "auto") for name in differing)  # chosen for this model and machine


def test_what_a_learner_chose_is_chosen_again_for_another_model(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["grpo_llm.py"])
    args = prepare(grpo_llm.Args(num_threads=1, cuda=False))
    config_file.write(tmp_path, args)
    assert (args.learning_rate, args.old_logprobs, args.dtype) == (3e-4, "sampler", "float32")
    again = read(grpo_llm.Args, "--config", tmp_path / config_file.NAME, "--lora-rank", 8)
    assert (again.learning_rate, again.old_logprobs, again.dtype) == (None, "auto", "auto")


def test_a_resumed_run_keeps_its_first_file_and_drops_the_model_that_it_trains_further(learn, policy_folder):
    run = learn("grpo_llm", *TINY, "--model", policy_folder, *RUNS["grpo_llm"], "--save-model")
    file = (run / config_file.NAME).read_text()
    assert (run / "model" / "config.json").is_file()
    learn("grpo_llm", "--resume", run, "--total-episodes", 16, "--no-save-model")
    assert (run / config_file.NAME).read_text() == file and not (run / "model").exists()
    learn("grpo_llm", "--resume", run, "--save-model")
    assert (run / "model" / "config.json").is_file()
