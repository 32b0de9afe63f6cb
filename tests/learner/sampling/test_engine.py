"""The engine and the rollout: what it samples, what it says about it, and what it refuses."""

import numpy as np
import pytest
import torch

from llm_utils.sampling import rollout
from llm_utils.sampling.transformers_engine import TransformersEngine, sample
from llm_utils.training.forward import policy_forward, score

EPISODES = [(i, 7 * i) for i in range(10)]


def play(policy, envs, vocab_size, episodes=EPISODES, seed=1, **kwargs):
    engine = TransformersEngine(policy, envs.num_envs, vocab_size, **kwargs)
    return rollout.rollout(envs, engine, episodes, seed)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "gpt2", "gemma2"])
def test_the_trainer_finds_the_samplers_log_probabilities(
    policy, small_model, make_envs, vocab_size, kind, temperature
):
    if kind != "qwen2":
        policy = small_model(kind)
    rows = play(policy, make_envs(4), vocab_size, EPISODES[:6], temperature=temperature)
    assert any(len(row.turns) > 1 for row in rows)
    with torch.no_grad():
        for row in rows:  # alone, and then all at once
            logprobs, _ = policy_forward(policy, row.segments(), vocab_size, temperature)
            np.testing.assert_allclose(row.logprobs[row.action_mask], logprobs.numpy(), atol=1e-4)
    batch = [segment for row in rows for segment in row.segments()]
    scored = score([(batch, 1)], policy, vocab_size, temperature)
    for row in rows:
        np.testing.assert_allclose(row.logprobs, scored[row.episode], atol=1e-4)
        np.testing.assert_array_equal(row.old_logprobs, row.logprobs)


def test_rows_are_laid_out_as_they_were_played(policy, make_envs, vocab_size):
    envs = make_envs(3)
    rows = play(policy, envs, vocab_size)
    assert [(row.episode, row.task_index) for row in rows] == EPISODES
    env = make_envs(1).envs[0]
    for row in rows:  # play the spans again, in one environment
        state, _ = env.reset(seed=row.task_index, options={"task_index": row.task_index})
        assert len(state) == row.prompt_length
        total = 0.0
        for turn in row.turns:
            assert len(state) == turn.start and row.action_mask[turn.start : turn.end].all()
            state, again, terminated, truncated, _ = env.step(row.tokens[turn.start : turn.end])
            assert turn.reward == again == pytest.approx(row.rewards[turn.end - 1])
            total += turn.reward
        np.testing.assert_array_equal(state, row.tokens)
        assert (row.terminated, row.truncated) == (terminated, truncated)
        assert row.stats["return"] == pytest.approx(total) and row.stats["turns"] == len(row.turns)
        assert row.action_mask.sum() == sum(turn.end - turn.start for turn in row.turns)


def same(one, two):
    return sum(np.array_equal(a.tokens, b.tokens) for a, b in zip(one, two, strict=True))


def test_the_same_seed_gives_the_same_episodes(policy, make_envs, vocab_size):
    once, again = (play(policy, make_envs(4), vocab_size) for _ in range(2))
    assert same(once, again) == len(EPISODES)
    assert same(once, play(policy, make_envs(4), vocab_size, seed=2)) < 2


def test_an_episode_does_not_depend_on_its_neighbours(policy, make_envs, vocab_size):
    """Whatever runs beside it and in whichever slot; but for rounding, which may move a draw over an edge."""
    many = play(policy, make_envs(8), vocab_size)
    few = play(policy, make_envs(3), vocab_size, EPISODES[::-1])
    assert same(many, few[::-1]) >= len(EPISODES) - 1


def test_greedy_spans_are_those_of_generate(policy, make_envs, vocab_size):
    for row in play(policy, make_envs(4), vocab_size, EPISODES[:4], temperature=0.0):
        for turn in row.turns:
            ids = torch.from_numpy(row.tokens[None, : turn.start]).long()
            with torch.no_grad():
                for token in row.tokens[turn.start : turn.end]:
                    best = policy(input_ids=ids).logits[0, -1, :vocab_size].argmax()
                    assert best == token
                    ids = torch.cat([ids, best.view(1, 1)], 1)


def test_nothing_beyond_the_tokenizer_is_sampled(policy, make_envs, vocab_size):
    with torch.no_grad():  # a model that would love to
        policy.get_output_embeddings().weight[vocab_size:] = 50 * policy.get_output_embeddings().weight[:7]
    for row in play(policy, make_envs(4), vocab_size):
        assert row.tokens.max() < vocab_size


def test_spans_end_at_the_bound_or_at_a_stop_token(policy, make_envs, vocab_size):
    envs = make_envs(4)
    stops = envs.envs[0].dialect.stop_token_ids
    with torch.no_grad():
        policy.get_output_embeddings().weight[stops[0]] += 0.5
    lengths = set()
    for row in play(policy, envs, vocab_size):
        for turn in row.turns:
            span = row.tokens[turn.start : turn.end]
            assert not np.isin(span[:-1], stops).any()
            assert len(span) == 12 or span[-1] in stops
            lengths.add(len(span))
    assert 12 in lengths and len(lengths) > 1


def test_a_long_span_grows_the_buffers(policy, make_envs, vocab_size):
    rows = play(policy, make_envs(4, max_turns=1, max_action_tokens=150), vocab_size)
    assert max(row.action_mask.sum() for row in rows) > 64
    for row in rows:
        assert row.logprobs[row.action_mask].all()


def test_sampling_follows_the_distribution():
    logprobs = torch.log(torch.tensor([0.5, 0.0, 0.3, 0.2]))
    noise = torch.linspace(0, 1, 10_001)
    drawn = sample(logprobs.expand(len(noise), 4), noise)
    shares = torch.bincount(drawn, minlength=4) / len(noise)
    torch.testing.assert_close(shares, logprobs.exp(), atol=1e-3, rtol=0)
    kept = sample(logprobs.expand(len(noise), 4), noise, top_p=0.7)
    assert set(kept.tolist()) == {0, 2}
    assert (kept == 0).float().mean() == pytest.approx(0.5 / 0.8, abs=1e-3)


class Editing:
    """A vector environment that edits the new tokens, or the spans, so that its state does not agree with them."""

    def __init__(self, env, edit=lambda new: new, edit_span=lambda span: span):
        self.env, self.envs, self.num_envs, self.reset = env, env.envs, env.num_envs, env.reset
        self.edit, self.edit_span = edit, edit_span

    def send(self, spans, env_ids):
        self.env.send([self.edit_span(span) for span in spans], env_ids)

    def recv(self, *args, **kwargs):
        ids, added, *rest = self.env.recv(*args, **kwargs)
        return ids, [self.edit(new) for new in added], *rest


def drop_first(tokens):
    return tokens[1:]


def change_first(tokens):
    """Put another token first: the length stays."""
    edited = tokens.copy()
    edited[:1] = np.where(edited[:1] == 65, 66, 65)
    return edited


@pytest.mark.parametrize("edits", [{"edit": drop_first}, {"edit": change_first}, {"edit_span": change_first}])
def test_an_environment_that_edits_its_context_is_refused(policy, make_envs, vocab_size, edits):
    with pytest.raises(RuntimeError, match=r"task .*added \d+. The observation has \d+.*context_rewritten"):
        play(policy, Editing(make_envs(2), **edits), vocab_size)


def test_an_environment_that_gives_whole_states_is_refused(policy, make_envs, vocab_size):
    """Its rows would hold every token many times."""
    for num_envs, max_turns in ((1, 1), (3, 3)):
        with pytest.raises(RuntimeError, match="environment with observation='new'"):
            play(policy, make_envs(num_envs, observation="state", max_turns=max_turns), vocab_size)


@pytest.mark.parametrize("kwargs", [{"autoreset_mode": "SameStep"}, {"text": True}], ids=str)
def test_a_vector_environment_that_a_sampler_cannot_play_is_refused(make_envs, kwargs):
    envs = make_envs(2, **kwargs)
    with pytest.raises(SystemExit, match=f"the environment has {next(iter(kwargs))}.*leave .* out"):
        rollout.Sampler(envs, None, seed=1)
    rollout.Sampler(Editing(make_envs(2)), None, seed=1)  # a wrapper that forwards neither is none of them


def test_a_span_of_which_the_environment_took_a_part_is_refused(policy, make_envs, vocab_size):
    """What an engine samples beyond `max_new_tokens` is in no state."""
    envs, engine = make_envs(1), TransformersEngine(policy, 1, vocab_size)
    envs.envs[0].max_action_tokens = 3
    feed, twelve = engine.feed, {"max_new_tokens": 12, "stop_token_ids": []}
    engine.feed = lambda slot, tokens, seed, **room: feed(slot, tokens, **twelve, seed=seed)
    with pytest.raises(RuntimeError, match="took 3 tokens of a span of 12"):
        rollout.rollout(envs, engine, EPISODES[:1], seed=1)


def test_layers_that_are_no_full_attention_are_refused(policy, vocab_size):
    policy.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="cannot sample from this model"):
        TransformersEngine(policy, 2, vocab_size)


def test_logits_that_are_not_finite_are_reported(policy, make_envs, vocab_size):
    with torch.no_grad():
        policy.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="logits"):
        play(policy, make_envs(2), vocab_size)


# --------------------------------------------------------------------------------------------- slots, spans, contexts


def write(engine, slots, most=50):
    """Spans of these slots, by slot."""
    found = {}
    for _ in range(most):
        found |= {span.slot: span for span in engine.step()}
        if set(slots) <= found.keys():
            return found
    raise AssertionError("the spans did not end")


def test_every_slot_has_its_own_stop_tokens(policy, vocab_size):
    """Stop tokens that another slot was fed later change nothing: this one ends at its own first token."""
    engine = TransformersEngine(policy, 2, vocab_size, temperature=0.0)
    prompt = np.arange(8, dtype=np.int32)
    engine.feed(0, prompt, 6, [vocab_size - 1], seed=[1])
    first = int(write(engine, [0])[0].tokens[0])
    engine.release()
    engine.feed(0, prompt, 6, [first], seed=[1])
    engine.feed(1, prompt, 6, [vocab_size - 1, vocab_size - 2], seed=[1])
    spans = write(engine, [0, 1])
    assert spans[0].tokens.tolist() == [first] and len(spans[1].tokens) == 6


def test_new_tokens_wait_for_an_eighth_of_the_rows_that_write(policy, vocab_size):
    """With 15 of 128 slots at work, two that are fed are read at once, whatever the number of idle slots."""
    engine = TransformersEngine(policy, 128, vocab_size)
    for slot in range(15):
        engine.feed(slot, np.arange(5, dtype=np.int32), 60, [], seed=[slot])
    engine.step()
    assert engine.writing.sum() == 15
    for slot in (20, 21):
        engine.feed(slot, np.arange(5, dtype=np.int32), 60, [], seed=[slot])
    engine.step()
    assert not engine.pending and engine.writing.sum() == 17
    engine.feed(22, np.arange(5, dtype=np.int32), 60, [], seed=[22])
    engine.step()
    assert engine.pending  # one for 17 that write waits


def test_entropies_and_top_log_probabilities_are_those_of_the_model(policy, vocab_size):
    engine = TransformersEngine(policy, 2, vocab_size, temperature=0.7, entropies=True, top_logprobs=5)
    prompt = np.arange(20, dtype=np.int32)
    engine.feed(0, prompt, 80, [], seed=[3])  # longer than the first buffers
    span = write(engine, [0], 200)[0]
    tokens = torch.from_numpy(np.concatenate([prompt, span.tokens])).long()
    with torch.no_grad():
        logits = policy(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1, :vocab_size] / 0.7
    expected = torch.log_softmax(logits.float(), -1)
    np.testing.assert_allclose(span.entropies, -(expected.exp() * expected).sum(-1), atol=1e-4)
    top = expected.topk(5, -1)
    np.testing.assert_allclose(span.top_logprobs, top.values, atol=1e-4)
    assert (span.top_tokens == top.indices.numpy()).mean() > 0.95  # equal ones may change places
    plain = TransformersEngine(policy, 1, vocab_size)
    plain.feed(0, prompt, 3, [], seed=[3])
    assert write(plain, [0])[0].entropies is None


def test_a_fork_goes_on_from_the_same_row_with_other_random_numbers(policy, vocab_size):
    """The copy continues as the row itself would under its seed, and neither disturbs the other."""
    prompt, answer = np.arange(12, dtype=np.int32), np.array([7, 8, 9], np.int32)

    def continued(fork):
        engine = TransformersEngine(policy, 4, vocab_size)
        engine.feed(1, prompt, 6, [], seed=[1])
        first = write(engine, [1])[1]
        if fork:
            engine.fork(1, 3, seed=[2])
            engine.feed(3, answer, 9, [])
        engine.feed(1, answer, 5, [])
        return first, write(engine, [1, 3] if fork else [1])

    first, alone = continued(fork=False)
    again, both = continued(fork=True)
    assert first.tokens.tolist() == again.tokens.tolist()
    assert both[1].tokens.tolist() == alone[1].tokens.tolist()
    assert both[3].tokens.tolist()[:5] != both[1].tokens.tolist()
    whole = np.concatenate([prompt, first.tokens, answer, both[3].tokens])
    with torch.no_grad():
        logits = policy(input_ids=torch.from_numpy(whole[None]).long()).logits[0, :, :vocab_size]
    logprobs = torch.log_softmax(logits, -1)
    expected = logprobs[:-1].gather(1, torch.from_numpy(whole[1:, None]).long())[-len(both[3].tokens) :, 0]
    np.testing.assert_allclose(both[3].logprobs, expected, atol=1e-4)


def test_a_slot_that_is_being_sampled_cannot_be_forked(policy, vocab_size):
    engine = TransformersEngine(policy, 3, vocab_size)
    for slot in (0, 1):
        engine.feed(slot, np.arange(12, dtype=np.int32), 6, [], seed=[slot])
        write(engine, [slot])
    engine.feed(0, np.array([7], np.int32), 6, [])
    for _ in range(2):  # its new tokens wait; then it writes
        for pair in (0, 2), (1, 0):
            with pytest.raises(RuntimeError, match="slot 0 is being sampled"):
                engine.fork(*pair, seed=[5])
        engine.step()
    write(engine, [0])
    engine.fork(0, 2, seed=[5])


def test_a_twin_gives_the_same_figures(policy, vocab_size):
    twin = TransformersEngine(policy, 1, vocab_size, 1.0, 0.5, entropies=True, top_logprobs=3).twin(temperature=0.7)
    twin.feed(0, np.arange(12, dtype=np.int32), 4, [], seed=[1])
    span = write(twin, [0])[0]
    assert span.entropies.shape == (4,) and span.top_logprobs.shape == (4, 3) and twin.top_p == 0.5


class Rewriting:
    """A vector environment that forgets its context's first tokens, on purpose, at every second turn."""

    def __init__(self, env):
        self.env, self.envs, self.num_envs, self.contexts = env, env.envs, env.num_envs, {}

    def reset(self, **kwargs):
        states, infos = self.env.reset(**kwargs)
        self.contexts |= {slot: states[slot] for slot in np.flatnonzero(infos["_turn"])}
        return states, infos

    def send(self, spans, slots):
        for slot, span in zip(slots, spans, strict=True):
            self.contexts[slot] = np.concatenate([self.contexts[slot], span])
        self.env.send(spans, slots)

    def recv(self, *args, **kwargs):
        slots, added, *rest, infos = self.env.recv(*args, **kwargs)
        for i, (slot, info) in enumerate(zip(slots, infos, strict=True)):
            self.contexts[slot] = np.concatenate([self.contexts[slot], added[i]])
            if info["turn"] % 2:
                added[i] = self.contexts[slot] = self.contexts[slot][5:]
                info["context_rewritten"] = True
        return slots, added, *rest, infos


def test_a_rewritten_context_begins_a_new_segment(policy, make_envs, vocab_size):
    """Every segment is a row of its own for the trainer, which finds the sampler's log-probabilities in each."""
    rows = play(policy, Rewriting(make_envs(4)), vocab_size, EPISODES[:6])
    assert any(len(row.segment_starts) > 1 for row in rows)
    for row in rows:
        segments = row.segments()
        assert np.concatenate([segment.tokens for segment in segments]).tolist() == row.tokens.tolist()
        assert sum(len(segment.turn_starts) for segment in segments) == len(row.turns)
        for segment in segments:
            assert not row.action_mask[segment.start : segment.start + segment.prompt_length].any()
            if segment.turn_starts:
                assert segment.turn_starts[0] == segment.prompt_length
    batch = [segment for row in rows for segment in row.segments()]
    scored = score([(batch, 1)], policy, vocab_size, 1.0)
    for row in rows:
        np.testing.assert_allclose(row.logprobs, scored[row.episode], atol=1e-4)


def test_all_tokens_after_the_prompts_of_all_segments_can_be_trained_on(policy, make_envs, vocab_size):
    """Table 4 without the loss mask: what a context was rewritten to is a prompt, too."""
    rows = play(policy, Rewriting(make_envs(4)), vocab_size, EPISODES[:6])
    for row in rows:
        row.train_mask = row.after_prompt()
        assert not (row.action_mask & ~row.train_mask).any()
        row.set_turn_advantages(np.ones(len(row.turns)), sampled_only=False)
        assert not row.advantages[~row.train_mask].any()
        for segment in row.segments():
            assert not segment.train_mask[: segment.prompt_length].any()
    batch = [segment for row in rows for segment in row.segments()]
    logprobs, _ = policy_forward(policy, batch, vocab_size, 1.0)
    assert len(logprobs) == sum(row.train_mask.sum() for row in rows)


@pytest.mark.parametrize("twin", [False, True])
def test_weights_that_come_before_a_new_row_is_read_are_those_that_read_it(policy, vocab_size, twin):
    """With --max-staleness a row may be fed, and wait, when an update comes. What older weights computed of the
    instructions is not for it; nor is it for a twin that evaluates."""
    text, stop = np.arange(60) % vocab_size, []
    engine = TransformersEngine(policy, 2, vocab_size, temperature=0.0)
    if twin:
        engine, updated = engine.twin(temperature=0.0), engine
    engine.feed(0, text, 4, stop, seed=1)
    while engine.busy:
        engine.step()
    if not twin:
        engine.feed(0, text, 4, stop, seed=2)
    generator = torch.Generator().manual_seed(0)
    changed = [(n, w + 0.05 * torch.randn(w.shape, generator=generator)) for n, w in policy.named_parameters()]
    (updated if twin else engine).update(changed, 1)
    if twin:
        engine.feed(0, text, 4, stop, seed=2)
    spans = []
    while engine.busy:
        spans += engine.step()
    (span,) = spans
    logits = policy(input_ids=torch.from_numpy(text)[None], use_cache=False).logits[0, -1, :vocab_size]
    assert span.logprobs[0] == pytest.approx(torch.log_softmax(logits.float(), -1).max().item(), abs=1e-4)
