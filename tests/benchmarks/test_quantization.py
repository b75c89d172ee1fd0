from __future__ import annotations

import pytest

from benchmarks import quantization


@pytest.mark.sweep
def test_fewer_bits_and_large_channels_cost_more_where_scales_are_the_tokens():
    rows = {
        row["format"]: row["errors"]
        for row in quantization.run(("KV16", "KV8", "KV4t", "KV4c"), 512)
    }
    for kind in quantization.KINDS:
        assert rows["KV16"][kind] < 0.003 < rows["KV8"][kind] < rows["KV4c"][kind]
    assert rows["KV4t"]["large channels"] > 2 * rows["KV4t"]["normal"]
    assert rows["KV4c"]["large channels"] < 1.5 * rows["KV4c"]["normal"]
