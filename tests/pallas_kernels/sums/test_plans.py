from __future__ import annotations

import json

import pytest

from mpjax.kernels.device import Limits
from mpjax.kernels.plans import TableError, tables
from mpjax.kernels.plans.plan import Entry, Plan
from mpjax.kernels.sums.plans import OPERATION, Key, Problem, plan_of

LIMITS = Limits(132, 9.0, "NVIDIA H100 80GB HBM3")
pytestmark = pytest.mark.any_version


@pytest.mark.parametrize(
    ("nbytes", "kibibytes"), [(1, 1), (1024, 1), (1025, 2), (11520, 16), (32 << 10, 32)]
)
def test_sizes_are_rounded_up_to_powers_of_two(nbytes, kibibytes):
    assert OPERATION.key_of(Problem(2, nbytes, LIMITS)) == Key(2, kibibytes)


def test_a_table_decides(tmp_path, monkeypatch):
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))
    small, large = Problem(2, 30 << 10, LIMITS), Problem(2, 60 << 10, LIMITS)
    assert plan_of(small) == Plan("reference")
    path = tmp_path / tables.file_name(LIMITS.kind)
    tables.record(OPERATION, path, LIMITS.kind, {Key(2, 32): Entry(Plan("mosaic"), 6.0)}, {})
    assert plan_of(small) == Plan("mosaic")
    assert plan_of(large) == Plan("reference")
    assert plan_of(Problem(4, 30 << 10, LIMITS)) == Plan("reference")
    assert json.loads(path.read_text())["sums"]["2"]["32"]["implementation"] == "mosaic"
    path.write_text(path.read_text().replace('"32"', '"33"'))
    tables.forget()
    with pytest.raises(TableError, match="2 33: in a table this is 2 64"):
        plan_of(small)
    path.write_text(path.read_text().replace('"33"', '"x"'))
    tables.forget()
    with pytest.raises(TableError, match="'x' is not of the form 'kibibytes'"):
        plan_of(small)


def test_names_are_keys():
    assert OPERATION.key(OPERATION.names_of(Key(2, 32))) == Key(2, 32)
