"""Calls that templates write are read again, however an answer is cut into pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.text.answers import AnswerReader, Style, message_of
from mpjax.text.channels import HARMONY, THINK, Channels
from mpjax.text.chat_template import render
from mpjax.text.tool_formats import ToolFormat
from tests.mpjax.text.tool_templates import TEMPLATES

pytestmark = pytest.mark.any_version

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "flag": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": PROPERTIES | {"deep": {"type": "object"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA}}
    for name in ("get_weather", "now")
]
SCHEMAS = {tool["function"]["name"]: SCHEMA for tool in TOOLS}
ARGUMENTS = {
    "city": 'Par"is}\n</x>, é\\',
    "days": 5,
    "deep": {"a": [1, 2.5, True, None, {}, []], "b": "x,y"},
    "flag": False,
}
BARE = ("Llama 3", "Llama pythonic", "harmony")  # text before a call is no call's
USER = [{"role": "user", "content": "Hi"}]


def style_of(name, has_tokens=True):
    source, tokens = TEMPLATES[name]
    markers = dict(enumerate(tokens if has_tokens else ()))
    return Style(Channels.of_template(source), ToolFormat.of_template(source), markers)


def written(name, calls, content=None):
    """The answer that a template writes for calls."""
    source, _ = TEMPLATES[name]
    functions = [{"name": n, "arguments": json.dumps(arguments)} for n, arguments in calls]
    made = [
        {"id": f"abcdefgh{i}", "type": "function", "function": function}
        for i, function in enumerate(functions)
    ]
    answer = {"role": "assistant", "content": content, "tool_calls": made}
    variables = {"tools": TOOLS, "eos_token": "<eos>"}
    prompt = render(source, USER, variables | {"add_generation_prompt": True}, "it")
    whole = render(source, [*USER, answer], variables, "it")
    assert whole.startswith(prompt)
    return whole.removeprefix(prompt).removesuffix("<eos>").removesuffix("<|call|>")


def read(style, pieces, prompt="assistant: ", tools=SCHEMAS, **rest):
    reader = AnswerReader(style, prompt, tools=tools, **rest)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return [*parts, *reader.finish()]


def called(parts):
    message = message_of(parts)
    return message.text, [(call.name, json.loads(call.arguments)) for call in message.calls]


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "texts"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_calls_of_a_template_are_read_again(name, has_tokens):
    style = style_of(name, has_tokens)
    assert style.tools is not None
    assert style.tools.name == name
    calls = [("get_weather", ARGUMENTS), ("now", {})][: 1 if style.tools.is_single else 2]
    text = written(name, calls)
    whole = read(style, [text])
    assert called(whole) == ("", calls)
    assert called(read(style, text)) == ("", calls)  # a character at a time
    for at in range(len(text)):
        assert called(read(style, [text[:at], text[at:]])) == ("", calls), text[:at]
    cut = message_of(read(style, [text[: len(text) // 4]]))
    assert (cut.calls, cut.reasoning) == ([], "")


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in BARE])
def test_text_comes_before_calls_and_may_come_behind_them(name):
    style = style_of(name)
    calls = [("get_weather", {"city": "x"})]
    text = "Let me see <tool" + written(name, calls)
    assert called(read(style, text)) == ("Let me see <tool", calls)
    found, [_] = called(read(style, f"{text}\nDone."))
    assert found == ("Let me see <tool\nDone.")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_of_an_unknown_tool_is_text(name):
    style = style_of(name)
    text = written(name, [("launch", {"city": "x"})])
    parts = read(style, text)
    assert {part.kind for part in parts} == {"text"}
    assert message_of(parts).text == text


def test_arguments_come_as_they_are_written():
    text = '<tool_call>\n{"name": "now", "arguments": {"city": "x"}}\n</tool_call>'
    reader = AnswerReader(style_of("hermes"), tools=SCHEMAS)
    kinds = [[(part.kind, part.text) for part in reader.push(piece)] for piece in text]
    at = text.index('{"city"')
    assert not any(kinds[: at - len('"arguments": ')])
    assert kinds[at] == [("arguments", "{")]
    assert kinds[at + 4] == [("arguments", "t")]
    assert kinds[text.index("}") : text.index("}") + 2] == [[("arguments", "}")], [("end", "")]]


@pytest.mark.parametrize(
    ("name", "text", "left"),
    [
        ("hermes", "<tool_call>\n{}\n</tool_call>", "<tool_call>\n{}\n</tool_call>"),
        ("hermes", "<tool_call>hello", "<tool_call>hello"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {]}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>', None),
        (
            "hermes",
            r'<tool_call>{"id": "\ud800", "name": "now", "arguments": {}}</tool_call>',
            None,
        ),
        ("Llama 3", '{"answer": 5}', '{"answer": 5}'),
        ("Llama 3", 'So: {"name": "now", "parameters": {}}', None),
        ("Qwen3-Coder", "<tool_call>\n<function=now>\nwhat", None),
        ("Llama pythonic", "[1](now)", None),
        ("Llama pythonic", "So: [now()]", None),
        ("Llama pythonic", "[now('x')]", None),
        ("Llama pythonic", "[now(city=x)]", None),
        ("LFM2", "<|tool_call_start|>[now(days=1+1)]<|tool_call_end|>", None),
        ("Gemma 4", "<|tool_call>call:now{a:<tool_call|>", None),
        ("Kimi K2", "<|tool_calls_section_begin|> none", None),
    ],
)
def test_what_is_no_call_is_text(name, text, left):
    style = style_of(name)
    for pieces in ([text], text):
        message = message_of(read(style, pieces))
        assert message.calls == []
        assert message.text == (left or text) or text.endswith(message.text)
        assert message.text


def test_an_unknown_call_does_not_hide_the_next_one():
    for name in ("Kimi K2", "DeepSeek V3.1", "Qwen3-Coder"):
        text = written(name, [("launch", {}), ("now", {})])
        found, calls = called(read(style_of(name), text))
        assert (calls, "launch" in found, "now" in found) == ([("now", {})], True, False), name


def test_a_broken_call_does_not_hide_the_next_one():
    good = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for bad in (
        '<tool_call>{"name": 5}',
        "<tool_call>",
        '<tool_call>{"name": "now", "arguments": 5}',
    ):
        text, calls = called(read(style_of("hermes"), bad + good))
        assert calls == [("now", {})]
        assert text.startswith("<tool_call>")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"arguments":{"city":"x"},"name":"now"}'),
        ("hermes", '<tool_call>\n\n{"name": "now", "arguments": {"city": "x"}, "why": [1]}\n'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"city": "x"}, "arguments": {}}'),
        ("hermes", '<tool_call>[{"name": "now", "arguments": {"city": "x"}}]</tool_call>'),
        ("Qwen3-Coder", "<function=now><parameter=city>x</parameter></function>"),
        ("GLM", "<tool_call>now<arg_key>city</arg_key><arg_value>x</arg_value></tool_call>"),
        ("Llama 3", '<|python_tag|>{"name": "now", "parameters": {"city": "x"}}'),
        ("Llama 3", '\n\n{"name": "now", "parameters": {"city": "x"}}'),
        ("Llama pythonic", "<|python_start|>[now(city='x')]<|python_end|>"),
        ("Llama pythonic", "[ now( city = 'x', ), ]"),
        ("LFM2", """<|tool_call_start|>[now(city='\\x78')]<|tool_call_end|>"""),
        ("OLMo 3", '<function_calls>now(city="x")</function_calls>'),
        (
            "Kimi K2",
            "<|tool_calls_section_begin|> <|tool_call_begin|>functions.now:12"
            '<|tool_call_argument_begin|> {"city": "x"}',
        ),
        ("harmony", ' to=functions.now<|channel|>commentary json<|message|>{"city": "x"}'),
        (
            "harmony",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
            ' to=functions.now<|message|>{"city": "x"}',
        ),
    ],
)
def test_other_spellings_of_a_call(name, text):
    prompt = "<|start|>assistant" if name == "harmony" else "assistant: "
    for pieces in ([text], text):
        found = called(read(style_of(name), pieces, prompt))
        assert found == ("", [("now", {"city": "x"})])


def test_ids_are_those_of_the_format():
    def ids(name):
        parts = read(style_of(name), [written(name, [("now", {}), ("now", {})])])
        return [call.id for call in message_of(parts).calls]

    first, second = ids("hermes")
    assert first != second
    assert first.startswith("call_")
    assert len(first) == len("call_") + 24
    assert {len(one) for one in ids("Mistral")} == {9}
    assert ids("Mistral with [CALL_ID]") == ["abcdefgh0", "abcdefgh1"]
    assert ids("Kimi K2") == ["functions.now:0", "functions.now:1"]


def test_markers_that_are_tokens_are_text_elsewhere():
    """Where the places of tokens are known, such as in an answer about the markers."""
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    text = f"Write <think> or {call} so: {call}"
    at = {text.rindex("<tool_call>"), text.rindex("</tool_call>")}
    style = style_of("hermes")
    for pieces in ([text], text):
        found = called(read(style, pieces, at=at))
        assert found == (f"Write <think> or {call} so:", [("now", {})])
    think = Style(THINK, None, {0: "<think>", 1: "</think>"})
    text = "<think>Is </think> it?</think>Yes."
    message = message_of(read(think, text, at={0, text.rindex("</think>")}, tools=None))
    assert (message.reasoning, message.text) == ("Is </think> it?", "Yes.")
    assert message_of(read(think, text, at=(), tools=None)).text == text


def test_commentary_is_for_users_and_calls_need_tools():
    style = Style(HARMONY, style_of("harmony").tools, {})
    text = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now"
    text += "<|channel|>commentary json<|message|>{}"
    assert called(read(style, text)) == ("I look.", [("now", {})])
    message = message_of(read(style, text, tools=None))
    assert (message.text, message.reasoning) == ("I look.", "{}")
    with pytest.raises(ValueError, match="no known format of calls"):
        AnswerReader(Style(None, None, {}), tools=SCHEMAS)


def test_the_first_call_may_end_an_answer():
    text = written("hermes", [("now", {}), ("now", {"days": 1})]) + " more"
    for pieces in ([text], text):
        parts = read(style_of("hermes"), pieces, is_single=True)
        assert called(parts) == ("", [("now", {})])
        assert parts[-1].kind == "end"


def test_a_value_has_the_type_of_its_schema():
    schema = {
        "properties": {
            "text": {"type": "string"},
            "choice": {"enum": ["1", "2"]},
            "number": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "either": {"type": ["string", "integer"]},
            "odd": {"type": ["string", []]},
            "named": {"$ref": "#/$defs/flag"},
            "no_flag": {"type": ["string", "integer"]},
        },
        "$defs": {"flag": {"type": "boolean"}},
    }
    values = {
        "text": "1",
        "choice": "2",
        "number": "None",
        "either": "5",
        "odd": "5",
        "named": "True",
        "no_flag": "true",
    }
    values |= {"other": '{"a": 1}', "word": "free", "constant": "NaN"}
    text = "<tool_call>f\n" + "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in values.items()
    )
    [(_, found)] = called(read(style_of("GLM"), text + "</tool_call>", tools={"f": schema}))[1]
    assert found == {
        "text": "1",
        "choice": "2",
        "number": None,
        "either": 5,
        "odd": "5",
        "named": True,
        "no_flag": "true",
        "other": {"a": 1},
        "word": "free",
        "constant": "NaN",
    }


def test_literals_of_python_are_read():
    text = r"""[f(a='it\'s\n"\u00e9"', b=None, """
    text += r"""c={'k': [True, -2.5, {}], "\ud83d\ude00": null}, d="\q")]"""
    [(_, found)] = called(read(style_of("Llama pythonic"), text, tools={"f": {}}))[1]
    assert found == {
        "a": 'it\'s\n"é"',
        "b": None,
        "c": {"k": [True, -2.5, {}], "😀": None},
        "d": "\\q",
    }


FRAGMENTS = [
    *' \n{}[],:"5a<',
    "now",
    '"name"',
    '"arguments"',
    "call:",
    "functions.",
    "function<",
    "now(",
    "city='x'",
    ")]",
    "```",
]


@given(st.data())
def test_no_answer_is_lost_or_read_otherwise_in_pieces(data):
    """Of any fragments of a format: what is no call stays as it was written."""
    name = data.draw(st.sampled_from(sorted(TEMPLATES)))
    style = style_of(name, data.draw(st.booleans()))
    assert style.tools is not None
    good = written(name, [("now", {"city": "x"})])
    pieces = st.sampled_from([*FRAGMENTS, *style.tools.literals, *TEMPLATES[name][1], good])
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    prompt = "<think>" if name == "harmony" else "assistant: "
    whole, cut = (message_of(read(style, each, prompt)) for each in ([text], text))
    assert (whole.text, whole.reasoning) == (cut.text, cut.reasoning)
    names = [(call.name, call.arguments) for call in whole.calls]
    assert names == [(call.name, call.arguments) for call in cut.calls]
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in names)
    if not whole.calls and style.channels is None:
        assert whole.text == text
