"""Compiled programs: kept on disk from one command to the next, and told while they are made."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer.core

from mpjax.cli import output

VARIABLE = "MPJAX_COMPILATION_CACHE"
FOLDER_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
# Programs that take milliseconds count, too: a command compiles dozens of them.
SETTINGS = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
WARNING = re.compile(
    r"Error (reading|writing) persistent compilation cache entry for '(.*?)': (.*)", re.DOTALL
)
LIMIT_BYTES = 2 << 30
SWITCH = "compilation_cache"  # the application's option


class CompilingCommand(typer.core.TyperCommand):
    """A command whose compiled programs JAX keeps, unless the application's switch says no."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; JAX, which reads the settings as it is imported, comes after this."""
        if ctx.find_root().params.get(SWITCH):
            keep_programs()
        return super().invoke(ctx)


def keep_programs() -> None:
    """Sets JAX's persistent compilation cache for this process, where the environment does not."""
    if FOLDER_VARIABLE in os.environ:
        return
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # JAX runs what it finds there
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} allows no changes by this user")
        prune(folder)
    except OSError as error:
        output.note(
            f"mpjax: compiled programs are not kept ({error}): name another folder with "
            f"{FOLDER_VARIABLE}, or set {VARIABLE}=0"
        )
        return
    os.environ[FOLDER_VARIABLE] = str(folder)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    warnings.showwarning = Troubles(folder, warnings.showwarning).show


def cache_folder() -> Path:
    """`mpjax/compiled` in XDG_CACHE_HOME or `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "mpjax", "compiled").absolute()


def prune(folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
    """Deletes the files that were not used for longest, until the rest are within the limit."""
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process prunes, too
            if path.is_file():
                found = path.stat()
                files.append((max(found.st_atime, found.st_mtime), found.st_size, path))
    kept = 0
    for _, size, path in sorted(files, reverse=True):
        kept += size
        if kept > limit_bytes:
            path.unlink(missing_ok=True)


class Troubles:
    """Sees JAX's warnings about a cache: one line about each kind, and damaged files are deleted.

    A process that ends while it writes, or a full disk, leaves half a program, which JAX would warn
    about for ever, and not write again.
    """

    def __init__(self, folder: Path, otherwise: Callable[..., None]) -> None:
        self._folder, self._otherwise = folder, otherwise
        self._told: set[str] = set()

    def show(self, message: Warning | str, *rest: Any, **keywords: Any) -> None:
        """Takes the place of `warnings.showwarning`."""
        found = WARNING.match(str(message))
        if found is None:
            self._otherwise(message, *rest, **keywords)
            return
        action, program, reason = found.groups()
        for path in self._folder.glob(f"{glob.escape(program)}-*"):
            path.unlink(missing_ok=True)
        if action not in self._told:
            self._told.add(action)
            damaged, lost = "were damaged and are compiled again", "can't be kept"
            what = damaged if action == "reading" else lost
            output.note(f"mpjax: compiled programs in {self._folder} {what} ({reason})")


class Shapes:
    """The shapes of batches that a command has generated with, each of which is compiled once."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int, int]] = set()

    def is_new(self, batch: int, tokens: int, new_tokens: int) -> bool:
        """Whether a batch with so many tokens in its longest prompt needs programs of its own."""
        from mpjax.buckets import bucket_rows, bucket_tokens

        shape = bucket_rows(batch), bucket_tokens(tokens), bucket_tokens(new_tokens)
        known = shape in self._seen
        self._seen.add(shape)
        return not known
