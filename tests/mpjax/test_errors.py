from __future__ import annotations

import pytest

import mpjax.checkpoint
from mpjax.errors import CheckpointError, NotFiniteError


def test_a_bad_checkpoint_is_a_bad_value():
    assert issubclass(CheckpointError, ValueError)
    assert mpjax.checkpoint.CheckpointError is CheckpointError


def test_float16_is_told_of_bfloat16():
    error = NotFiniteError("prompt", 3, "float16")
    assert error.row == 3
    assert str(error) == (
        "prompt 3: the model computes NaN or infinite numbers in float16, which has none beyond "
        '65504: load it with dtype="bfloat16". Or its logits processors allow no token, which '
        "they have to"
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_types_with_more_room_are_not_to_blame(dtype):
    text = str(NotFiniteError("window", 0, dtype))
    assert text.startswith(
        f"window 0: the model computes NaN or infinite numbers in {dtype}, whose"
    )
    assert "its weights are damaged" in text
    assert "load it with" not in text


def test_the_command_line_says_it_in_a_sentence():
    assert issubclass(NotFiniteError, ValueError)
