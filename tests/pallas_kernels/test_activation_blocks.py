from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import ActivationBlocks, quantize_activations
from tests.pallas_kernels.oracles import random_array

quantized = jax.jit(quantize_activations)


def oracle(x: np.ndarray, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values [..., K] and scales [..., blocks], one token and block at a time, in float32."""
    values = np.empty(x.shape, np.int8)
    scales = np.empty((*x.shape[:-1], len(bits)), np.float32)
    for place in np.ndindex(scales.shape):
        channels = (*place[:-1], slice(place[-1] * 128, (place[-1] + 1) * 128))
        top = np.float32(2 ** (bits[place[-1]] - 1) - 1)
        peak = np.abs(x[channels]).max()
        peak = peak if peak > 1e-30 else top
        values[channels] = np.rint(x[channels] * (top / peak))
        scales[place] = peak * (np.float32(1) / top)
    return values, scales


@pytest.mark.parametrize("bits", [(4, 4, 4), (8, 4, 4), (4, 8, 4), (8, 8, 8)])
@pytest.mark.parametrize("channels", [384, 300])
def test_equals_the_oracle(channels, bits, rng):
    x = random_array(rng, (2, 3, channels), "bfloat16").at[1, 1].set(0)
    order = rng.permutation(channels).astype(np.int32)
    blocks = ActivationBlocks(jnp.asarray(bits, jnp.uint8), jnp.asarray(order))
    found = quantized(x, blocks)
    values, scales = oracle(np.asarray(x).astype(np.float32)[..., order], np.array(bits))
    np.testing.assert_array_equal(found.values, values)
    np.testing.assert_allclose(found.scales, scales, rtol=2e-7)
    assert found.is_permuted
    assert (found.dtype, found.values.dtype) == ("bfloat16", jnp.int8)


def test_without_widths_all_blocks_have_eight_bits(rng):
    x = random_array(rng, (3, 300), "float32")
    found = quantized(x, ActivationBlocks())
    same = quantized(x, ActivationBlocks(jnp.full(3, 8, jnp.uint8)))
    np.testing.assert_array_equal(found.values, same.values)
    np.testing.assert_allclose(found.scales, same.scales, rtol=2e-7)
    assert not found.is_permuted
    assert ActivationBlocks().largest_codes(300).tolist() == [127] * 3
    assert ActivationBlocks().format.groups(300) == 3


def test_the_largest_codes_of_widths():
    blocks = ActivationBlocks(jnp.array([4, 8], jnp.uint8))
    assert blocks.largest_codes(200).tolist() == [7, 127]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (ActivationBlocks([3, 8]), "bits of the blocks: there is 3: expected 4 or 8"),
        (ActivationBlocks([4.0, 8.0]), "the blocks have bits float32 of shape"),
        (ActivationBlocks([4, 8, 8]), r"expected integers of shape \(2,\)"),
        (ActivationBlocks(None, [200, *range(199)]), "permutation of the blocks must be from 0 to"),
    ],
)
def test_blocks_that_fit_no_row_of_200_channels(blocks, message):
    with pytest.raises(ValueError, match=message):
        blocks.checked("quantize_rows", 200)
