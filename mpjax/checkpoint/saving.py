"""Saves a converted model in mpjax's own format, to be restored bit for bit.

The folder holds weights.safetensors or an Orbax checkpoint, the tokenizer's files, and mpjax.json,
which describes the model and its arrays. Loading it does not need the original checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from mpjax.checkpoint import array_file, model_arrays
from mpjax.checkpoint.description import (
    DESCRIPTION_NAME,
    WEIGHTS_NAME,
    Description,
    decoders,
    is_saved,
)
from mpjax.checkpoint.folder import TOKENIZER_NAME
from mpjax.checkpoint.locate import locate
from mpjax.checkpoint.orbax_weights import (
    ORBAX_NAME,
    Save,
    StoredShares,
    Writing,
    gathered,
    start,
    together,
)
from mpjax.checkpoint.progress import bytes_bar
from mpjax.checkpoint.source import Source
from mpjax.checkpoint.staging import clean_up, staged
from mpjax.files.disk import naming_a_full_disk, require_room
from mpjax.kernels.checks import require_type, shown
from mpjax.language_model import LanguageModel
from mpjax.models import Decoder
from mpjax.models.config_checks import require_sound
from mpjax.models.sharded import ShardedDecoder

FORMATS = ("safetensors", "orbax")
# Files that the tokenizer needs; config.json has the stop tokens.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates"),
    *("generation_config.json", "config.json"),
)


def save(
    lm: LanguageModel,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: bool | None = None,
    format: str = "safetensors",
    wait: bool = True,
) -> Save:
    """Writes a model and its tokenizer into a folder; writes nothing if it fails.

    `mpjax.load` restores every array bit for bit. An EAGLE-3 head stays in its own folder. Files
    are written to a hidden folder beside `folder`, which replaces it when complete. If the process
    is killed, the hidden folder remains until the next save to `folder` deletes it.

    format: of the arrays. `safetensors`: one file with whole arrays, each with a checksum that
        `load` verifies. `orbax`: an Orbax checkpoint, to which each process writes the shares of
        its own devices, each with a checksum, too; all processes call `save`, and see one file
        system.
    wait: whether to return when the folder is complete. Without it, an Orbax checkpoint is written
        in the background, from a copy of the arrays on the host: the model's arrays may be changed
        or donated meanwhile. Call `wait()` of the result before the process ends; it raises the
        errors of writing.
    overwrite: whether to replace a saved model in the folder. The old one is kept until the new one
        is complete, so the disk must have room for both.
    progress: whether to show a bar on stderr; by default if stderr is a terminal. Orbax shows none.

    Raises ValueError if the folder holds anything but a saved model, or another process is saving
    to it; for a model whose class, tokenizer or arrays can't be saved, such as one with adapters;
    for a KV format whose scales the model lacks; and for another format, and safetensors without
    waiting. Raises mpjax.files.disk.DiskSpaceError if the disk has too little room, before anything
    is written if the free space is known. With several processes, an error of one before the arrays
    are written is raised in the others as an OSError.
    """
    is_orbax = _is_orbax(format, wait)
    if progress is not None:
        require_type("progress", progress, bool)
    folder, lm = Path(os.path.realpath(Path(folder).expanduser())), lm.without_drafter()
    if is_orbax:
        return _save_shares(lm, folder, overwrite, wait)
    new_folder, lm, arrays = _prepare(lm, folder, overwrite, shapes_only=False)
    with new_folder as new:
        total = sum(map(array_file.nbytes, arrays.values()))
        with bytes_bar("Saving", folder, progress, total) as advance:
            checksums = array_file.write(new / WEIGHTS_NAME, arrays, advance)
        text = Description.of(lm, checksums).to_json()
        (new / DESCRIPTION_NAME).write_text(text, encoding="utf-8")
    return Save()


def _save_shares(lm: LanguageModel, folder: Path, overwrite: bool, wait: bool) -> Save:
    """Writes an Orbax checkpoint; see `save`. An error of one process is raised in all."""
    written, saving = lm.model, Save()
    with contextlib.ExitStack() as ending:
        new = None
        with together():
            new_folder, lm, _ = _prepare(lm, folder, overwrite, shapes_only=True)
            if jax.process_index() == 0:
                new = ending.enter_context(new_folder)
        stored = StoredShares.of(written)
        with together():
            if new is not None:
                text = Description.of(lm, None, stored).to_json()
                (new / DESCRIPTION_NAME).write_text(text, encoding="utf-8")
        path, label = gathered(f"{new}\0{uuid.uuid4().hex}")[0].split("\0")
        writer = start(Path(path) / ORBAX_NAME, written)
        writing = Writing(writer, ending.pop_all(), label)
    if wait:  # in this thread, which an interrupt stops
        writing.end()
    else:
        saving.start(writing)
    return saving


def _prepare(
    lm: LanguageModel, folder: Path, overwrite: bool, *, shapes_only: bool
) -> tuple[contextlib.AbstractContextManager[Path], LanguageModel, dict[str, jax.Array]]:
    """Checks that a model can be saved to a folder.

    shapes_only: whether no array of a divided model will be fetched. Returns a context whose new
    folder has the tokenizer's files, and replaces the folder; the model, undivided; and its arrays.
    """
    clean_up(folder)  # may restore a model that a killed save has moved away
    require_writable(folder, overwrite)
    if isinstance(lm.model, ShardedDecoder):
        lm = dataclasses.replace(lm, model=lm.model.whole(shapes_only=shapes_only))
    arrays, source = _take_arrays(lm), locate(lm.source)
    longest = Description.of(lm, dict.fromkeys(arrays, 2**32 - 1)).to_json()
    needed = array_file.file_bytes(arrays) + source.file_bytes(TOKENIZER_FILES) + len(longest)
    return _new_folder(folder, overwrite, needed, source), lm, arrays


def _is_orbax(format: Any, wait: Any) -> bool:
    """Whether the format is Orbax's. Raises ValueError for other arguments than `save`'s."""
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f"format is {shown(format)}: expected {' or '.join(map(repr, FORMATS))}")
    require_type("wait", wait, bool)
    if not wait and format != "orbax":
        raise ValueError("wait is False: only format='orbax' is written in the background")
    return format == "orbax"


@contextlib.contextmanager
def _new_folder(folder: Path, overwrite: bool, needed: int, source: Source) -> Iterator[Path]:
    """Yields a folder that replaces `folder`, where that may still be written to.

    It has the tokenizer's files of `source`, and nothing else.
    """
    what = f"saving {folder}"
    with naming_a_full_disk(needed, what, folder.parent), staged(folder) as new:
        require_room(needed, what, folder.parent)
        source.copy_files(TOKENIZER_FILES, new)
        yield new
        require_writable(folder, overwrite)  # again: another process may have written to it


def require_writable(folder: Path, overwrite: bool) -> None:
    """Raises ValueError unless a folder is empty, new, or a saved model to be overwritten."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() and not is_saved(folder):
        raise ValueError(f"{folder} exists and is not a saved model: choose another folder")
    if folder.exists() and not overwrite:
        raise ValueError(f"{folder} holds a saved model: replace it with overwrite=True")


def _take_arrays(lm: LanguageModel) -> dict[str, jax.Array]:
    """The arrays to write, by name. Raises ValueError for a model that can't be restored."""
    name, known = type(lm.model).__name__, decoders()
    if known.get(name) is not type(lm.model):
        raise ValueError(
            f"models of the class {name} can't be saved: expected one of {', '.join(known)}"
        )
    require_tokenizer_files(lm)
    arrays = model_arrays.take(lm.model)
    require_all_held(lm.model, arrays)
    _require_scales(lm)
    try:
        require_sound(lm.config)
        parts = model_arrays.take_parts(lm.model)
        model_arrays.require_fitting(type(lm.model), lm.config, parts, arrays)
    except ValueError as error:
        raise ValueError(f"the model can't be saved: {error}") from error
    return arrays


def require_tokenizer_files(lm: LanguageModel) -> None:
    """Raises ValueError if a model has a tokenizer and its source no tokenizer files."""
    if lm.tokenizer is None:
        return
    source = locate(lm.source)
    if not source.file_bytes([TOKENIZER_NAME]):
        raise ValueError(
            f"the tokenizer's files are no longer in {lm.source}: set the model's source to a "
            "folder with its tokenizer.json, or its tokenizer to None"
        )
    # An adapter with more tokens brings a tokenizer that is not the source's.
    own, found = lm.tokenizer, source.read_tokenizer()
    if found and found.backend.get_vocab_size() != own.backend.get_vocab_size():
        raise ValueError(
            f"the tokenizer's files in {lm.source} have other tokens than the model's tokenizer: "
            "set the model's source to a folder with its own"
        )


def require_all_held(model: Decoder, arrays: dict[str, jax.Array]) -> None:
    """Raises ValueError if the model has an array that is not in `arrays`, which are written."""
    held = {id(array) for array in arrays.values()}
    for path, array in jax.tree.leaves_with_path(nnx.state(model)):
        if id(array) not in held:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            raise ValueError(
                f"the model can't be saved with {name}, which a {type(model).__name__} does not "
                "have: put learned scales back with mpjax.kernels.replace_scales, and save "
                "adapters in a file of their own"
            )


def _require_scales(lm: LanguageModel) -> None:
    """Raises ValueError if the KV format needs static channel scales and the model has none.

    In other KV formats, missing scales have a default.
    """
    scales = lm.model.cache_scales
    given = None if scales is None else scales.get_value().ndim
    if lm.kv_format.scaling == "static" and given != 4:
        raise ValueError(
            f"{lm.kv_format} needs a scale for each channel, and the model has none: measure them "
            "with mpjax.calibrate_cache or `mpjax convert --calibrate`, or choose another KV format"
        )
