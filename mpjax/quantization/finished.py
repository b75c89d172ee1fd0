"""Keeps the layers that are quantised already, so that an interrupted run can go on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from mpjax.checkpoint import array_file, model_arrays
from mpjax.checkpoint.model_arrays import PackedPart
from mpjax.checkpoint.safetensors import read_header
from mpjax.errors import CheckpointError
from mpjax.kernels import codes as code_kinds
from mpjax.models import Decoder
from mpjax.quantization.recipe import Recipe
from mpjax.quantization.text import Windows

RUN_NAME = "run.json"


@dataclasses.dataclass(frozen=True)
class FinishedLayers:
    """A folder with a file for each finished layer of one run."""

    folder: Path

    @classmethod
    def open(cls, folder: Path, run: str) -> FinishedLayers:
        """The layers of a run in a folder; layers of another run are deleted first.

        run: a text that tells runs apart, as `describe_run` makes it. Raises ValueError for a
        folder that holds anything else.
        """
        found, path = cls(folder), folder / RUN_NAME
        if folder.exists() and not path.is_file() and any(folder.iterdir()):
            raise ValueError(
                f"{folder} is not empty and holds no finished layers: choose another folder"
            )
        if not path.is_file() or path.read_text(encoding="utf-8") != run:
            found.remove()
            folder.mkdir(parents=True)
            path.write_text(run, encoding="utf-8")
        return found

    def save(self, model: Decoder, number: int) -> None:
        """Keeps a layer of a model: all of it, or on failure nothing."""
        unfinished = self.folder / f".{self._file(number).name}"
        unfinished.unlink(missing_ok=True)
        arrays = model_arrays.take(model, _prefix(number))
        array_file.write(unfinished, arrays, lambda count: None)
        os.replace(unfinished, self._file(number))

    def load(self, model: Decoder, number: int, recipe: Recipe) -> bool:
        """Puts a kept layer into a model; whether there is one."""
        file = self._file(number)
        if not file.is_file():
            return False
        try:
            infos = read_header(file)
        except CheckpointError:  # the disk was full, or the machine stopped
            return False
        arrays = {
            name: jnp.asarray(array_file.read(info, None, lambda count: None))
            for name, info in infos.items()
        }
        parts = {}
        for place in model.linear_places(model.config):
            format = recipe.rule_of(place.path).weights
            scale_dtype = code_kinds.of(format).scale_dtypes[0] if format.is_packed else ""
            parts[place.path] = [PackedPart(format, scale_dtype) if format.is_packed else None]
        model_arrays.put(model, arrays, parts, _prefix(number))
        return True

    def remove(self) -> None:
        """Deletes the files of the run, and the folder if nothing else is in it."""
        for pattern in ("layer-*.safetensors", ".layer-*.safetensors", RUN_NAME):
            for file in self.folder.glob(pattern):
                file.unlink()
        with contextlib.suppress(OSError):  # it is not there, or not empty
            self.folder.rmdir()

    def _file(self, number: int) -> Path:
        return self.folder / f"layer-{number:05}.safetensors"


def describe_run(folder: Path, recipe: Recipe, batches: Sequence[Windows], dtype: str) -> str:
    """A text that differs between runs that could give other layers.

    folder: of the checkpoint, whose files are told apart by size and time.
    """
    digest = hashlib.sha256()
    for windows in batches:
        digest.update(windows.tokens.tobytes() + windows.is_real.tobytes())
    files = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("config.json"))]
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return json.dumps([str(folder), stamps, repr(recipe), dtype, digest.hexdigest()])


def _prefix(number: int) -> str:
    return f"layers.{number}."
