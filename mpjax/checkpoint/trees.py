"""The weights of another library's Orbax checkpoint, as the tensors of Hugging Face's files."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mpjax.checkpoint.folder import HuggingFaceFolder
from mpjax.checkpoint.naming import Rule, by_file_names
from mpjax.checkpoint.safetensors import Checkpoint, TensorInfo
from mpjax.errors import CheckpointError

Names = str | Sequence[Rule]


@dataclasses.dataclass(frozen=True)
class TreeTensor(TensorInfo):
    """A tensor that is made from an array of a tree.

    keys: of the array. tensor: the name that its rule gives the tensor. is_shared: whether other
    tensors are made from the same array.
    """

    keys: tuple[str, ...] = ()
    tensor: str = ""
    is_shared: bool = False


@dataclasses.dataclass(frozen=True)
class TreeCheckpoint(Checkpoint):
    """The tensors of an Orbax checkpoint's tree, by the names of Hugging Face's files.

    names: the rules. kept: arrays of stacks of layers, on the host once one of them is read.
    """

    names: Names = ()
    kept: dict[tuple[str, ...], np.ndarray] = dataclasses.field(default_factory=dict)

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor. Raises CheckpointError for an unknown name and for damaged files."""
        info = self.tensors.get(name)
        if not isinstance(info, TreeTensor):
            return super().read(name)
        array = self.kept.get(info.keys)
        if array is None:
            array = _read_array(self.folder, info.keys)
        if info.is_shared:
            self.kept[info.keys] = array
        return np.asarray(by_file_names({".".join(info.keys): array}, self.names)[info.tensor])


@dataclasses.dataclass(frozen=True)
class TreeFolder(HuggingFaceFolder):
    """A folder with config.json and perhaps a tokenizer, whose weights are an Orbax checkpoint.

    weights: the checkpoint's folder. names: of its arrays, as for `by_file_names`.
    """

    weights: Path = dataclasses.field(kw_only=True)
    names: Names = dataclasses.field(kw_only=True)

    def open(self) -> Checkpoint:
        """The tensors of the tree; their values stay on disk."""
        return open_tree(self.weights, self.names)


def open_tree(path: Path, names: Names) -> TreeCheckpoint:
    """Reads the names, shapes and dtypes of a tree's arrays.

    Of a trainer's whole state, the tree below `params` counts.

    Raises CheckpointError for a folder without an Orbax checkpoint, and for an array that no rule
    names.
    """
    tree = _read_metadata(path)
    tree = {"params": tree["params"]} if "params" in tree else tree
    tensors: dict[str, TensorInfo] = {}
    for keys, found in _arrays(tree):
        like = jax.ShapeDtypeStruct(tuple(found.shape), found.dtype)

        def named(array: Any, keys: tuple[str, ...] = keys) -> dict[str, Any]:
            return by_file_names({".".join(keys): array}, names)

        try:
            made = jax.eval_shape(named, like)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        for name, each in made.items():
            dtype, size = np.dtype(each.dtype), each.size * each.dtype.itemsize
            tensors[name] = TreeTensor(
                *(name, dtype, each.shape, path, 0, size), keys, name, len(made) > 1
            )
    return TreeCheckpoint(path, types.MappingProxyType(tensors), names)


def _arrays(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The arrays of a tree's metadata with their keys; the indices of a list are keys, too."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _arrays(value, (*keys, str(key)))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _arrays(value, (*keys, str(number)))
    elif hasattr(tree, "shape"):
        yield keys, tree


def _read_metadata(path: Path) -> Any:
    import orbax.checkpoint as ocp

    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            found = reader.metadata(path.resolve()).item_metadata
        if found is None:
            raise ValueError("it has no list of arrays")
        return found.tree
    except Exception as error:  # Orbax and TensorStore raise errors of many types
        raise _unreadable(path, error) from error


def _read_array(path: Path, keys: tuple[str, ...]) -> np.ndarray:
    import orbax.checkpoint as ocp

    item: Any = jax.ShapeDtypeStruct((), np.float32)
    args: Any = ocp.RestoreArgs(restore_type=np.ndarray)
    for key in reversed(keys):
        item, args = {key: item}, {key: args}
    restore = ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            found = reader.restore(path.resolve(), args=restore)
    except Exception as error:
        raise _unreadable(path, error) from error
    for key in keys:
        found = found[key]
    return np.asarray(found)


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    first = str(error).partition("\n")[0]
    return CheckpointError(
        f"{path} can't be read as an Orbax checkpoint: {first:.200}; expected the folder of an "
        "item, which has a file _METADATA"
    )
