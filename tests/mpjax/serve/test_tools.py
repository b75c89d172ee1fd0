"""Chats with tools, by OpenAI's own client, of a model whose answers are given."""

from __future__ import annotations

import json

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from mpjax.serve.application import application  # noqa: E402
from mpjax.serve.errors import RequestError  # noqa: E402
from mpjax.serve.keys import read_keys  # noqa: E402
from mpjax.serve.tables import CHAT  # noqa: E402
from mpjax.serve.tools import read_tools  # noqa: E402
from mpjax.text.tool_formats import HERMES  # noqa: E402
from tests.mpjax.serve.running import Server  # noqa: E402
from tests.mpjax.serve.scripted import Script, tokenizer_of  # noqa: E402

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("get_weather", "now")
]
USER = {"role": "user", "content": "Weather?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "é"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THINKS = "{# </think> enable_thinking #}"


@pytest.fixture(scope="module")
def script():
    return Script(tokenizer_of("hermes", THINKS))


@pytest.fixture(scope="module")
def sdk(script):
    with (
        Server(application(script, "it")) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        yield client


def ask(sdk, stream=False, **body):
    body = {"model": "it", "messages": [USER], "tools": TOOLS, "stream": stream} | body
    return sdk.chat.completions.create(**body)


def answer(script, sdk, text, stream, **body):
    """The message of an answer and why it ended, whole or from a stream."""
    script.answers.append(text)
    if not stream:
        [choice] = ask(sdk, **body).choices
        message = choice.message.model_dump(exclude_unset=True)
        return message, choice.finish_reason
    chunks = [chunk.choices[0] for chunk in ask(sdk, stream=True, **body)]
    message = {"content": "", "reasoning_content": "", "calls": {}}
    for chunk in chunks:
        delta = chunk.delta.model_dump(exclude_unset=True)
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for call in delta.get("tool_calls", []):
            number = call["index"]
            if number not in message["calls"]:
                assert call["type"] == "function"
                message["calls"][number] = {"id": call["id"], "name": call["function"]["name"]}
                message["calls"][number]["arguments"] = ""
            else:
                assert call.keys() == {"index", "function"}
            message["calls"][number]["arguments"] += call["function"]["arguments"]
    reasons = [chunk.finish_reason for chunk in chunks]
    assert not any(reasons[:-1])
    return message, reasons[-1]


def calls_of(message):
    if "calls" in message:
        return [(call["name"], json.loads(call["arguments"])) for call in message["calls"].values()]
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


BOTH = [("get_weather", {"city": "é"}), ("now", {})]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("text", "content", "calls", "reason", "body"),
    [
        (f"{CALL}\n{NOW}", "", BOTH, "tool_calls", {}),
        (f"<think>Hm {CALL}</think>\n\nI look.\n{CALL}", "I look.", BOTH[:1], "tool_calls", {}),
        (f"{CALL}\n{NOW}", "", BOTH[:1], "tool_calls", {"parallel_tool_calls": False}),
        ("It rains.", "It rains.", [], "stop", {}),
        (f"It rains. {CALL}", f"It rains. {CALL}", [], "stop", {"tool_choice": "none"}),
        (f"It rains. {CALL}", f"It rains. {CALL}", [], "stop", {"tools": []}),
        (CALL.replace("get_weather", "launch"), None, [], "stop", {}),
    ],
)
def test_answers(script, sdk, stream, text, content, calls, reason, body):
    message, found = answer(script, sdk, text, stream, **body)
    assert (calls_of(message), found) == (calls, reason)
    assert (message["content"] or "") == (
        CALL.replace("get_weather", "launch") if content is None else content
    )
    if not stream:
        assert message["content"] is (None if calls and not content else message["content"])
    assert (message.get("reasoning_content") or "").startswith("Hm" * ("<think>" in text))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_that_is_cut_in_a_call(script, sdk, stream):
    size = len(script.tokenizer.encode(CALL))
    message, reason = answer(script, sdk, CALL + NOW, stream, max_tokens=size - 9)
    assert reason == "length"
    if not stream:  # what was sent of a stream can't be taken back
        assert "tool_calls" not in message
        assert message["content"].startswith("<tool_call>")
    message, reason = answer(script, sdk, CALL + NOW, stream, max_tokens=size)
    assert (reason, calls_of(message)) == ("tool_calls", BOTH[:1])
    _, reason = answer(script, sdk, NOW + CALL, stream, max_tokens=size)
    assert reason == "length"  # in the second call


def test_the_characters_of_a_marker_are_text(script, sdk):
    """Such as in an answer about it, whose tokens spell it."""
    encode = script.tokenizer.encode
    ids = [*encode(CALL[:5]), *encode(CALL[5:])]
    message, reason = answer(script, sdk, ids, False)
    assert (message["content"], reason) == (CALL, "stop")


def test_a_conversation_with_results_reaches_the_model(script, sdk):
    script.answers += [f"{CALL}\n{NOW}", "Rain."]
    asked = [USER, ask(sdk).choices[0].message]
    for call in asked[1].tool_calls:
        asked.append({"role": "tool", "tool_call_id": call.id, "content": f"{call.id}: rain"})
    assert ask(sdk, messages=asked).choices[0].message.content == "Rain."
    prompt = script.prompts[-1]
    assert '"parameters"' in prompt
    assert "strict" not in prompt
    assert CALL + NOW in prompt
    assert all(f"tool: {call.id}: rain" in prompt for call in asked[1].tool_calls)
    ask_of = {"messages": [USER, {"role": "assistant", "tool_calls": [asked[1].tool_calls[0]]}]}
    ask_of["messages"][1]["tool_calls"][0].function.arguments = "{"
    with pytest.raises(openai.BadRequestError, match="are not JSON") as error:
        ask(sdk, **ask_of)
    assert error.value.param == "messages"


def test_each_choice_has_its_calls(script, sdk):
    script.answers += [CALL, "Sun."]
    first, second = ask(sdk, n=2).choices
    assert (first.finish_reason, second.finish_reason) == ("tool_calls", "stop")
    assert second.message.content == "Sun."


@pytest.mark.parametrize(
    ("effort", "thinks"), [("none", False), ("low", True), (None, None), ("max", True)]
)
def test_reasoning_effort_is_a_switch_where_templates_have_one(script, sdk, effort, thinks):
    source = script.tokenizer.chat_templates["default"]
    script.tokenizer.chat_templates["default"] = source + "[{{ enable_thinking }}]"
    script.answers.append("x")
    ask(sdk, reasoning_effort=effort)
    expected = "[]" if thinks is None else f"[{thinks}]"
    assert script.prompts[-1].endswith(expected)
    script.answers.append("x")
    ask(sdk, reasoning_effort="high", extra_body={"chat_template_kwargs": {"enable_thinking": 0}})
    assert script.prompts[-1].endswith("[0]")
    script.tokenizer.chat_templates["default"] = source


def function(**changes):
    return {"type": "function", "function": {"name": "f"} | changes}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": [{}]}, r"tools\[0\] has no function with a name"),
        ({"tools": [5]}, r"tools\[0\] is 5: expected"),
        ({"tools": [{"type": "web_search"}]}, r'tools\[0\]\.type is "web_search"'),
        (
            {"tools": [function(name="a b")]},
            r'tools\[0\]\.function\.name is "a b": expected a name',
        ),
        ({"tools": [function(parameters=[])]}, r"function\.parameters is \[\]: expected a JSON sc"),
        ({"tools": [function(x=1)]}, r'"tools\[0\]\.function\.x" is no key'),
        ({"tools": [function(), function()]}, 'two tools are called "f"'),
        ({"tools": {}}, r"tools is \{\}: expected a list of functions"),
        ({"tool_choice": "some"}, 'tool_choice is "some": expected "none", "auto", "required", or'),
        ({"tool_choice": {"type": "custom"}}, r'tool_choice\.type is "custom"'),
        ({"tool_choice": {"type": "function"}}, r"tool_choice is \{"),
        ({"tool_choice": "required", "tools": []}, "and there are no tools"),
        ({"tool_choice": function(name="g")}, 'names "g", which is none of the tools'),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls is 1: expected true or false"),
    ],
)
def test_other_tools_are_refused(body, message):
    with pytest.raises(RequestError, match=message):
        read_tools(read_keys({"tools": [function()]} | body, CHAT), HERMES)


def test_tools_need_a_format_that_is_known():
    values = read_keys({"tools": [function()]}, CHAT)
    with pytest.raises(RequestError, match="no format of calls that this server knows"):
        read_tools(values, None)
    assert read_tools(read_keys({"tools": [function()], "tool_choice": "none"}, CHAT), None) is None
    [tool] = read_tools(values, HERMES).tools
    assert tool.definition["function"]["parameters"] == {"type": "object", "properties": {}}
