from __future__ import annotations

import jax
import pytest

from mpjax.bench import sums

MESH = jax.sharding.Mesh(jax.devices()[:1], ("model",))


def test_a_row_for_each_dtype_and_size(monkeypatch):
    """On a mesh of one device, whose sums are the arrays themselves."""
    monkeypatch.setattr(sums, "read_devices", lambda devices: MESH)
    monkeypatch.setattr(sums, "CHAIN", 2)
    sweep = sums.Sweep(2, (1, 2))
    rows = list(sums.run(sweep))
    assert len(rows) == sweep.cases == 4
    assert [(row["dtype"], row["bytes"]) for row in rows[:2]] == [
        *(("bfloat16", 1024), ("bfloat16", 2048))
    ]
    for row in rows:
        difference = row["pair_microseconds"] - row["addition_microseconds"]
        assert row["sum_microseconds"] == pytest.approx(difference)
        assert row["inbox_microseconds"] is None, "one device has no inbox"
