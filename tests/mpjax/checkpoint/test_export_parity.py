"""Exports as transformers reads them.

compressed-tensors and GPTQModel, with which transformers loads packed weights, are not among this
project's dependencies (`pip install compressed-tensors gptqmodel optimum`). What an export holds is
compared with the description of each format in schemes/test_schemes.py.
"""

from __future__ import annotations

import re
import warnings

import ml_dtypes
import numpy as np
import pytest

import mpjax
from tests.models.small import logits_of
from tests.mpjax.checkpoint.test_huggingface_parity import (
    VOCABULARY,
    as_transformers_reads,
    build,
    reference_logits,
    torch,
    transformers,
)

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
