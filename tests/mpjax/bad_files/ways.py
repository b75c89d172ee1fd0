"""A sound checkpoint folder, the ways to spoil its files, and the bounds that a reader must keep.

A way is a function of the folder: `text("config.json", "{")(folder)`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers

from tests.mpjax.checkpoint.write_checkpoint import LLAMA, random_tensors, write_checkpoint

Way = Callable[[Path], None]
Case = tuple[str, Way, str]  # a name, how the file is made, what must be said of it

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
SECONDS, BYTES = 20, 128 * 2**20
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 16381516976\n"
DEEP = "[" * 99_999 + "]" * 99_999
REMOVED = object()

TOKENIZER_CONFIG: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "added_tokens_decoder": {
        "2": {"content": "</s>", "special": True},
        "3": {"content": "<x>", "special": True},
    },
}


def write_sound(folder: Path) -> Path:
    """Writes a checkpoint whose every file is right."""
    write_checkpoint(folder, LLAMA, random_tensors(LLAMA, np.random.default_rng(0), np.float32))
    vocabulary = {"<s>": 0, "a": 1, "</s>": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    backend.save(str(folder / "tokenizer.json"))
    text("tokenizer_config.json", TOKENIZER_CONFIG)(folder)
    text("special_tokens_map.json", {"bos_token": "<s>"})(folder)
    text("generation_config.json", {"eos_token_id": [2]})(folder)
    text("chat_template.jinja", "{{ messages[0].content }}")(folder)
    return folder


@contextlib.contextmanager
def bounds() -> Iterator[None]:
    """Fails where what is inside hangs, or takes much memory (on Linux, which says how much)."""

    def stop(*_: Any) -> None:
        raise AssertionError(f"took more than {SECONDS} seconds")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    before = resident()
    try:
        yield
        taken = resident(peak=True) - before
        assert taken < BYTES, f"took {taken} bytes"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def resident(peak: bool = False) -> int:
    """Bytes that the process has in memory, or had at most since the last call; 0 elsewhere."""
    if sys.platform != "linux":
        return 0
    status = Path("/proc/self/status").read_text()
    if not peak:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", status)
    return 0 if found is None else int(found[1]) * 1024


def text(name: str, content: Any) -> Way:
    """A file of these bytes, this text, or of a value as JSON."""
    if not isinstance(content, str | bytes):
        content = json.dumps(content)
    data = content.encode() if isinstance(content, str) else content

    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    return make


def edit(name: str, **changes: Any) -> Way:
    """The JSON object in a file with other values, or without keys (REMOVED)."""

    def make(folder: Path) -> None:
        value = json.loads((folder / name).read_text()) | changes
        value = {key: item for key, item in value.items() if item is not REMOVED}
        (folder / name).write_text(json.dumps(value))

    return make


def config(**changes: Any) -> Way:
    """config.json with other values."""
    return edit("config.json", **changes)


def steps(*ways: Way) -> Way:
    """One after the other."""

    def make(folder: Path) -> None:
        for way in ways:
            way(folder)

    return make


def pipe(name: str) -> Way:
    """A named pipe in the place of a file, which nobody writes to."""
    return steps(without(name), lambda folder: os.mkfifo(folder / name))


def as_folder(name: str) -> Way:
    """A folder in the place of a file."""
    return steps(without(name), lambda folder: (folder / name).mkdir())


def link(name: str, target: str) -> Way:
    """A link in the place of a file."""
    return steps(without(name), lambda folder: (folder / name).symlink_to(target))


def without(*names: str) -> Way:
    """The folder without files, which may be missing already."""

    def make(folder: Path) -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)

    return make


def only(*names: str) -> Way:
    """A folder that holds nothing but these files, with some content; a name may have folders."""

    def make(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("content")

    return make


def cut(name: str, count: int) -> Way:
    """A file without its last bytes."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - count)


def header(content: Any, data: bytes = b"") -> Way:
    """A safetensors file with any header: a value, or bytes."""
    written = content if isinstance(content, bytes) else json.dumps(content).encode()
    return text(WEIGHTS, len(written).to_bytes(8, "little") + written + data)


def entry(dtype: Any, shape: Any, begin: int, end: int) -> dict[str, Any]:
    """The entry of a tensor in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def tensors(change: Callable[[dict[str, np.ndarray]], Any], name: str = WEIGHTS) -> Way:
    """A safetensors file after a change of its tensors, in place."""

    def make(folder: Path) -> None:
        found = safetensors.numpy.load_file(folder / name)
        change(found)
        safetensors.numpy.save_file(found, folder / name)

    return make


def sharded(folder: Path) -> None:
    """The same tensors in two shards with their index."""
    found = safetensors.numpy.load_file(folder / WEIGHTS)
    without(WEIGHTS)(folder)
    write_checkpoint(folder, LLAMA, found, 2)


def index(weight_map: Any) -> Way:
    """Two shards, and an index with another map, or the map after a change in place."""

    def make(folder: Path) -> None:
        sharded(folder)
        written = weight_map
        if callable(weight_map):
            written = json.loads((folder / INDEX).read_text())["weight_map"]
            weight_map(written)
        text(INDEX, {"weight_map": written})(folder)

    return make
