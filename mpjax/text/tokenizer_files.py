"""Reads a checkpoint's tokenizer files; each value is checked before it is used.

The files are `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`, chat templates
in `chat_template.jinja` and its older forms, and, for `eos_token_id`, `generation_config.json` and
`config.json`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from mpjax.errors import CheckpointError
from mpjax.kernels import files

# The largest vocabularies take 35 MB.
MAXIMUM_TOKENIZER_BYTES = 512 * 2**20
CONFIG_NAME = "tokenizer_config.json"
MAP_NAME = "special_tokens_map.json"
NAMES = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_backend(folder: Path) -> tokenizers.Tokenizer:
    """Reads `tokenizer.json`. Raises CheckpointError if it is missing or can't be read."""
    path = folder / "tokenizer.json"
    if not os.path.lexists(path):
        raise CheckpointError(explain_missing(folder))
    text = files.read_text(path, CheckpointError, MAXIMUM_TOKENIZER_BYTES)
    with explained(f"{path} can't be read as a tokenizer"):
        return tokenizers.Tokenizer.from_str(text)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns errors of the `tokenizers` package into CheckpointErrors.

    The package raises bare Exceptions, and panics of its Rust code. what: the failed action as the
    beginning of the message, such as "tokenizer.json can't be read".
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{what}: {error}.") from error


def explain_missing(folder: Path) -> str:
    """The error message for a folder without a tokenizer.json: the reason, and what to do."""
    if not folder.is_dir():
        return f"{folder} is not a folder: expected a checkpoint folder with a tokenizer.json."
    names = sorted(path.name for path in folder.iterdir())
    for other in ("tokenizer.model", "vocab.json"):  # neither defines the whole tokenizer
        if other in names:
            return (
                f"{folder} has {other} but no tokenizer.json: convert it once with transformers, "
                "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`."
            )
    return f"{folder} has no tokenizer.json; it holds {', '.join(names) or 'nothing'}."


def read_special_tokens(folder: Path, backend: tokenizers.Tokenizer) -> dict[str, str]:
    """Adds a folder's special tokens to the backend; returns the text of each named one.

    A name is, for example, "bos_token". Raises CheckpointError.
    """
    path = folder / CONFIG_NAME
    config = read_optional(path)
    _add_tokens(backend, _read_added_tokens(config, path), path)
    _check_tokens(config, path)
    if "added_tokens_decoder" not in config:
        # A tokenizer_config.json with that entry is complete, and the map beside it may be stale.
        mapped = read_optional(folder / MAP_NAME)
        _check_tokens(mapped, folder / MAP_NAME)
        config = {**config, **mapped}
    named = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        named, extra = {**named, **{key: _content(value) for key, value in extra.items()}}, []
    present = {key: token for key, token in named.items() if token is not None}
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    special = [
        known.get(content, tokenizers.AddedToken(content, normalized=False))
        for content in [*present.values(), *map(_content, extra)]
        # A special token that the vocabulary lacks is skipped. A plain token that is named here
        # becomes special.
        if content is not None and backend.token_to_id(content) is not None
    ]
    # The call also marks known tokens as special. There is one call for all of them, because each
    # takes time proportional to the whole vocabulary.
    backend.add_special_tokens([token for token in special if not token.special])
    return present


def read_chat_templates(folder: Path) -> dict[str, str]:
    """Chat templates by name: from *.jinja, else tokenizer_config.json, else chat_template.json.

    Raises CheckpointError.
    """
    others = folder / "additional_chat_templates"
    if os.path.lexists(others) and not others.is_dir():
        raise CheckpointError(
            f"{others} is not a folder: expected a folder of chat templates, or no such entry"
        )
    paths = {path.stem: path for path in sorted(others.glob("*.jinja"))}
    if os.path.lexists(single := folder / "chat_template.jinja"):
        paths["default"] = single
    if paths:
        return {name: files.read_text(path, CheckpointError) for name, path in paths.items()}
    for path in (folder / CONFIG_NAME, folder / "chat_template.json"):
        written = read_optional(path).get("chat_template")
        if isinstance(written, str):
            return {"default": written}
        if written is not None:
            return _named_templates(written, path)
    return {}


def read_stop_ids(folder: Path) -> list[int]:
    """Stop ids: eos_token_id of generation_config.json, else of config.json or its text_config.

    Raises CheckpointError for anything but ids in the vocabulary.
    """
    for path in (folder / "generation_config.json", folder / "config.json"):
        found = _of_language_model(path, "eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        size = _of_language_model(folder / "config.json", "vocab_size")
        size = size if type(size) is int and size > 0 else None
        if not all(type(i) is int and 0 <= i < (size or i + 1) for i in ids):
            known = f"from 0 to {size - 1}" if size else "0 or above"
            raise CheckpointError(
                f"eos_token_id in {path} is {found!r:.80}: expected an id or a list of ids, {known}"
            )
        return ids
    return []


def read_optional(path: Path) -> dict[str, Any]:
    """Reads a JSON object; {} for a missing file, as all files but tokenizer.json are optional."""
    return files.read_object(path, CheckpointError) if os.path.lexists(path) else {}


def _of_language_model(path: Path, key: str) -> Any:
    """The value of a key in a file or, for multimodal models, in its text_config."""
    values = read_optional(path)
    if values.get(key) is not None:
        return values[key]
    text_config = values.get("text_config")
    return _require(text_config, dict, f"{path}: text_config", "an object").get(key)


def _require(value: Any, kind: type, where: str, expected: str) -> Any:
    """The value, or `kind()` for None. Raises CheckpointError if it is not of type `kind`."""
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise CheckpointError(f"{where} is {value!r:.80}: expected {expected}")
    return value


def _content(token: Any) -> str | None:
    """The text of a token given as a string or as {"content": ...}; None for anything else."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _check_tokens(config: Mapping[str, Any], path: Path) -> None:
    """Raises CheckpointError for a named special token without text.

    Keys outside NAMES that end in _token may hold anything.
    """
    tokens = {name: config[name] for name in NAMES if config.get(name) is not None}
    for key in ("extra_special_tokens", "additional_special_tokens"):
        extra = config.get(key)
        extra = dict(enumerate(extra)) if isinstance(extra, list) else extra
        extra = _require(extra, dict, f"{path}: {key}", "a list of tokens, or an object of them")
        tokens |= {f"{key}[{name!r:.80}]": token for name, token in extra.items()}
    for name, token in tokens.items():
        if _content(token) is None:
            raise CheckpointError(
                f"{path}: {name} is {token!r:.80}: expected a string, or an object with the string "
                "content"
            )


def _read_added_tokens(config: Mapping[str, Any], path: Path) -> dict[int, tokenizers.AddedToken]:
    """The tokens of added_tokens_decoder, by id in ascending order. Raises CheckpointError."""
    where = f"{path}: added_tokens_decoder"
    tokens = {}
    for index, entry in _require(
        config.get("added_tokens_decoder"), dict, where, "an object of tokens by their ids"
    ).items():
        if not re.fullmatch("[0-9]{1,10}", index):
            raise CheckpointError(f"{where} has the key {index!r:.80}: expected a token's id")
        entry = _require(entry, dict, f"{where}[{index}]", "an object")
        flags = {key: entry[key] for key in FLAGS if key in entry}
        wrong = [key for key, value in flags.items() if type(value) is not bool]
        if not isinstance(entry.get("content"), str) or wrong:
            key, expected = (wrong[0], "true or false") if wrong else ("content", "a string")
            raise CheckpointError(
                f"{where}[{index}]: {key} is {entry.get(key)!r:.80}: expected {expected}"
            )
        tokens[int(index)] = tokenizers.AddedToken(entry["content"], **flags)
    return dict(sorted(tokens.items()))


def _add_tokens(
    backend: tokenizers.Tokenizer, tokens: Mapping[int, tokenizers.AddedToken], path: Path
) -> None:
    """Adds tokens that tokenizer.json lacks to the backend, in order of id.

    path: of tokenizer_config.json. Raises CheckpointError if a token would get another id.
    """
    missing = {
        index: token
        for index, token in tokens.items()
        if backend.token_to_id(token.content) is None
    }
    free = backend.get_vocab_size()
    backend.add_tokens(list(missing.values()))  # one call, as each processes the whole vocabulary
    for index, token in missing.items():
        if (found := backend.token_to_id(token.content)) != index:
            raise CheckpointError(
                f"{path} gives {token.content!r:.80} the id {index}, but the next id that "
                f"tokenizer.json leaves free is {free if found is None else found}: fetch both "
                "files from the same checkpoint"
            )


def _named_templates(written: Any, path: Path) -> dict[str, str]:
    templates = {}
    for entry in written if isinstance(written, list) else [written]:
        listed = entry if isinstance(written, list) and isinstance(entry, dict) else {}
        name, template = listed.get("name"), listed.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise CheckpointError(
                f"{path}: chat_template is {written!r:.80}: expected a string, or a list of "
                '{"name": ..., "template": ...}'
            )
        templates[name] = template
    return templates
