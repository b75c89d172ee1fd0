"""Every scheme: what it decodes, writes and refuses, by the table of `modules.py`."""

from __future__ import annotations

import dataclasses
import zlib

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpjax
from mpjax.checkpoint.schemes import registry
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat, pack
from tests.mpjax.checkpoint.schemes.modules import FORMS, NAME
from tests.mpjax.checkpoint.schemes.plain import random_plain, writer_of
from tests.mpjax.checkpoint.write_checkpoint import (
    AWQ,
    CACHE,
    GPTQ,
    LLAMA,
    compressed_fp8,
    compressed_integers,
    linear_shapes,
    random_tensors,
    replace_module,
    write_checkpoint,
)

SHAPE = (512, 24)  # [K, N]


def stored(form, seed=0):
    rng = np.random.default_rng(zlib.crc32(form.encode()) + seed)
    tensors, weight = FORMS[form].module(rng, SHAPE)
    return registry.read(FORMS[form].config).reader(NAME), tensors, weight


def require_close(found, expected, error):
    if error:
        error = error * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=error)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_the_description(form):
    reader, tensors, weight = stored(form)
    stored_as = registry.of_module(tensors)
    assert stored_as is registry.read(FORMS[form].config).part(NAME).scheme
    assert sum(scheme.reader.holds(tensors) for scheme in registry.SCHEMES) == 1
    assert sum(scheme.is_of(FORMS[form].config) for scheme in registry.SCHEMES) <= 1
    read = {suffix: tensors[suffix] for suffix in reader.suffixes if suffix in tensors}
    assert reader.check(read, NAME, SHAPE) == SHAPE
    plain = reader.decode(read, NAME, SHAPE)
    assert str(plain.format) == FORMS[form].format
    assert plain.format == reader.format(NAME, SHAPE[0])
    require_close(plain.dequantize(), weight, FORMS[form].error)
    require_close(pack(plain).dequantize(), weight, FORMS[form].error)
    if form.startswith("nvfp4"):  # products with ModelOpt's power of two are exact
        exact = reader.dequantize(read, NAME)
        np.testing.assert_allclose(exact, weight, rtol=2e-7 if form == "nvfp4" else 0)
    static = read.get("input_scale")
    assert (plain.activation_scale is None) == (static is None)
    assert static is None or float(plain.activation_scale[0]) == static.reshape(())


@pytest.mark.parametrize("form", FORMS)
def test_decode_inside_jit(form):
    reader, tensors, _ = stored(form)
    tensors = {suffix: tensors[suffix] for suffix in reader.suffixes if suffix in tensors}
    host = {suffix: tensors.pop(suffix) for suffix in reader.on_host if suffix in tensors}
    decode = jax.jit(lambda arrays: reader.decode(arrays | host, NAME, SHAPE).codes)
    if form.startswith("nf4"):  # whose scales decide their dtype
        pytest.skip("the values of scales are needed")
    eager = reader.decode(tensors | host, NAME, SHAPE).codes
    np.testing.assert_array_equal(decode(tensors), eager)


@pytest.mark.parametrize("form", FORMS)
def test_tensors_that_contradict_are_refused(form):
    reader, tensors, _ = stored(form)
    tensors = {suffix: tensors[suffix] for suffix in reader.suffixes if suffix in tensors}
    with pytest.raises(CheckpointError, match=NAME):
        reader.decode(tensors, NAME, (SHAPE[0] * 2, SHAPE[1]))
    for suffix, tensor in tensors.items():
        if suffix.startswith("weight.quant_state") or suffix == "weight.nested_absmax":
            continue  # whose sizes, and whose presence, are the file's own
        for wrong in (tensor.astype(np.complex64), np.concatenate([np.atleast_1d(tensor)] * 3)):
            with pytest.raises(CheckpointError, match=NAME):
                reader.check(tensors | {suffix: wrong}, NAME, SHAPE)
        lacking = {other: array for other, array in tensors.items() if other != suffix}
        if suffix == "g_idx" and "order" not in form:  # which writers leave out without act-order
            reader.check(lacking, NAME, SHAPE)
            continue
        with pytest.raises(CheckpointError, match=rf"{NAME} (has no tensor|holds a weight of 0)"):
            reader.check(lacking, NAME, SHAPE)


WHOLE = [form for form in FORMS if form not in ("mxfp4", "gemv-128", "hqq-256", "nvfp4")]


@pytest.mark.parametrize("form", WHOLE)
def test_a_checkpoint_has_its_weights(form, tmp_path):
    """mxfp4's files join experts, and others' groups don't divide the channels of this model."""
    rng = np.random.default_rng(zlib.crc32(form.encode()))
    tensors, weights = random_tensors(LLAMA, rng), {}
    for name, shape in linear_shapes(LLAMA).items():
        found, weights[name] = FORMS[form].module(rng, shape)
        replace_module(tensors, name, found)
    hf = LLAMA | {"quantization_config": FORMS[form].config}
    lm = mpjax.load(write_checkpoint(tmp_path, hf, tensors), dtype="float32", precision="A16KV16")
    for place in lm.model.linear_places(lm.config):
        found = np.concatenate([kernel.dequantize() for kernel in place.kernels(lm.model)], 1)
        expected = np.concatenate([weights[name] for name in place.names], 1)
        require_close(found, expected, FORMS[form].error)


# Weights in the formats that are written: config.json, [K, N], and what `random_plain` is asked.
WORDS = (64, 40)  # that every packing fills
CUT = {"strategy": "channel", "group_size": None, "symmetric": False}
WRITTEN = {
    "awq": (AWQ, WORDS, {}),
    "awq-one-group": (AWQ | {"group_size": -1}, WORDS, {}),
    "gptq": (GPTQ, WORDS, {"least_zero": 1}),
    "gptq-8": (GPTQ | {"bits": 8, "group_size": 64}, WORDS, {"least_zero": 1}),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, WORDS, {}),
    "gptq-v2-act-order": (
        GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2", "desc_act": True},
        *(WORDS, {"permuted": True}),
    ),
    "pack": (compressed_integers(symmetric=False), WORDS, {}),
    "pack-symmetric": (compressed_integers(), WORDS, {"symmetric": True}),
    "pack-cut-words": (compressed_integers(**CUT), (69, 5), {}),
    "pack-8-cut-words": (compressed_integers(num_bits=8, symmetric=False), (96, 7), {}),
    "int": (compressed_integers("int-quantized"), (69, 5), {}),
    "fp8-channels": (compressed_fp8("channel", "token"), (69, 5), {}),
    "fp8-blocks": (compressed_fp8("block", None), (200, 150), {"rows": 128}),
    "fp8-fine-grained": (FORMS["fp8"].config, (256, 256), {"rows": 128}),
    "mxfp4": ({"quant_method": "mxfp4"}, WORDS, {}),
}


def written(case, seed=0):
    """The reader, plain codes that it can read, and their writer."""
    config, shape, asked = WRITTEN[case]
    asked, reader = dict(asked), registry.read(config).reader(NAME)
    symmetric = asked.pop("symmetric", False)
    format = dataclasses.replace(reader.format(NAME, shape[0]), symmetric=symmetric)
    plain = random_plain(format, shape, seed, **asked)
    return reader, plain, writer_of(config, plain, NAME)


def test_every_scheme_that_is_written_is_here():
    found = {registry.read(config).part(NAME).scheme.title for config, *_ in WRITTEN.values()}
    assert found == {scheme.title for scheme in registry.SCHEMES if scheme.writing}
    layouts = [
        name for scheme in registry.SCHEMES if scheme.writing for name in scheme.writing.layouts
    ]
    assert sorted(layouts) == sorted(registry.layouts())


@pytest.mark.parametrize("case", WRITTEN)
@settings(max_examples=2)
@given(seed=st.integers(0, 2**32 - 1))
def test_decode_and_encode_are_inverses(case, seed):
    reader, plain, writer = written(case, seed)
    tensors = writer.encode(plain, NAME)
    # That all zero points are the middle is seen by the reader, whatever it is called.
    found = dataclasses.replace(reader.decode(tensors, NAME, plain.shape), format=plain.format)
    for field in dataclasses.fields(plain):
        one, other = getattr(plain, field.name), getattr(found, field.name)
        if isinstance(one, jax.Array):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), field.name
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), field.name
        else:
            assert one == other, field.name
    again = writer.encode(found, NAME)
    assert again.keys() == tensors.keys()
    for suffix, array in tensors.items():
        assert np.asarray(again[suffix]).tobytes() == np.asarray(array).tobytes(), suffix


@pytest.mark.parametrize("case", WRITTEN)
def test_config_json_says_what_is_written(case):
    reader, _, writer = written(case)
    config = writer.config(["lm_head"], "tensor")
    found = registry.read(config)
    assert found.reader(NAME) == reader
    assert found.has_cache_scales == (config["quant_method"] == "compressed-tensors")
    assert "lm_head" in str(config)
    assert not registry.read(writer.config(["lm_head"], None)).has_cache_scales


@pytest.mark.parametrize("case", WRITTEN)
def test_encode_inside_jit_and_without_numbers(case):
    reader, plain, writer = written(case)
    eager = writer.encode(plain, NAME)
    jitted = jax.jit(lambda plain: writer.encode(plain, NAME))(plain)
    for suffix, spec in jax.eval_shape(lambda plain: writer.encode(plain, NAME), plain).items():
        np.testing.assert_array_equal(eager[suffix], jitted[suffix])
        assert spec.shape == eager[suffix].shape
    reader.check(eager, NAME, plain.shape)


@pytest.mark.parametrize("case", ["int", "fp8-channels"])
def test_static_scales_are_written(case):
    _, plain, _ = written(case)
    static = dataclasses.replace(plain, activation_scale=np.full(1, 0.5, np.float32))
    writer = writer_of(WRITTEN[case][0], static, NAME)
    reader = registry.read(writer.config([], None)).reader(NAME)
    assert reader.activations.are_static
    assert reader.decode(writer.encode(static, NAME), NAME).activation_scale == 0.5


def test_weights_that_no_layout_holds():
    sixteen = random_plain("uint4:g32", (64, 8))
    sixteen = dataclasses.replace(sixteen, zeros=sixteen.zeros.at[0, 0].set(16))
    none = random_plain("uint8:g32", (64, 8))
    none = dataclasses.replace(none, zeros=none.zeros.at[0, 3].set(0))
    blocks = random_plain("float8:g128", (256, 150))
    for config, plain, message in (
        (AWQ, random_plain("uint4:g32", (64, 12)), "'awq' packs 8 output channels in a word, and"),
        (AWQ, sixteen, "'awq' holds zero points from 0 to 15, and .* to 16: export with"),
        (AWQ, random_plain("uint4:g32", (64, 8), permuted=True), "act-order.: export as 'gptq'"),
        (GPTQ, random_plain("uint4:g32", (64, 12)), "'gptq' packs 8 output channels in a word"),
        (GPTQ, none, "'gptq' holds zero .* 1 to 255.* 'gptq_v2'"),
        (compressed_fp8("block", None), blocks, "scales that differ within a block of 128 output"),
        (FORMS["fp8"].config, random_plain("float8/float8", (256, 8)), "'fp8' holds blocks of 128"),
        (FORMS["fp8"].config, blocks, "'fp8' holds blocks of 128 .* export as 'float-quantized'"),
        (compressed_integers("int-quantized"), sixteen, "'int-quantized' holds int8, and .* W4g32"),
        ({"quant_method": "mxfp4"}, sixteen, "format 'mxfp4' holds float4, and .* is W4g32"),
        (compressed_integers(), sixteen, "'pack-quantized' holds zero points from 0 to 15"),
    ):
        with pytest.raises(ValueError, match=message):
            writer_of(config, plain, NAME).encode(plain, NAME)


def test_activations_among_which_a_precision_chooses():
    for form in ("int", "int-tensor", "fp8", "fp8-channels", "fp8-static", "modelopt-fp8"):
        policy = registry.read(FORMS[form].config)
        _, tensors, weight = stored(form)
        operands = [choice.reader(NAME).activations.operand for choice in policy.choices]
        assert operands == [None, "int8" if form.startswith("int") else "float8"]
        wide = policy.choices[0].reader(NAME).decode(tensors, NAME, SHAPE)
        assert (wide.activation_scale, wide.format.operand) == (None, None)
        np.testing.assert_array_equal(wide.dequantize(), weight)
        experts = policy.for_experts().reader(NAME)
        assert not experts.activations.are_static
        tensors.pop("input_scale", None)
        assert experts.check(tensors, NAME) == SHAPE


def test_scales_of_the_cache():
    static = {"kv_cache_scheme": CACHE}
    for form in ("pack", "int", "fp8-channels", "nvfp4", "nvfp4-modelopt"):
        config = FORMS[form].config
        assert not registry.read(config).has_cache_scales
        assert registry.read(config | static).has_cache_scales
    assert registry.read(
        FORMS["fp8-channels"].config | {"kv_cache_scheme": CACHE | {"strategy": "attn_head"}}
    ).has_cache_scales


def test_weights_are_rounded_to_a_format():
    policy = registry.read(FORMS["nvfp4"].config)
    _, tensors, weight = stored("nvfp4")
    assert policy.target is None
    assert policy.loss == (
        "NVFP4 is rounded to W8g32: by about 1/400 of the range of 32 weights and zero at most"
    )
    four = policy.rounded_to(WeightFormat("uint4", 64))
    assert (four.loss, four.target) == ("NVFP4 is rounded to W4g64", WeightFormat("uint4", 64))
    np.testing.assert_allclose(four.reader(NAME).dequantize(tensors, NAME), weight, rtol=2e-7)
    plain = four.reader(NAME).decode(tensors, NAME)
    assert str(pack(plain).format) == "uint4:g64"
    with pytest.raises(CheckpointError, match="has 96 input channels, which groups of 64 don't"):
        four.reader(NAME).format(NAME, 96)
    assert registry.read(AWQ).rounded_to(WeightFormat("uint4", 64)) is None


def test_packages_of_the_formats_agree(rng):
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("bitsandbytes").functional
    weight = torch.tensor(rng.standard_normal((16, 128)), dtype=torch.bfloat16)
    nibbles, quantized = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    tensors = {f"weight.{k}": v.numpy() for k, v in quantized.as_dict(packed=True).items()}
    reader = registry.read(FORMS["nf4"].config).reader(NAME)
    plain = reader.decode(tensors | {"weight": nibbles.numpy()}, NAME, (128, 16))
    expected = functional.dequantize_4bit(nibbles, quantized).float().numpy()
    np.testing.assert_array_equal(plain.dequantize("bfloat16").astype(np.float32), expected.T)


@pytest.mark.sweep  # for the packages take long to import
def test_the_package_of_nvfp4_agrees(rng):
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    reader, tensors, _ = stored("nvfp4")
    unpacked = helpers.unpack_fp4_from_uint8(
        torch.tensor(tensors["weight_packed"]), *SHAPE[::-1], dtype=torch.float32
    )
    steps = tensors["weight_scale"].astype(np.float32) / tensors["weight_global_scale"]
    expected = unpacked.numpy() * np.repeat(steps, 16, axis=1)
    np.testing.assert_array_equal(reader.dequantize(tensors, NAME).T, expected)
