from __future__ import annotations

import mpjax.checkpoint
from mpjax.errors import CheckpointError


def test_a_bad_checkpoint_is_a_bad_value():
    assert issubclass(CheckpointError, ValueError)
    assert mpjax.checkpoint.CheckpointError is CheckpointError
