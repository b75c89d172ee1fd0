from __future__ import annotations

import pytest

from tests.selection import files_for, in_shard

pytestmark = pytest.mark.any_version

FILES = ["a"] * 5 + ["b"] * 3 + ["c"] * 3 + ["d"] + ["e"] * 2


def test_shards_have_every_test_once_and_whole_files():
    chosen = [in_shard(FILES, f"{number}/3") for number in (1, 2, 3)]
    assert [sum(column) for column in zip(*chosen, strict=True)] == [1] * len(FILES)
    for shard in chosen:
        inside = {file for file, taken in zip(FILES, shard, strict=True) if taken}
        assert sum(shard) == sum(file in inside for file in FILES)
    assert max(map(sum, chosen)) - min(map(sum, chosen)) <= 1


@pytest.mark.parametrize("shard", ["0/4", "5/4", "4", "1/0", "a/b", ""])
def test_a_wrong_shard_is_named(shard):
    with pytest.raises(ValueError, match="expected one such as 1/4"):
        in_shard(FILES, shard)


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("mpjax/text/row_text.py", "tests/mpjax/text/test_row_text.py"),
        ("models/rotary.py", "tests/models/test_rotary.py"),
        ("pallas_kernels/gemm/triton.py", "tests/pallas_kernels/gemm/test_triton.py"),
        ("tests/sweeps.py", "tests/test_sweeps.py"),
        ("tests/test_selection.py", "tests/test_selection.py"),
    ],
)
def test_a_changed_file_has_tests(changed, test):
    others = ["tests/test_docs.py", "tests/mpjax/sampling/test_random_keys.py"]
    assert files_for([changed], [test, *others]) == [test]
