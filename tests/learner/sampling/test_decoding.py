"""Decoding with a value model: the formulas, the candidates of a turn, and the pick among episodes."""

import numpy as np
import pytest
import torch

from llm_utils.records.evaluation_files import Episode
from llm_utils.sampling.decoding import CandidateEngine, best_of, blockwise_kl, tilt, values_before_last
from llm_utils.sampling.engine import Span
from llm_utils.sampling.rollout import rollout
from llm_utils.sampling.transformers_engine import TransformersEngine


def test_the_formulas_have_golden_values():
    assert tilt([0.5, 0.3, 0.2], [0, 1, 2]).round(4).tolist() == [0.1790, 0.2919, 0.5291]
    assert tilt([0.5, 0.5], [0, 1000], strength=2.0).tolist() == [0, 1]
    assert [round(blockwise_kl(n), 4) for n in (1, 2, 4, 8)] == [0, 0.1931, 0.6363, 1.2044]


def test_a_value_is_read_before_the_last_token(monkeypatch):
    """Rows of different lengths, in several batches. The critic of the test gives each state its last token."""
    monkeypatch.setattr("llm_utils.sampling.decoding.BATCH_TOKENS", 8)
    widths = []

    def critic(ids):
        widths.append(tuple(ids.shape))
        return ids.float()

    rows = [np.array(row, np.int32) for row in ([1, 2], [3, 4, 5, 6], [7, 8, 9], [4, 3, 2, 1, 0])]
    assert values_before_last(critic, rows, torch.device("cpu")).tolist() == [1, 5, 8, 1]
    assert widths == [(1, 4), (2, 3), (1, 1)]


@pytest.mark.parametrize("candidates", [1, 3])
def test_constant_values_choose_what_plain_sampling_gives(policy, vocab_size, make_envs, candidates):
    """So does a single candidate. The further candidates leave the first one's random numbers alone."""
    episodes = [(i, i) for i in range(6)]
    plain = rollout(make_envs(4), TransformersEngine(policy, 4, vocab_size), episodes, seed=3)
    engine = TransformersEngine(policy, 4 * candidates, vocab_size)
    engine = CandidateEngine(engine, candidates, lambda rows: np.zeros(len(rows)))
    for row, other in zip(plain, rollout(make_envs(4), engine, episodes, seed=3), strict=True):
        assert np.array_equal(row.tokens, other.tokens)
        np.testing.assert_allclose(row.logprobs, other.logprobs, atol=1e-5)
        assert (other.stats["candidate_tokens"] > row.stats["sampled_tokens"]) == (candidates > 1)


def test_the_candidate_of_the_highest_value_continues_the_row(policy, vocab_size):
    """All rows that are scored begin with what was fed and chosen; the model's log-probabilities belong to the row."""
    scored = []

    def score(rows):
        scored.append(rows)
        return np.array([row[-1] for row in rows])

    engine = CandidateEngine(TransformersEngine(policy, 8, vocab_size), 4, score)
    rows = {slot: np.arange(slot, 10 + slot, dtype=np.int32) for slot in range(2)}
    chosen = []
    for turn in range(3):
        for slot in rows:
            new = rows[slot] if turn == 0 else np.array([5, 6, slot], np.int32)
            rows[slot] = new if turn == 0 else np.concatenate([rows[slot], new])
            engine.feed(slot, new, 4, [], seed=[1, 2, slot] if turn == 0 else None)
        starts, scored[:] = dict(rows), []
        while engine.busy:
            for span in engine.step():
                start = starts[span.slot]
                candidates = [row for rows_ in scored for row in rows_ if np.array_equal(row[: len(start)], start)]
                assert len(candidates) == 4 and span.candidate_tokens == 16
                assert span.tokens[-1] == max(row[-1] for row in candidates)
                rows[span.slot] = np.concatenate([start, span.tokens])
                chosen.append((rows[span.slot], span))
    assert len(chosen) == 6
    for row, span in chosen:
        logits = policy(input_ids=torch.from_numpy(row).long()[None]).logits[0, -5:-1, :vocab_size]
        logprobs = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(row[-4:]).long()[:, None])[:, 0]
        np.testing.assert_allclose(span.logprobs, logprobs.detach(), atol=1e-4)


class Coin:
    """An engine whose spans are one token, 1 or 2, by the toss of a coin in each slot."""

    def __init__(self):
        self.fed, self.generators = [], {}

    busy = property(lambda self: bool(self.fed))

    def feed(self, slot, tokens, max_new_tokens, stop_token_ids, seed=None):
        if seed is not None:
            self.generators[slot] = np.random.default_rng(seed)
        self.fed.append(slot)

    def fork(self, slot, new, seed):
        self.generators[new] = np.random.default_rng(seed)

    def step(self):
        tosses = [(slot, self.generators[slot].integers(1, 3, 1, dtype=np.int32)) for slot in self.fed]
        self.fed = []
        return [Span(slot, token, np.zeros(1, np.float32), np.zeros(1, np.int32)) for slot, token in tosses]


def test_exact_values_win_a_small_game_more_often_than_sampling():
    """An episode of two turns is won by two tokens 2: a quarter by sampling, (1 - 1/8)^2 by the best of three."""

    def play(candidates):
        engine = CandidateEngine(Coin(), candidates, lambda rows: [float((row[1:] == 2).sum()) for row in rows])
        won = 0
        for episode in range(2000):
            both = []
            for turn in range(2):
                engine.feed(0, np.zeros(1 - turn, np.int32), 1, [], seed=[0, 2, episode] if turn == 0 else None)
                both += engine.step()[0].tokens.tolist()
            won += both == [2, 2]
        return won / 2000

    assert play(1) == pytest.approx(0.25, abs=0.04)
    assert play(3) == pytest.approx((7 / 8) ** 2, abs=0.04)


def test_the_best_episode_of_a_task():
    def episode(task, success, **more):
        return Episode(task, {"success": success, "sampled_tokens": 10.0, **more}, None, (0, 0))

    rows = [episode(0, 0.0), episode(0, 1.0), episode(0, 1.0), episode(3, 0.0)]
    picked = best_of(rows)
    assert [row.stats["success"] for row in picked] == [1, 0]
    assert [row.stats["candidate_tokens"] for row in picked] == [30, 10]
    rows = [episode(0, 1.0, critic_value=-0.1), episode(0, 0.0, critic_value=0.2)]
    assert best_of(rows)[0].stats == rows[1].stats | {"candidate_tokens": 20}
