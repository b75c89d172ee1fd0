"""Checks a disk's free space before anything is written to it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskSpaceError(OSError):
    """A disk has less free space than is needed; the message names the disk and both figures."""


def size(count: int) -> str:
    """A number of bytes as a text, such as `4.70 GB`."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.2f} MB"


def free_bytes(folder: Path) -> int | None:
    """Bytes that this user can still write to the disk of a folder; None if unknown."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free if usage.total else None  # some network disks give no figures


def require_room(needed_bytes: int, what: str, folder: Path) -> None:
    """Raises DiskSpaceError if the disk of a folder is known to have less than `needed_bytes` free.

    what: the subject of the message, such as "saving Qwen3-8B-W4".
    """
    free = free_bytes(folder)
    if free is not None and needed_bytes > free:
        raise DiskSpaceError(_full(needed_bytes, what, folder))


@contextlib.contextmanager
def naming_a_full_disk(needed_bytes: int, what: str, folder: Path) -> Iterator[None]:
    """Turns the block's OSError for a full disk or a used-up quota into DiskSpaceError.

    needed_bytes, what, folder: as for `require_room`.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        reason = "" if error.errno == errno.ENOSPC else ", but this user's quota is used up"
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
