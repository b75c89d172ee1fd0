"""The bundled model in each precision: an engine's greedy tokens, and where they are ties.

Sums in another order may choose another of two tokens that are as likely but for rounding. Such a
difference has to be a tie: at the first token that differs, both tokens are the engine's two
likeliest, and their log-probabilities differ by less than TIE, or TIE_OF_ROUNDED where products
round their activations to 8 or 4 bits.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import mpjax
from mpjax.engine.engine import Engine
from tests.mpjax.engine.conftest import said_alone
from tests.sweeps import in_sweep

NEW = 12
GREEDY: dict[str, Any] = {"sampling": {"stop_ids": ()}}
# Rounding to 16 bits moves differences of the bundled model's log-probabilities by up to 0.04.
TIE = 0.05
TIE_OF_ROUNDED = 0.1  # an activation near the middle of two codes moves by a whole step
WEIGHTS = (
    *("W16A16", "W8A16", "WFP8A16", "WFP8AFP8", "W8A8", "W4A8", "W4Ax1"),
    *("WM8A16", "WM4A16", "WNF4A16", "WNF3A16", "WNF2A16", "WMXFP4A16"),
)
# Behind a prompt that is rounded or not, 4-bit activations differ by whole steps.
READ_FROM_CACHE = (
    "W4A4KV8",
    *(f"W4A16{cache}" for cache in ("KV8s", "KVfp8", "KV4", "KV4t", "K8V4", "K4cV2")),
    *(f"W4A16{cache}" for cache in ("KV4c", "KV4cg32", "K8V4c", "KV2", "KV2g32", "KV2t")),
)


def load(precision: str, text: str) -> mpjax.LanguageModel:
    """The bundled model, whose cache has scales of this text if the precision needs any."""
    format = mpjax.Precision.parse(precision).kv
    page_size = max(32, format.group or 0)
    options: dict[str, Any] = {"progress": False, "page_size": page_size}
    lm = mpjax.load(mpjax.bundled_model(), precision=precision, **options)
    return mpjax.calibrate_cache(lm, [text]) if format.scaling else lm


def prompts_for(lm: mpjax.LanguageModel, text: str) -> list[list[int]]:
    """A long prompt, which fills a block of formats with blocks, and a short one."""
    assert lm.tokenizer is not None
    count = 24 + (lm.kv_format.block or 0)
    return [lm.tokenizer.encode(text)[:count], lm.tokenizer.encode("def f(x):\n    return")]


def said_by(lm: mpjax.LanguageModel, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """The greedy tokens of an engine."""
    sizes = {"slots": 2, "max_tokens": max(map(len, prompts)) + NEW, "chunk_tokens": 64, "steps": 4}
    with Engine(lm, **(sizes | options)) as engine:
        handles = [engine.submit(ids, max_new_tokens=NEW, **GREEDY) for ids in prompts]
        return [handle.result().tokens for handle in handles]


def require_ties(
    lm: mpjax.LanguageModel,
    prompts: list[list[int]],
    found: list[list[int]],
    expected: list[list[int]],
) -> None:
    """Raises unless tokens are equal up to the first that is a tie, if there is one."""
    rounds = any(format.operand for format in mpjax.Precision.parse(lm.precision).formats)
    for prompt, ours, others in zip(prompts, found, expected, strict=True):
        assert len(ours) == len(others) == NEW
        pairs = zip(ours, others, strict=True)
        at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if at is None:
            continue
        ids = prompt + ours[:at]
        with Engine(lm, slots=2, max_tokens=len(prompt) + NEW, chunk_tokens=64) as engine:
            handle = engine.submit(ids, max_new_tokens=1, logprobs=2, **GREEDY).result()
        [[(first, highest), (second, lower)]] = handle.top_logprobs
        assert {first, second} == {ours[at], others[at]}, f"token {at}"
        gate = TIE_OF_ROUNDED if rounds else TIE
        assert highest - lower < gate, f"token {at}: {first} or {second}"


@pytest.fixture(scope="module")
def text() -> str:
    """A Python source file, of which the model has not read any part."""
    with (mpjax.bundled_model() / "held_out.jsonl").open(encoding="utf-8") as lines:
        return str(json.loads(next(lines))["text"])


CASES = ["W4A16KV8", *(in_sweep(f"{weights}KV8") for weights in WEIGHTS)]
CASES += [in_sweep("W4A16KV16"), in_sweep("W4A4KV16")]


@pytest.mark.parametrize("precision", CASES)
def test_it_says_what_generate_tokens_says(precision, text):
    """With caches of 16 and 8 bits: `generate_tokens` reads prompts before they are rounded."""
    lm = load(precision, text)
    prompts = prompts_for(lm, text)
    lengths = [len(prompt) for prompt in prompts]
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    options = {"max_new_tokens": NEW, "kv_format": lm.kv_format, **GREEDY}
    expected = mpjax.generate_tokens(lm.model, tokens, lengths, **options).tokens
    require_ties(lm, prompts, said_by(lm, prompts), np.asarray(expected).tolist())


@pytest.mark.parametrize("precision", [*map(in_sweep, READ_FROM_CACHE)])
def test_it_says_what_is_said_behind_prompts_in_the_cache(precision, text):
    """Both read prompts as the cache stores them, in pieces of other lengths."""
    lm = load(precision, text)
    prompts = prompts_for(lm, text)
    expected = said_alone(lm, str(lm.kv_format), prompts, NEW).tolist()
    require_ties(lm, prompts, said_by(lm, prompts), expected)


@pytest.mark.parametrize(
    "options",
    [
        in_sweep({"chunk_tokens": 7, "max_gap": 1e-6}),
        in_sweep({"chunk_tokens": 33, "speculate": mpjax.Ngram(k=4, n=1)}),
    ],
    ids=["small pieces", "speculation"],
)
def test_sizes_of_programs_change_no_more_than_ties(options, text):
    """Of random tokens, behind which several are nearly as likely."""
    lm = load("W4A16KV2g32", text)
    drawn = np.random.default_rng(0).integers(1, 2048, 150).tolist()
    prompts = [drawn, drawn[:100] + [7] * 5, drawn[:130]]
    require_ties(lm, prompts, said_by(lm, prompts, **options), said_by(lm, prompts))
