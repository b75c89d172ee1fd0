"""Text to token ids and back: the tokenizer, chat template and stop tokens of a checkpoint folder.

The files are Hugging Face's: `tokenizer.json`, which the `tokenizers` package reads, and those
beside it (`tokenizer_files.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from mpjax import tokenizer_files
from mpjax.chat_template import render
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
        backend = tokenizer_files.read_backend(folder)
        return cls(
            backend,
            special_tokens=tokenizer_files.read_special_tokens(folder, backend),
            chat_templates=tokenizer_files.read_chat_templates(folder),
            stop_ids=tokenizer_files.read_stop_ids(folder),
            name=str(folder),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the bos token where the checkpoint's post-processor adds it.

        The text of a special token becomes that token. `add_bos_token` in `tokenizer_config.json`
        plays no part, as in transformers: `tokenizer.json` already says what to add.

        Raises ValueError for what is no text: another type, or half of a surrogate pair, which is
        what a byte that is not UTF-8 becomes in a terminal or a pipe; CheckpointError where
        `tokenizer.json` contradicts itself.
        """
        return self._encode(text, add_special_tokens=True)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids; ids without a token have none, broken UTF-8 becomes U+FFFD."""
        found = [int(i) for i in ids]
        with tokenizer_files.explained(f"the tokenizer.json of {self.name} can't decode these ids"):
            return self.backend.decode(found, skip_special_tokens=skip_special)

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
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        _check_text(text)
        with tokenizer_files.explained(f"the tokenizer.json of {self.name} can't encode this text"):
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

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
