from __future__ import annotations

import errno
import os
import shutil
import types
from pathlib import Path

import pytest

from mpjax.files import disk
from mpjax.files.disk import DiskSpaceError, free_bytes, naming_a_full_disk, require_room, size


def test_sizes():
    assert (size(0), size(999_994_999), size(4_700_000_000)) == ("0.00 MB", "999.99 MB", "4.70 GB")


def test_free_bytes(tmp_path, monkeypatch):
    free = free_bytes(tmp_path)
    assert free is not None
    assert 0 <= free <= shutil.disk_usage(tmp_path).total
    assert free_bytes(tmp_path / "nowhere") is None
    nothing = types.SimpleNamespace(total=0, used=0, free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: nothing)
    assert free_bytes(tmp_path) is None


def test_room_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 3_000_000)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path)
    require_room(3_000_000, "saving x", tmp_path)
    with pytest.raises(DiskSpaceError) as caught:
        require_room(3_000_001, "saving x", tmp_path / "folder")
    assert str(caught.value) == (
        f"saving x needs 3.00 MB on the disk at {tmp_path}, which has 3.00 MB free: make room "
        "there, or choose a folder on another disk"
    )
    monkeypatch.setattr(disk, "free_bytes", lambda folder: None)
    require_room(1 << 60, "saving x", tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named(code, tmp_path):
    with (
        pytest.raises(DiskSpaceError, match=r"^saving x needs 0\.01 MB on the disk at /") as caught,
        naming_a_full_disk(12_345, "saving x", tmp_path),
    ):
        raise OSError(code, os.strerror(code))
    assert isinstance(caught.value.__cause__, OSError)


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(PermissionError), naming_a_full_disk(1, "saving x", tmp_path):
        raise PermissionError(errno.EACCES, "no")
    with pytest.raises(DiskSpaceError, match="known before"), naming_a_full_disk(1, "x", tmp_path):
        raise DiskSpaceError("known before")
