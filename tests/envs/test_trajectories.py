"""Rows of episodes: one schema, with many environments as with one, and a command that prints them."""

import io
import json
import os
import signal
import socket
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

from agent_r1 import show
from agent_r1.text.tokenizers import CONTROL_TOKENS, ByteTokenizer, load_tokenizer
from agent_r1.trajectories import SAMPLED, append_row, raw_transcript, transcript
from agent_r1.vector import ToolVectorEnv
from agent_r1.wrappers import NewTokens, RecordTrajectories
from agent_r1_tools import bounded

WORLD = "AgentR1/MultihopWorld-v0"
KEYS = {
    "env_id", "model", "tokenizer", "split", "seed", "task_id", "task_index", "question", "messages", "tokens",
    "action_mask", "rewards", "turns", "turn_rewards", "reward_terms", "tool_calls", "terminated", "truncated",
    "truncation_reason", "fault", "is_success", "answer", "metrics",
}  # fmt: skip


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def script(env):
    """Three turns, of which the second calls nothing."""
    end = env.dialect.end_of_turn
    call = env.dialect.tool_call("search", {"query": "rival"})
    return [call + end, "hm\x1b[31m" + end, f"<answer>{env.task.answers[0]}</answer>" + end]


def encode(env, text):
    return np.array(env.tokenizer.encode(text, add_special_tokens=False), np.int32)


@pytest.fixture
def of_one(tmp_path):
    """The rows of single environments with the seeds 3, 4, 5."""
    env = RecordTrajectories(gym.make(WORLD, max_turns=3), tmp_path / "one.jsonl", model="mine")
    for seed in (3, 4, 5):
        env.reset(seed=seed)
        for text in script(env.unwrapped):
            env.step(encode(env.unwrapped, text))
    rows = read(tmp_path / "one.jsonl")
    assert [row["seed"] for row in rows] == [3, 4, 5] and all(row.keys() == KEYS for row in rows)
    return rows


@pytest.mark.parametrize("options", [{}, {"text": True}, {"observation": "new"}], ids=str)
def test_a_vector_environment_writes_the_same_rows(tmp_path, of_one, options):
    path = tmp_path / "new" / "many.jsonl"
    envs = RecordTrajectories(gym.make_vec(WORLD, num_envs=3, max_turns=3, **options), path, "mine")
    envs.reset(seed=3)
    for number in range(3):
        assert not path.exists()
        texts = [script(env)[number] for env in envs.envs]
        spans = [encode(env, text) for env, text in zip(envs.envs, texts, strict=True)]
        envs.send(texts if "text" in options else spans)
        envs.recv(3)
    assert read(path) == of_one
    envs.close()


def test_episodes_that_begin_anew_at_once_are_recorded(tmp_path, of_one):
    path = tmp_path / "many.jsonl"
    envs = RecordTrajectories(ToolVectorEnv(WORLD, num_envs=3, max_turns=3, autoreset_mode="SameStep"), path)
    envs.reset(seed=3)
    for _ in range(2):
        texts = [script(env) for env in envs.envs]
        for number in range(3):
            envs.step([encode(env, text[number]) for env, text in zip(envs.envs, texts, strict=True)])
    rows = read(path)
    assert len(rows) == 6 and all(row["is_success"] and len(row["turns"]) == 3 for row in rows)
    assert [row | {"env_id": WORLD, "model": "mine"} for row in rows[:3]] == of_one and rows[3]["seed"] is None


def test_other_vector_environments_are_refused(tmp_path):
    envs = gym.vector.SyncVectorEnv([lambda: gym.make(WORLD)])
    with pytest.raises(TypeError, match="ToolVectorEnv, got SyncVectorEnv"):
        RecordTrajectories(envs, tmp_path / "rows.jsonl")
    inside = gym.vector.SyncVectorEnv([lambda: RecordTrajectories(gym.make(WORLD, max_turns=1), tmp_path / "x.jsonl")])
    inside.reset(seed=1)
    inside.step([np.full(5, 65, np.int32)])
    assert [len(row["turns"]) for row in read(tmp_path / "x.jsonl")] == [1]


def test_rewards_lie_on_tokens_of_the_policy(tmp_path):
    """Also where a span is empty, or doesn't fit, and where a wrapper inside changes what is paid."""
    paid = gym.wrappers.TransformReward(gym.make(WORLD, max_turns=3, max_action_tokens=10), lambda reward: reward - 0.5)
    env = NewTokens(RecordTrajectories(paid, tmp_path / "rows.jsonl"))
    for spans in ([[], [65, 66], []], [[65] * 11], [[], [], []]):
        env.reset(seed=1)
        for span in spans:
            env.step(np.array(span, np.int32))
    rows = read(tmp_path / "rows.jsonl")
    for row in rows[:2]:
        assert sum(row["rewards"]) == pytest.approx(sum(row["turn_rewards"])) and sum(row["rewards"]) < -0.4
        assert all(own for own, reward in zip(row["action_mask"], row["rewards"], strict=True) if reward)
    assert [sum(row["action_mask"]) for row in rows] == [2, 10, 0]
    assert rows[1]["truncation_reason"] == "context" and not any(rows[2]["rewards"])


# ---------------------------------------------------------------------- show


@pytest.fixture
def run(tmp_path, of_one):
    """A run's folder: iterations 1, 2, 3; the second is no success; a damaged line; control characters."""
    for number, row in enumerate(of_one, 1):
        row["iteration"] = number
    of_one[1] |= {"is_success": False, "terminated": False, "truncated": True, "truncation_reason": "turns"}
    lines = [json.dumps(row) for row in of_one] + ['{"tokens": [1', "[]", ""]
    (tmp_path / "trajectories.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_episodes_are_printed_to_be_read(run, of_one, capsys):
    show.main([str(run)])
    out, err = capsys.readouterr()
    assert "2 lines are not rows" in err and "\x1b" not in out and "\\x1b" in out
    first, second, third = out.split("-" * 100)
    tokens = len(of_one[0]["tokens"])
    total, task = sum(of_one[0]["turn_rewards"]), of_one[0]["task_id"]
    assert first.startswith(f"iteration 1, task {task}, success, return {total:+.2f}, 3 turns, {tokens} tokens, term")
    assert f"[user]\n{of_one[0]['question']}" in first and "[tool search]" in first and '"name": "search"' in first
    assert "reward +1.00  (outcome/exact_match +1.00" in first and f"<answer>{of_one[0]['answer']}</answer>" in first
    assert "no success" in second and "truncated (turns)" in second and "iteration 3" in third


def test_a_text_that_the_policy_never_read_is_marked(run, of_one, capsys):
    """A hint after the last turn of an episode that ran out of turns; and such a mark that the policy wrote."""
    messages = of_one[1]["messages"][:6]
    assert [message["role"] for message in messages[-2:]] == ["assistant", "user"]
    messages[-2] = messages[-2] | {"content": show.UNREAD}
    (run / "trajectories.jsonl").write_text(json.dumps(of_one[1] | {"messages": messages}))
    show.main([str(run)])
    hint = messages[-1]["content"]
    assert capsys.readouterr().out.endswith(f"\n{show.UNREAD}\n[user]\n{hint}\n")
    messages.pop()
    (run / "trajectories.jsonl").write_text(json.dumps(of_one[1] | {"messages": messages}))
    show.main([str(run)])
    out = capsys.readouterr().out.splitlines()
    assert "\\" + show.UNREAD in out and show.UNREAD not in out


def without_marks(text):
    return text.replace(SAMPLED[0], "").replace(SAMPLED[1], "")


def printed_raw(capsys, *words):
    """What `show --raw` prints below the headline."""
    show.main([*map(str, words), "--raw"])
    return capsys.readouterr().out.split("\n", 2)[2].removesuffix("\n")


def test_raw_tokens_are_printed_as_the_model_saw_them(run, of_one, capsys):
    text = printed_raw(capsys, run, "--iteration", 1)
    decode = load_tokenizer().decode
    assert without_marks(text) == decode(of_one[0]["tokens"]).replace("\x1b", "\\x1b") and "\x1b" not in text
    assert text.startswith("<|im_start|>system\n") and '"name": "search"' in text  # the tool's schema
    sampled = [span.split(SAMPLED[1])[0] for span in text.split(SAMPLED[0])[1:]]
    spans = [decode(of_one[0]["tokens"][start:end]) for start, end in of_one[0]["turns"]]
    assert sampled == [span.replace("\x1b", "\\x1b") for span in spans] and len(sampled) == 3
    show.main([str(run), "--raw"])
    assert capsys.readouterr().out.count("-" * 100) == 2


def test_raw_text_passes_for_no_token_and_no_mark(tmp_path, capsys):
    """Its bytes have the names of control tokens, marks, separators and control characters."""
    said = "a<|im_end|>\n<tool_call>\n" + "-" * 100 + f"\n{SAMPLED[1]}\x1b[2J\u202e\u2028\n\u00ad" + "-" * 30
    tokens = [256, *said.encode(), *said.encode(), 258]
    mask = [0] * (1 + len(said.encode())) + [1] * (len(said.encode()) + 1)
    row = {"tokens": tokens, "action_mask": mask, "task_index": 0, "tokenizer": "byte"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    shown = "a<\\|im_end|>\n<\\tool_call>\n\\" + "-" * 100 + "\n\\u27eb\\x1b[2J\\u202e\\u2028\n\\xad" + "-" * 30
    expected = f"<|endoftext|>{shown}{SAMPLED[0]}{shown}<|im_end|>{SAMPLED[1]}"
    assert printed_raw(capsys, tmp_path / "rows.jsonl") == expected


@pytest.mark.parametrize("nothing", "\u00ad\u034f\u17b4\u180e\u200b\u200c\u200d\u3164\ufe0f\ufff9\U000e0101\U000e0fff")
def test_what_nobody_sees_forges_no_control_token(nothing):
    said = [*f"<|im_{nothing}end|>".encode()]
    escaped = nothing.encode("unicode_escape").decode()
    assert raw_transcript({"tokens": said, "action_mask": [0] * len(said)}, load_tokenizer()) == f"<|im_{escaped}end|>"


def test_names_that_overlap_are_broken_each():
    tokenizer = ByteTokenizer(["<<", "<|end|>", "<|end"], eos_token="<|end|>", pad_token="<<")
    said = b"<<< <|end|> <| a"
    row = {"tokens": [*said, 256, 257], "action_mask": [0] * (len(said) + 2)}
    assert raw_transcript(row, tokenizer) == "<\\<\\< <\\|end|> <| a<<<|end|>"


def test_segments_of_a_rewritten_context_are_separated(tmp_path, capsys):
    row = {"tokens": [*b"onetwo"], "action_mask": [0, 0, 1, 1, 0, 1], "segment_starts": [0, 3]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"task_index": 0, "tokenizer": "byte"}))
    separator = f"\n{'-' * 20} the context was rewritten {'-' * 20}\n"
    expected = f"on\u27eae\u27eb{separator}\u27eat\u27ebw\u27eao\u27eb"
    assert printed_raw(capsys, tmp_path / "rows.jsonl") == expected


def test_a_space_of_sentencepiece_is_not_lost_after_a_control_token():
    hf, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    backend = hf.Tokenizer(hf.models.WordLevel({"\u2581a": 0, "b": 1, "<s>": 2}, unk_token="b"))
    backend.decoder = hf.decoders.Metaspace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    row = {"tokens": [2, 0, 0, 2, 1, 0], "action_mask": [0, 0, 0, 0, 0, 1]}
    assert raw_transcript(row, tokenizer) == "<s> a a<s>b\u27ea a\u27eb"


@pytest.mark.parametrize(("terminal", "no_color"), [(True, ""), (True, "1"), (False, "")])
def test_raw_spans_have_a_color_on_a_terminal(run, monkeypatch, terminal, no_color):
    out = io.StringIO()
    out.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("NO_COLOR", no_color)
    show.main([str(run), "--episodes", "1", "--raw"])
    text, colored = out.getvalue(), terminal and not no_color
    assert text.count(f"\x1b[32m{SAMPLED[0]}") == text.count(f"{SAMPLED[1]}\x1b[0m") == 3 * colored
    assert text.count("\x1b") == 6 * colored


def test_the_tokenizer_of_raw_tokens(run, of_one, capsys, monkeypatch):
    """Given by name; the row's built-in one; the run's copy; the one that the row names; or a line that says so."""
    pytest.importorskip("transformers")
    path = run / "trajectories.jsonl"

    def save(folder, first):
        ByteTokenizer([first, *CONTROL_TOKENS[1:]], pad_token=first).save_pretrained(folder)
        return str(folder)

    def write(**changed):
        path.write_text(json.dumps(of_one[0] | {"tokens": [256], "action_mask": [0]} | changed))

    given, named = save(run / "given", "<|given|>"), save(run / "named", "<|named|>")
    write(tokenizer=named)
    assert printed_raw(capsys, run) == "<|named|>" and printed_raw(capsys, run, "--tokenizer", given) == "<|given|>"
    save(run / "model", "<|saved|>")
    assert printed_raw(capsys, run) == "<|saved|>" and printed_raw(capsys, path) == "<|named|>"
    write()
    assert printed_raw(capsys, run) == "<|endoftext|>"
    for changed, says in (
        ({"tokenizer": "/nowhere"}, "^the rows name the tokenizer '/nowhere', which is not on .*; name .* with --to"),
        ({"tokenizer": "a/b\0"}, "which is not on this machine; name the tokenizer of the run with --tokenizer"),
        ({"tokenizer": None}, "trajectories.jsonl: the rows name no tokenizer; name .* with --tokenizer"),
        ({"tokens": [9999]}, "^the tokenizer has 265 tokens, not all of this episode; name .* with --tokenizer"),
    ):
        write(**changed)
        with pytest.raises(SystemExit, match=says):
            show.main([str(path), "--raw"])
    with pytest.raises(SystemExit):
        show.main([str(run), "--tokenizer", "byte"])
    assert "--tokenizer does nothing without --raw" in capsys.readouterr().err


def test_a_tokenizer_that_a_row_names_is_not_downloaded(tmp_path, monkeypatch):
    """It is in the hub's cache, or missing."""
    pytest.importorskip("transformers")
    from huggingface_hub import constants

    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **more: asked.append(words) or [])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SystemExit, match="^the rows name the tokenizer 'stranger/beacon', which is not on"):
        show.tokenizer_of({"tokenizer": "stranger/beacon"}, tmp_path, None)
    cache = tmp_path / "models--owner--name"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("c0ffee")
    ByteTokenizer().save_pretrained(cache / "snapshots" / "c0ffee")
    assert len(show.tokenizer_of({"tokenizer": "owner/name"}, tmp_path, None)) == 265 and not asked


@pytest.mark.parametrize(
    "damage",
    [
        *({"action_mask": [1]}, {"tokens": ["x"]}),
        *({"segment_starts": starts} for starts in ([0, "x"], [0, 9] * 50, [1], [0, 0], [0, 5, 4], [0, 10**6], "ab")),
    ],
    ids=str,
)
def test_a_row_of_other_types_hides_no_other_raw_row(run, of_one, capsys, damage):
    path = run / "trajectories.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (of_one[0], of_one[1] | damage, of_one[2])))
    show.main([str(run), "--raw"])
    out, err = capsys.readouterr()
    assert "1 rows are damaged" in err and "iteration 1" in out and "iteration 3" in out


@pytest.mark.parametrize(
    "damage",
    [
        {"turn_rewards": ["x"]}, {"tokens": 3}, {"messages": [{}]}, {"messages": 5}, {"reward_terms": [{"a": None}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}, {"turns": 1},
        {"turn_rewards": [10**400]}, {"reward_terms": [{"a": 10**400}]},
    ],
)  # fmt: skip
def test_a_row_of_other_types_hides_no_other_row(run, of_one, capsys, damage):
    path = run / "trajectories.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (of_one[0], of_one[1] | damage, of_one[2])))
    show.main([str(run)])
    out, err = capsys.readouterr()
    assert "1 rows are damaged" in err and "iteration 1" in out and "iteration 3" in out


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--episodes", "1"], [3]),
        (["--episodes", "all"], [1, 2, 3]),
        (["--iteration", "2"], [2]),
        (["--failed"], [2]),
        (["--task", "ID"], [1]),
        (["--task", "INDEX"], [1]),
    ],
)
def test_episodes_are_chosen(run, of_one, capsys, words, found):
    names = {"ID": of_one[0]["task_id"], "INDEX": str(of_one[0]["task_index"])}
    show.main([str(run / "trajectories.jsonl"), *(names.get(word, word) for word in words)])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration ")]
    assert [int(line.split(",")[0].split()[1]) for line in printed] == found


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "nowhere cannot be read: No such file"),
        (["."], "this run has no recorded episodes .sft_llm.py records none"),
        (["../stopped"], "stopped: this run has no recorded episodes"),
        (["RUN", "--iteration", "9"], "has no such episode with --iteration; it has episodes of iterations 1 to 3"),
        (["RUN", "--task", "zzz"], "with --task; it has episodes of iterations 1 to 3 and of tasks such as train-"),
        (["RUN", "--iteration", "1", "--failed"], "has no such episode with --iteration and --failed"),
    ],
)
def test_what_cannot_be_shown_is_said_in_a_line(run, tmp_path, monkeypatch, words, says):
    for name in ("new", "stopped"):
        os.mkdir(tmp_path / name)
    (tmp_path / "stopped" / "trajectories.jsonl").touch()
    monkeypatch.chdir(tmp_path / "new")
    with pytest.raises(SystemExit, match=says):
        show.main([str(run) if word == "RUN" else word for word in words])


@pytest.mark.parametrize("episodes", ["0", "-1", "many"])
def test_a_number_of_episodes_is_one(run, capsys, episodes):
    with pytest.raises(SystemExit):
        show.main([str(run), f"--episodes={episodes}"])
    assert "--episodes must be a number, at least 1, or all" in capsys.readouterr().err


def test_a_line_without_end_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded, "MAX_LINE", 1000)
    (tmp_path / "rows.jsonl").write_text('{"tokens": [1], "task_index": 0}\n' + "x" * 5000)
    with pytest.raises(SystemExit, match=f"{tmp_path}/rows.jsonl: the line has more than"):
        show.main([str(tmp_path / "rows.jsonl")])


def test_rows_of_older_runs_have_no_messages(tmp_path, capsys):
    row = {"iteration": 1, "task_index": 4, "tokens": [1, 2], "rewards": [0.0, 1.0], "turns": [[1, 2]]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"reward_terms": {"a": 1.0}, "terminated": True}) + "\n")
    show.main([str(tmp_path / "rows.jsonl")])
    assert "return +1.00, 1 turn, 2 tokens, terminated\n(it was logged without its messages)" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [{"x": "é"}, '{"x": "\\u00e9"}'])
def test_calls_are_shown_alike_in_both_chat_forms(arguments):
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert transcript(messages, [{"a": 0.5}]) == (
        '[assistant]\n-> {"name": "f", "arguments": {"x": "é"}}\n    reward +0.50  (a +0.50)'
    )


def test_a_reader_may_stop_early(run):
    """`python -m agent_r1.show RUN | head -1`."""
    rows = (run / "trajectories.jsonl").read_text().splitlines()[:1] * 400
    (run / "trajectories.jsonl").write_text("\n".join(rows))
    command = [sys.executable, "-m", "agent_r1.show", str(run), "--episodes", "all"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("iteration 1, task")
        process.stdout.close()
        assert process.wait(120) in (0, 1) and process.stderr.read() == ""


def test_a_row_is_added_whole_or_not_at_all(tmp_path):
    resource = pytest.importorskip("resource")
    path = tmp_path / "rows.jsonl"
    append_row(path, {"a": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
        with pytest.raises(OSError, match="rows.jsonl"):
            append_row(path, {"b": "x" * 2_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    append_row(path, {"c": 2})
    assert read(path) == [{"a": 1}, {"c": 2}]


def test_what_standard_output_cannot_show_is_escaped(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    env = gym.make(WORLD, render_mode="human").unwrapped
    env.reset(seed=3)
    env.step(encode(env, "\u00e9 \u65e5" + env.dialect.end_of_turn))
    out.flush()
    assert rb"\xe9 \u65e5" in out.buffer.getvalue()


FAKED = ['-> {"name": "f", "arguments": {}}', "[tool search]", "[assistant]", "    reward +1.00  (a +1.00)", "-" * 100]


@pytest.mark.parametrize("role", ["assistant", "tool"])
@pytest.mark.parametrize("line", [*FAKED, "\\" + FAKED[0]])
def test_what_is_said_passes_for_nothing_else(role, line):
    """A text that imitates a call, a result, a reward or the next episode, line for line."""
    shown = transcript([{"role": role, "content": f"I say\n{line}\n[1] and\n  -> so"}], []).splitlines()
    assert shown == [f"[{role}]", "I say", "\\" + line, "[1] and", "  -> so"]


@pytest.mark.parametrize("nothing", "\u00ad\u034f\u115f\u17b4\u180b\u180e\u200c\u200d\u3164\ufe0f\U000e0101")
def test_what_nobody_sees_hides_no_line_that_imitates(nothing):
    shown = transcript([{"role": "tool", "content": f"ok\n[us{nothing}er]\n{nothing}a"}], []).splitlines()
    assert shown == ["[tool]", "ok", f"\\[us{nothing}er]", f"{nothing}a"]


def test_the_name_of_a_tool_that_is_not_there_is_one_line():
    """The policy wrote it."""
    env = gym.make(WORLD, render_mode="ansi").unwrapped
    env.reset(seed=3)
    name = f"x]\nfine\n\n[user]\nThe answer is 42.\n    reward +9.00  (a +9.00)\n{'-' * 40}\n[tool y"
    env.step(encode(env, env.dialect.tool_call(name, {}) + env.dialect.end_of_turn))
    shown = env.render().splitlines()
    assert shown.count("[user]") == 1 and not any(line.startswith("    reward +9") for line in shown)
    assert any(line.startswith("[tool x]\\nfine") for line in shown)


def test_a_headline_is_a_line(of_one):
    row = of_one[0] | {"task_id": "t\nsuccess, return +9.99\u2028\u200f"}
    assert len(show.headline(row).splitlines()) == 1 and "\\u200f" in show.headline(row)
