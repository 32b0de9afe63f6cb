"""Checkpoints: what is saved, whatever cuts a save short, and what ends a run early."""

import errno
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import grpo_llm
import pytest
import torch

from llm_utils import distributed
from llm_utils.records import run_files
from llm_utils.recovery import checkpoint
from llm_utils.sampling import engine
from llm_utils.setup import loading
from llm_utils.training import optimizer


def state(iteration):
    return {"algorithm": "x", "args": {}, "run": {"iteration": iteration}}


@pytest.fixture
def saver(policy, tmp_path):
    critic = torch.nn.Linear(4, 1)
    adam = optimizer.Float32AdamW((policy, critic), (1e-3, 1e-3), betas=(0.9, 0.95))
    return checkpoint.Checkpointer(tmp_path / "run", policy, critic, adam)


def test_what_is_saved_is_the_last_boundary(saver, tmp_path):
    saver.boundary(state(3))
    before = saver.policy.get_input_embeddings().weight.detach().clone()
    saver.begin_update()
    with torch.no_grad():
        saver.policy.get_input_embeddings().weight.add_(1)
    assert saver.save()
    loaded = type(saver.policy).from_pretrained(tmp_path / "run" / "checkpoint" / "policy")
    assert (loaded.get_input_embeddings().weight == before).all()
    assert json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_text())["run"]["iteration"] == 3
    assert not list((tmp_path / "run").glob("checkpoint.*"))


def test_a_large_model_is_not_copied_and_not_saved_half_trained(saver, tmp_path):
    saver.small = False
    saver.boundary(state(1))
    assert saver.save()
    saver.begin_update()
    assert not saver.save()
    assert (tmp_path / "run" / "checkpoint" / "state.json").is_file()


def test_a_save_that_was_cut_short_leaves_the_old_checkpoint(saver, tmp_path):
    saver.boundary(state(1))
    saver.save()
    folder = tmp_path / "run" / "checkpoint"
    folder.rename(folder.with_suffix(".old"))  # stopped between the two renames
    assert checkpoint.find(tmp_path / "run") == folder
    (folder.with_suffix(".new")).mkdir()  # stopped while writing the next one
    saver.boundary(state(2))
    assert saver.save()
    assert json.loads((folder / "state.json").read_text())["run"]["iteration"] == 2


def test_wherever_a_save_is_cut_short_there_is_a_whole_checkpoint(saver, tmp_path, monkeypatch):
    """Stop at every call that touches the disk in turn; what `find` finds is always the old or the new one."""
    calls, stop_at = [], [None]

    def watch(owner, name):
        inner = getattr(owner, name)

        def call(*args, **kwargs):
            calls.append(name)
            if len(calls) == stop_at[0]:
                if name in ("rmtree", "save"):  # half done
                    inner(*args, **kwargs) if name == "rmtree" else Path(args[1]).write_bytes(b"half")
                raise OSError("no space left")
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (checkpoint.shutil, "rmtree"),
        (Path, "mkdir"),
        (Path, "rename"),
        (torch, "save"),
        (checkpoint, "save_file"),
        (checkpoint, "save_policy"),
        (checkpoint, "write_json"),
        (checkpoint, "sync"),
        (checkpoint, "sync_one"),
    ):
        watch(owner, name)
    weight = saver.policy.get_input_embeddings().weight
    found = []
    for number in range(1, 40):
        with torch.no_grad():
            weight.fill_(number)
        saver.boundary(state(number))
        stop_at[0] = None
        saver.save()
        with torch.no_grad():
            weight.fill_(number + 1)
        saver.boundary(state(number + 1))
        calls.clear()
        stop_at[0] = number
        try:
            whole = saver.save()
        except OSError:
            whole = False
        stop_at[0] = None
        folder = checkpoint.find(tmp_path / "run")
        iteration = json.loads((folder / "state.json").read_text())["run"]["iteration"]
        loaded = type(saver.policy).from_pretrained(folder / "policy")
        assert (loaded.get_input_embeddings().weight == iteration).all()
        torch.load(folder / "optimizer.pt", weights_only=True)
        found.append(iteration - number)
        if whole:
            break
    assert whole and len(found) > 8 and found[0] == 0 and found[-1] == 1


def test_ctrl_c_while_a_boundary_is_copied_leaves_the_last_one(saver, tmp_path, monkeypatch):
    class Interrupting:
        def __deepcopy__(self, memo):
            raise KeyboardInterrupt

    weight = saver.policy.get_input_embeddings().weight
    for number in (1, 2, 3):
        with torch.no_grad():
            weight.fill_(number)
        if number == 3:
            monkeypatch.setattr(saver.optimizer, "state_dict", lambda: {"adam": Interrupting()})
            with pytest.raises(KeyboardInterrupt):
                saver.boundary(state(number))
        else:
            saver.boundary(state(number))
    assert saver.save()
    loaded = type(saver.policy).from_pretrained(tmp_path / "run" / "checkpoint" / "policy")
    assert (loaded.get_input_embeddings().weight == 2).all()


def fill(saver, number):
    with torch.no_grad():
        saver.policy.get_input_embeddings().weight.fill_(number)


def saved_iteration(saver):
    """The iteration on disk, whose weights are all this number."""
    iteration = json.loads((saver.folder / "state.json").read_text())["run"]["iteration"]
    loaded = type(saver.policy).from_pretrained(saver.folder / "policy")
    assert (loaded.get_input_embeddings().weight == iteration).all()
    return iteration


def after_boundary(saver, number):
    fill(saver, number)
    saver.boundary(state(number))


def test_an_interruption_between_two_renames_and_another_save(saver):
    """The folder is back before anything is removed: whatever stops the second save, there is a checkpoint."""
    after_boundary(saver, 1)
    saver.save()
    saver.folder.rename(saver.folder.with_suffix(".old"))
    after_boundary(saver, 2)
    saver.policy.save_pretrained = None  # the save fails
    with pytest.raises(checkpoint.SaveError):
        saver.save()
    del saver.policy.save_pretrained
    assert saved_iteration(saver) == 1


def test_files_and_folders_are_on_disk_before_they_are_renamed(saver, monkeypatch):
    calls, fsync, rename = [], os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(Path, "rename", lambda *names: (calls.append("rename"), rename(*names))[1])
    after_boundary(saver, 1)
    saver.save()
    before, (after,) = calls[: calls.index("rename")], calls[calls.index("rename") + 1 :]
    new = saver.folder.with_suffix(".new")
    files = ("", "policy", "policy/config.json", "policy/model.safetensors", "critic.safetensors", "optimizer.pt")
    assert {str(new / name) for name in files} <= set(before) and after == str(saver.folder.parent)
    assert any(name.startswith(str(new / "state.json")) for name in before)


@pytest.mark.parametrize("size", [1, 20_000, 200_000], ids=["nothing", "half of the weights", "half of the optimizer"])
def test_a_full_disk_leaves_the_old_checkpoint_and_the_error_names_it(saver, full_disk, size):
    sum(weight.sum() for group in saver.optimizer.weights for weight in group).backward()
    saver.optimizer.step(max_grad_norm=1.0)  # Adam's moments
    after_boundary(saver, 1)
    saver.save()
    sizes = [(saver.folder / name).stat().st_size for name in ("policy/model.safetensors", "optimizer.pt")]
    assert 20_000 < sizes[0] < 200_000 < sizes[1]
    after_boundary(saver, 2)
    full_disk(size)
    with pytest.raises(checkpoint.SaveError, match="could not be written: "):
        saver.save()
    full_disk(2**30)
    assert saver.on_disk() == "the checkpoint of iteration 1 is kept"
    assert saved_iteration(saver) == 1
    assert [path.name for path in saver.folder.parent.iterdir()] == ["checkpoint"]  # half a file takes no space


DAMAGED = ["", "{", "{}", "[]", "[" * 100_000, '{"algorithm": "x", "args": [], "run": {"iteration": 1}}']


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_checkpoint_does_not_keep_the_last_iteration_from_being_written(saver, text):
    after_boundary(saver, 1)
    saver.save()
    (saver.folder / "state.json").write_text(text)
    assert "the checkpoint on disk is damaged: " in saver.on_disk()
    after_boundary(saver, 7)
    with pytest.raises(ZeroDivisionError) as caught, checkpoint.saving_at_exit(saver, {"iteration": 7}):
        1 / 0  # noqa: B018
    assert "resume after the last complete iteration" in caught.value.__notes__[0] and saved_iteration(saver) == 7
    (saver.folder / "state.json").write_text(text)
    saver.policy.save_pretrained = None  # the save fails
    with pytest.raises(ZeroDivisionError) as caught, checkpoint.saving_at_exit(saver, {"iteration": 7}):
        1 / 0  # noqa: B018
    (note,) = caught.value.__notes__
    assert "could not be written" in note and "is damaged" in note and "--resume" not in note


def interrupted(saver):
    """A checkpoint as it lies between the two renames of a save. Returns (where it is, where it belongs)."""
    after_boundary(saver, 1)
    saver.save()
    return saver.folder.rename(saver.folder.with_suffix(".old")), saver.folder


def resume(saver):
    return checkpoint.load_args(grpo_llm.Args(resume=str(saver.folder.parent)), "x")


def test_a_second_process_is_refused_before_it_touches_anything(saver, claimed):
    """It put the old checkpoint back while the first process stood between its two renames, which then failed."""
    old, folder = interrupted(saver)
    with claimed(folder.parent):
        with pytest.raises(SystemExit, match="another process uses this folder"):
            resume(saver)
        assert old.is_dir() and not folder.exists()
    resume(saver)
    assert folder.is_dir() and not old.exists()


def test_with_several_processes_the_first_one_puts_a_checkpoint_back(saver, monkeypatch):
    old, folder = interrupted(saver)
    monkeypatch.setenv("RANK", "1")
    rename, mine = Path.rename, []
    monkeypatch.setattr(Path, "rename", lambda *names: (mine.append(threading.current_thread()), rename(*names))[1])
    first = threading.Timer(0.3, old.rename, [folder])
    first.start()
    resume(saver)
    first.join()
    assert mine == [first] and folder.is_dir()


def test_a_folder_that_cant_be_written_is_named_as_such(saver):
    interrupted(saver)
    (saver.folder.parent / ".lock").mkdir()  # Permissions keep no root out
    with pytest.raises(SystemExit, match="run: cannot write into this folder: .*Is a directory.*lock"):
        resume(saver)


def test_a_folder_that_is_no_run_stays_as_it_is(tmp_path):
    with pytest.raises(SystemExit, match="there is no checkpoint"):
        checkpoint.load_args(grpo_llm.Args(resume=str(tmp_path)), "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", [*DAMAGED, json.dumps(state(1) | {"args": {"checkpoint_every": "8"}})])
def test_a_damaged_state_is_refused_on_resume(saver, text):
    after_boundary(saver, 1)
    saver.save()
    (saver.folder / "state.json").write_text(text)
    with pytest.raises(SystemExit, match="--resume .*: the checkpoint is damaged: "):
        checkpoint.load_args(grpo_llm.Args(resume=str(saver.folder.parent)), "x")
    if text in DAMAGED:
        with pytest.raises(SystemExit, match="--resume .*: the checkpoint is damaged"):
            checkpoint.load(saver.folder.parent, saver.critic, saver.optimizer)


@pytest.mark.parametrize("damage", ["cut", "empty", "a list", "numbers"])
@pytest.mark.parametrize("name", ["optimizer.pt", "critic.safetensors", "policy/model.safetensors"])
def test_damaged_weights_are_refused_on_resume(saver, policy_folder, name, damage):
    after_boundary(saver, 1)
    saver.save()
    path = saver.folder / name
    if damage in ("cut", "empty"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 if damage == "cut" else 0])
    else:
        torch.save([1] if damage == "a list" else {"adam": 1, "copies": 2}, path)
    with pytest.raises(SystemExit, match="--resume.* is damaged, or does not fit this model"):
        if name.startswith("policy"):
            loading.load_policy(policy_folder, torch.device("cpu"), resumed=saver.folder / "policy")
        checkpoint.load(saver.folder.parent, saver.critic, saver.optimizer)


def test_a_full_disk_at_the_exit_hides_nothing(saver, full_disk):
    after_boundary(saver, 1)
    saver.save()
    after_boundary(saver, 2)
    full_disk(1)
    with pytest.raises(ZeroDivisionError) as caught, checkpoint.saving_at_exit(saver, {}):
        1 / 0  # noqa: B018
    full_disk(2**30)
    (note,) = caught.value.__notes__
    assert "could not be written" in note and "iteration 1 is kept; resume with" in note and "--resume" in note
    for write in (saver.save, lambda: checkpoint.save_model(saver.policy, saver.folder.parent / "model", None),
                  lambda: run_files.write_json(saver.folder.parent / "summary.json", {})):  # fmt: skip
        words = r"stopped: .*File too large.*\n.*iteration 1 is kept; resume with\n.*--resume"
        with pytest.raises(SystemExit, match=words), checkpoint.saving_at_exit(saver, {}):
            full_disk(1)
            write()
        full_disk(2**30)
    assert [path.name for path in saver.folder.parent.iterdir()] == ["checkpoint"]  # no half of a model


def test_a_full_disk_is_named_whatever_the_library_says(saver, monkeypatch):
    after_boundary(saver, 1)
    saver.policy.save_pretrained = None  # it fails in words of its own
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda folder: SimpleNamespace(free=5_000))
    with pytest.raises(checkpoint.SaveError, match="the disk is full, make room: 'NoneType'"):
        saver.save()
    with pytest.raises(SystemExit, match="the model could not be written: the disk is full, make room: 'NoneType'"):
        with checkpoint.saving_at_exit(saver, {}):
            checkpoint.save_model(saver.policy, saver.folder, None)


def test_where_a_model_cannot_be_written_the_checkpoint_is(saver):
    """The folder --out may lie on another disk, or the tokenizer may be at fault: what was learned isn't lost."""
    after_boundary(saver, 3)
    with pytest.raises(SystemExit) as caught, checkpoint.saving_at_exit(saver, {}):
        checkpoint.save_model(saver.policy, saver.folder.parent / "model", "/nowhere/tokenizer/x")
    assert "make room" not in str(caught.value) and "\nresume after the last complete iteration" in str(caught.value)
    assert saved_iteration(saver) == 3
    assert (saver.folder.parent / "model" / "model.safetensors").is_file()  # they are whole


def test_a_disk_that_only_gives_is_said_without_advice(saver):
    with pytest.raises(SystemExit, match=r"^stopped: Read-only file system: summary.json\n"):
        with checkpoint.saving_at_exit(saver, {}):
            raise OSError(errno.EROFS, "Read-only file system", "summary.json")


def test_a_bug_in_a_save_keeps_its_traceback_and_is_not_tried_again(saver):
    after_boundary(saver, 1)
    tried = []
    saver.policy.save_pretrained = lambda *args, **kwargs: tried.append(1) or {}["a bug"]
    with pytest.raises(checkpoint.SaveError, match="could not be written: 'a bug'") as caught:
        with checkpoint.saving_at_exit(saver, {}):
            saver.save()
    assert tried == [1] and isinstance(caught.value.__cause__, KeyError)


def test_a_disk_that_cannot_take_a_checkpoint_is_refused_at_the_start(saver, monkeypatch):
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda folder: SimpleNamespace(free=5_000))
    with pytest.raises(SystemExit, match=r"0\.0 MB are free there, but checkpoints take 0\.\d MB; make room"):
        checkpoint.Checkpointer(saver.folder.parent / "deeper" / "run", saver.policy, None, saver.optimizer)
    one = checkpoint.copied_bytes(saver.policy.parameters())
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1.5 * one))
    with pytest.raises(SystemExit):  # two of them stand side by side
        checkpoint.Checkpointer(saver.folder.parent, saver.policy, None, saver.optimizer)
    saver.folder.mkdir(parents=True)
    checkpoint.Checkpointer(saver.folder.parent, saver.policy, None, saver.optimizer)


@pytest.mark.parametrize("error", [ValueError("a bug"), torch.OutOfMemoryError("full"), engine.EngineDied("gone")])
def test_an_exception_goes_on_as_it_is_with_a_note(saver, error):
    after_boundary(saver, 3)
    with pytest.raises(type(error)) as caught, checkpoint.saving_at_exit(saver, {}):
        saver.begin_update()
        fill(saver, 4)
        raise error
    assert caught.value is error
    (python,) = distributed.launcher()
    assert error.__notes__ == [
        f"resume after the last complete iteration with\n  {python} {sys.argv[0]} --resume {saver.folder.parent}"
    ]
    assert saved_iteration(saver) == 3


def test_a_run_that_stops_itself_is_saved_too(saver, capfd):
    after_boundary(saver, 3)
    with pytest.raises(SystemExit, match="9 of 10 episodes are invalid"), checkpoint.saving_at_exit(saver, {}):
        raise SystemExit("9 of 10 episodes are invalid")
    assert saved_iteration(saver) == 3
    assert "resume after the last complete iteration with" in capfd.readouterr().err


def test_a_large_model_is_saved_until_an_update_begins(saver):
    saver.small = False
    for number, updating in ((1, False), (2, True), (3, False)):
        after_boundary(saver, number)
        with pytest.raises(ValueError) as caught, checkpoint.saving_at_exit(saver, {}):
            if updating:
                saver.begin_update()
                fill(saver, 7)
            raise ValueError
        assert ("the checkpoint of iteration 1 is kept; resume" in caught.value.__notes__[0]) == updating
        assert saved_iteration(saver) == (1 if updating else number)


def test_where_nothing_was_saved_it_is_said(saver):
    saver.small = False
    with pytest.raises(ValueError) as caught, checkpoint.saving_at_exit(saver, {}):
        raise ValueError
    folder = saver.folder.parent
    assert caught.value.__notes__ == [f"there is no checkpoint yet; the run's files are in {folder}"]


def test_weights_that_give_no_finite_logits_do_not_replace_the_checkpoint(saver, made_up_rows):
    after_boundary(saver, 1)
    saver.save()
    after_boundary(saver, 2)
    stopped = pytest.raises(SystemExit, match="stopped: the policy's logits(.|\n)*iteration 1 is kept; resume")
    with stopped, checkpoint.saving_at_exit(saver, {"iteration": 2}):
        raise FloatingPointError("the policy's logits are not finite", [])
    assert saved_iteration(saver) == 1
    with pytest.raises(SystemExit, match="the loss is nan"), checkpoint.saving_at_exit(saver, {"iteration": 2}):
        raise FloatingPointError("the loss is nan", made_up_rows(1, 2))
    assert saved_iteration(saver) == 2
    assert len((saver.folder.parent / "not_finite.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_signals_end_a_run_once_and_are_given_back(saver, monkeypatch, capfd, number, code, word):
    """A second one, sent while the files are written, changes nothing."""
    after_boundary(saver, 1)
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    save = torch.save

    def save_and_signal(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        save(*args)

    monkeypatch.setattr(torch, "save", save_and_signal)
    with pytest.raises(SystemExit) as caught, checkpoint.saving_at_exit(saver, {}):
        os.kill(os.getpid(), number)
    assert caught.value.code == code and saved_iteration(saver) == 1
    assert before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert f"{word}; resume" in capfd.readouterr().err


def test_a_signal_that_got_lost_ends_the_run_at_the_next_boundary(saver):
    """Python drops what a handler raises in a finalizer."""
    with pytest.raises(SystemExit) as caught, checkpoint.saving_at_exit(saver, {}):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            pass
        after_boundary(saver, 1)
    assert caught.value.code == 143 and saved_iteration(saver) == 1


def test_a_signal_that_is_ignored_stays_ignored(saver):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with checkpoint.saving_at_exit(saver, {}):
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_forked_process_does_not_save(saver):
    after_boundary(saver, 1)
    with checkpoint.saving_at_exit(saver, {}):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    assert not saver.folder.exists()


def test_loaded_weights_lie_as_those_of_a_new_model(policy_folder):
    """In a file's memory they begin anywhere; products then round otherwise than before the run was resumed."""
    policy = loading.load_policy(policy_folder, torch.device("cpu"))
    assert {weight.data_ptr() % 64 for weight in policy.parameters()} == {0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_counts_as_small_is_what_is_copied(policy, dtype):
    """bf16 weights have float32 copies: 14 bytes each, not 6."""
    from llm_utils.training.optimizer import Float32AdamW

    policy = policy.to(getattr(torch, dtype))
    adam = Float32AdamW([policy], [1e-3], betas=(0.9, 0.95))
    policy(torch.arange(5)[None]).logits.sum().backward()
    adam.step(1.0)
    saver = checkpoint.Checkpointer(Path("unused"), policy, None, adam)

    def size(content):
        if isinstance(content, torch.Tensor):
            return content.nbytes
        values = content.values() if isinstance(content, dict) else content if isinstance(content, list) else []
        return sum(map(size, values))

    head = policy.get_output_embeddings().weight.nbytes  # a tied one stands twice in the state dict, once in memory
    counted = checkpoint.copied_bytes(p for p in policy.parameters() if p.requires_grad)
    assert size(saver._content()) - head == pytest.approx(counted, rel=0.01)


def test_a_run_that_never_began_is_not_resumed(learn, policy_folder, capsys):
    words = ["--model", policy_folder, "--tokenizer", "byte", "--num-threads", 1, "--no-cuda", "--num-envs", 4]
    words += ["--total-episodes", 8, "--episodes-per-iteration", 8, "--num-minibatches", 1, "--group-size", 4]
    Path("runs").mkdir()
    with pytest.raises(SystemExit, match="an episode cannot begin: .*max_context_tokens"):
        learn("grpo_llm", *words, "--env-kwargs", '{"max_context_tokens": 10}')
    assert "resume" not in capsys.readouterr().err and not list(Path("runs").iterdir())


def test_only_the_folder_of_a_run_without_results_is_removed(saver):
    after_boundary(saver, 0)
    run_dir = saver.folder.parent
    for summary, more, kept in (({"eval/success_first": 0.5}, "events.out.tfevents.1", True), ({}, "notes.txt", True),
                                ({}, "events.out.tfevents.1", False)):  # fmt: skip
        run_dir.mkdir(exist_ok=True)
        (run_dir / more).touch()
        with pytest.raises(SystemExit, match="^it cannot begin$"):
            with checkpoint.saving_at_exit(saver, {"iteration": 0, "summary": summary}):
                raise SystemExit("it cannot begin")
        assert run_dir.exists() == kept and not saver.folder.exists()
        (run_dir / more).unlink(missing_ok=True)


def test_a_disk_without_room_for_the_saved_model_is_refused(saver, monkeypatch, tmp_path):
    trained = [p for module in (saver.policy, saver.critic) for p in module.parameters()]
    two, model = 2 * checkpoint.copied_bytes(trained), sum(4 * p.numel() for p in saver.policy.parameters())
    modules = saver.policy, saver.critic, saver.optimizer
    for free, refused in ((two + model - 1, True), (two + model, False)):
        monkeypatch.setattr(checkpoint.disk, "free_bytes", lambda folder, free=free: free)
        checkpoint.Checkpointer(tmp_path / "run", *modules)  # enough without the model
        if refused:
            with pytest.raises(SystemExit, match=f"the saved model {model / 1e6:.1f} MB; .*: --no-save-model"):
                checkpoint.Checkpointer(tmp_path / "run", *modules, with_model=True)
        else:
            checkpoint.Checkpointer(tmp_path / "run", *modules, with_model=True)
