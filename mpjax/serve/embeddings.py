"""Answers OpenAI's /v1/embeddings, and vLLM's /v1/score and /v1/rerank.

Answers are computed beside the engine, without a KV cache.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np

from mpjax.embedding.api import embed, encoded, pooling_of, score
from mpjax.language_model import LanguageModel
from mpjax.serve.errors import NOT_OFFERED, RequestError
from mpjax.serve.keys import Table, accepted, anything, flag, ignored, read_keys, text, whole
from mpjax.serve.requests import require_object
from mpjax.serve.tables import PROMPT
from mpjax.text.prompts import is_single

MOST = 2048  # texts in a request: OpenAI's limit
ENCODINGS = ("float", "base64")
TEXTS = "a text, or a list of texts"


def _are_texts(value: object) -> bool:
    if isinstance(value, list):
        return 0 < len(value) <= MOST and all(isinstance(one, str) for one in value)
    return isinstance(value, str)


_COMMON: Table = {"model": text(), "user": ignored()}
EMBEDDING: Table = {
    **_COMMON,
    "input": anything(PROMPT),
    "encoding_format": accepted(" or ".join(ENCODINGS), lambda v: v in ENCODINGS).or_else("float"),
    "dimensions": whole(1),
    "prompt_name": text(),
    "normalize": accepted("true or false", lambda value: isinstance(value, bool)),
}
SCORE: Table = {
    **_COMMON,
    "text_1": accepted(TEXTS, _are_texts),
    "text_2": accepted(TEXTS, _are_texts),
}
RERANK: Table = {
    **_COMMON,
    "query": text(),
    "documents": accepted("a list of texts", lambda v: isinstance(v, list) and _are_texts(v)),
    "top_n": whole(1),
    "return_documents": flag().or_else(True),
}


def embeddings(lm: LanguageModel, body: Any, ignore_unknown: bool = False) -> dict[str, Any]:
    """The answer to /v1/embeddings. Raises RequestError, which names the key."""
    values = read_keys(require_object(body), EMBEDDING, ignore_unknown)
    given = values["input"]
    if given is None:
        raise RequestError(f"expected {PROMPT}", "input")
    many = [given] if _checked("input", is_single, given) else given
    if not isinstance(many, list) or len(many) > MOST:
        raise RequestError(f"input has another form: expected {PROMPT}, at most {MOST}", "input")
    before = _checked("prompt_name", pooling_of(lm).before, values["prompt_name"])
    ids = _checked("input", encoded, lm, many, before)
    options = {"dimensions": values["dimensions"], "normalize": values["normalize"]}
    found = _checked("input", embed, lm, ids, **options)
    is_float = values["encoding_format"] == "float"
    data = [
        {"object": "embedding", "index": index, "embedding": _written(vector, is_float)}
        for index, vector in enumerate(found)
    ]
    return {"object": "list", "data": data, **_facts(lm, values, ids)}


def scores(lm: LanguageModel, body: Any, ignore_unknown: bool = False) -> dict[str, Any]:
    """The answer to /v1/score. Raises RequestError, which names the key."""
    values = read_keys(require_object(body), SCORE, ignore_unknown)
    one, other = values["text_1"], values["text_2"]
    for name in ("text_1", "text_2"):
        if values[name] is None:
            raise RequestError(f"expected {TEXTS}", name)
    others = [other] if isinstance(other, str) else other
    firsts = [one] * len(others) if isinstance(one, str) else one
    if len(firsts) != len(others):
        message = f"text_1 has {len(firsts)} texts and text_2 {len(others)}: expected as many"
        raise RequestError(message, "text_2")
    found, ids = _compared(lm, firsts, others, "text_1")
    data = [
        {"object": "score", "index": index, "score": float(value)}
        for index, value in enumerate(found)
    ]
    return {"object": "list", "data": data, **_facts(lm, values, ids)}


def rerank(lm: LanguageModel, body: Any, ignore_unknown: bool = False) -> dict[str, Any]:
    """The answer to /v1/rerank: documents by descending relevance. Raises RequestError."""
    values = read_keys(require_object(body), RERANK, ignore_unknown)
    query, documents = values["query"], values["documents"]
    if query is None or documents is None:
        missing = "query" if query is None else "documents"
        raise RequestError(f"expected {RERANK[missing].expected}", missing)
    found, ids = _compared(lm, [query] * len(documents), documents, "documents")
    order = sorted(range(len(documents)), key=lambda index: -found[index])[: values["top_n"]]
    results = [
        {
            "index": index,
            "relevance_score": float(found[index]),
            **({"document": {"text": documents[index]}} if values["return_documents"] else {}),
        }
        for index in order
    ]
    return {"results": results, **_facts(lm, values, ids)}


EMBEDDINGS = {"/v1/embeddings": embeddings, "/v1/score": scores, "/v1/rerank": rerank}


def _compared(
    lm: LanguageModel, firsts: list[str], others: list[str], key: str
) -> tuple[np.ndarray, list[list[int]]]:
    """A score for each pair of texts, and the token ids of every model input.

    A score is the sigmoid of a classifier with one label, or the cosine of two embeddings.
    """
    labels = lm.config.labels
    if labels is None:
        texts = [*dict.fromkeys([*firsts, *others])]
        ids = _checked(key, encoded, lm, texts, pooling_of(lm).before(None))
        found = _checked(key, embed, lm, ids, normalize=True)
        vectors = dict(zip(texts, found, strict=True))
        cosines = [vectors[a] @ vectors[b] for a, b in zip(firsts, others, strict=True)]
        return np.asarray(cosines), ids
    if labels != 1:
        message = f"the model has {labels} labels: expected one, of which a score is the sigmoid"
        raise RequestError(message, code=NOT_OFFERED)
    found = _checked(key, score, lm, firsts, others)[:, 0]
    ids = [lm.require_tokenizer().encode(a, second=b) for a, b in zip(firsts, others, strict=True)]
    return 1 / (1 + np.exp(-found)), ids


def _checked(key: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls a function; turns its ValueError into a RequestError for a key."""
    try:
        return function(*arguments, **named)
    except ValueError as error:
        raise RequestError(str(error), key) from error


def _facts(lm: LanguageModel, values: dict[str, Any], ids: list[list[int]]) -> dict[str, Any]:
    """The keys `model` and `usage` of an answer."""
    tokens = sum(map(len, ids))
    name = values["model"] or lm.source.resolve().name
    return {"model": name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def _written(vector: np.ndarray, is_float: bool) -> Any:
    """A vector as a list of floats, or as base64 of its little-endian float32 bytes."""
    narrow = np.asarray(vector, "<f4")
    return narrow.tolist() if is_float else base64.b64encode(narrow.tobytes()).decode()
