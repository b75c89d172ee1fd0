"""Writes a folder as a whole: afterwards the new one stands there, or what stood there before.

A save works in a hidden folder beside its target, `.<name>.saving-<host>-<boot>`, which holds

    lock      locked by the process that saves, for as long as it lives
    new       what is being written
    previous  what stood in the target's place, from just before `new` moves there

A process that is killed leaves its hidden folder, and the next save to the same target cleans it
up. Locks tell whether a process lives; some file systems don't show them to other machines, so that
only hidden folders count that are of this host, or of this boot, which containers share.
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
    """Gives an empty folder to write, which takes the place of `folder` where the block ends well.

    After an error or an interrupt, what stood there stands there again, and nothing is left of what
    was written. An interrupt in the moment in which folders change places comes after it.

    Raises ValueError where another process saves to the same folder, or may do so on a file system
    without locks, and where the only copy of another model would be deleted.
    """
    made = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    clean_up(folder)
    staging = folder.with_name(f".{folder.name}.saving-{_host()}-{_boot()}")
    lock, new = None, staging / NEW
    try:
        with _interrupts_wait():
            lock = _take(folder, staging)
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
                with contextlib.suppress(OSError):  # it has something in it
                    parent.rmdir()


def clean_up(folder: Path) -> None:
    """Deletes what killed processes left of saves to a folder, and puts back what they moved away.

    Raises ValueError where the only copy of a model would be deleted.
    """
    folder = Path(os.path.realpath(folder))
    begin = glob.escape(f".{folder.name}.saving-")
    patterns = f"{glob.escape(_host())}-*", f"*-{glob.escape(_boot())}"
    found = {path for pattern in patterns for path in folder.parent.glob(begin + pattern)}
    for staging in sorted(found):
        try:
            lock = (staging / LOCK).open("r+b")
        except OSError:  # it ends or begins just now, or is another user's
            continue
        if _try_to_lock(lock) and _is_file(lock, staging / LOCK):
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


def _take(folder: Path, staging: Path) -> BinaryIO:
    """Makes the hidden folder with an empty `new`; the file that holds its lock until closed."""
    while True:
        staging.mkdir(exist_ok=True)
        try:
            lock = (staging / LOCK).open("ab")
        except FileNotFoundError:  # another process has deleted the hidden folder just now
            continue
        locked = _try_to_lock(lock)
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
            _settle(folder, staging)
        (staging / NEW).mkdir()
    except FileExistsError as error:
        lock.close()
        raise ValueError(
            f"{staging} is there: either another process saves a model to {folder}, or one was "
            "killed; this file system has no locks to tell, so delete it if none is saving"
        ) from error
    except BaseException:
        with contextlib.suppress(ValueError, OSError):  # the same error again
            _release(folder, staging, lock)
        raise
    return lock


def _sync(folder: Path) -> None:
    """Waits until the disk has all files; some disks say only now that they are full."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _try_to_lock(file: BinaryIO) -> bool | None:
    """Whether this process has a file's lock now; None where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_file(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is the one at a path: it may have been deleted before it was locked."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _release(folder: Path, staging: Path, lock: BinaryIO) -> None:
    with lock:
        _settle(folder, staging)
        (staging / LOCK).unlink()
    with contextlib.suppress(OSError):  # another process may have taken it over
        staging.rmdir()


def _settle(folder: Path, staging: Path) -> None:
    """Puts back what stood in the target's place, unless `new` is there; deletes the rest."""
    new, previous = staging / NEW, staging / PREVIOUS
    if previous.exists() and new.exists():
        if _is_occupied(folder):
            raise ValueError(
                f"{previous} is what stood in {folder} before a save that was killed, and now "
                "something else stands there: move or delete one of them"
            )
        previous.rename(folder)
    for path in (new, previous):
        shutil.rmtree(path, ignore_errors=True)


def _is_occupied(folder: Path) -> bool:
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Lets SIGINT take effect only after the block, which must be short."""
    handler = signal.getsignal(signal.SIGINT)
    # Only the main thread gets signals, and Python can't put back what a library in C has set.
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
