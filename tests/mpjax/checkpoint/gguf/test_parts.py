"""Models in several GGUF files."""

from __future__ import annotations

import numpy as np
import pytest

import mpjax
from mpjax.checkpoint.gguf.parts import part_names
from mpjax.errors import CheckpointError
from tests.mpjax.checkpoint.gguf.write_gguf import gguf, llama_metadata, random_tensors

NAMES = [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


def write(folder, rng, **changes):
    """A model in one file, and in three of which the first has no tensors."""
    metadata, tensors = llama_metadata(), random_tensors({"ffn_up": "Q8_0"}, rng)
    (folder / "whole.gguf").write_bytes(gguf(metadata, tensors))
    items = [*tensors.items()]
    for number, part in enumerate((items[:0], items[:7], items[7:])):
        split = {"split.no": number, "split.count": 3, "split.tensors.count": len(items)} | changes
        own = metadata | split if number == 0 else split
        (folder / NAMES[number]).write_bytes(gguf(own, dict(part)))


def test_parts_are_the_model(tmp_path, rng):
    write(tmp_path, rng)
    tokens = np.arange(9, dtype=np.int32)[None]
    whole = mpjax.load(tmp_path / "whole.gguf")
    for name in NAMES[::2]:
        lm = mpjax.load(tmp_path / name)
        np.testing.assert_array_equal(lm.model(tokens), whole.model(tokens))
        assert lm.tokenizer.encode("hello") == whole.tokenizer.encode("hello")


def test_wrong_parts_are_refused(tmp_path, rng):
    write(tmp_path, rng)
    (tmp_path / "other.gguf").write_bytes((tmp_path / NAMES[0]).read_bytes())
    with pytest.raises(CheckpointError, match="is one of 3 parts of a model: expected a name that"):
        mpjax.load(tmp_path / "other.gguf")
    second = (tmp_path / NAMES[1]).read_bytes()
    (tmp_path / NAMES[1]).write_bytes((tmp_path / NAMES[2]).read_bytes())
    with pytest.raises(CheckpointError, match="is part 2 of 3 by its header: expected 1 of 3, by"):
        mpjax.load(tmp_path / NAMES[0])
    (tmp_path / NAMES[1]).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.gguf of them are not beside"):
        mpjax.load(tmp_path / NAMES[2])
    (tmp_path / NAMES[1]).write_bytes(second)
    write(tmp_path, rng, **{"split.tensors.count": 5})
    with pytest.raises(CheckpointError, match=r"have \d+ tensors: expected 5, by split.tensors.co"):
        mpjax.load(tmp_path / NAMES[0])


def test_names_of_parts():
    assert part_names("a/b-00002-of-00003.gguf") == [
        f"a/b-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    ]
    for whole in ("b.gguf", "b-00004-of-00003.gguf", "b-00000-of-00003.gguf", "b-2-of-3.gguf"):
        assert part_names(whole) == [whole]
