"""Episodes that verifiers plays are paid what the environment pays, and a fault is an error of its rollout."""

import asyncio
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

vf = pytest.importorskip("verifiers.v1")

from chat_server import KEY, ChatServer, called  # noqa: E402
from scripted_episodes import KINDS, WORLDS, Desk, make, world, write  # noqa: E402
from verifiers.v1.serve import EnvClient, EnvServer  # noqa: E402

import agent_r1  # noqa: E402
from agent_r1.adapters.verifiers import AgentR1Config, AgentR1Taskset  # noqa: E402
from agent_r1.rewards import known  # noqa: E402

ROOT = Path(__file__).parents[3]
TEXTS = [kind for kind in KINDS if kind != "unclosed"]  # a text does not show that the sampler stopped
STOPS = {None: "user_closed", "turns": "max_turns", "context": "max_total_tokens"}


def scripted(env, kinds, count, native=False):
    """A model that plays task number i as kinds[i % len(kinds)]. With `native`, its server parses calls."""
    tasks = {env.make_task(index).question: index for index in range(count)}
    lock = threading.Lock()

    def policy(body):
        index = tasks[body["messages"][1]["content"]]
        with lock:
            env.reset(options={"task_index": index})
            turns = write(env, kinds[index % len(kinds)])
        turn = turns[sum(message["role"] == "assistant" for message in body["messages"])]
        if not native:
            return {"role": "assistant", "content": turn.removesuffix(env.dialect.end_of_turn)}
        said = env.dialect.parse(env.tokenizer.encode(turn, add_special_tokens=False))
        return called(*((call.name, call.arguments) for call in said.calls), content=said.content)

    return policy


@pytest.fixture
def serve(monkeypatch):
    """Start a chat server that answers by a policy."""
    servers = []

    def start(policy):
        servers.append(ChatServer(policy))
        return servers[-1]

    monkeypatch.setenv("KEY_OF_TESTS", KEY)
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def rollouts(server, taskset, count, begin=lambda: None, **env):
    """Play the first tasks in this process, all at once. Return the episodes as verifiers records them.

    `begin` is called when the tasks have been made, before the episodes.
    """
    config = vf.resolve_env_config({"taskset": {"id": "agent_r1_verifiers", **taskset}, **env})
    client = vf.EvalClientConfig(base_url=server.url, api_key_var="KEY_OF_TESTS")
    context = vf.ModelContext(client=client, model="scripted", sampling=vf.SamplingConfig())

    async def run():
        env = vf.load_environment(config)
        tasks = list(itertools.islice(env.taskset, count))
        begin()
        async with env.serving():
            return await asyncio.gather(*(env.run_slot(slot, context) for task in tasks for slot in env.slots(task)))

    return asyncio.run(run())


def check(trace, env):
    """Replay the messages of a trace (as JSON) in the environment: prompt, rewards and metrics are the same."""
    env.reset(options={"task_index": trace["task"]["data"]["task_index"]})
    messages = [node["message"] for node in trace["nodes"]]
    expected, terms, over = agent_r1.prompt_messages(env, "text"), {}, False
    for message in messages:
        if message["role"] != "assistant":
            continue
        assert not over
        _, _, terminated, truncated, info = env.step_message(message)
        over = terminated or truncated
        for name, amount in info["reward_terms"].items():
            terms[name] = terms.get(name, 0.0) + amount
        expected += [message] if over else [message, *agent_r1.new_messages(env, "text")]
    assert over and messages == expected
    assert {name: reward["score"] * reward["weight"] for name, reward in trace["rewards"].items()} == terms
    assert trace["metrics"] == {**known(info["metrics"]), "success": float(info["is_success"])}
    assert trace["stop_condition"] == STOPS[info.get("truncation_reason")]
    assert trace["ok"] and not trace["errors"]
    return sum(terms.values()), info


def test_vf_eval_plays_100_episodes(serve, tmp_path):
    """The real command of the page. Its rewards are those of the environment, for five kinds of episodes."""
    page = (ROOT / "docs" / "verifiers.md").read_text(encoding="utf-8")
    line = re.search(r"^vf-eval (.+?)(?<!\\)\n", page, re.MULTILINE | re.DOTALL)[1]
    options = shlex.split(line.replace("\\\n", " "))
    at = options.index("--env.taskset.env-kwargs") + 1
    kwargs = {**json.loads(options[at]), **world(WORLDS[0])}
    env = make(WORLDS[0], split="test", **kwargs)
    server = serve(scripted(env, TEXTS, 100))
    ours = {"NAME": "scripted", "https://api.openai.com/v1": server.url, "OPENAI_API_KEY": "KEY_OF_TESTS", "20": "100"}
    options = [ours.get(word, word) for word in options]
    options[at] = json.dumps(kwargs)
    command = [Path(sys.executable).with_name("vf-eval"), *options, "--no-rich", "-o", tmp_path / "runs"]
    folders = os.pathsep.join([str(ROOT / "envs"), str(ROOT / "tools")])
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": folders}, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = tmp_path.glob("runs/*/traces.jsonl")
    episodes = [json.loads(line) for line in file.read_text().splitlines()]
    played = [check(trace, env) for episode in episodes for trace in episode["traces"]]
    assert len(played) == 100
    assert {info.get("truncation_reason") for _, info in played} == {None, "turns", "context"}
    assert 40 <= sum(info["is_success"] for _, info in played) <= 80
    assert len({total for total, _ in played}) > 4


def test_the_configuration_of_prime_rl_is_one_of_verifiers():
    page = (ROOT / "docs" / "verifiers.md").read_text(encoding="utf-8")
    toml = tomllib.loads(re.search(r"```toml\n(.+?)```", page, re.DOTALL)[1])
    (source,) = toml["orchestrator"]["train"]["source"]
    config = vf.resolve_env_config(source["env"])
    assert config.taskset.env_id == WORLDS[0] and config.taskset.env_kwargs["max_turns"] == 6
    assert config.player.runtime.type == "subprocess" and config.agent_harnesses()["player"].id == "agent_r1_verifiers"


class Engine(BaseHTTPRequestHandler):
    """vLLM's route for tokens, as verifiers' training client asks it. Task i is played as KINDS[i % 6]."""

    env = make(WORLDS[0], **world(WORLDS[0]))

    def log_message(self, *_):
        """Quiet."""

    def do_GET(self):
        self.send_error(404)  # no list of models

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = self.env.tokenizer.decode(body["token_ids"], skip_special_tokens=False)
        index = next(index for index in range(12) if self.env.make_task(index).question in text)
        span = spans(self.env, index)[text.count("<|im_start|>assistant") - 1]
        probabilities = [{"token": f"token_id:{token}", "logprob": -0.5} for token in span]
        choice = {"token_ids": span, "finish_reason": "stop", "logprobs": {"content": probabilities}}
        data = json.dumps({"request_id": "x", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def spans(env, index):
    env.reset(options={"task_index": index})
    return [env.tokenizer.encode(text, add_special_tokens=False) for text in write(env, KINDS[index % len(KINDS)])]


def trained(kwargs, count):
    """Play the first tasks as prime-rl does: an environment server gets them, and a renderer makes the tokens."""
    engine = HTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    taskset = {"id": "agent_r1_verifiers", "env_id": WORLDS[0], "env_kwargs": kwargs}
    config = vf.resolve_env_config({"taskset": taskset})
    client = vf.TrainClientConfig(
        base_url=f"http://127.0.0.1:{engine.server_port}/v1",
        renderer={"name": "qwen3"},
        renderer_model_name=agent_r1.tiny_policy(WORLDS[0]),
    )

    async def run():
        server = EnvServer(config, "tcp://127.0.0.1:*")
        running, asked = asyncio.create_task(server.run()), EnvClient(server.address)
        tasks = [task.data.model_dump(mode="json") for task in vf.load_taskset(config.taskset).take(count)]
        try:
            return await asyncio.gather(*(asked.run(client, "policy", vf.SamplingConfig(), task) for task in tasks))
        finally:
            await asked.close()
            running.cancel()

    try:
        return [trace for episode in asyncio.run(run()) for trace in episode.traces]
    finally:
        engine.shutdown()
        engine.server_close()


def test_the_training_client_gets_tokens_masks_and_rewards_of_the_environment():
    env = make(WORLDS[0], **world(WORLDS[0]))
    for trace in trained(world(WORLDS[0]), 12):
        index, terms, mask = trace.task.data.task_index, {}, []
        turns = spans(env, index)
        state, _ = env.reset(options={"task_index": index})
        for span in turns:
            before = state
            state, _, terminated, truncated, info = env.step(np.array(span, np.int32))
            mask += [False] * (len(before) - len(mask)) + [True] * min(len(span), len(state) - len(before))
            for name, amount in info["reward_terms"].items():
                terms[name] = terms.get(name, 0.0) + amount
            if terminated or truncated:
                break
        assert trace.ok and {name: reward.value for name, reward in trace.rewards.items()} == terms
        assert trace.stop_condition == STOPS[info.get("truncation_reason")]
        (branch,) = trace.branches
        size = len(mask)  # the environment may write more after the last turn, or cut that turn to its room
        assert branch.token_ids[:size] == state[:size].tolist() and branch.sampled_mask[:size] == mask
        assert len(branch.token_ids) == size or info.get("truncation_reason") == "context"


def test_tokens_of_another_tokenizer_are_not_read():
    """The environment then reads the message that the renderer has made of them."""
    (trace,) = trained({}, 1)
    assert trace.ok and trace.metrics["success"] == 1 and trace.branches[0].token_ids


def completion(message):
    """A whole reply of a server that is not strict, of 100 tokens."""
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
    head = {"id": "x", "object": "chat.completion", "created": 0, "model": "scripted"}
    return 200, {**head, "choices": [choice], "usage": usage}


def test_calls_that_the_server_has_parsed_are_made(serve):
    """prime-rl's renderers read the calls out of the tokens; the message then has them without any text."""
    env = make(WORLDS[1], **world(WORLDS[1]))
    policy = scripted(env, ["expert"], 4, native=True)
    server = serve(policy)
    server.broken = lambda body: completion(policy(body))
    taskset = {"env_id": WORLDS[1], "env_kwargs": world(WORLDS[1])}
    for episode in rollouts(server, taskset, 4):
        (trace,) = episode.traces
        assert check(trace.model_dump(mode="json", exclude_none=True), env)[1]["is_success"]
        assert trace.assistant_messages[0].tool_calls


DESK = {"env_id": "scripted_episodes:Desk-v0"}


@pytest.fixture
def desk(serve):
    """A server that asks the data base in every turn."""
    call = Desk().demonstration()[0]
    Desk.open = 0
    yield serve(lambda body: {"role": "assistant", "content": call})
    Desk.faults, Desk.broken_start = 0, False


@pytest.mark.parametrize("broken", ["tool", "start", "model", "time"])
def test_what_breaks_is_an_error_without_a_reward(broken, desk):
    """Whatever breaks, the environment is closed."""

    def begin():
        Desk.faults, Desk.broken_start = int(broken == "tool"), broken == "start"

    late, desk.handle_error = threading.Event(), lambda *_: None  # the client of a late answer has gone
    if broken == "model":
        desk.broken = lambda body: (400, {"error": {"message": "no model"}})
    if broken == "time":
        desk.broken = lambda body: (late.wait(10) and None) or completion(desk.policy(body))
    (episode,) = rollouts(desk, DESK, 1, begin, timeout={"episode": 0.5 if broken == "time" else 60})
    late.set()
    assert not episode.ok and not any(trace.rewards or trace.metrics for trace in episode.traces)
    errors = [error.message for one in (episode, *episode.traces) for error in one.errors]
    expected = {"tool": "no line", "start": "no line", "model": "no model", "time": "0.5s deadline"}
    assert any(expected[broken] in message for message in errors)
    assert Desk.open == 0


def test_a_fault_is_gone_when_verifiers_repeats_the_episode(desk):
    """`--env.retries.max-retries` begins a new episode."""

    def begin():
        Desk.faults = 1

    (episode,) = rollouts(desk, DESK, 1, begin, retries={"max_retries": 1})
    (trace,) = episode.traces
    assert episode.ok and trace.rewards and Desk.open == 0
    assert any("no line" in error.message for error in episode.errors)


def test_the_bound_of_the_agent_is_that_of_the_environment(desk):
    """The last turn that verifiers allows is the last of the episode, which is paid as unfinished."""
    (episode,) = rollouts(desk, DESK, 1, player={"max_turns": 2})
    (trace,) = episode.traces
    assert episode.ok and trace.num_turns == 2 and trace.is_truncated and trace.stop_condition == "max_turns"
    assert trace.rewards["outcome/unfinished"].value == -0.5 and Desk.open == 0


def test_what_verifiers_cuts_off_is_paid_as_unfinished(desk):
    desk.broken = lambda body: completion(desk.policy(body))
    (episode,) = rollouts(desk, DESK, 1, player={"max_total_tokens": 115})
    (trace,) = episode.traces
    assert episode.ok and trace.num_turns == 3 and trace.is_truncated and trace.stop_condition == "max_total_tokens"
    rewards = {name: reward.value for name, reward in trace.rewards.items()}
    assert rewards == {"process/repeated_call": -0.1, "outcome/unfinished": -0.5}
    assert trace.metrics["success"] == 0 and Desk.open == 0


# ------------------------------------------------------------------ tasks


def test_tasks_carry_the_question_of_the_split():
    tasks = AgentR1Taskset(AgentR1Config(env_id=WORLDS[0], split="test", env_kwargs={"max_turns": 4}))
    env = make(WORLDS[0], split="test", max_turns=4)
    for index, task in enumerate(itertools.islice(tasks, 3)):
        env.reset(options={"task_index": index})
        system, user = agent_r1.prompt_messages(env, "text")
        assert (task.data.id, task.data.task_index) == (env.task.id, index)
        assert (task.data.system_prompt, task.data.prompt) == (system["content"], user["content"])
        assert "search" in task.data.system_prompt
        assert task.data.env_kwargs == {"split": "test", "max_turns": 4}


def test_many_tasks_are_a_stream_and_one_environment_writes_them(monkeypatch):
    made, factory = [], agent_r1.factory
    monkeypatch.setattr(agent_r1, "factory", lambda *given: made.append(given) or factory(*given))
    million = AgentR1Taskset(AgentR1Config(env_id=WORLDS[0]))
    assert type(million).INFINITE and not million.bounded
    made.clear()
    tasks = AgentR1Taskset(AgentR1Config(**DESK))
    assert not type(tasks).INFINITE and tasks.bounded
    assert [task.data.task_index for task in tasks] == [0, 1, 2, 3, 4]
    assert len(made) == 2  # one to count the tasks, one to write their prompts
    monkeypatch.setattr("agent_r1.adapters.verifiers.MOST_LISTED", 4)
    endless = AgentR1Taskset(AgentR1Config(**DESK))
    assert [task.data.task_index for task in endless.take(7)] == [0, 1, 2, 3, 4, 0, 1]
