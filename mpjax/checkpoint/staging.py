"""Replaces a folder atomically: afterwards its path holds either the new or the old folder.

A save uses a hidden staging folder beside its target, `.<name>.saving-<host>-<boot>`. It holds

    lock      a file that the saving process keeps locked until it ends
    new       the folder that is being written
    previous  the target's old folder, moved here just before `new` takes its place

A process that is killed leaves its staging folder, and the next save to the same target cleans it
up. If the lock can be taken, its process has ended. Some file systems don't show locks to other
machines, so only staging folders of this host, or of this boot (which the containers of one machine
share), are cleaned up.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import platform
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LOCK, NEW, PREVIOUS = "lock", "new", "previous"
BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yields an empty folder to write to, which replaces `folder` if the block succeeds.

    After an error or an interrupt, `folder` is unchanged, and the new files are deleted. An
    interrupt during the exchange of the folders takes effect after it.

    Raises ValueError if another process saves (or, without file locks, may be saving) to the same
    folder, and if the only copy of another model would be deleted.
    """
    made = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    clean_up(folder)
    staging = folder.with_name(f".{folder.name}.saving-{_host()}-{_boot()}")
    lock, new = None, staging / NEW
    try:
        with _interrupts_wait():
            lock = _create(folder, staging)
        yield new
        _sync(new)
        with _interrupts_wait():
            if _is_occupied(folder):
                folder.rename(staging / PREVIOUS)
            new.rename(folder)
    finally:
        with _interrupts_wait():
            if lock is not None:
                _release(folder, staging, lock)
            for parent in made:
                with contextlib.suppress(OSError):  # the folder is not empty
                    parent.rmdir()


def clean_up(folder: Path) -> None:
    """Deletes the staging folders of killed saves, and restores the folder they moved away.

    Raises ValueError if the only copy of a model would be deleted.
    """
    folder = Path(os.path.realpath(folder))
    begin = glob.escape(f".{folder.name}.saving-")
    patterns = f"{glob.escape(_host())}-*", f"*-{glob.escape(_boot())}"
    found = {path for pattern in patterns for path in folder.parent.glob(begin + pattern)}
    for staging in sorted(found):
        try:
            lock = (staging / LOCK).open("r+b")
        except OSError:  # the other save is just beginning or ending, or is another user's
            continue
        if try_to_lock(lock) and _is_file(lock, staging / LOCK):
            with _interrupts_wait():
                _release(folder, staging, lock)
        else:
            lock.close()


def _host() -> str:
    return platform.node() or "localhost"


def _boot() -> str:
    try:
        return BOOT_FILE.read_text()[:8]
    except OSError:  # not on Linux
        return _host()


def _create(folder: Path, staging: Path) -> BinaryIO:
    """Creates the staging folder with an empty `new`; returns the open file that holds the lock.

    Raises ValueError if another process holds (or, without file locks, may hold) the lock.
    """
    while True:
        staging.mkdir(exist_ok=True)
        try:
            lock = (staging / LOCK).open("ab")
        except FileNotFoundError:  # another process has just deleted the staging folder
            continue
        locked = try_to_lock(lock)
        if locked is None or (locked and _is_file(lock, staging / LOCK)):
            break
        lock.close()
        if not locked:
            raise ValueError(
                f"another process is saving a model to {folder}: wait for it, or choose another "
                "folder"
            )
    try:
        if locked:
            _undo(folder, staging)
        (staging / NEW).mkdir()
    except FileExistsError as error:
        lock.close()
        raise ValueError(
            f"{staging} exists: either another process saves a model to {folder}, or one was "
            "killed; this file system has no locks to tell, so delete that folder if no process "
            "is saving"
        ) from error
    except BaseException:
        with contextlib.suppress(ValueError, OSError):  # the first error is the one to raise
            _release(folder, staging, lock)
        raise
    return lock


def _sync(folder: Path) -> None:
    """Calls fsync on all files; some file systems report a full disk only then."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def try_to_lock(file: BinaryIO | int) -> bool | None:
    """Tries to lock an open file: True on success, None if the file system has no locks.

    file: the file, or its descriptor.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_file(file: BinaryIO, path: Path) -> bool:
    """Whether the file at a path is this open file, not a later one."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _release(folder: Path, staging: Path, lock: BinaryIO) -> None:
    with lock:
        _undo(folder, staging)
        (staging / LOCK).unlink()
    with contextlib.suppress(OSError):  # another process may use the staging folder already
        staging.rmdir()


def _undo(folder: Path, staging: Path) -> None:
    """Restores `previous` if `new` hasn't replaced the target; deletes the rest."""
    new, previous = staging / NEW, staging / PREVIOUS
    if previous.exists() and new.exists():
        if _is_occupied(folder):
            raise ValueError(
                f"{previous} is the content of {folder} before a save that was killed, and "
                f"{folder} now holds something else: move or delete one of them"
            )
        previous.rename(folder)
    for path in (new, previous):
        shutil.rmtree(path, ignore_errors=True)


def _is_occupied(folder: Path) -> bool:
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Delays SIGINT until the block, which must be short, has ended."""
    handler = signal.getsignal(signal.SIGINT)
    # Only the main thread gets signals. A handler of None was set by C code, and Python can't
    # restore it.
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        signal.raise_signal(signal.SIGINT)
