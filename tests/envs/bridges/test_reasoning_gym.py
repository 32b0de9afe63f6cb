"""reasoning-gym: each set's own answer scores 1; what is answered never runs."""

import re
import sys
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from bridge_cases import forgotten, run_elsewhere

from agent_r1 import ArgumentError
from agent_r1.validation import probes

pytest.importorskip("sympy")
if find_spec("reasoning_gym") is None:  # it stays out of this process
    pytest.skip("needs reasoning-gym", allow_module_level=True)

from agent_r1.bridges.reasoning_gym import environment as bridge
from agent_r1.bridges.reasoning_gym import server
from agent_r1.bridges.reasoning_gym.environment import LEFT_OUT, ReasoningGymEnv
from agent_r1.vector import ToolVectorEnv

SLOW = ("knight_swap", "quantum_lock", "acre", "arc_agi")  # seconds
QUICK = [name for name in bridge.names()["names"] if name not in SLOW]


def answer(env, text):
    return env.step(probes.span(env, f"<answer>{text}</answer>"))


def scored(env, text, index=0):
    env.reset(options={"task_index": index})
    return answer(env, text)[1]


def test_each_set_takes_its_own_answer():
    env = ReasoningGymEnv(dataset=[name for name in QUICK if name not in LEFT_OUT])
    assert len(env.sets) >= 95
    for index in range(len(env.sets)):
        episode = probes.play(env, index, probes.expert)
        assert episode.success and episode.rewards == [1.0], env.task.id
        assert episode.infos[-1]["metrics"] == {"score": 1.0}


def test_sets_that_are_left_out_can_be_had_by_name():
    for name in LEFT_OUT:
        env = ReasoningGymEnv(dataset=name)
        env.reset(options={"task_index": 0})
        assert env.task.question
    env = ReasoningGymEnv(dataset="rush_hour")
    env.reset(options={"task_index": 0})
    with pytest.raises(ValueError, match="reasoning-gym knows no answer to rush_hour-0"):
        env.demonstration()
    assert not {name for name, _ in ReasoningGymEnv().sets} & set(LEFT_OUT)
    env = ReasoningGymEnv(dataset="game_of_life_halting")  # the reason for which it is left out
    assert scored(env, "no idea") == 1


def test_config_and_level_make_problems_harder():
    plain = ReasoningGymEnv(dataset="chain_sum", config={"min_terms": 2, "max_terms": 2})
    assert plain.make_task(3).question.count("+") + plain.make_task(3).question.count("-") <= 2
    lengths = [len(ReasoningGymEnv(dataset="chain_sum", level=level).make_task(0).question) for level in (0, 4, 99)]
    assert lengths[0] < lengths[1] <= lengths[2]
    two = ReasoningGymEnv(dataset={"chain_sum": {"min_terms": 6, "max_terms": 6}, "gcd": {}})
    assert [two.make_task(index).id for index in range(3)] == ["chain_sum-0", "gcd-0", "chain_sum-1"]
    assert two.make_task(0).metadata["config"] == {"max_terms": 6, "min_terms": 6}


def test_splits_share_no_item():
    train, test = (ReasoningGymEnv(dataset="chain_sum", split=split) for split in ("train", "test"))
    assert (train.make_task(999_999).id, test.make_task(0).id) == ("chain_sum-999999", "chain_sum-1000000")
    assert train.make_task(0).question != test.make_task(0).question


def test_a_level_may_be_a_number_of_numpy():
    env = ReasoningGymEnv(dataset="gcd", level=np.int64(1))
    env.reset(options={"task_index": 0})
    assert env.task == ReasoningGymEnv(dataset="gcd", level=1).make_task(0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dataset": "chain_summ"}, "has no data set 'chain_summ'; it has ab, acre"),
        ({"dataset": "composite"}, "no data set 'composite'"),
        ({"dataset": []}, "names no data set"),
        ({"dataset": ""}, "names no data set"),
        ({"dataset": [""]}, "names no data set"),
        ({"dataset": "chain_sum", "config": {"terms": 3}}, "chain_sum has no setting 'terms'; it has min_terms"),
        ({"dataset": "chain_sum", "config": {"seed": 3}}, "no setting 'seed'"),
        ({"dataset": "chain_sum", "config": {"min_terms": -1}}, "chain_sum cannot be made"),
        ({"dataset": "chain_sum", "config": {"min_terms": object()}}, "a dict of JSON values"),
        ({"dataset": "acre", "level": 1}, "No curriculum"),
        ({"dataset": ["gcd", "lcm"], "config": {}}, "config is for one data set"),
        ({"dataset": "gcd", "level": -1}, "level"),
        ({"dataset": "gcd", "attempts": 0}, "attempts"),
        ({"dataset": [["gcd"]]}, "dataset must be a name, a list of names"),
        ({"dataset": 5}, "dataset must be a name, a list of names or a dict with their settings, got 5"),
    ],
)
def test_what_there_is_not_is_named(arguments, words):
    with pytest.raises(ArgumentError, match=re.escape(words)):
        ReasoningGymEnv(**arguments)


# ------------------------------------------------------------------------------------------------- what answers may be


EVALUATED = ("binary_matrix", "spiral_matrix", "string_insertion", "n_queens")
PARSED = ("countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication")


@pytest.mark.parametrize("name", EVALUATED + PARSED)
def test_answers_never_run(name, tmp_path):
    """The package gives them to eval; a file shows whether they ran."""
    mark = tmp_path / "ran"
    program = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    letters = "+".join(f"chr({ord(letter)})" for letter in program)
    env = ReasoningGymEnv(dataset=name, max_action_tokens=20_000)
    for text in (program, f"[[{program}]]", f"exec({letters})", f"S({program!r})", f"(lambda: {program})()", "x.f()"):
        assert scored(env, text) <= 0.05
    assert not mark.exists()


def test_what_the_package_evaluates_is_known():
    """A version that gives answers to eval elsewhere, or to another parser, shows here."""
    root = Path(find_spec("reasoning_gym").origin).parent
    words = re.compile(r"(?<![\w.])(?:eval|exec|parse_expr|__import__)\(|\.parse_expr|sympify|lambdify|getattr\(")
    found = {str(p.relative_to(root)) for p in root.rglob("*.py") if words.search(p.read_text(encoding="utf-8"))}
    taken = {f"algorithmic/{name}.py" for name in EVALUATED[:3]} | {"games/n_queens.py"}
    taken |= {f"games/{name}.py" for name in PARSED[:2]} | {f"algebra/{name}.py" for name in PARSED[2:]}
    own = {  # they evaluate what they made themselves
        "algorithmic/number_sorting.py", "arithmetic/basic_arithmetic.py", "arithmetic/bitwise_arithmetic.py",
        "arithmetic/gsm_symbolic/generators_50_99.py", "code/codeio.py", "logic/propositional_logic.py",
        "arc/rearc_utils/utils.py", "arithmetic/gsm_symbolic/generators_00_49.py",
        "arithmetic/gsm_symbolic/gsm_symbolic.py", "induction/list_functions/list_functions.py",
    }  # fmt: skip
    assert found == taken | own


def test_costly_answers_are_ended():
    env = ReasoningGymEnv(dataset="countdown")
    start = time.perf_counter()
    assert scored(env, "9**9**9**9") <= 0.05
    assert time.perf_counter() - start < 60
    assert scored(env, env.task.answers[0]) == 1


@pytest.mark.parametrize("text", ["\ud800", "x" * 60_000, "[" * 30_000, "\0", "∀" * 100, "NaN", "1e400", "9" * 5_000])
def test_no_answer_breaks_anything(text):
    env = ReasoningGymEnv(dataset=QUICK, max_action_tokens=300_000, max_context_tokens=1_000_000)
    for index in range(0, len(QUICK), 7):
        env.reset(options={"task_index": index})
        _, reward, terminated, _, info = answer(env, text)
        assert terminated and (reward < 1 or QUICK[index] in LEFT_OUT), info


def test_formulas():
    fits = server.FORMULA.fullmatch
    for text in ("3*x**2 + C", "sin(2*x)/2", "-1.5e-3*X + log(x)", "(8 - 2) * .5", "x_1**y2", "6!"):
        assert fits(text), text
    for text in ("open(x)", "x.diff(x)", "'x'", "a[0]", "__x", "1 .real", "1..real", "lambda: 1", "x;y", "xx", "{x}",
                 "N(pi, 99999999)", "O (x)", "S(1)", "(N)(pi, 9)", "((N)) (1)"):  # fmt: skip
        assert not fits(text), text


# ------------------------------------------------------------------------------------------------------------- attempts


def test_answers_can_be_tried():
    env = ReasoningGymEnv(dataset="chain_sum", attempts=3)
    env.reset(options={"task_index": 5})
    gold = env.task.answers[0]

    def submit(text):
        return env.step(probes.span(env, env.dialect.tool_call("submit", {"answer": text})))

    submit("12345")
    assert env.messages[-1]["content"] == "That scores 0.00. Attempts left: 2."
    state = env.get_state()
    _, reward, terminated, _, info = submit(gold)
    assert terminated and reward == 1 and info["is_success"]
    env.set_state(state)
    submit("1")
    _, reward, terminated, _, info = submit("2")
    assert terminated and reward == 0 and not info["is_success"]
    env.set_state(state)
    assert answer(env, gold)[4]["is_success"]
    assert probes.play(env, 5, probes.expert).success


def test_submitting_again_and_again_earns_nothing():
    env = ReasoningGymEnv(dataset="chain_sum", attempts=1000, max_turns=200)
    turns = [env.dialect.tool_call("submit", {"answer": text}) for text in "12"]
    episode = probes.play(env, 0, probes.repeated(turns))
    assert len(episode.rewards) == 200 and max(episode.rewards) <= 0


def test_saying_nothing_pays_nothing():
    env = ReasoningGymEnv(dataset=QUICK[:30])
    for index in range(30):
        for probe in (probes.null, probes.many_answers):
            episode = probes.play(env, index, probe)
            assert not episode.success and sum(episode.rewards) <= 0, env.task.id


# ---------------------------------------------------------------------------------------------------------- determinism


def test_another_process_makes_the_same_items():
    program = (
        "import agent_r1, hashlib, sys; from agent_r1.bridges.reasoning_gym.environment import ReasoningGymEnv\n"
        "env = ReasoningGymEnv(dataset=sys.argv[2].split(','))\n"
        "order = range(len(env.sets)) if sys.argv[1] == '0' else reversed(range(len(env.sets)))\n"
        "tasks = sorted((i, repr(env.make_task(i))) for i in order)\n"
        "print(hashlib.sha256(repr(tasks).encode()).hexdigest())"
    )
    sets = ",".join(QUICK[::5])
    assert len({run_elsewhere(program, seed, sets, PYTHONHASHSEED=seed)[0] for seed in "01"}) == 1


def test_a_process_that_is_killed_is_started_again():
    env = ReasoningGymEnv(dataset="gcd")
    env.reset(options={"task_index": 7})
    bridge.server.process.kill()
    assert answer(env, env.task.answers[0])[1] == 1


def test_two_configs_of_codeio_share_nothing():
    """The class keeps the rows of the last one made."""
    easy, hard = (ReasoningGymEnv(dataset="codeio", config={"difficulty": level}) for level in (4, 9))
    bridge.make_item.cache_clear()
    alone = easy.make_task(11).question
    bridge.make_item.cache_clear()
    hard.make_task(11)
    assert easy.make_task(11).question == alone != hard.make_task(11).question


def test_many_at_once_and_global_random_state():
    np.random.seed(3)
    before = np.random.get_state()[1].tolist()
    envs = ToolVectorEnv(lambda: ReasoningGymEnv(dataset=["gcd", "countdown", "maze"]), num_envs=6)
    envs.reset(seed=[1, 1, 2, 3, 4, 5])
    spans = [probes.span(env, env.demonstration()[0]) for env in envs.envs]
    _, rewards, terminations, _, _ = envs.step(spans)
    assert terminations.all() and rewards.tolist() == [1.0] * 6
    envs.close()
    assert np.random.get_state()[1].tolist() == before and "reasoning_gym" not in sys.modules


def test_without_the_package():
    needed = re.escape('pip install "agent-r1[reasoning_gym]"')
    with forgotten(bridge.names) as patched:
        patched.setattr(bridge.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=needed):
            ReasoningGymEnv()
    with forgotten(bridge.names) as patched:  # a package that it needs is missing

        def ask(**request):
            raise ValueError("import of sympy halted")

        patched.setattr(bridge.server, "ask", ask)
        with pytest.raises(ImportError, match=f"{needed}; it says: import of sympy halted"):
            ReasoningGymEnv()
    with forgotten(bridge.names) as patched:
        patched.setattr(metadata, "version", lambda name: "0.2.0")
        with pytest.warns(UserWarning, match="reasoning-gym 0.2.0 wasn't checked; 0.1 was"):
            ReasoningGymEnv(dataset="gcd")
