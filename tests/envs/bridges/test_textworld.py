"""TextWorld: generated stories are won by the generator's own ways; no command reaches files or the interpreter."""

import os
from contextlib import closing

import numpy as np
import pytest

pytest.importorskip("textworld")

from bridge_cases import act, check_others_play_the_same, check_package

from agent_r1 import ArgumentError
from agent_r1.bridges import textworld
from agent_r1.bridges.textworld import GAMES, TextWorldEnv
from agent_r1.validation import probes


@pytest.fixture(scope="module")
def env():
    with closing(TextWorldEnv(game="coin_collector", max_action_tokens=30_000, max_context_tokens=100_000)) as made:
        yield made


@pytest.mark.parametrize("game", GAMES)
def test_the_generators_way_wins(game):
    env = TextWorldEnv(game=game, split="test", process_reward={"game": 1.0})
    episode = probes.play(env, 0, probes.expert)
    assert episode.success and episode.rewards[-1] >= 1
    assert episode.process == pytest.approx(1)  # the score, a little at a time
    assert episode.infos[-1]["metrics"]["return"] == env.task.metadata["max_score"]
    assert episode.states[0] == probes.play(env, 0, probes.expert).states[0]
    env.close()


def test_a_limited_inventory_and_a_long_recipe():
    env = TextWorldEnv(settings={"drop": True, "recipe": 2, "take": 2, "go": 9})
    assert probes.play(env, 1, probes.expert).success
    env.close()


def test_a_lost_game_ends_and_pays_what_was_earned():
    env = TextWorldEnv(settings={"go": 1, "open": False})
    env.reset(options={"task_index": 0})
    story = env._story(env.task)
    food = next(command.split()[1] for command in story.walkthrough if command.startswith("cook "))
    for command in story.walkthrough:
        *_, terminated, _, info = act(env, command)
        if command.startswith("cook "):
            break
    cooker = command.partition(" with ")[2]
    *_, terminated, _, info = act(env, f"cook {food} with {cooker}")  # burns it
    assert terminated and not info["is_success"] and 0 < info["metrics"]["return"] < story.max_score
    env.close()


def test_two_names_that_no_command_can_tell_apart_are_left_out():
    env = TextWorldEnv(game="custom")  # of this seed itself there is "the locker" beside "the type 0 locker"
    assert probes.play(env, 0, probes.expert).success
    env.close()


def test_saying_nothing_and_giving_up_pay_nothing(env):
    for probe in (probes.null, probes.copying, probes.stuffing):
        episode = probes.play(env, 0, probe, max_turns=3)
        assert not episode.success and sum(episode.rewards) <= 0


@pytest.mark.parametrize(
    "command",
    ["save", "restore", "script", "transcript on", "unscript", "quit", "restart", "undo", "look. save", "look, save",
     "look then save", "tw-trace-actions", "restrict commands", "take all and save", "take all and script",
     "\\s", "/etc/passwd", "look\nsave", "x" * 20_000, "", "   ", "\ud800", "lo\x00ok",
     "tw-print max_score", "version"],
)  # fmt: skip
def test_no_command_reaches_files_or_the_interpreter(env, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env.reset(options={"task_index": 0})
    *_, info = act(env, command)
    assert not info["tool_calls"][0]["ok"] and len(env.messages[-1]["content"]) < 500
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("arguments", [{}, {"command": 7}, {"command": ["look"]}, {"command": None}, {"order": "look"}])
def test_arguments_that_are_no_command(env, arguments):
    env.reset(options={"task_index": 0})
    *_, info = env.step(probes.span(env, env.dialect.tool_call("act", arguments)))
    assert not info["tool_calls"][0]["ok"] and len(env.messages[-1]["content"]) < 500


def test_nothing_can_be_farmed():
    env = TextWorldEnv(game="coin_collector", process_reward={"game": 1.0}, max_turns=200, max_context_tokens=200_000)
    env.reset(options={"task_index": 0})
    forth = env._story(env.task).walkthrough[0]
    opposite = {"north": "south", "south": "north", "east": "west", "west": "east"}
    back = "go " + opposite[forth.removeprefix("go ")]
    assert sum(act(env, (forth, back)[turn % 2])[1] for turn in range(200)) <= 0
    env.close()


def test_two_episodes_share_nothing(env):
    other = TextWorldEnv(game="coin_collector")
    env.reset(options={"task_index": 0})
    turns = env.demonstration()
    alone = [env.step(probes.span(env, text))[0].tolist() for text in turns]
    env.reset(options={"task_index": 0})
    other.reset(options={"task_index": 0})
    mixed = []
    for text in turns:
        mixed.append(env.step(probes.span(env, text))[0].tolist())
        act(other, "look")
    assert mixed == alone
    other.close()


def test_a_snapshot_goes_on(env):
    env.reset(options={"task_index": 1})
    turns = env.demonstration()
    env.step(probes.span(env, turns[0]))
    state = env.get_state()
    rest = [env.step(probes.span(env, text))[0].tolist() for text in turns[1:]]
    env.set_state(state)
    assert [env.step(probes.span(env, text))[0].tolist() for text in turns[1:]] == rest


def test_another_process_plays_the_same_and_in_another_order(tmp_path):
    check_others_play_the_same("AgentR1/TextWorld-v0", 0, 1, game="simple", environment={"HOME": str(tmp_path)})


def test_global_random_states_are_left_alone():
    import textworld as package

    np.random.seed(3)
    before = np.random.get_state()[1].tolist(), package.g_rng.seed
    textworld.write_story("coin_collector", '{"level": 2}', "train", 77)
    assert (np.random.get_state()[1].tolist(), package.g_rng.seed) == before


def test_what_cannot_be_made_is_said():
    with pytest.raises(ArgumentError, match="there is no game 5"):
        TextWorldEnv(game=5)
    with pytest.raises(ArgumentError, match="there is no game"):
        TextWorldEnv(game=["cooking"])
    with pytest.raises(ArgumentError, match="settings must be a dict of cooking's settings, got 5"):
        TextWorldEnv(settings=5)
    with pytest.raises(ArgumentError, match="there is no game 'chess'; there are cooking, coin_collector"):
        TextWorldEnv(game="chess")
    with pytest.raises(ArgumentError, match="cooking has no setting 'rooms'; it has recipe"):
        TextWorldEnv(settings={"rooms": 3})
    with pytest.raises(ArgumentError, match="TextWorld cannot make a coin_collector game of seed 0 with settings"):
        TextWorldEnv(game="coin_collector", settings={"level": 3000})


def test_a_missing_package_and_another_version_are_said():
    check_package(TextWorldEnv, [textworld.find_textworld], "textworld", "1.7")
