"""The requests of `mpjax generate`: prompts from the command line, a file or JSON Lines."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from mpjax.cli import output
from mpjax.files.json_text import json_text

if TYPE_CHECKING:
    from mpjax.language_model import LanguageModel

SEEDS = 2**32
KEYS = ("id", "prompt", "messages", "max_new_tokens", "seed")


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt (a text or the messages of a chat) with its settings.

    id: identifies the result: any JSON value, by default the number of the prompt or line.
    max_new_tokens: the most tokens to generate.
    seed: of the sampling.
    place: the name of the request in error messages.
    """

    id: Any
    prompt: str | list[dict[str, Any]]
    max_new_tokens: int
    seed: int
    place: str


def gather(
    prompts: Sequence[str],
    prompt_file: Path | None,
    input: Path | None,
    max_new_tokens: int,
    seed: int,
) -> list[Request]:
    """A request for each prompt, from the only source that is given.

    prompts: texts, or a single `-` for stdin.
    prompt_file: a file with one text.
    input: a JSON Lines file, or `-` for stdin; see `read_lines`.
    max_new_tokens: of each request.
    seed: of the first request; each further request has the next integer.

    Raises BadParameter without a source, with several, and for an input that is not a file.
    """
    if (len(prompts) > 0) + (prompt_file is not None) + (input is not None) != 1:
        raise typer.BadParameter(
            "give prompts in one way: as arguments (a single - reads one from stdin), with "
            "--prompt-file or with --input",
            param_hint="PROMPT",
        )
    if input is not None:
        if str(input) != "-" and not input.is_file():
            is_folder = input.is_dir()
            found = f"{input} is a folder" if is_folder else f"there is no file {input}"
            raise typer.BadParameter(f"{found}: expected JSON Lines", param_hint="--input")
        return read_lines(input, max_new_tokens, seed)
    texts = list(prompts) if prompt_file is None else [_read_file(prompt_file)]
    if prompt_file is None and texts == ["-"]:
        texts = [_read_stdin()]
    return [
        Request(index + 1, text, max_new_tokens, (seed + index) % SEEDS, f"prompt {index + 1}")
        for index, text in enumerate(texts)
    ]


def require_new_tokens(requests: Sequence[Request], least: int) -> None:
    """Raises ValueError if a request asks for fewer new tokens than `least`."""
    for request in requests:
        if request.max_new_tokens < least:
            raise ValueError(
                f"{request.place} asks for at most {request.max_new_tokens} new tokens"
            )


def _read_file(file: Path) -> str:
    from mpjax.arguments import read_text

    return _without_line_end(read_text(file))


def _read_stdin() -> str:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(newline="")  # keeps "\r\n", which would become "\n"
    return _without_line_end(sys.stdin.read())


def _without_line_end(text: str) -> str:
    # Editors and `echo` end the last line with a line break that isn't meant as part of the prompt.
    return text.removesuffix("\r\n" if text.endswith("\r\n") else "\n")


def read_lines(path: Path, max_new_tokens: int, seed: int) -> list[Request]:
    """The requests in the lines of a JSON Lines file, or of stdin if the path is `-`.

    A line is an object with a "prompt" or "messages". It may have an "id", and "max_new_tokens" and
    "seed", which override the arguments. Blank lines are skipped.

    Raises ValueError for a malformed line or a repeated id (the message names the line), and for a
    file without lines.
    """
    from mpjax.arguments import read_text

    is_stdin = str(path) == "-"
    name, text = ("stdin", _read_json_stdin()) if is_stdin else (str(path), read_text(path))
    requests: list[Request] = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if line.strip():
            place, default = f"{name}, line {number}", (seed + len(requests)) % SEEDS
            requests.append(_parse(line, number, place, max_new_tokens, default))
    if not requests:
        raise ValueError(f'{name} has no lines: expected one like {{"prompt": "def f(x):"}}')
    _check_ids(requests)
    return requests


def _check_ids(requests: Sequence[Request]) -> None:
    """Raises ValueError, which names both lines, for a repeated id. null may repeat."""
    places: dict[str, str] = {}
    for request in requests:
        key = json.dumps(request.id, sort_keys=True)
        if request.id is not None and key in places:
            raise ValueError(
                f"{request.place} has the id {key:.60}, as {places[key]} has: give each line an id "
                "of its own, or none, which stands for the line's number"
            )
        places[key] = request.place


def _read_json_stdin() -> str:
    if isinstance(sys.stdin, io.TextIOWrapper):
        # JSON is UTF-8, whatever the terminal's encoding is.
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin.read()


def _parse(line: str, number: int, place: str, max_new_tokens: int, seed: int) -> Request:
    try:
        found = json.loads(line, parse_constant=_refuse_constant)
        output.to_json(found)  # raises ValueError if the id could not be written with the result
    except RecursionError as error:
        raise ValueError(f"{place} is nested too deeply to be read") from error
    except ValueError as error:
        raise ValueError(f"{place} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{place} holds {json_text(found)}: expected a JSON object")
    if unknown := [key for key in found if key not in KEYS]:
        raise ValueError(
            f"{place} has the key {json_text(unknown[0])}; there are {', '.join(KEYS)}: what else "
            "holds for a prompt is an option of all, such as --temperature, and its id may be an "
            "object"
        )
    if "prompt" in found and "messages" in found:
        raise ValueError(f'{place} has both a "prompt" and "messages": leave one of them out')
    if "prompt" not in found and "messages" not in found:
        raise ValueError(f'{place} has neither a "prompt" nor "messages": it needs one of them')
    if not isinstance(found.get("prompt", ""), str):
        raise ValueError(f'{place}: "prompt" is {json_text(found["prompt"])}, not a text')
    messages = found.get("messages", [{"role": "user"}])
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise ValueError(
            f'{place}: "messages" is {json_text(messages, 80)}, not a list of objects with a role '
            "and a content"
        )
    return Request(
        found.get("id", number),
        found.get("prompt", messages),
        _integer(found, "max_new_tokens", max_new_tokens, 1, None, place),
        _integer(found, "seed", seed, 0, SEEDS - 1, place),
        place,
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _is_message(value: Any) -> bool:
    """Whether a value is a chat message; whether it needs a content depends on the template."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list | types.NoneType)


def _integer(
    found: Mapping[str, Any], key: str, default: int, least: int, most: int | None, place: str
) -> int:
    value = found.get(key, default)
    if type(value) is not int or value < least or (most is not None and value > most):
        bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise ValueError(
            f'{place}: "{key}" is {json_text(value)}: expected a whole number {bounds}'
        )
    return value


def count_tokens(lm: LanguageModel, request: Request) -> int:
    """The number of tokens of a request's prompt.

    Raises ValueError, which names the request, for a prompt without tokens, for messages that the
    chat template refuses, and for more tokens than the model has positions.
    """
    if lm.tokenizer is None:
        raise ValueError(
            f"{lm.source} has no tokenizer.json, which encodes prompts: fetch it into the folder"
        )
    try:
        if isinstance(request.prompt, str):
            tokens = len(lm.tokenizer.encode(request.prompt))
        elif not lm.tokenizer.chat_templates:
            raise ValueError(
                f"{lm.source} has no chat template for messages, like most base models: write a "
                'plain text as "prompt" instead'
            )
        else:
            tokens = len(lm.tokenizer.encode_chat(request.prompt))
    except ValueError as error:
        raise ValueError(f"{request.place}: {error}") from error
    positions = lm.config.max_position_embeddings
    if not tokens:
        raise ValueError(f"{request.place} is empty: expected at least one token")
    if tokens + request.max_new_tokens - 1 > positions:  # the last token needs no position
        raise ValueError(
            f"{request.place} has {tokens} tokens, and with {request.max_new_tokens} new ones it "
            f"would pass the {positions} positions of this model: shorten it, ask for fewer, or "
            "give more with --max-positions"
        )
    return tokens
