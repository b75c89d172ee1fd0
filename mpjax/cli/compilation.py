"""Keeps compiled programs on disk between commands, and knows which shapes are compiled."""

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
# Programs that compile in milliseconds are kept too: a command compiles dozens of them.
SETTINGS = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
WARNING = re.compile(
    r"Error (reading|writing) persistent compilation cache entry for '(.*?)': (.*)", re.DOTALL
)
LIMIT_BYTES = 2 << 30
SWITCH = "compilation_cache"  # the name of the application's option


class CompilingCommand(typer.core.TyperCommand):
    """A command whose compiled programs are cached, unless --no-compilation-cache is given."""

    def invoke(self, ctx: Any) -> Any:
        """Sets up the cache, then runs the command. JAX reads the settings when it is imported."""
        if ctx.find_root().params.get(SWITCH):
            keep_programs()
        return super().invoke(ctx)


def keep_programs() -> None:
    """Sets JAX's persistent compilation cache for this process, if the environment doesn't."""
    if FOLDER_VARIABLE in os.environ:
        return
    folder = cache_folder()
    try:
        # Private, because JAX runs the programs in it.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    warnings.showwarning = CacheWarnings(folder, warnings.showwarning).show


def cache_folder() -> Path:
    """The folder of compiled programs: `mpjax/compiled` in XDG_CACHE_HOME or `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "mpjax", "compiled").absolute()


def prune(folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
    """Deletes the least recently used files until at most `limit_bytes` remain."""
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process may prune too
            if path.is_file():
                found = path.stat()
                files.append((max(found.st_atime, found.st_mtime), found.st_size, path))
    kept = 0
    for _, size, path in sorted(files, reverse=True):
        kept += size
        if kept > limit_bytes:
            path.unlink(missing_ok=True)


class CacheWarnings:
    """Handles JAX's warnings about its cache: one line for each kind; damaged files are deleted.

    A full disk, or a process that is killed while it writes, leaves a damaged file. JAX warns about
    it in every process, and never replaces it.

    folder: of the cache. otherwise: the function that shows all other warnings.
    """

    def __init__(self, folder: Path, otherwise: Callable[..., None]) -> None:
        self._folder, self._otherwise = folder, otherwise
        self._told: set[str] = set()

    def show(self, message: Warning | str, *rest: Any, **keywords: Any) -> None:
        """Replaces `warnings.showwarning`."""
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
    """The batch shapes that a command has generated; each is compiled once."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int, int]] = set()

    def is_new(self, batch: int, tokens: int, new_tokens: int) -> bool:
        """Whether a batch's shape is new, so that it must be compiled; remembers the shape.

        batch: prompts. tokens: tokens of the longest prompt. new_tokens: of each row.
        """
        from mpjax.generation.buckets import bucket_rows, bucket_tokens

        shape = bucket_rows(batch), bucket_tokens(tokens), bucket_tokens(new_tokens)
        known = shape in self._seen
        self._seen.add(shape)
        return not known
