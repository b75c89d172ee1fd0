"""What an answer has to be: the keys of OpenAI and of vLLM, and reasoning in front of it."""

from __future__ import annotations

import dataclasses

import pytest

from mpjax.constraints.kinds import (
    Choice,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
)
from mpjax.constraints.matcher import Matcher
from mpjax.serve.constraints import of_chat
from mpjax.serve.errors import RequestError
from mpjax.serve.requests import read_completion, refusal_of_engine
from mpjax.text.tokenizer import Tokenizer
from tests.mpjax.tokenizer_folders import qwen

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonObject()),
        ({"response_format": FORMAT}, JsonSchema(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, JsonSchema(SCHEMA)),
        (
            {"structured_outputs": {"json": "{}", "disable_any_whitespace": True}},
            JsonSchema("{}", spaces=""),
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
            JsonSchema({"type": "object"}, spaces=" ?"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Choice(["a", "b"])),
        ({"structured_outputs": {"grammar": "start: x"}}, Grammar("start: x")),
    ],
)
def test_a_body_has_a_constraint(body, expected, tiny):
    asked = read_completion(tiny, {"prompt": "a", "temperature": 0, "logprobs": 1} | body)
    assert asked.constraint == expected
    assert asked.candidates == (expected is not None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"response_format": {"type": "xml"}}, "'text' or 'json_object' or 'json_schema'"),
        ({"response_format": {}}, "response_format has no type"),
        ({"response_format": {"type": "json_schema"}}, "has the type json_schema and no"),
        ({"response_format": FORMAT | {"type": "text"}}, "has the type text and a json_schema"),
        ({"structured_outputs": {}}, "structured_outputs has none: expected one of json, regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "has regex, choice"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": ""}}, "only JSON has these"),
        ({"structured_outputs": {"structural_tag": "x"}}, "does not offer it"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "beside response_format",
        ),
    ],
)
def test_half_a_constraint_is_refused(body, message, tiny):
    with pytest.raises(RequestError, match=message) as error:
        read_completion(tiny, {"prompt": "a"} | body)
    assert error.value.parameter.split(".")[0] in body


def test_an_engines_refusal_names_the_key():
    error = ValueError("constraint: Regex can't be enforced: it is wrong")
    found = refusal_of_engine(error, 400, "prompt", "structured_outputs")
    assert (found.parameter, str(found)) == (
        "structured_outputs",
        "structured_outputs: Regex can't be enforced: it is wrong",
    )


@pytest.mark.parametrize("is_begun", [False, True])
def test_reasoning_in_front_of_an_answer_is_free(is_begun, tiny, tmp_path):
    tokenizer = Tokenizer.from_folder(qwen(tmp_path))
    lm = dataclasses.replace(tiny, tokenizer=tokenizer)
    prompt = tokenizer.encode("Say yes." + "<think>\n" * is_begun)
    found = of_chat(Choice(["yes", "no"]), None, tokenizer, prompt)
    own = Matcher(lm, found, tokenizer.stop_ids)
    begin = [] if is_begun else tokenizer.encode("<think>")
    own.advance([*begin, *tokenizer.encode("\nno idea\n</think>\n\nyes")])
    with pytest.raises(ValueError, match=r"can.t follow the tokens [^{]*$"):
        own.advance(tokenizer.encode("x"))
    off = tokenizer.encode("Say yes.<think>\n\n</think>\n\n")
    own = Matcher(lm, of_chat(Choice(["yes"]), None, tokenizer, off), tokenizer.stop_ids)
    with pytest.raises(ValueError, match=r"can.t follow the tokens [^{]*$"):
        own.advance(tokenizer.encode("<think>"))
    assert of_chat(None, None, tokenizer, prompt) is None
    assert of_chat(Choice(["yes"]), None, tiny.tokenizer, prompt) == Choice(["yes"])
