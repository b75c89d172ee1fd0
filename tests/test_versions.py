from __future__ import annotations

from pathlib import Path

import pytest

from tests.versions import FOLDERS, REPRESENTATIVES, is_any_version

pytestmark = pytest.mark.any_version

ROOT = Path(__file__).parents[1]


def test_folders_and_files_are_there():
    assert all((ROOT / folder).is_dir() for folder in FOLDERS)
    assert all((ROOT / file).is_file() for file in REPRESENTATIVES)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("tests/mpjax/checkpoint/schemes/test_awq.py", True),
        ("tests/mpjax/checkpoint/test_saving.py", False),
        ("tests/mpjax/test_generation.py", False),
        ("tests/mpjax/benchmark/test_other.py", False),
    ],
)
def test_files_of_the_folders_but_representatives(path, expected):
    assert is_any_version(path) == expected


def test_representatives_are_of_the_folders():
    assert all(any(file.startswith(f"{folder}/") for folder in FOLDERS) for file in REPRESENTATIVES)
