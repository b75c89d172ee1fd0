"""Exports whose tensors are damaged, or whose config.json says something else: refused."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest

import mpjax
from mpjax.checkpoint import CheckpointError
from mpjax.checkpoint.safetensors import Checkpoint
from tests.mpjax.bad_files.ways import REMOVED, config, cut, steps, tensors
from tests.mpjax.checkpoint.saved_models import plain
from tests.mpjax.checkpoint.write_checkpoint import AWQ, FP8, GPTQ, compressed_fp8

Q = "model.layers.0.self_attn.q_proj"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """A folder of each layout that other tests don't spoil yet."""
    root = tmp_path_factory.mktemp("exports")
    source = plain(root / "source", np.random.default_rng(1))
    for layout, precision in [
        ("pack", "W4g32symA16KV8"),
        ("skewed", "W4g32A16KV8"),
        ("int", "W8A8KV8"),
    ]:
        names = {"pack": None, "skewed": "pack-quantized", "int": None}
        mpjax.export(mpjax.load(source, precision=precision), root / layout, format=names[layout])
    return root


def said(layout="pack-quantized", **changes):
    """config.json with other values of the weights of the only group."""

    def make(folder):
        written = json.loads((folder / "config.json").read_text())["quantization_config"]
        written = copy.deepcopy(written)
        written["config_groups"]["group_0"]["weights"] |= changes
        config(quantization_config=written)(folder)

    return make


def top(**changes):
    """config.json with other values of the quantization_config."""

    def make(folder):
        written = json.loads((folder / "config.json").read_text())["quantization_config"]
        config(quantization_config=written | changes)(folder)

    return make


def tensor(suffix, change):
    """One tensor of a module after a change, or without it."""

    def edit(found):
        changed = change(found.pop(f"{Q}.{suffix}"))
        if changed is not None:
            found[f"{Q}.{suffix}"] = changed

    return tensors(edit)


def gone(array):
    return None


# Found before a tensor is read.
REFUSED = [
    (
        "pack",
        said(num_bits=8),
        rf"{Q} holds a weight of 32 input and 64 output channels, by num_bi",
    ),
    (
        "pack",
        said(group_size=64),
        rf"{Q}.weight_scale is \w+ \[64, 2\]: .* \[64, 1\], by num_b",
    ),
    ("pack", said(strategy="channel"), rf"{Q}.weight_scale is .*: .* \[64, 1\], by num_bits 4 and"),
    ("pack", said(group_size=48), "has 64 input channels: expected a multiple of .* 48"),
    (
        "pack",
        said(symmetric=False),
        rf"{Q} has no tensor weight_zero_point: expected int32 \[8, 2\]",
    ),
    ("pack", said(actorder="group"), rf"{Q} has no tensor weight_g_idx: expected int32 \[64\]"),
    (
        "pack",
        top(ignore=["re:.*q_proj"]),
        rf"{Q} has packed tensors, but by `ignore` in config.json",
    ),
    ("pack", top(format="int-quantized"), "group_0', weights: num_bits is 4: expected 8"),
    ("pack", top(format="float-quantized"), "type is 'int': expected 'float'"),
    ("pack", top(format="dense"), "format is 'dense': expected 'pack-quantized' or"),
    (
        "pack",
        config(quantization_config=REMOVED),
        "is a pack-quantized module .* config.json has no",
    ),
    ("pack", config(quantization_config=AWQ), "config.json has no .* 'compressed-tensors'"),
    ("pack", config(quantization_config=GPTQ), "config.json has no .* 'compressed-tensors'"),
    ("pack", config(quantization_config=FP8), "config.json has no .* 'compressed-tensors'"),
    (
        "pack",
        config(quantization_config=compressed_fp8("channel", "token")),
        "is a pack-quantized module .* says quant_method 'compressed-tensors' with another format",
    ),
    ("pack", tensor("weight_packed", gone), rf"{Q} has no tensor weight_packed that is a"),
    ("pack", tensor("weight_scale", gone), rf"{Q} has no tensor weight_scale: expected"),
    ("pack", tensor("weight_shape", gone), rf"{Q} has no tensor weight_shape: expected"),
    ("pack", tensor("weight_packed", lambda a: a[:-1]), "holds a weight of 64 input and 63 output"),
    ("pack", tensor("weight_packed", lambda a: a.astype(np.int64)), "weight_packed is int64"),
    ("skewed", said(symmetric=True), rf"{Q} has a tensor weight_zero_point, which by symmetric in"),
    (
        "skewed",
        tensor("weight_zero_point", gone),
        "has no tensor weight_zero_point: expected int32",
    ),
    ("skewed", tensor("weight_zero_point", lambda a: a.T), r"weight_zero_point is int32 \[2, 8\]"),
    ("int", said(strategy="tensor"), rf"{Q}.weight_scale is float32 \[64, 1\]: expected .* \[1\]"),
    ("int", said(type="float"), "weights: type is 'float': expected 'int'"),
    (
        "int",
        top(format="pack-quantized"),
        "made for activations in 8-bit int with dynamic scales",
    ),
    ("int", tensor("weight_scale", gone), rf"{Q}.weight is int8 \[64, 64\]: expected bfloat16"),
    (
        "int",
        tensor("weight", lambda a: a.astype(np.uint8)),
        "q_proj is an FP8 module .* with another",
    ),
    ("int", cut(WEIGHTS, 1), "is truncated: expected"),
]
# Found when its values are looked at.
WRONG = [
    (
        "pack",
        tensor("weight_shape", lambda a: a[::-1].copy() - 1),
        r"weight_shape is \[63, 63\]: exp",
    ),
    ("pack", tensor("weight_scale", lambda a: a * np.float32("nan")), "scales are NaN or infinite"),
    ("int", tensor("weight_scale", lambda a: a * np.float32("inf")), "scales are NaN or infinite"),
]


@pytest.mark.parametrize(
    ("layout", "way", "message"),
    [*REFUSED, *WRONG],
    ids=lambda value: value[:40] if isinstance(value, str) else "way",
)
def test_refused(layout, way, message, exports, tmp_path, monkeypatch):
    folder = tmp_path / "export"
    shutil.copytree(exports / layout, folder)
    steps(way)(folder)
    if (layout, way, message) in REFUSED:
        monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("read a tensor"))
    with pytest.raises(CheckpointError, match=message) as caught:
        mpjax.load(folder)
    assert "\n" not in str(caught.value)
