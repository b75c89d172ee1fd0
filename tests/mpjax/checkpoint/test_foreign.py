from __future__ import annotations

import pytest

from mpjax.checkpoint.foreign import describe


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], ", and found nothing"),
        (["README.md", "LICENSE"], ", and found LICENSE, README.md"),
        (["b.gguf", "a.gguf", "x.safetensors"], ", and found a.gguf; load that file itself"),
        (["adapter_config.json", "adapter_model.safetensors"], ", and found adapter_config.json;"),
        (["x.safetensors.part"], ", and found x.safetensors.part; the download is incomplete:"),
        (["refs/main", "snapshots/12/config.json"], ", and found snapshots/12/config.json; load"),
        (["4bit/config.json", "8bit/config.json"], ", and found 4bit/config.json; load the folder"),
        (["pytorch_model.bin", "vocab.json"], ", and found pytorch_model.bin; PyTorch's files are"),
        (["tokenizer.model"], ", and found tokenizer.model; a tokenizer is not a model: fetch"),
    ],
)
def test_what_a_folder_holds(files, expected, tmp_path):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert describe(tmp_path).startswith(expected)
