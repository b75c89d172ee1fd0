from __future__ import annotations

import json

import pytest

from mpjax.kernels.device import Limits
from mpjax.kernels.invariance import batch_invariant
from mpjax.kernels.plans import Entry, Plan, TableError, tables
from mpjax.kernels.sums.plans import OPERATION, Key, Problem, plan_of

LIMITS = Limits(132, 9.0, "NVIDIA H200")


@pytest.mark.parametrize(
    ("nbytes", "kibibytes"), [(1, 1), (1024, 1), (1025, 2), (11520, 16), (32 << 10, 32)]
)
def test_sizes_are_rounded_up_to_powers_of_two(nbytes, kibibytes):
    assert OPERATION.key_of(Problem(2, nbytes, LIMITS)) == Key(2, kibibytes)


def test_the_kernel_runs_where_a_table_has_it(tmp_path, monkeypatch):
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))
    path = tmp_path / tables.file_name(LIMITS.kind)
    small = Problem(2, 30 << 10, LIMITS)
    others = Problem(2, 30 << 11, LIMITS), Problem(4, 30 << 10, LIMITS)
    tables.record(OPERATION, path, LIMITS.kind, {Key(2, 32): Entry(Plan("mosaic"), 4.0)}, {})
    assert [plan_of(each).implementation for each in (small, *others)] == [
        *("mosaic", "reference", "reference")
    ]
    with batch_invariant():
        assert plan_of(small).implementation == "reference", "sizes have no part in the order"
    found = json.loads(path.read_text())["sums"]["2 devices"]["32 KiB"]
    assert found["implementation"] == "mosaic"
    path.write_text(path.read_text().replace('"32 KiB"', '"33 KiB"'))
    tables.forget()
    with pytest.raises(TableError, match="33 KiB: in a table this is 2 devices 64 KiB"):
        plan_of(small)
    tables.forget()
