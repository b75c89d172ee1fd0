"""The arguments of `generate`, and when it stops asking the device for more tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import mpjax
from mpjax import Sampling
from mpjax import batch as module
from mpjax.memory import DeviceMemoryError

pytestmark = pytest.mark.usefixtures("exact_products")

HOT = Sampling(temperature=1.2)
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "sampling": HOT}


class Seen(Exception):
    """Ends a call where a test has seen enough."""


def test_decoding_ends_soon_after_all_rows_have(tiny, monkeypatch):
    """With stop strings one chunk later, with stop tokens in the only call, or before it."""
    [tokens], called = mpjax.generate(tiny, "import", **OPTIONS).tokens, []
    whole = module.decode_program

    def watched(*arguments):
        run = whole(*arguments)

        def decode(model, state, *rest):
            called.append(int(rest[-1]))
            return run(model, state, *rest)

        return decode

    monkeypatch.setattr(module, "decode_program", watched)
    mpjax.generate(tiny, "import", stop=tiny.tokenizer.decode(tokens[2:4])[1:], **OPTIONS)
    assert called == [1 + module.CHUNK]
    called.clear()
    mpjax.generate(tiny, "import", **OPTIONS)
    assert called == [16]
    called.clear()
    monkeypatch.setattr(tiny.tokenizer, "stop_ids", (tokens[0],))
    mpjax.generate(tiny, "import", **OPTIONS)
    list(mpjax.stream(tiny, "import", **OPTIONS))
    assert called == []


def test_stop_tokens_are_those_given_or_the_tokenizers_or_else_the_configs(tiny, monkeypatch):
    def see(batch, stop_ids, *rest):
        raise Seen(stop_ids)

    monkeypatch.setattr(module.Limits, "of", see)
    assert tiny.config.stop_ids == (0,)
    for of_tokenizer, expected in (((5, 7), (5, 7)), ((), (0,))):
        monkeypatch.setattr(tiny.tokenizer, "stop_ids", of_tokenizer)
        for sampling, ids in ((None, expected), ({"stop_ids": [3, 9]}, (3, 9))):
            with pytest.raises(Seen) as seen:
                mpjax.generate(tiny, "x", sampling=sampling)
            assert seen.value.args == (ids,)


def test_pages_have_the_models_size(tiny, monkeypatch):
    def see(model, tokens, lengths, cache, *rest, **options):
        raise Seen(cache.page_size)

    monkeypatch.setattr(module, "jit_prefill", see)
    for calls in (mpjax.generate, lambda *given, **more: list(mpjax.stream(*given, **more))):
        with pytest.raises(Seen) as seen:
            calls(dataclasses.replace(tiny, page_size=32), "x")
        assert seen.value.args == (32,)


def test_seeds_are_row_numbers_unless_they_are_given(tiny):
    alike = ["import"] * 3
    found = mpjax.generate(tiny, alike, **OPTIONS).tokens
    assert found == mpjax.generate(tiny, alike, seeds=[0, 1, 2], **OPTIONS).tokens
    assert len(set(map(tuple, found))) == 3


def test_a_prompt_may_fill_all_positions_that_new_tokens_leave(tiny):
    positions = tiny.config.max_position_embeddings
    module._check_lengths(tiny, [[1] * 6], positions - 5)
    with pytest.raises(ValueError, match=f"would pass the {positions} positions"):
        module._check_lengths(tiny, [[1] * 6], positions - 4)


def test_what_prefill_needs_must_be_free_too(tiny, monkeypatch):
    cache = tiny.model.create_cache(1, 16 + 16, tiny.kv_format)
    for free, is_enough in ((cache.nbytes, False), (10**9, True)):
        monkeypatch.setattr("mpjax.memory.free_bytes", lambda device, free=free: free)
        monkeypatch.setattr(module, "jit_prefill", lambda *given, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError if is_enough else DeviceMemoryError):
            mpjax.generate(tiny, "x", max_new_tokens=8)
