"""Files that look wrong and are right, one case a line: they give the model of the sound folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import safetensors.numpy

from tests.mpjax.bad_files.ways import (
    FIRST,
    INDEX,
    SECOND,
    WEIGHTS,
    Way,
    config,
    edit,
    index,
    sharded,
    steps,
    text,
    without,
)


def rewritten(name: str, change: tuple[str, str], encoding: str = "utf-8") -> Way:
    """A file with a piece of its text in another form."""
    return lambda folder: (folder / name).write_text(
        (folder / name).read_text().replace(*change), encoding=encoding
    )


def linked(folder: Path) -> None:
    """Every file is a link to one elsewhere, as in the hub's cache."""
    blobs = shutil.copytree(folder, folder.parent / "blobs")
    for path in folder.iterdir():
        path.unlink()
        path.symlink_to(os.path.relpath(blobs / path.name, folder))


def null_metadata(folder: Path) -> None:
    """A header whose metadata is null."""
    data = (folder / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps({"__metadata__": None} | json.loads(data[8:end])).encode()
    text(WEIGHTS, len(header).to_bytes(8, "little") + header + data[end:])(folder)


def stale(folder: Path) -> None:
    """Both shards hold all tensors, and those that the index doesn't map to them are older."""
    sharded(folder)
    shards = {name: safetensors.numpy.load_file(folder / name) for name in (FIRST, SECOND)}
    for name, other in ((FIRST, SECOND), (SECOND, FIRST)):
        old = {key: np.full_like(value, 7) for key, value in shards[other].items()}
        safetensors.numpy.save_file(shards[name] | old, folder / name)


ODD: list[tuple[str, Way]] = [
    ("mark of the byte order", rewritten("config.json", ("", ""), "utf-8-sig")),
    (
        "tokenizer: mark of the byte order",
        rewritten("tokenizer_config.json", ("", ""), "utf-8-sig"),
    ),
    ("line ends", rewritten("config.json", (", ", ",\r\n\t"))),
    ("a key twice, alike", rewritten("config.json", ("{", '{"vocab_size": 96, '))),
    ("an emoji in escapes", rewritten("config.json", ("{", r'{"name": "\ud83d\ude00", '))),
    ("keys of nobody", config(a={"b": [[[[1]]]]}, transformers_version=5, _name_or_path=None)),
    ("null for a default", config(attention_bias=None, rope_scaling=None, max_window_layers=None)),
    ("links", linked),
    ("null for metadata", null_metadata),
    ("two shards", sharded),
    ("stale tensors", stale),
    ("shards with an index without metadata", index(lambda written: None)),
    ("another name", lambda folder: (folder / WEIGHTS).rename(folder / "gptq-4bit.safetensors")),
    (
        "an index of other files",
        text(INDEX, {"weight_map": {"a": "nowhere.safetensors"}}),
    ),
    ("no generation_config", without("generation_config.json")),
    (
        "empty objects",
        steps(text("generation_config.json", {}), text("special_tokens_map.json", {})),
    ),
    ("one id", edit("generation_config.json", eos_token_id=2)),
    ("sizes of a vision model", config(text_config={"vocab_size": 7, "eos_token_id": 3})),
]
