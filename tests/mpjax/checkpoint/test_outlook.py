from __future__ import annotations

import numpy as np

import mpjax
from mpjax.checkpoint.huggingface import open_headers
from mpjax.checkpoint.outlook import look
from tests.mpjax.checkpoint import saved_models
from tests.mpjax.checkpoint.gguf.write_gguf import write_llama
from tests.mpjax.checkpoint.write_checkpoint import (
    CACHE,
    CONFIGS,
    compressed_fp8,
    linear_shapes,
    pack_module_fp8,
    random_tensors,
    write_checkpoint,
)


def require_true(folder, others):
    """Each precision is accepted, and has so many bytes."""
    for precision, nbytes in others.items():
        assert mpjax.load(folder, precision=precision).nbytes == nbytes


def test_plain_weights_can_be_rounded(tmp_path, rng):
    """In the largest usual groups that divide all input channels."""
    folder = saved_models.plain(tmp_path, rng)
    found = look(open_headers(folder))
    assert (found.contents, found.activations, found.rounded) == ("numbers in bfloat16", None, None)
    assert found.cache is None
    assert [*found.others] == ["W8g64A16KV8", "W4g64A16KV8"]
    require_true(folder, found.others)


def test_types_of_a_gguf_file(tmp_path, rng):
    kinds = {"attn_output": "Q4_1", "ffn_gate": "Q5_1", "ffn_up": "Q8_0", "token_embd": "Q8_0"}
    path = write_llama(tmp_path / "m.gguf", rng, kinds)
    found = look(open_headers(path))
    assert found.contents == (
        "GGUF, 2 maps in Q4_1, codes kept as WM4; 2 maps in Q5_1, codes kept as WM8; "
        "2 maps in Q8_0, codes kept as W8g32sym; tables in Q8_0, dequantised"
    )
    assert [*found.others] == ["W8g32A16KV8", "W4g32A16KV8"]
    require_true(path, dict([found.others.popitem()]))


def test_nothing_is_promised_of_a_checkpoint_that_lacks_a_tensor(tmp_path, rng):
    tensors = random_tensors(CONFIGS["llama"], rng)
    del tensors["model.norm.weight"]
    opened = open_headers(write_checkpoint(tmp_path, CONFIGS["llama"], tensors))
    assert look(opened).others == {}


def test_codes_that_must_stay(tmp_path, rng):
    found = look(open_headers(saved_models.mixed(tmp_path, rng)))
    assert (found.contents, found.others) == ("GPTQ, codes kept as W4g32", {})


def test_activations_that_can_be_chosen(tmp_path):
    rng, written = np.random.default_rng(0), compressed_fp8("channel", "token")
    written["kv_cache_scheme"] = CACHE | {"dynamic": True}
    hf = CONFIGS["llama"] | {"quantization_config": written}
    tensors = random_tensors(hf, rng)
    for module in linear_shapes(hf):
        pack_module_fp8(tensors, written, module)
    found = look(open_headers(write_checkpoint(tmp_path, hf, tensors)))
    assert found.contents == "FP8, codes kept as WFP8gK"
    assert found.cache == (
        "made for 8-bit float with dynamic scales: KV8 has integers with a scale for each token "
        "and head"
    )
    assert sorted(found.others) == ["WFP8AFP8KV16", "WFP8gKA16KV16"]
    assert len(set(found.others.values())) == 1


def test_float32_is_rounded_beside_bfloat16(tmp_path, rng):
    hf = dict(CONFIGS["llama"])
    hf.pop("torch_dtype", None)
    folder = write_checkpoint(tmp_path, hf, random_tensors(hf, rng, np.float32))
    found = look(open_headers(folder))
    assert found.contents == "numbers in float32"
    require_true(folder, dict([found.others.popitem()]))
