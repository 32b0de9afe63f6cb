"""GRPO's loss, gradient and advantages next to TRL's own code, on the same rows."""

import copy

import grpo_llm
import gymnasium as gym
import numpy as np
import pytest
import torch
import transformers

import agent_r1
from llm_utils.returns import returns_to_go
from llm_utils.sampling.rollout import rollout
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.trajectory import make_groups

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

ENV_ID = "AgentR1/MultihopWorld-v0"
AGGREGATION = {"grpo": "sequence", "dr_grpo": "constant", "dapo": "token"}
GROUP, ROWS, TEMPERATURE, MAX_COMPLETION = 4, 8, 0.7, 200


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(agent_r1.tiny_policy(ENV_ID), dtype=torch.float32).eval()


@pytest.fixture
def trainer(model, tmp_path):
    """trainer(loss_type, ...): TRL's trainer on a copy of the model."""

    def make(loss_type, accumulation=1, **kwargs):
        config = trl.GRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            per_device_train_batch_size=ROWS // accumulation, gradient_accumulation_steps=accumulation,
            num_generations=GROUP, max_completion_length=MAX_COMPLETION, temperature=TEMPERATURE, loss_type=loss_type,
            scale_rewards="none" if loss_type == "dr_grpo" else "group", epsilon=0.2, epsilon_high=0.28, beta=0.0,
        )  # fmt: skip
        kwargs.setdefault("reward_funcs", lambda completions, **_: [0.0] * len(completions))
        made = trl.GRPOTrainer(
            model=copy.deepcopy(model),
            args=config,
            processing_class=transformers.AutoTokenizer.from_pretrained(agent_r1.tiny_policy(ENV_ID)),
            train_dataset=datasets.Dataset.from_dict({"prompt": ["?"] * ROWS}),
            **kwargs,
        )
        made.current_gradient_accumulation_steps = accumulation  # the training loop sets it
        made.model.train()  # the tiny policy has no dropout
        return made

    return make


@pytest.fixture(scope="module")
def rows(model):
    """Two groups of real episodes of the tiny policy, sampled by slightly different weights than those that train."""
    envs = gym.make_vec(ENV_ID, num_envs=ROWS, observation="new", tokenizer=agent_r1.tiny_policy(ENV_ID))
    engine = TransformersEngine(model, ROWS, envs.single_action_space.vocab_size, TEMPERATURE)
    rows = rollout(envs, engine, [(i, i // GROUP) for i in range(ROWS)], seed=0)
    envs.close()
    rng = np.random.default_rng(0)
    for row in rows:
        row.logprobs[row.action_mask] += rng.normal(size=row.action_mask.sum()) * 0.3
        row.old_logprobs = row.logprobs.copy()
    assert len({len(row.tokens) for row in rows}) > 2  # unequal lengths
    assert all(not row.action_mask[row.prompt_length :].all() for row in rows if len(row.turns) > 1)  # tools wrote
    return rows


def inputs_of(rows, pad_token_id):
    """The rows as TRL holds them: prompts padded on the left, completions on the right."""

    def padded(arrays, side, value):
        tensors = [torch.from_numpy(np.asarray(x)) for x in arrays]
        return trl.trainer.utils.pad(tensors, padding_value=value, padding_side=side)

    prompts = [row.tokens[: row.prompt_length].astype(np.int64) for row in rows]
    ends = [np.s_[row.prompt_length :] for row in rows]
    completions = [row.tokens[end].astype(np.int64) for row, end in zip(rows, ends, strict=True)]
    of = {name: [getattr(row, name)[end] for row, end in zip(rows, ends, strict=True)]
          for name in ("action_mask", "old_logprobs", "advantages")}  # fmt: skip
    return {
        "prompt_ids": padded(prompts, "left", pad_token_id),
        "prompt_mask": padded([np.ones_like(x) for x in prompts], "left", 0),
        "completion_ids": padded(completions, "right", pad_token_id),
        "completion_mask": padded([np.ones_like(x) for x in completions], "right", 0),
        "tool_mask": padded([x.astype(np.int64) for x in of["action_mask"]], "right", 1),
        "old_per_token_logps": padded(of["old_logprobs"], "right", 0.0),
        "advantages": padded(of["advantages"], "right", 0.0),
    }


def gradient(model):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return flat


@pytest.mark.parametrize("credit", ["episode", "turn"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("loss_type", list(AGGREGATION))
def test_loss_and_gradient_are_those_of_trl(rows, model, trainer, as_run, loss_type, accumulation, credit):
    args = grpo_llm.Args(
        group_size=GROUP,
        temperature=TEMPERATURE,
        loss_aggregation=AGGREGATION[loss_type],
        constant_length=MAX_COMPLETION,
        scale_rewards=loss_type != "dr_grpo",
        credit=credit,
        microbatch_tokens=400,  # ours is cut where it likes to be
    )
    grpo_llm.compute_advantages(make_groups(rows, args.group_size, args.gamma), args)
    logs = grpo_llm.backward(rows, args, as_run(args, model, size=len(model.get_input_embeddings().weight)))
    ours = gradient(model)
    assert 0.05 < logs["clipfrac"] < 0.95

    theirs = trainer(loss_type, accumulation)
    loss, num_sampled = 0.0, torch.tensor(sum(int(row.action_mask.sum()) for row in rows))
    for part in np.array_split(np.arange(ROWS), accumulation):
        inputs = inputs_of([rows[i] for i in part], model.config.pad_token_id) | {"num_items_in_batch": num_sampled}
        if credit == "episode":  # as TRL has them: one for each row
            inputs["advantages"] = torch.tensor([float(rows[i].advantages[rows[i].prompt_length]) for i in part])
        part_loss = theirs.compute_loss(theirs.model, inputs)
        part_loss.backward()
        loss += part_loss.item()
    assert logs["policy_loss"] == pytest.approx(loss, abs=1e-5)
    difference = ours - gradient(theirs.model)
    assert difference.abs().max() < 1e-5 and difference.norm() < 1e-5 * ours.norm()


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
def test_advantages_are_those_of_trl(trainer, loss_type):
    returns = np.random.default_rng(0).choice([0.0, 1.0, -0.5, 0.3, 1.6], size=ROWS).round(6)
    returns[:GROUP] = [1.0, 0.0, 0.0, 0.0]
    theirs = trainer(
        loss_type,
        reward_funcs=lambda completions, **_: returns.tolist(),
        rollout_func=lambda prompts, _: {"prompt_ids": [[5]] * ROWS, "completion_ids": [[6]] * ROWS, "logprobs": None},
    )
    expected = theirs._generate_and_score_completions([{"prompt": "?"}] * ROWS)["advantages"].numpy()
    scale = loss_type == "grpo"
    for group in np.split(np.arange(ROWS), ROWS // GROUP):
        rewards = [np.array([0.3, returns[i] - 0.3]) for i in group]  # two turns
        ours = grpo_llm.group_advantages(returns_to_go(rewards), "episode", scale, eps=1e-4)
        np.testing.assert_allclose(ours, np.repeat(expected[group][:, None], 2, axis=1), atol=1e-5)
