"""Reads untrusted files: only regular ones, of bounded size, as UTF-8 text and JSON.

Every function takes the exception class `error`, and raises it with one sentence that names the
file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

# The index of a checkpoint with 100,000 tensors takes 10 MB.
MAXIMUM_BYTES = 32 * 2**20
MAXIMUM_DEPTH = 64
GIT_LFS_PREFIX = b"version https://git-lfs"
WEB_PAGE_PREFIXES = (b"<!doctype", b"<html")
LONGEST_PREFIX = max(map(len, (GIT_LFS_PREFIX, *WEB_PAGE_PREFIXES)))
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

Error = type[ValueError]


@contextlib.contextmanager
def open_regular(path: Path, error: Error) -> Iterator[BinaryIO]:
    """Opens a regular file for reading bytes, in a context.

    Raises `error` for a missing file, for an OSError inside the context, and for a pipe, a device
    or anything else that is not a regular file, which might block forever.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = KINDS.get(stat.S_IFMT(mode), "something else")
            raise error(f"{path} is {kind}: expected a regular file")
        with open(path, "rb") as stream:
            yield stream
    except OSError as problem:
        reason = f"can't be read: {problem.strerror or problem}"
        if isinstance(problem, FileNotFoundError) and os.path.islink(path):
            reason = (
                f"is a link to {os.readlink(path)}, which does not exist: fetch the file itself"
            )
        raise error(f"{path} {reason}") from problem


def read_text(path: Path, error: Error, maximum_bytes: int = MAXIMUM_BYTES) -> str:
    """Reads the text of a UTF-8 file, with its line ends unchanged.

    Raises `error` as `open_regular` does, and for a file of more than `maximum_bytes`, in another
    encoding, or with a git-lfs pointer or a web page in its place.
    """
    with open_regular(path, error) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > maximum_bytes:
            raise error(f"{path} has {size} bytes: expected at most {maximum_bytes}")
        data = stream.read(size + 1)  # files in /proc have content although their size is 0
    require_content(data, path, error)
    return decode(data, str(path), error)


def decode(data: bytes, source: str, error: Error) -> str:
    """Decodes UTF-8. Raises `error`, which names `source` and the first byte that is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(
            f"{source} is not a text in UTF-8: byte {problem.start} is "
            f"0x{data[problem.start]:02x}, so it is damaged, or in another encoding"
        ) from problem


def require_content(start: bytes, path: Path, error: Error) -> None:
    """Raises `error` for a file that is a git-lfs pointer or a web page.

    start: the first bytes of the file, LONGEST_PREFIX or more.
    """
    if start.startswith(GIT_LFS_PREFIX):
        raise error(
            f"{path} is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder"
        )
    if start[:LONGEST_PREFIX].lower().startswith(WEB_PAGE_PREFIXES):
        raise error(f"{path} is a web page, not the file itself: fetch it by its download link")


def read_object(path: Path, error: Error) -> dict[str, Any]:
    """Reads the JSON object in a file. Raises `error` as `read_text` and `parse_object` do."""
    return parse_object(read_text(path, error), str(path), error)


def parse_object(text: str, source: str, error: Error, *, unique: bool = False) -> dict[str, Any]:
    """Parses a JSON object, optionally after a byte order mark.

    source: the name of its file, for messages.
    unique: whether to reject every repeated key; else a key may be repeated with the same value.

    Raises `error` for a string that is not JSON, is not an object, is nested deeper than
    MAXIMUM_DEPTH, has a key with two values, or has half of a surrogate pair, which UTF-8 can't
    encode.
    """
    try:
        value = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_object_maker(unique))
        _require_shallow(value)
        if re.search(r"\\u[dD][89a-fA-F]", text):  # half a pair can only be written as an escape
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as problem:
        raise error(f"{source} is not valid JSON: {problem}") from problem
    except RecursionError as problem:
        raise error(
            f"{source} is nested deeper than {MAXIMUM_DEPTH} levels: expected a flatter object"
        ) from problem
    except UnicodeEncodeError as problem:
        raise error(
            f"{source} has {problem.object[problem.start]!r} in a string, half of a surrogate "
            "pair: expected text"
        ) from problem
    except ValueError as problem:  # a repeated key, or a number of thousands of digits
        raise error(f"{source} {problem}") from problem
    if not isinstance(value, dict):
        raise error(f"{source} is a JSON {type(value).__name__}: expected an object")
    return value


def _object_maker(unique: bool) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            _check_repeated(pairs, unique)
        return made

    return make


def _check_repeated(pairs: list[tuple[str, Any]], unique: bool) -> None:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and unique:
            raise ValueError(f"names {key!r:.80} twice")
        if found.setdefault(key, value) != value:
            raise ValueError(f"names {key!r:.80} twice, with two values")


def _require_shallow(value: Any) -> None:
    """Raises RecursionError for a value nested deeper than MAXIMUM_DEPTH.

    The parser raises the same error, at a depth that depends on the version of Python.
    """
    level = [value]
    for _ in range(MAXIMUM_DEPTH + 1):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return
    raise RecursionError
