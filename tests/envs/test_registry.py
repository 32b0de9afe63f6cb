"""Every registered environment as `gym.make` gives it, on small made-up data in the official formats."""

import inspect
import json
import os
import pickle
import subprocess
import sys
import warnings
from importlib.resources import files

import gymnasium as gym
import numpy as np
import pytest
from fuzz_spans import KINDS, SpanMaker, check_step
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.utils.env_checker import check_env
from registered import BRIDGES, ENVIRONMENTS, IDS

import agent_r1
from agent_r1 import ArgumentError

POLICIES = files("agent_r1") / "policies"
ARGUMENTS = {  # better than made up from the schema
    "search": {"query": "Ada Quill"},
    "calculator": {"expression": "17 * 3"},
    "python": {"code": "n = 17 * 3\nn"},
    "run_tests": {"code": "def f(x): return x"},
    "query": {"sql": "SELECT 17 * 3"},
    "shell": {"command": "echo $((17 * 3))"},
    "play": {"action": "[X 4]"},
    "press": {"key": "Tab"},
}
ENDS = {"submit", "done", "transfer_to_human_agents"}  # tools that end an episode
EMBEDDED = {  # worlds of their own; data_dir is by choice
    f"AgentR1/{name}-v0" for name in ("CraftWorld", "DeepSearch", "PharmaSim", "SQLWorld", "ShopWorld", "Terminal")
}


@pytest.fixture(autouse=True)
def data_folder(made_up_data, monkeypatch):
    monkeypatch.setenv("AGENT_R1_DATA", str(made_up_data))


def takes(env_id):
    """The names of the arguments that an environment takes."""
    bases = load_env_creator(gym.spec(env_id).entry_point).__mro__
    given = [inspect.signature(base.__init__).parameters for base in bases if "__init__" in vars(base)]
    return {name for parameters in given for name in parameters}


READS_DATA = [env_id for env_id in ENVIRONMENTS if env_id not in EMBEDDED and "data_dir" in takes(env_id)]


def example(schema, defs=None):
    """A value that a JSON schema describes; what is optional is left out. `defs`: those that it refers to."""
    defs = schema.get("$defs", defs)
    if "$ref" in schema:
        return example(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        return example(schema["anyOf"][0], defs)
    if "enum" in schema or "const" in schema:
        return schema["enum"][0] if "enum" in schema else schema["const"]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {name: example(schema["properties"][name], defs) for name in schema.get("required", ())}
    if kind == "array":
        return [example(schema.get("items", {}), defs)] * schema.get("minItems", 0)
    if kind in ("integer", "number"):
        return schema.get("minimum", 1)
    return {"boolean": True, "null": None}.get(kind, "x" * max(1, schema.get("minLength", 1)))


def calls(env):
    """A call of each tool of an environment that doesn't end the episode, as text, by name."""
    tools = {name: tool for name, tool in env.unwrapped.tools.items() if name not in ENDS}
    made = {name: ARGUMENTS.get(name) or example(tool.parameters) for name, tool in tools.items()}
    assert not any(tool.validate(made[name]) for name, tool in tools.items()), "give it ARGUMENTS"
    return {name: env.unwrapped.dialect.tool_call(name, arguments) for name, arguments in made.items()}


def same(first, second):
    """Whether two outcomes of step or reset agree; arrays in value and type."""
    return len(first) == len(second) and all(
        a.dtype == b.dtype and np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        for a, b in zip(first, second, strict=True)
    )


def test_the_registry_is_the_table():
    table = agent_r1.ENVIRONMENTS | agent_r1.BRIDGES
    remote = "AgentR1/Remote-v0"  # no task, but the way to one on another machine
    assert sorted([*table, remote]) == sorted(env_id for env_id in gym.registry if env_id.startswith("AgentR1/"))
    for env_id, entry in table.items():
        spec = gym.spec(env_id)
        assert spec.namespace == "AgentR1" and spec.version is not None
        assert spec.entry_point == entry.entry_point


def test_the_module_can_stand_in_the_id():
    env = gym.make("agent_r1:AgentR1/MultihopWorld-v0")
    assert isinstance(env.unwrapped, agent_r1.ToolEnv)


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("max_turns", [1, 6])
def test_gymnasium_has_nothing_to_say(env_id, max_turns):
    env = gym.make(env_id, max_turns=max_turns)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)


@pytest.mark.parametrize("env_id", IDS)
def test_what_every_environment_offers(env_id):
    context = 40_000 if env_id in BRIDGES else 9_000  # many functions make a long prompt
    env = gym.make(env_id, max_context_tokens=context, max_action_tokens=99, process_reward=False).unwrapped
    env.reset(seed=0)
    assert env.action_space == agent_r1.TokenSpan(len(env.tokenizer), 99)
    assert env.observation_space == agent_r1.TokenSpan(len(env.tokenizer), context)
    assert env.num_tasks > 0 and env.task.question and (env.task.answers or env_id in BRIDGES)  # a game has none
    assert env.task.question in env.messages[1]["content"]
    assert all(name == tool.name and tool.schema["function"]["name"] == name for name, tool in env.tools.items())
    end = env.tokenizer.encode(env.dialect.end_of_turn, add_special_tokens=False)
    assert end == env.dialect.close() and set(end) <= set(env.dialect.stop_token_ids)


@pytest.mark.parametrize("env_id", IDS)
def test_two_environments_agree_on_random_spans(env_id):
    """Several episodes in a row, without a new seed in between."""
    context = 32_768 if env_id in BRIDGES else 4_096  # many functions make a long prompt
    pair = [gym.make(env_id, max_turns=8, max_context_tokens=context) for _ in range(2)]
    maker = SpanMaker(pair[0].unwrapped.dialect, seed=11)
    outcomes = [env.reset(seed=3) for env in pair]
    assert same(*outcomes)
    tasks = {outcomes[0][1]["task_id"]}
    for index in range(8 * len(KINDS)):
        _, span = maker(index)
        before = outcomes[0][0]
        outcomes = [env.step(span) for env in pair]
        assert same(*outcomes)
        check_step(pair[0].unwrapped, before, span, outcomes[0])
        if outcomes[0][2] or outcomes[0][3]:
            outcomes = [env.reset() for env in pair]
            assert same(*outcomes)
            tasks.add(outcomes[0][1]["task_id"])
    assert len(tasks) > 1


@pytest.mark.parametrize("env_id", IDS)
def test_equal_seeds_give_equal_tasks(env_id):
    env = gym.make(env_id)
    drawn, again = ([env.reset(seed=seed) for seed in range(12)] for _ in range(2))
    assert all(map(same, drawn, again))
    assert len({info["task_id"] for _, info in drawn}) > 1
    named = [env.reset(options={"task_index": index})[1]["task_id"] for index in (1, 0, 1)]
    assert named[0] == named[2] != named[1]


@pytest.mark.parametrize("env_id", IDS)
def test_an_environment_can_be_pickled_in_the_middle(env_id, say):
    env = gym.make(env_id)
    env.reset(seed=1)
    for call in list(calls(env).values())[:4]:
        say(env, call)
    copy = pickle.loads(pickle.dumps(env))
    answer = next(iter(env.unwrapped.task.answers), "x")
    for text in (*list(calls(env).values())[:4], "<think>hm</think>", f"<answer>{answer}</answer>"):
        ids = np.asarray(env.unwrapped.tokenizer.encode(text))
        assert same(env.step(ids), copy.step(ids))
    assert same(env.reset(), copy.reset())


@pytest.mark.parametrize("env_id", IDS)
def test_a_spec_survives_json(env_id):
    own = {"top_k": 2} if "top_k" in takes(env_id) else {}
    env = gym.make(env_id, max_turns=3, process_reward={"no_action": -0.125}, render_mode="ansi", **own)
    env.reset(seed=5)
    spec = EnvSpec.from_json(env.spec.to_json())
    again = gym.make(spec)
    assert same(gym.make(spec).reset(seed=5), again.reset(seed=5))
    span = np.array(env.unwrapped.tokenizer.encode("<think>hm</think>"), np.int32)  # says nothing, to no user either
    outcome = again.step(span)
    assert same(env.step(span), outcome) and outcome[1] == -0.125
    assert again.render() == env.render()


@pytest.mark.parametrize("env_id", IDS)
def test_render_modes(env_id, say, capsys):
    ansi, human, silent = (gym.make(env_id, render_mode=mode) for mode in ("ansi", "human", None))
    some = dict(list(calls(ansi).items())[:4])
    for env in (ansi, human, silent):
        env.reset(seed=2)
        for call in some.values():
            say(env, call)
        say(env, "<answer>nothing</answer>")
    text = ansi.render()
    assert isinstance(text, str) and "<answer>nothing</answer>" in text
    assert all(f"[tool {name}]" in text for name in some)
    assert capsys.readouterr().out == text + "\n" and human.render() is None
    with pytest.warns(UserWarning, match="render"):
        silent.render()


@pytest.mark.parametrize("env_id", IDS)
def test_gymnasium_wrappers_and_checkers_stay_silent(env_id, say):
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.reset(seed=0)
        say(env, "<think>hm</think>")
    ids = env.unwrapped.tokenizer.encode("<answer>x</answer>")
    assert env.step(np.asarray(ids, np.int32))[4]["episode"]["l"] in (1, 2)


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("env_id", IDS)
def test_an_unknown_split_names_those_there_are(env_id):
    with pytest.raises(ValueError, match=r"no split 'trian'; it has \w+"):
        gym.make(env_id, split="trian")


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.filterwarnings("ignore:.*rgb_array:UserWarning")
def test_an_unknown_render_mode_names_those_there_are(env_id):
    with pytest.raises(ValueError, match="None, 'ansi' or 'human', got 'rgb_array'"):
        gym.make(env_id, render_mode="rgb_array")


@pytest.mark.parametrize("env_id", IDS)
def test_a_wrong_argument_is_named(env_id):
    with pytest.raises(ArgumentError, match="max_tunrs"):
        gym.make(env_id, max_tunrs=3)


@pytest.mark.parametrize("env_id", READS_DATA)
def test_missing_data_names_the_three_ways(env_id, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_R1_DATA", str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(FileNotFoundError) as caught:
        gym.make(env_id)
    for way in ("data_dir", "AGENT_R1_DATA", "agent-r1[data]"):
        assert way in str(caught.value)
    with pytest.raises(FileNotFoundError, match="data_dir"):
        gym.make(env_id, data_dir=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("env_id", IDS)
def test_no_argument_does_nothing(env_id, tmp_path):
    """A folder is taken where data are read, a corpus where something is searched, and both are looked at."""
    nowhere = {"data_dir": str(tmp_path / "nowhere"), "corpus": str(tmp_path / "nowhere.jsonl")}
    for name, value in (nowhere | {"corpus": "own", "top_k": 5}).items():
        if name not in takes(env_id):
            with pytest.raises(ArgumentError, match=rf"unexpected keyword argument '{name}'; it has .*\bmax_turns\b"):
                gym.make(env_id, **{name: value})
    for name in nowhere.keys() & takes(env_id):
        with pytest.raises((FileNotFoundError, ValueError), match=rf"nowhere|{name} and the tool search belong"):
            gym.make(env_id, **{name: nowhere[name]})
    assert ("top_k" in takes(env_id)) == ("corpus" in takes(env_id))


@pytest.mark.parametrize("env_id", [f"AgentR1/{folder.name}" for folder in POLICIES.iterdir()])
def test_the_tiny_policy_reads_what_its_environment_writes(env_id):
    if env_id == "AgentR1/BabyAI-v0":
        pytest.importorskip("minigrid")
    folder = agent_r1.tiny_policy(env_id)
    env = gym.make(env_id, tokenizer=folder).unwrapped
    state, _ = env.reset(seed=0)
    with open(os.path.join(folder, "config.json")) as file:
        assert state.max() < env.action_space.vocab_size <= json.load(file)["vocab_size"]
    assert len(state) < env.tokenizer.decode(state.tolist()).count(" ") * 4  # words are tokens, not bytes


def test_a_tiny_policy_that_is_not_there():
    with pytest.raises(ValueError, match="no tiny policy is shipped for AgentR1/HotpotQA-v0.*--model"):
        agent_r1.tiny_policy("AgentR1/HotpotQA-v0")


# ---------------------------------------------------------------------- the import


def in_a_new_process(code):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_loads_no_optional_dependency():
    """And making the generated environment loads the search library, nothing more."""
    code = (
        "import sys, json, gymnasium\n"
        "before = set(sys.modules)\n"
        "import agent_r1\n"
        "imported = set(sys.modules) - before\n"
        "env = gymnasium.make('AgentR1/MultihopWorld-v0')\n"
        "env.reset(seed=0)\n"
        "print(json.dumps([sorted(imported), sorted(set(sys.modules) - before)]))\n"
    )
    imported, used = in_a_new_process(code)
    heavy = {
        "torch", "transformers", "tokenizers", "vllm", "datasets", "bm25s", "Stemmer", "scipy", "pandas", "requests",
        "httpx", "fastapi", "faiss", "sentence_transformers", "jsonschema", "matplotlib", "tyro", "yaml", "asyncio",
    }  # fmt: skip
    assert {name.partition(".")[0] for name in imported} & heavy == set()
    assert {name.partition(".")[0] for name in used} & (heavy - {"bm25s", "Stemmer", "scipy", "asyncio"}) == set()
    assert not any(name.startswith("agent_r1.tasks.") for name in imported)  # each task when it is made


def test_the_vector_environment_stands_below_the_wrappers():
    code = "import sys, json, agent_r1.vector; print(json.dumps('agent_r1.wrappers' in sys.modules))"
    assert in_a_new_process(code) is False


def test_arithmetic_world_needs_no_extra():
    """The judge and the sandboxes stay unloaded: the calculator is all that it needs."""
    code = (
        "import sys, json, gymnasium\n"
        "before = set(sys.modules)\n"
        "import agent_r1\n"
        "env = gymnasium.make('AgentR1/ArithmeticWorld-v0')\n"
        "env.reset(seed=0)\n"
        "for text in env.unwrapped.demonstration():\n"
        "    *_, info = env.step(env.unwrapped.tokenizer.encode(text))\n"
        "assert info['is_success']\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))\n"
    )
    optional = {"torch", "transformers", "bm25s", "scipy", "jsonschema", "sympy", "math_verify", "pydantic_monty"}
    loaded = in_a_new_process(code)
    assert {name.partition(".")[0] for name in loaded} & optional == set()
    assert not any(name.startswith("agent_r1_tools.python") for name in loaded)


def test_importing_is_quick():
    """At most 0.2 seconds on top of gymnasium: the least processor time of a few tries, for busy machines."""
    code = (
        "import json, time, gymnasium\n"
        "start = time.process_time()\n"
        "import agent_r1\n"
        "print(json.dumps(time.process_time() - start))\n"
    )
    assert min(in_a_new_process(code) for _ in range(5)) < 0.2


@pytest.mark.parametrize("env_id", agent_r1.generated_worlds())
@pytest.mark.parametrize("world_seed", [-1, 0.5, "0", True])
def test_a_world_that_has_no_number_is_refused_when_it_is_made(env_id, world_seed):
    with pytest.raises(ValueError, match=r"world_seed must be (an integer|at least 0), got "):
        gym.make(env_id, world_seed=world_seed)
