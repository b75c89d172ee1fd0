"""Where the arrays of a trainer's tree belong in a model: found and checked before any is read."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.checkpoint.fused_experts import name_of_all
from mpjax.checkpoint.naming import flat
from mpjax.checkpoint.plan import is_spare
from mpjax.kernels import QuantizedTensor
from mpjax.kernels.checks import did_you_mean, nearest, shown
from mpjax.models import ArrayPlace, Decoder, ExpertPlace, LinearPlace
from mpjax.models.parameters import EMBEDDING, HEAD, TABLES, name_of

EXPECTED = (
    "expected an nnx.State of a model with the same layers, or a mapping from the names of tensors "
    "in Hugging Face's files, each to arrays"
)
# Buffers that files of some families have, and that the model computes.
IGNORED = ("rotary_emb.inv_freq",)


@dataclasses.dataclass(frozen=True)
class Piece:
    """The output channels of one part of a linear place that some arrays fill; static.

    part: its index. begin, end: the output channels in the part. first: the index of the first of
        them among an array's outputs. is_bias: whether the arrays are biases.
    is_file: whether a weight is [out, in] as in files, and not [in, out].
    experts: the index of each array's expert; None for a single array, which has all experts if the
        place has experts.
    alternates: whether an array alternates the outputs of gate and up, which the part concatenates.
    """

    part: int
    begin: int
    end: int
    first: int = 0
    is_bias: bool = False
    is_file: bool = True
    experts: tuple[int, ...] | None = None
    alternates: bool = False


@dataclasses.dataclass(frozen=True)
class Home:
    """Where one array of a tree belongs in the model.

    place: the parameter's place, or the variable itself if it has none. shape: the array's expected
    shape. pieces: what the array fills of a linear place. offset: is added to the array.
    """

    place: ArrayPlace | LinearPlace | nnx.Variable
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    offset: float = 0.0


@dataclasses.dataclass
class Sources:
    """The arrays of a tree by the places that they fill.

    arrays: (place or variable, its array, the offset) for each parameter outside linear maps.
    linears: for each path of linear maps, the place, and the arrays of each piece.
    names: of all arrays in the tree, in the order of `values`.
    """

    arrays: list[tuple[ArrayPlace | nnx.Variable, Any, float]]
    linears: dict[str, tuple[LinearPlace, dict[Piece, list[Any]]]]
    names: list[str]
    values: list[Any]


def read_tree(model: Decoder, tree: Any) -> Sources:
    """Finds the places of a tree's arrays.

    Raises ValueError, which names the array, for one that the model has no place for, or whose
    shape or dtype is not the place's.
    """
    named = dict(flat(tree))
    if not named:
        raise ValueError(f"the tree of weights is {shown(tree)}: {EXPECTED}")
    is_of_files = any("." in key for key in _keys(tree))
    homes = _homes_of_names(model) if is_of_files else _homes_of_paths(model, named)
    found = Sources([], {}, [], [])
    for name, value in named.items():
        if (home := homes.get(name)) is None:
            if is_of_files and _is_left_out(name, model, named):
                continue
            hint = did_you_mean(nearest(name, list(homes)))
            raise ValueError(
                f"the tree of weights has {name!r}, which the model has no place for{hint}: "
                f"{EXPECTED}"
            )
        _require(name, value, home)
        found.names.append(name)
        found.values.append(value)
        if not isinstance(home.place, LinearPlace):
            found.arrays.append((home.place, value, home.offset))
            continue
        _, pieces = found.linears.setdefault(home.place.path, (home.place, {}))
        for piece in home.pieces:
            pieces[piece] = [value]
    for path, (place, pieces) in found.linears.items():
        found.linears[path] = place, _gathered(pieces)
    return found


def _keys(tree: Any) -> list[str]:
    return [key for key in tree if isinstance(key, str)] if isinstance(tree, Mapping) else []


def _homes_of_names(model: Decoder) -> dict[str, Home]:
    """The Home of each tensor name in files, including fused tensors of all experts.

    Not those of an EAGLE-3 head, which has other files, with some of the model's names.
    """
    if getattr(model.config.layers[-1].attention, "names", None):
        model = model.without_drafts()
    homes = {
        place.name: Home(place, place.file_shape, offset=place.offset)
        for place in model.array_places(model.config)
    }
    for place in model.linear_places(model.config):
        each = place.joined_maps
        for number, piece in enumerate(_pieces(place, len(place.kernels(model)))):
            inputs, outputs = place.shapes[number]
            is_file = not (isinstance(place, ExpertPlace) and place.is_transposed)
            name = f"{place.names[number]}.weight"
            shape = (outputs, inputs) if is_file else (inputs, outputs)
            homes[name] = Home(place, shape, (dataclasses.replace(piece, is_file=is_file),))
            if place.bias:
                bias = dataclasses.replace(piece, is_bias=True)
                homes[f"{place.names[number]}.bias"] = Home(place, (outputs,), (bias,))
            if isinstance(place, ExpertPlace) and number < each:
                _add_fused(homes, place, number, place.bias)
    return homes


def _add_fused(homes: dict[str, Home], place: ExpertPlace, number: int, has_bias: bool) -> None:
    """Adds the Homes of the fused tensors that contain a map of the first expert."""
    for suffix in ("weight", "bias") if has_bias else ("weight",):
        own = homes[f"{place.names[number]}.{suffix}"]
        whole, half = name_of_all(f"{place.names[number]}.{suffix}")
        before = homes[whole] if half else None
        axis = len(own.shape) - 1 if suffix == "weight" and not own.pieces[0].is_file else 0
        first = before.shape[1 + axis] if before else 0
        shape = [*own.shape]
        shape[axis] += first
        piece = dataclasses.replace(own.pieces[0], experts=None, first=first)
        pieces = (*(before.pieces if before else ()), piece)
        homes[whole] = Home(place, (place.experts, *shape), pieces)


def _homes_of_paths(model: Decoder, named: Mapping[str, Any]) -> dict[str, Home]:
    """The Homes of arrays that are named by the paths of a model with the same layers."""
    arrays = {place.path: place for place in model.array_places(model.config)}
    linears = {place.path: place for place in model.linear_places(model.config)}
    variables = {".".join(map(str, path)): it for path, it in nnx.iter_graph(model)}
    homes: dict[str, Home] = {}
    for name, value in named.items():
        if name in arrays:
            homes[name] = Home(arrays[name], arrays[name].shape)
            continue
        is_packed = isinstance(value, QuantizedTensor)
        home = None if is_packed else _home_of_map(model, linears, name, value)
        variable = variables.get(name)
        if home is not None:
            homes[name] = home
        elif isinstance(variable, nnx.Variable):
            homes[name] = Home(variable, jnp.shape(jax.tree.leaves(variable.get_value())[0]))
    return homes


def _home_of_map(
    model: Decoder, linears: Mapping[str, LinearPlace], name: str, value: Any
) -> Home | None:
    """The home of a plain kernel or bias at a path, such as `layers.0.mlp.down.kernel`."""
    place: LinearPlace | None
    if name in TABLES and name in linears:  # a plain table of the trainer, packed in the model
        place = linears[name]
        return Home(place, place.shapes[0][::-1], tuple(_pieces(place, 1)))
    match = re.fullmatch(r"(.+?)(?:\.parts\.(\d+))?\.(kernel|bias)", name)
    place = linears.get(match[1]) if match else None
    if match is None or place is None:
        return None
    is_bias, of_one = match[3] == "bias", place.joined_maps
    sizes = [outputs for _, outputs in place.shapes[:of_one]]
    pieces = [
        dataclasses.replace(piece, is_bias=is_bias, is_file=False, experts=None, alternates=False)
        for piece in _pieces(place, len(place.kernels(model)))[:of_one]
    ]
    number, shape = int(match[2] or 0), jnp.shape(value)
    if len(sizes) > 1 and (number or shape[-1:] != (sum(sizes),)):
        sizes, pieces = sizes[number : number + 1], pieces[number : number + 1]
    firsts = itertools.accumulate(sizes, initial=0)
    pieces = [
        dataclasses.replace(piece, first=at) for piece, at in zip(pieces, firsts, strict=False)
    ]
    leading = (place.experts,) if isinstance(place, ExpertPlace) else ()
    inputs = () if is_bias else (place.shapes[0][0],)
    return Home(place, (*leading, *inputs, sum(sizes)), tuple(pieces)) if pieces else None


def _pieces(place: LinearPlace, parts: int) -> list[Piece]:
    """For each linear map of a place, as files store them, the Piece of the model that it fills.

    parts: the number of parts that the model has at the place: 1 if its maps are joined.
    """
    each = place.joined_maps
    sizes = [outputs for _, outputs in place.shapes[:each]]
    begins = [0] * each if parts > 1 else [*itertools.accumulate(sizes, initial=0)]
    return [
        Piece(
            number % each if parts > 1 else 0,
            begins[number % each],
            begins[number % each] + sizes[number % each],
            experts=(number // each,) if isinstance(place, ExpertPlace) else None,
            alternates=isinstance(place, ExpertPlace) and place.is_alternating,
        )
        for number in range(len(place.names))
    ]


def _gathered(pieces: Mapping[Piece, Sequence[Any]]) -> dict[Piece, list[Any]]:
    """The pieces, joined if they differ only in the expert, in the order of experts."""
    gathered: dict[Piece, list[tuple[int, Any]]] = {}
    found: dict[Piece, list[Any]] = {}
    for piece, arrays in pieces.items():
        if piece.experts is None:
            found[piece] = [*arrays]
        else:
            alike = dataclasses.replace(piece, experts=None)
            gathered.setdefault(alike, []).append((piece.experts[0], arrays[0]))
    for alike, numbered in gathered.items():
        numbered.sort(key=lambda pair: pair[0])
        experts = tuple(number for number, _ in numbered)
        found[dataclasses.replace(alike, experts=experts)] = [array for _, array in numbered]
    return found


def _is_left_out(name: str, model: Decoder, named: Mapping[str, Any]) -> bool:
    """Whether the model does not need a tensor of the files, such as a tied head."""
    config = model.config
    embedding, head = (name_of(model.names, path) for path in (EMBEDDING, HEAD))
    is_tied = config.tie_word_embeddings and name == head and embedding in named
    return is_tied or name.endswith(IGNORED) or is_spare(name, type(model), config)


def _require(name: str, value: Any, home: Home) -> None:
    """Raises ValueError for an array of another shape or dtype than its home's."""
    if isinstance(home.place, nnx.Variable):
        old = home.place.get_value()
        if isinstance(old, QuantizedTensor) or isinstance(value, QuantizedTensor):
            _require_alike(name, value, old)
            return
    expected = f"expected floating-point numbers of shape {list(home.shape)}"
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise ValueError(f"the tree of weights has {name} = {shown(value)}: {expected}")
    if tuple(value.shape) != home.shape or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"the tree of weights has {name} in {value.dtype} of shape {list(value.shape)}: "
            f"{expected}"
        )


def _require_alike(name: str, value: Any, old: Any) -> None:
    """Raises ValueError for a packed tensor that differs from the old one in more than values."""

    def kind(tensor: Any) -> Any:
        leaves = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tensor)]
        return jax.tree.structure(tensor), leaves

    if type(value) is not type(old) or kind(value) != kind(old):
        raise ValueError(
            f"the tree of weights has {name} = {shown(value)}: expected {old!r}, or the weight "
            "in 16 or 32 bits, which is rounded to that format"
        )
