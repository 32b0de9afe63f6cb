"""The adapter for verl: its own worker plays whole batches, and what it trains on is the `ToolEnv`'s own.

`make test-adapters` installs verl and runs this; elsewhere it is skipped."""

import asyncio
import os
import random
import sys
import threading
import time
from collections import defaultdict, deque
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("verl")

import datasets  # noqa: E402
import scripted_episodes as scripted  # noqa: E402
import torch  # noqa: E402
from hydra import compose, initialize_config_module  # noqa: E402
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker  # noqa: E402
from verl.protocol import DataProto  # noqa: E402
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn  # noqa: E402
from verl.utils.tensordict_utils import assign_non_tensor_data, get_tensordict  # noqa: E402
from verl.workers.rollout.replica import TokenOutput  # noqa: E402

from agent_r1.adapters.verl import task_rows  # noqa: E402
from agent_r1.trajectories import episode_row  # noqa: E402
from agent_r1_tools import ToolFault  # noqa: E402

PROMPT, RESPONSE = 512, scripted.SMALL  # verl's bounds, in tokens


@pytest.fixture(autouse=True)
def whole_desk(monkeypatch):
    for name in ("faults", "broken_start", "open"):
        monkeypatch.setattr(scripted.Desk, name, 0)


class Server:
    """Writes in every state the spans that episodes wrote there, in the place of verl's `LLMServerClient`."""

    def __init__(self, episodes=(), **output):
        self.asked, self.logprobs, self.output = [], {}, output
        self.spans = defaultdict(deque)
        for episode in episodes:
            for state, span in zip(episode.states, episode.spans, strict=False):
                self.spans[tuple(state)].append(span)

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.asked.append((request_id, sampling_params))
        span = self.spans[tuple(prompt_ids)].popleft()
        self.logprobs[tuple(prompt_ids)] = logprobs = [-random.random() for _ in span]
        steps = {"min_global_steps": len(self.asked), "max_global_steps": len(self.asked) + 1}
        values = {"token_ids": span, "log_probs": logprobs, "stop_reason": "completed", "extra_fields": steps}
        return TokenOutput(**values | self.output)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Return a function that makes verl's whole configuration."""
    path = tmp_path_factory.mktemp("verl") / "agent_r1.yaml"
    path.write_text("- {name: agent_r1, _target_: agent_r1.adapters.verl.AgentR1Loop}\n")

    def make(env_id, prompt=PROMPT, response=RESPONSE):
        rollout, data = "actor_rollout_ref.rollout", "data"
        overrides = [
            f"actor_rollout_ref.model.path={scripted.tiny_policy(env_id)}",
            f"{rollout}.name=vllm", f"{rollout}.agent.agent_loop_config_path={path}",
            f"{data}.max_prompt_length={prompt}", f"{data}.max_response_length={response}",
        ]  # fmt: skip
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", overrides)

    return make


@pytest.fixture
def worker(config):
    """Return a function that makes verl's worker for the tokenizer of a world, with a server."""
    return lambda server, env_id=scripted.WORLDS[0], **bounds: AgentLoopWorker(config(env_id, **bounds), server)


def batch_of(worker, rows, folder):
    """Read rows as verl does: from a Parquet file, by its dataset."""
    path = str(folder / "rows.parquet")
    datasets.Dataset.from_list(rows).to_parquet(path)
    data = RLHFDataset(path, worker.tokenizer, worker.config.data)
    return DataProto.from_single_dict(collate_fn([data[i] for i in range(len(data))]))


def run(worker, row):
    """Run one episode, and return verl's `AgentLoopOutput`."""

    async def main():
        found = []
        worker._agent_loop_postprocess = lambda output, *_, **__: found.append(output) or asyncio.sleep(0)
        trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": False}
        await worker._run_agent_loop({"logprobs": True}, trajectory, trace=False, **row)
        return found[0]

    return asyncio.run(main())


def desk():
    """A row of the desk, and what the expert writes there."""
    tokenizer = scripted.tiny_policy(scripted.WORLDS[0])
    env = scripted.make("Desk-v0", tokenizer=tokenizer)
    episode = scripted.play(env, 0, "expert")
    env.close()
    (row,) = task_rows("Desk-v0", [0], tokenizer=tokenizer)
    assert scripted.Desk.open == 0
    return row, episode


# ---------------------------------------------------------------------------------------------- the same as the ToolEnv


@pytest.mark.parametrize("kind", scripted.KINDS)
@pytest.mark.parametrize("env_id", scripted.WORLDS)
def test_a_batch_is_what_the_environment_plays(env_id, kind, worker, tmp_path):
    """2 worlds, 6 kinds and 9 tasks: 108 episodes, through verl's dataset and its worker into tensors."""
    kwargs = scripted.world(env_id)
    env, episodes, ours = scripted.make(env_id, **kwargs), [], []
    for index in range(9):
        episode = scripted.play(env, index, kind)
        episodes.append(episode)
        ours.append(episode_row(env, episode.info, episode.rewards, episode.terminated, episode.truncated))
    server = Server(episodes)
    verl = worker(server, env_id)
    batch = batch_of(verl, task_rows(env_id, range(9), **kwargs), tmp_path)
    output = asyncio.run(verl.generate_sequences(batch))

    assert not any(server.spans.values()), "verl asked for every span"
    assert len({request for request, _ in server.asked}) == 9, "an episode stays on its server"
    assert not output.batch["prompts"].isnan().any() and output.batch["responses"].shape == (9, RESPONSE)
    for i, (row, episode) in enumerate(zip(ours, episodes, strict=True)):
        first, last = row["turns"][0][0], row["turns"][-1][1]
        attended = output.batch["attention_mask"][i].bool()
        assert output.batch["input_ids"][i][attended].tolist() == row["tokens"][:last]
        assert output.batch["prompts"][i][attended[:PROMPT]].tolist() == row["tokens"][:first] == episode.states[0]
        answered = attended[PROMPT:]
        assert output.batch["responses"][i][answered].tolist() == row["tokens"][first:last]
        mask, scores = output.batch["response_mask"][i], output.batch["rm_scores"][i]
        assert mask[answered].tolist() == row["action_mask"][first:last] and not mask[~answered].any()
        assert scores.sum().item() == pytest.approx(sum(row["rewards"])) and not scores[mask == 0].any()
        assert not any(row["action_mask"][last:]) and not any(row["rewards"][last:])
        logprobs = []
        for state in episode.states[:-1]:
            logprobs += [0.0] * (len(state) - first - len(logprobs)) + server.logprobs[tuple(state)]
        assert output.batch["rollout_log_probs"][i][answered].tolist() == pytest.approx(logprobs)
        assert not output.batch["rollout_log_probs"][i][mask == 0].any()
        extra = {name: values[i] for name, values in output.non_tensor_batch.items()}
        assert extra["turn_scores"] == row["turn_rewards"] and extra["__num_turns__"] == 2 * len(episode.spans)
        stop = episode.info.get("truncation_reason")
        assert extra["reward_extra_info"] == {
            **episode.info["metrics"], "success": episode.info["is_success"],
            "stop_turns": stop == "turns", "stop_context": stop == "context",
        }  # fmt: skip


def test_the_sampler_is_told_stops_and_room(worker):
    env_id = scripted.WORLDS[0]
    kwargs = scripted.world(env_id)
    env = scripted.make(env_id, **kwargs)
    episode = scripted.play(env, 0, "expert")
    server = Server([episode])
    output = run(worker(server), task_rows(env_id, [0], **kwargs)[0])
    rooms = [min(env.max_action_tokens, scripted.SMALL - len(state)) for state in episode.states[:-1]]
    assert [params for _, params in server.asked] == [
        {"logprobs": True, "max_tokens": room, "stop_token_ids": list(env.dialect.stop_token_ids)} for room in rooms
    ]
    versions = output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]
    assert versions == (1, len(episode.spans) + 1), "of the first turn, and of the last"


def test_a_validation_samples_as_verl_configures_it(worker, tmp_path):
    row, episode = desk()
    server = Server([episode])
    verl = worker(server)
    batch = batch_of(verl, [row], tmp_path)
    batch.meta_info["validate"] = True
    asyncio.run(verl.generate_sequences(batch))
    told = {(params["temperature"], params["top_p"], params["top_k"]) for _, params in server.asked}
    assert told == {(0, 1.0, -1)} and len(server.asked) == 2


@pytest.mark.parametrize("env_id", scripted.WORLDS)
@pytest.mark.parametrize("kind", ["expert", "turns"])
@pytest.mark.parametrize("response", [1, 10, 40, 100, 200])
def test_the_environment_ends_an_episode_at_the_response_length(response, kind, env_id, worker):
    """It judges the tokens that verl trains on: they are those of an environment with this context."""
    env = scripted.make(env_id, tokenizer=scripted.tiny_policy(env_id), max_context_tokens=PROMPT + response)
    begin = env.reset

    def reset(**options):
        env.max_context_tokens = PROMPT + response
        state, info = begin(**options)
        env.max_context_tokens = len(state) + response
        return state, info | {"max_new_tokens": env.room}

    env.reset = reset
    for index in range(2):
        expected = scripted.play(env, index, kind)
        (row,) = task_rows(env_id, [index], tokenizer=scripted.tiny_policy(env_id))
        output = run(worker(Server([expected]), env_id, response=response), row)
        last = len(expected.states[-2]) + len(expected.spans[-1])
        assert output.prompt_ids + output.response_ids == expected.states[-1][:last]
        assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs) <= response
        assert output.reward_score == pytest.approx(sum(expected.rewards)) and output.response_mask[-1] == 1
        stopped = expected.info.get("truncation_reason") == "context"
        assert output.extra_fields["reward_extra_info"]["stop_context"] == stopped
        assert stopped or response > 10


def test_a_span_that_is_too_long_is_cut(worker):
    """The server ignored `max_tokens`. Neither the environment nor verl gets the rest."""
    env_id = scripted.WORLDS[0]
    kwargs = scripted.world(env_id)
    episode = scripted.play(scripted.make(env_id, **kwargs), 0, "context")
    whole = [*episode.spans[0], *episode.spans[0]]
    server = Server([episode], token_ids=whole, log_probs=np.linspace(-1, 0, len(whole)).tolist())
    output = run(worker(server), task_rows(env_id, [0], **kwargs)[0])
    assert output.prompt_ids + output.response_ids == episode.states[-1] and len(episode.states[-1]) == scripted.SMALL
    first, last = len(episode.spans[0]), len(episode.spans[-1])
    assert output.response_logprobs[:first] == server.output["log_probs"][:first]
    assert output.response_logprobs[-last:] == server.output["log_probs"][:last]


def test_the_environment_ends_an_episode_at_the_model_s_length(worker):
    """verl's servers refuse a prompt that leaves no room in `max_model_len`, and SGLang keeps one token free."""
    env_id = scripted.WORLDS[0]
    longest = len(scripted.play(scripted.make(env_id, **scripted.world(env_id)), 0, "context").states[0]) + 100
    kwargs = scripted.world(env_id, max_context_tokens=longest - 1)
    expected = scripted.play(scripted.make(env_id, **kwargs), 0, "context")
    verl = worker(Server([expected]))
    verl.config.actor_rollout_ref.rollout.max_model_len = longest
    output = run(verl, task_rows(env_id, [0], tokenizer=kwargs["tokenizer"])[0])
    assert len(output.prompt_ids + output.response_ids) == longest - 1
    assert output.extra_fields["reward_extra_info"]["stop_context"] == 1


def test_metrics_do_not_mix_with_those_of_verl(worker, monkeypatch):
    """verl's validation appends the returns to "reward" and takes "acc" for its main metric."""
    metrics = {"reward": 5.0, "acc": None, "success": 0.5, "f1": 0.5}
    monkeypatch.setattr(scripted.Desk, "judge_answer", lambda self, answer: (1.0, metrics))
    row, episode = desk()
    output = run(worker(Server([episode])), row)
    assert output.extra_fields["reward_extra_info"] == {
        "success": 1, "stop_turns": 0, "stop_context": 0,
        "env_reward": 5.0, "env_acc": None, "env_success": 0.5, "f1": 0.5,
    }  # fmt: skip


def test_counts_of_the_server_are_sums_over_the_turns(worker):
    row, episode = desk()
    drafts = {"spec_num_draft_tokens": 5, "spec_num_accepted_tokens": 3, "spec_num_verify_steps": 2}
    output = run(worker(Server([episode], num_preempted=2, extra_fields=drafts)), row)
    assert output.metrics.num_preempted == 4 and len(episode.spans) == 2
    assert {name: output.extra_fields[name] for name in drafts} == {name: 2 * n for name, n in drafts.items()}
    assert run(worker(Server([episode])), row).metrics.num_preempted == -1


def test_a_deterministic_run_names_its_requests(worker):
    """The name chooses the server."""
    row, episode = desk()
    server = Server([episode])
    verl = worker(server)
    verl.config.actor_rollout_ref.rollout.full_determinism = True
    run(verl, row | {"priority": np.int64(7)})
    assert {request for request, _ in server.asked} == {"det-7"}


@pytest.mark.parametrize("none", [None, []])  # verl's client for asynchronous trainers returns an empty list
def test_without_log_probabilities_there_are_none(none, worker):
    row, episode = desk()
    output = run(worker(Server([episode], log_probs=none)), row)
    assert output.response_logprobs is None and output.reward_score == 1


def test_the_current_trainer_gets_whole_episodes_and_no_faults(config, monkeypatch, tmp_path):
    """verl's V1 worker, in a process of Ray, writes into a TransferQueue. Of two tasks one has no working tool."""
    import ray
    import transfer_queue
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the home folder
    paths = [str(Path(scripted.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    row, episode = desk()
    (broken,) = task_rows("scripted_episodes:BrokenDesk-v0", [0], tokenizer=scripted.tiny_policy(scripted.WORLDS[0]))
    whole = config(scripted.WORLDS[0])
    whole.actor_rollout_ref.rollout.n = 2
    whole.transfer_queue.enable, whole.transfer_queue.backend.SimpleStorage.num_data_storage_units = True, 1
    columns = batch_of(AgentLoopWorker(whole, None), [row | {"env_id": "scripted_episodes:Desk-v0"}, broken], tmp_path)
    names = ["uid0", "uid1"]
    batch = {"uid": np.array(names, object), "global_steps": np.array([5, 5]), **columns.non_tensor_batch}
    batch = get_tensordict(batch)
    assign_non_tensor_data(batch, "validate", False)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        transfer_queue.init(whole.transfer_queue)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": 5}] * 2
        transfer_queue.kv_batch_put(keys=names, partition_id="train", tags=tags)
        worker = AgentLoopWorkerTQ.remote(whole, Server([episode] * 4))
        ray.get(worker.generate_sequences.remote(batch))
        end = time.monotonic() + 60
        while time.monotonic() < end:
            stored = transfer_queue.kv_list("train")["train"]
            if all(stored[name]["status"] in ("finished", "failure") for name in names):
                break
            time.sleep(0.1)
        assert [stored[name]["status"] for name in names] == ["finished", "failure"]
        keys = sorted(stored.keys() - set(names))
        assert keys == ["uid0_0_0", "uid0_1_0"]
        fields = ["prompts", "responses", "response_mask", "rm_scores", "rollout_log_probs"]
        found = transfer_queue.kv_batch_get(keys=keys, partition_id="train", select_fields=fields)
    finally:
        transfer_queue.close()
        ray.shutdown()
    last = len(episode.states[-2]) + len(episode.spans[-1])
    for i in range(2):
        values = {name: found[name][i].tolist() for name in fields}
        assert values["prompts"] + values["responses"] == episode.states[-1][:last]
        assert values["rm_scores"] == [0.0] * (len(values["responses"]) - 1) + [1.0]
        assert values["response_mask"][-1] == 1 and sum(values["response_mask"]) == sum(map(len, episode.spans))
        assert [bool(one) for one in values["rollout_log_probs"]] == [bool(one) for one in values["response_mask"]]


def test_rows_keep_no_tokenizer_and_filter_long_prompts(worker, tmp_path):
    env_id = scripted.WORLDS[0]
    rows = task_rows(env_id, range(4), **scripted.world(env_id, max_turns=3))
    assert [row["task_index"] for row in rows] == [0, 1, 2, 3] == [row["extra_info"]["index"] for row in rows]
    assert {row["env_kwargs"] for row in rows} == {'{"max_context_tokens": 700, "max_turns": 3}'}
    verl = worker(Server())
    assert batch_of(verl, rows, tmp_path).non_tensor_batch["agent_name"].tolist() == ["agent_r1"] * 4
    verl.config.data.filter_overlong_prompts = True
    for bound, kept in [(PROMPT, 4), (16, 0)]:
        verl.config.data.max_prompt_length = bound
        assert len(RLHFDataset(str(tmp_path / "rows.parquet"), verl.tokenizer, verl.config.data)) == kept


# ------------------------------------------------------------------------------------------------------------ no reward


def test_an_infrastructure_error_is_no_reward(worker, monkeypatch):
    row, episode = desk()
    monkeypatch.setattr(scripted.Desk, "faults", 1)
    with pytest.raises(ToolFault, match="no line"):
        run(worker(Server([episode])), row)
    assert scripted.Desk.open == 0
    monkeypatch.setattr(scripted.Desk, "broken_start", True)
    with pytest.raises(ToolFault, match="could not begin"):
        run(worker(Server([episode])), row)
    assert scripted.Desk.open == 0


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"token_ids": [], "log_probs": []}, "0 tokens with stop_reason 'completed'"),
        ({"stop_reason": "aborted"}, "stop_reason 'aborted'"),
        ({"log_probs": [-1.0]}, "1 log-probabilities for"),
    ],
)
def test_what_no_policy_wrote_is_no_turn(output, message, worker):
    row, episode = desk()
    with pytest.raises(RuntimeError, match=message):
        run(worker(Server([episode], **output)), row)
    assert scripted.Desk.open == 0


@pytest.mark.parametrize(
    ("response", "message"),
    [(RESPONSE, "and rollout.prompt_length is 16; increase "), (16, "max_context_tokens=32; increase .*, here ")],
)
def test_a_prompt_beyond_verl_s_bound_is_refused(response, message, worker):
    row, episode = desk()
    with pytest.raises(ValueError, match=f"{message}data.max_prompt_length"):
        run(worker(Server([episode]), prompt=16, response=response), row)
    assert scripted.Desk.open == 0


def test_a_row_without_a_task_is_refused(worker):
    with pytest.raises(ValueError, match="task_rows"):
        run(worker(Server()), {"agent_name": "agent_r1", "env_id": "Desk-v0"})


# -------------------------------------------------------------------------------------------------------------- threads


def test_tools_of_all_episodes_block_at_the_same_time(worker, monkeypatch, tmp_path):
    """More of them than the threads of asyncio's own pool. Each is in the thread in which its data base was opened."""
    count = 40
    row, episode = desk()
    barrier, query = threading.Barrier(count), scripted.Desk.query

    def query_together(self, sql: str) -> list:
        """Ask the data base."""
        barrier.wait(20)
        return query(self, sql)

    query_together.__name__ = "query"
    monkeypatch.setattr(scripted.Desk, "query", query_together)
    verl = worker(Server([episode] * count))
    output = asyncio.run(verl.generate_sequences(batch_of(verl, [row] * count, tmp_path)))
    assert output.batch["rm_scores"].sum(dim=1).equal(torch.ones(count)) and scripted.Desk.open == 0


@pytest.mark.parametrize("where", ["making", "server", "tool"])
def test_a_cancelled_episode_closes_its_environment(where, worker, monkeypatch):
    """A running tool ends first: the environment is closed in the thread of the episode."""
    row, episode = desk()
    made, closed, begin, close = [], [], scripted.Desk.__init__, scripted.Desk.close
    monkeypatch.setattr(scripted.Desk, "close", lambda env: closed.append(env) or close(env))
    server, reached, go_on = Server([episode]), threading.Event(), threading.Event()
    query = scripted.Desk.query

    async def no_answer(*_, **__):
        reached.set()
        await asyncio.sleep(60)

    def slow(self, sql: str) -> list:
        """Ask the data base."""
        reached.set()
        go_on.wait(20)
        return query(self, sql)

    def make(self, **kwargs):
        made.append(self)
        reached.set()
        go_on.wait(20)
        begin(self, **kwargs)

    slow.__name__ = "query"
    if where == "making":
        monkeypatch.setattr(scripted.Desk, "__init__", make)
    elif where == "server":
        server.generate = no_answer
    else:
        monkeypatch.setattr(scripted.Desk, "query", slow)
    verl = worker(server)

    async def main():
        trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": False}
        task = asyncio.create_task(verl._run_agent_loop({}, trajectory, trace=False, **row))
        while not reached.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert scripted.Desk.open == 0 and len(closed) == 1 and made in ([], closed)
