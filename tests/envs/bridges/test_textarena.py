"""TextArena: its games against a scripted player; random state of their own."""

import random
import re
import sys
import threading
from importlib import metadata

import numpy as np
import pytest

pytest.importorskip("textarena")

from bridge_cases import forgotten, run_elsewhere

from agent_r1 import ArgumentError, ToolFault
from agent_r1.bridges.textarena import environment as bridge
from agent_r1.bridges.textarena.environment import GAMES, TextArenaEnv
from agent_r1.validation import probes

QUICK = [name for name in GAMES if name not in ("Othello-v0", "PigDice-v0")]


def act(env, action):
    return env.step(probes.span(env, env.dialect.tool_call("play", {"action": action})))


@pytest.mark.parametrize("game", GAMES)
def test_the_expert_wins(game):
    env = TextArenaEnv(game=game)
    for index in (0, 1):
        episode = probes.play(env, index, probes.expert)
        assert episode.success and episode.rewards[-1] == episode.infos[-1]["metrics"]["reward"] == 1
        assert episode.process == 0, env.messages


def test_variants():
    left_out = [f"{name}-v0" for name in bridge.LEFT_OUT]
    for game in (*left_out, "Mastermind-v0-hard", "TowerOfHanoi-v0-medium", "Nim-v0-large"):
        assert probes.play(TextArenaEnv(game=game), 3, probes.expert).success


def test_both_sides_are_played():
    env = TextArenaEnv(game="TicTacToe-v0")
    for index, mark in ((0, "'O'"), (1, "'X'")):
        env.reset(options={"task_index": index})
        assert f"As Player {index}, you will be {mark}" in env.task.question
        assert ("placed their symbol" in env.task.question) == bool(index)  # the other one has begun
        assert env.task.question.count("Current Board:") == 1
    assert TextArenaEnv(game="TicTacToe-v0", player=1).make_task(0).metadata["player"] == 1


def test_moves_against_the_rules():
    env = TextArenaEnv(game="TicTacToe-v0", player=0)
    env.reset(options={"task_index": 0})
    info = act(env, "[99]")[4]
    assert not info["tool_calls"][0]["ok"] and "invalid move" in env.messages[-1]["content"]
    _, reward, terminated, _, info = act(env, "nothing")
    assert terminated and not info["is_success"] and info["reward_terms"]["outcome/score"] == -1 and reward <= -1


@pytest.mark.parametrize(("game", "lost"), [("TicTacToe-v0", -1), ("GuessTheNumber-v0", 0)])
def test_giving_up_and_not_playing_pay_as_lost(game, lost):
    env = TextArenaEnv(game=game, max_turns=3)
    for probe in (probes.null, probes.copying):
        episode = probes.play(env, 0, probe)
        assert not episode.success and episode.rewards[-1] == lost


def test_the_opponent_may_be_anyone():
    heard = []

    def opponent(observation, rng):
        heard.append(observation)
        return rng.choice(["[rock]", "[paper]"])

    env = TextArenaEnv(game="IteratedRockPaperScissors-v0", opponent=opponent, player=0)
    env.reset(options={"task_index": 1})
    act(env, "[paper]")
    assert len(heard) == 1 and heard[0].startswith("You are Player 1")
    state = env.get_state()
    before = len(heard)
    env.set_state(state)
    assert len(heard) == before  # what it has said is said again
    while not env.episode.over:
        info = act(env, "[paper]")[4]
    assert info["is_success"]


def test_an_opponent_that_fails_is_a_fault():
    def opponent(observation, rng):
        raise ValueError("no model here")

    env = TextArenaEnv(game="TicTacToe-v0", opponent=opponent, player=0, fault_deadline=0)
    env.reset(options={"task_index": 0})
    _, reward, _, truncated, info = act(env, "[4]")
    assert truncated and reward == 0 and "no model here" in info["fault"]
    env = TextArenaEnv(game="TicTacToe-v0", opponent=opponent, player=1, fault_deadline=0)
    with pytest.raises(ToolFault, match="no model here"):
        env.reset(options={"task_index": 0})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"game": "Go-v0"}, "TextArena has no game 'Go-v0'; it has 2048-v0"),
        ({"game": "Debate-v0"}, "asks a model over the network"),
        ({"game": "Stratego-v0"}, "there is no scripted player of Stratego-v0; pass opponent="),
        ({"game": "Countdown-v0"}, "Countdown-v0 is broken in textarena 0.7"),
        ({"game": "PublicGoodsGame-v0"}, "PublicGoodsGame-v0 is broken in textarena 0.7"),
        ({"game": "Taboo-v0"}, "is not for one or two players"),
        ({"game": ()}, "must be a name or a list of names"),
        ({"game": 5}, "game must be a name or a list of names, got 5"),
        ({"game": [["TicTacToe-v0"]]}, "game must be a name or a list of names"),
        ({"player": True}, "player must be an integer, got True"),
        ({"game": "TicTacToe-v0", "timeout": "long"}, "timeout must be a number of seconds"),
        ({"game": "TicTacToe-v0", "opponent": 5}, "opponent must be a function or module:function, got 5"),
        ({"game": "TicTacToe-v0", "opponent": "nowhere:plays"}, "opponent 'nowhere:plays': No module"),
        ({"player": 2}, "player must be None, 0 or 1"),
    ],
)
def test_what_there_is_not_is_named(arguments, words):
    with pytest.raises(ArgumentError, match=re.escape(words)) as error:
        TextArenaEnv(**arguments)
    assert len(str(error.value)) < 3_000


@pytest.mark.filterwarnings("ignore:the tool play failed in:RuntimeWarning")
def test_moves_can_be_made_in_every_game_that_is_taken():
    """Whatever is said gets the game's own answer, never an error of its program."""
    there = bridge.importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    played = []
    for game in sorted(name for name in there if name.endswith("-v0")):
        try:
            env = TextArenaEnv(game=game, player=0, opponent=lambda observation, rng: "[0]")
        except (ArgumentError, ImportError):  # that is said
            continue
        env.reset(options={"task_index": 0})
        for text in ("[0 1]", "nonsense"):
            _, _, terminated, truncated, info = act(env, text)
            assert "Error" not in info["tool_calls"][0].get("error", ""), (game, info)
            if terminated or truncated:
                break
        played.append(game)
    assert len(played) > 40


def test_games_print_nothing(capsys):
    env = TextArenaEnv(game="LogicPuzzle-v0")
    env.reset(options={"task_index": 0})
    act(env, "[Ada a X]")
    assert capsys.readouterr().out == ""


def test_games_that_lack_something_are_named(monkeypatch):
    monkeypatch.setenv("NLTK_DATA", "/nowhere")
    with pytest.raises(ImportError, match="Hangman-v0 needs words of nltk: python -m nltk.downloader words"):
        TextArenaEnv(game="Hangman-v0")
    if sys.version_info < (3, 12):
        with pytest.raises(ArgumentError, match="Chess-v0 is written for a Python newer than 3.11"):
            TextArenaEnv(game="Chess-v0")


@pytest.mark.parametrize("action", ["x" * 2_000, "\ud800", "[" * 900, f"[{'9' * 900}]", 7, None, "\0", "[col -1]"])
def test_hostile_actions_get_a_readable_result(action):
    for game in QUICK[::3]:
        env = TextArenaEnv(game=game, max_action_tokens=20_000)
        env.reset(options={"task_index": 0})
        info = act(env, action)[4]
        assert not info["tool_calls"][0]["ok"] and 0 < len(env.messages[-1]["content"]) < 5_000


def test_nothing_can_be_farmed():
    env = TextArenaEnv(game="ConnectFour-v0", max_turns=200, max_context_tokens=400_000)
    turns = [env.dialect.tool_call("play", {"action": f"[col {column}]"}) for column in (0, 3)]
    for index in range(4):
        episode = probes.play(env, index, probes.repeated(turns))
        assert sum(episode.rewards[:-1]) <= 0 and sum(episode.rewards) <= 1


def test_two_episodes_share_nothing():
    """Games that draw random numbers on the way, with others between their moves."""
    env, other = (TextArenaEnv(game=["PigDice-v0", "LiarsDice-v0"]) for _ in range(2))
    for index in range(2):
        env.reset(options={"task_index": index})
        turns = env.demonstration()
        alone = probes.play(env, index, lambda env, rng, turns=turns: turns).states
        env.reset(options={"task_index": index})
        mixed = []
        for turn in turns:
            other.reset(options={"task_index": 7 + len(mixed)})
            act(other, "[roll]")
            random.seed(len(mixed))
            mixed.append(env.step(probes.span(env, turn))[0].tolist())
        assert mixed == alone[1:]


def test_threads_share_nothing():
    def transcript(index, found):
        env = TextArenaEnv(game=["PigDice-v0", "KuhnPoker-v0"])
        found[index] = probes.play(env, index % 4, probes.random, max_turns=15).states

    alone, together = {}, {}
    for index in range(4):
        transcript(index, alone)
    threads = [threading.Thread(target=transcript, args=(index, together)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(together[index] == alone[index % 4] for index in range(8))


def test_global_random_state_is_left_alone():
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    env = TextArenaEnv(game=["PigDice-v0", "LiarsDice-v0"])
    for index in range(2):
        probes.play(env, index, probes.random, max_turns=10)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_another_process_plays_the_same():
    program = (
        "import agent_r1, hashlib, random; from agent_r1.validation import probes\n"
        "from agent_r1.bridges.textarena.environment import TextArenaEnv, GAMES\n"
        "env = TextArenaEnv()\n"
        "found = [probes.play(env, i, probes.random, max_turns=8).states for i in range(2 * len(GAMES))]\n"
        "print(hashlib.sha256(repr(found).encode()).hexdigest())"
    )
    assert len({run_elsewhere(program, PYTHONHASHSEED=seed)[0] for seed in "01"}) == 1


def test_without_the_package(monkeypatch):
    for cached in (bridge.load, bridge.find_players):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ImportError, match=re.escape('pip install "agent-r1[textarena]"')):
        TextArenaEnv()
    monkeypatch.undo()
    bridge.load.cache_clear()
    with forgotten(bridge.load) as patched:
        patched.setattr(metadata, "version", lambda name: "0.8.0")
        with pytest.warns(UserWarning, match="textarena 0.8.0 wasn't checked; 0.7 was"):
            bridge.load()
