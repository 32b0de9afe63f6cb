"""One rule for what a tool call is, in every dialect and in the replies of chat APIs: `agent_r1.dialects.calls`."""

import json
import time
from types import SimpleNamespace

import pytest
from notes_env import begin, made, span

from agent_r1.dialects import DIALECTS
from agent_r1.dialects.calls import parameter_types, read_arguments

MALFORMED, FAILED = {"process/malformed_call": -0.1}, {"process/failed_call": -0.05}
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)


def written(dialect, name, arguments):
    """A call with arguments as JSON text, as a model of the family would write it."""
    body = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
    return {
        "hermes": f"<tool_call>\n{body}\n</tool_call>",
        "llama3_json": body,
        "react": f"Action: {name}\nAction Input: {arguments}",
        "fenced": f"```tool_call\n{body}\n```",
    }[dialect]


json_dialects = pytest.mark.parametrize("dialect", ["hermes", "llama3_json", "react", "fenced"])

ARGUMENTS = [
    ('{"path": "a.py", "text": "x = 1\nprint(x)"}', {"path": "a.py", "text": "x = 1\nprint(x)"}),
    ('{"path": "a\tb", "text": "\r\n"}', {"path": "a\tb", "text": "\r\n"}),
    ('{"path": "a", "draft": True}', {"path": "a", "draft": True}),
    ('{"path": "None, True", "draft": False, "lines": None}', {"path": "None, True", "draft": False, "lines": None}),
    ('{"path": "a", "lines": [1, 2]}', {"path": "a", "lines": [1, 2]}),
    ('{"path": "a", "depth": null}', {"path": "a"}),
    ('{"path": "a", "depth": None}', {"path": "a"}),
    ('{"path": "a", "depth": "", "lines": " "}', {"path": "a"}),
    ('{"path": "a", "text": null, "draft": null}', {"path": "a"}),
    ('{"path": "a", "text": ""}', {"path": "a", "text": ""}),
    ('{"path": "{\\"a\\": {}}", "text": "}"}', {"path": '{"a": {}}', "text": "}"}),
    ('{"path": "<answer>a</answer>", "text": "\\"<answer>\\""}', {"path": "<answer>a</answer>", "text": '"<answer>"'}),
    (json.dumps('{"path": "a", "depth": 5}'), {"path": "a", "depth": 5}),
]


@json_dialects
@pytest.mark.parametrize(("text", "arguments"), ARGUMENTS)
def test_arguments_that_are_read(dialect, text, arguments):
    outcome = begin(dialect).step(span(begin(dialect), written(dialect, "note", text)))
    assert (made(outcome), outcome[4]["reward_terms"]) == ([("note", arguments, True)], {})


@every_dialect
@pytest.mark.parametrize(("text", "arguments"), ARGUMENTS)
def test_a_reply_reads_the_same_arguments(dialect, text, arguments):
    for form in ("tool_calls", "function_call", "tool_use"):
        outcome = begin(dialect).step_message(reply(form, "note", text))
        assert (made(outcome), outcome[4]["reward_terms"]) == ([("note", arguments, True)], {}), form


NO_OBJECT = [
    "{'path': 'a'}", '{"path": "a",}', '{"path": "a"', '{path: "a"}', '{"path": "a", "path": "b"}', '{"path": NaN}',
    '["a"]', "[]", "5", "true", "false", '"a"', json.dumps(json.dumps('{"path": "a"}')),
    '{"path": nothing}', '{"path": "a" "text": "b"}', '{"path": "a", None: 1}', "path=a", '{"path": None, "path": 1}',
]  # fmt: skip


@json_dialects
@pytest.mark.parametrize("text", NO_OBJECT)
def test_arguments_that_are_no_object_are_a_malformed_call(dialect, text):
    outcome = begin(dialect).step(span(begin(dialect), written(dialect, "note", text)))
    assert ([call[1:] for call in made(outcome)], outcome[4]["reward_terms"]) == ([(None, False)], MALFORMED)
    assert not outcome[2]


@every_dialect
@pytest.mark.parametrize("text", NO_OBJECT)
def test_and_in_a_reply(dialect, text):
    for form in ("tool_calls", "function_call", "tool_use"):
        outcome = begin(dialect).step_message(reply(form, "note", text))
        assert ([call[1:] for call in made(outcome)], outcome[4]["reward_terms"]) == ([(None, False)], MALFORMED), form


@json_dialects
@pytest.mark.parametrize("text", ["{}", "{ }", "null", "None", '""', '" "', '"{}"', '"null"'])
def test_no_arguments(dialect, text):
    assert made(begin(dialect).step(span(begin(dialect), written(dialect, "ping", text)))) == [("ping", {}, True)]
    outcome = begin(dialect).step(span(begin(dialect), written(dialect, "note", text)))  # it requires a path
    assert (made(outcome), outcome[4]["reward_terms"]) == ([("note", {}, False)], FAILED)


@pytest.mark.parametrize(
    ("dialect", "call"),
    [
        ("hermes", '<tool_call>{"name": "NAME"}</tool_call>'),
        ("llama3_json", '{"name": "NAME"}'),
        ("llama3_json", '{"type": "function", "name": "NAME"}'),
        ("llama3_json", '<|python_tag|>{"name": "NAME"}'),
        ("react", "Thought: so.\nAction: NAME"),
        ("fenced", '```json\n{"name": "NAME"}\n```'),
    ],
)
def test_a_name_alone_calls_a_tool_that_requires_nothing(dialect, call):
    assert made(begin(dialect).step(span(begin(dialect), call.replace("NAME", "ping")))) == [("ping", {}, True)]
    for name in ("note", "nobody"):
        outcome = begin(dialect).step(span(begin(dialect), call.replace("NAME", name)))
        is_text = name == "nobody" and dialect in ("llama3_json", "fenced") and "tag" not in call
        assert [(given, ok) for _, given, ok in made(outcome)] == [(None, False)] * (not is_text)
        assert outcome[4]["reward_terms"] == ({"process/no_action": 0.0} if is_text else MALFORMED)


def test_react_takes_an_empty_input_for_none():
    for text in ("Action: ping\nAction Input:", "Action: ping\nAction Input: \nObservation: pong", "Action: ping\n"):
        assert made(begin("react").step(span(begin("react"), text))) == [("ping", {}, True)]
    assert made(begin("react").step(span(begin("react"), 'Action: ping\nAction Input:\n{"a": 1}')))[0][1] == {"a": 1}


@pytest.mark.parametrize("dialect", ["hermes", "llama3_json", "fenced"])  # ReAct has no names for them
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_both_names_of_the_arguments(dialect, key):
    call = written(dialect, "note", '{"path": "a"}').replace('"arguments"', f'"{key}"')
    assert made(begin(dialect).step(span(begin(dialect), call))) == [("note", {"path": "a"}, True)]
    both = call.replace('{"path": "a"}}', '{"path": "a"}, "arguments": {}, "parameters": {}}')
    assert begin(dialect).step(span(begin(dialect), both))[4]["reward_terms"] == MALFORMED


XML = "<tool_call>\n<function=note>\n<parameter=path>\na\n</parameter>\n{}\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("<parameter=lines>\n[1, 2]\n</parameter>", {"lines": [1, 2]}),
        ("<parameter=lines>\nNone\n</parameter>", {"lines": None}),
        ("<parameter=lines>\n\n</parameter>", {}),
        ("<parameter=depth>\n\n</parameter>", {}),
        ("<parameter=depth></parameter>", {}),
        ("<parameter=depth>\nNone\n</parameter>", {}),
        ("<parameter=depth> null </parameter>", {}),
        ("<parameter=depth>\n 5 \n</parameter>", {"depth": 5}),
        ("<parameter=draft>\nTrue\n</parameter>", {"draft": True}),
        ("<parameter=draft>false</parameter>", {"draft": False}),
        ("<parameter=text>\nNone\n</parameter>", {"text": "None"}),
        ("<parameter=text>\n\n</parameter>", {"text": ""}),
        ("<parameter=text>\n</function>\n</parameter>", {"text": "</function>"}),
        ("<parameter=text>\na < b <param>\n</parameter>", {"text": "a < b <param>"}),
    ],
)
def test_xml_values(parameter, value):
    outcome = begin("qwen_xml").step(span(begin("qwen_xml"), XML.format(parameter)))
    assert made(outcome) == [("note", {"path": "a"} | value, True)]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("['a', 'b']", ["a", "b"]),
        ("[1, None, True]", [1, None, True]),
        ("('a', 'b')", ["a", "b"]),
        ("{'k': [1, {'x': None}]}", {"k": [1, {"x": None}]}),
        ("[1, 2,]", [1, 2]),
        ("['it\\'s', \"b\"]", ["it's", "b"]),
        *((text, text) for text in ("['a'", "{'a', 'b'}", "{1: 2}", "{'k': 1, 'k': 2}", "[f(x)]", "[1 + 1]", "b'a'")),
        *((text, text) for text in ("{**{'a': 1}}", "[1j]", "[1e999]", "-" * 9999 + "1", "[" * 9999)),
    ],
)
def test_xml_reads_python_literals_where_no_string_may_be(written, value):
    dialect = begin("qwen_xml").dialect
    tool = {"name": "f", "parameters": {"properties": {"x": {"type": ["array", "object"]}}}}
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>"
    [call] = dialect.parse(dialect.tokenizer.encode(text, add_special_tokens=False), [tool]).calls
    assert call.arguments == {"x": value}


@pytest.mark.parametrize(
    "parameters",
    [
        "<parameter=path>\na\n<parameter=text>\nb\n</parameter>",
        "<parameter=path>a<parameter=text>b</parameter>",
        "<parameter=path>\na\n\n<parameter=text>\nb\n</parameter>\n<parameter=depth>\n5\n</parameter>",
        "<parameter=path>\na\n</parameter>\n<parameter=text>\nb\n<parameter=depth>\n5\n</parameter>",
        "<parameter=path>\na\n<parameter=path>\nb\n</parameter>",
        "<parameter=path>\na\n</parameter>\n<parameter=text>\nb",
        "<parameter=path>\na\n</Parameter>",
        "<parameter=path>\na\n</parameter>\n<parameter=path>\nb\n</parameter>",
        "<parameter=path\na\n</parameter>",
        "<PARAMETER=path>\na\n</PARAMETER>",
        "<parameter=text>\n<function=ping>\n</function>\n<parameter=path>\na\n</parameter>",
    ],
)
def test_xml_never_makes_one_value_of_two(parameters):
    text = f"<tool_call>\n<function=note>\n{parameters}\n</function>\n</tool_call>"
    outcome = begin("qwen_xml").step(span(begin("qwen_xml"), text))
    assert (made(outcome), outcome[4]["reward_terms"]) == ([("note", None, False)], MALFORMED)


def test_xml_does_not_write_what_it_does_not_read():
    dialect = begin("qwen_xml").dialect
    for value in ("<parameter=text>", "a</parameter>"):
        with pytest.raises(ValueError, match="cannot write a string that contains"):
            dialect.tool_call("note", {"path": value})
    listed = dialect.tool_call("note", {"path": ["<parameter=text>"]})
    assert "<parameter=text>" not in listed
    outcome = begin("qwen_xml").step_message(reply("tool_calls", "note", {"path": "a", "text": "<parameter=b>"}))
    assert outcome[4]["reward_terms"] == MALFORMED


# ---------------------------------------------------------------------- answers


@every_dialect
@pytest.mark.parametrize("around", ["{}", "So:\n{}", "{}\nThat is it.", "<think>hm</think>{}", "{0}\n{0}"])
def test_a_call_in_an_answer_is_none(dialect, around):
    env = begin(dialect)
    call = env.dialect.tool_call("ping", {})
    text = around.format(f"<answer>\n{call}\n</answer>")
    _, _, terminated, _, info = env.step(span(env, text))
    assert (terminated, info["tool_calls"], info["answer"]) == (True, [], call.strip())


@every_dialect
@pytest.mark.parametrize(
    ("text", "calls", "answer"),
    [
        ("<answer>a</answer>\nCALL", 1, None),
        ("CALL\n<answer>a</answer>", 1, None),
        ("<answer>\nCALL\n</answer>\nCALL", 1, None),
        ("CALL\n<answer>\nCALL\n</answer>\nCALL", 2, None),
        ("I end with <answer> later.\nCALL", 1, None),
        ("The tag </answer> is text.\nCALL\n", 1, None),
        ("<answer>a\n<answer>\nCALL\n</answer>", 0, "CALL"),
        ("<answer>x</answer><think>\nCALL\n</think><answer>a</answer>", 0, "a"),
        ("<think><answer></think>\nCALL\n", 1, None),
        ("<ANSWER>\nCALL\n</ANSWER>", 1, None),
        ("<answer>\nCALL\n<think>so </answer></think>", 1, None),
        ("<answer>\nCALL\n<think>so </answer>", 1, None),
        ("<answer>\nCALL\n<think></answer></think><answer>a</answer>", 1, None),
        ("<answer>\nCALL\n<think>a</think><think></answer></think>\nCALL\n", 2, None),
        ("<answer>\nCALL\n<think><answer></think></answer>", 0, "CALL"),
        ("<answer>\nCALL\n<think></answer></think>\n</answer>", 0, "CALL"),
        ("<think></answer></think><answer>\nCALL\n</answer>", 0, "CALL"),
    ],
)
def test_calls_and_answers_in_one_turn(dialect, text, calls, answer):
    env = begin(dialect)
    call = env.dialect.tool_call("ping", {})
    _, _, terminated, _, info = env.step(span(env, text.replace("CALL", call)))
    assert made((0, 0, 0, 0, info)) == [("ping", {}, True)] * calls
    assert (terminated, info.get("answer")) == (answer is not None, answer and answer.replace("CALL", call))


@every_dialect
def test_an_answer_in_a_call_is_part_of_the_call(dialect):
    env = begin(dialect)
    texts = ["<answer>a</answer>", 'x = "<answer>"', "</answer>\n<answer>b\\n</answer>"]
    turn = env.dialect.write_turn("So.", [("note", {"path": text}) for text in texts])
    outcome = env.step(span(env, turn + "\n<answer>c</answer>"))
    assert made(outcome) == [("note", {"path": text}, True) for text in texts]


@pytest.mark.parametrize(
    "line",
    [
        '{"x": 1, "y": None}', '{"x": 1, "y": nothing}', '{"name": "Ann", "age": 3}', '{"name": "Ann"}',
        '{"arguments": [1, 2]}', '{"parameters": 7, "layers": 32}', '{"x": [1, 2}', '{"x', '{"x: 1}', "{'x': 1}",
        '{"name": "Ann", "age": None, "born": {"in": "Rome",', '  {"v": x} for x in xs', '{"a": 1}{"b": 2}',
        '{"name": "Ann", "age": 3', '{"Name": "ping", "Arguments": {}}', '{"name": ["ping"], "of": "x"}', '{"": {}}',
        '{"x": "\\ud800"}', '{"x": 1, "x": 2}', '{"x": NaN, "y": 1e999}',
    ],
)  # fmt: skip
def test_a_line_that_begins_like_json_eats_neither_answer_nor_call(line):
    env = begin("llama3_json")
    _, _, terminated, _, info = env.step(span(env, f"It prints\n{line}\n<answer>a</answer>"))
    assert (terminated, info["tool_calls"], info["answer"]) == (True, [], "a")
    env = begin("llama3_json")
    outcome = env.step(span(env, f'It prints\n{line}\n{{"name": "ping", "parameters": {{}}}}'))
    assert made(outcome) == [("ping", {}, True)]


# ---------------------------------------------------------------------- replies


def reply(form, name, arguments):
    if form == "tool_calls":
        return {"content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
    if form == "function_call":
        return {"role": "assistant", "content": None, "function_call": {"name": name, "arguments": arguments}}
    return {"content": [{"type": "text", "text": "So."}, {"type": "tool_use", "name": name, "input": arguments}]}


@every_dialect
@pytest.mark.parametrize("form", ["tool_calls", "function_call", "tool_use"])
@pytest.mark.parametrize("given", [{}, "{}", "", None, "null", " "])
def test_a_reply_without_arguments(dialect, form, given):
    assert made(begin(dialect).step_message(reply(form, "ping", given))) == [("ping", {}, True)]


@pytest.mark.parametrize("form", ["tool_calls", "function_call", "tool_use"])
@pytest.mark.parametrize("name", [None, "", 5, ["ping"], {"name": "ping"}])
def test_a_reply_without_a_name_is_a_malformed_call(form, name):
    assert begin().step_message(reply(form, name, {}))[4]["reward_terms"] == MALFORMED


@every_dialect
def test_what_a_client_says_twice_is_called_once(dialect):
    """LangChain keeps Anthropic's parts of the content beside the calls that it has read in them."""
    part = {"type": "tool_use", "id": "1", "name": "ping", "input": {}}
    calls = [{"name": "ping", "args": {}, "id": "1", "type": "tool_call"}]
    both = {"content": [{"type": "thinking", "thinking": "hm"}, part, {**part, "id": "2"}]}
    assert len(made(begin(dialect).step_message(both))) == 2
    assert made(begin(dialect).step_message(both | {"tool_calls": calls})) == [("ping", {}, True)]
    assert len(made(begin(dialect).step_message(both | {"function_call": {"name": "ping", "arguments": ""}}))) == 1
    message = SimpleNamespace(model_dump=lambda: {"role": "assistant", "function_call": None} | both)
    assert len(made(begin(dialect).step_message(message))) == 2


@pytest.mark.parametrize("old", ["ping", 5, [], ["ping"]])
def test_an_old_call_that_is_none(old):
    with pytest.raises(TypeError, match="a call in a reply must have"):
        begin().step_message({"content": None, "function_call": old})


@every_dialect
@pytest.mark.parametrize(
    "arguments",
    [{"path": 5}, {"path": "a", "depth": "5"}, {"path": True}, {"path": "a", "draft": "true"}, {"path": ["a"]}],
)
def test_a_reply_never_runs_with_other_types(dialect, arguments):
    """Qwen's XML writes "5" and 5 alike."""
    outcome = begin(dialect).step_message(reply("tool_calls", "note", arguments))
    assert [call[2] for call in made(outcome)] == [False]
    assert outcome[4]["reward_terms"] == (MALFORMED if dialect == "qwen_xml" else FAILED)


@every_dialect
@pytest.mark.parametrize("key", ["arguments", "parameters", "args", "input"])
def test_a_reply_may_name_the_arguments_as_any_client_does(dialect, key):
    for given in ({"path": "a"}, '{"path": "a"}'):
        for call in ({"function": {"name": "note", key: given}}, {"name": "note", key: given}):
            outcome = begin(dialect).step_message({"content": None, "tool_calls": [call]})
            assert made(outcome) == [("note", {"path": "a"}, True)]


@every_dialect
@pytest.mark.parametrize("keys", [("arguments", "parameters"), ("args", "input"), ("arguments", "args")])
def test_a_reply_that_names_them_twice_is_malformed(dialect, keys):
    call = {"function": {"name": "note"} | dict.fromkeys(keys, {"path": "a"})}
    outcome = begin(dialect).step_message({"content": None, "tool_calls": [call]})
    assert ([call[1:] for call in made(outcome)], outcome[4]["reward_terms"]) == ([(None, False)], MALFORMED)


@every_dialect
@pytest.mark.parametrize("form", ["tool_calls", "function_call", "tool_use"])
def test_a_name_alone_in_a_reply(dialect, form):
    for name, well_formed in (("ping", True), ("note", False), ("nobody", False), ("", False)):
        call = {"type": "tool_use", "name": name}
        message = {"content": None} | {
            "tool_calls": {"tool_calls": [{"function": call}]},
            "function_call": {"function_call": call},
            "tool_use": {"content": [call]},
        }[form]
        outcome = begin(dialect).step_message(message)
        assert [call[1:] for call in made(outcome)] == [({}, True) if well_formed else (None, False)]
        assert outcome[4]["reward_terms"] == ({} if well_formed else MALFORMED)


# ---------------------------------------------------------------------- the parts


def test_the_types_of_parameters():
    properties = {
        "a": {"type": "integer"}, "b": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "c": {"enum": [1, None]},
        "d": {"anyOf": [{"type": "integer"}, {"const": None}]}, "e": {"type": ["integer", "null"]}, "f": True,
    }  # fmt: skip
    types = parameter_types({"parameters": {"type": "object", "properties": properties}})
    assert {key: sorted(one) for key, one in types.items()} == {
        "a": ["integer"], "b": ["null", "string"], "c": [], "d": [], "e": ["integer", "null"], "f": [],
    }  # fmt: skip
    assert parameter_types({}) == parameter_types({"parameters": None}) == {}


def test_read_arguments():
    assert [read_arguments(given) for given in (None, "", "\n", {}, {"a": 1}, '{"a": None}')] == [
        {}, {}, {}, {}, {"a": 1}, {"a": None},
    ]  # fmt: skip
    assert [read_arguments(given) for given in (0, [], False, "[]", '"{}"', "a", 1.5)] == [None] * 7


# ---------------------------------------------------------------------- hostile lengths: each took seconds


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("fenced", "```\n" + "```\n```python\n<answer>\n```\n</answer>\n```\n" * 2_000),  # a reading showed one answer
        ("llama3_json", '\n{"a":' * 12_000),
        ("llama3_json", '{"name":\n' * 9_000),
        ("llama3_json", '{"x":[1e999,\n' * 6_000),
    ],
)
def test_long_turns_are_read_in_time(dialect, text):
    env = begin(dialect)
    tokens = env.tokenizer.encode(text, add_special_tokens=False)
    begun = time.process_time()
    turn = env.dialect.parse(tokens, [tool.schema for tool in env.tools.values()])
    assert time.process_time() - begun < 3
    assert all(call.arguments is None or "\U0010f8a5" not in str(call.arguments) for call in turn.calls)
