"""Reads models that are split into several GGUF files by `llama-gguf-split`.

The first part has the metadata, and every part some of the tensors. Each has its index
(`split.no`), the number of parts (`split.count`) and of all tensors (`split.tensors.count`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mpjax.checkpoint.gguf.header import Header, Tensor, read_header
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def part_names(name: str) -> list[str]:
    """The file names of all parts of a model, given one; just `name` for an unsplit model."""
    match = _NAME.fullmatch(name)
    if match is None or not 0 < int(match[2]) <= int(match[3]):
        return [name]
    count = int(match[3])
    return [f"{match[1]}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def read_parts(path: Path) -> tuple[Header, list[Path]]:
    """The joint header of a model, and its files. path: the file, or one of its parts.

    A tensor's `part` is the index of its file in the list. Raises CheckpointError for missing
    parts, and for parts of different models.
    """
    own = read_header(path)
    count = Metadata(path, own.metadata).whole("split.count", 1)
    if count <= 1:
        return own, [path]
    files = [path.with_name(name) for name in part_names(path.name)]
    if len(files) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model: expected a name that ends with "
            f"-00001-of-{count:05}.gguf, as all parts have it"
        )
    if missing := [file.name for file in files if not os.path.lexists(file)]:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model, and {', '.join(missing):.300} of them "
            "are not beside it: fetch them"
        )
    headers = [read_header(file) for file in files]
    tensors: dict[str, Tensor] = {}
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        facts = Metadata(file, header.metadata)
        found = facts.whole("split.no", 0), facts.whole("split.count", 1)
        if found != (number, count):
            raise CheckpointError(
                f"{file} is part {found[0]} of {found[1]} by its header: expected {number} of "
                f"{count}, by its name"
            )
        if twice := tensors.keys() & header.tensors.keys():
            raise CheckpointError(f"{file} has {min(twice)!r:.80}, as a part before it has")
        tensors |= {name: each._replace(part=number) for name, each in header.tensors.items()}
    metadata = headers[0].metadata
    wanted = Metadata(files[0], metadata).whole("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise CheckpointError(
            f"{files[0]} and its other parts have {len(tensors)} tensors: expected {wanted}, by "
            "split.tensors.count"
        )
    return Header(metadata, tensors), files
