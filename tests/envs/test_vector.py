"""ToolVectorEnv: the same episodes as single environments, whatever the order in which their tools answer."""

import subprocess
import sys
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from agent_r1 import Task, Tool, ToolEnv, ToolResult
from agent_r1.vector import ToolVectorEnv

WORLD = "AgentR1/MultihopWorld-v0"


# ---------------------------------------------------------------------- an environment whose tools misbehave


class Recorder:
    """What happened to the tools of all episodes."""

    def __init__(self):
        self.lock = threading.Lock()
        self.calls, self.batches, self.running, self.most = [], [], 0, 0

    def __enter__(self):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)

    def __exit__(self, *exception):
        with self.lock:
            self.running -= 1


NUMBER = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}


class Slow(Tool):
    """Sleeps for x seconds; a negative x fails."""

    name, description, parameters, timeout = "slow", "Sleeps.", NUMBER, 0.6

    def __init__(self, recorder):
        self.recorder = recorder

    def execute(self, arguments):
        self.recorder.calls.append(arguments["x"])
        with self.recorder:
            time.sleep(abs(arguments["x"]))
        if arguments["x"] < 0:
            raise RuntimeError("the server is gone")
        return ToolResult(f"slept {arguments['x']}")

    def __eq__(self, other):
        return type(self) is type(other) and self.recorder is other.recorder

    def __hash__(self):
        return id(self.recorder)


class Batched(Slow):
    """The same with a batch of its own."""

    name = "batched"

    def execute(self, arguments):
        return ToolResult(f"batched {arguments['x']}")

    def batch_execute(self, batch):
        self.recorder.batches.append(len(batch))
        return [self.execute(arguments) for arguments in batch]


class Session(Tool):
    """Counts its calls, so their order matters; shared, it must not be used by two at once."""

    name, description, parameters, concurrency_safe = "session", "Counts.", NUMBER, False

    def __init__(self, recorder):
        self.recorder, self.count = recorder, 0

    def execute(self, arguments):
        with self.recorder:
            time.sleep(arguments["x"])
            self.count += 1
        return ToolResult(f"call {self.count}")

    def get_state(self):
        return self.count

    def set_state(self, state):
        self.count = state or 0


class Quick(Slow):
    """Never blocks."""

    name, timeout = "quick", float("inf")

    def execute(self, arguments):
        self.recorder.calls.append(threading.current_thread().name)
        return ToolResult(f"quick {arguments['x']}")


class Playground(ToolEnv):
    """All those tools; the tools' results are the rewards' names, so nothing can be mixed up unseen."""

    PROCESS_WEIGHTS = {**ToolEnv.PROCESS_WEIGHTS, "seen": 1.0}
    num_tasks = 50

    def __init__(self, recorder=None, tools=None, **kwargs):
        recorder = recorder or Recorder()
        tools = tools or [Slow(recorder), Batched(recorder), Session(recorder), Quick(recorder)]
        super().__init__(tools, **{"max_turns": 3, **kwargs})

    def make_task(self, index):
        return Task(f"task-{index}", f"Question {index}?", [str(index)])

    def judge_result(self, call, result):
        return {"seen": float(len(result.content)) + call.arguments["x"]}

    def judge_answer(self, answer):
        score = float(answer == self.task.answers[0])
        return score, {"right": score}


def calls(env, *pairs):
    """The span that calls tools: ("slow", 0.1) and so on."""
    env = getattr(env, "envs", [env])[0].unwrapped
    text = "\n".join(env.dialect.tool_call(name, {"x": x}) for name, x in pairs) + env.dialect.end_of_turn
    return np.array(env.tokenizer.encode(text, add_special_tokens=False), np.int32)


def answer(env, text):
    env = getattr(env, "envs", [env])[0].unwrapped
    return np.array(env.tokenizer.encode(f"<answer>{text}</answer>{env.dialect.end_of_turn}"), np.int32)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def make(recorder):
    made = []

    def make(num_envs=4, **kwargs):
        made.append(ToolVectorEnv(Playground, num_envs, recorder=recorder, **kwargs))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def same(left, right):
    """Equality through arrays, lists and dicts."""
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray) and left.dtype == object:
        return same(left.tolist(), right.tolist())
    return bool(np.array_equal(left, right))


# ---------------------------------------------------------------------- the same episodes


def world_spans(env):
    """Turns that search for the supports in turn, one malformed, one without any action, then an answer."""
    dialect, task = env.dialect, env.task
    texts = [dialect.tool_call("search", {"query": title}) for title in task.metadata["supports"]]
    texts.insert(1, "<tool_call>\n{broken\n</tool_call>")
    texts += ["I wonder.", f"<answer>{task.answers[0]}</answer>"]
    return [env.tokenizer.encode(text + dialect.end_of_turn, add_special_tokens=False) for text in texts]


def test_equal_seeds_give_the_episodes_of_the_single_environment():
    seeds = [3, 3, 11, 12]
    expected = []
    for seed in seeds:
        env = gym.make(WORLD, max_turns=4)
        episode = [env.reset(seed=seed)]
        for span in world_spans(env.unwrapped)[:4]:
            episode.append(env.step(np.array(span, np.int32)))
            if episode[-1][2] or episode[-1][3]:
                break
        expected.append(episode)
    assert same(expected[0], expected[1]) and not same(expected[1], expected[2])
    assert {len(episode) for episode in expected} == {5}  # all take four turns: `step` can play them together

    stepped = gym.make_vec(WORLD, num_envs=4, max_turns=4)
    received = gym.make_vec(WORLD, num_envs=4, max_turns=4)
    assert isinstance(stepped, ToolVectorEnv)
    reference = SyncVectorEnv([lambda: gym.make(WORLD, max_turns=4)] * 4, autoreset_mode=AutoresetMode.DISABLED)
    first = stepped.reset(seed=seeds)
    assert same(first, reference.reset(seed=seeds)) and same(first, received.reset(seed=seeds))
    assert same(list(first[0]), [episode[0][0] for episode in expected])
    spans = [world_spans(env) for env in stepped.envs]
    for turn in range(4):
        actions = [np.array(spans[i][turn], np.int32) for i in range(4)]
        result = stepped.step(actions)
        assert same(result, reference.step(actions))
        received.send(actions[2:], [2, 3])
        received.send(actions[:2], [0, 1])
        ids, *columns = received.recv(4)
        assert ids.tolist() == [0, 1, 2, 3]
        assert same(list(result[0]), columns[0]) and same(list(result[1:4]), columns[1:4])
        for i, episode in enumerate(expected):
            assert same([column[i] for column in columns], list(episode[turn + 1]))


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_answers_gives_the_same_episodes(make, seed):
    """Random turns over all tools, sent and received in random portions, against single environments."""
    rng = np.random.default_rng(seed)
    envs = make(5, max_turns=3)
    singles = [Playground(max_turns=3) for _ in range(5)]
    begin = [int(s) for s in rng.integers(100, size=5)]
    observations, _ = envs.reset(seed=begin)
    for i, single in enumerate(singles):
        assert same(single.reset(seed=begin[i])[0], observations[i])
    tools = ["slow", "batched", "session", "quick"]
    ready, sent = list(range(5)), {}
    finished = 0
    while finished < 10:
        portion = [i for i in ready if rng.random() < 0.7]
        spans = []
        for _ in portion:
            turn = [(tools[rng.integers(4)], float(rng.choice([0, 0.01, 0.05]))) for _ in range(rng.integers(4))]
            spans.append(answer(envs, rng.integers(50)) if rng.random() < 0.2 else calls(envs, *turn))
        envs.send(spans, portion)
        sent |= dict(zip(portion, spans, strict=True))
        ready = [i for i in ready if i not in portion]
        if not sent:
            continue
        ids, *columns = envs.recv(int(rng.integers(1, 4)))
        for row, i in enumerate(ids.tolist()):
            expected = singles[i].step(sent.pop(i))
            assert same([column[row] for column in columns], list(expected))
            if expected[2] or expected[3]:
                finished += 1
                new = int(rng.integers(100))
                mask = np.arange(5) == i
                observations, _ = envs.reset(seed=[new] * 5, options={"reset_mask": mask})
                assert same(observations[i], singles[i].reset(seed=new)[0])
            ready.append(i)


def test_an_int_seed_counts_up(make):
    envs = make(3)
    counted, _ = envs.reset(seed=5)
    listed, _ = envs.reset(seed=[5, 6, 7])
    assert same(counted, listed)


def test_the_spec_survives_json_and_makes_the_vector():
    spec = gym.make_vec(WORLD, num_envs=2, max_turns=3).spec
    again = gym.make_vec(gym.envs.registration.EnvSpec.from_json(spec.to_json()))
    assert isinstance(again, ToolVectorEnv) and again.num_envs == 2 and again.envs[0].max_turns == 3


def test_vector_entry_point_of_an_unknown_id():
    with pytest.raises(AttributeError, match="Nobody/Knows-v0"):
        gym.envs.registration.load_env_creator("agent_r1.vector:Nobody/Knows-v0")


def test_gymnasiums_vector_wrappers_fit():
    envs = gym.wrappers.vector.RecordEpisodeStatistics(gym.make_vec(WORLD, num_envs=2, max_turns=1))
    envs = gym.wrappers.vector.DictInfoToList(envs)
    envs.reset(seed=0)
    _, rewards, terminations, _, infos = envs.step(envs.action_space.sample())
    assert terminations.all() and [info["episode"]["r"] for info in infos] == rewards.tolist()
    assert [info["turn"] for info in infos] == [1, 1]


# ---------------------------------------------------------------------- begin and end


def test_same_step_begins_again_at_once(make):
    envs = make(2, autoreset_mode="SameStep", max_turns=2)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    start, _ = envs.reset(seed=[4, 4])
    single = Playground(max_turns=2)
    single.reset(seed=4)
    end = single.step(answer(envs, "no"))
    begun = single.reset()
    observations, rewards, terminations, _, infos = envs.step([answer(envs, "no"), calls(envs, ("quick", 1))])
    assert terminations.tolist() == [True, False] and rewards[0] == end[1]
    assert same(observations[0], begun[0]) and len(observations[1]) > len(start[1])
    assert same(infos["final_obs"][0], end[0]) and infos["final_obs"][1] is None
    assert infos["_final_info"].tolist() == [True, False]
    assert infos["final_info"]["answer"][0] == "no" and infos["turn"].tolist() == [0, 1]
    envs.send([answer(envs, "no")], [0])
    ids, _, _, _, _, infos = envs.recv()
    assert ids.tolist() == [0] and infos[0]["final_info"]["answer"] == "no" and infos[0]["turn"] == 0
    envs.step([calls(envs, ("quick", 1))] * 2)  # and nobody had to reset anything


def test_masked_reset_while_others_are_in_flight(make):
    envs = make(3)
    envs.reset(seed=0)
    envs.send([calls(envs, ("slow", 0.2)), answer(envs, "x")], [0, 1])
    assert envs.recv(1)[0].tolist() == [1]
    options = {"reset_mask": np.array([False, True, False]), "task_index": [0, 7, 0], "max_turns": 1}
    before = dict(options)
    observations, infos = envs.reset(options=options)
    assert options == before
    assert infos["task_id"].tolist() == [None, "task-7", None] and infos["_turn"].tolist() == [False, True, False]
    assert envs.envs[1].task.id == "task-7" and envs.envs[1].episode.max_turns == 1
    assert len(observations) == 3
    with pytest.raises(RuntimeError, match=r"\[0\] are in flight; recv"):
        envs.reset(options={"reset_mask": np.array([True, False, False])})
    assert envs.recv(1)[0].tolist() == [0]
    envs.reset(options={"reset_mask": np.array([True, False, False])})


def test_time_limit_is_gymnasiums(make):
    envs = make(1, max_episode_steps=2)
    single = gym.wrappers.TimeLimit(Playground(), 2)
    envs.reset(seed=1), single.reset(seed=1)
    for _ in range(2):
        result = envs.step([calls(envs, ("quick", 1))])
        expected = single.step(calls(envs, ("quick", 1)))
        assert [column[0] for column in result[1:4]] == list(expected[1:4])
    assert result[3][0] and "truncation_reason" not in result[4]
    assert not result[4]["is_success"][0] and result[4]["metrics"].keys() >= single.unwrapped.judge_answer("")[1].keys()
    with pytest.raises(RuntimeError, match="are over"):
        envs.step([calls(envs, ("quick", 1))])


def test_new_observations_and_text(make):
    tokens, new, text = make(1), make(1, observation="new"), make(1, text=True)
    state, _ = tokens.reset(seed=1)
    prompt, _ = new.reset(seed=1)
    words, _ = text.reset(seed=1)
    tokenizer = tokens.envs[0].tokenizer
    assert same(state, prompt) and words[0] == tokenizer.decode(state[0])
    span = calls(tokens, ("quick", 1))
    after = tokens.step([span])[0][0]
    added = new.step([span])[0][0]
    assert same(np.concatenate([state[0], span, added]), after)
    without_end = tokenizer.decode(span).removesuffix(tokens.envs[0].dialect.end_of_turn)
    assert text.step([without_end])[0][0] == tokenizer.decode(after)
    assert words[0] in text.observation_space[0] and isinstance(text.action_space.sample()[0], str)
    with pytest.raises(TypeError, match="an action is a str"):
        text.step([span])


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda e: e.step([answer(e, 1)] * 3), ValueError, "3 actions for 4 episodes"),
        (lambda e: e.send([answer(e, 1)], [4]), ValueError, r"different numbers in \[0, 4\)"),
        (lambda e: e.send([answer(e, 1)] * 2, [1, 1]), ValueError, "different numbers"),
        (lambda e: e.send(["text", answer(e, 1)], [0, 1]), ValueError, "1-D array of token ids"),
        (lambda e: e.recv(), RuntimeError, r"send\(\) actions before recv"),
        (lambda e: (e.step([answer(e, 1)] * 4), e.step([answer(e, 1)] * 4)), RuntimeError, "are over; begin new ones"),
        (lambda e: [e.send([answer(e, 1)], [1]) for _ in range(2)], RuntimeError, r"episodes \[1\] are in flight"),
        (lambda e: e.reset(seed=[1, 2]), ValueError, "2 seeds for num_envs=4"),
        (lambda e: e.reset(options={"task_index": [1]}), ValueError, "1 entries for num_envs=4"),
        (lambda e: e.reset(options={"reset_mask": [0, 1, 0, 1]}), ValueError, "bool array of shape"),
        (lambda e: e.reset(options={"reset_mask": np.zeros(4, bool)}), ValueError, "at least one True"),
        (lambda e: (e.close(), e.reset()), RuntimeError, "closed; make a new one"),
    ],
)
def test_misuse_says_what_to_do(make, use, error, message):
    envs = make(4)
    envs.reset(seed=0)
    with pytest.raises(error, match=message):
        use(envs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_envs": 0}, "at least 1"),
        ({"observation": "all"}, "'state' or 'new'"),
        ({"autoreset_mode": "NextStep"}, "reset_mask"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ToolVectorEnv(Playground, **kwargs)


def test_before_the_first_reset(make):
    envs = make(2)
    with pytest.raises(RuntimeError, match=r"begin new ones with reset"):
        envs.step([answer(envs, 1)] * 2)


def test_a_wrong_action_leaves_the_others_as_they_were(make):
    envs = make(2)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        envs.step([answer(envs, 1), np.array([10**6], np.int64)])
    assert [env.episode.turn for env in envs.envs] == [0, 0]
    envs.step([answer(envs, 1)] * 2)


@pytest.mark.parametrize("slow", [False, True])
def test_a_judge_that_raises_costs_its_own_episode_only(make, monkeypatch, slow):
    envs = make(3)
    envs.reset(seed=0)
    monkeypatch.setattr(envs.envs[1], "slow_judge", slow)
    monkeypatch.setattr(envs.envs[1], "judge_answer", lambda answer: 1 / 0)
    envs.send([answer(envs, 1)] * 3)
    with pytest.raises(ZeroDivisionError):
        envs.recv(3)
    assert envs.recv(3)[0].tolist() == [0, 2]
    envs.reset(options={"reset_mask": np.ones(3, bool)})


# ---------------------------------------------------------------------- tools


def test_a_slow_call_delays_its_own_episode_only(make):
    envs = make(4)
    envs.reset(seed=0)
    envs.send([calls(envs, ("slow", 0.4)), *[calls(envs, ("slow", i / 1000)) for i in range(3)]])
    seen = []
    while len(seen) < 3:
        seen += envs.recv(1)[0].tolist()
    assert sorted(seen) == [1, 2, 3]
    assert envs.recv(1, timeout=0.01)[0].tolist() == []
    assert envs.recv(4)[0].tolist() == [0]  # min_batch beyond what is in flight waits for what there is


def test_calls_of_all_episodes_overlap(make, recorder):
    envs = make(64)
    envs.reset(seed=0)
    envs.step([calls(envs, ("slow", 0.2 + i / 10_000)) for i in range(64)])
    assert recorder.most > 32


def test_failures_and_timeouts_are_text_for_the_policy(make):
    envs = make(3)
    envs.reset(seed=0)
    actions = [calls(envs, ("slow", -0.01)), calls(envs, ("slow", 30)), calls(envs, ("slow", 0.01))]
    start = time.perf_counter()
    _, _, terminations, truncations, infos = envs.step(actions)
    assert 0.5 < time.perf_counter() - start < 5
    assert not terminations.any() and not truncations.any()
    texts = [envs.envs[i].messages[-1]["content"] for i in range(3)]
    assert "the server is gone" in texts[0] and "no result within 0.6 seconds" in texts[1] and texts[2] == "slept 0.01"
    assert [calls[0]["ok"] for calls in infos["tool_calls"]] == [False, False, True]


def test_equal_calls_are_answered_once(make, recorder):
    envs = make(6)
    envs.reset(seed=0)
    same_call, other_call = calls(envs, ("slow", 0.2)), calls(envs, ("slow", 0.01))
    envs.send([same_call, same_call, other_call], [0, 1, 2])
    envs.send([same_call, other_call], [3, 4])  # joins the calls that are under way
    assert envs.recv(5)[0].tolist() == [0, 1, 2, 3, 4]
    assert sorted(recorder.calls) == [0.01, 0.2]
    assert len({envs.envs[i].messages[-1]["content"] for i in (0, 1, 3)}) == 1
    envs.send([same_call], [0])  # not a cache: a later call is a new one
    envs.recv()
    assert sorted(recorder.calls) == [0.01, 0.2, 0.2]


def test_equal_tools_share_a_batch(make, recorder):
    envs = make(5)
    envs.reset(seed=0)
    spans = [calls(envs, ("batched", i), ("slow", 0), ("batched", 9)) for i in range(4)]
    envs.step([*spans, calls(envs, ("slow", 0))])
    assert recorder.batches == [5]  # 0, 1, 2, 3 and 9, which all of them ask for
    contents = [message["content"] for message in envs.envs[2].messages if message["role"] == "tool"]
    assert contents == ["batched 2", "slept 0", "batched 9"]


def test_tools_of_different_episodes_are_different_unless_they_are_equal(recorder):
    class Own(Quick):
        __hash__ = object.__hash__

        def __eq__(self, other):
            return self is other

        def execute(self, arguments):
            return ToolResult(str(id(self)))

    envs = ToolVectorEnv(lambda: Playground(tools=[Own(recorder)]), 2)
    envs.reset(seed=0)
    envs.step([calls(envs, ("quick", 1))] * 2)
    assert [env.messages[-1]["content"] for env in envs.envs] == [str(id(env.tools["quick"])) for env in envs.envs]
    envs.close()


def test_a_tool_that_cannot_be_hashed(recorder):
    class Unhashable(Slow):
        __hash__ = None

        def __eq__(self, other):
            return True

    envs = ToolVectorEnv(lambda: Playground(tools=[Unhashable(recorder)]), 2)
    envs.reset(seed=0)
    envs.step([calls(envs, ("slow", 0))] * 2)
    assert recorder.calls == [0, 0]
    envs.close()


def test_tools_that_never_block_run_in_the_callers_thread(make, recorder):
    envs = make(3)
    envs.reset(seed=0)
    envs.step([calls(envs, ("quick", i)) for i in range(3)])
    assert recorder.calls == [threading.current_thread().name] * 3


def test_sessions_run_in_order_and_next_to_each_other(make, recorder):
    envs = make(4)
    envs.reset(seed=0)
    envs.step([calls(envs, ("session", 0.1), ("quick", 1), ("session", 0.1))] * 4)
    for env in envs.envs:
        contents = [message["content"] for message in env.messages if message["role"] == "tool"]
        assert contents == ["call 1", "quick 1", "call 2"]
    assert recorder.most > 1


def test_a_shared_session_serves_one_episode_at_a_time(recorder):
    shared = Session(recorder)
    envs = ToolVectorEnv(lambda: Playground(tools=[shared, Slow(recorder)]), 4)
    envs.reset(seed=0)
    envs.send([calls(envs, ("session", 0.02), ("session", 0.02))] * 3, [2, 0, 1])
    envs.send([calls(envs, ("session", 0.02))], [3])
    ids = envs.recv(4)[0].tolist()
    assert ids == [0, 1, 2, 3] and recorder.most == 1 and shared.count == 7
    turns = [[m["content"] for m in env.messages if m["role"] == "tool"] for env in envs.envs]
    assert turns == [["call 3", "call 4"], ["call 5", "call 6"], ["call 1", "call 2"], ["call 7"]]
    envs.close()


def test_closing_waits_for_nobody(make, recorder):
    envs = make(2)
    envs.reset(seed=0)
    envs.send([calls(envs, ("slow", 0.5)), calls(envs, ("slow", 0.55))])
    assert len(envs.recv(timeout=0.1)[0]) == 0
    envs.close()
    assert recorder.running == 2


STUCK = """
import threading, time
from agent_r1 import Task, Tool, ToolEnv
from agent_r1.vector import ToolVectorEnv

def stuck() -> str:
    "Never comes back."
    threading.Event().wait()

class Env(ToolEnv):
    num_tasks = 1
    def __init__(self): super().__init__([Tool.from_function(stuck, timeout=600)])
    def make_task(self, index): return Task("0", "?", ["!"])

envs = ToolVectorEnv(Env, 2)
envs.reset(seed=0)
dialect = envs.envs[0].dialect
envs.send([dialect.tokenizer.encode(dialect.tool_call("stuck", {}) + dialect.end_of_turn)] * 2)
print(len(envs.recv(timeout=0.1)[0]))
"""


def test_the_program_ends_although_a_tool_is_stuck():
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=120)
    assert (result.stdout, result.stderr) == ("0\n", "")
    assert time.perf_counter() - start < 30


@pytest.mark.parametrize("close", [True, False])
def test_threads_end_with_their_environment(close):
    envs = ToolVectorEnv(Playground, 8)
    envs.reset(seed=0)
    envs.step([calls(envs, ("slow", i / 100)) for i in range(8)])
    assert any(thread.name.startswith("tool-calls") for thread in threading.enumerate())
    if close:
        envs.close()
    del envs
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("tool-calls") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
