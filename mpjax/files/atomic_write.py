"""Writes a file completely or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def require_writable(path: Path) -> None:
    """Makes a file's folder. Raises OSError, which names the path, if the file can't be written.

    Call it before long work whose result `atomic_write` will write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    target = path.resolve()
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder: expected the name of a file to write")
    # Replacing a regular file needs write permission for its folder; a device or pipe is written
    # directly and needs its own.
    changed = target if is_special(target) else target.parent
    if not os.access(changed, os.W_OK):
        raise PermissionError(f"{path} can't be written: {changed} allows no changes by this user")


def atomic_write(path: Path, text: str) -> None:
    """Writes text in UTF-8 to a file, replacing it as a whole; on failure the old file stays.

    The text is first written to a hidden file beside the target. A link stays, and its target is
    replaced. The file keeps its mode. A device or a pipe is written to directly.
    """
    target = path.resolve()
    if is_special(target):
        target.write_text(text, encoding="utf-8")
        return
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
        if target.exists():
            shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def is_special(target: Path) -> bool:
    """Whether a path exists and is not a regular file: a device, a pipe or a folder."""
    return target.exists() and not target.is_file()
