"""Output of the commands: text in any encoding, notes on lines of their own, and JSON."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO, cast

import rich.console
import rich.text
import typer

# Another name for ASCII: for a stream whose encoding is named ASCII, typer would write UTF-8.
ASCII = "mpjax_ascii"


def prepare_streams() -> None:
    """Makes stdout and stderr of this process accept any text, and stdin any bytes.

    Characters that an encoding lacks are written as question marks or escapes, by the stream's
    error handler. Text for a closed stdout is discarded; a closed stdin is empty. Bytes of stdin
    that can't be decoded become lone surrogates, for which the tokenizer raises an error. Warnings
    are written as notes.
    """
    codecs.register(_find_ascii)
    sys.stdin = sys.stdin or _nothing("r")
    sys.stdout, sys.stderr = sys.stdout or _nothing("w"), sys.stderr or _nothing("w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            ascii_only = codecs.lookup(stream.encoding).name == "ascii"
            keeps = stream.errors in ("backslashreplace", "xmlcharrefreplace", "namereplace")
            stream.reconfigure(
                encoding=ASCII if ascii_only else stream.encoding,
                errors=stream.errors if keeps else "replace",
            )
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    warnings.showwarning = _show_warning


def _find_ascii(name: str) -> codecs.CodecInfo | None:
    if name != ASCII:
        return None
    plain = codecs.lookup("ascii")
    return codecs.CodecInfo(
        plain.encode,
        plain.decode,
        incrementalencoder=plain.incrementalencoder,
        incrementaldecoder=plain.incrementaldecoder,
        name=ASCII,
    )


def _nothing(mode: str) -> TextIO:
    return cast(TextIO, open(os.devnull, mode, encoding="utf-8"))


def discard(stream: TextIO) -> None:
    """Discards further output to a stream whose reader is gone or whose disk is full.

    Otherwise Python's flush of the stream at exit would fail.
    """
    with contextlib.suppress(OSError):  # a stream without a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


_line_is_open = False


def write(text: str) -> None:
    """Writes text to stdout unchanged, and flushes."""
    global _line_is_open
    # typer.echo would remove terminal escape codes from the text.
    sys.stdout.write(text)
    sys.stdout.flush()
    if text:
        _line_is_open = not text.endswith("\n")


def end_line() -> None:
    """Ends a line of `write` that a shell prompt or a line of stderr would otherwise continue."""
    global _line_is_open
    if _line_is_open and (sys.stdout.isatty() or _streams_are_one()):
        write("\n")
    _line_is_open = False


def note(line: str) -> None:
    """Writes a line to stderr: a note that is not part of the result."""
    end_line()
    try:
        typer.echo(line, err=True)
    except OSError:
        discard(sys.stderr)


def _streams_are_one() -> bool:
    """Whether stdout and stderr go to the same file, pipe or terminal."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except OSError:  # a test's streams have no descriptors
        return False


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    note(f"mpjax: {message}")


def is_live(console: rich.console.Console) -> bool:
    """Whether a console can overwrite its lines, as progress bars and spinners need."""
    return console.is_terminal and not console.is_dumb_terminal


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Shows a text with a spinner during the context, if stderr is a terminal."""
    console = rich.console.Console(stderr=True)
    if not is_live(console):
        yield
        return
    with console.status(rich.text.Text(text), spinner="line"):  # plain ASCII
        yield


def to_json(value: Any, *, encoding: str = "utf-8", indent: int | None = None) -> str:
    """The JSON of a value; NaN and ∞ become null. Escaped if `encoding` lacks characters."""
    value = _finite(value)
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    return text


def print_json(value: Any, *, indent: int | None = 1) -> None:
    """Writes a value to stdout as JSON, followed by a line break."""
    write(to_json(value, encoding=sys.stdout.encoding, indent=indent) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
