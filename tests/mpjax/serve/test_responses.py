"""/v1/responses, as agents use it, by OpenAI's own client, of a model whose answers are given."""

from __future__ import annotations

import json
import math

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from mpjax.constraints.kinds import JsonSchema  # noqa: E402
from mpjax.serve.application import application  # noqa: E402
from mpjax.serve.errors import RequestError  # noqa: E402
from mpjax.serve.items import read_items  # noqa: E402
from mpjax.text.answers import AnswerReader  # noqa: E402
from tests.mpjax.serve.running import Server  # noqa: E402
from tests.mpjax.serve.scripted import Script, tokenizer_of  # noqa: E402

PARAMETERS = {"type": "object", "properties": {"cmd": {"type": "string"}}}
SHELL = {"type": "function", "name": "shell", "parameters": PARAMETERS, "strict": False}
CALL = '<tool_call>\n{"name": "shell", "arguments": {"cmd": "ls é"}}\n</tool_call>'
FULL = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}"
THINKS = "{# </think> enable_thinking #}"


@pytest.fixture(scope="module")
def script():
    return Script(tokenizer_of("hermes", THINKS))


@pytest.fixture(scope="module")
def server(script):
    with Server(application(script, "it")) as server:
        yield server


@pytest.fixture(scope="module")
def sdk(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


def ask(sdk, **body):
    return sdk.responses.create(**{"model": "it", "input": "Hi", "tools": [SHELL]} | body)


def without_ids(item):
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def test_an_answer(script, sdk):
    script.answers.append(FULL)
    found = ask(sdk, instructions="Be kind.", temperature=0.5)
    assert (found.status, found.object, found.model) == ("completed", "response", "it")
    assert (found.output_text, found.temperature, found.store) == ("I look.", 0.5, False)
    reasoning, message, *calls = found.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.\n")
    assert (message.type, message.content[0].annotations) == ("message", [])
    assert [json.loads(call.arguments) for call in calls] == [{"cmd": "ls é"}] * 2
    assert len({item.id for item in found.output} | {call.call_id for call in calls}) == 6
    assert [item.id.split("_")[0] for item in found.output] == ["rs", "msg", "fc", "fc"]
    usage, size = found.usage, len(script.tokenizer.encode(FULL))
    assert (usage.output_tokens, usage.total_tokens) == (size, size + usage.input_tokens)
    thought = len(script.tokenizer.encode("<think>\nHm.\n"))
    assert usage.output_tokens_details.reasoning_tokens == thought
    assert usage.input_tokens_details.cached_tokens == 0
    assert "system: Be kind.<eos>user: Hi<eos>" in script.prompts[-1]
    assert '"function": {"name": "shell", "parameters"' in script.prompts[-1]


def test_a_stream_has_typed_events_in_order_and_the_same_response(script, sdk):
    script.answers += [FULL, FULL]
    whole = ask(sdk)
    events = [event.model_dump() for event in ask(sdk, stream=True)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    steps = [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]]
    texts = "content_part.added NAME.delta NAME.done content_part.done"
    call = "output_item.added function_call_arguments.delta function_call_arguments.done"
    assert steps == [
        *("created", "in_progress"),
        *(
            "output_item.added",
            *texts.replace("NAME", "reasoning_text").split(),
            "output_item.done",
        ),
        *("output_item.added", *texts.replace("NAME", "output_text").split(), "output_item.done"),
        *(*call.split(), "output_item.done") * 2,
        "completed",
    ]
    last = events[-1]["response"]
    for key in ("output", "id", "created_at"):
        assert events[0]["response"][key] == ([] if key == "output" else last[key])
    assert list(map(without_ids, last["output"])) == [
        without_ids(item.model_dump()) for item in whole.output
    ]
    assert last["usage"] == whole.usage.model_dump()
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    for number, item in enumerate(last["output"]):
        of_item = [event for event in events if event.get("output_index") == number]
        assert {event.get("item_id", item["id"]) for event in of_item} == {item["id"]}
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert "".join(event.get("delta", "") for event in of_item) == text
        added = of_item[0]["item"]
        assert (added["id"], added["status"]) == (item["id"], "in_progress")


def test_events_are_named_and_nothing_follows_the_last(script, server):
    script.answers.append("Yes.")
    body = {"model": "it", "input": "Hi", "stream": True, "store": True, "include": ["x"]}
    text = httpx.post(server.url + "/v1/responses", json=body).text
    *events, end = text.split("\n\n")
    assert end == ""
    for event in events:
        name, data = event.split("\n")
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]
    assert name == "event: response.completed"


def test_the_clients_own_reading_of_a_stream(script, sdk):
    script.answers.append(FULL)
    with sdk.responses.stream(model="it", input="Hi", tools=[SHELL]) as stream:
        kinds = {event.type for event in stream}
        found = stream.get_final_response()
    assert "response.output_text.delta" in kinds
    assert [item.type for item in found.output] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    assert found.output_text == "I look."


def test_a_conversation_is_sent_whole(script, sdk):
    """As agents do, which send back all items of all answers."""
    script.answers += [FULL, "Done."]
    first = ask(sdk)
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    for call in first.output[2:]:
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "a.txt"}
        items.append(result)
    assert ask(sdk, input=items).output_text == "Done."
    prompt = script.prompts[-1]
    assert f"user: Hi<eos>assistant: I look.{CALL}{CALL}<eos>" in prompt
    assert prompt.count("tool: a.txt<eos>") == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_that_is_cut(script, sdk, stream):
    script.answers.append(CALL)
    size = len(script.tokenizer.encode(CALL)) - 9
    found = ask(sdk, max_output_tokens=size, stream=stream)
    if stream:
        *_, last = found
        assert last.type == "response.incomplete"
        found = last.response
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.output[0].status, found.output[0].name) == ("incomplete", "shell")


def test_a_stream_that_fails_says_so(script, sdk, monkeypatch, caplog):
    def run(handle, *_):
        handle.finish("error", RuntimeError("the device is gone"))
        handle.report([])

    with monkeypatch.context() as patch:
        patch.setattr(script, "_run", run)
        script.answers.append("x")
        *_, last = ask(sdk, stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "the device is gone"

    def push(*_):
        raise KeyError("odd")

    said = [record.message for record in caplog.records]
    assert "an answer failed" not in said
    monkeypatch.setattr(AnswerReader, "push", push)
    script.answers += ["x", "x"]
    *_, last = ask(sdk, stream=True)
    assert (last.type, last.response.error.message) == ("response.failed", "KeyError: 'odd'")
    with pytest.raises(openai.InternalServerError, match="KeyError: 'odd'"):
        ask(sdk)
    assert [record.message for record in caplog.records].count("an answer failed") == 2


def test_tools_of_namespaces_and_of_openais_servers(script, sdk):
    """Codex asks for both."""
    spaces = {"type": "namespace", "name": "agents", "description": "d", "tools": [SHELL]}
    script.answers.append(CALL)
    found = ask(sdk, tools=[spaces, {"type": "web_search", "external_web_access": True}])
    assert (found.output[0].name, found.output[0].namespace) == ("shell", "agents")
    assert "web_search" not in script.prompts[-1]
    script.answers.append("Done.")
    result = {"type": "function_call_output", "call_id": found.output[0].call_id, "output": "x"}
    items = [found.output[0].model_dump(exclude_none=True), result]
    assert ask(sdk, input=items).output_text == "Done."
    with pytest.raises(openai.BadRequestError, match='two tools are called "shell"'):
        ask(sdk, tools=[SHELL, spaces])


def test_a_text_has_the_format_that_is_asked_for(script, sdk):
    schema = {"type": "object", "properties": {}}
    script.answers.append("{}")
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    found = ask(sdk, text=text, tools=[])
    assert found.text.format.type == "json_schema"
    assert script.options[-1]["constraint"].answer == JsonSchema(schema)


def test_choices_and_efforts_reach_the_chat(script, sdk):
    script.answers += [CALL * 2, "x"]
    found = ask(sdk, parallel_tool_calls=False, tool_choice="auto")
    assert [item.type for item in found.output] == ["function_call"]
    source = script.tokenizer.chat_templates["default"]
    script.tokenizer.chat_templates["default"] = source + "[{{ enable_thinking }}]"
    ask(sdk, reasoning={"effort": "none", "summary": "auto"}, tool_choice="none")
    assert script.prompts[-1].endswith("[False]")
    assert "shell" not in script.prompts[-1]
    script.tokenizer.chat_templates["default"] = source


@pytest.mark.parametrize(
    ("body", "message", "parameter"),
    [
        ({"previous_response_id": "resp_1"}, "does not offer it", "previous_response_id"),
        ({"input": []}, "expected a text, or a list of items", "input"),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            'the type of input[0] is "item',
            "input",
        ),
        ({"tools": [{"type": "custom"}]}, 'tools[0].type is "custom"', "tools[0].type"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "none of the tools", "tool_choice"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort is", "reasoning.effort"),
        ({"include": ["message.output_text.logprobs"]}, "does not offer it", "include"),
        ({"text": {"format": {"type": "xml"}}}, 'type is "xml"', "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "has no schema", "text.format"),
        ({"max_output_tokens": 0}, "expected a whole number of 1", "max_output_tokens"),
        ({"max_output_tokens": 9000}, "maximum context length is 4096 tokens", "input"),
        ({"extra_body": {"max_tokens": 5}}, '"max_tokens" is no key', "max_tokens"),
    ],
)
def test_what_is_refused_says_why(script, sdk, body, message, parameter, monkeypatch):
    from mpjax.engine.options import TooLongError

    def submit(*_, max_new_tokens, **__):
        raise TooLongError(f"with {max_new_tokens} new ones it is too long")

    monkeypatch.setattr(script, "submit", submit)
    with pytest.raises(openai.BadRequestError) as error:
        ask(sdk, **body)
    assert message in error.value.message
    assert error.value.param == parameter


def test_what_no_answer_can_repeat_is_refused(server):
    tools = [SHELL | {"parameters": {"maximum": math.inf}}]
    content = json.dumps({"input": "Hi", "tools": tools})
    found = httpx.post(f"{server.url}/v1/responses", content=content)
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, "tools")
    assert "that no answer can repeat" in error["message"]


TEXT = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
AS_CHAT = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
THOUGHT = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}
THOUGHT["content"] = [{"type": "reasoning_text", "text": "hm"}]


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("a", [{"role": "user", "content": "a"}]),
        ([{"role": "user", "content": TEXT}], [{"role": "user", "content": "ab"}]),
        (
            [THOUGHT, CALLED, CALLED],
            [
                {"role": "assistant", "reasoning_content": "hm", "content": None}
                | {"tool_calls": [AS_CHAT, AS_CHAT]}
            ],
        ),
        (
            [THOUGHT, {"role": "assistant", "content": "a"}, CALLED],
            [
                {"role": "assistant", "reasoning_content": "hm", "content": "a"}
                | {"tool_calls": [AS_CHAT]}
            ],
        ),
        ([THOUGHT], [{"role": "assistant", "reasoning_content": "hm", "content": ""}]),
        (
            [THOUGHT | {"content": None}, {"role": "user", "content": "a"}],
            [{"role": "user", "content": "a"}],
        ),
        (
            [{"type": "function_call_output", "call_id": "c", "output": TEXT}],
            [{"role": "tool", "tool_call_id": "c", "content": "ab"}],
        ),
    ],
)
def test_items_become_messages(items, messages):
    assert read_items(items, None) == messages
    first, *rest = read_items(items, "I")
    assert (first, rest) == ({"role": "system", "content": "I"}, messages)


def test_what_the_developer_says_first_joins_the_instructions():
    found = read_items(
        [{"role": "developer", "content": "b"}, {"role": "user", "content": "c"}], "a"
    )
    assert found == [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "c"}]
    assert read_items([{"role": "developer", "content": "b"}], None)[0]["role"] == "developer"


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (5, r"input\[0\] is 5: expected an item"),
        (
            {"type": "custom_tool_call"},
            r'the type of input\[0\] is "custom_tool_call": this server',
        ),
        ({"role": "tool", "content": ""}, r'input\[0\]\.role is "tool": expected one of system'),
        ({"content": ""}, r"input\[0\] has no role"),
        ({"role": "user", "content": 5}, r"input\[0\]\.content is 5: expected a text"),
        ({"role": "user", "content": [{"type": "input_image"}]}, r"content\[0\] is .* texts only"),
        (CALLED | {"name": None}, r"input\[0\] has no name"),
        ({"type": "function_call_output", "output": "x"}, r"input\[0\] has no call_id"),
        ({"type": "function_call_output", "call_id": "x"}, r"output is null: expected a text"),
        (CALLED | {"x": 1}, r'"input\[0\]\.x" is no key'),
    ],
)
def test_other_items_are_refused(item, message):
    with pytest.raises(RequestError, match=message):
        read_items([item], None)
