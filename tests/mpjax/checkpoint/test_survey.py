"""The survey of a path, whether or not it can be loaded."""

from __future__ import annotations

import pytest

from mpjax.checkpoint.survey import survey
from tests.mpjax.checkpoint.gguf.write_gguf import gguf, llama_metadata, random_tensors
from tests.mpjax.checkpoint.write_checkpoint import (
    CONFIGS,
    compressed_integers,
    write_checkpoint,
)
from tests.mpjax.checkpoint.write_checkpoint import (
    random_tensors as random_arrays,
)


def test_a_folder(tmp_path, rng):
    hf = CONFIGS["llama"] | {"quantization_config": compressed_integers()}
    write_checkpoint(tmp_path, hf, random_arrays(CONFIGS["llama"], rng))
    rows = dict(survey(tmp_path))
    assert rows["found"] == f"a folder, {tmp_path}: config.json, model.safetensors"
    assert rows["architecture"] == "LlamaForCausalLM"
    assert rows["quantised by"] == "compressed-tensors"
    assert rows["its format"] == "pack-quantized"
    assert rows["tensors"] == "21 in float32"


def test_a_gguf_file_of_another_architecture(tmp_path, rng):
    metadata = llama_metadata("mamba") | {"general.name": "Snake"}
    (tmp_path / "m.gguf").write_bytes(gguf(metadata, random_tensors({}, rng)))
    rows = dict(survey(tmp_path / "m.gguf"))
    assert (rows["name"], rows["architecture"]) == ("Snake", "mamba")
    assert rows["tensors"] == "20 in F32"


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(20)])
def test_files_that_hold_nothing(content, tmp_path):
    (tmp_path / "m.gguf").write_bytes(content)
    assert dict(survey(tmp_path / "m.gguf"))["found"].startswith("a GGUF file, ")


def test_folders_that_hold_nothing(tmp_path):
    assert survey(tmp_path) == [("found", f"a folder, {tmp_path}: empty")]
    assert survey(tmp_path / "no") == [("found", f"no folder, {tmp_path / 'no'}")]
