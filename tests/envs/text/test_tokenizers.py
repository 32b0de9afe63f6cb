"""Tokenizers: the byte-level one, loading by name, folder or object, and chat templates in the sandbox."""

import copy
import itertools
import json
import os
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.arguments import ArgumentError
from agent_r1.text.tokenizers import (
    ByteTokenizer,
    added_tokens,
    control_tokens,
    fast_codec,
    load_tokenizer,
    render_chat,
)

BYTES = load_tokenizer(None)
DEEP = "[" * 100_000
MESSAGES = [{"role": "user", "content": "Who?"}]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find passages.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}


class TestByteTokenizer:
    def test_the_id_of_a_byte_is_its_value(self):
        assert BYTES.encode("A\né") == [65, 10, 0xC3, 0xA9]

    def test_control_tokens_are_parsed_in_text_and_written_back(self):
        ids = BYTES.encode("a<|im_end|><tool_call>b")
        assert ids == [97, 258, 259, 98]
        assert BYTES.decode(ids) == "a<|im_end|><tool_call>b"
        assert BYTES.decode(ids, skip_special_tokens=True) == "a<tool_call>b"

    @given(st.text())
    def test_every_text_comes_back(self, text):
        assert BYTES.decode(BYTES.encode(text)) == text

    @given(st.lists(st.integers(0, len(BYTES) - 1)))
    def test_every_id_sequence_can_be_read(self, ids):
        assert isinstance(BYTES.decode(ids), str)
        assert BYTES.decode(np.array(ids, dtype=np.int32)) == BYTES.decode(ids)

    def test_lone_surrogates_become_the_replacement_character(self):
        assert BYTES.decode(BYTES.encode("a\ud800b")) == "a\ufffdb"

    @pytest.mark.parametrize("token", [-1, len(BYTES)])
    def test_an_id_outside_the_vocabulary_is_an_error(self, token):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            BYTES.decode([token])

    def test_one_shared_instance_survives_pickling_and_copying(self):
        assert load_tokenizer(None) is BYTES
        assert pickle.loads(pickle.dumps(BYTES)) is BYTES
        assert copy.deepcopy(BYTES) is BYTES

    def test_another_vocabulary_survives_pickling(self):
        other = ByteTokenizer(["<s>", "</s>"], "{{ bos_token }}", eos_token="</s>", pad_token="</s>", bos_token="<s>")
        again = pickle.loads(pickle.dumps(other))
        assert again.encode("a<s></s>") == [97, 256, 257]
        assert render_chat(again, MESSAGES) == "<s>"

    def test_a_token_twice_or_a_role_without_token_is_an_error(self):
        with pytest.raises(ValueError, match="twice"):
            ByteTokenizer(["<a>", "<a>"])
        with pytest.raises(ValueError, match="eos_token"):
            ByteTokenizer(["<a>"])

    def test_its_chat_template(self):
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Who?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "search", "arguments": {"query": "é<"}}}],
            },
            {"role": "tool", "content": "one"},
            {"role": "tool", "content": "two"},
        ]
        assert BYTES.render_chat(messages, [SCHEMA], add_generation_prompt=True) == (
            "<|im_start|>system\nBe brief.\n\nTools:\nsearch(query): Find passages.\nCall one so:\n<tool_call>\n"
            '{"name": ..., "arguments": {...}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\nWho?<|im_end|>\n"
            '<|im_start|>assistant\n<tool_call>\n{"name": "search", "arguments": {"query": "é<"}}\n</tool_call>'
            "<|im_end|>\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
            "<tool_response>\ntwo\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    def test_a_saved_folder_is_the_same_tokenizer_for_transformers(self, tmp_path):
        pytest.importorskip("transformers")
        BYTES.save_pretrained(tmp_path)
        saved = load_tokenizer(str(tmp_path))
        assert saved is not BYTES and len(saved) == len(BYTES)
        assert added_tokens(saved) == added_tokens(BYTES) == control_tokens(saved) == control_tokens(BYTES)
        assert (saved.eos_token_id, saved.pad_token_id) == (BYTES.eos_token_id, BYTES.pad_token_id)
        assert render_chat(saved, MESSAGES, [SCHEMA], True) == render_chat(BYTES, MESSAGES, [SCHEMA], True)

        @settings(max_examples=50, deadline=None)
        @given(st.text() | st.text(st.sampled_from("<|im_end>/tool\n é")), st.lists(st.integers(0, len(BYTES) - 1)))
        def same(text, ids):
            assert saved.encode(text, add_special_tokens=False) == BYTES.encode(text)
            assert saved.decode(ids, skip_special_tokens=False) == BYTES.decode(ids)
            assert saved.decode(ids, skip_special_tokens=True) == BYTES.decode(ids, skip_special_tokens=True)

        same()


class TestLoadTokenizer:
    def test_a_folder_with_the_template_in_a_file_of_its_own(self, tmp_path):
        pytest.importorskip("transformers")
        BYTES.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "chat_template.jinja").write_text(config.pop("chat_template"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        loaded = load_tokenizer(tmp_path)
        assert render_chat(loaded, MESSAGES) == render_chat(BYTES, MESSAGES)
        assert load_tokenizer(str(tmp_path)) is loaded

    def test_a_folder_without_tokenizer_files(self, tmp_path):
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(FileNotFoundError, match=r"neither tokenizer.json .* model.safetensors"):
            load_tokenizer(str(tmp_path))

    def test_a_folder_with_a_broken_file(self, tmp_path):
        pytest.importorskip("transformers")
        (tmp_path / "tokenizer_config.json").write_text("{}")
        with pytest.raises(ValueError, match="cannot be read"):
            load_tokenizer(str(tmp_path))

    def test_a_path_that_does_not_exist(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            load_tokenizer(str(tmp_path / "nothing"))

    def test_a_name_that_cannot_be_had(self, monkeypatch):
        pytest.importorskip("transformers")
        import huggingface_hub.constants

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(FileNotFoundError, match="Check the name and the network"):
            load_tokenizer("no-such-owner/no-such-model")

    def test_without_transformers_the_error_names_the_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(ImportError, match=r"agent-r1\[transformers\]"):
            load_tokenizer("some-owner/some-model")

    @pytest.mark.parametrize("thing", [3, ByteTokenizer, b"gpt2", ["gpt2"]])
    def test_an_object_that_is_no_tokenizer(self, thing):
        with pytest.raises(ArgumentError, match="tokenizer must be None"):
            load_tokenizer(thing)

    def test_a_tokenizer_object_is_returned_as_it_is(self):
        tokenizer = ByteTokenizer()
        assert load_tokenizer(tokenizer) is tokenizer

    @pytest.mark.parametrize(
        ("file", "text"),
        [
            *itertools.product(["tokenizer.json", "tokenizer_config.json"], [DEEP, "{", "[]", "null", "{}", "5"]),
            *itertools.product(["added_tokens.json", "special_tokens_map.json", "config.json"], [DEEP]),
        ],
    )
    def test_a_damaged_folder_is_refused(self, tmp_path, file, text):
        BYTES.save_pretrained(tmp_path)
        (tmp_path / file).write_text(text)
        with pytest.raises(ValueError, match="tokenizer"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("eos_token", 5),
            ("pad_token", ["x"]),
            ("tokenizer_class", ["x"]),
            ("chat_template", [{"name": "default"}]),
            ("chat_template", {"tool_use": "x"}),
            ("added_tokens_decoder", {"x": {}}),
        ],
    )
    def test_a_wrong_field_is_refused(self, tmp_path, key, value):
        BYTES.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(ValueError, match="tokenizer"):
            load_tokenizer(tmp_path)

    def test_a_file_larger_than_any_tokenizer_is_refused(self, tmp_path):
        BYTES.save_pretrained(tmp_path)
        os.truncate(tmp_path / "tokenizer.json", 1 << 30)  # a file with a hole
        with pytest.raises(ValueError, match=r"tokenizer\.json is larger"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        ("key", "value", "says"),
        [
            ("normalizer", {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1_001}, "normalizer"),
            (
                "normalizer",
                {
                    "type": "Sequence",
                    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40,
                },
                "normalizer",
            ),
            ("decoder", {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1_001}, "decoder"),
            (
                "pre_tokenizer",
                {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Removed", "invert": False},
                "unmatched parenthesis",
            ),
            ("added_tokens", "x" * 20_000, "a token of 20000 characters"),
        ],
    )
    def test_a_folder_that_makes_much_of_little_is_refused(self, tmp_path, key, value, says):
        BYTES.save_pretrained(tmp_path)
        content = json.loads((tmp_path / "tokenizer.json").read_text())
        if key == "added_tokens":
            content[key].append({**content[key][-1], "id": 265, "content": value})
        else:
            content[key] = value
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=says):
            load_tokenizer(tmp_path)

    def test_a_panic_in_a_pattern_is_an_exception(self, tmp_path):
        """Rust's panics are none, and would pass by every handler of what a step may bring about."""
        ByteTokenizer().save_pretrained(tmp_path)
        described = json.loads((tmp_path / "tokenizer.json").read_text())
        split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
        described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, described["pre_tokenizer"]]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(described))
        encode, _ = fast_codec(load_tokenizer(tmp_path))
        with pytest.raises(ValueError, match=f"the tokenizer {tmp_path} cannot process this text"):
            encode("a" * 40 + "c")

    def test_a_tokenizer_without_chat_template(self):
        with pytest.raises(ValueError, match="no chat template"):
            load_tokenizer(ByteTokenizer(chat_template=""))


class TestRenderChat:
    def test_a_template_cannot_leave_the_sandbox(self):
        for attack in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
            with pytest.raises(ValueError, match="rejects"):
                render_chat(ByteTokenizer(chat_template=attack), MESSAGES)

    def test_a_template_that_raises_gives_its_reason(self):
        with pytest.raises(ValueError, match="rejects this conversation: no systems"):
            render_chat(ByteTokenizer(chat_template="{{ raise_exception('no systems') }}"), MESSAGES)

    def test_a_template_reads_no_clock(self):
        assert render_chat(ByteTokenizer(chat_template="{{ strftime_now('%d %b %Y') }}"), MESSAGES) == "26 Jul 2024"

    def test_the_generation_tag_prints_only_its_body(self):
        template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        assert render_chat(ByteTokenizer(chat_template=template), MESSAGES) == "Who?"

    def test_named_templates(self):
        named = ByteTokenizer()
        named.chat_template = {"default": "plain", "tool_use": "tools"}
        assert render_chat(named, MESSAGES) == "plain"
        assert render_chat(named, MESSAGES, [SCHEMA]) == "tools"


class TestHuggingFace:
    @pytest.fixture
    def tokenizer(self, tmp_path):
        pytest.importorskip("transformers")
        BYTES.save_pretrained(tmp_path)
        return load_tokenizer(tmp_path)

    def test_words_and_white_space_are_no_control_tokens(self, tokenizer):
        tokenizer.add_tokens(["Zarvo", "Ilmen Tor", "    ", "[SEP]", "<unused>"])
        assert set(control_tokens(tokenizer)) - set(control_tokens(BYTES)) == {"[SEP]", "<unused>"}

    def test_the_fast_codec_is_not_changed_by_padding(self, tokenizer):
        encode, decode = fast_codec(tokenizer)
        ids = encode("one two")
        tokenizer(["a", "one two three"], padding=True, truncation=True, max_length=5)
        assert encode("one two") == ids == tokenizer.encode("one two", add_special_tokens=False)
        assert decode(ids + [258]) == "one two<|im_end|>"

    def test_templates_render_as_transformers_renders_them(self, tokenizer):
        for tools in (None, [SCHEMA]):
            expected = tokenizer.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=True, tokenize=False)
            assert render_chat(tokenizer, MESSAGES, tools, True) == expected
