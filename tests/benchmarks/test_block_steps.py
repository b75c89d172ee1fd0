from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import block_steps, blocks
from benchmarks.block_steps import Steps
from mpjax.kernels import ActivationBlocks, quantize_activations
from mpjax.models import llama_layers

pytestmark = pytest.mark.any_version

BLOCKS = ActivationBlocks(jnp.asarray([8, 4, 4], jnp.uint8), jnp.arange(300)[::-1])


@pytest.mark.parametrize("scales", ["token", "width"])
def test_steps_are_multiples_of_a_scale(scales, rng):
    x = jnp.asarray(rng.normal(size=(5, 300)), jnp.float32).at[:, 290].mul(20)
    found = Steps(scales)(x, BLOCKS)
    steps = np.asarray(found.scales)
    # Of a token, the step of blocks in 8 bits; of widths, the largest narrow block has 18 times 7.
    scale = steps[:, :1] if scales == "token" else steps[:, 1:].max(-1, keepdims=True) / 18
    multiples = steps / scale
    np.testing.assert_allclose(multiples, np.round(multiples), rtol=1e-5)
    assert multiples.max() > 1
    assert np.abs(np.asarray(found.values, np.int32))[:, 128:].max() == 7
    assert multiples[:, 1:].max() < 18.5  # so that codes of 4 bits times multiples are int8
    lost = np.abs(np.asarray(found.dequantize() - x[:, ::-1])).reshape(5, 300)
    assert (lost <= 0.51 * np.repeat(steps, 128, 1)[:, :300]).all()


def test_other_roundings_are_as_they_were(rng):
    x = jnp.asarray(rng.normal(size=(2, 300)), jnp.float32)
    for steps, format in ((Steps("block"), BLOCKS), (Steps("token"), "int8")):
        found, expected = steps(x, format), quantize_activations(x, format)
        np.testing.assert_array_equal(found.values, expected.values)
        np.testing.assert_array_equal(found.scales, expected.scales)


def test_a_row_for_each_share_and_scale(tmp_path, monkeypatch, capsys):
    small = dataclasses.replace(
        blocks.PLANTED,
        vocab_size=64,
        hidden_size=256,
        num_heads=4,
        num_kv_heads=2,
        layers=llama_layers((None,), 256),
    )
    monkeypatch.setattr(blocks, "PLANTED", small)
    monkeypatch.setattr(blocks, "METHOD", "rtn")
    monkeypatch.setattr(blocks, "RESULTS", tmp_path)
    monkeypatch.setattr(block_steps, "SHARES", (2,))
    block_steps.main(["planted"])
    rows = json.loads((tmp_path / "block-steps-planted.json").read_text())["results"]
    assert [row["scales"] for row in rows] == ["block", "token", "width"]
    assert {row["wide"] for row in rows} == {0.5}
    assert len({row["perplexity"] for row in rows}) == 3
    first, second, _ = block_steps.cells(rows)
    assert first == ["50%", "of a block", f"{rows[0]['perplexity']:.3f}", "+0.00%"]
    assert second[3] == f"{rows[1]['perplexity'] / rows[0]['perplexity'] - 1:+.2%}"
    assert "block-steps-planted.json" in capsys.readouterr().out
