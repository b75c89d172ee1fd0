"""A folder of quantised layers, from which an interrupted run can continue."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from mpjax.checkpoint import array_file, model_arrays, staging
from mpjax.checkpoint.description import VERSION
from mpjax.checkpoint.model_arrays import PackedPart
from mpjax.checkpoint.safetensors import read_header
from mpjax.errors import CheckpointError
from mpjax.kernels import codes as code_kinds
from mpjax.models import Decoder
from mpjax.quantization.recipe import Recipe
from mpjax.quantization.text import Windows

RUN_NAME, LOCK_NAME = "run.json", "lock"


@dataclasses.dataclass(frozen=True)
class FinishedLayers:
    """A folder with a file for each finished layer of one run.

    As a context it is closed at the end; a ValueError removes the folder, since the same run would
    raise it again.

    lock: the descriptor of the locked file that keeps other processes from writing to the folder.
    """

    folder: Path
    lock: int | None = None

    @classmethod
    def open(cls, folder: Path, run: str, *, overwrite: bool = False) -> FinishedLayers:
        """Opens or creates the folder of a run.

        run: a string that identifies the run (`describe_run`). overwrite: whether to delete
        finished layers of another run. Raises ValueError for them otherwise, for a folder with
        other files, and for a folder that another process is writing to.
        """
        path = folder / RUN_NAME
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file: expected a folder for finished layers")
        names = {file.name for file in folder.iterdir()} if folder.exists() else set()
        if names - {LOCK_NAME} and RUN_NAME not in names:
            raise ValueError(
                f"{folder} is not empty and holds no finished layers: choose another folder"
            )
        _make(folder)
        lock = _lock(folder)
        if lock is None:
            raise ValueError(
                f"another process keeps its finished layers in {folder}: wait until it has ended, "
                "or choose another target"
            )
        found = cls(folder, lock)
        if not path.is_file() or path.read_text(encoding="utf-8") != run:
            if found.count and not overwrite:
                found.close()
                raise ValueError(
                    f"{folder} holds {found.count} finished layer{'s' * (found.count > 1)} of "
                    "another command: run that command again to go on, or give --overwrite "
                    "(overwrite=True) to discard them"
                )
            found._delete_layers()
            path.write_text(run, encoding="utf-8")
        return found

    def save(self, model: Decoder, number: int) -> None:
        """Saves a layer of the model atomically."""
        unfinished = self.folder / f".{self._file(number).name}"
        unfinished.unlink(missing_ok=True)
        arrays = model_arrays.take(model, _prefix(number))
        checksums = array_file.write(unfinished, arrays, lambda count: None)
        os.replace(unfinished, self._file(number))
        # The checksums come last: a layer without them counts as unfinished.
        self._checksums(number).write_text(json.dumps(checksums), encoding="utf-8")

    def load(self, model: Decoder, number: int, recipe: Recipe) -> bool:
        """Loads a saved layer into the model; returns False if it is missing or damaged."""
        if not self._checksums(number).is_file():
            return False
        try:
            checksums = json.loads(self._checksums(number).read_text(encoding="utf-8"))
            arrays = {
                name: jnp.asarray(array_file.read(info, checksums[name], lambda count: None))
                for name, info in read_header(self._file(number)).items()
            }
        except (CheckpointError, KeyError, ValueError):  # such as after a power failure
            return False
        parts = {}
        for place in model.linear_places(model.config):
            if place.is_table:
                continue
            format = recipe.rule_of(place.path).weights
            scale_dtype = code_kinds.of(format).scale_dtypes[0] if format.is_packed else ""
            parts[place.path] = [PackedPart(format, scale_dtype) if format.is_packed else None]
        model_arrays.put(model, arrays, parts, _prefix(number))
        return True

    def __enter__(self) -> FinishedLayers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None and issubclass(kind, ValueError):
            self.remove()
        self.close()

    def close(self) -> None:
        """Releases the lock."""
        if self.lock is not None:
            os.close(self.lock)

    @property
    def count(self) -> int:
        """The number of finished layers."""
        return len(list(self.folder.glob("layer-*.json")))

    def remove(self) -> None:
        """Deletes the files of the run, and the folder if nothing else is in it.

        Does nothing while another process has the lock.
        """
        lock = None
        if self.lock is None and self.folder.is_dir() and (lock := _lock(self.folder)) is None:
            return
        self._delete_layers()
        for name in (RUN_NAME, LOCK_NAME):
            (self.folder / name).unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)
        with contextlib.suppress(OSError):  # missing, or not empty
            self.folder.rmdir()

    def _delete_layers(self) -> None:
        for pattern in ("layer-*.*", ".layer-*.*"):
            for file in self.folder.glob(pattern):
                file.unlink()

    def _checksums(self, number: int) -> Path:
        return self._file(number).with_suffix(".json")

    def _file(self, number: int) -> Path:
        return self.folder / f"layer-{number:05}.safetensors"


def describe_run(folder: Path, recipe: Recipe, batches: Sequence[Windows], dtype: str) -> str:
    """A string that is equal for two runs only if they make the same layers, in the same layout.

    folder: of the checkpoint, or its GGUF file. Files count as unchanged if their sizes and
        modification times are equal.
    """
    digest = hashlib.sha256()
    for windows in batches:
        digest.update(repr(windows.tokens.shape).encode())
        digest.update(windows.tokens.tobytes() + windows.is_real.tobytes())
    files = [folder]
    if folder.is_dir():
        files = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("config.json"))]
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return json.dumps([VERSION, str(folder), stamps, repr(recipe), dtype, digest.hexdigest()])


def _make(folder: Path) -> None:
    """Creates a folder. Raises ValueError, with the reason, if it can't."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"the folder for finished layers, {folder}, can't be made: {error.strerror}; choose "
            "another target"
        ) from error


def _lock(folder: Path) -> int | None:
    """The descriptor of a locked file; None if another process holds the lock.

    The lock lasts until the file is closed. Without file locks, no process is kept out.
    """
    file = os.open(folder / LOCK_NAME, os.O_CREAT | os.O_RDWR)
    if staging.try_to_lock(file) is False:
        os.close(file)
        return None
    return file


def _prefix(number: int) -> str:
    return f"layers.{number}."
