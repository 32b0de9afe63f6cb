"""The wrappers, and that Gymnasium's own loops, checkers, wrappers and vector environments take our environments."""

import contextlib
import json
import signal
import subprocess
import sys
import time
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import agent_r1  # noqa: F401  (registers the environments)
from agent_r1.spaces import UnicodeText
from agent_r1.wrappers import ChoiceInterface, NewTokens, RecordTrajectories, TextInterface

WORLD = "AgentR1/MultihopWorld-v0"


def make_world():
    return gym.make(WORLD, max_turns=3)


def make_text_world():
    return TextInterface(make_world())


def search(env, query):
    return env.unwrapped.dialect.tool_call("search", {"query": query})


def encode(env, text):
    return np.array(env.unwrapped.tokenizer.encode(text, add_special_tokens=False), np.int32)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda env, path: env,
        lambda env, path: TextInterface(env),
        lambda env, path: NewTokens(env),
        lambda env, path: RecordTrajectories(env, path),
        lambda env, path: TextInterface(NewTokens(RecordTrajectories(env, path))),
    ],
    ids=["bare", "text", "new", "record", "all"],
)
def test_check_env(wrap, tmp_path):
    env = wrap(make_world().unwrapped, tmp_path / "rows.jsonl")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*different from the unwrapped version")  # true of every wrapper
        check_env(env, skip_render_check=True)


# ---------------------------------------------------------------------- TextInterface


def test_text_plays_the_same_episode_as_tokens():
    tokens, text = make_world(), make_text_world()
    state, _ = tokens.reset(seed=3)
    words, _ = text.reset(seed=3)
    assert words == tokens.unwrapped.tokenizer.decode(state)
    end = tokens.unwrapped.dialect.end_of_turn
    answer = tokens.unwrapped.task.answers[0]
    for turn in (search(tokens, "mentor"), f"<think>so</think><answer>{answer}</answer>"):
        state, *expected, _ = tokens.step(encode(tokens, turn + end))
        words, *result, _ = text.step(turn)  # the end of turn is added
        assert words == tokens.unwrapped.tokenizer.decode(state) and result == expected
    assert result == [1.0, True, False]


def test_text_that_ends_its_turn_is_taken_as_it_is():
    env = make_text_world()
    start, _ = env.reset(seed=0)
    end = env.unwrapped.dialect.end_of_turn
    after, *_ = env.step("<answer>x</answer>" + end)
    assert after == f"{start}<answer>x</answer>{end}"


def test_text_is_made_encodable_and_cut_to_the_room():
    env = TextInterface(gym.make(WORLD, max_action_tokens=40))
    start, info = env.reset(seed=0)
    assert info["max_new_tokens"] == 40
    after, _, terminated, truncated, info = env.step("\ud800" + "a" * 1000)
    written = after.removeprefix(start)
    assert written.startswith("\ufffd" + "a" * 37 + env.unwrapped.dialect.end_of_turn)  # U+FFFD is three byte tokens
    assert not terminated and not truncated and "truncation_reason" not in info


@pytest.mark.parametrize("action", [np.array([1, 2]), b"bytes", None])
def test_text_wants_text(action):
    env = make_text_world().env
    text = TextInterface(env.unwrapped)
    text.reset(seed=0)
    with pytest.raises(TypeError, match="an action is a str here"):
        text.step(action)


def test_wrappers_want_a_tool_env():
    with pytest.raises(TypeError, match="needs a ToolEnv"):
        TextInterface(gym.make("CartPole-v1"))


def test_unicode_text():
    space = UnicodeText(seed=1)
    samples = [space.sample() for _ in range(100)]
    assert all(sample in space and sample.isprintable() for sample in samples) and len(set(samples)) > 50
    assert "äöü\U0001f600" in space and b"bytes" not in space and None not in space
    assert space.from_jsonable(json.loads(json.dumps(space.to_jsonable(samples)))) == samples
    assert space == UnicodeText() and space != gym.spaces.Text(3) and not space.is_np_flattenable
    with pytest.raises(ValueError, match="no mask"):
        space.sample(mask=1)


# ---------------------------------------------------------------------- NewTokens


def test_prompt_spans_and_observations_make_the_state():
    env = NewTokens(make_world())
    pieces = [env.reset(seed=1)[0]]
    for turn in (search(env, "rival"), "hm", "<answer>x</answer>"):
        span = encode(env, turn + env.unwrapped.dialect.end_of_turn)
        pieces += [span, env.step(span)[0]]
    episode = env.unwrapped.episode
    assert np.array_equal(np.concatenate(pieces), episode.buffer[: episode.length])
    assert pieces[-1].size == 0 and all(piece.size for piece in pieces[:-1])


def test_a_span_that_does_not_fit_leaves_nothing_new():
    env = NewTokens(gym.make(WORLD, max_action_tokens=10))
    env.reset(seed=1)
    new, _, _, truncated, info = env.step(np.full(11, 65, np.int32))
    assert new.size == 0 and truncated and info["truncation_reason"] == "context"


# ---------------------------------------------------------------------- RecordTrajectories


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("outside", [lambda env: env, NewTokens, TextInterface])
def test_rows_tell_the_whole_episode(tmp_path, outside):
    path = tmp_path / "new" / "rows.jsonl"
    env = outside(RecordTrajectories(make_world(), path))
    env.reset(seed=8)
    env.reset(seed=9)  # what was under way is dropped
    end = env.unwrapped.dialect.end_of_turn
    for turn in (search(env, "rival"), "hm", f"<answer>{env.unwrapped.task.answers[0]}</answer>"):
        text = turn + end
        observation, *_ = env.step(text if outside is TextInterface else encode(env, text))
    (row,) = read(path)
    episode = env.unwrapped.episode
    assert row["tokens"] == episode.buffer[: episode.length].tolist()
    assert row["env_id"] == WORLD and row["seed"] == 9 and row["task_id"] == env.unwrapped.task.id
    assert row["task_index"] == episode.task_index
    turns, tokens = row["turns"], row["tokens"]
    assert len(turns) == 3 and 0 < turns[0][0] and turns[-1][1] == len(tokens)
    assert all(end < start for (_, end), (start, _) in zip(turns, turns[1:], strict=False))  # the environment's between
    written = [env.unwrapped.tokenizer.decode(tokens[a:b]) for a, b in turns]
    assert written == [search(env, "rival") + end, "hm" + end, f"<answer>{row['answer']}</answer>{end}"]
    assert row["action_mask"] == [int(any(a <= i < b for a, b in turns)) for i in range(len(tokens))]
    assert row["turn_rewards"] == [sum(terms.values()) for terms in row["reward_terms"]]
    assert row["turn_rewards"][-1] == 1.0 == row["rewards"][-1]
    assert {i: reward for i, reward in enumerate(row["rewards"]) if reward} == {
        b - 1: reward for (_, b), reward in zip(turns, row["turn_rewards"], strict=True) if reward
    }
    assert [[call["name"] for call in calls] for calls in row["tool_calls"]] == [["search"], [], []]
    assert row["messages"] == env.unwrapped.messages and row["question"] == env.unwrapped.task.question
    assert (row["tokenizer"], row["split"], row["model"]) == ("byte", "train", None)
    assert row["terminated"] and not row["truncated"] and row["is_success"] and row["metrics"]["em"] == 1
    assert row["truncation_reason"] is None
    env.reset(options={"task_index": 3})
    text = "<answer>x</answer>" + end
    env.step(text if outside is TextInterface else encode(env, text))
    assert [row["task_index"] for row in read(path)] == [episode.task_index, 3]


def test_record_goes_inside_of_text(tmp_path):
    with pytest.raises(TypeError, match="TextInterface\\(RecordTrajectories"):
        RecordTrajectories(make_text_world(), tmp_path / "rows.jsonl")


ENDLESS = """
import sys
import gymnasium as gym
import agent_r1
from agent_r1.wrappers import RecordTrajectories

env = RecordTrajectories(gym.make("AgentR1/MultihopWorld-v0", max_turns=1), sys.argv[1])
while True:
    env.reset()
    env.step(env.action_space.sample())
"""


def interrupted(process):
    """What the process writes to standard error when it is interrupted: again, where the first time came to nothing.

    Python drops a KeyboardInterrupt that strikes in a finalizer.
    """
    for _ in range(6):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=20)[1]
    raise AssertionError("the process doesn't end")


def test_the_file_is_whole_after_an_interrupt(tmp_path):
    path = tmp_path / "rows.jsonl"
    processes = [subprocess.Popen([sys.executable, "-c", ENDLESS, path], stderr=subprocess.PIPE) for _ in range(2)]
    try:
        deadline = time.monotonic() + 120
        while not path.exists() or path.read_bytes().count(b"\n") < 20:
            assert time.monotonic() < deadline, [process.poll() for process in processes]
            time.sleep(0.05)
        for process in processes:
            assert b"KeyboardInterrupt" in interrupted(process)
    finally:
        for process in processes:
            process.kill()
    text = path.read_text()
    assert text.endswith("\n") and len(read(path)) >= 20


# ---------------------------------------------------------------------- Gymnasium around it


def test_a_plain_gymnasium_loop():
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(WORLD, max_episode_steps=2))
    returns = []
    for seed in range(3):
        env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, info = env.step(encode(env, "hm" + env.unwrapped.dialect.end_of_turn))
            total, over = total + reward, terminated or truncated
        assert truncated and info["episode"]["l"] == 2  # TimeLimit
        assert info["episode"]["r"] == pytest.approx(total)
        returns.append(total)
    assert list(env.return_queue) == pytest.approx(returns)


@pytest.mark.parametrize("wrap", [TextInterface, NewTokens, ChoiceInterface, RecordTrajectories])
def test_what_a_time_limit_cuts_off_has_its_outcome(wrap, tmp_path):
    """Gymnasium's TimeLimit stands around the environment, which doesn't know that the episode is over."""
    path = {"path": tmp_path / "rows.jsonl"} if wrap is RecordTrajectories else {}
    env = wrap(gym.make(WORLD, max_episode_steps=2), **path)
    env.reset(seed=1)
    hm = {TextInterface: "hm", ChoiceInterface: 0}.get(wrap, encode(env, "hm" + env.unwrapped.dialect.end_of_turn))
    assert "is_success" not in env.step(hm)[4]
    _, _, terminated, truncated, info = env.step(hm)
    assert truncated and not terminated and info["is_success"] is False and info["answer"] is None
    assert set(info["metrics"]) == {"em", "f1", "support_recall", "tool_bugs"} and info["metrics"]["em"] == 0
    assert "truncation_reason" not in info and not any(name.startswith("outcome/") for name in info["reward_terms"])
    if path:
        (row,) = read(path["path"])
        assert row["is_success"] is False and row["metrics"] == info["metrics"]


def test_a_time_limit_in_the_last_turn_changes_nothing():
    for text, success in (("<answer>{}</answer>", True), ("hm", False)):
        limited, single = gym.make(WORLD, max_episode_steps=2, max_turns=2), gym.make(WORLD, max_turns=2)
        for env in (limited, single):
            env.reset(seed=1)
            env.step(encode(env, "hm"))
        span = encode(single, text.format(single.unwrapped.task.answers[0]) + single.unwrapped.dialect.end_of_turn)
        ours, theirs = single.step(span), limited.step(span)
        assert theirs[1] == ours[1] and theirs[4] == ours[4] and theirs[4]["is_success"] is success and theirs[3]


def test_a_judge_that_faults_at_a_time_limit_leaves_no_metrics(monkeypatch):
    env = TextInterface(gym.make(WORLD, max_episode_steps=1))
    env.reset(seed=1)

    def broken(self, answer):
        raise ConnectionError("no line")

    monkeypatch.setattr(type(env.unwrapped), "judge_answer", broken)
    info = env.step("hm")[4]
    assert info["is_success"] is False and info["metrics"] == {}


@pytest.mark.parametrize("make", [make_world, make_text_world])
def test_wrapped_environments_are_made_again_from_their_spec(make):
    env = make()
    again = gym.make(gym.envs.registration.EnvSpec.from_json(env.spec.to_json()))
    assert str(again) == str(env)
    first, second = env.reset(seed=2)[0], again.reset(seed=2)[0]
    assert np.array_equal(first, second)


def play(envs, steps=4):
    """Everything that some random steps give, as lists."""
    envs.action_space.seed(0)
    seen = [envs.reset(seed=[5, 6])[0]]
    for _ in range(steps):
        observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
        tasks = infos["task_id"].tolist()
        seen += [observations, rewards.tolist(), terminations.tolist(), truncations.tolist(), tasks]
    envs.close()
    return [[np.asarray(one).tolist() for one in item] for item in seen]


@pytest.mark.parametrize("make", [make_world, make_text_world], ids=["tokens", "text"])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_sync_and_async_vector_environments(make, mode):
    sync = play(SyncVectorEnv([make] * 2, autoreset_mode=mode))
    context = "spawn" if mode is AutoresetMode.NEXT_STEP else "forkserver"
    other = AsyncVectorEnv([make] * 2, shared_memory=False, context=context, autoreset_mode=mode)
    assert play(other) == sync


@pytest.mark.parametrize("make", [make_world, make_text_world], ids=["tokens", "text"])
def test_async_with_shared_memory_fails_and_says_why(make):
    with pytest.raises(ValueError, match="shared_memory=False"):
        AsyncVectorEnv([make] * 2)


# ---------------------------------------------------------------------- snapshots


def test_wrappers_go_on_from_a_snapshot(tmp_path):
    """What they show and record is of the state that is there, whichever way it came."""
    path = tmp_path / "rows.jsonl"
    env = NewTokens(RecordTrajectories(gym.make(WORLD, max_turns=9), path))
    env.reset(seed=3)
    call = encode(env, search(env, "rival") + env.unwrapped.dialect.end_of_turn)
    first = env.step(call)[0]
    state = env.unwrapped.get_state()
    second = env.step(call)[0]
    env.unwrapped.set_state(state)
    assert len(first) and np.array_equal(env.step(call)[0], second)
    env.unwrapped.set_state(state)
    env.step(encode(env, "<answer>x</answer>" + env.unwrapped.dialect.end_of_turn))
    (row,) = map(json.loads, path.read_text().splitlines())
    assert len(row["turn_rewards"]) == len(row["turns"]) == 2


def test_a_text_has_the_room_of_the_state_that_is_there():
    env = TextInterface(gym.make(WORLD, max_turns=9))
    env.reset(seed=3)
    state, whole = env.unwrapped.get_state(), env.unwrapped.max_context_tokens
    env.unwrapped.max_context_tokens = env.unwrapped.episode.length + 6
    assert env.step("a text that is far too long for it")[3]
    env.unwrapped.max_context_tokens = whole
    env.unwrapped.set_state(state)
    assert env.step("<answer>stuck</answer>")[4]["answer"] == "stuck"


def test_candidates_are_those_of_the_state_that_is_there():
    env = ChoiceInterface(gym.make(WORLD, max_turns=9))
    env.reset(seed=3)
    state, masks = env.unwrapped.get_state(), [env.action_masks()]
    while masks[-1].sum() == masks[0].sum():
        assert not any(env.step(0)[2:4])
        masks.append(env.action_masks())
    env.unwrapped.set_state(state)
    assert np.array_equal(env.action_masks(), masks[0])


def test_there_is_no_snapshot_in_the_middle_of_a_turn():
    env = make_world().unwrapped
    env.reset(seed=3)
    turn = env._begin_turn(encode(env, search(env, "rival") + env.dialect.end_of_turn))
    with pytest.raises(RuntimeError, match="in the middle of a turn"):
        env.get_state()
    env._end_turn(turn, env._in_order(turn.waiting).run())
    assert env.get_state()["episode"].turn == 1
