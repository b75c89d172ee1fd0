from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpjax.checkpoint import CheckpointError, kv_scales
from mpjax.checkpoint.safetensors import Checkpoint
from mpjax.checkpoint.schemes import registry
from mpjax.kernels import KVFormat
from mpjax.models import Decoder
from tests.models.small import CONFIG, small_config
from tests.mpjax.checkpoint.write_checkpoint import CACHE, compressed_fp8, write_checkpoint

NAMES = kv_scales.names(Decoder, CONFIG)


def checkpoint(folder, value) -> Checkpoint:
    tensors = dict.fromkeys(NAMES, value)
    return Checkpoint.open(write_checkpoint(folder, {}, tensors))


def test_names_are_those_of_keys_and_values():
    assert kv_scales.names(Decoder, small_config((None,))) == [
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.v_scale",
    ]


def test_one_number_is_for_all_heads(tmp_path):
    found = checkpoint(tmp_path, np.full(1, 0.25, np.float32))
    infos = kv_scales.check(found.tensors, NAMES, 2)
    scales = kv_scales.read(infos, 2, lambda info: found.read(info.name))
    assert scales.dtype == np.float32
    np.testing.assert_array_equal(scales, np.full((2, 2, 2), 0.25))


def test_each_layer_has_scales_of_keys_and_of_values(tmp_path):
    tensors = {name: np.full(1, 1 + i, np.float32) for i, name in enumerate(NAMES)}
    found = Checkpoint.open(write_checkpoint(tmp_path, {}, tensors))
    scales = kv_scales.read(
        kv_scales.check(found.tensors, NAMES, 2), 2, lambda info: found.read(info.name)
    )
    np.testing.assert_array_equal(scales, [[[1, 1], [2, 2]], [[3, 3], [4, 4]]])


@pytest.mark.parametrize("value", [np.ones(3, np.float32), np.ones(1, np.int32)])
def test_other_shapes_and_dtypes_are_refused(value, tmp_path):
    found = checkpoint(tmp_path, value)
    with pytest.raises(CheckpointError, match=r"0\.self_attn\.k_scale is .* one number or one for"):
        kv_scales.check(found.tensors, NAMES, 2)


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_a_scale_is_positive(value, tmp_path):
    found = checkpoint(tmp_path, np.full(1, value, np.float32))
    infos = kv_scales.check(found.tensors, NAMES, 2)
    with pytest.raises(CheckpointError, match=r"k_scale is .*: expected positive, finite scales"):
        kv_scales.read(infos, 2, lambda info: found.read(info.name))


def test_scales_that_are_not_read_are_said():
    names = ["model.layers.0.self_attn.k_proj.k_scale", "model.norm.weight"]
    with pytest.warns(UserWarning, match=r"m has scales for an FP8 cache, such as .*k_proj\.k_s"):
        kv_scales.warn_of_dropped(Path("m"), names, KVFormat("fp8"))
    kv_scales.warn_of_dropped(Path("m"), names, KVFormat(8))
    kv_scales.warn_of_dropped(Path("m"), names[1:], KVFormat("fp8"))


def test_the_tensors_decide_between_names():
    """ModelOpt's lie beside the maps, and may be missing."""
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    scheme, without = (registry.read(modelopt | {"kv_cache_quant_algo": x}) for x in ("FP8", None))
    beside = [f"{name[:-7]}{name[-7]}_proj.{name[-7:]}" for name in NAMES]
    assert beside[0] == "model.layers.0.self_attn.k_proj.k_scale"
    for given in (NAMES, beside):
        found = kv_scales.of(dict.fromkeys(given), Decoder, CONFIG, scheme)
        assert found == tuple(given)
        assert kv_scales.of(dict.fromkeys(given), Decoder, CONFIG, without) == ()
    assert kv_scales.of({}, Decoder, CONFIG, scheme) == ()
    assert kv_scales.of({beside[1]: None}, Decoder, CONFIG, scheme) == tuple(beside)
    demanding = registry.read(compressed_fp8("channel", "token") | {"kv_cache_scheme": CACHE})
    assert kv_scales.of({}, Decoder, CONFIG, demanding) == tuple(NAMES)
