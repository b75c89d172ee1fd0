"""Engines over models on several devices, against batches on one: sharing, preemption, experts.

It needs a process of its own with eight devices:
`XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.mpjax.engine.on_devices`
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.kernels import KVFormat
from mpjax.models import Decoder
from mpjax.models.eagle import tokens_place
from tests.models import sharded_decoders
from tests.models.sharded_decoders import divide, quantize_all
from tests.models.sharded_families import build
from tests.models.small import mtp_model
from tests.mpjax.engine.conftest import make_engine, resize
from tests.mpjax.generation.speculation.test_mtp import agreeing, eagle

NEW = (8, 60, 60, 8)  # rows that grow take the pages of younger ones
DRAWN, GREEDY = {"temperature": 0.8, "top_p": 0.9, "stop_ids": ()}, {"stop_ids": ()}
MIXED = {"temperature": np.array([0.0, 0.8, 0.0, 0.8]), "top_p": 0.9, "stop_ids": ()}


def prompts() -> list[list[int]]:
    """Four, of which two begin alike for longer than a page."""
    rng = np.random.default_rng(0)
    common = rng.integers(3, 50, 40).tolist()
    beginnings = (common, common[:3], common[:3], common)
    return [begin + rng.integers(3, 50, 3 + i).tolist() for i, begin in enumerate(beginnings)]


def batch(model: Decoder, sampling: Any, **options: Any) -> list[list[int]]:
    """The tokens behind all prompts at once."""
    ids = prompts()
    tokens = np.zeros((len(ids), 48), np.int32)
    for row, prompt in zip(tokens, ids, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.asarray([len(prompt) for prompt in ids], jnp.int32)
    options |= {"max_new_tokens": max(NEW), "kv_format": "KV16", "sampling": sampling}
    found = mpjax.generate_tokens(model, jnp.asarray(tokens), lengths, **options)
    rows = np.asarray(found.tokens).tolist()
    return [row[:count] for row, count in zip(rows, NEW, strict=True)]


def served(model: Decoder, second: Any, **how: Any) -> list[list[int]]:
    """The tokens of requests that come one after another, for which pages don't suffice.

    second: how every second one is drawn. how: of the engine.
    """
    lm = mpjax.LanguageModel(model, None, KVFormat("16"), Path())
    with make_engine(lm, slots=3, chunk_tokens=32, **how) as engine:
        resize(engine, pages=6)
        handles = []
        for number, prompt in enumerate(prompts()):
            options = {"sampling": second if number % 2 else GREEDY, "seed": number}
            handles.append(engine.submit(prompt, max_new_tokens=NEW[number], **options))
            engine.step()
        found = [handle.result().tokens for handle in handles]
        counted = engine.statistics()
    assert how or counted["preemptions"] > 0, counted  # rows that speculate end sooner
    assert counted["shared_tokens"] >= 32, counted
    return found


if __name__ == "__main__":
    blocks = sharded_decoders.build(hidden_size=128, head_dim=64, intermediate_size=512)
    quantize_all(blocks, "int4:g128")  # W4Ax
    expected = batch(blocks, MIXED)
    assert len({token for row in expected for token in row}) > 8
    assert served(divide(blocks, 2), DRAWN) == expected
    mixture = build("MixtralForCausalLM")
    expected, whole = batch(mixture, GREEDY), divide(mixture, 2, "whole")
    assert served(divide(mixture, 4), GREEDY) == expected
    assert served(whole, GREEDY, speculate=mpjax.Ngram(k=3, n=1)) == expected
    assert batch(whole, GREEDY, speculate=mpjax.Ngram(k=3, n=1)) == expected
    headed = agreeing(mtp_model(), 0.3)
    expected = batch(headed, GREEDY)
    divided = divide(headed, 2)
    assert batch(divided, GREEDY, speculate="mtp") == expected
    drafting = eagle()
    halves, tokens = divide(drafting, 2), tokens_place(drafting.config)
    halves.put_array(tokens, tokens.read(drafting))
    assert batch(halves, GREEDY, speculate="eagle") == batch(drafting, GREEDY)
    divided.put_cache_scales(np.ones((3, 2, headed.config.num_kv_heads), np.float32))
    bare = divided.without_drafts()
    assert bare.whole().cache_scales.get_value().shape[0] == bare.config.num_layers == 2
    assert batch(bare, GREEDY) == expected
    print("served")
