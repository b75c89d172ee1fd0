"""The choice of a source by its path."""

from __future__ import annotations

from mpjax.checkpoint.folder import HuggingFaceFolder
from mpjax.checkpoint.gguf.source import GGUFSource
from mpjax.checkpoint.locate import locate


def test_a_file_or_a_folder(tmp_path):
    (tmp_path / "blob").write_bytes(b"GGUF")
    assert locate(tmp_path / "blob") == GGUFSource(tmp_path / "blob")
    assert locate(tmp_path) == HuggingFaceFolder(tmp_path)
    assert isinstance(locate(tmp_path / "nothing"), HuggingFaceFolder)
