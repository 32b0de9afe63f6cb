"""ALFWorld: rooms drawn from its floor plans, played by its own domain; the official games where there are some."""

import json
import sys
from collections import Counter
from contextlib import closing

import pytest

pytest.importorskip("alfworld.info")

from bridge_cases import act, check_others_play_the_same, check_package

from agent_r1 import ArgumentError
from agent_r1.bridges.alfworld import environment as alfworld
from agent_r1.bridges.alfworld.environment import KINDS, ALFWorldEnv
from agent_r1.bridges.alfworld.rooms import draw_game, floor_plan
from agent_r1.validation import probes


@pytest.fixture(scope="module")
def env():
    with closing(ALFWorldEnv(games="generated", max_action_tokens=30_000, max_context_tokens=100_000)) as made:
        yield made


@pytest.mark.parametrize("split", ["train", "valid_seen", "valid_unseen"])
@pytest.mark.parametrize("number", range(6))
def test_each_type_of_task_can_be_done(split, number):
    env = ALFWorldEnv(games="generated", split=split)
    episode = probes.play(env, number, probes.expert)
    assert env.task.metadata["kind"] == KINDS[number]
    assert episode.success and episode.process == 0 and sum(episode.rewards) == 1
    assert all(call["ok"] for info in episode.infos for call in info["tool_calls"] or [])
    assert "Nothing happens." not in str(env.messages)
    env.close()


def test_nothing_is_done_at_the_beginning_and_every_step_counts(env):
    for index in range(6):
        env.reset(options={"task_index": index})
        turns = env.demonstration()
        ends = [env.step(probes.span(env, text))[2] for text in turns]
        assert ends == [False] * (len(turns) - 1) + [True]


def test_unseen_rooms_are_others():
    from alfworld.gen import constants

    assert not set(constants.TRAIN_SCENE_NUMBERS) & set(constants.TEST_SCENE_NUMBERS)
    for kind in KINDS:
        assert draw_game(kind, 5, "train") == draw_game(kind, 5, "train") != draw_game(kind, 5, "valid_unseen")
    furniture, things = floor_plan(1)
    assert Counter(kind for kind, _ in furniture)["Cabinet"] == 8 and "Apple" in things


def test_the_kinds_can_be_chosen():
    env = ALFWorldEnv(games="generated", kinds=["look_at_obj_in_light"])
    assert env.make_task(0).metadata["kind"] == env.make_task(1).metadata["kind"] == "look_at_obj_in_light"
    with pytest.raises(ArgumentError, match="kinds must be some of pick_and_place_simple"):
        ALFWorldEnv(kinds=["dance"])
    with pytest.raises(ArgumentError, match="kinds must be some of pick_and_place_simple"):
        ALFWorldEnv(kinds=[])
    with pytest.raises(ArgumentError, match="kinds must be a list of names, got 5"):
        ALFWorldEnv(kinds=5)
    with pytest.raises(ArgumentError, match="games must be 'auto', 'generated' or 'official'"):
        ALFWorldEnv(games="all")


@pytest.fixture(autouse=True)
def no_official_games(monkeypatch):
    """Whatever is set or installed here."""
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)


@pytest.fixture
def official(tmp_path):
    """Three games in the official format, one of which ALFWorld leaves out."""
    root = tmp_path / "json_2.1.1"
    for number, (kind, name) in enumerate(
        [(KINDS[0], f"{KINDS[0]}-Mug-None-Desk-307"), (KINDS[4], f"{KINDS[4]}-Mug-None-Desk-8"), (KINDS[0], "movable")]
    ):
        game = draw_game(kind, number, "train")
        data = {**game, "solvable": True, "walkthrough": way(kind, number)}
        folder = root / "train" / name / f"trial_{number}"
        folder.mkdir(parents=True)
        (folder / "game.tw-pddl").write_text(json.dumps(data))
    return tmp_path


def way(kind, seed):
    return alfworld.begin(json.dumps({"kind": kind, "seed": seed, "split": "train"}), "").walkthrough


def test_official_games_are_read(official, monkeypatch):
    env = ALFWorldEnv(data_dir=official)
    assert env.num_tasks == 2
    for index in range(2):
        assert probes.play(env, index, probes.expert).success
    assert env.make_task(0).id == f"train/{KINDS[0]}-Mug-None-Desk-307/trial_0"
    env.close()
    monkeypatch.setenv("ALFWORLD_DATA", str(official))
    assert ALFWorldEnv().num_tasks == 2
    assert ALFWorldEnv(games="generated").num_tasks == 1_000_000
    with pytest.raises(FileNotFoundError, match="has no solvable game"):
        ALFWorldEnv(split="valid_unseen")


def test_missing_official_games_are_said(tmp_path, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    for kwargs in ({"games": "official"}, {"data_dir": tmp_path}):
        with pytest.raises(FileNotFoundError, match="run alfworld-download"):
            ALFWorldEnv(**kwargs)
    with pytest.raises(FileNotFoundError, match="run alfworld-download"):  # whoever sets it means those games
        ALFWorldEnv()
    assert ALFWorldEnv(games="generated").num_tasks == 1_000_000
    with pytest.raises(ArgumentError, match="reads no data_dir"):
        ALFWorldEnv(games="generated", data_dir=tmp_path)
    monkeypatch.delenv("ALFWORLD_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ALFWorldEnv().num_tasks == 1_000_000


@pytest.mark.parametrize(
    "command",
    ["eval(1)", "__class__", "go to {r.name}", "#look.feedback#", "take mug 99 from cabinet 99", "x" * 20_000, "",
     "  ", "\ud800", "look\nlook", "(:goal)", "[x | atlocation(a:agent, l:location)]"],
)  # fmt: skip
def test_hostile_commands_do_nothing(env, command):
    env.reset(options={"task_index": 0})
    before = sorted(map(str, env.world.env._pddl_state.facts))
    *_, reward, terminated, _, _ = act(env, command)
    assert not terminated and reward <= 0 and len(env.messages[-1]["content"]) < 500
    assert sorted(map(str, env.world.env._pddl_state.facts)) == before


@pytest.mark.parametrize("arguments", [{}, {"command": 7}, {"command": ["look"]}, {"order": "look"}])
def test_arguments_that_are_no_command(env, arguments):
    env.reset(options={"task_index": 0})
    *_, info = env.step(probes.span(env, env.dialect.tool_call("act", arguments)))
    assert not info["tool_calls"][0]["ok"]


def test_saying_nothing_and_giving_up_pay_nothing(env):
    for probe in (probes.null, probes.copying, probes.stuffing):
        episode = probes.play(env, 3, probe, max_turns=4)
        assert not episode.success and sum(episode.rewards) <= 0


def test_two_episodes_share_nothing_and_a_snapshot_goes_on(env):
    other = ALFWorldEnv(games="generated")
    env.reset(options={"task_index": 2})
    turns = env.demonstration()
    alone = [env.step(probes.span(env, text))[0].tolist() for text in turns]
    env.reset(options={"task_index": 2})
    other.reset(options={"task_index": 2})
    mixed = []
    for number, text in enumerate(turns):
        if number == 2:
            state = env.get_state()
            env.set_state(state)
        mixed.append(env.step(probes.span(env, text))[0].tolist())
        act(other, "inventory")
    assert mixed == alone
    other.close()


def test_many_episodes_take_a_few_copies_of_the_planner(env):
    import fast_downward

    before = len(alfworld._LIBRARIES)
    arguments, output, translate = sys.argv, sys.stdout, fast_downward.pddl2sas
    for _ in range(20):
        env.reset(options={"task_index": 0})
    assert len(alfworld._LIBRARIES) <= before + 1
    assert (sys.argv, sys.stdout, fast_downward.pddl2sas) == (arguments, output, translate)


def test_another_process_plays_the_same():
    check_others_play_the_same("AgentR1/ALFWorld-v0", 1, 3, games="generated")


def test_a_missing_package_and_another_version_are_said():
    check_package(ALFWorldEnv, [alfworld.find_alfworld], "alfworld", "0.4", module="fast_downward")
