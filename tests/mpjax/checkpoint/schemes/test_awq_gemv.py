"""AWQ's layouts along the input channels, against packers written from AutoAWQ's description."""

from __future__ import annotations

import numpy as np
import pytest

import mpjax
from mpjax.checkpoint.schemes import registry
from mpjax.checkpoint.schemes.awq_gemv import AWQGemvScheme
from mpjax.errors import CheckpointError
from mpjax.kernels import pack
from tests.mpjax.checkpoint.write_checkpoint import (
    LLAMA,
    linear_shapes,
    random_tensors,
    replace_module,
    write_checkpoint,
)

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemv"}
NAME = "model.layers.0.mlp.down_proj"
# The channels of 32 in the order in which a `gemv_fast` file holds them.
ORDER = np.concatenate([[r + 2 * p + 8 * q for q in range(4) for r in (0, 1)] for p in range(4)])
ORDER = ORDER.reshape(4, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)


def words(nibbles, bits):
    """Nibbles [R, C] as words [R, C · 4 / bits], the first in the lowest bits."""
    split = nibbles.reshape(len(nibbles), -1, bits // 4).astype(np.uint64)
    joined = (split << np.arange(0, bits, 4, dtype=np.uint64)).sum(-1)
    return joined.astype(f"u{bits // 8}").view(f"i{bits // 8}")


def module(rng, layout="gemv", shape=(128, 16), group=32):
    """The tensors of a module, and its weight float64 [K, N]."""
    channels, outputs = shape
    codes = rng.integers(0, 16, shape[::-1])
    groups = channels // group
    zeros = rng.integers(0, 16, (outputs, groups))
    scales = rng.uniform(0.01, 0.1, (outputs, groups)).astype(np.float16)
    width = {32: 4, 64: 2}.get(group, 1)
    padding = (0, 0), (0, -(-groups // (8 * width)) * 8 * width - groups)
    stored = np.pad(scales, padding)
    if layout == "gemv":
        tensors = {"qweight": words(codes, 32), "qzeros": words(np.pad(zeros, padding), 32)}
        minima, tensors["scales"] = -zeros * scales.astype(np.float64), stored
    else:
        minima = (-scales * zeros.astype(np.float32)).astype(np.float16)
        ordered = codes.reshape(outputs, -1, 32)[..., ORDER].reshape(outputs // 4, 4, -1, 64)
        rows = ordered.transpose(0, 2, 1, 3).reshape(outputs // 4, -1)
        tensors = {"qweight": words(rows, 16), "scales": np.ascontiguousarray(stored.T)}
        tensors["scaled_zeros"] = np.ascontiguousarray(np.pad(minima, padding).T)
    steps, offsets = (np.repeat(x.astype(np.float64), group, 1) for x in (scales, minima))
    return tensors, (codes * steps + offsets).T


@pytest.mark.parametrize("layout", ["gemv", "gemv_fast"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_weight(layout, group, rng):
    tensors, expected = module(rng, layout, (384, 24), group)
    scheme = registry.read(CONFIG | {"version": layout.upper(), "group_size": group})
    assert registry.of_module(tensors) is type(scheme) is AWQGemvScheme
    assert scheme.check(tensors, NAME, (384, 24)) == (384, 24)
    plain = scheme.decode(tensors, NAME)
    assert plain.format == scheme.format(NAME, 384) == scheme.weights
    assert plain.format.codes == ("uint4" if layout == "gemv" else "affine4")
    np.testing.assert_allclose(pack(plain).dequantize(), expected, rtol=3e-7, atol=1e-7)


def test_one_group_of_all_channels(rng):
    tensors, expected = module(rng, "gemv", (256, 16), 256)
    scheme = registry.read(CONFIG | {"group_size": -1})
    assert str(scheme.format(NAME, 256)) == "uint4:gK"
    np.testing.assert_allclose(scheme.decode(tensors, NAME).dequantize(), expected, rtol=1e-6)
    fast = registry.read(CONFIG | {"group_size": -1, "version": "gemv_fast"})
    assert str(fast.format(NAME, 128)) == "affine4:g128"
    with pytest.raises(CheckpointError, match=r"has groups of 256 input .* load a 'gemm' check"):
        fast.format(NAME, 256)


@pytest.mark.parametrize("layout", ["gemv", "gemv_fast"])
def test_a_model_has_the_logits_of_its_weights(layout, rng, tmp_path):
    quantized = dict(plain := random_tensors(LLAMA, rng))
    for name, shape in linear_shapes(LLAMA).items():
        tensors, weight = module(rng, layout, shape)
        replace_module(quantized, name, tensors)
        plain[f"{name}.weight"] = weight.T.astype(np.float32)
    hf = LLAMA | {"quantization_config": CONFIG | {"version": layout}}
    found = mpjax.load(write_checkpoint(tmp_path / "q", hf, quantized), dtype="float32")
    expected = mpjax.load(write_checkpoint(tmp_path / "p", LLAMA, plain), dtype="float32")
    assert found.precision == ("W4g32A32KV16" if layout == "gemv" else "WM4A32KV16")
    tokens = np.arange(8, dtype=np.int32)[None]
    want = np.asarray(expected.model(tokens))
    np.testing.assert_allclose(found.model(tokens), want, atol=1e-4 * abs(want).max())


def test_what_is_refused(rng):
    tensors, _ = module(rng)
    scheme = registry.read(CONFIG)
    fast, _ = module(rng, "gemv_fast")
    fast_scheme = registry.read(CONFIG | {"version": "gemv_fast"})
    cases = [
        (scheme, {"scales": tensors["scales"][:, :8]}, r"scales is float16 \[16, 8\]: expected"),
        (scheme, {"qzeros": tensors["qzeros"][:, :1]}, r"qzeros is int32 \[16, 1\]: expected int"),
        (fast_scheme, fast | {"qweight": fast["qweight"][:, :96]}, "96 input .* multiple of 64"),
        (fast_scheme, fast | {"qweight": fast["qweight"][0]}, "qweight is int16"),
        (fast_scheme, fast | {"scales": fast["scales"].astype(np.float32)}, "scales is float32"),
        (scheme, {"qweight": None}, "no tensor qweight"),
    ]
    for one, changes, message in cases:
        given = {name: x for name, x in (tensors | changes).items() if x is not None}
        with pytest.raises(CheckpointError, match=message):
            one.check(given, NAME)
    with pytest.raises(CheckpointError, match="holds a weight of 128 input and 16 output"):
        scheme.check(tensors, NAME, (16, 128))
    with pytest.raises(CheckpointError, match=r'packed as AWQ gemv .*, with "version": "gemv"'):
        AWQGemvScheme.refuse(NAME, tensors, "awq")
    with pytest.raises(CheckpointError, match=r"is an AWQ gemv module .* with another format"):
        AWQGemvScheme.refuse(NAME, fast, "awq")
    with pytest.raises(CheckpointError, match=r"the layouts gemm, gemv .* differ: expected gemv"):
        registry.read(CONFIG | {"format": "gemm"})
    symmetric = registry.read(CONFIG | {"zero_point": False})
    with pytest.raises(CheckpointError, match="zero_point: false"):
        symmetric.decode(tensors, NAME)
