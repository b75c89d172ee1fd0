"""A kind of codes that is defined here alone: a class, and one entry in the table of kinds.

It is that of docs/tutorials/add_a_weight_format.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.kernels import WeightFormat, matmul, pack, quantize, unpack
from mpjax.kernels import bits as bit_planes
from mpjax.kernels import codes as code_kinds
from mpjax.kernels.codes.base import CodeKind, Group, Parameters, Spelling
from mpjax.kernels.gemm import triton
from mpjax.kernels.gemm.plans.configuration import TritonConfig
from mpjax.kernels.target import current_target
from tests.mpjax.checkpoint.write_checkpoint import LLAMA, random_tensors, write_checkpoint


class Power(CodeKind):
    """W = ±2**(e − 7) · scale: a code is a sign and three bits of e, and nothing is 0."""

    bits = 4
    spellings = (Spelling("P4", "16", 32),)

    def fit(self, groups, format, table=None):
        scales = jnp.abs(groups).max(1)
        return Parameters(jnp.where(scales == 0, 1.0, scales).astype(jnp.bfloat16))

    def nearest(self, values, parameters):
        scaled = jnp.abs(values) / parameters.scales.astype(jnp.float32)
        exponent = jnp.clip(jnp.round(jnp.log2(jnp.maximum(scaled, 2.0**-9))) + 7, 0, 7)
        return exponent.astype(jnp.uint8) | jnp.where(values < 0, jnp.uint8(8), jnp.uint8(0))

    def decode(self, codes, parameters):
        values = jnp.asarray([sign * 2.0 ** (e - 7) for sign in (1, -1) for e in range(8)])
        return values[codes] * parameters.scales.astype(jnp.float32)

    def load(self, parameters, scale_dtype, operand, width):
        scale, _ = bit_planes.widen_pair(parameters, scale_dtype)
        return Group(current_target().column(scale, width))

    def decoder(self, columns, arguments, shared, operand):
        def decode(plane):
            code = (columns[0] >> jnp.uint16(4 * plane)).astype(jnp.uint32)
            exponent = ((code & jnp.uint32(7)) + jnp.uint32(120)) << jnp.uint32(23)
            bits = exponent | (code & jnp.uint32(8)) << jnp.uint32(28)
            return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(operand)

        return decode


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(code_kinds.KINDS, "power4", Power())


def test_quantise_and_multiply(rng):
    weight = rng.standard_normal((128, 64)).astype(np.float32)
    packed = quantize(weight, "power4:g64")
    assert str(packed.format) == "power4:g64"
    values = np.asarray(packed.dequantize())
    assert (np.sign(values) == np.sign(weight)).all()
    scales = np.repeat(np.asarray(unpack(packed).scales, np.float32), 64, axis=0)
    large = np.abs(weight) > scales * 2.0**-7  # to the nearest power of two
    assert (np.abs(np.log2(np.abs(values) / np.abs(weight)))[large] <= 0.51).all()
    again = pack(unpack(packed))
    np.testing.assert_array_equal(again.words, packed.words)
    x = jnp.asarray(rng.standard_normal((16, 128)), jnp.bfloat16)
    expected = np.asarray(x, np.float64) @ values
    config = TritonConfig(16, 16, 1, 4, 3, "accumulator")
    in_a_kernel = triton.matmul(x, packed, config, jnp.dtype(jnp.bfloat16), interpret=True)
    for found in (matmul(x, packed), in_a_kernel):
        error = np.abs(np.asarray(found, np.float64) - expected)
        assert error.mean() < 8e-3 * np.abs(expected).mean()


def test_a_precision_names_it_and_a_saved_model_has_it(tmp_path, rng):
    folder = write_checkpoint(tmp_path / "plain", LLAMA, random_tensors(LLAMA, rng))
    lm = mpjax.load(folder, precision="WP4A16KV8")
    assert lm.precision == "WP4A16KV8"
    assert mpjax.load(folder, precision="WP4g64A16KV8").precision == "WP4g64A16KV8"
    mpjax.save(lm, tmp_path / "saved")
    again = mpjax.load(tmp_path / "saved")
    tokens = np.arange(6, dtype=np.int32)[None]
    np.testing.assert_array_equal(again.model(tokens), lm.model(tokens))
    for place in again.model.linear_places(again.config):
        assert {kernel.format for kernel in place.kernels(again.model)} == {
            WeightFormat("power4", 32)
        }
    with pytest.raises(ValueError, match="which no format that others read can hold"):
        mpjax.export(lm, tmp_path / "exported")
    mpjax.export(lm, tmp_path / "exported", format="plain")


def test_its_name_is_among_others():
    with pytest.raises(ValueError, match=r"'powr4' \(did you mean 'power4'\?\): expected .*power4"):
        WeightFormat("powr4", 32)
    with pytest.raises(ValueError, match="power4 with group size 256: expected 32, 64 or 128"):
        WeightFormat("power4", 256)
