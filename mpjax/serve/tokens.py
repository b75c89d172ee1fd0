"""Answers vLLM's /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from mpjax.language_model import LanguageModel
from mpjax.serve.errors import RequestError
from mpjax.serve.keys import read_keys
from mpjax.serve.requests import chat_ids, require_object
from mpjax.serve.tables import DETOKENIZE, TOKENIZE
from mpjax.serve.tools import read_tools

CHOICE = {"tool_choice": "auto", "parallel_tool_calls": True}


def tokenize(lm: LanguageModel, body: Any, ignore_unknown: bool = False) -> dict[str, Any]:
    """The token ids of a prompt, or of the messages of a chat.

    Raises RequestError, which names the key.
    """
    values = read_keys(require_object(body), TOKENIZE, ignore_unknown)
    prompt, messages = values["prompt"], values["messages"]
    if (prompt is None) == (messages is None):
        raise RequestError("expected one of prompt and messages", "prompt")
    tokenizer, adds = lm.require_tokenizer(), values["add_special_tokens"]
    if prompt is None:
        ids = chat_ids(
            lm,
            values,
            read_tools({**CHOICE, **values}, tokenizer.style.tools),
            add_generation_prompt=values["add_generation_prompt"],
            add_special_tokens=adds is True,
        )
    else:
        try:
            ids = tokenizer.encode(prompt, adds is not False)
        except ValueError as error:  # a lone surrogate
            raise RequestError(str(error), "prompt") from error
    found = {"count": len(ids), "tokens": ids, "token_strs": None}
    if values["return_token_strs"]:
        found["token_strs"] = list(map(tokenizer.backend.id_to_token, ids))
    return found


def detokenize(lm: LanguageModel, body: Any, ignore_unknown: bool = False) -> dict[str, Any]:
    """The text of token ids, with special tokens. Raises RequestError, which names the key."""
    values = read_keys(require_object(body), DETOKENIZE, ignore_unknown)
    ids = values["tokens"]
    if ids is None:
        raise RequestError("expected a list of token ids", "tokens")
    if wrong := [index for index in ids if not 0 <= index < lm.config.vocab_size]:
        raise RequestError(
            f"tokens has {wrong[0]}: expected ids from 0 to {lm.config.vocab_size - 1}", "tokens"
        )
    text = lm.require_tokenizer().decode(map(int, ids), skip_special=False)
    return {"prompt": text}
