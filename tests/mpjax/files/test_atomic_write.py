from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mpjax.files.atomic_write import atomic_write, require_writable


def test_a_file_is_replaced_in_utf_8_and_keeps_its_mode(tmp_path):
    path = tmp_path / "results"
    atomic_write(path, "größer\n")
    assert path.read_bytes() == "größer\n".encode()
    path.chmod(0o600)
    atomic_write(path, "x\r\n")
    assert path.read_bytes() == b"x\r\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("failing", ["write_text", "replace"])
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, failing):
    path = tmp_path / "results"
    path.write_text("old")
    write_text = Path.write_text

    def fail(self, text, **options):
        write_text(self, text[:1], **options)
        raise OSError("no space left")

    if failing == "write_text":
        monkeypatch.setattr(Path, "write_text", fail)
    else:
        monkeypatch.setattr(os, "replace", lambda *arguments: fail(tmp_path / "x", ""))
    with pytest.raises(OSError, match="no space left"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert {entry.name for entry in tmp_path.iterdir()} - {"x"} == {"results"}


def test_a_link_stays_one(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    atomic_write(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_device_or_a_pipe_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    require_writable(pipe)
    atomic_write(pipe, "new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    atomic_write(Path(os.devnull), "new")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_what_can_not_be_written_is_named_before(tmp_path, monkeypatch):
    path = tmp_path / "new" / "results"
    require_writable(path)
    assert path.parent.is_dir()
    assert not path.exists()
    with pytest.raises(IsADirectoryError, match="new is a folder"):
        require_writable(path.parent)
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    with pytest.raises(PermissionError, match=r"results can't be written: .*new allows no changes"):
        require_writable(path)
