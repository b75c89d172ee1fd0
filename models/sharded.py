"""A decoder that is divided among devices: one `shard_map` around each step.

Each device has a share of the model: a Decoder of the same family, whose configuration has fewer
heads, channels and token ids (`share.py`). The products after attention and MLP, two in each layer,
and the embedding are all-reduced. All else is local. Every array of the shares, the cache's pages
included, is one global array whose first axis the devices divide.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.kernels import KVFormat
from mpjax.kernels.checks import require_type
from mpjax.kernels.device import default_device
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.plans import conditions as plan_conditions
from mpjax.models.cache_scales import CacheScales
from mpjax.models.decoder import Decoder
from mpjax.models.device_sums import step
from mpjax.models.division import Division, Part
from mpjax.models.expert_shares import ExpertShares
from mpjax.models.gathered import Gathered, bias_shape, on_host_of_cpu, whole_shape
from mpjax.models.layers import Linear
from mpjax.models.low_rank import LowRank
from mpjax.models.parameters import ArrayPlace, ExpertPlace, LinearPlace
from mpjax.models.row_linear import RowLinear
from mpjax.models.share import HeadShares
from mpjax.models.spread_linear import SpreadLinear
from mpjax.models.state import StepContext
from mpjax.models.step_checks import read_tokens
from mpjax.models.symmetry import formats_of_all, with_symmetry
from mpjax.models.window import Window

HeadFunction = Callable[..., tuple[jax.Array, jax.Array]]
PARTS = ("layers", "embedding", "head", "head_bias", "norm", "cache_scales", "per_layer", "streams")
WHOLE = PartitionSpec()  # the spec of arrays that every device has whole


class ShardedDecoder(Decoder):
    """A decoder whose parameters are divided among the devices of a mesh with one axis.

    `of` creates one with uninitialised arrays; `put_array`, `put_linears` and `put_cache_scales`
    take whole parameters and give each device its share. It is called like any decoder, also inside
    `jit`. Logits have a column for each token id, then columns of -inf that pad the vocabulary to a
    multiple of the devices; each device computes a part of the columns.

    config: of the whole model. division: the rules. mesh: the devices.
    share: a Decoder with one device's configuration, whose arrays are the devices' arrays
    concatenated along their first axis.
    """

    def __init__(self, division: Division, mesh: jax.sharding.Mesh) -> None:
        [axis] = mesh.axis_names
        self.config = division.config
        self.axis = None
        self.division, self.mesh = division, mesh
        self.share: Decoder = nnx.eval_shape(lambda: division.decoder(division.local, nnx.Rngs(0)))
        self.share.axis = axis
        heads = HeadShares(self.config.num_heads, self.config.num_kv_heads, division.count)
        for layer, spec in zip(self.share.layers, self.config.layers, strict=True):
            layer.divide_sums(axis, heads, spec)

    @classmethod
    def of(cls, division: Division, mesh: jax.sharding.Mesh) -> ShardedDecoder:
        """A divided decoder of the division's family, with uninitialised arrays."""
        return _family(division.decoder)(division, mesh)

    @property
    def family_name(self) -> str:
        """The name of the family's class."""
        return self.division.decoder.__name__

    def __getattr__(self, name: str) -> Any:
        """An attribute of the share, so that paths of parameters lead into it."""
        if name in PARTS:
            return getattr(self.share, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def shards(self) -> int:
        """The number of devices among which the model is divided, without copies."""
        return self.division.count

    def replicated(self, mesh: jax.sharding.Mesh) -> ShardedDecoder:
        """The decoder with a copy on each group of devices of a mesh with more axes.

        Inside `jax.shard_map` over the other axes alone (`axis_names`), each copy computes its own
        rows, divided among the devices of its group.

        mesh: has this mesh's axis, of the same size. Its axis types are Auto.

        Raises ValueError for another mesh.
        """
        require_type("replicated: mesh", mesh, jax.sharding.Mesh)
        axis, auto = str(self.share.axis), jax.sharding.AxisType.Auto
        if mesh.shape.get(axis) != self.shards or any(kind != auto for kind in mesh.axis_types):
            raise ValueError(
                f"replicated: mesh has the axes {dict(mesh.shape)} of axis_types {mesh.axis_types}:"
                f" expected {axis!r} of {self.shards} devices, and others, all of the type Auto"
            )
        graph, state = nnx.split(self)
        model = nnx.merge(graph, jax.device_put(state, NamedSharding(mesh, self._divided)))
        model.mesh = mesh
        return model

    def limit_positions(self, positions: int) -> None:
        """Sets the most tokens that a sequence may have, also in the share."""
        super().limit_positions(positions)
        self.share.limit_positions(positions)

    def _drop_drafts(self, shards: int = 1) -> None:
        """See Drafts."""
        self.config, self.division = self.config.without_drafts(), self.division.without_drafts()
        self.share._drop_drafts(self.shards)

    def windows(self, place: LinearPlace) -> list[Window] | None:
        """The channels that this process needs of each map of a place in the files; None: all."""
        alternates = isinstance(place, ExpertPlace) and place.is_alternating
        is_cut = not alternates or self.division.is_spread(place)
        if len(self._own_numbers) == self.shards or not is_cut:
            return None
        return self.division.windows(place, self._own_numbers)

    def rows(self, place: ArrayPlace) -> Window | None:
        """The rows of a table that this process needs; None: all."""
        if len(self._own_numbers) == self.shards:
            return None
        return self.division.rows(place, self._own_numbers)

    def put_array(self, place: ArrayPlace, array: Any, rows: Window | None = None) -> None:
        """Gives each device its share of an array. rows: the window that `array` is of a table."""
        array, begin = on_host_of_cpu(array), rows.begin if rows else 0
        cut = functools.partial(self.division.cut_array, place, array, begin=begin)
        place.assign(self.share, self._distribute(cut))

    def put_linears(
        self, place: LinearPlace, parts: Sequence[Linear], windows: Sequence[Window] | None = None
    ) -> None:
        """Gives each device its share of linear maps. windows: as in `Decoder.put_linears`."""
        formats = [linear.format for linear in parts]
        if windows is not None:
            formats = formats_of_all(formats)
        held = [
            on_host_of_cpu(Part(with_symmetry(part.kernel, format), part.bias))
            for part, format in zip(map(Part.of, parts), formats, strict=True)
        ]
        cut = functools.partial(self.division.cut_linears, place, held, windows=windows)
        self.assign_shares(place, self._distribute(cut), formats)

    def put_experts(
        self,
        place: ExpertPlace,
        stacks: Iterable[Linear],
        windows: Sequence[Window] | None = None,
    ) -> None:
        """Gives each device its share of all experts, a few experts at a time.

        stacks: the place's experts in order, some in each; with `windows`, only these parts of all.

        Raises ValueError if the experts have different formats.
        """
        shares = ExpertShares(self.division, place, self._own_devices, windows)
        for linear in stacks:
            shares.put(on_host_of_cpu(Part.of(linear)))
            del linear  # frees it before the next stack is loaded
        [format] = [shares.format] if windows is None else formats_of_all([shares.format])
        found = self._distribute(lambda number: shares.part(number, format))
        self.assign_shares(place, [found], [format])

    def assign_shares(
        self, place: LinearPlace, shares: Sequence[Part], formats: Sequence[WeightFormat | None]
    ) -> None:
        """Replaces the linear maps at a place by their shares on all devices.

        formats: the weight formats of the undivided kernels.
        """
        axis = str(self.share.axis)
        if self.division.is_spread(place):
            place.assign(self.share, [SpreadLinear(p.kernel, p.bias, axis) for p in shares])
            return
        if not self.division.is_divided_along_inputs(place):
            place.assign(self.share, [Linear(part.kernel, part.bias) for part in shares])
            return
        place.assign(
            self.share,
            [
                RowLinear(part.kernel, part.bias, axis, format)
                for part, format in zip(shares, formats, strict=True)
            ],
        )

    def place_change(self, path: str, change: LowRank) -> LowRank:
        """An adapter's change as NumPy arrays, divided among the devices; see `Decoder`."""
        cut = functools.partial(self.division.cut_change, path, change, axis=str(self.share.axis))
        dtype = self.config.dtype
        found: LowRank = self._distribute(
            lambda number: cut(number=number).map(lambda array: np.asarray(array, dtype))
        )
        return found

    def put_cache_scales(self, scales: Any) -> None:
        """Gives each device the scales of its heads."""
        cut = functools.partial(self.division.cut_cache_scales, scales)
        self.share.cache_scales = CacheScales(self._distribute(cut))

    def whole(self, *, shapes_only: bool = False) -> Decoder:
        """A Decoder of the family whose arrays are fetched from the devices when they are needed.

        Its arrays have a shape and a dtype, and `np.asarray` joins the shares of an array. They are
        not JAX arrays: such a model can be saved, but not called.

        shapes_only: whether no array will be fetched.

        Raises ValueError if other processes have some of the shares that will be fetched.
        """
        if jax.process_count() > 1 and not shapes_only:
            raise ValueError(
                "the model's shares are on devices of several processes: save it with "
                "mpjax.save(..., format='orbax'), or from one process that has all devices"
            )
        division = self.division
        model = nnx.eval_shape(lambda: division.decoder(self.config, nnx.Rngs(0)))
        for place in self.array_places(self.config):
            place.assign(model, self._whole_array(place))
        for linear_place in self.linear_places(self.config):
            linear_place.assign(model, self._whole_linears(linear_place))
        if self.cache_scales is not None:
            scales = self.cache_scales.get_value()
            heads = *scales.shape[1:2], self.config.num_kv_heads, *scales.shape[3:]
            shape = jax.ShapeDtypeStruct((self.config.num_layers, *heads), scales.dtype)
            join = functools.partial(self._join, scales, division.join_cache_scales)
            model.cache_scales = CacheScales(Gathered(shape, join))
        return model

    def _whole_array(self, place: ArrayPlace) -> Gathered:
        array = place.read(self.share)
        join = functools.partial(self.division.join_array, place)
        shape = jax.ShapeDtypeStruct(place.shape, array.dtype)
        return Gathered(shape, functools.partial(self._join, array, join))

    def _whole_linears(self, place: LinearPlace) -> list[Linear]:
        parts = place.parts(self.share)
        formats = [part.format for part in parts]
        shares = [Part.of(part) for part in parts]

        def join(pieces: Sequence[Any]) -> list[Part]:
            return self.division.join_linears(place, pieces, formats)

        shapes = [
            Part(whole_shape(part.kernel, shape, format), bias_shape(part.bias, shape))
            for part, shape, format in zip(
                shares, place.part_shapes(len(parts)), formats, strict=True
            )
        ]
        leaves, tree = jax.tree.flatten(shapes)

        def one(index: int) -> Any:
            return jax.tree.leaves(self._join(shares, join))[index]

        lazy = [Gathered(leaf, functools.partial(one, index)) for index, leaf in enumerate(leaves)]
        return [Linear(part.kernel, part.bias) for part in jax.tree.unflatten(tree, lazy)]

    def _join(self, shares: Any, join: Callable[[Sequence[Any]], Any]) -> Any:
        """Joins a tree of arrays, a result of `_distribute`, on the default device."""
        device = default_device()
        numbers = {device: number for number, device in enumerate(self._devices)}

        def piece(array: jax.Array, number: int) -> Any:
            [data] = [s.data for s in array.addressable_shards if numbers[s.device] == number]
            return np.asarray(data) if device.platform == "cpu" else jax.device_put(data, device)

        return join(
            [
                jax.tree.map(functools.partial(piece, number=number), shares)
                for number in range(self.shards)
            ]
        )

    @property
    def _devices(self) -> list[jax.Device]:
        assert self.mesh is not None
        return list(self.mesh.devices.flat)

    @property
    def _own_devices(self) -> dict[int, jax.Device]:
        return {number: self._devices[number] for number in self._own_numbers}

    @functools.cached_property
    def _own_numbers(self) -> list[int]:
        """The indices of the shares on this process's devices."""
        here = jax.process_index()
        return [
            number for number, device in enumerate(self._devices) if device.process_index == here
        ]

    def _distribute(self, cut: Callable[[int], Any]) -> Any:
        """One tree of global arrays with the shares `cut(index)` of all devices."""
        assert self.mesh is not None
        sharding = NamedSharding(self.mesh, PartitionSpec(*self.mesh.axis_names))
        shares = [jax.device_put(cut(number), its) for number, its in self._own_devices.items()]

        def joined(*pieces: jax.Array) -> jax.Array:
            first, *others = pieces[0].shape
            shape = (first * self.shards, *others)
            return jax.make_array_from_single_device_arrays(shape, sharding, list(pieces))

        return jax.tree.map(joined, *shares)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """The residual stream before the first layer, whole on each device."""
        tokens = read_tokens(self.config, tokens)
        found: jax.Array = self._on_shares(Decoder.embed, (WHOLE,), WHOLE, tokens)
        return found

    def forward(
        self,
        tokens: jax.Array,
        context: StepContext,
        states: tuple[Any, ...],
        *,
        every_position: bool,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """All layers and the head; see `Decoder`, and `_columns` for the logits."""
        run = _every_position if every_position else _last_position
        given = self._columns(max(tokens.ndim + every_position, 2)), self._divided
        found: tuple[jax.Array, tuple[Any, ...]] = self._on_shares(
            run, (WHOLE, WHOLE, self._divided), given, tokens, context, states
        )
        return found

    def _drafted(
        self, tokens: jax.Array, context: StepContext, state: Any, hidden: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """The results of `draft`; see `Drafts`, and `_columns` for the logits."""
        taken = WHOLE, WHOLE, self._divided, WHOLE
        given = self._columns(2), WHOLE, self._divided
        found: tuple[jax.Array, jax.Array, Any] = self._on_shares(
            Decoder._drafted, taken, given, tokens, context, state, hidden
        )
        return found

    def create_states(
        self,
        pages: Sequence[int],
        sequences: int,
        format: KVFormat | str,
        page_size: int = 128,
        snapshots: int = 0,
    ) -> tuple[Any, ...]:
        """The empty state of each layer, divided by heads among the devices; see `Decoder`."""
        room = pages, sequences, KVFormat.of(format), page_size, snapshots

        def create(share: Decoder) -> tuple[Any, ...]:
            return share.create_states(*room)

        found: tuple[Any, ...] = jax.jit(lambda: self._map(create, (), self._divided))()
        return found

    def clear_states(
        self, states: tuple[Any, ...], pages: Sequence[jax.Array], slots: jax.Array
    ) -> tuple[Any, ...]:
        """The states with zeros in some pages and slots; see `Decoder`."""
        found: tuple[Any, ...] = self._map(
            Decoder.clear_states,
            (self._divided, WHOLE, WHOLE),
            self._divided,
            states,
            tuple(pages),
            slots,
        )
        return found

    def settle_states(self, states: tuple[Any, ...], context: StepContext) -> tuple[Any, ...]:
        """The states after a tentative step; see `Decoder`."""
        given, taken, both = self._divided, (self._divided, WHOLE), (states, context)
        found: tuple[Any, ...] = self._on_shares(Decoder.settle_states, taken, given, *both)
        return found

    def copy_states(
        self, states: tuple[Any, ...], source: jax.Array, target: jax.Array
    ) -> tuple[Any, ...]:
        """The states with a sequence's fixed-size states copied to another index; see `Decoder`."""
        taken = self._divided, WHOLE, WHOLE
        arguments = states, source, target
        found: tuple[Any, ...] = self._map(Decoder.copy_states, taken, self._divided, *arguments)
        return found

    def pack_table(self, path: str, format: WeightFormat | str) -> None:
        """Raises ValueError: a table is packed before it is divided."""
        raise ValueError(
            "a table of a model that is divided among devices can't be packed: load the model with "
            "a precision that packs it, such as one with H8"
        )

    def map_heads(self, function: HeadFunction, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Applies a function to each device's share, and joins the results for all KV heads.

        function: takes a share and the arrays; returns an array [layers, 2, KV heads, ...] and
        whether it is valid, a bool scalar. Returns the array of all KV heads, and whether all are
        valid. Can be called inside `jit`.
        """
        axis = str(self.share.axis)

        def run(share: Decoder, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            found, is_well = function(share, *arrays)
            return found, jax.lax.pmin(is_well.astype(jnp.int32), axis) == 1

        columns = PartitionSpec(None, None, axis)
        found, is_well = self._map(run, (WHOLE,), (columns, WHOLE), arrays)
        return self.division.join_cache_scales(jnp.split(found, self.shards, axis=2)), is_well

    @property
    def _divided(self) -> PartitionSpec:
        """The PartitionSpec of arrays whose first axis is divided among the devices."""
        return PartitionSpec(self.share.axis)

    def _columns(self, axes: int) -> PartitionSpec:
        """How logits are divided: each device has some columns, or in deterministic mode all."""
        return WHOLE if self.deterministic else PartitionSpec(*[None] * (axes - 1), *self._divided)

    def _map(
        self,
        function: Callable[..., Any],
        taken: tuple[PartitionSpec, ...],
        given: Any,
        *arrays: Any,
    ) -> Any:
        """Calls a function with each device's share and arrays, inside `shard_map`.

        taken, given: the PartitionSpecs of the arrays, and of the function's results.
        """
        axes = jax.sharding.get_abstract_mesh().manual_axes
        run = jax.shard_map(
            function,
            mesh=None if axes else self.mesh,  # the caller's, inside its shard_map
            in_specs=(self._divided, *taken),
            out_specs=given,
            axis_names={str(self.share.axis)},
            check_vma=False,
        )
        return run(self.share, *arrays)

    def _on_shares(
        self,
        function: Callable[..., Any],
        taken: tuple[PartitionSpec, ...],
        given: Any,
        *arrays: Any,
    ) -> Any:
        """As `_map`, but calls with equal shapes are traced once."""
        return _on_shares(plan_conditions(), function, taken, given, self, *arrays)

    def share_shapes(self) -> Decoder:
        """The share of one device, with ShapeDtypeStructs instead of arrays."""

        def shape(array: Any) -> jax.ShapeDtypeStruct:
            first, *others = array.shape
            return jax.ShapeDtypeStruct((first // self.shards, *others), array.dtype)

        return jax.tree.map(shape, self.share)


@functools.cache
def _family(decoder: type[Decoder]) -> type[ShardedDecoder]:
    """The class of divided decoders of a family, which has the family's tensor names."""
    return types.new_class(f"Sharded{decoder.__name__}", (ShardedDecoder, decoder))


def _every_position(*arguments: Any) -> Any:
    return step(*arguments, every_position=True)


def _last_position(*arguments: Any) -> Any:
    return step(*arguments, every_position=False)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _on_shares(
    plans: Hashable,
    function: Callable[..., Any],
    taken: tuple[PartitionSpec, ...],
    given: Any,
    model: ShardedDecoder,
    *arrays: Any,
) -> Any:
    """Calls `ShardedDecoder._map` under `jit`, which traces calls with equal shapes once.

    plans: the conditions that plans depend on.
    """
    return model._map(function, taken, given, *arrays)
