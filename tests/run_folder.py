"""A temporary folder of a run of the tests."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "mpjax-tests-"


def make() -> Path:
    """A temporary folder until this process ends.

    A process holds a lock of its folder. Folders without a lock are of runs that were killed, and
    are removed.
    """
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = lock(old)
            shutil.rmtree(old, ignore_errors=True)
            os.close(descriptor)
    # Until it is locked, it has a name that other runs don't look for.
    new = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}"))
    lock(new)
    folder = new.rename(new.with_name(new.name.removeprefix("new-")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def lock(folder: Path) -> int:
    """Locks a folder, and returns the descriptor: the lock ends with it, or with this process.

    Raises OSError if another process has locked the folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
