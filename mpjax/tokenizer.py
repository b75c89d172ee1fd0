"""Text to token ids and back: the tokenizer, chat template and stop tokens of a checkpoint folder.

The files are Hugging Face's: `tokenizer.json` (the `tokenizers` package), `tokenizer_config.json`,
`special_tokens_map.json`, `chat_template.jinja` and what stood in its place in earlier years, and
the `eos_token_id` of `generation_config.json` or `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from mpjax.chat_template import render
from mpjax.checkpoint import CheckpointError
from mpjax.text_stream import TextStream


class Tokenizer:
    """Encodes, decodes and renders chats as a checkpoint's own tokenizer does.

    Attributes:
      backend: the `tokenizers.Tokenizer`, without truncation or padding.
      special_tokens: names as chat templates use them ("bos_token", "eos_token", ...) to text.
      bos_id: id of `bos_token`, or `None` where the checkpoint has none.
      stop_ids: ids that end a text, without repeats: the `eos_token_id` of
        `generation_config.json`, or else of `config.json`, then that of `eos_token`.
      chat_templates: Jinja sources by name; a single one is called "default".
      special_ids: ids of special tokens.
      byte_ids: ids of the tokens <0x00> to <0xFF> that stand for single bytes, to these bytes.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        stop_ids: Iterable[int] = (),
        name: str = "this tokenizer",
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.name = name
        self.bos_id: int | None = backend.token_to_id(self.special_tokens.get("bos_token", ""))
        eos_id = backend.token_to_id(self.special_tokens.get("eos_token", ""))
        self.stop_ids = tuple(dict.fromkeys([*stop_ids, *([] if eos_id is None else [eos_id])]))
        backend.no_truncation()  # a length that the tokenizer was trained with must not cut prompts
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        found = ((backend.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
        self.byte_ids = {index: byte for index, byte in found if index is not None}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer of a checkpoint folder.

        Raises:
          CheckpointError: no `tokenizer.json`, or a file that can't be read or contradicts
            another. The message names the file.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(explain_missing(folder))
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise CheckpointError(f"{path} can't be read as a tokenizer: {error}.") from error
        config = _read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            # With that entry tokenizer_config.json says everything, and the map may be stale.
            config = {**config, **_read_json(folder / "special_tokens_map.json")}
        return cls(
            backend,
            special_tokens=_add_special_tokens(backend, config, folder),
            chat_templates=_read_chat_templates(folder, config),
            stop_ids=_read_stop_ids(folder),
            name=str(folder),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the bos token where the checkpoint's post-processor adds it.

        The text of a special token becomes that token. `add_bos_token` in `tokenizer_config.json`
        plays no part, as in transformers: `tokenizer.json` already says what to add.

        Raises ValueError for what is no text: another type, or half of a surrogate pair, which is
        what a byte that is not UTF-8 becomes in a terminal or a pipe.
        """
        _check_text(text)
        return self.backend.encode(text).ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids; ids without a token have none, broken UTF-8 becomes U+FFFD."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def stream(self, skip_special: bool = True, context: Sequence[int] = ()) -> TextStream:
        """A `TextStream` that decodes ids as they arrive, after a context whose text is known."""
        return TextStream(self, skip_special, context)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Render messages with the checkpoint's chat template.

        Args:
          messages: `[{"role": "user", "content": "..."}, ...]`; a key whose value is `None`
            counts as missing.
          add_generation_prompt: end with the header of the assistant's turn.
          chat_template: name of one of the checkpoint's templates, or Jinja source. By default
            "tool_use" when there are tools and such a template, and "default" otherwise.
          **variables: what else the template reads (`tools`, `documents`, `enable_thinking`, ...),
            in plain JSON types. They come after `bos_token`, `eos_token` and the like, and win.

        Raises:
          ValueError: no template, messages of another form, values that are not plain JSON types,
            or a template that fails or refuses; the message says which.
        """
        source = self._template(chat_template, variables)
        values = {"tools": None, "documents": None, **self.special_tokens, **variables}
        values["add_generation_prompt"] = add_generation_prompt
        return render(source, messages, values, self.name)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **rest: Any
    ) -> list[int]:
        """Token ids of `chat(...)`. The template writes its own special tokens: none is added."""
        text = self.chat(messages, add_generation_prompt, **rest)
        _check_text(text)
        return self.backend.encode(text, add_special_tokens=False).ids

    def _template(self, chosen: str | None, variables: Mapping[str, Any]) -> str:
        templates = self.chat_templates
        if chosen in templates:
            return templates[chosen]
        if chosen is not None and ("{{" in chosen or "{%" in chosen):
            return chosen
        if chosen is not None:  # a text without markup would be the same prompt for every chat
            known = ", ".join(sorted(templates)) or "it has none"
            raise ValueError(
                f"chat_template {chosen!r:.60} is neither a chat template of {self.name} ({known}) "
                "nor Jinja source, which has {{ or {%."
            )
        if variables.get("tools") is not None and "tool_use" in templates:
            return templates["tool_use"]
        if "default" in templates:
            return templates["default"]
        found = f"no default among its chat templates {sorted(templates)}"
        raise ValueError(
            f"{self.name} has {found if templates else 'no chat template, like most base models'}: "
            "pass chat_template=, or write the prompt as plain text."
        )


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"text is {type(text).__name__}; encode takes a str.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} of the text is {text[error.start]!r}, which no UTF-8 has: "
            "expected text; look at how it was decoded, for a file may have another encoding."
        ) from error


def explain_missing(folder: Path) -> str:
    """Why a folder without tokenizer.json has no tokenizer, and what to do about it."""
    if not folder.is_dir():
        return f"{folder} is not a folder; expected a checkpoint folder with a tokenizer.json."
    names = sorted(path.name for path in folder.iterdir())
    for other in ("tokenizer.model", "vocab.json"):  # neither says how a text is split
        if other in names:
            return (
                f"{folder} has {other} but no tokenizer.json: convert it once with transformers, "
                "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`."
            )
    return f"{folder} has no tokenizer.json; it holds {', '.join(names) or 'nothing'}."


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} where the file is missing: all but tokenizer.json are optional."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; expected a JSON object.")
    return value


def _content(token: Any) -> str | None:
    """Text of a token that is written as a str or as {"content": ...}."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _add_special_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path
) -> dict[str, str]:
    """Make the backend know the tokens of tokenizer_config.json; return the named ones."""
    # Some folders list tokens here that their tokenizer.json lacks; they follow in order of id.
    decoder = config.get("added_tokens_decoder") or {}
    for index, entry in sorted((int(index), entry) for index, entry in decoder.items()):
        if backend.token_to_id(entry["content"]) is None:
            flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
            token = tokenizers.AddedToken(**{key: entry[key] for key in flags if key in entry})
            backend.add_tokens([token])
            found = backend.token_to_id(entry["content"])
            if found != index:
                raise CheckpointError(
                    f"{folder}: tokenizer_config.json gives {entry['content']!r} the id {index}, "
                    f"but the next id that tokenizer.json leaves free is {found}."
                )
    named = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        named, extra = {**named, **{key: _content(value) for key, value in extra.items()}}, []
    present = {key: token for key, token in named.items() if token is not None}
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for content in [*present.values(), *map(_content, extra)]:
        # A name without an id is no token of this model; a plain one is special by being named.
        if content is not None and backend.token_to_id(content) is not None:
            token = known.get(content, tokenizers.AddedToken(content, normalized=False))
            if not token.special:
                backend.add_special_tokens([token])  # which also marks a known one
    return present


def _read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: their own files, else tokenizer_config.json, else chat_template.json."""
    templates = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (single := folder / "chat_template.jinja").is_file():
        templates["default"] = single.read_text(encoding="utf-8")
    if templates:
        return templates
    written = config.get("chat_template")
    if written is None:
        written = _read_json(folder / "chat_template.json").get("chat_template") or []
    if isinstance(written, str):
        return {"default": written}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in written}
    except (TypeError, KeyError) as error:
        expected = 'a str or a list of {"name": ..., "template": ...}'
        raise CheckpointError(f"the chat_template of {folder} is not {expected}.") from error


def _read_stop_ids(folder: Path) -> list[int]:
    """eos_token_id of generation_config.json, else of config.json or its text_config."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        values = _read_json(path)
        found = values.get("eos_token_id")
        if found is None:  # models of several modalities keep their language model's values apart
            found = (values.get("text_config") or {}).get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        size = _vocabulary_size(folder)
        if not all(type(i) is int and 0 <= i < (size or i + 1) for i in ids):
            known = f"from 0 to {size - 1}" if size else "0 or above"
            raise CheckpointError(
                f"eos_token_id in {path} is {found!r}; expected an id or a list of ids, {known}."
            )
        return ids
    return []


def _vocabulary_size(folder: Path) -> int | None:
    """vocab_size of config.json or its text_config; None where it doesn't say."""
    values = _read_json(folder / "config.json")
    size = values.get("vocab_size") or (values.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else None
