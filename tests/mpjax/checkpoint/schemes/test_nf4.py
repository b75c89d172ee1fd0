"""bitsandbytes' four bits, for all codes, with plain and with nested scales."""

from __future__ import annotations

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpjax
from mpjax.checkpoint.schemes import registry
from mpjax.checkpoint.schemes.nf4 import NF4Scheme
from mpjax.errors import CheckpointError
from mpjax.kernels import pack
from mpjax.kernels.codes.table import normal_float
from tests.mpjax.checkpoint.write_checkpoint import (
    LLAMA,
    SQUARE,
    linear_shapes,
    random_tensors,
    write_checkpoint,
)

CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
STATE = "weight.quant_state.bitsandbytes__nf4"


def state(shape, **more) -> np.ndarray:
    values = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    return np.frombuffer(json.dumps(values | more).encode(), np.uint8)


def module(rng, shape=(16, 128), nested=False):
    """The tensors of a module, and its weight float32 [N, K]."""
    codes = rng.integers(0, 16, shape, np.uint8)
    flat, table = codes.reshape(-1), normal_float(4)
    blocks = flat.size // 64
    tensors = {
        "weight": (flat[::2] << 4 | flat[1::2])[:, None],
        "weight.quant_map": table,
        STATE: state(shape),
    }
    scales = rng.uniform(0.1, 1, blocks).astype(ml_dtypes.bfloat16).astype(np.float32)
    tensors["weight.absmax"] = scales
    if nested:
        inner = rng.integers(0, 256, blocks, np.uint8)
        values = np.linspace(-1, 1, 256, dtype=np.float32)
        outer = rng.uniform(0.1, 0.2, -(-blocks // 8)).astype(np.float32)
        scales = values[inner] * np.repeat(outer, 8)[:blocks] + np.float32(0.5)
        tensors |= {
            "weight.absmax": inner,
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": values,
            STATE: state(shape, nested_blocksize=8, nested_offset=0.5),
        }
    return tensors, table[codes] * np.repeat(scales, 64).reshape(shape)


@pytest.mark.parametrize("nested", [False, True])
def test_all_codes(nested, rng):
    tensors, expected = module(rng, nested=nested)
    scheme = registry.read(CONFIG)
    assert registry.of_module(tensors) is NF4Scheme
    plain = scheme.decode(tensors, "a", (128, 16))
    assert plain.format == scheme.format("a", 128)
    found = np.asarray(pack(plain).dequantize())
    if nested:  # whose scales are rounded to float16
        np.testing.assert_allclose(found, expected.T, rtol=2**-11)
    else:
        np.testing.assert_array_equal(found, expected.T)


def test_the_package_of_the_format_agrees(rng):
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("bitsandbytes").functional
    weight = torch.tensor(rng.standard_normal((16, 128)), dtype=torch.bfloat16)
    packed, quantized = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    tensors = {f"weight.{k}": v.numpy() for k, v in quantized.as_dict(packed=True).items()}
    plain = registry.read(CONFIG).decode(tensors | {"weight": packed.numpy()}, "a", (128, 16))
    expected = functional.dequantize_4bit(packed, quantized).float().numpy()
    found = plain.dequantize("bfloat16").astype(jnp.float32)
    np.testing.assert_array_equal(found, expected.T)


def test_a_whole_checkpoint(tmp_path, rng):
    hf = LLAMA | SQUARE | {"num_hidden_layers": 1, "torch_dtype": "float32"}
    tensors, plain = random_tensors(hf, rng), {}
    packed = dict(tensors)
    for name, (channels, outputs) in linear_shapes(hf).items():
        found, weight = module(rng, (outputs, channels))
        packed |= {f"{name}.{suffix}": array for suffix, array in found.items()}
        plain[f"{name}.weight"] = weight
    write_checkpoint(tmp_path / "a", hf | {"quantization_config": CONFIG}, packed)
    write_checkpoint(tmp_path / "b", hf, tensors | plain)
    tokens = jnp.asarray([[1, 2, 3]])
    lm = mpjax.load(tmp_path / "a")
    assert lm.precision == "WNF4A32KV16"
    expected = mpjax.load(tmp_path / "b").model(tokens)
    np.testing.assert_allclose(lm.model(tokens), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({STATE: np.frombuffer(b"{", np.uint8)}, "the quant_state of a is not valid JSON"),
        ({STATE: state((16, 64))}, "a has a state for 64 input and 16 output channels: the model"),
        ({STATE: state((16, 128), blocksize=128)}, "blocksize is 128: expected 64"),
        ({STATE: state((16, "x"))}, r'shape is \[16, "x"\]: expected two numbers'),
        ({"weight.absmax": np.zeros(3, np.float32)}, r"weight.absmax is float32 \[3\]: expected"),
        ({"weight.absmax": np.full(32, np.nan, np.float32)}, "32 of the 32 scales are NaN"),
    ],
)
def test_modules_that_are_refused(change, said, rng):
    tensors, _ = module(rng)
    with pytest.raises(CheckpointError, match=said):
        registry.read(CONFIG).decode(tensors | change, "a", (128, 16))


def test_nesting_that_is_refused(rng):
    tensors, _ = module(rng, nested=True)
    wrong = state((16, 128), nested_blocksize=0)
    with pytest.raises(CheckpointError, match=r"nested_blocksize is 0 and nested_offset 0\.0"):
        registry.read(CONFIG).decode(tensors | {STATE: wrong}, "a", (128, 16))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"load_in_8bit": True}, "load_in_8bit is true, which is not read: load the 16-bit"),
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type is 'int4': expected 'nf4' or"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "quant_storage is 'bfloat16': expected 'uint8'"),
    ],
)
def test_configurations_that_are_refused(change, said):
    with pytest.raises(CheckpointError, match=said):
        registry.read(CONFIG | change)
