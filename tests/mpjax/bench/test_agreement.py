from __future__ import annotations

import pytest

from mpjax.bench import agreement

pytestmark = pytest.mark.any_version

ROW = {
    "precision": "W4A16KV16",
    "perplexity": 10.5,
    "reference_perplexity": 10.0,
    "kl_mean": 0.0312,
    "kl_error": 0.0004,
    "kl_median": 0.01,
    "kl_p99": 0.25,
    "same_top": 0.9125,
    "bits_per_weight": 4.25,
    "weights_bytes": 5e6,
}


def test_cells():
    assert len(agreement.HEADERS) == len(agreement.cells(ROW))
    assert agreement.cells(ROW) == [
        *("W4A16KV16", "4.25", "10.5000", "+5.00 %", "0.03120 ± 0.00040", "0.01000", "0.2500"),
        *("91.25 %", "5.00 MB"),
    ]
