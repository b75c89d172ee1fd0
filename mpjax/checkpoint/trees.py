"""The weights of another library's Orbax checkpoint, as the tensors of Hugging Face's files."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mpjax.checkpoint.folder import HuggingFaceFolder
from mpjax.checkpoint.naming import Make, Rule, given_twice, read_rules, tensors_of
from mpjax.checkpoint.safetensors import Checkpoint, TensorInfo
from mpjax.errors import CheckpointError

Names = str | Sequence[Rule]
Keys = tuple[str | int, ...]  # in mappings, and the indices in lists


@dataclasses.dataclass(frozen=True)
class TreeTensor(TensorInfo):
    """A tensor that is made from an array of a tree.

    keys: of the array. make: makes the tensor of it. is_shared: whether other tensors are made from
    the same array.
    """

    keys: Keys
    make: Make
    is_shared: bool


@dataclasses.dataclass(frozen=True)
class TreeCheckpoint(Checkpoint):
    """The tensors of an Orbax checkpoint's tree, by the names of Hugging Face's files.

    tree: of the arrays' metadata. kept: arrays of stacks of layers, on the host once one of them is
    read.
    """

    tree: Any = None
    kept: dict[Keys, np.ndarray] = dataclasses.field(default_factory=dict)

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor. Raises CheckpointError for an unknown name and for damaged files."""
        info = self.tensors.get(name)
        if not isinstance(info, TreeTensor):
            return super().read(name)
        array = self.kept.get(info.keys)
        if array is None:
            array = _read_array(self.folder, self.tree, info.keys)
        if info.is_shared:
            self.kept[info.keys] = array
        return np.asarray(info.make(array)).astype(info.dtype, copy=False)


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

    Raises CheckpointError for a folder without an Orbax checkpoint, for an array that no rule
    names, and for two arrays that give the same tensor.
    """
    rules = read_rules(names)
    tree = _read_metadata(path)
    weights = {"params": tree["params"]} if "params" in tree else tree
    tensors: dict[str, TensorInfo] = {}
    for keys, found in _arrays(weights):
        like = jax.ShapeDtypeStruct(tuple(found.shape), found.dtype)
        try:
            made = list(tensors_of(".".join(map(str, keys)), like, rules))
            for name, make in made:
                if name in tensors:
                    raise ValueError(given_twice(".".join(map(str, keys)), name))
                each = jax.eval_shape(make, like)
                dtype, size = np.dtype(each.dtype), each.size * each.dtype.itemsize
                tensors[name] = TreeTensor(
                    *(name, dtype, each.shape, path, 0, size), keys, make, len(made) > 1
                )
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
    return TreeCheckpoint(path, types.MappingProxyType(tensors), tree)


def _arrays(tree: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """The arrays of a tree's metadata with their keys."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _arrays(value, (*keys, key))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _arrays(value, (*keys, number))
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


def _read_array(path: Path, tree: Any, keys: Keys) -> np.ndarray:
    """Reads one array of a tree. tree: of the metadata of all arrays."""
    import orbax.checkpoint as ocp

    wanted, is_in_list = _at(tree, keys), any(isinstance(key, int) for key in keys)
    if not is_in_list:  # a part of a mapping is enough, and faster; of a list, Orbax wants all
        tree = functools.reduce(lambda inner, key: {key: inner}, reversed(keys), wanted)
    like = jax.ShapeDtypeStruct((), np.float32)
    item = jax.tree.map(lambda each: like if each is wanted else ocp.PLACEHOLDER, tree)
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    restore = ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=not is_in_list)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            found = reader.restore(path.resolve(), args=restore)
    except Exception as error:
        raise _unreadable(path, error) from error
    return np.asarray(_at(found, keys))


def _at(tree: Any, keys: Keys) -> Any:
    return functools.reduce(lambda found, key: found[key], keys, tree)


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    first = str(error).partition("\n")[0]
    return CheckpointError(
        f"{path} can't be read as an Orbax checkpoint: {first:.200}; expected the folder of an "
        "item, which has a file _METADATA"
    )
