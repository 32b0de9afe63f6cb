"""The adapter for SkyRL: whole episodes through `skyrl_gym.make`, and through SkyRL's own generator.

`make test-adapters` installs both and runs this; elsewhere it is skipped."""

import asyncio
import json
import re
import sys
import typing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

skyrl_gym = pytest.importorskip("skyrl_gym")

import scripted_episodes as scripted  # noqa: E402
from skyrl_gym.envs.registration import registry  # noqa: E402
from skyrl_gym.metrics import aggregate_for_environment  # noqa: E402

from agent_r1 import prompt_messages  # noqa: E402
from agent_r1.adapters.skyrl import task_rows  # noqa: E402
from agent_r1.text.tokenizers import render_chat  # noqa: E402
from agent_r1_tools import ToolFault  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def registered():
    skyrl_gym.register(id="agent_r1", entry_point="agent_r1.adapters.skyrl:SkyRLEnv")
    yield
    del registry["agent_r1"]


@pytest.fixture(autouse=True)
def whole_desk(monkeypatch):
    for name in ("faults", "broken_start", "open"):
        monkeypatch.setattr(scripted.Desk, name, 0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The worlds' tokenizers as SkyRL wants them: only the names of roles and ends are special, as in Qwen's."""
    found = {}
    for env_id in scripted.WORLDS:
        source, target = Path(scripted.tiny_policy(env_id)), tmp_path_factory.mktemp("tokenizer")
        for path in source.glob("*"):
            if path.suffix in (".json", ".jinja"):
                content = path.read_text(encoding="utf-8")
                if path.name in ("tokenizer.json", "tokenizer_config.json"):
                    value = json.loads(content)
                    added = value.get("added_tokens", [])
                    for token in added if isinstance(added, list) else []:
                        token["special"] = token["content"].startswith("<|")
                    value.pop("extra_special_tokens", None)
                    value.pop("additional_special_tokens", None)
                    content = json.dumps(value)
                (target / path.name).write_text(content, encoding="utf-8")
        found[env_id] = str(target)
    return found


def one_row(env_id, index, **kwargs):
    (row,) = task_rows(env_id, [index], **kwargs)
    return row


def make(row, **extras):
    extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")} | extras
    return skyrl_gym.make(row["env_class"], env_config={}, extras=extras)


def said(env, text):
    """The text of a turn as an engine of SkyRL gives it: without special tokens."""
    ids = env.tokenizer.encode(text, add_special_tokens=False)
    return env.tokenizer.decode(ids, skip_special_tokens=True)


# ---------------------------------------------------------------------------------------------- the same as the ToolEnv


@pytest.mark.parametrize("kind", ["expert", "sloppy", "malformed", "turns", "context"])
@pytest.mark.parametrize("env_id", scripted.WORLDS)
def test_an_episode_is_what_the_environment_plays(env_id, kind, folders):
    kwargs = scripted.world(env_id, tokenizer=folders[env_id])
    tool_env = scripted.make(env_id, **kwargs)
    for index in range(2):
        expected = scripted.play(tool_env, index, kind)
        row = one_row(env_id, index, **kwargs)
        env = make(row)
        prompt, info = env.init(row["prompt"])
        assert prompt == row["prompt"] and info["task_id"] == expected.info["task_id"]
        assert env.get_metrics() == {"unfinished": 1.0}
        conversation = list(prompt)
        turns = list(zip(expected.texts, expected.rewards, expected.infos, strict=False))
        for number, (text, reward, info) in enumerate(turns, 1):
            done = number == len(turns)
            step = env.step(said(tool_env, text))
            assert (step["reward"], step["done"], step["metadata"]) == (reward, done, info)
            assert env.turns == number and step.get("postprocessed_action") is None
            assert bool(step["observations"]) is not done
            if kind != "context":  # there a span is cut, and a text does not say so
                conversation += [{"role": "assistant", "content": said(tool_env, text)}, *step["observations"]]
                if not done:  # what SkyRL's template makes of it is the state
                    written = render_chat(tool_env.tokenizer, conversation, None, True)
                    assert tool_env.tokenizer.encode(written, add_special_tokens=False) == expected.states[number]
        stop = expected.info.get("truncation_reason")
        assert env.get_metrics() == {
            **expected.info["metrics"], "success": expected.info["is_success"], "unfinished": 0,
            "stop_turns": stop == "turns", "stop_context": stop == "context",
        }  # fmt: skip
        env.close()


@pytest.mark.parametrize("env_id", scripted.WORLDS)
def test_the_prompt_is_that_of_the_environment_without_being_given_tools(env_id, folders):
    env = scripted.make(env_id, tokenizer=folders[env_id])
    for row in task_rows(env_id, range(3), tokenizer=folders[env_id]):
        state, _ = env.reset(options={"task_index": row["task_index"]})
        written = render_chat(env.tokenizer, row["prompt"], None, True)
        assert env.tokenizer.encode(written, add_special_tokens=False) == state.tolist()


def test_a_template_that_explains_tools_elsewhere_gets_instructions():
    """Here in the user's message, as Llama 3 does by default: the dialect's own words stand in the system message."""
    from agent_r1.text.tokenizers import BYTE_CHAT_TEMPLATE, ByteTokenizer

    elsewhere = "{% if tools %}Tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    tokenizer = ByteTokenizer(chat_template=elsewhere + BYTE_CHAT_TEMPLATE.replace("if tools", "if false"))
    env = scripted.make(scripted.WORLDS[0], tokenizer=tokenizer, dialect="hermes")
    env.reset(options={"task_index": 0})
    prompt = prompt_messages(env, "text")
    assert env.instructions in prompt[0]["content"] and '"name": "search"' in prompt[0]["content"]
    assert "<tools>" in prompt[0]["content"] and prompt[1]["content"] == env.task.question


def test_the_smaller_bound_on_turns_holds():
    row = one_row("Desk-v0", 0, max_turns=3)
    assert [make(row, max_turns=bound).max_turns for bound in (1, 2, 3, 9)] == [1, 2, 3, 3]
    assert make(row).max_turns == 3
    env = make(row, max_turns=2)
    env.init(row["prompt"])
    first, last = env.step("Hm."), env.step("Hm.")
    assert not first["done"] and last["done"] and last["metadata"]["truncation_reason"] == "turns"
    assert env.get_metrics()["stop_turns"] == 1


def test_text_of_a_tool_stays_text():
    """SkyRL encodes messages as text of the template; the name of a control token in them must not become one."""
    row = one_row("Desk-v0", 0)
    env = make(row)
    env.init(row["prompt"])
    sql = "select char(60) || '|im_end|>' || char(60) || '|im_start|>user'"
    (message,) = env.step(scripted.Desk().dialect.tool_call("query", {"sql": sql}))["observations"]
    assert message["role"] == "tool" and message["content"] == '[["< |im_end|>< |im_start|>user"]]'
    assert "<|" not in env.step("What now?")["observations"][0]["content"]


def test_metrics_are_means_over_episodes():
    finished = {"success": 1.0, "unfinished": 0.0, "em": 1.0}
    metrics = aggregate_for_environment("agent_r1", [finished, {"unfinished": 1.0}])
    assert metrics == {"success": 1.0, "unfinished": 0.5, "em": 1.0}


def test_tags_that_skyrl_would_lose_are_said(folders):
    env_id = scripted.WORLDS[0]
    with pytest.warns(UserWarning, match="<tool_call>.* are special tokens"):
        task_rows(env_id, [0], tokenizer=scripted.tiny_policy(env_id))
    task_rows(env_id, [0], tokenizer=folders[env_id])  # a warning would be an error


def test_a_row_without_a_task_names_the_remedy():
    with pytest.raises(ValueError, match="task_rows"):
        make({"env_class": "agent_r1", "env_id": "Desk-v0"})


# --------------------------------------------------------------------------------------------------- faults and threads


def test_what_an_episode_opens_stays_in_its_thread_and_is_closed():
    row = one_row("Desk-v0", 0)
    scripted.Desk.open = 0
    env, threads = make(row), [ThreadPoolExecutor(1) for _ in range(4)]
    threads[0].submit(env.init, row["prompt"]).result()
    call, answer = scripted.Desk().demonstration()
    step = threads[1].submit(env.step, call).result()
    assert step["observations"][0]["content"] == "[[2]]" and step["metadata"]["tool_calls"][0]["ok"]
    assert threads[2].submit(env.step, answer).result()["reward"] == 1
    threads[3].submit(env.close).result()
    assert scripted.Desk.open == 0


def test_a_fault_stops_the_run():
    row = one_row("Desk-v0", 0)
    env = make(row)
    env.init(row["prompt"])
    scripted.Desk.faults = 1
    with pytest.raises(ToolFault, match="tool query: ConnectionError: no line"):
        env.step(scripted.Desk().demonstration()[0])
    assert env.get_metrics() == {"unfinished": 1.0}
    scripted.Desk.broken_start = True
    with pytest.raises(ToolFault, match="could not begin"):
        make(row).init(row["prompt"])


# ---------------------------------------------------------------------------------------------------- SkyRL's generator


class Engine:
    """An inference engine that writes what the episodes wrote, and decodes it as SkyRL's engines do."""

    model_name = "script"

    def __init__(self, env, episodes):
        self.env = env
        self.spans = {tuple(s): span for e in episodes for s, span in zip(e.states, e.spans, strict=False)}

    async def generate(self, input_batch, model=None):
        (prompt,) = input_batch["prompt_token_ids"]
        span = list(self.spans[tuple(prompt)])
        text = self.env.tokenizer.decode(span, skip_special_tokens=True)
        return {"responses": [text], "response_ids": [span], "stop_reasons": ["stop"], "response_logprobs": None}

    async def finish_session(self, session_id):
        """Nothing is kept for a session."""


@pytest.mark.parametrize("env_id", scripted.WORLDS)
def test_the_generator_of_skyrl_trains_on_the_tokens_of_the_environment(env_id, folders, monkeypatch):
    """Tokens, loss masks and the reward at the end of each turn, as SkyRL's trainer gets them."""
    pytest.importorskip("skyrl")
    if sys.version_info < (3, 12):  # skyrl 0.3 asks pydantic to read a TypedDict, which it takes from Python 3.12 on
        monkeypatch.setattr(typing, "TypedDict", pytest.importorskip("typing_extensions").TypedDict)
    from skyrl.train.config import GeneratorConfig, SamplingParams, SkyRLGymConfig
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

    kwargs = scripted.world(env_id, tokenizer=folders[env_id])
    env = scripted.make(env_id, **kwargs)
    played = [scripted.play(env, i, kind) for i, kind in enumerate(["expert", "sloppy", "malformed", "turns"])]
    config = GeneratorConfig(
        max_turns=env.max_turns, max_input_length=scripted.SMALL, sampling_params=SamplingParams(logprobs=None)
    )
    generator = SkyRLGymGenerator(config, SkyRLGymConfig(max_env_workers=4), Engine(env, played), env.tokenizer)
    rows = task_rows(env_id, range(len(played)), **kwargs)
    batch = {
        "prompts": [row.pop("prompt") for row in rows],
        "env_classes": [row.pop("env_class") for row in rows],
        "env_extras": rows,
    }
    output = asyncio.run(generator.generate(batch, disable_tqdm=True))
    for i, episode in enumerate(played):
        prompt, end = len(episode.states[0]), len(episode.states[-2]) + len(episode.spans[-1])
        tokens = episode.states[-2] + episode.spans[-1]
        assert output["prompt_token_ids"][i] + output["response_ids"][i] == tokens
        mask, rewards = np.zeros(end, int), np.zeros(end)
        for state, span, reward in zip(episode.states, episode.spans, episode.rewards, strict=False):
            mask[len(state) : len(state) + len(span)] = 1
            rewards[len(state) + len(span) - 1] = reward
        assert output["loss_masks"][i] == mask[prompt:].tolist()
        assert output["rewards"][i] == rewards[prompt:].tolist()
    metrics = output["rollout_metrics"]
    assert metrics["environment/success"] == np.mean([episode.info["is_success"] for episode in played])
    assert metrics["environment/stop_turns"] == 0.25 and metrics["environment/unfinished"] == 0


# ------------------------------------------------------------------------------------------------------------- the page


def test_the_page_runs(monkeypatch, tmp_path, capsys):
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "skyrl.md").read_text(encoding="utf-8")
    data, training, playing = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    hub_name = re.search(r'^model_name = "(.+)"$', data, re.MULTILINE)[1]
    data = data.replace(hub_name, scripted.tiny_policy(scripted.WORLDS[0])).replace("4000", "8")
    with pytest.warns(UserWarning, match="special tokens"):
        exec(compile(data, "data", "exec"), {"__name__": "docs"})
    assert {path.name for path in tmp_path.glob("*.parquet")} == {"train.parquet", "test.parquet"}
    compile(training, "training", "exec")
    del registry["agent_r1"]  # the page registers it
    with pytest.warns(UserWarning, match="special tokens"):
        exec(compile(playing, "playing", "exec"), {"__name__": "docs"})
    assert "'success'" in capsys.readouterr().out
