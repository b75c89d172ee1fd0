from __future__ import annotations

from pathlib import Path

import pytest

from mpjax.checkpoint import kv_scales
from mpjax.checkpoint.schemes import registry
from mpjax.kernels import KVFormat
from mpjax.models import Decoder
from tests.models.small import CONFIG, small_config
from tests.mpjax.checkpoint.write_checkpoint import CACHE, compressed_fp8

NAMES = kv_scales.names(Decoder, CONFIG)


def test_names_are_those_of_keys_and_values():
    assert kv_scales.names(Decoder, small_config((None,))) == [
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.v_scale",
    ]


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
