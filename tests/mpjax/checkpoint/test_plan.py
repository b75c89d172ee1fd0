from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax.checkpoint import convert, plan
from mpjax.checkpoint.plan import make_plan
from mpjax.checkpoint.safetensors import Checkpoint, TensorInfo
from mpjax.checkpoint.schemes import awq, fp8, gptq, registry
from mpjax.checkpoint.schemes.reader import Reader
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat, pack
from mpjax.kernels.checks import are_finite
from mpjax.models import Llama, family
from mpjax.models.registry import read_config
from tests.models.sharded_families import keys
from tests.mpjax.checkpoint.write_checkpoint import (
    CONFIGS,
    GPTQ,
    LLAMA,
    linear_shapes,
    pack_random,
    random_tensors,
)

DOWN = "model.layers.0.mlp.down_proj"


def checkpoint(tensors):
    """A checkpoint with the tensors' names, shapes and dtypes, and no bytes at all."""
    file = Path("folder/model.safetensors")
    infos = {
        name: TensorInfo(name, np.asarray(a).dtype, a.shape, file, 0, a.nbytes)
        for name, a in tensors.items()
    }
    return Checkpoint(Path("folder"), infos)


def planned(tensors, hf=LLAMA, quantize=None):
    written = hf.get("quantization_config")
    scheme = None if written is None else registry.read(written)
    quantize = None if quantize is None else WeightFormat.parse(quantize)
    decoder = family(hf)
    return make_plan(checkpoint(tensors), decoder, decoder.config_from_hf(hf), scheme, quantize)


def packed_checkpoint(rng, written, names=None, hf=LLAMA):
    hf = hf | {"quantization_config": written}
    tensors = random_tensors(hf, rng)
    for name in names or linear_shapes(hf):
        pack_random(tensors, hf, name, rng)
    return tensors, hf


def test_a_group_of_all_channels_may_be_spelt_as_their_number(rng):
    hf = LLAMA | {"intermediate_size": 256}
    written = GPTQ | {"group_size": 256}
    tensors, hf = packed_checkpoint(rng, written, [DOWN], hf)
    formats = {s.name: s.format for _, sources in planned(tensors, hf).linears for s in sources}
    assert formats[DOWN] == WeightFormat("uint4", None)


def test_tensors_that_carry_no_information_are_left_out(rng):
    tensors = random_tensors(CONFIGS["llama-tied"], rng)
    bytes_ = planned(tensors, CONFIGS["llama-tied"]).file_bytes
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert planned(tensors, CONFIGS["llama-tied"]).file_bytes == bytes_


@pytest.mark.parametrize(
    ("architecture", "spare", "own"),
    [
        ("Ernie4_5_MoeForCausalLM", "model.mtp_block.0.mlp.up_proj.weight", "model.norm.weight"),
        ("Ernie4_5_MoeForCausalLM", "model.mtp_emb_norm.0.weight", "model.layers.1.mlp.x.weight"),
        ("NemotronHForCausalLM", "mtp.layers.0.mixer.q_proj.weight", "backbone.norm_f.weight"),
    ],
)
def test_maps_that_propose_a_second_token_are_left_out(architecture, spare, own):
    decoder, config = read_config(keys(architecture))
    assert plan.is_spare(spare, decoder, config)
    assert not plan.is_spare(own, decoder, config)


def test_device_bytes_count_permutations_and_scales_of_a_cache(rng):
    tensors, hf = packed_checkpoint(rng, GPTQ)
    found = planned(tensors, hf)
    ordered = {name: array for name, array in tensors.items() if not name.endswith("g_idx")}
    channels = sum(shape[0] for shape in linear_shapes(hf).values())
    assert found.device_bytes - planned(ordered, hf).device_bytes == 4 * channels
    [array, *_] = (info for _, info in found.arrays)
    scaled = dataclasses.replace(found, cache_scales=(array,) * 4)
    assert scaled.device_bytes - found.device_bytes == 4 * 4 * hf["num_key_value_heads"]
    assert scaled.file_bytes - found.file_bytes == 4 * array.nbytes


def test_maps_that_become_one_wait_for_each_other(rng):
    """When the second map is converted, the first one waits for it on the device."""
    hf = LLAMA | {"intermediate_size": 4096}
    one = 2 * hf["hidden_size"] * hf["intermediate_size"]  # bytes on the device
    tensors = random_tensors(hf, rng, np.float16)
    assert planned(tensors, hf).working_bytes == 3 * one
    assert planned(tensors, hf).undivided_bytes == 2 * one  # gate and up, before they are cut


def expect(message, tensors, hf=LLAMA, quantize=None):
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        planned(tensors, hf, quantize)
    assert "\n" not in str(caught.value)


def test_a_missing_bias_is_named(rng):
    tensors = random_tensors(CONFIGS["qwen2"], rng)
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    expect("lacks 1 tensor (model.layers.1.self_attn.k_proj.bias)", tensors, CONFIGS["qwen2"])


def test_of_many_missing_tensors_five_are_named(rng):
    tensors = random_tensors(LLAMA, rng)
    hf = LLAMA | {"num_hidden_layers": 3}
    first = ["input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
    names = [f"model.layers.2.{name}.weight" for name in (*first, "post_attention_layernorm")]
    expect(f"folder lacks 9 tensors ({', '.join(names)}, ...)", tensors, hf)


def test_unexpected_tensors_are_named(rng):
    tensors = random_tensors(LLAMA, rng)
    tensors["model.layers.0.mlp.experts.0.weight"] = np.ones(1, np.float32)
    tensors[f"{DOWN}.bias"] = np.ones(64, np.float32)
    names = f"{DOWN}.bias, model.layers.0.mlp.experts.0.weight"
    expect(f"holds 2 tensors ({names}) that the model has no place for", tensors)


def test_a_quantized_head_is_a_packed_table(rng):
    hf = LLAMA | {"quantization_config": GPTQ}
    tensors = random_tensors(hf, rng)
    for name in ("lm_head", *linear_shapes(hf)):
        pack_random(tensors, hf, name, rng)
    plan = planned(tensors, hf)
    assert plan.config.packed_tables == ("head",)
    [(place, [source])] = [pair for pair in plan.linears if pair[0].is_table]
    assert (place.path, place.shapes) == ("head", ((LLAMA["hidden_size"], LLAMA["vocab_size"]),))
    assert source.format == WeightFormat("uint4", 32)


def test_a_quantized_table_is_refused(rng):
    tensors, hf = packed_checkpoint(rng, GPTQ)
    head = tensors.pop("lm_head.weight")
    message = (
        ": of a checkpoint's tables only a head that is not tied to the embedding can be, so load "
        "one of the model with"
    )
    packed = {"lm_head.qweight": head, "lm_head.scales": head}
    quantized = f"lm_head is quantised (qweight, scales){message} lm_head in 16 bits"
    expect(quantized, tensors | packed, hf | {"tie_word_embeddings": True})
    expect("lm_head holds a weight of 768 input", tensors | packed, hf)
    tensors["lm_head.weight"] = head
    expect("lm_head is a", tensors | {"lm_head.weight_scale": head}, hf)
    codes = {"model.embed_tokens.weight": head.astype(ml_dtypes.float8_e4m3fn)}
    expect(f"model.embed_tokens is quantised (weight){message} model.emb", tensors | codes, hf)


def test_the_shape_of_a_bias_is_checked(rng):
    tensors = random_tensors(CONFIGS["qwen2"], rng)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(3, np.float32)
    expect("q_proj.bias is float32 [3]: expected", tensors, CONFIGS["qwen2"])


def test_group_sizes_without_kernels_are_refused(rng):
    tensors, hf = packed_checkpoint(rng, GPTQ | {"group_size": 16})
    expect(
        "q_proj has groups of 16 input channels: supported are groups of 32, 64, 128 and of all "
        "64 (group_size -1)",
        tensors,
        hf,
    )


def test_a_group_size_to_quantize_to_must_divide_the_channels(rng):
    hf = LLAMA | {"intermediate_size": 96}
    tensors = random_tensors(hf, rng)
    expect(
        f"{DOWN} has 96 input channels, which groups of 64 don't divide", tensors, hf, "uint4:g64"
    )
    for text in ("uint4:g32", "float8:g128"):  # the blocks of FP8 may be cut
        formats = {s.format for _, ss in planned(tensors, hf, text).linears for s in ss}
        assert formats == {WeightFormat.parse(text)}


def temporary_bytes(function, *arguments, **keywords):
    compiled = function.lower(*arguments, **keywords).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_converting_takes_no_more_than_planned():
    # As the compiler says, for a matrix large enough that nothing else counts.
    channels, outputs = shape = (1024, 512)
    for dtype in ("bfloat16", "float16", "float32"):
        weight = jax.ShapeDtypeStruct((outputs, channels), dtype)
        assert temporary_bytes(are_finite, weight) <= 0.01 * math.prod(shape)
    for dtype in ("bfloat16", "float32"):
        weight = jax.ShapeDtypeStruct((outputs, channels), dtype)
        assert temporary_bytes(convert._transpose, weight, "bfloat16") <= 0.01 * math.prod(shape)
        for text in ("uint4:g32", "uint8:gK"):
            used = temporary_bytes(convert._quantize, weight, WeightFormat.parse(text))
            assert used <= plan.QUANTIZING_BYTES * math.prod(shape)
    jitted_pack = jax.jit(pack)
    codes = jax.ShapeDtypeStruct(shape, jnp.uint8)
    groups = (channels // 32, outputs)
    scales, zeros = (jax.ShapeDtypeStruct(groups, dtype) for dtype in ("float16", "uint16"))
    used = temporary_bytes(jitted_pack, PlainCodes("uint4:g32", codes, scales, zeros))
    assert math.prod(shape) + used <= Reader.decoding_bytes * math.prod(shape)
    codes = jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn)
    assert temporary_bytes(fp8._any_nan, codes) <= Reader.decoding_bytes * math.prod(shape)
    for text in ("float8:g128", "float8:g128/float8"):
        scales = jax.ShapeDtypeStruct((channels // 128, outputs), jnp.float32)
        used = temporary_bytes(jitted_pack, PlainCodes(text, codes, scales))
        assert math.prod(shape) + used <= Reader.decoding_bytes * math.prod(shape)
    words = jax.ShapeDtypeStruct((channels, outputs // 8), jnp.int32)
    assert temporary_bytes(awq._unpack, words, words) <= math.prod(shape)
    words = jax.ShapeDtypeStruct((channels // 8, outputs), jnp.int32)
    zeros = jax.ShapeDtypeStruct((32, outputs // 8), jnp.int32)
    order = jax.ShapeDtypeStruct((channels,), jnp.int32)
    used = temporary_bytes(gptq._unpack, words, zeros, order, bits=4, minus_one=True)
    assert used <= math.prod(shape)


def test_more_layers_than_tensors_are_refused_before_any_is_looked_for(rng, monkeypatch):
    tensors = random_tensors(LLAMA, rng)
    monkeypatch.setattr(Llama, "array_places", None)
    names = ", ".join(list(tensors)[:5])
    message = (
        f"there are 22 layers, and folder holds 21 tensors ({names}, ...): they are not of one"
    )
    expect(message, tensors, LLAMA | {"num_hidden_layers": 22})


def test_names_that_are_no_single_line_are_quoted(rng):
    tensors = random_tensors(LLAMA, rng) | {"a\nb": np.ones(1, np.float32)}
    expect(r"holds 1 tensor ('a\nb') that the model has no place for", tensors)
