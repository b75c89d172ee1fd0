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

from mpjax.text.chat_messages import (
    Message,
    checked,
    left_out,
    marked,
    marked_tools,
    require_plain,
    spellings,
    with_tools,
)


def render(
    source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], name: str
) -> str:
    """Render messages with a chat template, as transformers does.

    The messages get the form that the template accepts, and none of their content is dropped. The
    template may drop names, ids, and the reasoning of earlier answers.

    Args:
      source: Jinja source.
      messages: dicts with a "role", and a "content" (a string, or another form that the template
        accepts) or a key in its place, such as "tool_calls"; `None` counts as missing.
      variables: further variables of the template, in plain JSON types.
      name: the tokenizer's name, for error messages.

    Raises:
      ValueError: for messages of a wrong form, values that are not plain JSON types, content that
        the template drops (a message, a part of its content, a call, tools, documents), and a
        template that fails or calls `raise_exception`; the message says which.
    """
    conversation = checked(messages)
    for key, value in variables.items():
        require_plain(value, key)
        if key in ("tools", "documents") and value and key not in source:
            raise ValueError(f"the chat template of {name} has no place for {key}.")
    tools, tool_marks = marked_tools(variables.get("tools"))
    in_system = bool(tool_marks) and "['tools']" in source

    def prompt_of(spelled: list[Message], tools: Any) -> str:
        spelled = with_tools(spelled, tools) if in_system else spelled
        return _compile(source).render({**variables, "tools": tools, "messages": spelled})

    lost: list[str] = []
    failure: Exception | None = None
    for spelled in spellings(conversation, knows_developer="developer" in source):
        probe, marks = marked(spelled)
        try:
            missing = left_out(prompt_of(probe, tools), marks | tool_marks)
            if not missing:
                return prompt_of(spelled, variables.get("tools"))
            if not lost or len(missing) < len(lost):
                lost = missing
        except Exception as error:  # a template is a program and may raise anything
            failure = failure or error
    if lost:
        raise ValueError(f"the chat template of {name} leaves out {lost[0]}.")
    raise ValueError(
        f"the chat template of {name} can't render these messages: "
        f"{type(failure).__name__}: {failure}"
    ) from failure


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
