from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import mpjax
from mpjax.checkpoint import exporting, shards
from mpjax.files.disk import DiskSpaceError
from mpjax.kernels import QuantizedTensor, quantize
from mpjax.models import CacheScales, Linear
from tests.models.small import dequantize_kernels
from tests.mpjax.checkpoint import saved_models
from tests.mpjax.checkpoint.saved_models import files, require_same_bits
from tests.mpjax.checkpoint.write_checkpoint import (
    CONFIGS,
    FP8,
    FP8_SIZES,
    compressed_fp8,
    linear_shapes,
    pack_module_fp8,
    random_tensors,
    write_checkpoint,
)
from tests.sweeps import in_sweep


def load_as(lm, folder):
    """An export, with the KV format of the model that it was made of, which it doesn't say."""
    return dataclasses.replace(mpjax.load(folder), kv_format=lm.kv_format)


def quantization(folder):
    return json.loads((folder / "config.json").read_text()).get("quantization_config")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint with tied tables, biases and a tokenizer; query and key heads differ."""
    folder = tmp_path_factory.mktemp("source") / "model"
    rng = np.random.default_rng(3)
    saved_models.plain(folder, rng, "qwen2", tie_word_embeddings=True, **FP8_SIZES)
    saved_models.write_tokenizer(folder)
    return folder


# For each precision, the layouts that hold it; the first is the default.
LAYOUTS = {
    "W4g32A16KV8": ("awq", "gptq", "gptq_v2", "pack-quantized"),
    "W4g64symA16KV8": ("pack-quantized", "awq", "gptq", "gptq_v2"),
    "W4A16KV8": ("awq", "gptq"),
    "W8gKA16KV8": ("gptq_v2", "gptq", "pack-quantized"),
    "W8symA16KV8": ("pack-quantized", "gptq"),
    "W8A8KV8": ("int-quantized",),
    "WFP8AFP8KV16": ("float-quantized",),
    "WFP8gKA16KV16": ("float-quantized",),
    "WFP8A16KV16": ("float-quantized",),
    "WFP8g128AFP8KV16": ("float-quantized", "fp8"),
    "W16A16KV16": ("plain",),
}


# Others have their codes and their layouts.
SWEPT = ("W4g64symA16KV8", "W4A16KV8", "W8symA16KV8", "WFP8gKA16KV16", "WFP8A16KV16")


@pytest.mark.parametrize("precision", [in_sweep(p) if p in SWEPT else p for p in LAYOUTS])
def test_packed_weights_come_back_bit_for_bit(precision, source, tmp_path):
    lm = mpjax.load(source, precision=precision)
    said = {}
    for layout in LAYOUTS[precision]:
        mpjax.export(lm, tmp_path / layout, format=layout)
        require_same_bits(lm, load_as(lm, tmp_path / layout))
        said[layout] = quantization(tmp_path / layout)
    mpjax.export(lm, tmp_path / "default")
    assert quantization(tmp_path / "default") == said[LAYOUTS[precision][0]]


def test_the_folder(source, tmp_path):
    lm = mpjax.load(source, precision="W4symA16KV8")
    mpjax.export(lm, tmp_path / "new" / "out")
    folder = tmp_path / "new" / "out"
    kept = [path for path in files(source) if path.name != "config.json"]
    assert [path for path in files(folder) if path.name != "config.json"] == kept
    assert not list(folder.parent.glob(".*"))
    hf = json.loads((folder / "config.json").read_text())
    assert hf["torch_dtype"] == lm.config.dtype == "bfloat16"
    assert hf["mpjax_version"] == mpjax.__version__
    assert hf["architectures"] == ["Qwen2ForCausalLM"]
    with safetensors.safe_open(folder / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}  # which transformers asks for
        names = set(file.keys())
    assert "lm_head.weight" not in names  # tied
    assert "model.layers.0.self_attn.k_proj.weight_packed" in names
    assert "model.layers.0.self_attn.k_proj.bias" in names
    assert mpjax.load(folder).tokenizer is not None


@pytest.mark.parametrize(
    "precision", ["WNF4A16KV8", "W4A8KV8", in_sweep("W4g32A16KV8"), in_sweep("W8A8KV8")]
)
def test_any_model_can_be_dequantised(precision, source, tmp_path):
    lm = mpjax.load(source, precision=precision, dtype="float32")
    mpjax.export(lm, tmp_path, format="plain")
    found = load_as(lm, tmp_path)
    assert found.precision.startswith("W32A32")
    dequantize_kernels(lm.model)
    require_same_bits(lm, found)


def test_weights_beyond_the_range_of_the_dtype(source, tmp_path):
    lm = mpjax.load(source, precision="WNF4A16KV8", dtype="float16")
    place = lm.model.linear_places(lm.config)[1]
    wide = jnp.full(place.shapes[0], 5e4, jnp.float32)
    kernel = quantize(wide, "table4:g64")
    doubled = dataclasses.replace(kernel, table=kernel.table * 2)
    place.assign(lm.model, [Linear(doubled)])
    with pytest.raises(ValueError, match=r"o_proj has weights beyond the range of float16: load"):
        mpjax.export(lm, tmp_path / "out", format="plain")
    assert not list(tmp_path.iterdir())


def test_plain_and_permuted_maps_among_others(rng, tmp_path):
    lm = saved_models.load(saved_models.mixed(tmp_path / "mixed", rng))
    for layout in (None, "gptq_v2"):
        mpjax.export(lm, tmp_path / "out", format=layout, overwrite=True)
        said = quantization(tmp_path / "out")
        assert (said["quant_method"], said["desc_act"]) == ("gptq", True)
        assert sorted(said["dynamic"]) == [
            r"-:^lm_head$",
            r"-:^model\.layers\.0\.self_attn\.v_proj$",
            r"-:^model\.layers\.1\.mlp\.down_proj$",
        ]
        require_same_bits(lm, load_as(lm, tmp_path / "out"))
    with pytest.raises(ValueError, match=r"'gptq' holds zero points from 1 to 15, .* 'gptq_v2'"):
        mpjax.export(lm, tmp_path / "other", format="gptq")
    for layout in ("awq", "pack-quantized"):
        with pytest.raises(ValueError, match=rf"'{layout}' has no place for the order .*'gptq'"):
            mpjax.export(lm, tmp_path / "other", format=layout)


def requantize(lm, formats):
    """Puts other formats in the places of some linear maps, by their paths in a layer."""
    for place in lm.model.linear_places(lm.config):
        if (format := formats.get(place.path.split(".", 2)[2])) is not None:
            [kernel] = place.kernels(lm.model)
            dense = kernel.dequantize() if isinstance(kernel, QuantizedTensor) else kernel
            biases = [part.bias for part in place.parts(lm.model)]
            bias = None if biases[0] is None else biases[0].get_value()
            place.assign(lm.model, [Linear(quantize(dense, format), bias)])


@pytest.mark.filterwarnings("ignore:transformers .* weights of several formats")
@pytest.mark.parametrize("layout", [in_sweep("gptq"), "gptq_v2", "pack-quantized"])
def test_maps_of_several_formats(layout, source, tmp_path):
    lm = mpjax.load(source)  # of 16 bits
    formats = {"mlp.gate_up": "uint4:g32", "mlp.down": "uint8:g64:sym", "attention.qkv": "uint4"}
    requantize(lm, formats)
    mpjax.export(lm, tmp_path, format=layout)
    found = load_as(lm, tmp_path)
    assert found.precision == "W16+W4g32+W4gK+W8g64symA16KV16"
    require_same_bits(lm, found)


def test_formats_that_no_layout_holds_together(source, tmp_path):
    lm = mpjax.load(source)
    requantize(lm, {"mlp.down": "int8/int8", "attention.output": "uint4:g32"})
    with pytest.raises(ValueError, match=r"are W4g32 and W8A8, which no format .*format='plain'"):
        mpjax.export(lm, tmp_path / "out")
    with pytest.raises(ValueError, match=r"'int-quantized' holds int8, and .*o_proj is W4g32"):
        mpjax.export(lm, tmp_path / "out", format="int-quantized")
    requantize(lm, {"mlp.down": "uint4:g64"})
    with pytest.raises(ValueError, match=r"'awq' holds weights of one format, and .* is W4g.*W4g"):
        mpjax.export(lm, tmp_path / "out", format="awq")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("precision", "layout", "message"),
    [
        ("WNF4A16KV8", None, "the weights are WNF4, which no format that others read can hold"),
        ("W4A8KV8", None, "the weights are W4A8, which no format .* export with format='plain'"),
        ("W8A16KV8", "awq", r"'awq' holds uint4, and .*q_proj is W8 \(uint8:g128\): export with"),
        ("W16A16KV16", "awq", "holds quantised weights, and the model has none: .*'plain', or"),
        ("WFP8AFP8KV16", "fp8", "'fp8' holds blocks of 128 .* WFP8AFP8: export as 'float-quantize"),
        ("W16A16KV16", "gtpq", r"format is 'gtpq' \(did you mean 'gptq'\?\): expected one of awq"),
        ("W16A16KV16", 4, "format is 4: expected one of awq"),
    ],
)
def test_refused(precision, layout, message, source, tmp_path):
    lm = mpjax.load(source, precision=precision)
    with pytest.raises(ValueError, match=message):
        mpjax.export(lm, tmp_path / "out", format=layout)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("heads", [False, True])
def test_scales_of_an_fp8_cache(heads, source, tmp_path, rng):
    lm = mpjax.load(source, precision="WFP8AFP8KVfp8")
    shape = (lm.config.num_layers, 2, lm.config.num_kv_heads if heads else 1)
    scales = rng.uniform(0.5, 2, shape).astype(np.float32)
    scales = np.broadcast_to(scales, (*shape[:2], lm.config.num_kv_heads))
    lm.model.cache_scales = CacheScales(jnp.asarray(scales))
    mpjax.export(lm, tmp_path / "out")
    said = quantization(tmp_path / "out")["kv_cache_scheme"]
    assert said["strategy"] == ("attn_head" if heads else "tensor")
    require_same_bits(lm, load_as(lm, tmp_path / "out"))
    mpjax.export(lm, tmp_path / "plain", format="plain")  # which has no place for them
    assert mpjax.load(tmp_path / "plain").model.cache_scales is None


@pytest.mark.parametrize("written", [FP8, compressed_fp8("tensor", "token")], ids=["fp8", "one"])
def test_fp8_checkpoints_of_others(written, rng, tmp_path):
    hf = CONFIGS["llama"] | FP8_SIZES | {"quantization_config": written}
    tensors = random_tensors(hf, rng, ml_dtypes.bfloat16)
    for name in linear_shapes(hf):
        pack_module_fp8(tensors, written, name)
    lm = mpjax.load(write_checkpoint(tmp_path / "source", hf, tensors))
    mpjax.export(lm, tmp_path / "out")
    require_same_bits(lm, load_as(lm, tmp_path / "out"))


def test_shards(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 20_000)
    lm = mpjax.load(source, precision="W4symA16KV8")
    mpjax.export(lm, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert found == sorted(set(index["weight_map"].values()))
    assert found[0] == f"model-00001-of-{len(found):05}.safetensors"
    assert len(found) > 2
    require_same_bits(lm, load_as(lm, tmp_path))


def test_only_exports_are_replaced(source, tmp_path):
    lm = mpjax.load(source, precision="W8A8KV8")
    out = tmp_path / "out"
    mpjax.export(lm, out)
    before = {path: (out / path).read_bytes() for path in files(out) if (out / path).is_file()}
    with pytest.raises(ValueError, match="out holds an exported model: replace it with overwrite"):
        mpjax.export(lm, out)
    assert all((out / path).read_bytes() == text for path, text in before.items())
    mpjax.export(mpjax.load(out), out, overwrite=True)  # its own source
    require_same_bits(lm, load_as(lm, out))
    mpjax.save(lm, tmp_path / "saved")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    for folder in (tmp_path / "saved", tmp_path / "other", tmp_path / "other" / "file", source):
        with pytest.raises(ValueError, match="exists and is nothing that mpjax has exported"):
            mpjax.export(lm, folder, overwrite=True)
    assert (tmp_path / "other" / "file").read_text() == "x"


def test_a_failure_leaves_what_stood_there(source, tmp_path, monkeypatch):
    lm, out = mpjax.load(source, precision="W8A8KV8"), tmp_path / "out"
    mpjax.export(lm, out)
    monkeypatch.setattr("mpjax.files.disk.free_bytes", lambda folder: 1000)
    with pytest.raises(DiskSpaceError, match=f"exporting {out} needs .* MB on the disk"):
        mpjax.export(lm, out, overwrite=True)
    monkeypatch.undo()

    def interrupted(array):
        raise KeyboardInterrupt

    monkeypatch.setattr("mpjax.checkpoint.array_file.pieces", interrupted)
    for target in (out, tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            mpjax.export(lm, target, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    require_same_bits(lm, load_as(lm, out))


def test_the_room_that_is_asked_for_is_what_is_written(source, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(exporting, "require_room", lambda needed, *others: asked.append(needed))
    mpjax.export(mpjax.load(source, precision="W4g32A16KV8"), tmp_path / "out")
    written = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert written <= asked[0] < written + 8000  # an index, which there is not


def test_models_that_are_more_than_a_checkpoint_holds(source, tmp_path):
    lm = mpjax.load(source)
    lm.model.adapter = Linear(jnp.ones((2, 2)))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"the model can't be saved with adapter.kernel"):
        mpjax.export(lm, tmp_path / "out")
    lm = dataclasses.replace(mpjax.load(source), source=tmp_path)
    with pytest.raises(ValueError, match="the tokenizer's files are no longer in"):
        mpjax.export(lm, tmp_path / "out")
    assert not list(tmp_path.iterdir())
