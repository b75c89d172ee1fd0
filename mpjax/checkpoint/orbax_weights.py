"""Weights in an Orbax checkpoint: each device's share is written as it is, in the background.

The arrays have the names of `model_arrays`. Those of a model that is divided among devices are the
devices' shares, concatenated along their first axis. Restored on as many devices, each process
reads the shares of its own; on another number, shares are joined one parameter at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from mpjax.checkpoint import array_file, model_arrays
from mpjax.checkpoint.model_arrays import CACHE_SCALES, Parts
from mpjax.errors import CheckpointError
from mpjax.kernels.device import default_device
from mpjax.models import Decoder, LinearPlace
from mpjax.models.cache_scales import CacheScales
from mpjax.models.division import Division, Part
from mpjax.models.sharded import ShardedDecoder
from mpjax.models.share import ExpertDivision, share_size

if TYPE_CHECKING:
    import orbax.checkpoint

    from mpjax.checkpoint.description import Description

ORBAX_NAME = "orbax"  # the checkpoint's folder in that of a saved model
LINE = "\n"  # a backslash is not allowed in an f-string of Python 3.11
TEXT_BYTES = 1 << 13  # of a string that each process sends to all


class StoredShares(NamedTuple):
    """How the arrays of a checkpoint are divided.

    devices: the number of shares; None for the whole arrays of a model on one device.
    experts: how experts are divided. parts: of the linear maps of a share, by path.
    checksums: CRC-32 of the bytes of each share of an array, by the array's name; None for a
    checkpoint of an older version, which can't be verified.
    """

    devices: int | None
    experts: ExpertDivision
    parts: Parts
    checksums: Mapping[str, Sequence[int]] | None

    @classmethod
    def of(cls, model: Decoder) -> StoredShares:
        """The shares of a model's arrays. Every process calls this."""
        parts, checksums = model_arrays.take_parts(model), _checksums(model)
        if not isinstance(model, ShardedDecoder):
            return cls(None, "divided", parts, checksums)
        places = model.linear_places(model.config)
        is_spread = any(map(model.division.is_spread, places))
        return cls(model.shards, "whole" if is_spread else "divided", parts, checksums)


class Writing(NamedTuple):
    """A checkpoint that is being written.

    writer: writes it. ending: contexts, the last of which puts the new folder into its place.
    label: the same in each process, and unique.
    """

    writer: orbax.checkpoint.AsyncCheckpointer
    ending: contextlib.ExitStack
    label: str

    def end(self) -> None:
        """Waits for the writer, and then puts the new folder into its place.

        After an error or an interrupt, the folder has its old content.
        """
        try:
            with self.ending, self.writer:
                self.writer.wait_until_finished()
        finally:
            _meet(self.label)


class Save:
    """A save, which may go on in the background.

    `wait` before the process ends: without it, Orbax stops, and the old folder stays.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, writing: Writing) -> None:
        """Finishes a write in a background thread."""

        def run() -> None:
            try:
                writing.end()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name=f"mpjax.save {writing.label}")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the save has ended."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the new folder is in its place. Raises the errors of writing it.

        An interrupt ends the waiting, not the save.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


def start(path: Path, model: Decoder) -> orbax.checkpoint.AsyncCheckpointer:
    """Begins to write the arrays of a model; returns when they are on the host.

    The model's arrays may be changed or donated then. path: of a folder that does not exist, the
    same in each process.
    """
    import orbax.checkpoint as ocp

    writer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    writer.save(path, args=ocp.args.StandardSave(model_arrays.take(model)))
    return writer


def _checksums(model: Decoder) -> dict[str, list[int]]:
    """The CRC-32 of each share of a model's arrays, by name, of all processes."""
    from jax.experimental import multihost_utils

    arrays = model_arrays.take(model)
    count = model.shards if isinstance(model, ShardedDecoder) else 1
    own = np.zeros((len(arrays), count), np.uint32)
    for row, array in zip(own, arrays.values(), strict=True):
        for number, share in _shares(array, count):
            row[number] = array_file.checksum(share)
    found = own[None]
    if jax.process_count() > 1:
        found = np.asarray(multihost_utils.process_allgather(own))
    # Only the process that has a share has its checksum; the others have 0. Every process has the
    # checksums of whole arrays.
    joined = found.max(0) if isinstance(model, ShardedDecoder) else found[0]
    return dict(zip(arrays, joined.tolist(), strict=True))


def _shares(array: Any, count: int) -> Iterator[tuple[int, Any]]:
    """The shares of an array, with their numbers; of a JAX array, those of this process."""
    if not isinstance(array, jax.Array):
        yield from enumerate(np.split(array, count))
        return
    rows = max(1, array.shape[0] // count)
    for shard in array.addressable_shards:
        yield (shard.index[0].start or 0) // rows, shard.data


def gathered(text: str) -> list[str]:
    """The strings of all processes, by process number; every process calls this.

    text: this process's string, of which the first TEXT_BYTES are sent.
    """
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return [text]
    padded = np.frombuffer(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A context that ends with an error in every process if one process has an error in it.

    Processes wait for each other at its end. Raises OSError in processes without an error of their
    own.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    for number, text in enumerate(gathered("" if own is None else f"{type(own).__name__}: {own}")):
        if own is not None:
            raise own
        if text:
            raise OSError(f"process {number} of {jax.process_count()} can't save: {text}")


def _meet(label: str) -> None:
    """Waits until all processes have called this; a barrier without the devices."""
    import orbax.checkpoint as ocp

    if jax.process_count() > 1:
        ocp.multihost.sync_global_processes(label, processes=set(range(jax.process_count())))


@dataclasses.dataclass(frozen=True)
class OrbaxWeights:
    """The arrays of a saved model in an Orbax checkpoint.

    path: of the checkpoint. description: of the model. stored: how its arrays are divided.
    shapes: of the arrays as they are stored, by name. verify: whether each share that is read is
    compared with its checksum.
    """

    path: Path
    description: Description
    stored: StoredShares
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    verify: bool

    @classmethod
    def open(
        cls, folder: Path, description: Description, stored: StoredShares, verify: bool = True
    ) -> OrbaxWeights:
        """Reads the names, shapes and dtypes of the arrays, and checks them.

        Raises CheckpointError for a folder without such a checkpoint, or of another model.
        """
        import orbax.checkpoint as ocp

        path = folder / ORBAX_NAME
        if not path.is_dir():
            raise CheckpointError(
                f"{folder} has no folder {ORBAX_NAME}: copy the saved model again"
            )
        try:
            with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
                metadata = reader.metadata(path).item_metadata
            if metadata is None:
                raise ValueError("its list of arrays can't be read")
            shapes = {
                name: jax.ShapeDtypeStruct(tuple(each.shape), each.dtype)
                for name, each in metadata.tree.items()
            }
            found = cls(path, description, stored, shapes, verify)
            found._require_fitting()
        except Exception as error:  # Orbax and TensorStore raise errors of many types
            raise CheckpointError(
                f"{path} is damaged, or of another model than the mpjax.json beside it: "
                f"{str(error).split(LINE)[0]:.200}; copy the saved model again"
            ) from error
        return found

    def without_layers(self, description: Description) -> OrbaxWeights:
        """The weights of a description with the same first layers, or all; others aren't read."""
        assert description.stored is not None
        layers = self.description.config.num_layers
        dropped = tuple(f"layers.{n}." for n in range(description.config.num_layers, layers))
        shapes = {name: x for name, x in self.shapes.items() if not name.startswith(dropped)}
        return dataclasses.replace(
            self, description=description, stored=description.stored, shapes=shapes
        )

    def _require_fitting(self) -> None:
        """Raises ValueError unless the arrays are those of a share of the model."""
        config, count = self.description.config, self.stored.devices or 1
        if self.division is not None:
            vocabulary = share_size(config.vocab_size, count)
            config = dataclasses.replace(self.division.local, vocab_size=vocabulary)
        checksums = self.stored.checksums
        if checksums is not None and checksums.keys() != self.shapes.keys():
            name = min(checksums.keys() ^ self.shapes.keys())
            raise ValueError(f"{name!r:.80} has no checksum, or is no array of the checkpoint")
        if wrong := [name for name, each in self.shapes.items() if each.shape[0] % count]:
            raise ValueError(f"{wrong[0]} is not of {count} shares")
        of_share = {
            name: jax.ShapeDtypeStruct((each.shape[0] // count, *each.shape[1:]), each.dtype)
            for name, each in self.shapes.items()
        }
        model_arrays.require_fitting(self.description.decoder, config, self.stored.parts, of_share)

    @functools.cached_property
    def division(self) -> Division | None:
        """How the stored arrays are divided; None if they are whole."""
        if self.stored.devices is None:
            return None
        return self.description.division(self.stored.devices, self.stored.experts)

    @functools.cached_property
    def _inputs(self) -> dict[str, int]:
        """The input channels of the linear maps in a share, by path."""
        assert self.division is not None
        places = self.description.decoder.linear_places(self.division.local)
        return {place.path: place.shapes[0][0] for place in places}

    def fits(self, mesh: jax.sharding.Mesh | None, experts: ExpertDivision) -> bool:
        """Whether each stored array is one of the model on these devices."""
        if mesh is None:
            return self.stored.devices is None
        return (self.stored.devices, self.stored.experts) == (mesh.size, experts)

    def read_into(self, model: Decoder) -> None:
        """Reads each array onto the model's devices, which `fits` has accepted.

        Raises CheckpointError for damaged files.
        """
        sharding: jax.sharding.Sharding = SingleDeviceSharding(default_device())
        if model.mesh is not None:
            sharding = NamedSharding(model.mesh, PartitionSpec(*model.mesh.axis_names))
        arrays = self._read(
            {
                name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding)
                for name, each in self.shapes.items()
            }
        )
        if not isinstance(model, ShardedDecoder):
            model_arrays.put(model, arrays, self.description.parts)
            return
        for place in self.description.decoder.array_places(self.description.config):
            place.assign(model.share, arrays[place.path])
        for linear_place in self.description.decoder.linear_places(self.description.config):
            formats = [part and part.format for part in self.description.parts[linear_place.path]]
            shares = self._linears(arrays, linear_place)
            model.assign_shares(linear_place, shares, formats)
        if (scales := arrays.get(CACHE_SCALES)) is not None:
            model.share.cache_scales = CacheScales(scales)

    def read_whole(self, path: str) -> dict[str, Any]:
        """The whole arrays of the parameter at a path, by name: NumPy arrays.

        Raises CheckpointError for damaged files.
        """
        names = [name for name in self.shapes if f"{name}.".startswith(f"{path}.")]
        if not names:
            return {}
        arrays = self._read({name: self.shapes[name] for name in names})
        division = self.division
        if division is None:
            return arrays
        pieces = [
            {name: np.split(array, division.count)[number] for name, array in arrays.items()}
            for number in range(division.count)
        ]
        if path == CACHE_SCALES:
            return {path: division.join_cache_scales([piece[path] for piece in pieces])}
        for place in self.description.decoder.array_places(self.description.config):
            if place.path == path:
                return {path: division.join_array(place, [piece[path] for piece in pieces])}
        places = self.description.decoder.linear_places(self.description.config)
        [of_maps] = [place for place in places if place.path == path]
        formats = [part and part.format for part in self.description.parts[path]]
        shares = [self._linears(piece, of_maps) for piece in pieces]
        joined = division.join_linears(of_maps, shares, formats)
        return model_arrays.of_linears(path, [(part.kernel, part.bias) for part in joined])

    def _linears(self, arrays: Mapping[str, Any], place: LinearPlace) -> list[Part]:
        """The parts of a place in a share, or of the shares of all devices."""
        parts, inputs = self.stored.parts[place.path], self._inputs[place.path]
        pairs = model_arrays.to_linears(place.path, parts, arrays, inputs)
        return [Part(kernel, bias) for kernel, bias in pairs]

    def _read(self, like: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Reads some arrays; onto the host if they have no sharding. Verifies their checksums."""
        import orbax.checkpoint as ocp

        def arguments(each: jax.ShapeDtypeStruct) -> Any:
            if each.sharding is None:
                return ocp.RestoreArgs(restore_type=np.ndarray)
            return ocp.ArrayRestoreArgs(sharding=each.sharding, global_shape=each.shape)

        args = ocp.args.PyTreeRestore(
            item=like, restore_args=jax.tree.map(arguments, like), partial_restore=True
        )
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                arrays = reader.restore(self.path, args=args)
        except Exception as error:
            raise CheckpointError(
                f"{self.path} can't be read: {str(error).split(LINE)[0]:.200}; copy the saved "
                "model again"
            ) from error
        if self.verify and self.stored.checksums is not None:
            for name, array in arrays.items():
                self._require_saved_bytes(name, array, self.stored.checksums[name])
        return arrays

    def _require_saved_bytes(self, name: str, array: Any, checksums: Sequence[int]) -> None:
        """Raises CheckpointError if a share of an array that was read has another checksum."""
        for number, share in _shares(array, len(checksums)):
            found, expected = array_file.checksum(share), checksums[number]
            if found != expected:
                raise CheckpointError(
                    f"{name} in {self.path} has other bytes in share {number} than were saved "
                    f"(checksum {found:08x}, expected {expected:08x}): copy the saved model again"
                )
