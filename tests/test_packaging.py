"""The house is in order: what is packaged, what is pinned, what imports what, and what an import costs."""

import ast
import configparser
import importlib
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import agent_r1

ROOT = Path(__file__).parents[1]
FLOORS = ["tools", "envs", "learner", "benchmarks"]  # from below; no import runs up
HOME = {"agent_r1_tools": "tools", "agent_r1": "envs", "llm_utils": "learner"}
HOME |= {floor: floor for floor in FLOORS}
HOME |= {path.stem: floor for floor, modules in (("learner", "*"), ("benchmarks", "*/*"))
         for path in (ROOT / floor).glob(modules)
         if path.suffix == ".py" or (path / "__init__.py").is_file()}  # fmt: skip
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


CORE = {Requirement(line).name for line in lines(CONFIG["options"]["install_requires"])}
MYPY = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
OPTIONAL = sorted({module.removesuffix(".*") for module in MYPY["overrides"][0]["module"]} - CORE)


def sources(floor: str) -> list[Path]:
    return sorted((ROOT / floor).rglob("*.py"))


def imports(node: ast.AST) -> set[str]:
    """The top-level names that the code under this node imports."""
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            found |= {alias.name.split(".")[0] for alias in child.names}
        elif isinstance(child, ast.ImportFrom) and not child.level and child.module:
            found.add(child.module.split(".")[0])
    return found


def test_every_package_is_listed():
    roots = [ROOT / "envs" / "agent_r1", ROOT / "tools" / "agent_r1_tools"]
    folders = {path.parent for root in roots for path in root.rglob("__init__.py")}
    found = {".".join(folder.relative_to(ROOT).parts[1:]) for folder in folders}
    assert set(lines(CONFIG["options"]["packages"])) == found
    modules = {path.parent for root in roots for path in root.rglob("*.py")}
    assert modules == folders, "a folder of modules without an __init__.py"


@pytest.mark.parametrize("package", ["agent_r1", "agent_r1_tools"])
def test_every_data_file_is_listed(package):
    root = ROOT / HOME[package] / package
    patterns = lines(CONFIG["options.package_data"][package])
    listed = {path for pattern in patterns for path in root.glob(pattern)}
    there = {p for p in root.rglob("*") if p.is_file() and p.suffix != ".py" and "__pycache__" not in p.parts}
    assert there == listed


def test_every_learner_has_types_a_page_and_tests():
    learners = {path.stem for path in (ROOT / "learner").glob("*_llm.py")}
    places = {
        "mypy's modules": MYPY["modules"],
        "docs/learners": {path.stem for path in (ROOT / "docs" / "learners").glob("*.md")},
        "tests/learner": {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "learner").glob("test_*.py")},
        "docs/index.md": re.findall(r"\(learners/(\w+)\.md\)", (ROOT / "docs" / "index.md").read_text()),
    }
    assert not [f"{name} is not in {place}" for place, names in places.items() for name in learners - set(names)]
    assert set(places["mypy's modules"]) == {path.stem for path in (ROOT / "learner").glob("*.py")}


@pytest.mark.parametrize("path", sorted((ROOT / "learner").glob("*_llm.py")), ids=lambda path: path.stem)
def test_the_files_stay_short(path):
    """A reader sees an algorithm at a glance; the code that all learners share is in llm_utils."""
    lines = path.read_text().splitlines()
    assert len(lines) <= {"ppo_llm": 400, "sft_llm": 390}.get(path.stem, 330)
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("package", ["learner/llm_utils", "envs/agent_r1"])
def test_a_room_with_files_is_named_where_its_floor_begins(package):
    """In the package's docstring or in the README's tree."""
    root = ROOT / package
    rooms = {path.parent.name for path in root.glob("*/*.py")}
    text = (ROOT / "README.md").read_text() + (root / "__init__.py").read_text()
    assert not [room for room in sorted(rooms) if not re.search(rf"\b{room}\b", text)]


def test_what_tells_grpo_from_rloo_is_short():
    files = [str(ROOT / "learner" / f"{name}_llm.py") for name in ("grpo", "rloo")]
    assert len(subprocess.run(["diff", *files], capture_output=True, text=True).stdout.splitlines()) <= 130


def test_versions_agree():
    version = agent_r1.__version__
    assert version == CONFIG["metadata"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_python_versions_agree():
    """The oldest is the one that code is checked for; `make wheel-check` takes its list from the classifiers."""
    named = re.findall(r"^Programming Language :: Python :: (3\.\d+)$", CONFIG["metadata"]["classifiers"], re.MULTILINE)
    assert named[0] == CONFIG["options"]["python_requires"].removeprefix(">=") == MYPY["python_version"]
    assert len(named) == 3


def test_constraints_fit_the_ranges():
    # The first three have what their own environments alone have, the others are of CI, test-adapters, test-worlds.
    names = (
        "constraints-agents", "constraints-openenv", "constraints-verifiers",
        "constraints", "constraints-adapters", "constraints-worlds",
    )  # fmt: skip
    files = [ROOT / f"{name}.txt" for name in names]
    pins = dict(line.split("==") for path in files for line in lines(path.read_text()))
    pins = {re.sub(r"[-_.]+", "-", name).lower(): pin for name, pin in pins.items()}
    extras = CONFIG["options.extras_require"]
    wanted = [("", line) for line in lines(CONFIG["options"]["install_requires"])]
    wanted += [(extra, line) for extra in extras for line in lines(extras[extra])]
    for extra, line in wanted:
        requirement = Requirement(line)
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name == "agent-r1":
            assert requirement.extras <= set(extras)
        elif name in pins:
            assert requirement.specifier.contains(pins[name]), f"{line}, but {pins[name]} is pinned"
        else:
            assert extra in ("track", "vllm", "verl"), f"{line} of [{extra}] is not pinned"


def test_imports_never_run_up():
    for floor in FLOORS:
        for path in sources(floor):
            for imported in imports(ast.parse(path.read_text(encoding="utf-8"))) & HOME.keys():
                assert FLOORS.index(HOME[imported]) <= FLOORS.index(floor), f"{path} imports {imported}"
    assert {"grpo_llm", "scores", "evidence_parts"} <= HOME.keys()


def test_no_modules_import_each_other_in_a_circle():
    """But for packages' own __init__.py; and what only types need may: it isn't imported when the program runs."""
    graph = {}
    for floor in FLOORS:
        for path in sources(floor):
            parts = path.relative_to(ROOT / floor).with_suffix("").parts[floor == "benchmarks" :]  # less its room
            name = ".".join(parts).removesuffix(".__init__")
            assert name not in graph, f"{path}: another module has this name"
            graph[name] = set()
            for node in ast.walk(WithoutTypes().visit(ast.parse(path.read_text(encoding="utf-8")))):
                if isinstance(node, ast.ImportFrom):
                    assert not node.level and node.module, f"{name}: a relative import"
                    graph[name] |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                elif isinstance(node, ast.Import):
                    graph[name] |= {alias.name for alias in node.names}
    graph = {name: {other for other in imported if other in graph and not is_package(other, graph)}
             for name, imported in graph.items()}  # fmt: skip
    assert "agent_r1.bridges.alfworld.rooms" in graph["agent_r1.bridges.alfworld.environment"]
    assert "machine" in graph["load"] and "evidence_parts.runs" in graph["evidence_parts.paper"]
    graph["agent_r1_tools.tool"] -= {"agent_r1_tools.functions"}  # Tool.from_function makes one of its subclasses
    TopologicalSorter(graph).prepare()  # CycleError names the modules


def is_package(name, names):
    return any(other.startswith(f"{name}.") for other in names)


class WithoutTypes(ast.NodeTransformer):
    """Leaves out `if TYPE_CHECKING:`."""

    def visit_If(self, node):  # noqa: N802
        only_types = ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING") and not node.orelse
        return None if only_types else self.generic_visit(node)


@pytest.mark.parametrize("floor", ["tools", "envs"])
def test_optional_dependencies_are_imported_where_they_are_used(floor):
    """Inside functions, or in a `try` that names the extra, here or in the package, which is imported first."""
    known = set(sys.stdlib_module_names) | CORE | set(HOME)
    for path in sources(floor):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.If | ast.Try
        outside = [node for node in tree.body if not isinstance(node, inside)]
        package = path.parent / "__init__.py"
        first = ast.parse(package.read_text(encoding="utf-8")).body if package.exists() else []
        tried = imports(ast.Module([node for node in first if isinstance(node, ast.Try)], []))
        assert imports(ast.Module(outside, [])) <= known | tried, path


def test_mypy_knows_every_optional_dependency():
    """And so do the tests, which take the list from there."""
    used = set().union(*(imports(ast.parse(path.read_text())) for floor in FLOORS[:3] for path in sources(floor)))
    ours = set(HOME) | {path.stem for floor in FLOORS for path in sources(floor)}
    assert used - set(sys.stdlib_module_names) - CORE - ours <= set(OPTIONAL)


def test_importing_the_library_imports_nothing_optional():
    code = f"import sys, agent_r1, agent_r1_tools; print([name for name in {OPTIONAL} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize(
    ("adapter", "package"),
    [
        ("tinker", "tinker"), ("skyrl", "skyrl_gym.envs.base_text_env"), ("verifiers", "verifiers.v1"),
        ("openenv", "openenv.core.client_types"), ("langgraph", "langchain_core.tools"), ("openai_agents", "agents"),
        ("mcp", "mcp_types"),
        ("verl", "verl.experimental.agent_loop.agent_loop"),
    ],
)
def test_an_adapter_without_its_package_names_the_extra(adapter, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"agent_r1.adapters.{adapter}", raising=False)
    with pytest.raises(ImportError, match=rf"agent-r1\[{adapter.replace('_', '-')}\]"):
        importlib.import_module(f"agent_r1.adapters.{adapter}")


def test_no_test_is_skipped_because_a_file_of_ours_is_missing():
    ours = {path.stem for folder in ("learner", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")}
    ours |= {"llm_utils", "agent_r1", "agent_r1_tools"}
    asked = [
        (path.name, module)
        for path in (ROOT / "tests").rglob("*.py")
        for module in re.findall(r"""importorskip\(["']([\w.]+)["']""", path.read_text())
    ]
    assert len(asked) > 10
    assert not [(name, module) for name, module in asked if module.split(".")[0] in ours]


INSTALL = re.compile(r"pip install -e \"\.\[([a-z,]+)\]\"")
FLAGS = {"--engine vllm": "vllm", "--engine vllm-server": "http", "--lora-rank": "lora", "--track": "track"}
EXTRAS = list(CONFIG["options.extras_require"])


def test_the_docs_install_extras_that_there_are_from_where_they_are():
    """The package is not on PyPI: `pip install "agent-r1[...]"` is for where it is installed already."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert set(re.findall(r"agent-r1\[([^]]*)\]", text)) <= {"EXTRA"}
    assert {name for names in INSTALL.findall(text) for name in names.split(",")} <= set(EXTRAS)
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(EXTRAS)


def brought(extra: str) -> set[str]:
    """An extra and those that it brings."""
    own = {name for line in lines(CONFIG["options.extras_require"][extra]) if line.startswith("agent-r1[")
           for name in Requirement(line).extras}  # fmt: skip
    return {extra}.union(*map(brought, own))


SCRIPTS = sorted(path.stem for path in (ROOT / "learner").glob("*_llm.py"))
PAGES = ["README", "docs/engines", "docs/scaling", *(f"docs/learners/{script}" for script in SCRIPTS)]


@pytest.mark.parametrize("page", PAGES)
def test_the_extras_that_commands_need_are_named_above_them(page):
    installed: set[str] = set()
    for line in (ROOT / f"{page}.md").read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        for names in INSTALL.findall(line):
            installed = installed.union(*map(brought, names.split(",")))
        if re.match(r"([A-Z_]+=\S+ )*(python|torchrun .*) learner/", line):
            needed = {FLAGS[flag] for flag in FLAGS if re.search(rf"{flag}(?![\w-])", line)}
            assert needed | {"train"} <= installed, line
