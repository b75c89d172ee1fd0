from __future__ import annotations

import datetime

import pytest

from mpjax.text.tokenizer import Tokenizer
from tests.mpjax.tokenizer_folders import (
    CHAT,
    LLAMA_TEMPLATE,
    TOOLS,
    harmony,
    llama,
    qwen,
    sentencepiece,
)


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    return qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def harmony_folder(tmp_path_factory):
    return harmony(tmp_path_factory.mktemp("harmony"))


@pytest.fixture(params=["llama", "qwen", "harmony"])
def pair(request):
    """The same folder through this library and through transformers."""
    transformers = pytest.importorskip("transformers")
    folder = request.getfixturevalue(f"{request.param}_folder")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return Tokenizer.from_folder(folder), reference


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"add_generation_prompt": False},
        {"enable_thinking": False, "date_string": "26 Jul 2024"},
        {"tools": TOOLS},
        {"bos_token": "mine"},
        {"chat_template": "{{ messages | map(attribute='content') | join }}{{ eos_token }}"},
    ],
    ids=lambda variables: "-".join(variables) or "plain",
)
def test_chat_equals_that_of_transformers(pair, variables):
    ours, reference = pair
    arguments = {"add_generation_prompt": True, **variables}
    messages = CHAT[1:] if ours.bos_id is None else CHAT
    expected = reference.apply_chat_template(messages, tokenize=False, **arguments)
    assert ours.chat(messages, **variables) == expected
    ids = reference.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments)
    assert ours.encode_chat(messages, **variables) == ids


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
HARMONY = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "tool_calls": [CALL], "content": None},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "thinking": "It is 3.", "content": "Three."},
]


@pytest.mark.parametrize("prompted", [True, False])
def test_channels_and_calls_equal_those_of_transformers(harmony_folder, prompted):
    """With the last answer's thinking, which later prompts leave out, and its other end."""
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.from_folder(harmony_folder)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(harmony_folder)
    schema = {"properties": {"a": {"type": "number"}, "b": {"type": "array"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    arguments = {"add_generation_prompt": prompted, "tools": tools, "reasoning_effort": "low"}
    expected = reference.apply_chat_template(HARMONY, tokenize=False, **arguments)
    found = ours.chat(HARMONY, **arguments)
    assert found == expected
    assert '<|message|>{"a": 1, "b": [2]}<|call|><|start|>functions.add' in found
    assert found.endswith("<|start|>assistant" if prompted else "<|message|>Three.<|return|>")
    ids = reference.apply_chat_template(HARMONY, tokenize=True, return_dict=False, **arguments)
    assert ours.encode_chat(HARMONY, **arguments) == ids


def test_several_tokens_end_an_answer_and_others_end_its_messages(harmony_folder):
    ours = Tokenizer.from_folder(harmony_folder)
    assert [ours.backend.id_to_token(i) for i in ours.stop_ids] == [
        *("<|return|>", "<|endoftext|>", "<|call|>")
    ]
    end = ours.backend.token_to_id("<|end|>")
    assert end in ours.special_ids
    assert end not in ours.stop_ids
    with pytest.raises(ValueError, match=r"Text of other channels belongs into thinking\."):
        ours.chat([{"role": "assistant", "content": "<|channel|>analysis<|message|>hm"}])


def test_llama_chat_reads_as_expected(llama_folder):
    ours = Tokenizer.from_folder(llama_folder)
    ids = ours.encode_chat([{"role": "user", "content": " Hi "}], date_string="1 Jan")
    assert [index for index in ids if index == ours.bos_id] == [ours.bos_id]
    assert ours.decode(ids, skip_special=False) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 1 Jan\n\n"
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    today = datetime.datetime.now().strftime("%d %b %Y")
    assert f"Date: {today}\n" in ours.chat([{"role": "user", "content": "Hi"}])


def test_tools_and_documents_are_none_unless_they_are_given():
    template = (
        "{{ messages[0].content }} {{ [tools is none, documents is none, other is defined] }}"
    )
    ours = Tokenizer(sentencepiece(), chat_templates={"default": template})
    hello = [{"role": "user", "content": "hello"}]
    assert ours.chat(hello) == "hello [True, True, False]"
    assert ours.chat(hello, documents=[], other=0) == "hello [True, False, True]"


def test_tojson_does_not_escape_for_html():
    ours = Tokenizer(sentencepiece(), chat_templates={"default": "{{ messages | tojson }}"})
    messages = [{"role": "user", "content": "a < b & 'ü'"}]
    assert ours.chat(messages) == """[{"role": "user", "content": "a < b & 'ü'"}]"""


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages is str: expected a list like"),
        ([], "messages is empty"),
        ([{"content": "hello"}], "message 0 is {'content': 'hello'}: expected a dict with a role"),
        (
            [{"role": "user", "content": object()}],
            r"message 0\['content'\] is object; .* plain JSON",
        ),
        ([{"role": "tool", "content": "x"}], "TemplateError: Only user and assistant roles are"),
        (
            [{"role": "user", "content": "x"}, {"role": "user"}],
            "message 1 has no content: expected",
        ),
        ([{"role": "user", "content": 3}], "the content of message 0 is 3: expected a text, as"),
        ([{"role": "user", "x": [1]}], "can't render these messages: UndefinedError"),
    ],
)
def test_messages_that_cannot_be_rendered(llama_folder, messages, message):
    ours = Tokenizer.from_folder(llama_folder)
    template = LLAMA_TEMPLATE.replace("message['content'] | trim", "message['content'] + ''")
    with pytest.raises(ValueError, match=message):
        ours.chat(messages, chat_template=template)


def test_templates_and_variables_that_are_refused():
    ours = Tokenizer(sentencepiece(), name="folder")
    hello = [{"role": "user", "content": "hello"}]
    with pytest.raises(ValueError, match="folder has no chat template, like most base models"):
        ours.chat(hello)
    with pytest.raises(ValueError, match="TemplateSyntaxError"):
        ours.chat(hello, chat_template="{% if %}")
    with pytest.raises(ValueError, match=r"tools\[0\] is function"):
        ours.chat(hello, chat_template="{{ x }}", tools=[lambda: None])
    with pytest.raises(ValueError, match="SecurityError"):
        ours.chat(hello, chat_template="{{ messages.append(1) }}")
    with pytest.raises(ValueError, match="SecurityError"):
        ours.chat(hello, chat_template="{{ ''.__class__.__mro__ }}")
    for chosen in ("default", "tool_use", "", "{ name }"):
        message = rf"'{chosen}': expected a chat template of folder \(it has none\), or Jinja"
        with pytest.raises(ValueError, match=message):
            ours.chat(hello, chat_template=chosen)
