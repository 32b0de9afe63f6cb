"""Several processes give the gradients, the weights and the files of one; torchrun starts those of two tests."""

import hashlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import grpo_llm
import numpy as np
import ppo_llm
import processes
import pytest
import torch
from safetensors import torch as safetensors

from llm_utils import distributed
from llm_utils.run import Run
from llm_utils.setup import loading
from llm_utils.setup.loading import load_policy
from llm_utils.training import forward
from llm_utils.training.compiled import compile_training
from llm_utils.training.optimizer import Float32AdamW
from llm_utils.trajectory import Trajectory, Turn

LEARNER = Path(__file__).parents[2] / "learner"
SMALL = ["--env-kwargs", '{"max_turns": 3, "max_action_tokens": 24}', "--num-envs", "8", "--num-threads", "1"]
SMALL += ["--episodes-per-iteration", "16", "--num-minibatches", "2", "--eval-episodes", "4", "--eval-every", "0"]
SMALL += ["--microbatch-tokens", "700", "--save-model", "--no-preflight"]


# ---------------------------------------------------------------------------------------------- what the workers do


def made_up_rows(lengths, vocab_size):
    """Rows of two turns each, of these lengths, with made-up figures in all arrays."""
    rng, rows = np.random.default_rng(0), []
    for episode, length in enumerate(lengths):
        row = Trajectory(episode, episode, 5, rng.integers(vocab_size, size=length).astype(np.int32))
        for start, end, reward in ((5, length // 2, 0.0), (length // 2 + 3, length - 1, 1.0)):
            logprobs, versions = rng.normal(-5, 0.3, end - start), np.zeros(end - start, np.int32)
            row.turns.append(Turn(start, end, reward, logprobs.astype(np.float32), versions))
        row.finalize()
        for name in ("advantages", "returns", "values"):
            getattr(row, name)[row.action_mask] = rng.normal(size=row.action_mask.sum())
        rows.append(row)
    return rows


def gradients(modules):
    """The whole gradients of the modules, which are cleared."""
    whole = [torch.cat([distributed.full(p.grad).flatten() for p in module.parameters()]) for module in modules]
    for module in modules:
        module.zero_grad()
    return whole


def compare_gradients(folder, vocab_size):
    """One process, all rows at once, against two processes with microbatches of two rows. Returns relative differences.

    In the second batch one row is so long that the other process has more rows, and more microbatches, than its owner;
    in the third there is no row for the other process.
    """
    cpu, differences, several = torch.device("cpu"), {}, []

    def as_run(args, policy, critic=None):
        names = {name: None for name in Run.__dataclass_fields__} | {"args": args, "policy": policy, "critic": critic}
        return Run(**names | {"device": cpu, "vocab_size": vocab_size})

    def cases():
        """Name, modules, and the backward pass of all cases; the modules are split where processes have joined."""
        torch.manual_seed(0)
        policy = load_policy(folder, cpu)
        critic = ppo_llm.Critic(folder, ppo_llm.Args(), torch.float32)
        torch.nn.init.normal_(critic.head.weight)
        distributed.shard(critic.eval(), cpu)
        for kind in ("token", "sequence", "constant"):
            args = grpo_llm.Args(loss_aggregation=kind, ratio="turn" if kind == "sequence" else "token")
            yield f"grpo {kind}", [policy], args, lambda r, a: grpo_llm.backward(r, a, as_run(a, policy))
        backward = lambda r, a: ppo_llm.backward(r, a, as_run(a, policy, critic))  # noqa: E731
        yield "ppo", [policy, critic], ppo_llm.Args(ent_coef=0.01), backward

    batches = [[23, 60, 31, 44, 17, 52, 38, 29], [300, 20, 22, 25, 27, 30, 33, 35], [26]]
    batches = [made_up_rows(lengths, vocab_size) for lengths in batches]
    one = {}
    for name, modules, args, backward in cases():
        for i, rows in enumerate(batches):
            args.microbatch_tokens = 10**6
            one[name, i] = backward(rows, args), gradients(modules)
    distributed.setup(cuda=False)
    for name, modules, args, backward in cases():
        for i, rows in enumerate(batches):
            args.microbatch_tokens = 120
            mine = distributed.scatter(rows)
            several.append(sum(row.episode >= 0 for row in mine))
            logs, expected = backward(mine, args), one[name, i]
            for module, ours, theirs in zip(("policy", "critic"), gradients(modules), expected[1], strict=False):
                differences[f"{name}, batch {i}, {module}"] = float((ours - theirs).norm() / theirs.norm())
            differences[f"{name}, batch {i}, logs"] = max(abs(logs[key] - expected[0][key]) for key in logs)
    return differences, several


def step_of_a_critic_with_two_dtypes(folder):
    """On GPUs a critic's backbone is bf16 and its head float32. Here float64: any CPU can. Returns the change, and how
    many times as large the gradient of three backward passes is as that of one."""
    torch.manual_seed(0)
    critic = ppo_llm.Critic(folder, ppo_llm.Args(), torch.float64)
    torch.nn.init.normal_(critic.head.weight)  # else the backbone would have no gradient
    critic = distributed.shard(critic, torch.device("cpu"))
    before = distributed.full(critic.head.bias).item()
    critic(torch.arange(12)[None]).mean().backward()
    one = torch.cat([distributed.full(p.grad).flatten() for p in critic.parameters()]).norm().item()
    critic.zero_grad()
    optimizer = Float32AdamW([critic], [0.1], betas=(0.9, 0.95))
    for _ in range(3):
        critic(torch.arange(12)[None]).mean().backward()
    three = optimizer.step(1e9)[0]
    return before - distributed.full(critic.head.bias).item(), three / one


def head_in_parts(folder, vocab_size):
    """Relative differences of split weights' gradients from those of whole ones, the head at once and in parts."""
    rows = made_up_rows([20, 25], vocab_size)

    def each(**kwargs):
        model = load_policy(folder, torch.device("cpu"), dtype=torch.float32, float32_head=True, **kwargs)
        for size in (2**29, 4 * vocab_size * 7):
            forward.LOGITS_BYTES = size
            for _ in range(2):  # gradients of microbatches add up
                forward.policy_forward(model, rows, vocab_size, 1.0)[0].sum().backward()
            yield gradients([model])[0]

    whole, _ = each(whole=True)
    return [float((split - whole).norm() / whole.norm()) for split in each()]


def first_step(folder, vocab_size):
    """Log-probabilities that the first optimizer step fills in, and the gap, in two processes: how far they are from
    those of one process that scores all rows. In the second batch that step has one row for two processes."""
    args, cpu, found = grpo_llm.Args(microbatch_tokens=120, num_minibatches=2), torch.device("cpu"), []

    def train(args, rows):
        names = {name: None for name in Run.__dataclass_fields__} | {"args": args, "vocab_size": vocab_size}
        run = Run(**names | {"policy": load_policy(folder, cpu), "device": cpu, "state": {"iteration": 0}})
        run.score_policy(rows)
        unscored = sum(row.unscored for row in rows)
        for minibatch in run.minibatches(rows, 1):
            grpo_llm.backward(minibatch, args, run)
        return [np.concatenate([row.old_logprobs for row in rows] or [[]]), run.gap, unscored]

    batches = [[23, 60, 31, 44, 17, 52, 38, 29], [300, 20]]
    one = [train(replace(args, reject_ratio=9.0), made_up_rows(lengths, vocab_size)) for lengths in batches]
    distributed.setup(cuda=False)
    for lengths, (logprobs, gap, none) in zip(batches, one, strict=True):
        ours = train(args, made_up_rows(lengths, vocab_size) if distributed.rank() == 0 else [])
        if distributed.rank() == 0:
            largest = max(np.abs(ours[0] - logprobs).max(), *(abs(ours[1][name] - gap[name]) for name in gap))
            found.append((float(largest), none, ours[2]))
    return found


def compiled_layers(folder, vocab_size, backend):
    """Relative differences of split, compiled layers' gradients from those of whole ones, without and with gradient
    checkpointing."""
    rows, cpu = made_up_rows([20, 25], vocab_size), torch.device("cpu")
    kwargs = {"dtype": torch.float32, "compiled": True}

    def gradient(**kwargs):
        model = load_policy(folder, cpu, **kwargs)
        for _ in range(2):  # the second time, graphs are used again
            forward.policy_forward(model, rows, vocab_size, 1.0)[0].sum().backward()
        return gradients([model])[0]

    whole = gradient(**kwargs, whole=True)
    loading.compile_training = partial(compile_training, backend=backend)
    args = [SimpleNamespace(lora_rank=0, gradient_checkpointing=on) for on in ("off", "on")]
    return [float((gradient(**kwargs, args=a) - whole).norm() / whole.norm()) for a in args]


def worker(rank, port, task, *arguments):
    """What one of two processes does; the first one writes the answer."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    processes.print_to(f"log{rank}.txt")
    torch.set_num_threads(1)
    answer = {}
    if task == "gradients":
        answer["differences"], answer["rows"] = compare_gradients(*arguments)
        answer["critic"] = step_of_a_critic_with_two_dtypes(arguments[0])
        answer["head in parts"] = head_in_parts(*arguments)
    elif task == "first step":
        answer = first_step(*arguments)
    elif task == "compiled":
        from torch._dynamo.testing import CompileCounterWithBackend  # slow

        distributed.setup(cuda=False)
        answer["graphs"] = CompileCounterWithBackend("aot_eager")
        answer["compiled"] = compiled_layers(*arguments, answer["graphs"])
        answer["graphs"] = answer["graphs"].frame_count
    elif task == "train":  # runs, one after the other; processes can join only once
        distributed.setup(cuda=False)
        distributed.setup, distributed.leave = lambda cuda: None, lambda: None
        for script, *options in arguments:
            sys.argv = [str(LEARNER / script), *options]
            runpy.run_path(sys.argv[0], run_name="__main__")
    if rank == 0:
        Path("answer.json").write_text(json.dumps(answer))


# ------------------------------------------------------------------------------------------------------- the tests


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """pair(task, *arguments): start two processes of `worker` in an empty folder, as torchrun would, and quicker.

    Returns a function that waits for their end.
    """
    monkeypatch.chdir(tmp_path)
    started = []

    def start(*arguments):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        started.extend(processes.forked(worker, rank, port, *arguments) for rank in range(2))

        def wait():
            for rank, process in enumerate(started):
                process.join(280)
                assert process.exitcode == 0, Path(f"log{rank}.txt").read_text()

        return wait

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def torchrun(tmp_path, monkeypatch):
    """torchrun(*arguments): start two processes in an empty folder; returns the Popen object of their parent."""
    monkeypatch.chdir(tmp_path)
    folders = [LEARNER, LEARNER.parent / "envs", LEARNER.parent / "tools", os.environ.get("PYTHONPATH", "")]
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, folders))}
    started = []

    def start(*arguments):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        started.append(
            subprocess.Popen(
                [*command, *map(str, arguments)], env=os.environ | settings, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=120)


def finished(process, returncode=0):
    output, _ = process.communicate(timeout=280)
    assert process.returncode == returncode, output
    return output


def learn(monkeypatch, script, *options):
    """Run a learner in this process; returns the newest run's folder."""
    monkeypatch.setattr(sys, "argv", [str(LEARNER / script), *map(str, options)])
    runpy.run_path(str(LEARNER / script), run_name="__main__")
    return max(Path("runs").iterdir(), key=lambda folder: folder.stat().st_mtime)


def newest(name):
    return max(Path("runs").glob(f"*__{name}__*"), key=lambda folder: folder.stat().st_mtime)


def trained_weights(run_dir):
    weights = safetensors.load_file(run_dir / "model" / "model.safetensors")
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


def start_weights():
    weights = safetensors.load_file(LEARNER.parent / "envs/agent_r1/policies/MultihopWorld-v0/model.safetensors")
    return torch.cat([weights[name].float().flatten() for name in sorted(weights)])


def assert_same_run(one, other):
    """Same weights but for rounding, the same episodes, the same evaluation.

    In norms: Adam makes a whole step of a gradient that is nothing but rounding, as a bias of the keys may have.
    """
    weights, others = trained_weights(one), trained_weights(other)
    assert (weights - others).norm() < 2e-3 * (weights - start_weights()).norm()
    rows, other_rows = ((run / "trajectories.jsonl").read_text().splitlines() for run in (one, other))
    assert [json.loads(row)["tokens"] for row in rows] == [json.loads(row)["tokens"] for row in other_rows]
    summary, other_summary = (json.loads((run / "summary.json").read_text()) for run in (one, other))
    for name in ("eval/success_first", "eval/success_last", "eval/exact_match_last"):
        assert summary[name] == other_summary[name]


def test_balanced_shares_are_complete_and_of_similar_size():
    rng = np.random.default_rng(0)
    for parts in (1, 2, 5):
        sizes = rng.integers(1, 1000, size=40).tolist()
        lists = distributed.balanced(sizes, parts)
        assert len(lists) == parts and sorted(sum(lists, [])) == list(range(40))
        totals = [sum(sizes[i] for i in part) for part in lists]
        assert max(totals) - min(totals) <= max(sizes)
    assert sorted(map(len, distributed.balanced([9, 1, 1, 1], 2))) == [1, 3]
    assert sorted(map(len, distributed.balanced([0, 0, 0, 0], 4))) == [1, 1, 1, 1]


def test_gradients_do_not_depend_on_microbatches_and_processes(pair, policy_folder, vocab_size):
    pair("gradients", policy_folder, vocab_size)()
    answer = json.loads(Path("answer.json").read_text())
    assert len(answer["differences"]) == 27
    for name, difference in answer["differences"].items():
        assert difference < (1e-4 if name.endswith("logs") else 1e-6), name
    assert answer["rows"] == 4 * [4, 1, 1]  # rank 0's; the long row weighs as much as seven short ones
    assert answer["critic"] == pytest.approx([0.1, 3], rel=1e-3)  # the first step of Adam is the learning rate
    assert len(answer["head in parts"]) == 2 and max(answer["head in parts"]) < 1e-5


def test_the_first_step_fills_in_log_probabilities_from_all_processes(pair, policy_folder, vocab_size):
    pair("first step", policy_folder, vocab_size)()
    (largest, *counts), (other_largest, *other_counts) = json.loads(Path("answer.json").read_text())
    assert max(largest, other_largest) < 1e-5
    assert (counts, other_counts) == ([0, 4], [0, 1])  # rows left unscored, in one process and in two


@pytest.mark.slow
def test_compiled_layers_may_be_split(pair, policy_folder, vocab_size):
    pair("compiled", policy_folder, vocab_size)()
    answer = json.loads(Path("answer.json").read_text())
    assert len(answer["compiled"]) == 2 and max(answer["compiled"]) < 1e-5
    assert 2 <= answer["graphs"] <= 4


def test_two_processes_train_as_one_and_resume_what_one_began(pair, monkeypatch):
    options = [*SMALL, "--total-episodes", "48", "--checkpoint-every", "2"]  # the last one is of iteration 2 of 3
    options += ["--replay-successes", "0.5"]
    one = learn(monkeypatch, "grpo_llm.py", *options, "--exp-name", "one")
    half = Path(shutil.copytree(one, f"runs/{one.name.replace('__one__', '__half__')}"))
    shutil.rmtree(half / "model")
    lora = [*options, "--total-episodes", "16", "--lora-rank", "2", "--kl-coef", "0.1", "--old-logprobs", "trainer"]
    runs = [
        ["grpo_llm.py", *options, "--exp-name", "two"],
        ["grpo_llm.py", "--resume", str(half)],
        ["grpo_llm.py", *lora, "--exp-name", "two_lora"],
    ]
    wait = pair("train", *runs)
    one_lora = learn(monkeypatch, "grpo_llm.py", *lora, "--exp-name", "one_lora")
    wait()
    start = start_weights()
    assert (trained_weights(one) - start).abs().max() > 5e-4
    assert_same_run(one, newest("two"))
    assert_same_run(one, half)
    summaries = [json.loads((run_dir / "summary.json").read_text()) for run_dir in (one, newest("two"), half)]
    assert summaries[0]["replayed_episodes"] > 0 and len({one["replayed_episodes"] for one in summaries}) == 1
    assert (trained_weights(one_lora) - start).abs().max() > 1e-4
    assert_same_run(one_lora, newest("two_lora"))


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_with_which_one_process_goes_on(torchrun, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = [*SMALL, "--total-episodes", "48", "--checkpoint-every", "0", "--critic-warmup", "0"]
    process = torchrun(LEARNER / "ppo_llm.py", *options, "--exp-name", "stopped")
    whole = learn(monkeypatch, "ppo_llm.py", *options, "--exp-name", "whole")
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        files = list(Path("runs").glob("*stopped*/trajectories.jsonl"))
        if files and '"iteration": 1' in files[0].read_text():
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output = finished(process, returncode=1)
    stopped = newest("stopped")
    command = f"{distributed.shell_name(Path(sys.executable).with_name('torchrun'))} --nproc-per-node 2 {LEARNER}"
    assert f"interrupted; resume after the last complete iteration with\n  {command}" in output
    assert f"--resume {stopped}" in output
    assert json.loads((stopped / "checkpoint" / "state.json").read_text())["run"]["iteration"] < 3
    learn(monkeypatch, "ppo_llm.py", "--resume", stopped)
    assert_same_run(whole, stopped)


def test_an_error_in_one_process_ends_all(torchrun):
    Path("script.py").write_text(
        "from llm_utils import distributed\n"
        "distributed.setup(cuda=False)\n"
        "assert distributed.rank() == 0, 'something is wrong in the second process'\n"
        "distributed.all_reduce_sum(1.0)\n"  # waits for the second process
        "print('the first process went on')\n"
    )
    output = finished(torchrun("script.py"), returncode=1)
    assert "something is wrong in the second process" in output
    assert "the first process went on" not in output


def test_more_processes_than_rows_are_refused_before_any_work(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "9")
    with pytest.raises(
        SystemExit, match="--num-minibatches 2 leaves fewer episodes per step than there are processes"
    ):
        learn(monkeypatch, "grpo_llm.py", *SMALL)
    assert not Path("runs").exists()


LEAVES = """
import os, sys, tempfile
import torch, torch.distributed as dist
from llm_utils import distributed
parent = os.getpid()
busy = [os.fork() for _ in range(2)]
if not all(busy):
    while os.getppid() == parent: pass
    os._exit(0)
torch.set_num_threads(1)
ends = []
for _ in range(40):
    children, store = [], os.path.abspath(tempfile.mkdtemp(dir=".") + "/store")
    for rank in range(2):
        if not (child := os.fork()):
            sys.setswitchinterval(10)  # this thread keeps the interpreter: those of gloo wait
            dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
            group = dist.group.WORLD  # as the modules of a model that is split hold it
            for _ in range(20):
                rows = [torch.ones(1000) for _ in range(3)]
                dist.all_gather(rows[:2], rows[2])
                dist.all_reduce(rows[0])
                del rows
            distributed.leave()
            sys.exit()
        children.append(child)
    ends += [os.waitpid(child, 0)[1] for child in children]
for child in busy:
    os.kill(child, 9)
sys.exit(any(ends))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_thread_that_runs_is_seen_before_a_process_ends():
    data = b"x" * (200 << 20)
    thread = threading.Thread(target=lambda: hashlib.sha256(data).digest())  # without the interpreter's lock
    thread.start()
    seen = False
    while thread.is_alive() and not seen:
        seen = distributed._other_threads_run()
    thread.join()
    assert seen


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_process_at_rest_leaves_at_once():
    script = "from llm_utils import distributed; import time; start = time.monotonic(); "
    script += "rests = distributed._wait_for_other_threads(60.0); print(rests, time.monotonic() - start)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    rests, seconds = done.stdout.split()
    assert rests == "True" and float(seconds) < 30


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_process_aborts_at_its_end(tmp_path):
    """pytorch/pytorch#179291: without the pause in `leave` 5 of 60 pairs of processes did."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, str(script)], env=environment, cwd=tmp_path, timeout=600).returncode == 0


NEVER_RESTS = """
import os, sys, tempfile, threading, time
import torch.distributed as dist
from llm_utils import distributed
store = os.path.abspath(tempfile.mkdtemp(dir=".") + "/store")
read, write = os.pipe()
for rank in range(2):
    if not os.fork():
        dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
        if rank:
            threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
        distributed.leave()
        os.write(write, b"%f " % time.monotonic())
        os._exit(0)
ends = [os.wait()[1] for _ in range(2)]
first, second = sorted(map(float, os.read(read, 100).split()))
print(second - first)
sys.exit(any(ends) or second - first > 5)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_processes_leave_together_where_a_thread_of_one_never_rests(tmp_path):
    script = tmp_path / "never_rests.py"
    script.write_text(NEVER_RESTS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, str(script)], env=environment, cwd=tmp_path, timeout=600).returncode == 0
