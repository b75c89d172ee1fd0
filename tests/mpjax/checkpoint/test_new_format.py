"""A checkpoint format that is defined here alone: a reader, and one entry in the registry."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.checkpoint import SCHEMES, CheckpointError, Reader, Scheme
from mpjax.checkpoint.schemes import checks
from mpjax.kernels import PlainCodes, WeightFormat
from tests.models.small import dequantize_kernels
from tests.mpjax.checkpoint.write_checkpoint import (
    LLAMA,
    linear_shapes,
    random_tensors,
    replace_module,
    write_checkpoint,
)


@dataclasses.dataclass(frozen=True)
class BytesReader(Reader):
    """One byte [N, K] for each weight, (byte − 128) · step, with a float32 step for each group."""

    suffixes: ClassVar[tuple[str, ...]] = ("bytes", "steps")

    group: int

    @classmethod
    def holds(cls, specs):
        return "bytes" in specs

    @property
    def weights(self):
        return WeightFormat("uint8", self.group)

    def check(self, specs, name, shape=None):
        outputs, channels = specs["bytes"].shape
        checks.check_weight_shape(name, (channels, outputs), shape, self.group)
        steps = ((outputs, channels // self.group), ("float32",))
        checks.check_tensors(name, specs, {"steps": steps})
        return channels, outputs

    def decode(self, tensors, name, shape=None):
        self.check(tensors, name, shape)
        steps = jnp.asarray(tensors["steps"]).T
        zeros = jnp.full(steps.shape, 128, jnp.uint16)
        return PlainCodes(self.weights, jnp.asarray(tensors["bytes"]).T, steps, zeros)


def read(config):
    return BytesReader(checks.parse_integer(config, ("group",), "quantization_config of bytes"))


SCHEME = Scheme("bytes", methods=("bytes",), reader=BytesReader, read=read, ignored=(".note",))
GROUP = 32
HF = LLAMA | {"quantization_config": {"quant_method": "bytes", "group": GROUP}}
TOKENS = np.random.default_rng(1).integers(0, LLAMA["vocab_size"], (2, 7)).astype(np.int32)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr("mpjax.checkpoint.schemes.registry.SCHEMES", [*SCHEMES, SCHEME])


@pytest.fixture
def stored(rng):
    """The tensors of a checkpoint, and of the 16-bit one with the weights that it stands for."""
    plain = random_tensors(HF, rng)
    quantized = dict(plain)
    for name, (channels, outputs) in linear_shapes(HF).items():
        codes = rng.integers(0, 256, (outputs, channels), np.uint8)
        steps = (rng.integers(1, 16, (outputs, channels // GROUP)) / 2**14).astype(np.float32)
        replace_module(quantized, name, {"bytes": codes, "steps": steps})
        quantized[f"{name}.note"] = np.zeros(1, np.float32)
        wide = (codes.astype(np.float32) - 128) * np.repeat(steps, GROUP, axis=1)
        plain[f"{name}.weight"] = wide.astype(np.float32)
    return quantized, plain


def test_its_logits_are_those_of_the_dequantised_model(stored, tmp_path):
    quantized, plain = stored
    found = mpjax.load(write_checkpoint(tmp_path / "bytes", HF, quantized), dtype="float32")
    expected = mpjax.load(write_checkpoint(tmp_path / "plain", LLAMA, plain), dtype="float32")
    assert found.precision == "W8g32symA32KV16"  # seen, and steps fit in float16
    np.testing.assert_allclose(found.model(TOKENS), expected.model(TOKENS), atol=1e-3)
    weights = [
        place.kernels(expected.model) for place in expected.model.linear_places(found.config)
    ]
    dequantize_kernels(found.model)
    again = [place.kernels(found.model) for place in found.model.linear_places(found.config)]
    for one, other in zip(weights, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_precision_must_agree(stored, tmp_path):
    folder = write_checkpoint(tmp_path, HF, stored[0])
    assert mpjax.load(folder, precision="W8g32A16KV8").precision == "W8g32symA16KV8"
    with pytest.raises(ValueError, match=r"is a bytes checkpoint of W8g32 that .*: ask for"):
        mpjax.load(folder, precision="W4A16KV8")


def test_what_is_wrong_is_one_sentence(stored, tmp_path):
    quantized = {name: array for name, array in stored[0].items() if not name.endswith("note")}
    name = "model.layers.1.mlp.down_proj"
    cases = [
        (HF, {f"{name}.steps": np.zeros((64, 3), np.float32)}, rf"{name}\.steps is float32 \[64,"),
        (
            HF,
            {f"{name}.steps": quantized[f"{name}.steps"] * np.nan},
            f"{name}: 256 of the 256 scal",
        ),
        (LLAMA, {}, "is a bytes module .* no quantization_config with quant_method 'bytes'"),
        (HF | {"quantization_config": {"quant_method": "bytes"}}, {}, "json: .* has no group"),
    ]
    for hf, changes, message in cases:
        folder = write_checkpoint(tmp_path, hf, quantized | changes)
        with pytest.raises(CheckpointError, match=message):
            mpjax.load(folder)
