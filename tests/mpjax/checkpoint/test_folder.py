"""A folder of Hugging Face's files as a source; bad ones are in tests/mpjax/bad_files."""

from __future__ import annotations

import shutil

import pytest

import mpjax
from mpjax.checkpoint.folder import HuggingFaceFolder
from mpjax.errors import CheckpointError
from tests.mpjax.checkpoint.write_checkpoint import CONFIGS, random_tensors, write_checkpoint

HF = CONFIGS["llama"]


def test_the_parts_of_a_folder(tmp_path, rng):
    tensors = random_tensors(HF, rng)
    source = HuggingFaceFolder(write_checkpoint(tmp_path / "model", HF, tensors))
    assert source.read_config() == HF
    assert set(source.open().tensors) == set(tensors)
    assert source.read_policy(HF) is None
    assert source.read_tokenizer() is None
    written = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
    assert source.read_policy(written).method == "awq"
    with pytest.raises(CheckpointError, match=r"config\.json: quantization_config is 3: expected"):
        source.read_policy({"quantization_config": 3})


def test_files_are_copied(tmp_path):
    folder = shutil.copytree(mpjax.bundled_model(), tmp_path / "model")
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    (extra / "a.jinja").write_bytes(bytes(10))
    source, target = HuggingFaceFolder(folder), tmp_path / "target"
    target.mkdir()
    names = ["tokenizer.json", "missing.json", extra.name]
    source.copy_files(names, target)
    assert {path.name for path in target.iterdir()} == {"tokenizer.json", extra.name}
    size = (folder / "tokenizer.json").stat().st_size
    assert source.file_bytes(names) == size + 10
