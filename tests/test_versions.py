from __future__ import annotations

from pathlib import Path

import pytest

from tests.versions import FOLDERS, ONE_OF, REPRESENTATIVES, repeated

pytestmark = pytest.mark.any_version

ROOT = Path(__file__).parents[1]


def test_folders_and_files_are_there():
    assert all((ROOT / folder).is_dir() for folder in FOLDERS)
    assert all((ROOT / file).is_file() for file in REPRESENTATIVES)


def test_a_third_of_the_cases_run():
    """All values of a parameter among them."""
    ids = [f"one[{outer}-{inner}]" for outer in range(6) for inner in range(ONE_OF)]
    ids += [f"other[{outer}-{inner}]" for outer in range(6) for inner in range(ONE_OF)]
    ids += ["alone", *(f"two[{number}]" for number in range(2))]
    ids += [f"three[{number}]" for number in range(3)]
    left_out = repeated(ids)
    running = [name for index, name in enumerate(ids) if index not in left_out]
    names = [name.partition("[")[0] for name in running]
    assert names == ["one"] * 6 + ["other"] * 6 + ["alone", "two", "three"]
    assert {name[-2] for name in running if name.startswith("one[")} == {"0", "1", "2"}
