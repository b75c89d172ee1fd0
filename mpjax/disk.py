"""How much room a disk has, asked before anything is written to it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskSpaceError(OSError):
    """Something needs more room than a disk has; the message names the disk and both figures."""


def size(count: int) -> str:
    """Bytes for people, such as `4.70 GB`."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.2f} MB"


def free_bytes(folder: Path) -> int | None:
    """Bytes that this user can still write to the disk of a folder; None where nobody knows."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free if usage.total else None  # some network disks give no figures


def require_room(needed_bytes: int, what: str, folder: Path) -> None:
    """Raises DiskSpaceError unless the disk of a folder has `needed_bytes` free, or nobody knows.

    what: what needs them, as the sentence's subject: "saving Qwen3-8B-W4".
    """
    free = free_bytes(folder)
    if free is not None and needed_bytes > free:
        raise DiskSpaceError(_full(needed_bytes, what, folder))


@contextlib.contextmanager
def naming_a_full_disk(needed_bytes: int, what: str, folder: Path) -> Iterator[None]:
    """Raises DiskSpaceError where the block finds the disk of a folder full, or a quota used up."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        reason = "" if error.errno == errno.ENOSPC else ", but allows this user no more"
        raise DiskSpaceError(_full(needed_bytes, what, folder, reason)) from error


def _full(needed_bytes: int, what: str, folder: Path, reason: str = "") -> str:
    free = free_bytes(folder)
    left = "an unknown amount" if free is None else size(free)
    return (
        f"{what} needs {size(needed_bytes)} on the disk at {_mount_point(folder)}, which has "
        f"{left} free{reason}: make room there, or choose a folder on another disk"
    )


def _mount_point(folder: Path) -> str:
    path = os.path.realpath(folder)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path
