"""Compiled training passes: the same results and names, few graphs, a sampler that does not use them."""

import json
import shutil
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import torch as safetensors
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AttentionInterface
from transformers.integrations import sdpa_attention

import llm_utils.run
from llm_utils import arguments
from llm_utils.sampling.transformers_engine import TransformersEngine
from llm_utils.setup import loading, threads
from llm_utils.training import cudnn_attention, forward
from llm_utils.training.compiled import compile_training

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("error:--compile")


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def load(folder, checkpointing=False, lora_rank=0, device=CPU):
    args = SimpleNamespace(lora_rank=lora_rank, gradient_checkpointing="on" if checkpointing else "off")
    torch.manual_seed(0)
    model = loading.load_policy(folder, device, args, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(p, std=0.3)
    return model


def rows_of(vocab_size, count, length, prompt=1):
    """Rows of random tokens, the last five of them trained. Rows with a longer prompt share it."""
    rng = np.random.default_rng(length)
    tokens = rng.integers(vocab_size, size=(count, length), dtype=np.int32)
    tokens[:, :prompt] = tokens[0, :prompt]
    mask = np.arange(length) >= length - 5
    return [SimpleNamespace(tokens=row, prompt_length=prompt, task_index=0, train_mask=mask) for row in tokens]


def results(model, rows, vocab_size, entropy=True):
    """What the score and the update compute: log-probabilities twice, entropies, the gradient of a sum."""
    with torch.no_grad():
        scored, _ = forward.policy_forward(model, rows, vocab_size, 0.7)
    logprobs, entropies = forward.policy_forward(model, rows, vocab_size, 0.7, entropy)
    (logprobs.sum() + (entropies.sum() if entropy else 0)).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return scored, logprobs.detach(), entropies.detach(), flat


def assert_equal(one, two, tolerance=1e-5):
    for a, b in zip(one, two, strict=True):
        assert (a - b).norm() <= tolerance * a.norm()


def compare(folder, vocab_size, backend, checkpointing, lora_rank, shapes, device=CPU):
    plain, model = (load(folder, checkpointing, lora_rank, device) for _ in range(2))
    names = list(model.state_dict())
    compile_training(model, backend)
    assert list(model.state_dict()) == names == list(plain.state_dict())
    for shape in shapes:
        rows = rows_of(vocab_size, *shape)
        tolerance = 1e-5 if device == CPU else 1e-4
        assert_equal(results(plain, rows, vocab_size), results(model, rows, vocab_size), tolerance)


SHAPES = [(3, 40), (2, 61), (5, 33), (1, 64), (1, 90), (4, 60, 55), (6, 43, 38)]  # the last two are trees


@pytest.mark.parametrize(
    ("checkpointing", "lora_rank"), [(False, 0), (True, 0), pytest.param(True, 2, marks=pytest.mark.slow)]
)
def test_compiled_layers_give_the_same_in_few_graphs(policy_folder, vocab_size, checkpointing, lora_rank):
    if lora_rank:
        pytest.importorskip("peft")
    counter = CompileCounterWithBackend("eager")
    compare(policy_folder, vocab_size, counter, checkpointing, lora_rank, SHAPES)
    # Layers: with and without gradients, for several rows, for one, and for trees. Log-probabilities: with and without.
    assert 2 < counter.frame_count <= 6 + 4


def test_a_head_in_parts_is_compiled_too(policy_folder, vocab_size, monkeypatch):
    monkeypatch.setattr(forward, "LOGITS_BYTES", 4 * vocab_size * 7)
    counter = CompileCounterWithBackend("eager")
    compare(policy_folder, vocab_size, counter, True, 0, SHAPES[:2])
    assert any(node.op == "call_function" and "log_softmax" in str(node.target)
               for graph in counter.graphs for node in graph.graph.nodes)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(("checkpointing", "lora_rank"), [(False, 0), (True, 2)])
def test_compiled_code_gives_the_same(policy_folder, vocab_size, backend, checkpointing, lora_rank):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    if lora_rank:
        pytest.importorskip("peft")
    compare(policy_folder, vocab_size, backend, checkpointing, lora_rank, SHAPES[:1] + SHAPES[-1:])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_code_rounds_to_bf16_where_the_layers_do(policy_folder, vocab_size):
    if loading.trial_failure(loading.TRIAL):
        pytest.skip("this processor has no bf16")
    plain, model = (load(policy_folder, True).bfloat16() for _ in range(2))
    compile_training(model)
    rows = rows_of(vocab_size, *SHAPES[0])
    assert_equal(results(plain, rows, vocab_size)[:3], results(model, rows, vocab_size)[:3])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(("checkpointing", "lora_rank"), [(False, 0), (True, 2)])
def test_compiled_code_gives_the_same_on_a_gpu(policy_folder, vocab_size, checkpointing, lora_rank):
    if lora_rank:
        pytest.importorskip("peft")
    compare(policy_folder, vocab_size, "inductor", checkpointing, lora_rank, SHAPES, torch.device("cuda"))


def test_a_sampler_of_the_same_model_does_not_use_the_graphs(policy_folder, vocab_size):
    model, counter, logprobs = load(policy_folder, checkpointing=True), CompileCounterWithBackend("eager"), []
    rows = rows_of(vocab_size, 2, 20)
    plain = results(model, rows, vocab_size)
    for compiled in (False, True):
        if compiled:
            compile_training(model, counter)
        engine = TransformersEngine(model, 2, vocab_size)
        for slot in range(2):
            engine.feed(slot, rows[slot].tokens, 6, [vocab_size], seed=[slot])
        spans = []
        while engine.busy:
            spans += engine.step()
        logprobs.append(np.concatenate([span.logprobs for span in sorted(spans, key=lambda span: span.slot)]))
    assert counter.frame_count == 0
    np.testing.assert_array_equal(*logprobs)
    assert_equal(plain, results(model, rows, vocab_size))  # after sampling, which has left training mode
    assert counter.frame_count > 0


def fail(graph, inputs):
    raise RuntimeError("no kernel for this layer\nand more")


FAIL_IN_BACKWARD = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=fail)


@pytest.mark.parametrize(("backend", "checkpointing"), [(fail, False), (fail, True), (FAIL_IN_BACKWARD, True)])
def test_layers_that_cannot_be_compiled_run_as_before_with_one_warning(
    policy_folder, vocab_size, backend, checkpointing
):
    plain, model = (load(policy_folder, checkpointing) for _ in range(2))
    compile_training(model, backend)
    rows = rows_of(vocab_size, 3, 40)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert_equal(results(plain, rows, vocab_size), results(model, rows, vocab_size))
    said = [str(warning.message) for warning in said if "--compile" in str(warning.message)]
    assert len(said) == 2 and "layers cannot be compiled" in said[0] and "log-probabilities" in said[1]
    assert all("no kernel for this layer" in text and "\n" not in text for text in said)


def test_a_lack_of_memory_is_no_reason_to_go_on(policy_folder, vocab_size):
    def no_memory(graph, inputs):
        def run(*args):
            raise torch.OutOfMemoryError("no memory left")

        return run

    model = load(policy_folder)
    compile_training(model, no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        results(model, rows_of(vocab_size, 3, 40), vocab_size)


def test_a_graph_of_long_rows_has_cudnn_attention(policy_folder, vocab_size, monkeypatch):
    """Kernels are chosen when a graph is made, so long rows need a graph of their own."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention.sdpa_attention_forward)
    monkeypatch.setattr(cudnn_attention, "capability", lambda device: (9, 0))
    monkeypatch.setattr(cudnn_attention, "DTYPES", (torch.float32, torch.float64))
    plain, model = (load(policy_folder, True) for _ in range(2))
    counter = CompileCounterWithBackend("eager")
    compile_training(model, counter)
    attends = []
    for length in (600, 1700):
        rows, before = rows_of(vocab_size, 2, length), len(counter.graphs)
        assert_equal(results(plain, rows, vocab_size), results(model, rows, vocab_size))
        targets = {
            str(node.target) for graph in counter.graphs[before:]
            for part in graph.modules() if isinstance(part, torch.fx.GraphModule) for node in part.graph.nodes
        }  # fmt: skip
        attends.append(any("_sdpa_kernel" in target for target in targets))
        assert any("scaled_dot_product_attention" in target for target in targets)
    assert attends == [False, True]


SMALL = ["--num-envs", 4, "--num-threads", 1, "--env-kwargs", '{"max_turns": 3, "max_action_tokens": 12}']
SMALL += ["--episodes-per-iteration", 4, "--num-minibatches", 1, "--total-episodes", 8, "--eval-episodes", 2]
RUNS = [
    ("ppo_llm", ["--gradient-checkpointing", "on", "--kl-coef", 0.1, *SMALL]),
    ("grpo_llm", ["--lora-rank", 2, "--group-size", 2, *SMALL]),
    ("sft_llm", ["--num-steps", 2, "--batch-size", 8, "--num-demonstrations", 16, "--eval-demonstrations", 4,
                 "--expert-share", 1, "--num-workers", 0, "--warmup-steps", 1]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("script", "options"), RUNS)
def test_learners_train_with_it(learn, policy_folder, monkeypatch, script, options):
    """The saved model and the checkpoint have the names of a run without it. The critic and the reference are compiled
    too."""
    if "--lora-rank" in options:
        pytest.importorskip("peft")
    counter, names = CompileCounterWithBackend("eager"), []
    monkeypatch.setattr(arguments, "check_machine", lambda args: None)  # it refuses a CPU
    compiled = []
    for module in (loading, llm_utils.run):
        monkeypatch.setattr(
            module, "compile_training", lambda model: compiled.append(model) or compile_training(model, counter)
        )
    for flags in ([], ["--compile"]):
        folder = learn(script, "--model", policy_folder, "--tokenizer", "byte", *options, *flags)
        assert json.loads((folder / "summary.json").read_text())["finished"]
        files = [*folder.glob("model/*.safetensors"), *folder.glob("checkpoint/**/*.safetensors")]
        names.append([list(safetensors.load_file(file)) for file in sorted(files)])
        assert bool(counter.frame_count) == bool(flags)
    assert names[0] == names[1] and names[0]
    assert len(compiled) == (3 if script == "ppo_llm" else 1)


def test_the_number_of_threads_stays(monkeypatch):
    """Another number would be another graph."""
    monkeypatch.setattr(threads, "SECONDS", 0)
    monkeypatch.setattr(threads.Load, "others", lambda self: 0.0)
    threads.use(SimpleNamespace(num_threads=0, compile=True))
    before = torch.get_num_threads()
    monkeypatch.setattr(threads.Load, "threads", lambda self, others: before + 1)
    threads.follow()
    assert torch.get_num_threads() == before
    threads.use(SimpleNamespace(num_threads=1))
