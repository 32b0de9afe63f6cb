"""README.md and docs/: every Python block runs, links lead somewhere, and commands name scripts that exist.

A page's blocks run one after the other, as a reader would run them. Where a ```text block follows, it is what the
code prints. A block that needs data or a model has the line `<!-- no-run -->` before it. (docs/tools has its own test.)
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import io
import json
import math
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import other_loops
import pytest
from chat_server import KEY
from gymnasium.envs.registration import load_env_creator

import agent_r1
from agent_r1 import Tool, adapters, wrappers
from agent_r1.dialects import DIALECTS

ROOT = Path(__file__).parents[1]
READMES = ("benchmarks/evidence/README", "benchmarks/real_model/README")
TOP = [ROOT / f"{page}.md" for page in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY", *READMES)]
PAGES = [page for page in [*TOP, *sorted((ROOT / "docs").rglob("*.md"))] if page.exists()]
LEARNERS = [page for page in PAGES if page.parent == ROOT / "docs/learners"]
FENCE = r"^(?P<{0}>`{{3,}})(?P<{1}>\w*)\n(?P<{2}>.*?)^(?P={0})$"
BLOCK = re.compile(
    r"(?P<skip>^<!-- no-run -->\n+)?"
    + FENCE.format("fence", "language", "code")
    + rf"(?:\n+(?={FENCE.format('next_fence', 'next', 'printed')}))?",
    re.MULTILINE | re.DOTALL,
)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


# Pages that `make test-adapters` runs.
NEEDS = {name: name for name in ("torchrl", "stable_baselines3", "verl")} | {"agent_loops": "langchain_openai"}
MODEL = {"agent_loops"}  # pages whose programs ask a model
LOOPS = {"langgraph", "mcp", "openai_agents"}  # adapters on that page
SLOW = {"trl"}  # half a minute of imports


def cases():
    some = [page for page in PAGES if page.parent.name != "tools"]
    return [pytest.param(page, id=name(page), marks=[pytest.mark.slow] * (page.stem in SLOW)) for page in some]


@pytest.fixture
def model(monkeypatch):
    """An expert behind the address that clients of chat APIs read."""
    with other_loops.model_server() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        yield


@pytest.mark.parametrize("page", cases())
def test_python_blocks_run(page, tmp_path, monkeypatch, request):
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    if page.stem in MODEL:
        request.getfixturevalue("model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agent_r1.dialects.DIALECTS", dict(DIALECTS))  # a page adds one of its own
    names = {"__name__": "docs"}
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["language"] != "python" or block["skip"]:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], page.name, "exec"), names)
        if block["next"] == "text":
            assert printed.getvalue() == block["printed"]


def test_what_asyncvectorenv_needs_stands_beside_its_name():
    """With its default it refuses the spaces of the environments."""
    for page in PAGES:
        for paragraph in page.read_text(encoding="utf-8").split("\n\n"):
            assert "AsyncVectorEnv" not in paragraph or "shared_memory=False" in paragraph, f"{name(page)}: {paragraph}"


def links(page: Path) -> list[tuple[str, str]]:
    """What a page links in this repository: (file or "", anchor or "")."""
    return re.findall(r"\]\((?!https?://|mailto:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target, anchor in links(page):
        path = (page.parent / target) if target else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
            assert anchor in [heading.replace(" ", "-") for heading in words], f"{target}#{anchor}"


def test_every_page_is_found_from_the_index():
    def linked(page):
        return {(page.parent / target).resolve() for target, _ in links(page)} & pages

    index = (ROOT / "docs" / "index.md").resolve()
    pages = {page.resolve() for page in (ROOT / "docs").rglob("*.md")}
    found, new = set(), {index}
    while new:
        found |= new
        new = set().union(*map(linked, new)) - found
    assert not sorted(map(name, pages - found))


def test_the_site_names_every_page_once():
    """`make docs` checks links and anchors."""
    yaml = pytest.importorskip("yaml")
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        return [leaf for one in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(one)]

    named = leaves(site["nav"])
    outside = [leaf.removeprefix("repository/") for leaf in named if leaf.startswith("repository/")]
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(set(named) - {f"repository/{page}" for page in outside}) == sorted(pages)
    assert len(named) == len(set(named)) and all((ROOT / page).is_file() for page in outside)
    assert all((ROOT / file).is_file() for file in site["hooks"])


def test_the_tools_of_an_environment_are_on_one_of_the_pages():
    for env_id in agent_r1.ENVIRONMENTS | agent_r1.BRIDGES:
        load_env_creator(gym.spec(env_id).entry_point)  # imports it, and with it the tools that are its own
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "environments").glob("*.md"))
    named = {cls.name for cls in subclasses(Tool) if cls.__module__.startswith("agent_r1") and hasattr(cls, "name")}
    assert len(named) >= 5 and not [tool for tool in named if f"| `{tool}` |" not in pages]


def subclasses(cls: type) -> list[type]:
    return [cls, *(found for one in cls.__subclasses__() for found in subclasses(one))]


def test_every_dialect_wrapper_and_adapter_has_its_place():
    dialects = (ROOT / "docs" / "dialects.md").read_text(encoding="utf-8")
    table = dialects.partition("| name | families |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(DIALECTS)
    ours = {name for name, value in vars(wrappers).items() if gym.Wrapper in getattr(value, "__bases__", ())}
    text = (ROOT / "docs" / "wrappers.md").read_text(encoding="utf-8")
    assert ours and set(re.findall(r"^## (\w+)$", text, re.MULTILINE)) >= ours
    for adapter in pkgutil.iter_modules(adapters.__path__):
        page = ROOT / "docs" / f"{'agent_loops' if adapter.name in LOOPS else adapter.name}.md"
        assert page.exists() and f"agent_r1.adapters.{adapter.name}" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_name_scripts_that_exist(page):
    text = page.read_text(encoding="utf-8")
    for script in re.findall(r"\b(?:python3?|torchrun(?: --\S+)*) ((?:learner|benchmarks|tests)/\S+\.py)", text):
        assert (ROOT / script).is_file(), script
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^ *make ([a-z-]+)", text, re.MULTILINE)) <= targets


def args_of(script: Path) -> type:
    """The `Args` of a learner, which needs the extra `train`."""
    for package in ("torch", "transformers", "tyro", "tensorboard"):
        pytest.importorskip(package)
    return importlib.import_module(script.stem).Args


def options(script: Path) -> set[str]:
    """The options of a learner: the fields of its `Args`, and --config, which every script has."""
    fields = dataclasses.fields(args_of(script))
    switches = {f"no_{field.name}" for field in fields if field.type in (bool, "bool")}
    return {name.replace("_", "-") for name in switches | {field.name for field in fields} | {"config"}}


@pytest.mark.parametrize("page", LEARNERS, ids=name)
def test_options_of_the_learners_exist(page):
    known = {"help"}.union(*(options(script) for script in (ROOT / "learner").glob("*_llm.py")))
    for line in page.read_text(encoding="utf-8").splitlines():
        line = re.sub(r"(torchrun|vllm serve)( --?\S+ \d+)*|python benchmarks/[^`]*", "", line)
        assert set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", line)) <= known, line


BY_PPO = "All other flags are those of PPO ([`ppo_llm.py`](ppo_llm.md#flags))."  # on a page that leaves flags to PPO's


@pytest.mark.parametrize("page", [p for p in LEARNERS if (ROOT / "learner" / f"{p.stem}.py").exists()], ids=name)
def test_flags_of_the_learners_are_on_their_pages(page):
    """Or on PPO's, where a page says so. And what is left out is no flag: no help has the page's words for it."""
    script, text = ROOT / "learner" / f"{page.stem}.py", page.read_text(encoding="utf-8")
    told = text + (page.parent / "ppo_llm.md").read_text(encoding="utf-8") * (BY_PPO in text)
    named = {flag.removeprefix("no-") for flag in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", told)}
    assert not sorted(flag for flag in options(script) - named if not flag.startswith("no-"))
    texts = importlib.import_module("llm_utils.command_line").texts_of(args_of(script))
    helps = " ".join(text for text, _ in texts.values())
    for left_out in re.findall(r"\*\*What is left out:\*\* (.*?)\.\n", text, re.DOTALL):
        for thing in re.split(r",\s+", left_out):
            assert re.sub(r"^(an?|the) ", "", thing) not in helps, thing


NO_DEFAULT = {"none", "by model", "by environment", "the model's"}


@pytest.mark.parametrize("page", LEARNERS, ids=name)
def test_tables_of_flags_have_the_defaults(page):
    """`--name` | default | meaning: of several flags in a row one default for each, or one for all."""
    rows = re.findall(r"^\| (`--[^|]+) \| ([^|]+) \| [^|]+ \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    if not rows:
        return
    fields = {field.name: field.default for field in dataclasses.fields(args_of(ROOT / "learner" / f"{page.stem}.py"))}
    fields["config"] = None
    for flags, defaults in rows:
        names, texts = re.findall(r"`--([a-z0-9-]+)`", flags), [text.strip("`") for text in defaults.split(", ")]
        for flag, text in zip(names, texts * len(names) if len(texts) == 1 else texts, strict=True):
            default = fields.get(flag.replace("-", "_"), not fields.get(flag.removeprefix("no-").replace("-", "_")))
            shown = NO_DEFAULT if default in (None, "", dataclasses.MISSING) else {str(default)}
            shown = {"on" if default else "off"} if isinstance(default, bool) else shown
            assert text in shown or f"AgentR1/{text}-v0" == default, (flag, text, default)


def commands(path: Path) -> list[tuple[Path, list[str], int]]:
    """The commands of a page, or of a script's header, that start a learner: the script, the words after it, and the
    number of processes."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    start, found = r" *(?:[A-Z_]+=\S+ )*(?:python|torchrun( .*?)) (learner/\w+_llm\.py)(?= |$)(.*)", []
    for line in text.replace("\\\n", " ").splitlines():
        if match := re.fullmatch(start, line):
            processes = math.prod(map(int, re.findall(r"--(?:nnodes|nproc-per-node) (\d+)", match[1] or "")))
            words = shlex.split(match[3].replace("...", ""), comments=True)
            found.append((ROOT / match[2], words, processes))
    return found


@pytest.mark.parametrize("path", [*PAGES, *sorted((ROOT / "learner").glob("*_llm.py"))], ids=name)
def test_commands_have_options_of_their_learner(path):
    for script, words, _ in commands(path):
        named = {word[2:].split("=")[0] for word in words if word.startswith("--")}
        assert named <= options(script) | {"help"}, words
        if re.search("HotpotQA|2Wiki|MuSiQue", " ".join(words)):
            assert "test" not in words, f"these sets have no split test: {words}"


def read_args(script: Path, words: list[str]):
    """The arguments of a learner that these words stand for, checked as it checks them."""
    kind, arguments = args_of(script), importlib.import_module("llm_utils.arguments")
    args, learner = arguments.read(kind, args=words), importlib.import_module(script.stem)
    getattr(learner, "check", arguments.check)(args)
    return args


@pytest.mark.parametrize("page", [page for page in LEARNERS if "published algorithms by" in page.read_text()], ids=name)
def test_published_algorithms_are_arguments_that_a_learner_takes(page):
    table = page.read_text().partition("published algorithms by flags")[2].partition("\n## ")[0]
    recipes = re.findall(r"^\| [^|`]+ \| `([^`]+)`", table, re.MULTILINE)
    assert len(recipes) >= 2
    for recipe in recipes:
        read_args(ROOT / "learner" / f"{page.stem}.py", shlex.split(recipe))


@pytest.mark.slow
def test_commands_that_train_models_of_real_size_fit(monkeypatch):
    """On cards of 80 GB, as the preflight computes them from the shapes of the models."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")  # an environment of one's own
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    preflight = importlib.import_module("llm_utils.setup.preflight").preflight
    memory_flags = importlib.import_module("llm_utils.setup.memory_flags")
    lines = (ROOT / "benchmarks" / "performance" / "preflight.py").read_text()
    tree = next(n for n in ast.parse(lines).body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "SIZES")
    sizes, checked = ast.literal_eval(tree.value), set()
    for path in [*PAGES, *(ROOT / "learner").glob("*_llm.py")]:
        for script, words, processes in commands(path):
            size = re.search(r"Qwen/Qwen2\.5-([\d.]+B)", " ".join(words))
            if size is None or script.stem in ("evaluate_llm", "sft_llm"):
                continue
            args = read_args(script, words)
            case = script.stem, size[1], processes, args.lora_rank, args.env_kwargs
            if case in checked:
                continue
            layers, hidden, inner, heads, keys, vocabulary, tied = sizes[size[1]]
            config = transformers.Qwen2Config(
                num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
                num_key_value_heads=keys, vocab_size=vocabulary, tie_word_embeddings=tied,
            )  # fmt: skip
            longest, cuda = json.loads(args.env_kwargs).get("max_context_tokens", 32_768), torch.device("cuda")
            estimate = functools.partial(
                preflight, config_or_source=config, device=cuda, critic=script.stem == "ppo_llm",
                reference=args.kl_coef > 0, longest_row=longest, world_size=processes, memory_gb=80,
            )  # fmt: skip
            report, _ = memory_flags.choose(args, cuda, longest, estimate)
            report.refuse()
            checked.add(case)
    assert len(checked) > 5


@pytest.mark.slow
def test_the_example_of_an_algorithm_trains(tmp_path):
    pytest.importorskip("torch")
    from compare import read_curve

    words = "--total-episodes 16 --episodes-per-iteration 8 --num-minibatches 1 --num-envs 8 --eval-episodes 0".split()
    words += ["--log-trajectories", "all", "--env-kwargs", '{"max_action_tokens": 64}', "--old-logprobs", "trainer"]
    words += ["--exp-name", "mine"]
    paths = os.pathsep.join([str(ROOT / "learner"), *sys.path])
    where = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}}
    script = [sys.executable, str(ROOT / "docs" / "examples" / "remax_llm.py")]
    subprocess.run([*script, *words], check=True, **where)
    (summary,) = tmp_path.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["finished"]
    rows = [json.loads(line) for line in summary.with_name("trajectories.jsonl").read_text().splitlines()]
    numbers = [row["episode"] for row in rows]  # the greedy baselines have others, and are in no mean
    assert numbers == [*range(8), *range(16, 24)]
    returns = [value for _, value in zip(*read_curve(summary.parent, "charts/episodic_return"), strict=True)]
    sampled = [np.mean([row["stats"]["return"] for row in rows[first : first + 8]]) for first in (0, 8)]
    assert returns == pytest.approx(sampled) and read_curve(summary.parent, "charts/episodes")[1].tolist() == [16, 32]
    again = ["--resume", str(summary.parent), "--total-episodes", "24"]  # without the name
    subprocess.run([*script, *again], check=True, **where)
    assert read_curve(summary.parent, "charts/episodes")[1].tolist() == [16, 32, 48]
    remax = runpy.run_path(script[1])
    with pytest.raises(SystemExit, match="takes no --kl-coef: "):
        remax["check"](remax["Args"](kl_coef=0.1))


def test_the_page_of_validation_has_rows_that_were_recorded():
    pages = [ROOT / "docs" / "validation.md", ROOT / "benchmarks" / "results" / "validation.md"]
    rows, recorded = (re.findall(r"^\| \S+-v\d .*", page.read_text(encoding="utf-8"), re.MULTILINE) for page in pages)
    assert len(rows) == 8 and set(rows) <= set(recorded)


RECORDED = {  # tables in benchmarks/results, and the pages that they stand on
    "environments/arithmetic_world": "arithmetic_seeds arithmetic_splits",
    "estimators": "faults stale_ratios",
    "learners/ppo_llm": "multihop_seeds",
    "learners/sft_llm": "sft_bf16 sft_bf16_smollm2",
    "models": "families",
    "performance": "speedups_cpu",
    "stable_baselines3": "sb3_choices",
    "vector": "vector_throughput",
}  # fmt: skip


@pytest.mark.parametrize(("page", "names"), RECORDED.items())
def test_a_page_has_the_tables_that_were_recorded(page, names):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").splitlines()
    for name in names.split():
        recorded = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf-8").splitlines()
        rows = [line for line in recorded if line.startswith("|")]
        assert len(rows) > 2 and not set(rows) - set(text), name


RESULTS = ["results", "evidence", "real_model", "benchmarks", "estimators", "performance", "environments/gsm8k"]


@pytest.mark.parametrize("page", RESULTS)
def test_figures_in_tables_are_recorded(page):
    """Each decimal occurs in a file of benchmarks/results, except those of a check that was made elsewhere."""
    record = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks" / "results").glob("*.*"))
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    text = re.sub(r"^## Check on unseen questions$.*?(?=^## )", "", text, flags=re.MULTILINE | re.DOTALL)
    rows = [line for line in text.splitlines() if line.startswith("|") and "independent check" not in line]
    figures = [figure for row in rows for figure in re.findall(r"\.(\d{2,})", row)]
    assert figures and set(figures) <= set(re.findall(r"\.(\d{2,})", record))


def test_every_metric_is_explained():
    sources = [*(ROOT / "learner").glob("*_llm.py"), *(ROOT / "learner" / "llm_utils").rglob("*.py")]
    source = "".join(path.read_text(encoding="utf-8") for path in sources)
    metrics = set(re.findall(r'"((?:charts|losses|sampler)/\w+)"', source))
    metrics |= {f"losses/{key}" for key in re.findall(r'(?:figures|metrics)\["(\w+)"\]', source)}
    metrics |= {f"time/{key}" for key in re.findall(r'\.mark\("(\w+)"\)', source)}
    assert len(metrics) > 15
    pages = ("metrics", "sft_llm", "reward_model_llm")
    text = "".join((ROOT / "docs" / "learners" / f"{page}.md").read_text() for page in pages)
    assert not [metric for metric in sorted(metrics) if f"`{metric}`" not in text]


def test_extras_that_are_named_exist():
    setup = (ROOT / "setup.cfg").read_text()
    extras = set(re.findall(r"^(\w+) =$", setup.partition("[options.extras_require]")[2], re.MULTILINE))
    assert {"search", "train", "dev"} <= extras
    sources = [*PAGES, *(path for folder in ("envs", "tools", "learner") for path in (ROOT / folder).rglob("*.py"))]
    for path in sources:
        for named in re.findall(r"agent-r1\[([a-z,]+)\]", path.read_text(encoding="utf-8")):
            assert set(named.split(",")) <= extras, f"{name(path)} names the extra [{named}]"


def test_block_pattern():
    page = """
<!-- no-run -->
```python
a
```

```python
b
```

```text
c
```
Text.
````text
```python
d
```
````

```bash
e
```
"""
    found = [(bool(b["skip"]), b["language"], b["code"], b["printed"]) for b in BLOCK.finditer(page)]
    assert found == [
        (True, "python", "a\n", "b\n"),
        (False, "python", "b\n", "c\n"),
        (False, "text", "c\n", None),
        (False, "text", "```python\nd\n```\n", "e\n"),
        (False, "bash", "e\n", None),
    ]
