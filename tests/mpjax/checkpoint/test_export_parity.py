"""Exports as others read them: logits of transformers on the weights that a format stands for.

compressed-tensors and GPTQModel, which transformers loads packed weights with, are not among this
project's dependencies. Where they are missing, decoders in plain loops over words, written from
the published layouts, take their place; where they are installed (`pip install compressed-tensors
gptqmodel optimum`), transformers is asked, too.
"""

from __future__ import annotations

import json
import re
import warnings

import ml_dtypes
import numpy as np
import pytest
import safetensors

import mpjax
from tests.models.small import dequantize_kernels, logits_of
from tests.mpjax.checkpoint.test_huggingface_parity import (
    VOCABULARY,
    as_transformers_reads,
    build,
    reference_logits,
    torch,
    transformers,
)
from tests.sweeps import in_sweep

# Blocks of 128 channels; keys fill half a block.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 20))
# The precision that is exported, and the formats.
EXPORTED = [
    *(("W4g32A32KV16", layout) for layout in ("awq", "gptq", "gptq_v2", "pack-quantized")),
    *(("W4g64symA32KV16", layout) for layout in ("awq", "gptq", "pack-quantized")),
    *(("W8A32KV16", layout) for layout in ("gptq", "gptq_v2", "pack-quantized")),
    ("W8A8KV16", "int-quantized"),
    ("WFP8AFP8KV16", "float-quantized"),
    ("WFP8A32KV16", "float-quantized"),
    ("WFP8g128AFP8KV16", "fp8"),
]


# Each layout is there with another precision, or the precision with another layout.
SWEPT = [*EXPORTED[4:9], EXPORTED[12]]
NOT_NUMPYS = (torch.bfloat16, torch.float8_e4m3fn)


def fields(words, bits, count):
    """Fields along the last axis of 32-bit words, lowest bits first."""
    words = words.view(np.uint32)
    found = [(words >> np.uint32(shift)) & np.uint32(2**bits - 1) for shift in range(0, 32, bits)]
    return np.stack(found, -1).reshape(*words.shape[:-1], -1)[..., :count].astype(np.int64)


def decode_awq(module, said):
    """Field i of a word is column 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    outputs = module["scales"].shape[1]
    places = np.arange(0, outputs, 8)[:, None] + np.argsort([0, 2, 4, 6, 1, 3, 5, 7])
    places = places.reshape(-1)
    codes, zeros = (fields(module[name], 4, outputs)[:, places] for name in ("qweight", "qzeros"))
    groups = np.arange(len(codes)) // said["group_size"]
    return (codes - zeros[groups]) * module["scales"].astype(np.float32)[groups]


def decode_gptq(module, said):
    """v1 has zero points minus 1."""
    bits, outputs = said["bits"], module["scales"].shape[1]
    channels, groups = len(module["g_idx"]), module["g_idx"]
    codes = fields(np.ascontiguousarray(module["qweight"].T), bits, channels).T
    zeros = fields(module["qzeros"], bits, outputs) + (said["checkpoint_format"] == "gptq")
    return (codes - zeros[groups]) * module["scales"].astype(np.float32)[groups]


def decode_compressed(module, said):
    """Rows are output channels; packed integers have 2**(bits - 1) added."""
    [group] = said["config_groups"].values()
    scales = module["weight_scale"].astype(np.float32)
    if "weight_packed" not in module:
        weight = module["weight"].astype(np.float32)
        block = [-(-size // count) for size, count in zip(weight.shape, scales.shape, strict=True)]
        block = group["weights"].get("block_structure") or block
        rows, columns = (np.arange(n) // b for n, b in zip(weight.shape, block, strict=True))
        return (weight * scales[rows][:, columns]).T
    bits = group["weights"]["num_bits"]
    outputs, channels = module["weight_shape"]
    codes, zeros = fields(module["weight_packed"], bits, channels), 2 ** (bits - 1)
    groups = np.arange(channels) // (channels // scales.shape[1])
    if not group["weights"]["symmetric"]:
        packed = np.ascontiguousarray(module["weight_zero_point"].T)
        zeros = fields(packed, bits, outputs).T[:, groups]
    return ((codes - zeros) * scales[:, groups]).T


def decode_fp8(module, said):
    weight, scales = module["weight"].astype(np.float32), module["weight_scale_inv"]
    rows, columns = (np.arange(size) // 128 for size in weight.shape)
    return (weight * scales[rows][:, columns]).T


DECODERS = {"awq": decode_awq, "gptq": decode_gptq, "compressed-tensors": decode_compressed}
DECODERS |= {"fp8": decode_fp8}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Makes an export of a model with biases; the folder, and the model for transformers."""
    root = tmp_path_factory.mktemp("exports")
    model = build("Qwen2", SIZES)
    model.save_pretrained(root / "source")

    def make(precision, layout):
        folder = root / f"{precision}-{layout}"
        if not folder.exists():
            lm = mpjax.load(root / "source", precision=precision, dtype="float32")
            mpjax.export(lm, folder, format=layout)
        return folder, model

    return make


def weights_of(folder):
    """The weight float32 [K, N] of each packed module, as the layout says, and all other names."""
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    modules = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        wide = tensor.float() if tensor.dtype in NOT_NUMPYS else tensor
        modules.setdefault(module, {})[suffix] = wide.numpy()
    return {
        name: DECODERS[said["quant_method"]](module, said)
        for name, module in modules.items()
        if len(module.keys() - {"bias"}) > 1
    }


@pytest.mark.parametrize(
    ("precision", "layout"), [in_sweep(*case) if case in SWEPT else case for case in EXPORTED]
)
def test_logits_of_the_weights_that_it_stands_for(precision, layout, exported):
    folder, model = exported(precision, layout)
    weights = weights_of(folder)
    maps = dict(model.named_modules())
    assert len(weights) == 7
    with torch.no_grad():
        for name, weight in weights.items():
            maps[name].weight.copy_(torch.from_numpy(np.ascontiguousarray(weight.T)))
    expected = reference_logits(model, TOKENS)
    lm = mpjax.load(folder, dtype="float32")
    dequantize_kernels(lm.model)  # transformers has no activations of 8 bits
    logits = np.asarray(logits_of(lm.model, TOKENS.astype(np.int32)))
    assert np.abs(expected).max() > 1  # else the tolerance would say nothing
    assert np.abs(logits - expected).max() < 3e-5


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_transformers_reads_plain_exports(name, tmp_path):
    model = build("Qwen2", SIZES | {"tie_word_embeddings": name == "tied"})
    model.save_pretrained(tmp_path / "source")
    lm = mpjax.load(tmp_path / "source", precision="WNF4A32KV16", dtype="float32")
    mpjax.export(lm, tmp_path / "out", format="plain")
    expected = reference_logits(as_transformers_reads(tmp_path / "out"), TOKENS)
    logits = np.asarray(logits_of(mpjax.load(tmp_path / "out").model, TOKENS.astype(np.int32)))
    assert np.abs(logits - expected).max() < 3e-5


def test_transformers_reads_fine_grained_fp8(tmp_path):
    pytest.importorskip("accelerate")
    # A whole number of blocks: transformers divides the weight by the number of its scales.
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    build("Qwen3", sizes | {"head_dim": 128}).save_pretrained(tmp_path / "source")
    lm = mpjax.load(tmp_path / "source", precision="WFP8g128AFP8KV16")
    mpjax.export(lm, tmp_path / "out", format="fp8")
    config = transformers.FineGrainedFP8Config(modules_to_not_convert=["lm_head"], dequantize=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=config
    )
    require_weights_of(reference, lm)


COMPRESSED = [case for case in EXPORTED if case[1].endswith("-quantized")]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(("precision", "layout"), COMPRESSED)
def test_transformers_reads_compressed_tensors(precision, layout, exported):
    pytest.importorskip("compressed_tensors")
    folder, _ = exported(precision, layout)
    config = transformers.CompressedTensorsConfig(dequantize=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=config
    )
    require_weights_of(reference, mpjax.load(folder))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    ("precision", "plain_head", "caution"),
    [
        ("W4g32symA32KV16H8", False, "with dequantize=True misreads weights of several formats"),
        ("W4g32symA32KV16H8", True, None),
        ("W4g32A32KV16H8", False, "does not load weights of several formats with zero points"),
        ("W4g32A32KV16H8", True, None),
    ],
)
def test_an_export_says_before_what_transformers_does_not_load(
    precision, plain_head, caution, exported, tmp_path
):
    """Each sentence is held against both ways of loading."""
    pytest.importorskip("compressed_tensors")
    folder, _ = exported("W4g32A32KV16", "pack-quantized")
    lm = mpjax.load(folder.parent / "source", precision=precision, dtype="float32")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        mpjax.export(lm, tmp_path / "out", format="pack-quantized", plain_head=plain_head)
    said = "".join(str(each.message) for each in told)
    assert re.search(caution or "^$", said)
    if not plain_head:  # and offers what is another case here
        assert said.endswith("plain_head=True (--plain-head), which dequantises the head")
    symmetric, reads = "sym" in precision, {}
    expected = logits_of(mpjax.load(tmp_path / "out").model, TOKENS.astype(np.int32))
    for dequantize in (True, False):
        try:
            reference = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / "out",
                dtype=torch.float32,
                quantization_config=transformers.CompressedTensorsConfig(dequantize=dequantize),
            )
        except RuntimeError:
            reads[dequantize] = False
            continue
        error = np.abs(np.asarray(expected) - reference_logits(reference, TOKENS)).max()
        reads[dequantize] = bool(error < 1e-2 * np.abs(expected).max())
    assert reads == {True: plain_head, False: symmetric}


GROUPED = [case for case in EXPORTED if case[1] in ("awq", "gptq", "gptq_v2")]


@pytest.mark.filterwarnings("default")  # of packages that are not ours
@pytest.mark.parametrize(("precision", "layout"), GROUPED)
def test_transformers_reads_awq_and_gptq(precision, layout, exported, monkeypatch):
    """By GPTQModel's modules in plain torch, which compute in float16."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # it takes minutes to compile
    for package in ("gptqmodel", "optimum"):
        pytest.importorskip(package)
    folder, _ = exported(precision, layout)
    bits = mpjax.Precision.parse(precision).weights.bits
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        device_map="cpu",
        quantization_config=transformers.AwqConfig(backend="torch_awq")
        if layout == "awq"
        else transformers.GPTQConfig(bits=bits, backend="gptq_torch"),
    )
    expected = reference_logits(reference, TOKENS)
    logits = np.asarray(mpjax.load(folder, dtype="float32").model(TOKENS.astype(np.int32)))
    assert np.abs(logits - expected).max() < 5e-3 * np.abs(expected).max()


def require_weights_of(reference, lm):
    """The weights of a model of transformers, which may compute them in the scales' dtype."""
    weights = dict(reference.named_parameters())
    for place in lm.model.linear_places(lm.config):
        for name, linear in zip(place.names, place.maps(lm.model), strict=True):
            kernel = linear.kernel.get_value()
            dtype = np.dtype(getattr(ml_dtypes, kernel.scale_dtype, kernel.scale_dtype))
            found = weights[f"{name}.weight"].detach().numpy().T
            expected = np.asarray(kernel.dequantize())
            np.testing.assert_array_equal(found.astype(dtype), expected.astype(dtype))
