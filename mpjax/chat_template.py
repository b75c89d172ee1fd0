"""Renders chat templates: Jinja programs in a checkpoint that turn messages into a prompt."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


def render(
    source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], name: str
) -> str:
    """Render messages with a chat template, as transformers does.

    Args:
      source: Jinja source.
      messages: dicts with a "role" and a "content" (a text, or what else the template takes), or
        something else in its place, such as "tool_calls"; `None` counts as missing.
      variables: further variables of the template, in plain JSON types.
      name: the tokenizer's name, for error messages.

    Raises:
      ValueError: for messages of another form, values that are not plain JSON types, and a template
        that fails or calls `raise_exception`; the message says which.
    """
    conversation = _checked(messages)
    for key, value in variables.items():
        _check_plain(value, key)
    try:
        return _compile(source).render({**variables, "messages": conversation})
    except Exception as error:  # a template is a program, which may raise anything
        raise ValueError(
            f"the chat template of {name} can't render these messages: "
            f"{type(error).__name__}: {error}"
        ) from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes &, < and > for HTML; models are trained on prompts without that.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    """Compiles a chat template in the environment that transformers documents for templates."""
    # A template comes with the checkpoint and is not trusted: the sandbox hides Python's internals
    # and forbids it to change its arguments.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def _checked(messages: Any) -> list[dict[str, Any]]:
    example = '[{"role": "user", "content": "Hello"}]'
    if not isinstance(messages, (list, tuple)) or not messages:
        found = "empty" if isinstance(messages, (list, tuple)) else type(messages).__name__
        raise ValueError(f"messages is {found}: expected a list like {example}.")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"message {number} is {message!r:.80}: expected a dict with a role, as {example}."
            )
        _check_plain(message, f"message {number}")
        content = message.get("content")
        if content is None and not any(message[key] for key in message if key != "role"):
            raise ValueError(f"message {number} has no content: expected a text, as {example}.")
        if isinstance(content, int | float):
            raise ValueError(
                f"the content of message {number} is {content!r}: expected a text, as {example}."
            )
    return [{key: value for key, value in m.items() if value is not None} for m in messages]


def _check_plain(value: Any, where: str) -> None:
    """Raises ValueError for anything but plain JSON types: a template could call its methods."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _check_plain(item, f"{where}[{number}]")
    elif not isinstance(value, (str, int, float, bool, type(None))):
        raise ValueError(
            f"{where} is {type(value).__name__}; a chat template takes plain JSON types (tools as "
            "JSON schemas)."
        )
