from __future__ import annotations

import json
import re

import numpy as np
import pytest

import mpjax
from mpjax.checkpoint.packed_tables import packed, tables_of
from mpjax.errors import CheckpointError
from mpjax.kernels import QuantizedTensor, WeightFormat
from mpjax.precision import Precision
from tests.models.small import small_config
from tests.mpjax.checkpoint.saved_models import plain, require_same_bits, write_tokenizer

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 9)).astype(np.int32)
H8, H16 = WeightFormat("uint8", None, True), WeightFormat("bfloat16")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables") / "model"
    plain(folder, np.random.default_rng(3), tie_word_embeddings=request.param)
    write_tokenizer(folder)
    return folder


def kernel_of(lm, table):
    return getattr(lm.model, table).kernel.get_value()


def test_a_tied_table_has_one_format():
    tied, untied = small_config(tie_word_embeddings=True), small_config()
    both = {"head": H8, "embedding": H16}
    assert tables_of(both, untied) == both
    assert tables_of({}, tied) == {}
    for named in ({"head": H8}, {"embedding": H8}, {"head": H8, "embedding": H8}):
        assert tables_of(named, tied) == {"embedding": H8}
    with pytest.raises(ValueError, match="head is uint8:gK:sym and the embedding bfloat16, but in"):
        tables_of(both, tied)
    assert packed(both) == {"head": H8}


def test_a_named_head_is_packed_and_the_rest_stays(folder):
    lm, whole = (mpjax.load(folder, precision=text) for text in ("A16KV8H8", "A16KV8"))
    tied = lm.config.tie_word_embeddings
    assert lm.precision == ("W16A16KV8H8E8" if tied else "W16A16KV8H8")
    assert mpjax.load(folder, precision=lm.precision).precision == lm.precision
    kernel = kernel_of(lm, "embedding" if tied else "head")
    assert isinstance(kernel, QuantizedTensor)
    assert kernel.format == H8
    assert lm.num_parameters == whole.num_parameters
    found, expected = lm.model(TOKENS), whole.model(TOKENS)
    assert 0 < np.abs(found - expected).mean() < 0.05 * np.abs(expected).mean()
    table = lm.summary()["tables"]["embedding" if tied else "head"]
    assert table == {"format": "W8gKsym", "bytes": kernel.nbytes}


def test_packed_tables_are_saved_and_restored(folder, tmp_path):
    lm = mpjax.load(folder, precision="W4g32A16KV8E8")
    mpjax.save(lm, tmp_path / "saved")
    found = mpjax.load(tmp_path / "saved")
    require_same_bits(lm, found)
    assert found.config == lm.config
    for precision in ("A16KV8E8", lm.precision):
        assert mpjax.load(tmp_path / "saved", precision=precision).precision == lm.precision
    for precision, fault in (("A16KV8E16", "has E16"), ("A16KV8E4g32", "has E4g32")):
        message = f"{fault}, but the embedding in .* is E8 and can't be quantised again"
        with pytest.raises(ValueError, match=message):
            mpjax.load(tmp_path / "saved", precision=precision)


def test_a_description_with_a_wrong_table_is_refused(folder, tmp_path):
    lm = mpjax.load(folder)
    mpjax.save(lm, tmp_path / "saved")
    path = tmp_path / "saved" / "mpjax.json"
    content = json.loads(path.read_text())
    content["linears"]["head"] = [None]
    path.write_text(json.dumps(content))
    tied = "packed_tables is .'head',.: expected some of embedding"
    message = tied if lm.config.tie_word_embeddings else "head has no format: expected a packed one"
    with pytest.raises(CheckpointError, match=f"is damaged: .*{message}"):
        mpjax.load(tmp_path / "saved")


def test_groups_must_divide_the_hidden_size(folder):
    message = "has 64 input channels, which groups of 128 don't divide"
    with pytest.raises(CheckpointError, match=message):
        mpjax.load(folder, precision="A16KV8H8g128")


@pytest.mark.filterwarnings("ignore:transformers .* weights of several formats")
@pytest.mark.parametrize(
    ("layout", "is_kept"), [("pack-quantized", True), ("gptq_v2", False), ("plain", False)]
)
def test_an_export_keeps_a_head_or_writes_its_values(layout, is_kept, folder, tmp_path):
    lm = mpjax.load(folder, precision="W4g32symA16KV16H8")
    mpjax.export(lm, tmp_path / "out", format=layout)
    found = mpjax.load(tmp_path / "out")
    if is_kept and not lm.config.tie_word_embeddings:
        require_same_bits(lm, found)
        again = mpjax.load(tmp_path / "out", precision=lm.precision)
        assert again.precision == lm.precision
        with pytest.raises(ValueError, match=re.escape("has H16, but the head in")):
            mpjax.load(tmp_path / "out", precision="A16KV16H16")
        return
    table = "embedding" if lm.config.tie_word_embeddings else "head"
    values = kernel_of(lm, table).dequantize(lm.config.dtype).T
    np.testing.assert_array_equal(getattr(found.model, table).get_value(), values)
    assert found.config.packed_tables == ()


def test_precisions_of_formats_are_texts():
    assert str(Precision("uint4:g128", "KV8", head="uint8:gK:sym")) == "W4A16KV8H8"
