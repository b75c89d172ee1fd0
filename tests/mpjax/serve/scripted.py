"""An engine that answers with given texts, and the server of a model that calls tools."""

from __future__ import annotations

import dataclasses
import threading
import time
from types import SimpleNamespace
from typing import Any

import tokenizers

from mpjax.engine.handle import CancelledError, Handle, New
from mpjax.text.row_text import RowText
from mpjax.text.tokenizer import Tokenizer
from tests.mpjax.text.tool_templates import TEMPLATES
from tests.mpjax.tokenizer_folders import byte_level

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def tokenizer_of(name="hermes", more=""):
    """A tokenizer whose chat template writes calls in a format. more: text of the template."""
    backend = byte_level(["<eos>"])
    source, tokens = TEMPLATES[name]
    backend.add_tokens([tokenizers.AddedToken(one) for one in dict.fromkeys((*MARKERS, *tokens))])
    return Tokenizer(
        backend,
        special_tokens={"eos_token": "<eos>"},
        chat_templates={"default": source + more},
        name="scripted",
    )


@dataclasses.dataclass
class Script:
    """An engine for the server.

    answers: the texts of the next requests, or their ids. prompts: the texts of the prompts so far,
    and options: what `submit` got with each.
    """

    tokenizer: Tokenizer
    answers: list[str | list[int]] = dataclasses.field(default_factory=list)
    prompts: list[str] = dataclasses.field(default_factory=list)
    options: list[dict] = dataclasses.field(default_factory=list)
    max_tokens: int = 4096
    is_closed: bool = False

    def __post_init__(self):
        self.lm = SimpleNamespace(
            tokenizer=self.tokenizer,
            require_tokenizer=lambda: self.tokenizer,
            config=SimpleNamespace(vocab_size=self.tokenizer.backend.get_vocab_size()),
            sampling=None,
            adapters=SimpleNamespace(names=[]),
        )

    def statistics(self):
        return {"waiting": 0, "new_tokens": 0}

    def start(self):
        pass

    def close(self):
        self.is_closed = True

    def cancel(self, handle):
        handle.is_cancelled = True

    def submit(self, ids, *, max_new_tokens, stop, **options):
        self.prompts.append(self.tokenizer.decode(ids, skip_special=False))
        self.options.append({"max_new_tokens": max_new_tokens, "stop": stop} | options)
        text = self.answers.pop(0)
        tokens = self.tokenizer.encode(text) if isinstance(text, str) else text
        handle: Any = Handle(self, len(self.prompts), list(ids), RowText(self.tokenizer, ids, stop))
        handle.is_cancelled = False
        tokens, is_cut = tokens[:max_new_tokens], len(tokens) > max_new_tokens
        threading.Thread(target=self._run, args=(handle, tokens, is_cut)).start()
        return handle

    def _run(self, handle, tokens, is_cut):
        for at in range(0, len(tokens), 3):
            time.sleep(0.001)
            if handle.is_cancelled or handle.has_stopped:
                break
            piece = tokens[at : at + 3]
            handle.push(New(piece, [0.0] * len(piece)))
            handle.report(piece)
        if handle.is_cancelled:
            handle.finish("cancelled", CancelledError("it was cancelled"))
        else:
            handle.finish("length" if is_cut else "stop")
        handle.report([])
