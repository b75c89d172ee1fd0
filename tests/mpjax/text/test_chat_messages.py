"""Messages in the spelling that a template takes, and those that one would leave out.

The templates have the logic of published ones, without what they say.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.text.chat_messages import MARK, checked, marked, spellings
from mpjax.text.chat_template import render

pytestmark = pytest.mark.any_version

QWEN = """{% for m in messages %}
{%- if m.role == 'user' or m.role == 'system' or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<' + m.role + '>' + m.content }}
{%- elif m.role == 'assistant' %}
{{- '<assistant>' + (m.content or '') }}
{%- for call in m.tool_calls %}{% if call.function is defined %}{% set call = call.function %}
{%- endif %}{{ '{"name": "' + call.name + '", "arguments": ' + CALL + '}' }}{% endfor %}
{%- elif m.role == 'tool' %}{{ '<tool>' + m.content }}{% endif %}{% endfor %}"""
QWEN_2_5 = QWEN.replace("CALL", "call.arguments | tojson")
QWEN_3 = QWEN.replace(
    "CALL", "(call.arguments if call.arguments is string else call.arguments | tojson)"
)
QWEN_3_CODER = QWEN.replace("CALL + '}' }}", "'' }}").replace(
    "{% endfor %}\n{%- elif",
    "{% for key, value in call.arguments | items %}{{ '<' + key + '>' + value | string }}"
    "{% endfor %}}{% endfor %}\n{%- elif",
)
LLAMA = """{%- if messages[0].role == 'system' %}{{ '<system>' + messages[0].content | trim }}
{%- set messages = messages[1:] %}{% endif %}
{%- for m in messages %}
{%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}
{{- '<' + m.role + '>' + m.content | trim }}
{%- elif 'tool_calls' in m %}
{%- if not m.tool_calls | length == 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}
{%- else %}{{ '<ipython>' }}{{ m.content | tojson }}{% endif %}{% endfor %}"""
MISTRAL = """{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and loop.first) %}
{%- if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}
{%- elif m.tool_calls is defined %}
{%- for call in m.tool_calls %}{% set out = call.function | tojson %}{{ out[:-1] }}
{{- ', "id": "' + call.id + '"}' }}{% endfor %}
{%- elif m.role == 'assistant' %}{{ m.content }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content | string }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}
{%- endfor %}"""
DEEPSEEK = """{%- set ns = namespace(system='') %}
{%- for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% endif %}
{%- endfor %}{{ ns.system }}
{%- for m in messages %}
{%- if m['role'] == 'user' or m['role'] == 'tool' %}{{ '<' + m['role'] + '>' + m['content'] }}
{%- elif m['role'] == 'assistant' and m['content'] is none %}
{%- for call in m['tool_calls'] %}
{{- call['function']['name'] + '```json' + call['function']['arguments'] + '```' }}{% endfor %}
{%- elif m['role'] == 'assistant' %}{{ m['content'].split('</think>')[-1] }}{% endif %}
{%- endfor %}"""
GPT_OSS = """{%- if messages[0].role == 'developer' or messages[0].role == 'system' %}
{{- '<developer>' + messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}
{{- m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}
{%- elif m.role in ['assistant', 'user'] %}{{ '<' + m.role + '>' + m.content }}
{%- elif m.role == 'tool' %}{{ m.content | tojson }}{% endif %}{% endfor %}"""
PARTS = """{% for m in messages %}{{ '<' + m.role + '>' }}{% for part in m.content %}
{%- if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}{{ '<image>' }}
{%- endif %}{% endfor %}{% endfor %}"""
DICTS = "{% for m in messages %}{{ m.content ~ m.tool_calls[0].function.arguments }}{% endfor %}"
TEMPLATES = {
    name: text
    for name, text in globals().items()
    if name.isupper() and isinstance(text, str) and "{%" in text
}
USER, DEVELOPER = {"role": "user", "content": "Hi"}, {"role": "developer", "content": "Be brief."}
SYSTEM = {"role": "system", "content": "You are kind."}


def rendered(template, *messages, **variables):
    return render(template, messages, variables, "folder")


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (QWEN_2_5, [DEVELOPER, USER], "<system>Be brief.<user>Hi"),
        (QWEN_2_5, [SYSTEM, USER, DEVELOPER], "<system>You are kind.<user>Hi<system>Be brief."),
        (LLAMA, [DEVELOPER, USER], "<system>Be brief.<user>Hi"),  # else a role of its own
        (MISTRAL, [DEVELOPER, USER], "Be brief.Hi"),
        (DEEPSEEK, [USER, DEVELOPER], "Be brief.<user>Hi"),
        (GPT_OSS, [DEVELOPER, USER], "<developer>Be brief.<user>Hi"),
        (
            "{% for m in messages %}{{ m.role + m.content }}{% endfor %}developers",
            [DEVELOPER],
            "developerBe brief.developers",
        ),
    ],
)
def test_a_developer_is_the_system_where_a_template_knows_only_that(template, messages, expected):
    assert rendered(template, *messages) == expected


def call(arguments, **more):
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "callcall1", "function": function}], **more}


TEXT, NUMBERS = '{"a":1, "b": "x"}', {"a": 1, "b": "x"}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN_2_5, '<assistant>{"name": "add", "arguments": {"a": 1, "b": "x"}}'),
        (QWEN_3, '<assistant>{"name": "add", "arguments": TEXT}'),
        (QWEN_3_CODER, '<assistant>{"name": "add", "arguments": <a>1<b>x}'),
        (LLAMA, '{"name": "add", "parameters": {"a": 1, "b": "x"}}'),
        (MISTRAL, '{"name": "add", "arguments": {"a": 1, "b": "x"}, "id": "callcall1"}'),
        (DEEPSEEK, "add```jsonTEXT```"),
        (GPT_OSS, 'add{"a": 1, "b": "x"}'),
        (DICTS.replace("m.content ~", "m.tool_calls[0].function.name ~"), "addTEXT"),
    ],
)
@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["absent", "null"])
def test_arguments_are_text_or_an_object_as_the_template_takes_them(template, expected, content):
    assert rendered(template, call(TEXT, **content)) == expected.replace("TEXT", TEXT)
    as_text = json.dumps(NUMBERS)
    assert rendered(template, call(NUMBERS, **content)) == expected.replace("TEXT", as_text)


GEMMA = """{% for m in messages %}{% for call in m.tool_calls %}{{ call.function.name + '{' }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{% for k, v in call.function.arguments.items() %}{{ k ~ ':' ~ v }}{% endfor %}{% endif %}
{{- '}' }}{% endfor %}{% endfor %}"""


def test_arguments_are_no_data_and_have_no_braces_twice():
    """Gemma's template writes a text between its own braces, and others Python's spelling."""
    assert rendered(GEMMA, call('{"a": 1}')) == "add{a:1}"
    written = "{% for m in messages %}{% set f = m.tool_calls[0].function %}{{ f.name }}"
    written += "{% if f.arguments is string %}{{ raise_exception('') }}{% endif %}{{ f.arguments }}"
    with pytest.raises(ValueError, match="leaves out the call of add"):
        rendered(written + "{% endfor %}", call(TEXT))


def test_a_content_of_none_is_empty_where_a_template_would_write_it():
    glm = "{% for m in messages %}[{{ m.content }}]{{ m.tool_calls[0].function }}{% endfor %}"
    assert rendered(glm, call(TEXT, content=None)).startswith("[]")


def test_reasoning_has_the_name_that_a_template_knows():
    answer = {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert (
            rendered("{{ messages[0].NAME + messages[0].content }}".replace("NAME", name), answer)
            == "hmYes"
        )
    refuses = "{% if messages[0].thinking %}{{ raise_exception('no') }}{% endif %}"
    assert rendered(refuses + "{{ messages[0].content }}", answer) == "Yes"


def test_a_call_without_arguments_has_an_empty_object():
    for arguments in ("", "{}", {}):
        assert rendered(QWEN_2_5, call(arguments)).endswith('"arguments": {}}')
    function = {"name": "now"}
    assert rendered(
        LLAMA.replace("call.arguments", "call"), call({}) | {"tool_calls": [{"function": function}]}
    ).endswith('{"name": "now"}}')


def test_a_content_is_one_text_or_parts_as_the_template_takes_it():
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    for content in ("Hi", parts, ["H", "i"]):
        message = {"role": "user", "content": content}
        assert rendered(QWEN_2_5, message) == "<user>Hi"
        assert rendered(MISTRAL, message) == "Hi"  # which reads one part of several
        assert rendered(PARTS, message) == "<user>Hi"


def test_parts_are_not_written_as_data():
    """A text of which the template keeps too little would have come whole as a list's spelling."""
    for written in ("m.content[:9]", "m.content[:9] | tojson"):
        with pytest.raises(ValueError, match=r"leaves out the content of message 0 \(user\)"):
            rendered(
                "{% for m in messages %}{{ WRITTEN }}{% endfor %}".replace("WRITTEN", written), USER
            )


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (GPT_OSS, [USER, DEVELOPER], r"leaves out the content of message 1 \(developer\)"),
        (GPT_OSS, [DEVELOPER, SYSTEM, USER], r"leaves out the content of message 1 \(system\)"),
        (DEEPSEEK, [SYSTEM, USER, SYSTEM], r"leaves out the content of message 0 \(system\)"),
        (DEEPSEEK, [USER, {"role": "function", "content": "3"}], r"message 1 \(function\)"),
        (MISTRAL, [SYSTEM, USER, DEVELOPER], "TemplateError: Only user and assistant roles"),
        (LLAMA, [USER, call(TEXT, content="Adding.")], r"content of message 1 \(assistant\)"),
        (
            "{% for m in messages %}{{ m.role + m.content }}{% endfor %}",
            [USER, call(TEXT)],
            r"leaves out the call of add in message 1 \(assistant\)",
        ),
        (PARTS, [USER, call(TEXT)], r"leaves out the call of add in message 1 \(assistant\)"),
        (
            PARTS,
            [{"role": "user", "content": [{"type": "text", "text": "See"}, IMAGE]}],
            r"leaves out part 1 \(image_url\) of the content of message 0 \(user\)",
        ),
        (
            PARTS,
            [{"role": "user", "content": [{"type": "image"}]}],
            r"content of message 0 has \{'type': 'image'\}: the model reads texts only",
        ),
        (
            QWEN_2_5,
            [USER, {"role": "assistant", "content": "", "refusal": "No."}],
            r"leaves out the refusal of message 1 \(assistant\)",
        ),
        (
            PARTS,
            [USER, {"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}}],
            r"leaves out the call of add in message 1 \(assistant\)",
        ),
        (QWEN_2_5, [call('{"a": ')], r"message 0 calls add with the arguments .* not JSON"),
        (QWEN_3, [call("[1]")], r"message 0 calls add with the arguments .* a JSON object"),
        (QWEN_3, [call(3)], r"message 0 calls add with the arguments 3: expected a JSON object"),
        (QWEN_3, [USER | {"tool_calls": 3}], "tool_calls of message 0 is 3: expected a list"),
        (QWEN_3, [USER | {"tool_calls": [{"id": "1"}]}], "message 0 calls .* a function with a na"),
    ],
)
def test_what_a_template_would_leave_out_is_refused_by_name(template, messages, message):
    with pytest.raises(ValueError, match=message):
        rendered(template, *messages)


def test_tools_for_a_template_without_a_place_for_them_are_refused():
    for key in ("tools", "documents"):
        with pytest.raises(ValueError, match=f"the chat template of folder has no place for {key}"):
            rendered(QWEN_2_5, USER, **{key: [{"name": "add"}]})
        assert rendered(QWEN_2_5, USER, **{key: None}) == "<user>Hi"


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
PHI = """{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}
{%- if 'tools' in message %}{{ '<|tool|>' + message['tools'] }}{% endif %}{% endfor %}"""


def test_tools_reach_the_prompt():
    with pytest.raises(ValueError, match="leaves out the tool add"):
        rendered(QWEN_2_5 + "{# tools #}", USER, tools=[TOOL])
    found = rendered(PHI, SYSTEM, USER, tools=[TOOL])
    assert found == '<system>You are kind.<|tool|>[{"name": "add", "parameters": {}}]<user>Hi'
    assert rendered(PHI, USER, tools=[TOOL]).startswith("<system>You are a helpful assistant with")
    assert rendered(PHI, USER, tools=None) == "<user>Hi"


def test_what_templates_leave_out_on_purpose_is_not_asked_for():
    reasoned = {"role": "assistant", "content": "<think>hm</think>Yes", "reasoning_content": "hm"}
    named = {"role": "tool", "content": "3", "name": "add", "tool_call_id": "callcall1"}
    assert rendered(DEEPSEEK, USER, reasoned, named) == "<user>HiYes<tool>3"


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
CONTENTS = TEXTS | st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXTS))
ROLES = st.sampled_from(["system", "user", "developer", "assistant", "tool"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": CONTENTS})
    | st.builds(lambda text: call({"key": text}, content=None), TEXTS),
    min_size=1,
    max_size=5,
)


@given(MESSAGES, st.sampled_from(sorted(TEMPLATES)))
def test_all_that_is_said_reaches_the_prompt_or_is_refused(messages, name):
    """Texts of letters come through every template; `trim` takes only the blanks around them."""
    try:
        prompt = rendered(TEMPLATES[name], *messages)
    except ValueError:
        return
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        if content and not set(content) & set('"\\') and content.isprintable():
            assert content.strip() in prompt


def test_spellings_do_not_repeat_and_marks_are_distinct():
    messages = checked([USER, DEVELOPER, call(TEXT)])
    found = list(spellings(messages, knows_developer=False))
    assert all(one not in found[:index] for index, one in enumerate(found))
    assert len(found) == 2 * 3 * 2
    assert found[0][1]["role"] == "system"
    assert list(spellings(checked([USER]), knows_developer=True)) == [
        [USER],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    ]
    probe, marks = marked(messages)
    assert len(marks) == 5
    written = json.dumps(probe, ensure_ascii=False).replace('\\"', '"')
    assert all(mark in written and MARK in mark for mark in marks)
    assert messages == [USER, DEVELOPER, {"content": None, **call(TEXT)}]  # not changed
