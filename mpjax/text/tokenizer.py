"""Converts text to token ids and back with a checkpoint's tokenizer, and renders chats.

The files are Hugging Face's: `tokenizer.json`, which the `tokenizers` package reads, and the files
beside it, which `tokenizer_files.py` reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from mpjax.text import tokenizer_files
from mpjax.text.answers import Style
from mpjax.text.channels import Channels
from mpjax.text.text_stream import TextStream
from mpjax.text.tool_formats import ToolFormat


class Tokenizer:
    """Encodes text, decodes token ids and renders chats as transformers does for a checkpoint.

    Attributes:
      backend: the `tokenizers.Tokenizer`, without truncation or padding.
      special_tokens: text of each special token by its name in chat templates, such as "bos_token".
      bos_id: id of `bos_token`, or `None` for a checkpoint without one.
      stop_ids: ids that end a text, without repeats: `eos_token_id` of `generation_config.json`, or
        else of `config.json`, and then the id of `eos_token`.
      chat_templates: Jinja sources by name; a single one is called "default".
      style: the markers of reasoning (from the default chat template) and the format of tool calls
        (from the template for chats with tools).
      special_ids: ids of special tokens. hidden_ids: those that decoded text omits: all but the
        markers of channels and of tool calls that don't end a text.
      byte_ids: the byte of each token <0x00> to <0xFF>, by its id.
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
        backend.no_truncation()  # tokenizer.json may have the truncation of the training
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.style = self._style()
        self.hidden_ids = self.special_ids - self.style.tokens.keys()
        found = ((backend.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
        self.byte_ids = {index: byte for index, byte in found if index is not None}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads the tokenizer of a checkpoint folder.

        Raises:
          CheckpointError: for a folder without `tokenizer.json`, and for a file that can't be read
            or contradicts another. The message names the file.
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

    def to_files(self) -> dict[str, str]:
        """File name → content of the files from which `from_folder` reads this tokenizer."""
        templates = [{"name": name, "template": text} for name, text in self.chat_templates.items()]
        settings: dict[str, Any] = {**self.special_tokens}
        if templates:
            settings["chat_template"] = templates
        texts = {"tokenizer.json": self.backend.to_str()}
        texts["tokenizer_config.json"] = json.dumps(settings, indent=2, ensure_ascii=False)
        if self.stop_ids:
            texts["generation_config.json"] = json.dumps({"eos_token_id": list(self.stop_ids)})
        return texts

    def encode(
        self, text: str, add_special_tokens: bool = True, second: str | None = None
    ) -> list[int]:
        """Token ids of a text, with the special tokens that the checkpoint's post-processor adds.

        add_special_tokens: whether it adds them (bos, ...). second: a text that the post-processor
            joins to the first one, or None.

        The text of a special token becomes that token. As in transformers, `add_bos_token` in
        `tokenizer_config.json` is not read: `tokenizer.json` defines the added tokens.

        Raises ValueError if a text is not a str or has a lone surrogate, which Python makes of a
        byte that is not UTF-8 in a terminal or a pipe; CheckpointError if `tokenizer.json`
        contradicts itself.
        """
        for given in (text,) if second is None else (text, second):
            _check_text(given)
        with tokenizer_files.explained(f"the tokenizer.json of {self.name} can't encode this text"):
            return self.backend.encode(text, second, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids; unknown ids are skipped, and invalid UTF-8 becomes U+FFFD.

        skip_special: whether special tokens are skipped, too. The markers that split an answer into
            reasoning, channels and tool calls are kept; see `hidden_ids`.
        """
        found = [int(i) for i in ids]
        if skip_special and self.hidden_ids != self.special_ids:
            found, skip_special = [i for i in found if i not in self.hidden_ids], False
        with tokenizer_files.explained(f"the tokenizer.json of {self.name} can't decode these ids"):
            return self.backend.decode(found, skip_special_tokens=skip_special)

    def stream(self, skip_special: bool = True, context: Sequence[int] = ()) -> TextStream:
        """A `TextStream` that decodes ids as they arrive. context: ids whose text is known."""
        return TextStream(self, skip_special, context)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Renders messages with the checkpoint's chat template.

        Args:
          messages: `[{"role": "user", "content": "..."}, ...]`; a key whose value is `None`
            counts as missing.
          add_generation_prompt: whether to end with the header of the assistant's turn.
          chat_template: name of one of the checkpoint's templates, or Jinja source. By default
            "tool_use" with `tools` and a template of that name, and "default" otherwise.
          **variables: further variables of the template (`tools`, `documents`, `enable_thinking`,
            ...), in plain JSON types. They replace special tokens of the same name.

        Raises:
          ValueError: for a checkpoint without a template, messages of a wrong form, values that are
            not plain JSON types, and a template that fails or calls `raise_exception`; the message
            says which.
        """
        from mpjax.text.chat_template import render  # here, since only chats need Jinja

        source = self._template(chat_template, variables)
        values = {"tools": None, "documents": None, **self.special_tokens, **variables}
        values["add_generation_prompt"] = add_generation_prompt
        return render(source, messages, values, self.name)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **rest: Any
    ) -> list[int]:
        """Token ids of `chat(...)`. The template writes all special tokens; none is added."""
        text = self.chat(messages, add_generation_prompt, **rest)
        return self.encode(text, add_special_tokens=False)

    def _style(self) -> Style:
        default = self.chat_templates.get("default", "")
        channels = Channels.of_template(default)
        tools = ToolFormat.of_template(self.chat_templates.get("tool_use", default))
        texts = [*(channels.states if channels else ()), *(tools.literals if tools else ())]
        added = {i: token.content for i, token in self.backend.get_added_tokens_decoder().items()}
        return Style(
            channels,
            tools,
            {
                index: token
                for index, token in added.items()
                if index not in self.stop_ids and any(token.strip() and token in t for t in texts)
            },
        )

    def _template(self, chosen: str | None, variables: Mapping[str, Any]) -> str:
        templates = self.chat_templates
        if chosen in templates:
            return templates[chosen]
        if chosen is not None and ("{{" in chosen or "{%" in chosen):
            return chosen
        if chosen is not None:  # source without markup would render every chat to the same text
            known = ", ".join(sorted(templates)) or "it has none"
            raise ValueError(
                f"chat_template is {chosen!r:.60}: expected a chat template of {self.name} "
                f"({known}), or Jinja source, which has {{{{ or {{%"
            )
        if variables.get("tools") is not None and "tool_use" in templates:
            return templates["tool_use"]
        if "default" in templates:
            return templates["default"]
        found = f"no default among its chat templates {sorted(templates)}"
        raise ValueError(
            f"{self.name} has {found if templates else 'no chat template, like most base models'}: "
            "pass chat_template=, or write the prompt as plain text"
        )


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"text is {type(text).__name__}: expected a str")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} of the text is {text[error.start]!r}, which UTF-8 can't "
            "encode: read the text with its own encoding, which may be another one than UTF-8"
        ) from error
