"""Values of metadata by key."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError

VALUES = {
    **{"text": "a", "whole": 3, "number": 9.999999747378752e-06, "flag": True},
    **{"texts": ["a"], "numbers": np.arange(3), "infinite": float("inf"), "large": 1e300},
}
METADATA = Metadata(Path("m.gguf"), VALUES)


def test_values_and_defaults():
    for kind in ("text", "whole", "flag", "texts"):
        assert getattr(METADATA, kind)(kind) == VALUES[kind]
        assert getattr(METADATA, kind)("missing", None) is None
        with pytest.raises(CheckpointError, match=r"^m\.gguf has no 'missing': expected "):
            getattr(METADATA, kind)("missing")
    assert METADATA.number("number") == 1e-5
    assert METADATA.number("whole") == 3
    assert METADATA.number("large") == 1e300
    assert METADATA.numbers("numbers", length=3).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "key", "said"),
    [
        ("text", "whole", "'whole' is 3: expected a text"),
        ("whole", "flag", "'flag' is True: expected a whole number"),
        ("whole", "text", "'text' is 'a': expected a whole number"),
        ("number", "infinite", "'infinite' is inf: expected a finite number"),
        ("number", "flag", "'flag' is True: expected a finite number"),
        ("flag", "whole", "'whole' is 3: expected true or false"),
        ("texts", "numbers", "'numbers' is ndarray of 3: expected a list of texts"),
        ("numbers", "texts", "'texts' is list of 1: expected a list of numbers"),
    ],
)
def test_values_of_another_type(kind, key, said):
    with pytest.raises(CheckpointError, match=rf"^m\.gguf: {said}"):
        getattr(METADATA, kind)(key)


def test_arrays_of_another_length():
    with pytest.raises(CheckpointError, match="'numbers' is ndarray of 3: expected a list of 4"):
        METADATA.numbers("numbers", length=4)
