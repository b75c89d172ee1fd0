"""Reads the constraint of an answer: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpjax.constraints.kinds import (
    SPACES,
    ChatAnswer,
    Choice,
    Constraint,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
)
from mpjax.serve.errors import NOT_OFFERED, RequestError
from mpjax.serve.keys import Table, accepted, flag, ignored, record, refused, text
from mpjax.serve.tools import Tools
from mpjax.text.tokenizer import Tokenizer

TAIL = 16  # tokens at a prompt's end in which a template may begin reasoning
FORMATS = ("text", "json_object", "json_schema")
KINDS = ("json", "regex", "choice", "grammar", "json_object")

_SCHEMA: Table = {
    "schema": accepted("a JSON schema", lambda value: isinstance(value, dict)),
    "name": ignored(),
    "description": ignored(),
    "strict": ignored(),  # a schema is always enforced
}
RESPONSE_FORMAT: Table = {
    "type": accepted(" or ".join(map(repr, FORMATS)), lambda value: value in FORMATS),
    "json_schema": record("json_schema", _SCHEMA),
}
STRUCTURED_OUTPUTS: Table = {
    "json": accepted("a JSON schema or its text", lambda value: isinstance(value, dict | str)),
    "regex": text(),
    "choice": accepted("a list of texts", lambda value: isinstance(value, list)),
    "grammar": text(),
    "json_object": flag(),
    "whitespace_pattern": text(),
    "disable_any_whitespace": flag(),
    "disable_fallback": ignored(),
    "disable_additional_properties": refused(False),
    "structural_tag": refused(),
}


def read_constraint(values: Mapping[str, Any]) -> tuple[Constraint | None, str]:
    """The constraint in a request, and the key that has it.

    values: of the body's keys. Raises RequestError for several or incomplete constraints.
    """
    format, structured = values["response_format"], values["structured_outputs"]
    key = "response_format" if structured is None else "structured_outputs"
    found = None if format is None else _of_format(format)
    if structured is None:
        return found, key
    if found is not None:
        message = "structured_outputs is given beside response_format: leave one of them out"
        raise RequestError(message, key)
    return _of_structured(structured), key


def of_chat(
    constraint: Constraint | None, tools: Tools | None, tokenizer: Tokenizer, prompt: Sequence[int]
) -> Constraint | None:
    """The constraint of a chat's answer with reasoning and tool calls; None if it is free.

    constraint: of the text for the user. prompt: token ids, whose end shows whether reasoning has
    begun or is switched off. Raises RequestError for tools that no grammar can enforce.
    """
    style = tokenizer.style
    if tools is None and (constraint is None or style.channels is None):
        return constraint
    tail = tokenizer.decode(prompt[-TAIL:], skip_special=False)
    try:
        outer = (tools or Tools([])).grammar(style, tail, constraint is not None)
    except ValueError as error:
        raise RequestError(str(error), "tools", code=NOT_OFFERED) from error
    return None if outer is None else ChatAnswer(outer, constraint)


def _of_format(values: Mapping[str, Any]) -> Constraint | None:
    kind, schema = values["type"], values["json_schema"]
    if kind is None:
        expected = ", ".join(FORMATS)
        raise RequestError(f"response_format has no type: expected {expected}", "response_format")
    if (kind == "json_schema") != (schema is not None):
        raise RequestError(
            f"response_format has the type {kind} and {'a' if schema else 'no'} json_schema: only "
            "the type json_schema has one",
            "response_format",
        )
    if schema is None:
        return JsonObject() if kind == "json_object" else None
    if schema["schema"] is None:
        raise RequestError("response_format.json_schema has no schema", "response_format")
    return JsonSchema(schema["schema"])


def _of_structured(values: Mapping[str, Any]) -> Constraint:
    key = "structured_outputs"
    given = {name: values[name] for name in KINDS if values[name] not in (None, False)}
    if len(given) != 1:
        has = ", ".join(given) or "none"
        raise RequestError(f"{key} has {has}: expected one of {', '.join(KINDS)}", key)
    spaces = values["whitespace_pattern"]
    spaces = SPACES if spaces is None else spaces
    [(kind, value)] = given.items()
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else value
        return JsonSchema(schema, "" if values["disable_any_whitespace"] else spaces)
    if values["whitespace_pattern"] is not None or values["disable_any_whitespace"]:
        raise RequestError(f"{key} has {kind} and says what spaces are: only JSON has these", key)
    kinds: dict[str, Any] = {"regex": Regex, "choice": Choice, "grammar": Grammar}
    found: Constraint = kinds[kind](value)
    return found
