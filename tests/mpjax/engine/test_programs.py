from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from mpjax import Ngram
from mpjax.engine import filling, programs, speculating
from mpjax.engine.planner import Decode
from mpjax.engine.state import create_state
from mpjax.kernels import KVFormat
from mpjax.models import Decoder, layer
from tests.models.small import quantize_kernels, small_config
from tests.pallas_kernels.conftest import pretend_gpu
from tests.sweeps import in_sweep

__all__ = ["pretend_gpu"]


@pytest.mark.parametrize("text", ["KV16", "KV8", "KV4cg32", "KVfp8"])
def test_clearing_leaves_other_pages_and_given_scales(text, tiny):
    lm = dataclasses.replace(tiny, kv_format=KVFormat.parse(text), page_size=32)
    state = create_state(lm, slots=2, pages=(4,), max_tokens=64)
    ones = jax.tree.map(lambda x: x + np.ones((), x.dtype), state.cache.layers)
    state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=ones))
    before = jax.tree.map(np.asarray, ones)
    run = jax.jit(programs.clear)
    cleared = run(lm.model, state, (np.array([2, 0]),), np.int32(1)).cache.layers
    for pages, old in zip(cleared, before, strict=True):
        for name in ("keys", "values", "key_parameters", "value_parameters"):
            found, kept = getattr(pages, name), getattr(old, name)
            if found is None or kept.shape[0] != 4:
                jax.tree.map(np.testing.assert_array_equal, found, kept)
                continue
            np.testing.assert_array_equal(found[np.array([1, 3])], kept[np.array([1, 3])])
            assert not np.asarray(found)[[0, 2]].any()
        if pages.residual is not None:
            for name in ("keys", "values"):
                found, kept = getattr(pages.residual, name), getattr(old.residual, name)
                assert not found[1].any()
                np.testing.assert_array_equal(found[0], kept[0])


@pytest.mark.parametrize("text", ["KV2g64", in_sweep("KV8")])
def test_programs_lower_for_cuda(text, tiny, pretend_gpu, lower_for_cuda):
    """Also their residuals, which lie by slot."""
    config = small_config(
        windows=(None,), num_heads=4, head_dim=64, hidden_size=128, dtype="bfloat16"
    )
    model = nnx.eval_shape(lambda: quantize_kernels(Decoder(config, nnx.Rngs(0)), "uint4:g32"))
    lm = dataclasses.replace(tiny, model=model, kv_format=KVFormat.parse(text), page_size=64)
    sizes = {"slots": 4, "pages": (9,), "max_tokens": 128}
    state = jax.eval_shape(lambda: create_state(lm, **sizes, proposer=Ngram()))
    layout, sizes = filling.Layout(4), {"rows": 2, "entries": 2}
    reading = filling.reading([], layout, tokens=64, **sizes)
    stepping = filling.stepping(Decode([], 4, True, []), layout, **sizes)
    how = {"steps": 4, "greedy": True}
    layer.apply.clear_cache()  # type: ignore[attr-defined]
    graph, arrays = nnx.split(model)

    def extend(arrays, state, reading):
        return programs.extend(nnx.merge(graph, arrays), state, reading, greedy=True)

    def decode(arrays, state, stepping):
        return programs.decode(nnx.merge(graph, arrays), state, stepping, **how)

    waiting = "KV2" in text
    names = {f"attention_{text}".lower(), "rotate_and_append_kv16" if waiting else "rotate_and"}

    def speculate(arrays, state, stepping):
        how = {"steps": 4, "most": 20, "greedy": True}
        return speculating.speculate(nnx.merge(graph, arrays), Ngram(), state, stepping, **how)

    runs = (extend, reading), (decode, stepping), (speculate, stepping)
    for program, argument in runs:
        lowered = lower_for_cuda(program, arrays, state, argument)
        for name in names | ({f"flush_{text}".lower()} if waiting else set()):
            assert f'name = "{name}' in lowered, (program, name)
    layer.apply.clear_cache()  # type: ignore[attr-defined]
