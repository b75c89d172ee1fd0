from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest

import mpjax
from mpjax.checkpoint import CheckpointError, settle
from mpjax.checkpoint.safetensors import Checkpoint
from mpjax.cli import info
from mpjax.models import family
from tests.mpjax.checkpoint.saved_models import require_same_bits
from tests.mpjax.checkpoint.test_huggingface import require_weights
from tests.mpjax.checkpoint.write_checkpoint import CONFIGS, random_tensors, write_checkpoint

TIED = CONFIGS["llama-tied"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WARNING = (
    "config.json says tie_word_embeddings: true, but lm_head.weight is not "
    "model.embed_tokens.weight: the model gets both"
)


def settled(folder, hf):
    decoder = family(hf)
    return settle.settle(Checkpoint.open(folder), decoder, decoder.config_from_hf(hf), hf)


def with_head(rng, change):
    """The tensors of a tied model with a head beside the embedding."""
    tensors = random_tensors(TIED, rng, ml_dtypes.bfloat16)
    tensors[HEAD] = change(tensors[EMBEDDING].copy())
    return tensors


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 1024])
def test_an_equal_head_is_the_embedding(dtype, rows, tmp_path, rng, monkeypatch):
    monkeypatch.setattr(settle, "COMPARED_ROWS", rows)
    tensors = with_head(rng, lambda table: table.astype(dtype))
    write_checkpoint(tmp_path, TIED, tensors)
    assert settled(tmp_path, TIED)[1].tie_word_embeddings
    lm = mpjax.load(tmp_path)
    assert lm.model.head is None
    require_weights(lm.model, tensors, {})
    for row in (0, 6, 7, 95):
        other = tensors[HEAD].copy()
        other[row, -1] += 1
        write_checkpoint(tmp_path, TIED, tensors | {HEAD: other})
        with pytest.warns(UserWarning, match=WARNING):
            assert not settled(tmp_path, TIED)[1].tie_word_embeddings


def test_another_head_is_kept(tmp_path, rng):
    tensors = with_head(rng, lambda table: -table)
    folder = write_checkpoint(tmp_path / "original", TIED, tensors)
    with pytest.warns(UserWarning, match=f"{folder}: {WARNING}"):
        lm = mpjax.load(folder)
    assert lm.model.head is not None
    require_weights(lm.model, tensors, {})
    with pytest.warns(UserWarning, match=WARNING):
        assert info.inspect(folder).describe() == lm.describe()
    mpjax.save(lm, tmp_path / "saved")
    require_same_bits(lm, mpjax.load(tmp_path / "saved"))


@pytest.mark.parametrize("shards", [1, 3])
def test_either_name_serves(shards, tmp_path, rng):
    tensors = random_tensors(TIED, rng, ml_dtypes.bfloat16)
    expected = mpjax.load(write_checkpoint(tmp_path / "usual", TIED, tensors))
    renamed = {HEAD if name == EMBEDDING else name: array for name, array in tensors.items()}
    folder = write_checkpoint(tmp_path / "renamed", TIED, renamed, shards)
    lm = mpjax.load(folder)
    require_same_bits(expected, lm)
    assert info.inspect(folder).describe() == lm.describe()
    # Without a word about tied embeddings there have to be both.
    write_checkpoint(folder, TIED | {"tie_word_embeddings": False}, renamed, shards)
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensor \({EMBEDDING}\)"):
        mpjax.load(folder)


def test_a_table_of_another_form_is_named_as_it_stands_in_the_file(tmp_path, rng):
    tensors = random_tensors(TIED, rng)
    expected = "expected bfloat16, float16, float32 of shape"
    for wrong in (np.ones((3, 3), np.int64), np.ones((96, 64), np.complex64)):
        write_checkpoint(tmp_path, TIED, tensors | {HEAD: wrong})
        message = rf"lm_head.weight is {wrong.dtype} \[.*\]: {expected} \[96, 64\]"
        with (
            pytest.warns(UserWarning, match=WARNING),
            pytest.raises(CheckpointError, match=message),
        ):
            mpjax.load(tmp_path)
    del tensors[EMBEDDING]
    write_checkpoint(tmp_path, TIED, tensors | {HEAD: np.ones((95, 64), np.float32)})
    with pytest.raises(CheckpointError, match=rf"lm_head.weight is float32 \[95, 64\]: {expected}"):
        mpjax.load(tmp_path)


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
def test_where_config_json_has_no_dtype_it_is_that_of_the_tensors(stored, tmp_path, rng):
    without = {key: value for key, value in TIED.items() if key != "torch_dtype"}
    tensors = random_tensors(TIED, rng, np.dtype(getattr(ml_dtypes, stored, stored)))
    write_checkpoint(tmp_path, without, tensors)
    lm = mpjax.load(tmp_path)
    assert lm.config.dtype == stored
    require_weights(lm.model, tensors, {})
    assert info.inspect(tmp_path).describe() == lm.describe()
    assert mpjax.load(tmp_path, dtype="float32").config.dtype == "float32"
    quantized = mpjax.load(tmp_path, precision="W4g32A16KV16").config
    assert quantized.dtype == ("bfloat16" if stored == "float32" else stored)
    for key in ("dtype", "torch_dtype"):
        write_checkpoint(tmp_path, without | {key: "bfloat16"}, tensors)
        assert mpjax.load(tmp_path).config.dtype == "bfloat16"


def test_what_agrees_is_left_alone(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("read a tensor"))
    for name in ("llama", "llama-tied"):
        hf = CONFIGS[name]
        write_checkpoint(tmp_path, hf, random_tensors(hf, rng))
        checkpoint = Checkpoint.open(tmp_path)
        config = family(hf).config_from_hf(hf)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = settle.settle(checkpoint, family(hf), config, hf)
        assert found == (checkpoint, config)
