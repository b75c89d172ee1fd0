"""Every source has the whole interface."""

from __future__ import annotations

import pytest

from mpjax.checkpoint.folder import HuggingFaceFolder
from mpjax.checkpoint.gguf.source import GGUFSource
from mpjax.checkpoint.source import Source


def test_sources(tmp_path):
    assert set(Source.__subclasses__()) == {HuggingFaceFolder, GGUFSource}
    for kind in Source.__subclasses__():
        assert kind(tmp_path).path == tmp_path
    with pytest.raises(TypeError, match="abstract"):
        Source(tmp_path)
