"""Dialects: prompts, bridges and parsing, for every family over vocabularies and chat templates built here."""

import copy
import itertools
import json
import pickle
import re
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from agent_r1.dialects import DIALECTS, Call, get_dialect, read_json
from agent_r1.text.tokenizers import (
    CONTROL_TOKENS,
    MARKUP_TOKENS,
    ByteTokenizer,
    control_tokens,
    load_tokenizer,
    render_chat,
)

# ---------------------------------------------------------------------------------------------------- vocabularies

PLAIN_CHATML = """\
{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

XML_CHATML = """\
{%- if tools %}{{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content | trim + '\n\n' }}{%- endif %}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
    {{- '<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = (message.content or '') | trim %}
    {%- if message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if not loop.nextitem or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n\n<tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<parameter=' + key + '>\n' }}
                {{- value | tojson if value is mapping or value is iterable and value is not string else value }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'user' or not tools %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}
"""

LLAMA_TOKENS = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
)
LLAMA_TEMPLATE = """\
{{- bos_token }}
{%- macro header(role) %}{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{%- endmacro %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- header('system') + 'Today: ' + strftime_now('%d %b %Y') + '\n\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role in ('tool', 'ipython') %}
        {{- header('ipython') + message.content | tojson + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- header('assistant') + '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- else %}
        {{- header(message.role) }}
        {%- if tools and loop.first %}
            {%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}
        {%- endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- header('assistant') }}{%- endif %}
"""

TURNS_TEMPLATE = """\
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {{- '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '</turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<turn>model\n' }}{%- endif %}
"""

BYTES = load_tokenizer(None)
PLAIN = ByteTokenizer(CONTROL_TOKENS, PLAIN_CHATML)
XML = ByteTokenizer(chat_template=XML_CHATML)
LLAMA = ByteTokenizer(LLAMA_TOKENS, LLAMA_TEMPLATE, "<|eot_id|>", "<|end_of_text|>", "<|begin_of_text|>")
TURNS = ByteTokenizer(("<pad>", "<turn>", "</turn>"), TURNS_TEMPLATE, "</turn>", "<pad>")

FAMILIES = {  # every dialect in its own vocabulary and, where it can be, in one that knows nothing of it
    "hermes": get_dialect("hermes", BYTES),
    "hermes-plain": get_dialect("hermes", PLAIN),
    "hermes-turns": get_dialect("hermes", TURNS),
    "qwen_xml": get_dialect("qwen_xml", XML),
    "qwen_xml-plain": get_dialect("qwen_xml", PLAIN),
    "llama3_json": get_dialect("llama3_json", LLAMA),
    "llama3_json-plain": get_dialect("llama3_json", PLAIN),
    "react": get_dialect("react", PLAIN),
    "react-bytes": get_dialect("react", BYTES),
    "fenced": get_dialect("fenced", PLAIN),
    "fenced-llama": get_dialect("fenced", LLAMA),
}
NATIVE = ["hermes", "qwen_xml", "llama3_json"]
every_family = pytest.mark.parametrize("family", FAMILIES)


def schema(name, **types):
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": parameters}}


SEARCH = schema("search", query="string")
PYTHON = schema("python", code="string")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who wrote Emma?"}]


def encode(dialect, text):
    return dialect.tokenizer.encode(text, add_special_tokens=False)


def read(dialect, text, tools=()):
    """Parse a turn's text, past the thinking that the generation prompt may have opened."""
    opened = "</think>" if dialect.starts_thinking else ""
    return dialect.parse(encode(dialect, opened + text), tools)


def ok(turn):
    return [(call.name, call.arguments) for call in turn.calls if call.error is None]


class SmallBPE:
    """A trained BPE tokenizer with merges, so that encoding text in pieces differs from encoding it whole."""

    TOKENS = CONTROL_TOKENS + MARKUP_TOKENS

    def __init__(self, template=BYTES.chat_template, tokens=TOKENS, normalized=False, words=None):
        self.chat_template = template
        corpus = [json.dumps(SEARCH), template, "Jane Austen wrote Emma in 1815, and it is read a lot.\n" * 3] * 3
        self._tokenizer = hf.Tokenizer(hf.models.BPE())
        self._tokenizer.pre_tokenizer = words or hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = hf.decoders.ByteLevel()
        alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
        self._tokenizer.train_from_iterator(
            corpus, hf.trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
        )
        if normalized:
            self._tokenizer.normalizer = hf.normalizers.NFKC()
        self._tokenizer.add_tokens([hf.AddedToken(t, normalized=normalized, special=False) for t in tokens])
        self.added_tokens_decoder = self._tokenizer.get_added_tokens_decoder()
        self.backend_tokenizer = self._tokenizer

    def encode(self, text, add_special_tokens=False):
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids, skip_special_tokens=False):
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_added_vocab(self):
        return {token.content: i for i, token in self.added_tokens_decoder.items()}

    def __len__(self):
        return self._tokenizer.get_vocab_size()


BPE = load_tokenizer(SmallBPE())

# ------------------------------------------------------------------------------------------------------- strategies

SPECIAL_TEXTS = sorted({*CONTROL_TOKENS, *MARKUP_TOKENS, *LLAMA_TOKENS, "<turn>", "</turn>"})
pieces = st.sampled_from(
    SPECIAL_TEXTS
    + [t[:i] for t in SPECIAL_TEXTS[:6] for i in (1, 3, -1)]
    + [t[i:] for t in SPECIAL_TEXTS[:6] for i in (1, 3, -1)]
    + ["\U0010f8a0", "\U0010f8a1", "\ud800", "<", "|>", "\n", " ", "```", "```python\n", '{"name": ', "Action: ", "é"]
)
nasty_text = st.lists(pieces | st.text(max_size=3), max_size=12).map("".join)
no_surrogates = st.characters(exclude_categories=["Cs"])
plain_text = st.text(no_surrogates, max_size=20)
json_text = plain_text | st.lists(pieces.filter(lambda p: p != "\ud800"), max_size=4).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | json_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(json_text, inner, max_size=3),
    max_leaves=6,
)
json_arguments = st.dictionaries(json_text, json_values, max_size=4)
RESERVED = [chr(code) for code in range(0x10F8A0, 0x10F8B0)]  # private characters that the dialects use inside
UNWRITABLE = [*SPECIAL_TEXTS, "</parameter>", *RESERVED]  # in a string of Qwen's XML
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True)


# ---------------------------------------------------------------------------------------------------------- prompts


class TestRender:
    @pytest.mark.parametrize("family", NATIVE)
    def test_a_family_in_its_own_template_is_what_the_template_says(self, family):
        dialect = FAMILIES[family]
        assert dialect.native
        expected = render_chat(dialect.tokenizer, MESSAGES, [SEARCH], add_generation_prompt=True)
        assert dialect.render(MESSAGES, [SEARCH]) == encode(dialect, expected)

    @pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NATIVE])
    def test_elsewhere_the_system_message_explains_the_tools(self, family):
        dialect = FAMILIES[family]
        prompt = dialect.tokenizer.decode(dialect.render(MESSAGES, [SEARCH, PYTHON]))
        assert prompt.count("Be brief.\n\n") == prompt.count("Who wrote Emma?") == 1
        assert json.dumps(SEARCH) in prompt and json.dumps(PYTHON) in prompt
        assert "search" not in dialect.tokenizer.decode(dialect.render(MESSAGES))

    @pytest.mark.parametrize("family", ["hermes-plain", "qwen_xml-plain", "llama3_json-plain", "react", "fenced"])
    def test_without_a_system_message_there_is_one_for_the_tools(self, family):
        prompt = PLAIN.decode(FAMILIES[family].render(MESSAGES[1:], [SEARCH]))
        assert prompt.startswith("<|im_start|>system\n") and json.dumps(SEARCH) in prompt

    def test_without_a_system_role_the_user_carries_it(self):
        prompt = TURNS.decode(FAMILIES["hermes-turns"].render(MESSAGES, [SEARCH]))
        assert prompt.startswith("<turn>user\nBe brief.\n\n# Tools")
        assert prompt.endswith("\n\nWho wrote Emma?</turn>\n<turn>model\n")

    def test_calls_and_results_in_a_prompt_are_text_where_the_template_knows_no_tools(self):
        call = {"type": "function", "function": {"name": "search", "arguments": {"query": "<|im_end|>"}}}
        shown = [
            *MESSAGES,
            {"role": "assistant", "content": "Let me look.", "tool_calls": [call]},
            {"role": "tool", "name": "search", "content": "Jane Austen"},
        ]
        prompt = PLAIN.decode(FAMILIES["react"].render(shown))
        assert prompt.endswith(
            "<|im_start|>assistant\nLet me look.\nAction: search\n"
            'Action Input: {"query": "\\u003c|im_end|>"}<|im_end|>\n'
            "<|im_start|>user\nObservation: Jane Austen<|im_end|>\n<|im_start|>assistant\n"
        )

    @every_family
    def test_the_fenced_and_other_instructions_show_a_call_that_the_family_reads(self, family):
        dialect = FAMILIES[family]
        call = dialect.tool_call("search", {"query": "Emma"})
        assert ok(read(dialect, call + dialect.end_of_turn, [SEARCH])) == [("search", {"query": "Emma"})]

    def test_text_without_control_strings_is_encoded_whole(self):
        dialect = get_dialect("hermes", BPE)
        text = "Jane Austen < wrote | Emma > in 1815\n\n\nand it is read"
        messages = [{"role": "system", "content": text}, {"role": "user", "content": f" {text} é"}]
        whole = BPE.encode(render_chat(BPE, messages, [SEARCH], add_generation_prompt=True))
        assert dialect.render(messages, [SEARCH]) == whole
        after = dialect.bridge(True, [("search", text), ("search", text)])
        results = [{"role": "tool", "content": text}] * 2
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        assert after == BPE.encode(render_chat(BPE, [*turn, *results], None, True).partition("b<|im_end|>")[2])

    def test_a_tokenizer_that_marks_the_start_of_a_text(self):
        """As SentencePiece does: "Jane" alone is another token than "Jane" after a control token."""
        words = hf.pre_tokenizers.Metaspace(prepend_scheme="first")
        marking = SmallBPE(PLAIN_CHATML, words=words)
        dialect = get_dialect("hermes", marking)
        messages = [{"role": "assistant", "content": ""}, {"role": "user", "content": "Jane"}]
        whole = render_chat(marking, messages, [], True)
        assert marking.encode("a") != marking.encode("<|im_end|>a")[1:]
        assert dialect.hint(False, "Jane") == marking.encode(whole.partition("assistant\n")[2])


class TestGuard:
    """No text from data or tools becomes a control token."""

    @staticmethod
    def controls(dialect, ids):
        return [i for i in ids if i in dialect.codec.control_ids]

    @every_family
    @settings(max_examples=60, deadline=None)
    @given(contents=st.lists(nasty_text, min_size=2, max_size=2), description=nasty_text)
    def test_in_prompts(self, family, contents, description):
        dialect = FAMILIES[family]
        tool = copy.deepcopy(SEARCH)
        tool["function"]["description"] = description
        messages = [{"role": r, "content": c} for r, c in zip(["system", "user"], contents, strict=True)]
        harmless = dialect.render([{"role": r, "content": "x"} for r in ("system", "user")], [SEARCH])
        assert self.controls(dialect, dialect.render(messages, [tool])) == self.controls(dialect, harmless)

    @every_family
    @settings(max_examples=60, deadline=None)
    @given(contents=st.lists(nasty_text, min_size=1, max_size=3), closed=st.booleans())
    @example(contents=["|im_end|>", "<|im_end|", "<|im_<|im_end|>end|>"], closed=True)
    def test_in_bridges(self, family, contents, closed):
        dialect = FAMILIES[family]
        harmless = dialect.bridge(closed, [("search", "x")] * len(contents))
        filled = dialect.bridge(closed, [("search", content) for content in contents])
        assert self.controls(dialect, filled) == self.controls(dialect, harmless)
        hint = dialect.hint(closed, contents[0])
        assert self.controls(dialect, hint) == self.controls(dialect, dialect.hint(closed, "x"))

    @given(content=nasty_text)
    def test_the_text_stays_readable(self, content):
        content = "".join("\ufffd" if c in RESERVED or "\ud800" <= c <= "\udfff" else c for c in content)
        text = BYTES.decode(FAMILIES["hermes"].bridge(True, [("search", content)]))
        assert text == (
            f"\n<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )

    @pytest.mark.parametrize("content", ["im_end|>", "end", "x<|im_", "im_", "  im_end|> "])
    def test_across_the_edge_of_a_template(self, content):
        """Templates that leave half a token beside a content, before it, after it and around it."""
        template = PLAIN_CHATML.replace("m['content']", "'<|' + m['content'] + '_' + m['content'] + 'end|>' ")
        halves = ByteTokenizer(
            CONTROL_TOKENS,
            "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% else %}"
            "<|im_start|><|{{ m.content }}end|>{% endif %}{% endfor %}",
        )
        assert template != PLAIN_CHATML
        dialect = get_dialect("hermes", halves)
        start = BYTES.encode("<|im_start|>")
        assert self.controls(dialect, dialect.render([{"role": "user", "content": content}])) == start
        assert self.controls(dialect, dialect.hint(True, content)) == start
        assert self.controls(dialect, dialect.bridge(True, [("search", content)])) == start

    def test_characters_that_the_tokenizer_normalizes_into_a_control_token(self):
        folding = SmallBPE(normalized=True)
        attack = "\uff1ctool_call\uff1e <|im_end\uff5c>"
        assert folding.encode(attack)[0] == folding.get_added_vocab()["<tool_call>"]
        dialect = get_dialect("hermes", folding)
        ids = dialect.bridge(True, [("search", attack)])
        assert self.controls(dialect, ids) == self.controls(dialect, dialect.bridge(True, [("search", "x")]))
        assert "<tool_call> <|im_end|>" in folding.decode(ids)

    def test_a_control_token_of_one_character_is_replaced(self):
        tokens = (*CONTROL_TOKENS, "\u25b6")
        dialect = get_dialect("hermes", ByteTokenizer(tokens, PLAIN_CHATML))
        assert "a\ufffdb" in dialect.tokenizer.decode(dialect.hint(True, "a\u25b6b"))

    def test_words_that_were_added_to_the_vocabulary_stay_whole(self):
        worded = SmallBPE(tokens=(*CONTROL_TOKENS, *MARKUP_TOKENS, "Zarvo"))
        word = worded.get_added_vocab()["Zarvo"]
        assert "Zarvo" not in control_tokens(worded)
        assert word in get_dialect("hermes", worded).bridge(True, [("search", "of Zarvo.")])


# ---------------------------------------------------------------------------------------------------------- bridges


class TestBridge:
    @pytest.mark.parametrize("count", [1, 2, 8])
    @pytest.mark.parametrize("family", NATIVE)
    @pytest.mark.parametrize("content", ["Jane Austen", ' "quoted"\n\\ é & <b> \n'])
    def test_it_is_what_the_template_writes(self, family, count, content):
        dialect = FAMILIES[family]
        turns = [*MESSAGES, {"role": "assistant", "content": "I look it up."}]
        results = [{"role": "tool", "name": "search", "content": content}] * count
        whole = render_chat(dialect.tokenizer, [*turns, *results], [SEARCH], add_generation_prompt=True)
        after = whole.partition("I look it up." + dialect.end_of_turn)[2]
        assert dialect.bridge(True, [("search", content)] * count) == encode(dialect, after)
        assert dialect.bridge(False, [("search", content)] * count) == encode(dialect, dialect.end_of_turn + after)

    @every_family
    def test_a_hint_is_a_users_message(self, family):
        dialect = FAMILIES[family]
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Hm."}]
        whole = render_chat(dialect.tokenizer, [*turns, {"role": "user", "content": "Go on."}], [], True)
        after = whole.partition("Hm." + dialect.end_of_turn)[2]
        assert dialect.hint(True, "Go on.") == encode(dialect, after)
        assert dialect.hint(False, "Go on.") == dialect.close() + encode(dialect, after)

    @pytest.mark.parametrize(
        ("family", "text"),
        [
            ("hermes-plain", "<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response>"),
            ("llama3_json-plain", "Result:\nA\nResult:\nB"),
            ("react", "Observation: A\nObservation: B"),
            ("fenced", "```output\nA\n```\n```output\nB\n```"),
        ],
    )
    def test_results_are_a_users_message_where_the_template_knows_no_tools(self, family, text):
        after = PLAIN.decode(FAMILIES[family].bridge(True, [("search", "A"), ("search", "B")]))
        assert after == f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

    def test_templates_that_rewrite_history_do_not_matter(self):
        template = BYTES.chat_template.replace(
            "(message.content or '')", "(message.content or '').split('</think>')[-1]"
        )
        assert template != BYTES.chat_template
        rewriting = get_dialect("hermes", ByteTokenizer(chat_template=template))
        assert rewriting.bridge(True, [("search", "A")]) == FAMILIES["hermes"].bridge(True, [("search", "A")])

    def test_a_template_that_shows_the_tools_name(self):
        template = BYTES.chat_template.replace(
            "'\\n<tool_response>\\n' +", "'\\n<tool_response>\\n' + message.name + ': ' +"
        )
        assert template != BYTES.chat_template
        dialect = get_dialect("hermes", ByteTokenizer(chat_template=template))
        after = dialect.bridge(True, [("search", "A"), ("<think>", "B")])
        assert "search: A\n" in BYTES.decode(after) and "<think>: B\n" in BYTES.decode(after)
        assert BYTES.encode("<think>")[0] not in after

    def test_a_template_that_wants_calls_before_results(self):
        template = BYTES.chat_template.replace(
            "{%- if message.role == 'tool' %}",
            "{%- if message.role == 'tool' %}{%- if loop.previtem.role == 'assistant' and not "
            "loop.previtem.tool_calls %}{{- raise_exception('no call') }}{%- endif %}",
        )
        assert template != BYTES.chat_template
        dialect = get_dialect("hermes", ByteTokenizer(chat_template=template))
        assert dialect.native
        results = [("search", "A"), ("search", "B")]
        assert dialect.bridge(True, results) == FAMILIES["hermes"].bridge(True, results)

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            (PLAIN_CHATML.replace("+ '<|im_end|>'", "+ '###'"), "does not begin with a control token"),
            (PLAIN_CHATML.replace("m['content']", "m['content'] * 2"), "2 times instead of once"),
            (PLAIN_CHATML.replace("m['content']", "'x'"), "0 times instead of once"),
            ("{% for m in messages %}{{ m.nothing.at_all }}{% endfor %}", "rejects this conversation"),
        ],
    )
    def test_a_template_that_cannot_be_used(self, template, message):
        with pytest.raises(ValueError, match=message):
            get_dialect("hermes", ByteTokenizer(chat_template=template))

    def test_a_template_that_drops_or_changes_contents(self):
        dropping = PLAIN_CHATML.replace("m['content']", "(m['content'] if m['role'] == 'assistant' else 'x')")
        with pytest.raises(ValueError, match="does not show a user's message once"):
            get_dialect("hermes", ByteTokenizer(chat_template=dropping))
        template = PLAIN_CHATML.replace("m['content']", "m['content'] | replace('b', 'B')")
        changing = get_dialect("hermes", ByteTokenizer(chat_template=template))
        with pytest.raises(ValueError, match="in an unknown way"):
            changing.hint(True, "a")


# ---------------------------------------------------------------------------------------------------------- reading


class TestCallsComeBack:
    """``parse(encode(tool_call(name, arguments) + end_of_turn))`` is the call."""

    @pytest.mark.parametrize("family", [family for family in FAMILIES if not family.startswith("qwen_xml")])
    @settings(max_examples=60, deadline=None)
    @given(name=names, arguments=json_arguments)
    @example(name="python", arguments={"code": "print('```')\n```\n````\n"})
    @example(name="python", arguments={"code": "'<|im_end|></tool_call><think>'"})
    @example(name="python", arguments={"code": ""})
    @example(name="python", arguments={"code": "\n\nx = 1\n"})
    def test_json_families(self, family, name, arguments):
        dialect = FAMILIES[family]
        turn = read(dialect, dialect.tool_call(name, arguments) + dialect.end_of_turn)
        assert ok(turn) == [(name, arguments)]
        assert turn.content == ""

    @pytest.mark.parametrize("family", [family for family in FAMILIES if not family.startswith("qwen_xml")])
    @given(arguments=st.lists(json_arguments, min_size=2, max_size=3))
    @settings(max_examples=20, deadline=None)
    def test_several_calls_between_text(self, family, arguments):
        dialect = FAMILIES[family]
        calls = "\n".join(dialect.tool_call("search", each) for each in arguments)
        turn = read(dialect, f"Let me see.\n{calls}\nDone.{dialect.end_of_turn}")
        assert ok(turn) == [("search", each) for each in arguments]
        assert turn.content.startswith("Let me see.") and turn.content.endswith("Done.")

    @every_family
    @pytest.mark.parametrize("content", ["", "Let me see.", "A line.\n\nAnother: {}"])
    @pytest.mark.parametrize("count", range(4))
    def test_a_written_turn(self, family, content, count):
        """Parallel calls are joined in one way, with the text before them."""
        dialect = FAMILIES[family]
        calls = [("search", {"query": f"a word: {i}"}) for i in range(count)]
        calls += [("python", {"code": "a = 1\nb = 2"})] * 2
        text = dialect.write_turn(content, calls) + dialect.end_of_turn
        turn = dialect.parse(encode(dialect, text), [SEARCH, PYTHON])
        assert ok(turn) == calls and turn.content == content

    @every_family
    def test_a_broken_call_is_malformed_and_hides_no_other(self, family):
        dialect = FAMILIES[family]
        for arguments in ("{", "[]", '"null"', '{"query": "Emma"', "</tool_call><|im_end|>\n```\n"):
            text = dialect.write_turn("So.", [("search", arguments), ("search", {"query": "Emma"})])
            turn = dialect.parse(encode(dialect, text + dialect.end_of_turn), [SEARCH])
            assert [call.error is None for call in turn.calls] == [False, True] and turn.content == "So."

    @pytest.mark.parametrize("family", ["qwen_xml", "qwen_xml-plain"])
    @settings(max_examples=100, deadline=None)
    @given(name=names, texts=st.dictionaries(names, json_text, max_size=3), values=st.dictionaries(names, json_values))
    def test_xml_with_the_tools_schemas(self, family, name, texts, values):
        dialect = FAMILIES[family]
        values = {key: value for key, value in values.items() if key not in texts and not isinstance(value, str)}
        types = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}
        tool = schema(name, **dict.fromkeys(texts, "string"), **{k: types[type(v)] for k, v in values.items()})
        try:
            call = dialect.tool_call(name, texts | values)
        except ValueError as error:
            assert "Qwen's XML cannot" in str(error)
            assert any(text in value for value in texts.values() for text in UNWRITABLE)
            assume(False)
        assert ok(read(dialect, call + dialect.end_of_turn, [tool])) == [(name, texts | values)]

    def test_xml_without_schemas_reads_json_where_it_can(self):
        dialect = FAMILIES["qwen_xml"]
        arguments = {"a": "two words", "b": 5, "c": [1, {"d": None}], "e": True, "f": '"quoted"'}
        assert ok(read(dialect, dialect.tool_call("f", arguments))) == [("f", arguments)]
        year = dialect.tool_call("search", {"query": "1815"})
        assert ok(read(dialect, year)) == [("search", {"query": 1815})]
        assert ok(read(dialect, year, [SEARCH])) == [("search", {"query": "1815"})]

    @pytest.mark.parametrize(
        ("types", "text", "value"),
        [
            ({"type": ["string", "null"]}, "null", None),
            ({"type": ["string", "null"]}, "5", "5"),
            ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
            ({"type": "boolean"}, "True", True),
            ({"type": "number"}, "many", "many"),  # for the tool's validation to refuse
            ({}, "None", "None"),
        ],
    )
    def test_xml_types(self, types, text, value):
        tool = schema("f")
        tool["function"]["parameters"]["properties"]["x"] = types
        call = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
        assert ok(read(FAMILIES["qwen_xml"], call, [tool])) == [("f", {"x": value})]

    @pytest.mark.parametrize(
        ("family", "name", "arguments"),
        [
            ("qwen_xml", "two words", {}),
            ("qwen_xml", "f", {"a>b": 1}),
            ("qwen_xml", "f", {"a": "x</parameter>y"}),
            ("qwen_xml", "f", {"a": "x</tool_call>y"}),
            ("react", "two\nlines", {}),
            ("hermes", "f", {"a": float("nan")}),
        ],
    )
    def test_what_a_family_cannot_write_is_an_error(self, family, name, arguments):
        with pytest.raises(ValueError):
            FAMILIES[family].tool_call(name, arguments)


GOOD = '{"name": "search", "arguments": {"query": "Emma"}}'
DEEP = "[" * 100_000


class TestMalformedCalls:
    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            ("", "not valid JSON"),
            ("5", "a call is a JSON object"),
            ("[" + GOOD + "]", "a call is a JSON object"),
            ("search(Emma)", "not valid JSON"),
            (GOOD[:-1], "not valid JSON"),
            (GOOD + " and more", "not valid JSON"),
            ('{"name": ["search"], "arguments": {}}', '"name" that is a string'),
            ('{"name": "", "arguments": {}}', '"name" that is a string'),
            ('{"arguments": {}}', '"name" that is a string'),
            ('{"name": "search"}', 'no "arguments"'),
            ('{"name": "search", "arguments": [1]}', "not a JSON object"),
            ('{"name": "search", "arguments": "Emma"}', "not a JSON object"),
            ('{"name": "search", "arguments": {"x": NaN}}', "NaN"),
            ('{"name": "search", "arguments": {"x": -Infinity}}', "-Infinity"),
            ('{"name": "search", "arguments": {"x": 1e999}}', "too large"),
            ('{"name": "search", "arguments": {"x": ' + "9" * 5000 + "}}", "too many digits"),
            ('{"name": "search", "arguments": {"x": 1, "x": 2}}', "same key twice"),
            ('{"name": "search", "arguments": {"x": "\\ud800"}}', "surrogate"),
            ('{"name": "search", "arguments": {"x": ' + DEEP + "}}", "nested deeper"),
            ('{"name": "search", "arguments": {"x": ' + "[" * 70 + "]" * 70 + "}}", "nested deeper"),
            (GOOD[:-1] + ', "parameters": {}}', 'both "arguments" and "parameters"'),
            (GOOD.replace('"', "'"), "not valid JSON"),
            (GOOD.replace("}}", ",}}"), "not valid JSON"),
            (GOOD.replace("name", "Name"), '"name" that is a string'),
            ('{"name": null, "arguments": {}}', '"name" that is a string'),
            (json.dumps({"name": "search", "arguments": json.dumps(json.dumps({}))}), "not a JSON object"),
            ('{"name": "search", "arguments": {"x": nul}}', "not valid JSON"),
            ('{"name": "search", "arguments": {"x": none}}', "not valid JSON"),
            ('{"name": "search", "arguments": {"x": Nones}}', "not valid JSON"),
            ('{"name": "search", "arguments": {None: 1}}', "not valid JSON"),
            ('{"name": "search", "arguments": {"x": None, "x": 2}}', "same key twice"),
            ('{"name": "search", "arguments": {"x": [None, ' + "[" * 70 + "]" * 70 + "]}}", "nested deeper"),
        ],
    )
    def test_hermes(self, body, reason):
        turn = read(FAMILIES["hermes"], f"a<tool_call>\n{body}\n</tool_call>b<tool_call>{GOOD}</tool_call><|im_end|>")
        bad, good = turn.calls
        assert reason in bad.error and bad.arguments is None and bad.text == body
        assert len(bad.error) < 300
        assert good == Call("search", {"query": "Emma"}, None, GOOD)
        assert turn.content == "ab"

    def test_arguments_as_a_json_string_are_accepted(self):
        call = json.dumps({"name": "search", "arguments": json.dumps({"query": "Emma"})})
        assert ok(read(FAMILIES["hermes"], f"<tool_call>{call}</tool_call>")) == [("search", {"query": "Emma"})]

    def test_a_call_that_is_never_closed(self):
        turn = read(FAMILIES["hermes"], f"a<tool_call>{GOOD}<|im_end|>")
        assert [(c.name, c.arguments, c.error) for c in turn.calls] == [("search", None, "the call is never closed")]
        assert turn.content == "a"

    def test_a_call_that_opens_inside_a_call(self):
        turn = read(FAMILIES["hermes"], f"<tool_call>{{<tool_call>{GOOD}</tool_call></tool_call>")
        assert [c.error for c in turn.calls] == ["the call is never closed", None]
        assert turn.content == "</tool_call>"

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            ("", "does not begin with <function=name>"),
            (GOOD, "does not begin with <function=name>"),
            ("<function=>\n</function>", "does not begin with <function=name>"),
            ("<function=search>", "stands where </function> should"),
            ("<function=search>\n<parameter=query>\nEmma\n</function>", "is not closed"),
            ("<function=search>\n<parameter=query", "is not closed"),
            ("<function=search>\nEmma\n</function>", "stands where </function> should"),
            ("<function=search>" + "<parameter=q>\n1\n</parameter>" * 2 + "</function>", "is there twice"),
            ("<function=search>\n</function>\nmore", "stands where </function> should"),
        ],
    )
    def test_xml(self, body, reason):
        turn = read(FAMILIES["qwen_xml"], f"a<tool_call>\n{body}\n</tool_call><|im_end|>")
        (call,) = turn.calls
        assert call.arguments is None and reason in call.error

    @pytest.mark.parametrize(
        ("text", "names", "content"),
        [
            ('{"name": "f", "parameters": {}}', ["f"], ""),
            ('<|python_tag|>{"name": "f", "parameters": {}}', ["f"], ""),
            ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', ["f", "g"], ""),
            ('{"name": "f", "parameters": {}}{"name": "g", "parameters": {}}', ["f", "g"], ""),
            ('{"name": "f", "parameters": {}} {"name": "g", "para', ["f", None], ""),
            ('{"name": "f", "parameters": {}} {"set": 1}', ["f"], '{"set": 1}'),
            ('{"name": "f", "arguments": {}}', ["f"], ""),
            ('I look.\n  {"type": "function", "name": "f", "parameters": {}}\nSo.', ["f"], "I look.\n\nSo."),
            ('So {"name": "f", "parameters": {}}', [], 'So {"name": "f", "parameters": {}}'),
            ('{"set": 1}', [], '{"set": 1}'),
            ("{1, 2}", [], "{1, 2}"),
            ('{"name": "f", "parameters": {}', [None], ""),
            ('{"parameters": {}}', [], '{"parameters": {}}'),
            ('{"name": "f"}', [], '{"name": "f"}'),
            ('{"name": "Ann", "age": 3}\nSo.', [], '{"name": "Ann", "age": 3}\nSo.'),
            ('{"x": 1, "y": None}\nSo.', [], '{"x": 1, "y": None}\nSo.'),
            ('{"x": 1, "y": nothing}\nSo.', [], '{"x": 1, "y": nothing}\nSo.'),
            ("{'x': 1}\nSo.", [], "{'x': 1}\nSo."),
            ('{"x: 1}\n{"name": "f", "parameters": {}}', ["f"], '{"x: 1}'),
            ('{"x": [\n{"name": "f", "parameters": {}}', ["f"], '{"x": ['),
            ('{"name": "Ann", "age": }\n{"name": "f", "parameters": {}}', ["f"], '{"name": "Ann", "age": }'),
            ('{"name": "Ann", "age": 3,', [None], ""),
            ('{"na', [None], ""),
            ('{"x": 3,', [], '{"x": 3,'),
            ("{'name': 'f', 'parameters': {}}", [None], ""),
            ('{"name": "f", "parameters": {"x": None}}', ["f"], ""),
            ('{"name": "f", "parameters": {}, "arguments": {}}', [None], ""),
            ('{"name": 5, "parameters": {}}', [None], ""),
            ('{"name": "f", "parameters": [1]}', [None], ""),
            ('<|python_tag|>{"set": 1}', [None], ""),
            ('<|python_tag|>search.call(query="Emma")', [None], ""),
        ],
    )
    def test_llama(self, text, names, content):
        for family in ("llama3_json", "llama3_json-plain"):
            turn = read(FAMILIES[family], text)
            assert [None if call.error else call.name for call in turn.calls] == names
            assert turn.content == content

    @pytest.mark.parametrize(
        ("text", "names", "content"),
        [
            ('Thought: hm\nAction: f\nAction Input: {"a":\n 1}\nSo.', ["f"], "Thought: hm\n\nSo."),
            ("Action: f\nAction Input: {}\nObservation: 5\nAction: g\nAction Input: {}", ["f"], ""),
            ("Action: f\nAction Input: {}\nAction: g\nAction Input: {}", ["f", "g"], ""),
            ("Action: f\nAction Input: Emma\nThought: and", [None], ""),
            ("Action: f\nAction Input: [1]", [None], ""),
            ("Action: f", [None], ""),
            ("Action: f\nAction: g\nAction Input: {}", [None, "g"], ""),
            ("Action Input: {}", [None], ""),
            ("Action:\nAction Input: {}", [None], ""),
            ("No Action: here", [], "No Action: here"),
        ],
    )
    def test_react(self, text, names, content):
        turn = read(FAMILIES["react"], text)
        assert [None if call.error else call.name for call in turn.calls] == names
        assert turn.content == content

    @pytest.mark.parametrize(
        ("text", "calls", "content"),
        [
            ("So:\n```python\nx = 1\n```\nDone.", [("python", {"code": "x = 1"})], "So:\n\nDone."),
            ("```py\n\n```", [("python", {"code": ""})], ""),
            ("```python\n```", [("python", {"code": ""})], ""),
            (f"```json\n{GOOD}\n```", [("search", {"query": "Emma"})], ""),
            ("```text\n```python\nx\n```", [], "```text\n```python\nx\n```"),
            ("````python\n```\n````", [("python", {"code": "```"})], ""),
            ("```output\n5\n```", [], "```output\n5\n```"),
            ("use ```python inline```", [], "use ```python inline```"),
            ("```python\nx = 1", [None], ""),
            ("```tool_call\nsearch\n```", [None], ""),
            ("```text\nopen", [], "```text\nopen"),
            ('```json\n{"a": 1}\n```', [], '```json\n{"a": 1}\n```'),
            ("```json\n[1, 2]\n```\nSo.", [], "```json\n[1, 2]\n```\nSo."),
            ('```json\n{"name": "Ann", "age": None}\n```', [], '```json\n{"name": "Ann", "age": None}\n```'),
            ('```json\n{"a": 1', [], '```json\n{"a": 1'),
            (f"```json\n{GOOD[:-1]}\n```", [None], ""),
            (f"```json\n{GOOD[:-1]}", [None], ""),
            ('```json\n{"na', [None], ""),
            ('```tool_call\n{"a": 1}\n```', [None], ""),
        ],
    )
    def test_fenced(self, text, calls, content):
        turn = read(FAMILIES["fenced"], text)
        assert [None if call.error else (call.name, call.arguments) for call in turn.calls] == calls
        assert turn.content == content


class TestThinking:
    THOUGHT = f"<think>I could <tool_call>{GOOD}</tool_call> or <answer>a</answer></think>"

    @pytest.mark.parametrize("family", ["hermes", "hermes-plain"])
    def test_it_is_not_searched(self, family):
        turn = read(FAMILIES[family], f"{self.THOUGHT}<answer>b</answer><|im_end|>")
        assert turn.content == "<answer>b</answer>" and turn.calls == []
        assert turn.raw == f"{self.THOUGHT}<answer>b</answer>"

    @every_family
    def test_an_open_one_hides_everything_after_it(self, family):
        dialect = FAMILIES[family]
        call = dialect.tool_call("search", {"query": "Emma"})
        turn = read(dialect, f"So.<think>hm\n{call}\n<answer>a</answer>{dialect.end_of_turn}")
        assert turn.content == "So." and turn.calls == []

    @every_family
    def test_a_stop_token_inside_it_ends_the_turn(self, family):
        dialect = FAMILIES[family]
        turn = read(dialect, f"a<think>b{dialect.end_of_turn}</think>c")
        assert turn.content == "a" and turn.raw.endswith("a<think>b")

    def test_a_prompt_can_open_it(self):
        dialect = FAMILIES["qwen_xml"]
        call = dialect.tool_call("search", {"query": "Emma"})
        assert dialect.parse(encode(dialect, call + "<|im_end|>")).calls == []
        turn = dialect.parse(encode(dialect, f"hm</think>\n\n{call}<|im_end|>"))
        assert ok(turn) == [("search", {"query": "Emma"})] and turn.content == ""

    def test_tags_inside_a_call_belong_to_the_call(self):
        call = '{"name": "search", "arguments": {"query": "<think>"}}'
        turn = read(FAMILIES["hermes"], f"<tool_call>{call}</tool_call>a")
        assert ok(turn) == [("search", {"query": "<think>"})] and turn.content == "a"

    def test_a_close_without_an_open_is_text(self):
        assert read(FAMILIES["hermes"], "a</think>b").content == "a</think>b"


class TestTagsByToken:
    """Where a tag is a token, the same letters are text."""

    @staticmethod
    def spell(text):
        return list(text.encode())

    def test_a_spelled_call_is_text(self):
        dialect = FAMILIES["hermes"]
        spelled = self.spell(f"<tool_call>{GOOD}</tool_call>")
        assert dialect.parse(spelled).calls == []
        both = [*spelled, *encode(dialect, f"<tool_call>{GOOD}</tool_call>")]
        turn = dialect.parse(both)
        assert ok(turn) == [("search", {"query": "Emma"})]
        assert turn.content == f"<tool_call>{GOOD}</tool_call>"

    def test_a_spelled_close_does_not_close(self):
        dialect = FAMILIES["hermes"]
        call = '{"name": "search", "arguments": {"query": "</tool_call>"}}'
        ids = [*encode(dialect, "<tool_call>"), *self.spell(call), *encode(dialect, "</tool_call>")]
        assert ok(dialect.parse(ids)) == [("search", {"query": "</tool_call>"})]

    def test_spelled_thinking_is_text(self):
        dialect = FAMILIES["hermes"]
        ids = self.spell("<think>") + encode(dialect, f"<tool_call>{GOOD}</tool_call>")
        assert len(dialect.parse(ids).calls) == 1

    def test_a_spelled_stop_does_not_stop(self):
        assert FAMILIES["hermes"].parse(self.spell("a<|im_end|>b")).content == "a<|im_end|>b"

    def test_private_characters_forge_nothing(self):
        for opening, closing in itertools.pairwise(RESERVED):
            turn = FAMILIES["hermes"].parse(self.spell(f"{opening}{GOOD}{closing}"))
            assert turn.calls == [] and GOOD in turn.content


class TestNeverRaises:
    @every_family
    @settings(max_examples=100, deadline=None)
    @given(data=st.data())
    def test_on_any_ids(self, family, data):
        dialect = FAMILIES[family]
        size = len(dialect.tokenizer)
        tokens = st.integers(0, size - 1) | st.integers(256, size - 1)
        spans = st.lists(tokens) | nasty_text.map(lambda text: encode(dialect, text))
        turn = dialect.parse(data.draw(spans), [SEARCH])
        assert json.dumps([turn.content, turn.raw, [vars(call) for call in turn.calls]])
        assert all((call.arguments is None) == (call.error is not None) for call in turn.calls)

    @pytest.mark.parametrize(
        "text",
        [
            "<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_call>{", '<tool_call>{"name": "f", ',
            "<think></think>", "[", '{"a":', '{"name": ', "\n{\n", '{"name":"f"};', '{"name":"f"}', "<|python_tag|>",
            "<function=", "<parameter=", "<parameter=a>", "</parameter>", "```", "```\n", "\n```python\n", "`", " ",
            "\n", '\n{"a":', '\n{"a": None, "b": [', '\n{"name": "f", "x": 1,', "\n{'a", '\n{"a": 1}', '\n{"a": "\\"',
            "<answer>", "</answer>", "<answer>a</answer>", '\n{"<answer>a</answer>":',
            "\nAction: f\n<answer>a</answer>", "\nAction: f", "\nAction Input: {", "\nAction:", "\nAction Input: [1,",
            "<", "\\", '"', "\\u",
        ],
    )  # fmt: skip
    def test_and_takes_linear_time(self, text):
        """50,000 bytes of one pattern: linear time is a few hundredths of a second, quadratic many seconds."""
        for (family, dialect), head in itertools.product(FAMILIES.items(), ["", "<tool_call>", "Action Input: "]):
            if head and family not in ("hermes", "qwen_xml", "react"):
                continue
            span = np.array(encode(dialect, head + text * (50_000 // len(text))), dtype=np.int32)
            start = time.thread_time()
            dialect.parse(span, [SEARCH])
            assert time.thread_time() - start < 2, family

    @every_family
    def test_arrays_and_lists_read_alike(self, family):
        dialect = FAMILIES[family]
        ids = encode(dialect, dialect.tool_call("search", {"query": "Emma"}) + dialect.end_of_turn)
        assert dialect.parse(np.array(ids, dtype=np.int32)) == dialect.parse(ids) == dialect.parse(tuple(ids))
        assert dialect.parse([]).raw == "" and dialect.parse(np.array([], dtype=np.int32)).calls == []


@given(st.text() | json_values.map(json.dumps))
def test_read_json_agrees_with_the_standard_library(text):
    try:
        expected = json.loads(text, strict=False)  # with line breaks in strings
    except ValueError:
        if not re.search("True|False|None", text):
            with pytest.raises(ValueError):
                read_json(text)
    else:
        try:
            assert read_json(text) == expected
        except ValueError as error:  # what is refused on purpose
            assert any(word in str(error) for word in ("twice", "surrogate", "no JSON number", "too large"))


@given(json_values)
def test_read_json_reads_python_words(value):
    """Outside of strings only; everything else is as it was."""
    words = {"true": "True", "false": "False", "null": "None"}
    text = re.sub(r'"(?:[^"\\]|\\.)*"|true|false|null', lambda m: words.get(m[0], m[0]), json.dumps(value))
    try:
        plain = read_json(json.dumps(value))
    except ValueError:
        with pytest.raises(ValueError):
            read_json(text)
    else:
        assert read_json(text) == plain
        value, end = read_json(f"  {text} rest", 2)
        assert value == plain and end == len(text) + 2


# ------------------------------------------------------------------------------------------------------- get_dialect


class TestGetDialect:
    @pytest.mark.parametrize(
        ("tokenizer", "name", "native"),
        [(BYTES, "hermes", True), (XML, "qwen_xml", True), (LLAMA, "llama3_json", True), (PLAIN, "hermes", False)],
    )
    def test_the_template_tells_the_family(self, tokenizer, name, native):
        dialect = get_dialect(None, tokenizer)
        assert (dialect.name, dialect.native) == (name, native)
        assert dialect is get_dialect(name, tokenizer)

    @pytest.mark.parametrize(
        ("family", "stops", "end"),
        [
            ("hermes", ["<|im_end|>", "<|endoftext|>"], "<|im_end|>"),
            ("llama3_json", ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"], "<|eot_id|>"),
            ("hermes-turns", ["</turn>"], "</turn>"),
        ],
    )
    def test_stop_tokens(self, family, stops, end):
        dialect = FAMILIES[family]
        assert [dialect.tokenizer.decode([i]) for i in dialect.stop_token_ids] == stops
        assert dialect.end_of_turn == end and dialect.close() == encode(dialect, end)

    @pytest.mark.parametrize("tokenizer", [BYTES, XML, LLAMA, PLAIN])
    def test_a_template_writes_one_familys_calls(self, tokenizer):
        natives = [name for name in DIALECTS if get_dialect(name, tokenizer).native]
        assert natives == [get_dialect(None, tokenizer).name] * (tokenizer is not PLAIN)

    def test_an_unknown_name(self):
        with pytest.raises(ValueError, match="unknown dialect 'qwen'; there are hermes, qwen_xml, llama3_json"):
            get_dialect("qwen", BYTES)

    @pytest.mark.parametrize("name", DIALECTS)
    def test_kept_per_tokenizer_and_copied_as_themselves(self, name):
        dialect = get_dialect(name, BYTES)
        assert get_dialect(name, BYTES) is dialect
        assert copy.deepcopy(dialect) is dialect and pickle.loads(pickle.dumps(dialect)) is dialect
        other = pickle.loads(pickle.dumps(get_dialect(name, PLAIN)))
        assert other.name == name and other.render(MESSAGES) == get_dialect(name, PLAIN).render(MESSAGES)

    def test_another_template_on_the_same_tokenizer_is_noticed(self):
        tokenizer = ByteTokenizer()
        before = get_dialect(None, tokenizer)
        tokenizer.chat_template = XML_CHATML
        assert (before.name, get_dialect(None, tokenizer).name) == ("hermes", "qwen_xml")

    def test_a_slow_tokenizer_object_will_do(self):
        """Only encode, decode, len, a chat template and the added tokens; no backend."""
        slow = SimpleTokenizer()
        assert get_dialect(None, slow).render(MESSAGES, [SEARCH]) == FAMILIES["hermes"].render(MESSAGES, [SEARCH])


class SimpleTokenizer:
    chat_template = BYTES.chat_template

    def encode(self, text, add_special_tokens=True):
        return [] if add_special_tokens else BYTES.encode(text)

    def decode(self, ids, skip_special_tokens=True):
        return "" if skip_special_tokens else BYTES.decode(ids)

    def get_added_vocab(self):
        return BYTES.get_added_vocab()

    def __len__(self):
        return len(BYTES)


# --------------------------------------------------------------------------------------- another implementation


class TestAgainstRenderers:
    """The `renderers` package writes the same bridges and reads the same calls, over a vocabulary built here."""

    VISION = (
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )  # Qwen3.5's renderer asks for them

    @pytest.mark.parametrize(
        ("tokenizer", "name", "dialect"),
        [
            (BYTES, "Qwen3Renderer", "hermes"),
            (ByteTokenizer(CONTROL_TOKENS + MARKUP_TOKENS + VISION, XML_CHATML), "Qwen35Renderer", "qwen_xml"),
            (LLAMA, "Llama3Renderer", "llama3_json"),
        ],
    )
    def test_bridges_and_calls(self, tokenizer, name, dialect, tmp_path):
        pytest.importorskip("transformers", reason="renderers needs a transformers tokenizer")
        renderers = pytest.importorskip("renderers", reason="the renderers package is not installed")
        tokenizer.save_pretrained(tmp_path)
        loaded = load_tokenizer(tmp_path)
        other = getattr(renderers, name)(loaded)
        ours = get_dialect(None, loaded)
        assert ours.name == dialect
        prompt = ours.render(MESSAGES, [SEARCH])
        opened = "</think>\n\n" if ours.starts_thinking else ""
        for arguments in ({"query": "Emma"}, {"query": 'a "b" \n é'}):
            span = encode(ours, opened + ours.tool_call("search", arguments) + ours.end_of_turn)
            theirs = other.parse_response(span, prompt_ids=prompt)
            calls = [(call.name, call.arguments) for call in theirs.tool_calls]
            assert ok(ours.parse(span, [SEARCH])) == calls == [("search", arguments)]
            for results in (["Jane Austen"], ["one", 'two\n"three"']):
                messages = [{"role": "tool", "content": content} for content in results]
                bridged = other.bridge_to_next_turn(prompt, span, messages)
                assert prompt + span + ours.bridge(True, [("search", r) for r in results]) == bridged.token_ids


# ------------------------------------------------------------------------------------------------------------- docs


class TestDocs:
    PAGE = Path(__file__).parents[3] / "docs" / "dialects.md"

    @pytest.mark.parametrize("family", DIALECTS)
    def test_the_exchange_shown_is_the_exchange_written(self, family):
        dialect = FAMILIES[family]
        name, arguments, result = "search", {"query": "author of Emma"}, "Jane Austen wrote Emma."
        if family == "fenced":
            name, arguments, result = "python", {"code": "print(2 ** 10)"}, "1024"
        text = dialect.tool_call(name, arguments) + dialect.end_of_turn
        text += dialect.tokenizer.decode(dialect.bridge(True, [(name, result)]))
        shown = re.search(rf"### {family}\n\n(`{{3,}})text\n(.*?)\1", self.PAGE.read_text(), re.DOTALL)
        assert shown and shown[2].strip() == text.strip()

    def test_the_code_runs(self, monkeypatch):
        monkeypatch.setattr("agent_r1.dialects.DIALECTS", dict(DIALECTS))
        blocks = re.findall(r"```python\nfrom (.*?)```", self.PAGE.read_text(), re.DOTALL)
        interface, own = ("from " + block for block in blocks)
        names = {}
        exec(interface, names)
        assert ok(names["turn"]) == [("search", {"query": "Emma"})]
        exec(own, names)
        dialect = names["dialect"]
        turn = read(dialect, "Hm.<search>author of Emma</search>" + dialect.end_of_turn)
        assert ok(turn) == [("search", {"query": "author of Emma"})] and turn.content == "Hm."
        assert "<information>Jane</information>" in BYTES.decode(dialect.bridge(True, [("search", "Jane")]))
