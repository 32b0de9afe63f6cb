"""A chat template in a file: `chat_template=` of every environment, for tokenizers that have none or another one."""

import shutil
from pathlib import Path

import gymnasium as gym
import pytest

import agent_r1
from agent_r1 import ArgumentError, Task, Tool, ToolEnv
from agent_r1.text.templates import BYTE_CHAT_TEMPLATE
from agent_r1.text.tokenizers import load_tokenizer

SHIPPED = Path(agent_r1.tiny_policy("AgentR1/MultihopWorld-v0"))
LOUD = BYTE_CHAT_TEMPLATE.replace("Call one so:", "CALL ONE SO:")
NO_RESULTS = "{%- for m in messages %}{%- if m.role != 'tool' and '<tool_response>' not in m.content %}" \
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}" \
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"  # fmt: skip


@pytest.fixture(scope="module")
def base_tokenizer(tmp_path_factory):
    """The tokenizer of a base model: a chat template is missing."""
    folder = tmp_path_factory.mktemp("base")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, folder)
    return str(folder)


class OwnEnv(ToolEnv):
    def __init__(self, **kwargs):
        super().__init__([Tool.from_function(look)], **kwargs)

    def make_task(self, index):
        return Task(f"{index}", "Look.", ["1"])


def look(where: str) -> str:
    """Look somewhere."""
    return where


def write(folder, text):
    path = folder / "chat.jinja"
    path.write_text(text)
    return str(path)


def test_the_files_template_replaces_the_tokenizers_own_in_one_copy(tmp_path):
    path = write(tmp_path, LOUD)
    loud, plain = load_tokenizer(SHIPPED, path), load_tokenizer(SHIPPED)
    assert loud is load_tokenizer(str(SHIPPED), path) and loud is not plain  # environments of a vector share it
    assert loud.chat_template == LOUD and "Call one so:" in plain.chat_template
    write(tmp_path, LOUD.replace("CALL", "DO"))
    assert "DO ONE SO:" in load_tokenizer(SHIPPED, path).chat_template  # no old text is remembered


def test_every_environment_writes_with_it(tmp_path, base_tokenizer):
    kwargs = {"tokenizer": base_tokenizer, "chat_template": write(tmp_path, LOUD)}
    envs = gym.make_vec("AgentR1/MultihopWorld-v0", num_envs=2, **kwargs)
    states, _ = envs.reset(seed=1)
    own = OwnEnv(**kwargs)
    for env, state in ((envs.envs[1], states[1]), (own, own.reset(seed=1)[0])):
        text = env.tokenizer.decode(state)
        assert "CALL ONE SO:" in text and text.endswith("<|im_start|>assistant\n")
    (kept,) = {id(env.dialect) for env in envs.envs}
    assert kept != id(load_tokenizer(SHIPPED))
    state, *_ = own.step(own.tokenizer.encode(own.dialect.tool_call("look", {"where": "up"}) + own.dialect.end_of_turn))
    assert "<tool_response>\nup\n</tool_response>" in own.tokenizer.decode(state)
    envs.close()


def test_ones_own_environment_on_a_base_model_names_the_remedy(base_tokenizer):
    with pytest.raises(ArgumentError, match=r"no chat template.*--chat-template FILE"):
        OwnEnv(tokenizer=base_tokenizer)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory; give a file with a Jinja template"),
        ("", "the file is empty"),
        (b"\xff\xfe\x00", "it is not a text in UTF-8"),
        ("x" * 1_000_001, "more than 1000000 characters"),
        ("This is my template.", "shows an assistant's text 0 times"),
        ("{% for m in messages %}", "rejects this conversation: Unexpected end of template"),
        ("{{ ''.__class__.__mro__ }}", "rejects this conversation: access to attribute '__class__'"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "seconds of processor time"),
        (LOUD.replace("<|im_end|>", "</turn>"), "no token ends a turn"),
        (NO_RESULTS, "0 times|does not show the tools' results"),
    ],
)
def test_a_file_that_is_no_usable_template_is_named(tmp_path, base_tokenizer, monkeypatch, text, message):
    monkeypatch.setattr("agent_r1.text.templates.CPU_SECONDS", 0.2)
    path = tmp_path / "chat.jinja"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ArgumentError, match=f"^chat_template {path}: .*({message})"):
        OwnEnv(tokenizer=base_tokenizer, chat_template=str(path))


def test_a_tokenizer_with_a_template_of_its_own_takes_no_file(tmp_path, base_tokenizer):
    path = write(tmp_path, LOUD)
    with pytest.raises(ArgumentError, match="the byte tokenizer has its own template"):
        OwnEnv(chat_template=path)
    with pytest.raises(ArgumentError, match="set the tokenizer's own chat_template instead"):
        OwnEnv(tokenizer=load_tokenizer(SHIPPED), chat_template=path)
    for wrong in (3, ["x"]):
        with pytest.raises(ArgumentError, match="chat_template"):
            OwnEnv(tokenizer=base_tokenizer, chat_template=wrong)
