from __future__ import annotations

import os
import tempfile

import pytest

from tests import run_folder


def test_folders_of_killed_runs_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, running, other = (
        tmp_path / name for name in (f"{run_folder.PREFIX}a", f"{run_folder.PREFIX}b", "other")
    )
    for folder in (killed, running, other):
        folder.mkdir()
        (folder / "file").touch()
    descriptor = run_folder.lock(running)
    made = run_folder.make()
    os.close(descriptor)
    assert set(tmp_path.iterdir()) == {running, other, made}
    assert (running / "file").exists()
    with pytest.raises(OSError, match="temporarily unavailable"):
        run_folder.lock(made)
