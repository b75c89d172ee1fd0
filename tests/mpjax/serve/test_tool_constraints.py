"""Calls that an answer has to have: a random model gives them, as their schemas say."""

from __future__ import annotations

import dataclasses
import json

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import mpjax  # noqa: E402
from mpjax.constraints.kinds import ChatAnswer, Choice, JsonSchema  # noqa: E402
from mpjax.serve.application import application  # noqa: E402
from mpjax.serve.errors import RequestError  # noqa: E402
from mpjax.serve.requests import read_chat  # noqa: E402
from mpjax.text.tokenizer import Tokenizer  # noqa: E402
from tests.mpjax.serve.running import Server  # noqa: E402
from tests.mpjax.serve.scripted import Script, tokenizer_of  # noqa: E402
from tests.mpjax.text.tool_templates import TEMPLATES  # noqa: E402

DAYS = {"type": "integer", "minimum": 1, "maximum": 14}
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": DAYS},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("get_weather", "forecast")
]
USER = {"role": "user", "content": "Weather?"}
NAMED = {"type": "function", "function": {"name": "forecast"}}
OF_RESPONSES = [{"type": "function", **TOOLS[0]["function"]}]
OF_RESPONSES.append({"type": "function", **TOOLS[1]["function"]})


@pytest.fixture(scope="module")
def sdk(chat_folder):
    lm = mpjax.load(chat_folder, max_positions=1024)
    own = lm.tokenizer
    templates = {"default": TEMPLATES["hermes"][0]}
    tokenizer = Tokenizer(
        own.backend,
        special_tokens=own.special_tokens,
        chat_templates=templates,
        stop_ids=own.stop_ids,
    )
    engine = mpjax.Engine(dataclasses.replace(lm, tokenizer=tokenizer), slots=4, chunk_tokens=256)
    with (
        Server(application(engine, "tiny")) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        yield client


def require(name, arguments):
    found = json.loads(arguments)
    assert name in ("get_weather", "forecast")
    assert found.keys() == {"unit", "days"}
    assert found["unit"] in ("C", "F")
    assert 1 <= found["days"] <= 14


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_random_model_calls_what_it_has_to(sdk, choice):
    body = {"model": "tiny", "messages": [USER], "tools": TOOLS, "tool_choice": choice}
    body |= {"max_tokens": 200, "temperature": 1, "parallel_tool_calls": False}
    [first, second] = sdk.chat.completions.create(**body, n=2, seed=1).choices
    for found in (first, second):
        assert (found.finish_reason, found.message.content) == ("tool_calls", None)
        [call] = found.message.tool_calls
        require(call.function.name, call.function.arguments)
        assert choice == "required" or call.function.name == "forecast"
    chunks = [chunk.choices[0] for chunk in sdk.chat.completions.create(**body, stream=True)]
    assert chunks[-1].finish_reason == "tool_calls"
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    require(calls[0].function.name, "".join(call.function.arguments for call in calls))


def test_a_response_calls_what_it_has_to(sdk):
    found = sdk.responses.create(
        model="tiny",
        input="Hi",
        tools=OF_RESPONSES,
        tool_choice="required",
        max_output_tokens=200,
        parallel_tool_calls=False,
    )
    assert found.status == "completed"
    [call] = found.output
    require(call.name, call.arguments)


def constraint_of(body, name="hermes", more="{# </think> enable_thinking #}"):
    return read_chat(Script(tokenizer_of(name, more)).lm, {"messages": [USER]} | body)


STRICT = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
FORMAT = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


def test_answers_are_free_where_nothing_is_asked_for():
    for body in ({}, {"tools": TOOLS}, {"tools": STRICT, "tool_choice": "none"}):
        assert constraint_of(body).constraint is None
    assert constraint_of({"response_format": FORMAT}, "Llama 3", "").constraint == JsonSchema(
        {"type": "object"}
    )


def test_strict_tools_formats_and_choices_make_one_grammar():
    for body, has_answer in (
        ({"tools": STRICT}, False),
        ({"tools": TOOLS, "tool_choice": "required"}, False),
        ({"tools": TOOLS, "response_format": FORMAT}, True),
        ({"response_format": FORMAT}, True),
        ({"tools": TOOLS, "structured_outputs": {"choice": ["a"]}}, True),
    ):
        asked = constraint_of(body)
        found = asked.constraint
        assert isinstance(found, ChatAnswer)
        assert (found.answer is not None) == has_answer
        assert ("@answer" in found.outer) == has_answer
        assert ("get_weather" in found.outer) == ("tools" in body)
        assert '"C"' in found.outer or "enum" in found.outer or "tool_choice" not in body
        assert asked.constraint_key in body or asked.constraint_key == "tools"
    assert constraint_of(body).constraint.answer == Choice(["a"])


def test_what_no_grammar_can_enforce_is_refused():
    with pytest.raises(RequestError, match="begin with no token of the model") as error:
        constraint_of({"tools": STRICT}, "functools")
    assert error.value.parameter == "tools"
    unit = {"type": "string", "maxLength": 1}
    function = {"name": "f", "strict": True, "parameters": {"properties": {"unit": unit}}}
    with pytest.raises(RequestError, match="maxLength of its arguments is not enforced"):
        constraint_of({"tools": [{"type": "function", "function": function}]}, "GLM")


def test_a_schema_that_cant_be_enforced_is_named(sdk):
    wrong = {"name": "f", "parameters": {"type": "object", "not": {}}}
    tools = [{"type": "function", "function": wrong}]
    with pytest.raises(openai.BadRequestError) as error:
        sdk.chat.completions.create(
            model="tiny", messages=[USER], tools=tools, tool_choice="required"
        )
    assert error.value.param == "tools"
    assert "can't be enforced" in error.value.message
