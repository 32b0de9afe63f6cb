"""learner/reward_model_llm.py and --reward-model: figures, losses, what a learner is paid, a run that is resumed."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reward_model_llm
import torch
from interrupted import interrupted_after

from llm_utils.recovery import checkpoint
from llm_utils.reward_figures import auc, best_of, pairs_won, with_results_of
from llm_utils.reward_model import (
    Episode,
    RewardModel,
    RewardModelFacts,
    load_reward_model,
    logits,
    read_episodes,
    save_reward_model,
    score_rows,
    views,
)

FEW = ["--num-threads", 1, "--num-steps", 4, "--batch-size", 16, "--eval-every", 2, "--learning-rate", 1e-4]


def episode(task, success, spans=((2, 4), (6, 8)), length=9, first=0):
    return Episode(np.arange(first, first + length, dtype=np.int32), [0], list(spans), success, (None, "train", task))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """trajectories.jsonl with 320 episodes of 40 tasks. Those that succeed have a third turn."""
    path, rng = tmp_path_factory.mktemp("data") / "trajectories.jsonl", np.random.default_rng(0)
    lines = []
    for number in range(320):
        success = bool(rng.random() < 0.4)
        turns = [[4 + 5 * k, 7 + 5 * k] for k in range(2 + success)]
        mask = np.zeros(turns[-1][1] + 1, int)
        for start, end in turns:
            mask[start:end] = 1
        row = {"task_index": number // 8, "split": "train", "is_success": success, "turns": turns}
        row |= {"tokens": rng.integers(40, size=len(mask)).tolist(), "action_mask": mask.tolist()}
        lines.append(json.dumps(row | {"segment_starts": [0], "fault": None}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def model(policy_folder, vocab_size):
    """A reward model of kind "values" with a random head."""
    from agent_r1.text.tokenizers import fingerprint, load_tokenizer

    args = SimpleNamespace(gradient_checkpointing="off")
    critic = reward_model_llm.Critic(str(policy_folder), args, torch.float32).eval()
    torch.nn.init.normal_(critic.head.weight)
    tokens = fingerprint(load_tokenizer(None))
    return RewardModel(
        critic, RewardModelFacts("values", 0.0, "AgentR1/MultihopWorld-v0", tokens, vocab_size, "float32")
    )


def test_golden_vectors_of_the_figures():
    scores, success = np.array([3.0, 1.0, 2.0, 1.0]), np.array([True, False, False, True])
    assert auc(scores, success) == pytest.approx((1 + 1 + 0.5 + 0) / 4)
    short, long = ((2, 4),), ((2, 4), (6, 8))
    rows = [episode(0, True, long), episode(0, False, long), episode(0, False, short), episode(1, True, short)]
    assert pairs_won(scores, rows, equal_turns=False) == (1.0, 2)  # 3 above 1, 3 above 2
    assert pairs_won(np.array([1.0, 1, 2, 0]), rows, equal_turns=True) == (0.5, 1)
    assert pairs_won(scores[2:], rows[2:], equal_turns=False) == (None, 0)
    assert best_of({"model": np.array([1.0, 1, 0, 5])}, rows) == {
        "tasks": 1, "n": 3.0, "random": pytest.approx(1 / 3), "model": 0.5, "perfect": 1.0
    }  # fmt: skip


def test_golden_vectors_of_the_losses():
    """A margin of 1 costs .313262, none ln 2; swapping a pair turns the gradient around."""
    pair = [episode(0, True), episode(0, False)]
    for margin, expected in ((1.0, 0.313262), (0.0, math.log(2))):
        scores = [torch.tensor([margin], requires_grad=True), torch.tensor([0.0], requires_grad=True)]
        loss = reward_model_llm.unit_loss(scores, pair, "pairs")
        loss.backward()
        assert loss.item() == pytest.approx(expected, abs=1e-6)
        assert scores[0].grad < 0 < scores[1].grad
    values = [torch.tensor([0.0, 1.0])]
    found = reward_model_llm.unit_loss(values, pair[:1], "values").item()
    assert found == pytest.approx(math.log(2) + 0.313262, abs=1e-6)


def test_where_scores_are_read():
    """After the prompt and after every tool result. Of a rewritten context only the first prompt counts."""
    row = episode(0, True)
    assert [view.ends.tolist() for view in views(row, "values")] == [[1, 5, 8]]
    assert [view.ends.tolist() for view in views(row, "outcome")] == [[8]]
    rewritten = Episode(row.tokens, [0, 5], row.spans, True, row.task)
    parts = views(rewritten, "values")
    assert [(view.tokens.tolist(), view.ends.tolist()) for view in parts] == [
        ([0, 1, 2, 3, 4], [1, 4]),
        ([5, 6, 7, 8], [3]),
    ]
    assert views(rewritten, "pairs")[0].tokens.tolist() == [5, 6, 7, 8]


def test_results_of_another_task():
    other = episode(1, False, spans=((3, 4), (5, 9)), length=12, first=100)
    swapped = with_results_of(episode(0, True), other)
    assert swapped.tokens.tolist() == [0, 1, 2, 3, 104, 6, 7, 109, 110, 111] and swapped.spans == [(2, 4), (5, 7)]
    assert swapped.is_success and swapped.task == episode(0, True).task


@pytest.mark.parametrize("kind", ["outcome", "values"])
def test_a_batch_has_the_loss_and_the_gradient_of_its_episodes(model, kind, recorded, vocab_size):
    rows = read_episodes(str(recorded), vocab_size, None)[:6]
    found = []
    for budget in (10**6, 1):
        args = reward_model_llm.Args(kind=kind, microbatch_tokens=budget)
        value = reward_model_llm.loss(model.critic, [[row] for row in rows], args, backward=True)
        found.append((value, torch.cat([p.grad.flatten() for p in model.critic.parameters()])))
        model.critic.zero_grad()
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-5)
    each = [x for row in rows for x in logits(model.critic, [views(row, kind)])[0] * (1 if row.is_success else -1)]
    assert found[0][0] == pytest.approx(np.mean(np.log1p(np.exp(-np.array(each)))), rel=1e-4)


def test_what_a_learner_is_paid(model, make_row):
    """The outcome at the end is replaced, process rewards stay, and differences add up to the whole change."""

    def row(**terms):
        made = make_row([(2, 4, 0.1), (6, 8, 1.0)], 9, tokens=np.arange(9, dtype=np.int32))
        made.reward_terms.update(terms)
        made.stats["return"] = 1.1
        return made

    scores = model.scores([row()])[0]
    assert scores.shape == (3,) and np.ptp(scores) > 0.01
    paid = row(**{"outcome/exact_match": 1.0, "process/support_found": 0.1})
    score_rows([paid], model, 1.0)
    assert paid.turn_rewards() == pytest.approx([0.1 + scores[1] - scores[0], scores[2] - scores[1]], abs=1e-6)
    assert paid.rewards[[3, 7]] == pytest.approx(paid.turn_rewards()) and paid.stats["return"] == 1.1
    assert paid.stats["model_score"] == pytest.approx(scores[2])
    half = row(**{"outcome/exact_match": 1.0, "process/support_found": 0.1})
    whole = RewardModel(model.critic, RewardModelFacts("outcome", 0.0, "", "", 1, "float32"))
    score_rows([half], whole, 0.5)
    assert half.turn_rewards() == pytest.approx([0.1, 0.5 + 0.5 * scores[2]], abs=1e-6)
    unnamed = row()  # of an environment without named terms
    score_rows([unnamed], whole, 1.0)
    assert unnamed.turn_rewards() == pytest.approx([0, scores[2]], abs=1e-6)


def test_a_saved_model_gives_the_same_scores_and_fits_one_tokenizer(model, tmp_path, vocab_size, capsys):
    save_reward_model(model, tmp_path)
    args = SimpleNamespace(reward_model=str(tmp_path), chat_template=None, env_id="AgentR1/CraftWorld-v0")
    device = torch.device("cpu")
    loaded = load_reward_model(args, None, vocab_size, device)
    assert "was trained on AgentR1/MultihopWorld-v0" in capsys.readouterr().err
    row = episode(0, True)
    np.testing.assert_array_equal(loaded.scores([row])[0], model.scores([row])[0])
    with pytest.raises(SystemExit, match="reads the tokens of another tokenizer"):
        load_reward_model(args, None, vocab_size + 1, device)
    (tmp_path / "reward_model" / "critic.json").write_text("{}")
    with pytest.raises(SystemExit, match="cannot be read: TypeError"):
        load_reward_model(args, None, vocab_size, device)
    with pytest.raises(SystemExit, match="there is no reward model; give the folder of a finished run"):
        load_reward_model(SimpleNamespace(reward_model="runs/x"), None, vocab_size, device)


def test_a_run_is_resumed_to_the_same_weights_and_a_learner_trains_against_it(
    learn, recorded, monkeypatch, policy_folder, capsys
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = [*FEW, "--data", recorded, "--model", policy_folder, "--tokenizer", "byte", "--checkpoint-every", 2]
    whole = learn("reward_model_llm", *flags, "--exp-name", "whole")
    shown = capsys.readouterr().out
    assert "results of another task" in shown and "best of 8: random" in shown
    summary = json.loads((whole / "summary.json").read_text())
    table = summary["heldout"]["scores"]
    assert summary["finished"] and summary["heldout"]["tasks"] == 8
    assert table["turns"]["auc"] == 1.0 and table["turns"]["equal_turns_pairs"] == 0  # only successes have three
    assert table["prompt alone"]["pairs_won"] is not None
    logged = {*EventAccumulator(str(whole)).Reload().Tags()["scalars"]}
    page = (Path(__file__).parents[2] / "docs" / "learners" / "reward_model_llm.md").read_text()
    assert logged == {*re.findall(r"^\| `([a-z]+/[a-z_]+)` \|", page, re.MULTILINE)}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "Checkpointer", interrupted_after(2))
        with pytest.raises(SystemExit):
            learn("reward_model_llm", *flags, "--exp-name", "cut")
    (cut,) = (folder for folder in whole.parent.iterdir() if "cut" in folder.name)
    learn("reward_model_llm", "--resume", cut)
    files = [(run / "reward_model" / "critic.safetensors").read_bytes() for run in (whole, cut)]
    assert files[0] == files[1]

    flags = ["--model", policy_folder, "--tokenizer", "byte", "--num-envs", 8, "--total-episodes", 8]
    flags += ["--env-kwargs", json.dumps({"max_turns": 2, "max_action_tokens": 8, "max_context_tokens": 20000})]
    flags += ["--episodes-per-iteration", 8, "--group-size", 4, "--num-minibatches", 1, "--eval-episodes", 0]
    run = learn("grpo_llm", *flags, "--num-threads", 1, "--reward-model", whole, "--no-save-model")
    rows = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    for row in rows:
        terms = [item for turn in row["reward_terms"] for item in turn.items()]
        process = sum(value for name, value in terms if not name.startswith("outcome/"))
        assert sum(row["rewards"]) == pytest.approx(row["stats"]["model_score"] + process, abs=1e-4)
    assert len({round(row["stats"]["model_score"], 4) for row in rows}) > 1


def lines(recorded, count, change=lambda row: row):
    return "\n".join(json.dumps(change(json.loads(line))) for line in recorded.read_text().splitlines()[:count])


@pytest.mark.parametrize(
    ("count", "change", "words", "message"),
    [
        (299, {}, [], r"has 299 episodes, fewer than 300: .*--log-trajectories all .*evaluate_llm.py --samples"),
        (320, {"is_success": True}, [], "all training episodes succeed, or all fail"),
        (320, {"is_success": None}, [], "line 1: `is_success` must be true or false"),
        (320, {"turns": [[3, 1]]}, [], "line 1: the places in `turns` must grow"),
        (320, {"turns": None}, [], "line 1: `turns` must be a list"),
        (320, {"task_index": 3}, [], "has episodes of 1 tasks, fewer than 5"),
        (320, "single", ["--kind", "pairs"], "--kind pairs needs successes and failures of one task"),
    ],
)
def test_unfit_episodes(learn, recorded, tmp_path, policy_folder, count, change, words, message):
    numbers = iter(range(count))
    of_row = (lambda row: row | {"task_index": next(numbers)}) if change == "single" else (lambda row: row | change)
    (tmp_path / "rows.jsonl").write_text(lines(recorded, count, of_row) + "\n")
    flags = ["--data", tmp_path / "rows.jsonl", "--model", policy_folder, "--tokenizer", "byte", *FEW, *words]
    with pytest.raises(SystemExit, match=message):
        learn("reward_model_llm", *flags)


def test_what_is_refused(learn):
    with pytest.raises(SystemExit, match="--data is missing: give the trajectories.jsonl"):
        learn("reward_model_llm")
    with pytest.raises(SystemExit, match="--batch-size 3 must be even with --kind pairs"):
        reward_model_llm.check(reward_model_llm.Args(kind="pairs", batch_size=3))


@pytest.mark.parametrize("kind", ["outcome", "pairs", "values"])
@pytest.mark.slow
def test_every_kind_learns_what_is_in_the_tokens(learn, recorded, tmp_path, policy_folder, kind):
    """Every token of a success is below 20, of a failure above. The number of turns is the same."""

    def change(row):
        row["turns"] = row["turns"][:2]
        for name in ("tokens", "action_mask"):
            row[name] = row[name][: row["turns"][-1][1] + 1]
        places = enumerate(row["tokens"])
        row["tokens"] = [t if i < 4 else t % 20 + 20 * (not row["is_success"]) for i, t in places]
        return row

    (tmp_path / "rows.jsonl").write_text(lines(recorded, 320, change) + "\n")
    flags = ["--data", tmp_path / "rows.jsonl", "--model", policy_folder, "--tokenizer", "byte", "--num-threads", 1]
    run = learn("reward_model_llm", *flags, "--kind", kind, "--num-steps", 60, "--learning-rate", 1e-2)
    scores = json.loads((run / "summary.json").read_text())["heldout"]["scores"]
    assert scores["model"]["auc"] > 0.85 and scores["model"]["equal_turns_won"] > 0.85
    assert scores["turns"]["auc"] == 0.5 and scores["prompt alone"]["auc"] < 0.7
