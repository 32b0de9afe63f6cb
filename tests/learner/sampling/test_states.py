"""Layers with states: many growing episodes have the log-probabilities that the trainer computes for whole rows."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from llm_utils.sampling import graphs, slot_states, slots
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.setup import loading, model_checks
from llm_utils.training import forward

VOCABULARY, SLOTS = 200, 5
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Their outputs are normalised, which blows rounding up if weights are large and heads small.
DELTA_NET = {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 8}
DELTA_NET |= {"initializer_range": 0.1, "eos_token_id": None}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16}
NEMOTRON |= {"head_dim": 8, "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "time_step_min": 0.5}
FAMILIES = {
    "qwen3_5_text": ("Qwen3_5Text", {**DELTA_NET, "linear_num_key_heads": 2}),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", {**DELTA_NET, **EXPERTS, "linear_num_key_heads": 2}),
    "qwen3_next": ("Qwen3Next", {**DELTA_NET, **EXPERTS, "linear_num_key_heads": 2}),
    "olmo_hybrid": ("OlmoHybrid", {**DELTA_NET, "linear_num_key_heads": 4}),
    "lfm2": ("Lfm2", {"full_attn_idxs": [1, 3]}),
    "lfm2_moe": ("Lfm2Moe", {**EXPERTS, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1}),
    "granitemoehybrid": ("GraniteMoeHybrid", {**MAMBA, **EXPERTS, "layer_types": ["mamba", "attention"] * 2}),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1, 3]}),
    "falcon_h1": ("FalconH1", {**MAMBA, "mamba_d_ssm": 64, "head_dim": 8}),
    "nemotron_h": ("NemotronH", NEMOTRON),
}


def config_of(name, **kwargs):
    """The config of a tiny model of a family."""
    kind, own = FAMILIES[name]
    size = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32_768, "pad_token_id": 0}
    return getattr(transformers, kind + "Config")(**{**size, "initializer_range": 0.3, **own, **kwargs})


def model_of(name, **kwargs):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name, **kwargs)).float().eval()
    loading.use_configured_time_steps(model)
    return model


class Player:
    """Episodes in an engine's slots: their tokens, and the log-probabilities of those that were sampled."""

    def __init__(self, model, **kwargs):
        self.model, self.rng = model, np.random.default_rng(0)
        self.engine = TransformersEngine(model, SLOTS, VOCABULARY, **kwargs)
        self.rows, self.ended = {}, []

    def begin(self, slot, tokens):
        if slot in self.rows:
            self.ended.append(self.rows[slot])
        empty = SimpleNamespace(tokens=np.zeros(0, np.int32), train_mask=np.zeros(0, bool), logprobs=[], turns=0)
        self.rows[slot] = empty
        self.feed(slot, tokens, seed=[slot, len(self.ended)])

    def feed(self, slot, tokens, **kwargs):
        self.append(slot, tokens, False)
        self.engine.feed(slot, tokens, int(self.rng.integers(2, 9)), [VOCABULARY], **kwargs)

    def append(self, slot, tokens, sampled):
        row = self.rows[slot]
        row.tokens = np.append(row.tokens, tokens).astype(np.int32)
        row.train_mask = np.append(row.train_mask, np.full(len(tokens), sampled))

    def draw(self, size):
        return self.rng.integers(VOCABULARY, size=size).astype(np.int32)

    def play(self, turns, longest=30):
        """Play these turns of all episodes, with new tokens of different lengths between them."""
        while self.engine.busy:
            for span in self.engine.step():
                row = self.rows[span.slot]
                self.append(span.slot, span.tokens, True)
                row.logprobs += span.logprobs.tolist()
                row.turns += 1
                if row.turns < turns:
                    self.feed(span.slot, self.draw(int(self.rng.integers(1, longest))))

    def fork(self, slot, new):
        if new in self.rows:
            self.ended.append(self.rows[new])
        self.engine.fork(slot, new, [slot, new])
        row = self.rows[slot]
        self.rows[new] = SimpleNamespace(**{**vars(row), "logprobs": list(row.logprobs)})
        for each in (slot, new):
            self.feed(each, self.draw(3))

    def check(self):
        rows = [*self.ended, *self.rows.values()]
        for i, row in enumerate(rows):
            row.prompt_length, row.task_index = 1, i
        with torch.no_grad():
            trained = forward.policy_forward(self.model, rows, VOCABULARY, 1.0)[0]
        torch.testing.assert_close(torch.tensor(sum((row.logprobs for row in rows), [])), trained, atol=1e-4, rtol=0)


@pytest.fixture
def small(monkeypatch):
    """Stores from 8 tokens on, so that rows move; no memory is kept; forwards of at most 48 new tokens."""
    monkeypatch.setattr(slots.SlotModel, "CAPACITY", 8)
    monkeypatch.setattr(slots.SlotModel, "PREFILL_TOKENS", 48)
    monkeypatch.setattr(slots.SlotCache, "KEPT_BYTES", 0)


@pytest.mark.parametrize("stores", ["one store", "small stores"])
@pytest.mark.parametrize("name", FAMILIES)
def test_sampler_and_trainer_agree_whatever_becomes_of_a_row(request, name, stores):
    """Turns of different lengths, a beginning that episodes share, equal prompts, forks, and second episodes."""
    if stores == "small stores":
        request.getfixturevalue("small")
    player = Player(model_of(name))
    shared, prompt = player.draw(70), player.draw(40)
    for slot, own in enumerate((5, 9, 2)):
        player.begin(slot, np.append(shared, player.draw(own)))
    for slot in (3, 4):
        player.begin(slot, prompt)
    player.play(turns=3)
    player.fork(0, 2)
    player.fork(3, 1)
    player.play(turns=5)
    for slot in (1, 4):  # the same beginning again: a state of it is not there any more
        player.begin(slot, np.append(prompt, player.draw(slot)))
    player.feed(0, player.draw(110))
    player.play(turns=6)
    player.check()


@pytest.fixture
def recorded(monkeypatch):
    """Forwards of all rows as a GPU has them, replayed: how many there were. What they replay stays where it is."""
    counts, places, call = {"recorded": 0, "replayed": 0}, {}, graphs.Graphs.__call__

    def record(run, *_):
        def replay():
            counts["replayed"] += 1
            run()

        counts["recorded"] += 1
        return replay

    def call_and_look(self, forward, store, *args):
        logits = call(self, forward, store, *args)
        for graph in store.graphs.values():
            now = {key: state.data_ptr() for key, state in store.states.items()}
            assert places.setdefault(id(graph), (graph, now))[1] == now
        return logits

    monkeypatch.setattr(slots.SlotModel, "RECORDED", ("cpu",))
    monkeypatch.setattr(graphs.Graphs, "STEP", 8)
    monkeypatch.setattr(graphs.Graphs, "__call__", call_and_look)
    monkeypatch.setattr(graphs, "record", record)
    return counts


@pytest.mark.parametrize("room", ["stores that grow", "room for all"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", "falcon_h1"])
def test_a_replayed_forward_changes_only_the_states_of_its_rows(name, room, recorded):
    """Those of rows that wait for new tokens stay, and a state is not advanced by the trial before a recording."""
    player = Player(model_of(name), **({"longest_row": 400} if room == "room for all" else {}))
    for slot in range(SLOTS):
        player.begin(slot, player.draw(3 + 4 * slot))
    player.play(turns=4, longest=4)
    player.fork(1, 2)
    player.begin(4, player.draw(20))
    player.play(turns=6, longest=4)
    player.check()
    assert recorded["replayed"] > recorded["recorded"] > 1


def test_a_forward_that_cannot_be_recorded_leaves_the_states(monkeypatch, recorded):
    def fail(run, device):
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "refuse_to_wait", fail)
    player = Player(model_of("qwen3_5_text"))
    for slot in range(2):
        player.begin(slot, player.draw(9))
    with pytest.warns(UserWarning, match="cannot be captured"):
        player.play(turns=3, longest=3)
    player.check()


def test_rows_of_different_lengths_run_in_few_parts_without_padding():
    rng = np.random.default_rng(0)
    for sizes in ([7, 7, 7], [1000, 600], [1], *(rng.integers(1, 500, size=30) for _ in range(20))):
        done, parts = np.zeros(len(sizes), int), list(slot_states.equal_parts(np.array(sizes)))
        for rows, length in parts:
            done[rows] += length
        assert done.tolist() == list(sizes) and len(parts) <= np.log2(max(sizes)) + 1
        assert len(parts) == 1 or len(set(sizes)) > 1


def test_equal_prompts_are_computed_once(monkeypatch):
    model, sizes = model_of("lfm2"), []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, __: sizes.append(ids[0].shape))
    player = Player(model)
    prompts = [player.draw(70)] * 3 + [player.draw(41)] * 2
    for slot, prompt in enumerate(prompts):
        player.begin(slot, prompt)
    player.engine.step()
    assert sum(rows * columns for rows, columns in sizes) == 70 + 41


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1"])
def test_running_rows_keep_their_states_under_new_weights(name):
    """As they keep keys and values: the same as a cache of transformers with the tokens of each version."""
    model, rng = model_of(name), np.random.default_rng(0)
    text = rng.integers(VOCABULARY, size=30)
    engine, cache = TransformersEngine(model, 2, VOCABULARY), transformers.DynamicCache(config=model.config)
    for slot in range(2):
        list(engine.slots.prefill({slot: text[: 20 - slot]}))
    ids = torch.from_numpy(text)[None]
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache, use_cache=True)
        engine.update([(name, 1.1 * weight) for name, weight in model.named_parameters()], version=1)
        for t in range(20, 30):
            expected = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits[0, -1]
            found = engine.slots.decode(np.array([0]), text[t : t + 1])[0]
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_checkpointing_changes_no_gradient(name):
    model, rng, found = model_of(name), np.random.default_rng(0), []
    rows = [rng.integers(VOCABULARY, size=size).astype(np.int32) for size in (12, 20)]
    rows = [
        SimpleNamespace(tokens=row, train_mask=np.arange(len(row)) > 4, prompt_length=5, task_index=0) for row in rows
    ]
    for checkpointing in (False, True):
        if checkpointing:
            loading.enable_gradient_checkpointing(model)
        logprobs = forward.policy_forward(model, rows, VOCABULARY, 1.0)[0]
        logprobs.sum().backward()
        found.append((logprobs.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-3)
    player = Player(model)  # the trainer left layers in training mode
    player.begin(0, rows[0].tokens)
    player.play(turns=2)
    player.check()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_bytes_of_a_row_are_known_without_weights(name):
    """Those of its states, and of the keys and values of the layers that have them."""
    player = Player(model_of(name))
    player.begin(0, player.draw(9))
    player.play(turns=1)
    (store,) = player.engine.slots.cache.stores.values()
    expected = sum(state[0].nbytes for state in store.states.values())
    assert slot_states.state_bytes(config_of(name), torch.float32) == expected > 0
    keys_and_values = sum(x[0, :, 0].nbytes for layer in store.layers.values() for x in layer)
    assert slots.bytes_per_token(config_of(name), torch.float32) == keys_and_values > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_no_tree_of_rows_is_made(name):
    model, prompt = model_of(name), np.arange(40, dtype=np.int32)
    row = SimpleNamespace(tokens=np.append(prompt, 3), prompt_length=40)
    assert forward.token_trees(model, [row] * 4) == ([], [])
    assert not model_checks.layers_of(model.config, 100).refused


def test_slots_without_states_refuse_a_model_that_keeps_them():
    with pytest.raises(ValueError, match=r"SlotModel keeps no states, .*lfm2.* has convolution layers: .*make_slots"):
        slots.SlotModel(model_of("lfm2"), 2, VOCABULARY)


def test_nobody_is_told_to_install_kernels_of_gpus_on_a_cpu(tmp_path, caplog):
    name, said = "transformers.integrations.hub_kernels", []
    log = transformers.logging.get_logger(name)
    model_of("lfm2").save_pretrained(tmp_path)
    loading.load_policy(tmp_path, torch.device("cpu"))
    handler = type("Handler", (logging.Handler,), {"emit": lambda self, record: said.append(record.getMessage())})()
    log.addHandler(handler)
    with caplog.at_level(logging.WARNING, logger=name):  # other tests may have turned transformers down
        log.warning("`x` is falling back to its reference PyTorch implementation because `x` is not installed.")
        log.warning("another")
    log.removeHandler(handler)
    assert said == ["another"]


FLAGS = ["--tokenizer", "byte", "--num-envs", 4, "--env-kwargs", '{"max_turns": 2, "max_action_tokens": 6}']
FLAGS += ["--episodes-per-iteration", 8, "--group-size", 4, "--total-episodes", 8, "--num-minibatches", 1]
FLAGS += ["--eval-episodes", 0, "--checkpoint-every", 0, "--num-threads", 1, "--gradient-checkpointing", "on"]


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize(
    ("name", "layers"), [("lfm2", "convolution"), ("qwen3_5_text", "gated delta net"), ("falcon_h1", "Mamba")]
)
def test_one_iteration_of_grpo_says_what_its_prompts_cost(learn, tmp_path, vocab_size, capsys, name, layers, lora_rank):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model_of(name, vocab_size=vocab_size).save_pretrained(tmp_path / "model")
    run = learn("grpo_llm", "--model", tmp_path / "model", *FLAGS, *(["--lora-rank", lora_rank] if lora_rank else []))
    cost = f"{name} has {layers} layers: prompts are not shared in training, so a group of 4 computes its prompt 4"
    assert cost in capsys.readouterr().err
    assert EventAccumulator(str(run)).Reload().Scalars("sampler/gap_max")[0].value < 1e-4
