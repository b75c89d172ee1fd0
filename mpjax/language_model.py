"""LanguageModel: a decoder with its tokenizer and the format of its KV cache."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import mpjax
from mpjax.activation_widths import count_blocks, find_share
from mpjax.adapters.collection import Adapter, Adapters
from mpjax.kernels import KVFormat, QuantizedTensor, WeightFormat, device
from mpjax.kernels.checks import require_type, shown
from mpjax.kernels.kv_cache.layout import read_page_size
from mpjax.memory import GIGABYTE, free_bytes
from mpjax.models import Decoder, DecoderConfig, Linear, LinearPlace
from mpjax.models.config_keys import INSTEAD
from mpjax.models.decoded import decoded, decoded_bytes
from mpjax.models.deterministic import with_determinism
from mpjax.models.low_rank import attach
from mpjax.precision import Precision, describe_weights
from mpjax.sampling.generation_config import to_keys
from mpjax.sampling.settings import Sampling
from mpjax.text.tokenizer import Tokenizer
from mpjax.text.tokenizer_files import explain_missing

MEGABYTE = 1e6
DECODED_SHARE = 0.5  # the most of the free memory that decoded weights may take on a CPU
ON_ONE_DEVICE = "load it on one device; a model that mpjax.save wrote then loads onto any number"
PARAMETER_BITS = 32  # of a parameter word, for one or several groups


@dataclasses.dataclass(eq=False)
class Updates:
    """How often a model's weights were written over (`mpjax.update`).

    version: of its weights: 0 as they were loaded. asleep: the shardings that the arrays had before
    they went to the host; None for weights on the device.
    """

    version: int = 0
    asleep: list[Any] | None = None

    def next(self, version: int | None = None) -> int:
        """The version of the next weights.

        Raises ValueError for one that is not above this, and for weights on the host.
        """
        if self.asleep is not None:
            raise ValueError("the model's weights are on the host: call the engine's wake first")
        if version is None:
            return self.version + 1
        if type(version) is not int or not self.version < version < 1 << 63:
            raise ValueError(
                f"version is {shown(version)}: expected an integer above {self.version}, the "
                "version of the model's weights"
            )
        return version


@dataclasses.dataclass(frozen=True, repr=False)
class LanguageModel:
    """A decoder with its tokenizer, and the format and page size of its KV cache.

    tokenizer: None for a checkpoint without tokenizer.json. source: the folder of the checkpoint.
    page_size: tokens in a page of the cache: 16, 32, 64, 128 or 256.
    sampling: the default sampling settings, from generation_config.json or the GGUF file; None is
        greedy. A mapping as the argument `sampling` overrides some fields, and a Sampling replaces
        it.
    adapters: the loaded adapters, which requests choose by name; see `add_adapter`.
    updates: of the weights; `version` is the number that each new token of an engine carries.

    Raises ValueError for other page sizes, and for one that the KV format doesn't support.
    """

    model: Decoder
    tokenizer: Tokenizer | None
    kv_format: KVFormat
    source: Path
    page_size: int = 128
    sampling: Sampling | None = None
    adapters: Adapters = dataclasses.field(default_factory=Adapters, compare=False)
    updates: Updates = dataclasses.field(default_factory=Updates, compare=False)
    _decoded: dict[str, Any] = dataclasses.field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "page_size", read_page_size(self.page_size, self.kv_format))

    def __repr__(self) -> str:
        """A one-line description; `print(lm.model)` shows the modules."""
        return (
            f"LanguageModel({self.model.family_name}, {self.precision}, "
            f"{self.nbytes / MEGABYTE:,.1f} MB, from {self.source})"
        )

    @property
    def config(self) -> DecoderConfig:
        """The decoder's configuration."""
        return self.model.config

    @property
    def version(self) -> int:
        """The version of the weights: 0 as they were loaded; see `mpjax.update`."""
        return self.updates.version

    @property
    def for_device(self) -> Decoder:
        """The model as programs on this device use it.

        On a CPU it is a cached copy with matrices decoded to float32, if that takes no more than
        half of the available memory; otherwise each program decodes them, with a warning. The copy
        is remade if an array of `model` is replaced. On a GPU, and for a model divided among
        devices, it is `model` itself.
        """
        if device.on_gpu() or self.model.mesh is not None:
            return self.model
        arrays = jax.tree.leaves(nnx.state(self.model))
        kept = self._decoded.get("arrays", [])
        if len(kept) != len(arrays) or any(a is not b for a, b in zip(kept, arrays, strict=True)):
            self._decoded.clear()
            self._decoded.update(arrays=arrays, model=self._decode())
        found: Decoder = self._decoded["model"]
        return found

    @property
    def adapted(self) -> Decoder:
        """The model with all loaded adapters, which `generate_tokens` chooses by index."""
        return attach(self.for_device, self.adapters.stacks)

    def add_adapter(
        self, name: str, adapter: str | os.PathLike[str] | Adapter, *, replace: bool = False
    ) -> None:
        """Loads an adapter, which requests can then choose by name; also while engines run.

        adapter: a PEFT or MLX adapter folder, or an Adapter. replace: whether to replace a loaded
            adapter with this name.

        If it fits into the existing stacks, no program is recompiled; see `reserve_adapters`.

        Raises CheckpointError for a folder that is unreadable, unsupported, or doesn't fit the
        model, and ValueError for a name that is taken.
        """
        if not isinstance(adapter, Adapter):
            adapter = mpjax.read_adapter(adapter, self.model)
        self.adapters.add(self.model, {name: adapter}, replace=replace)

    def remove_adapter(self, name: str) -> None:
        """Unloads an adapter: its running requests continue, and new ones can't choose it.

        Raises ValueError, which lists the names, for an unknown one.
        """
        self.adapters.remove(name)

    def reserve_adapters(self, places: int, rank: int) -> None:
        """Reserves stacks for `places` adapters of up to `rank`, allocated with the first adapter.

        Adapters that fit don't change shapes, so no program is recompiled. Raises ValueError for
        numbers below 1.
        """
        self.adapters.reserve(places, rank)

    def with_adapter(self, name: str) -> LanguageModel:
        """The model with one adapter for every row, for functions without `adapter`.

        It shares the base's arrays, and has no other adapters. Raises ValueError, which lists the
        names, for an unknown name.
        """
        changes = self.adapters[name].adapter.changes
        own = {path: self.model.place_change(path, change) for path, change in changes.items()}
        return self.with_model(attach(self.model, own))

    def with_model(self, model: Decoder, **changes: Any) -> LanguageModel:
        """The language model with another decoder, no adapters, and updates of its own.

        changes: to other fields.
        """
        return dataclasses.replace(
            self, model=model, adapters=Adapters(), updates=Updates(), **changes
        )

    def in_mode(self, *, deterministic: bool) -> LanguageModel:
        """The language model in deterministic mode, or out of it; arrays are shared.

        Engines, `generate_tokens` and `token_logprobs` have the mode of the model. Other adapters,
        and a count of updates of its own, belong to a model in another mode.

        Raises UnsupportedError, which names the part, for a model or a KV format that can't have
        the mode.
        """
        require_type("deterministic", deterministic, bool)
        if (self.model.deterministic is not None) == deterministic:
            return self
        return self.with_model(
            with_determinism(self.model, self.kv_format if deterministic else None)
        )

    def sleep(self) -> None:
        """Moves the weights to the memory of the host; nothing but `wake` may follow."""
        state = nnx.state(self.model)
        self.updates.asleep = [array.sharding for array in jax.tree.leaves(state)]
        self._decoded.clear()

        def moved(array: jax.Array) -> jax.Array:
            return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))

        found = jax.block_until_ready(jax.tree.map(moved, state))
        # The copies back are programs, too: one of each shape is compiled and run now.
        shapes = zip(jax.tree.leaves(found), self.updates.asleep, strict=True)
        for one, sharding in {(x.shape, x.dtype): (x, its) for x, its in shapes}.values():
            jax.device_put(one, sharding)
        nnx.update(self.model, found)

    def wake(self) -> None:
        """Moves the weights back to the device, where `sleep` has moved them away."""
        if self.updates.asleep is not None:
            state = nnx.state(self.model)
            leaves, structure = jax.tree.flatten(state)
            pairs = zip(leaves, self.updates.asleep, strict=True)
            moved = [jax.device_put(*pair) for pair in pairs]  # one program each
            nnx.update(self.model, jax.tree.unflatten(structure, moved))
            self.updates.asleep = None

    def _decode(self) -> Decoder:
        needed, free = decoded_bytes(self.model), free_bytes()
        if not needed:
            return self.model
        if free is None or needed <= DECODED_SHARE * free:
            return decoded(self.model)
        warnings.warn(
            f"the weights would take {needed / GIGABYTE:.1f} GB in float32, more than half of the "
            f"{free / GIGABYTE:.1f} GB that are free: they stay packed, and each program decodes "
            "them, which is slow on a CPU",
            stacklevel=3,
        )
        return self.model

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ValueError, with a remedy, for a model without one."""
        if self.tokenizer is None:
            raise ValueError(
                f"{explain_missing(self.source)} Without it there is no text: generate_tokens "
                "takes token ids."
            )
        return self.tokenizer

    def require_predictions(self) -> None:
        """Raises ValueError for a classifier, and for a model without a head."""
        if not self.config.predicts:
            raise ValueError(f"{self.source} predicts no tokens: {INSTEAD}")

    @property
    def usual_stop_ids(self) -> tuple[int, ...]:
        """The default stop ids: the tokenizer's, or without one config.json's."""
        usual = (self.tokenizer and self.tokenizer.stop_ids) or self.config.stop_ids
        # A tokenizer may have more tokens than the model's vocabulary.
        return tuple(i for i in usual if i < self.config.vocab_size)

    def require_one_device(self, what: str, remedy: str = ON_ONE_DEVICE) -> None:
        """Raises ValueError for a model divided among devices. what: a gerund for the message."""
        if self.devices > 1:
            raise ValueError(
                f"{what} a model that is divided among {self.devices} devices is not possible: "
                f"{remedy}"
            )

    def without_drafter(self) -> LanguageModel:
        """The language model without an EAGLE-3 head, which has files of its own."""
        last = self.config.layers[-1].attention
        if last is None or last.kind != "eagle":
            return self
        return self.with_model(self.model.without_drafts())

    def require_no_head(self, what: str) -> None:
        """Raises ValueError for a model with a head that drafts. what: a gerund for the message."""
        if self.config.depth < self.config.num_layers:
            raise ValueError(
                f"{what} a model with its own head is not possible: load it without mtp=True and "
                "drafter"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in device memory."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(self.model)))

    @property
    def devices(self) -> int:
        """Number of devices among which the model is divided."""
        return self.model.shards

    @property
    def processes(self) -> int:
        """Number of processes among whose devices the model is divided."""
        return jax.process_count() if self.devices > 1 else 1

    @property
    def bits_per_weight(self) -> float:
        """Mean bits per weight of the layers' linear maps, including scales and zero points.

        Padding of small weights isn't counted, unlike in `nbytes`.
        """
        bits = weights = 0
        for place in _of_layers(self.model.linear_places(self.config)):
            parts = place.parts(self.model)
            for part, shape in zip(parts, place.part_shapes(len(parts)), strict=True):
                weights += math.prod(shape)
                if part.format is not None:
                    bits += stored_bits(shape, part.format)
                else:
                    bits += 8 * math.prod(shape) * part.kernel.get_value().dtype.itemsize
        return bits / weights

    @property
    def num_parameters(self) -> int:
        """Number of the model's weights; a packed weight counts as one, regardless of its bits."""
        total = sum(math.prod(place.shape) for place in self.model.array_places(self.config))
        for place in self.model.linear_places(self.config):
            shapes = place.part_shapes(len(place.kernels(self.model)))
            total += sum(math.prod(shape) for shape in shapes)
            total += sum(shape[1] for shape in place.shapes if place.bias)
        return total

    @property
    def precision(self) -> str:
        """The model's precision, such as `W4A16KV8`, or `W16+W4A16KV8` if linear maps differ.

        It is derived from the weights. `load(path, precision=...)` accepts it for the model's
        checkpoint.
        """
        return str(find_precision(self.model, self.kv_format))

    def summary(self) -> dict[str, Any]:
        """Facts about the model in JSON's types, as `mpjax info --json` prints them.

        `linear_maps` has, for each path in a layer (such as `mlp.down`), the number of layers with
        each weight format. `tables` has the bytes and the format of the embedding and, unless it is
        tied to the embedding, of the head. `eight_bit_blocks` is the number of 8-bit activation
        blocks, and of all blocks, in W4Ax, and otherwise None. `hadamard_block` is the block size
        of the Hadamard transform before down projections, or None. `sampling` has the keys of
        generation_config.json, or is None. `answers` is "tokens", "embeddings" of a model without a
        head, or "scores" of a classifier, and `labels` the number of these scores, or None.
        """
        config, places = self.config, self.model.linear_places(self.config)
        counts: dict[str, dict[str, int]] = {}
        for place in _of_layers(places):
            count = counts.setdefault(place.path.split(".", 2)[2], {})
            formats = " | ".join(_formats(self.model, place))
            count[formats] = count.get(formats, 0) + 1
        kernels = [kernel for place in places for kernel in place.kernels(self.model)]
        packed = sum(kernel.nbytes for kernel in kernels if isinstance(kernel, QuantizedTensor))
        return {
            "model": self.model.family_name,
            "answers": "tokens" if config.predicts else "scores" if config.labels else "embeddings",
            "labels": config.labels,
            "source": str(self.source),
            "precision": self.precision,
            "num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "max_position_embeddings": config.max_position_embeddings,
            "parameters": self.num_parameters,
            "packed_bytes": packed,
            "other_bytes": self.nbytes - packed,
            "dtype": config.dtype,
            "cache_scales": self._cache_scales(),
            "linear_maps": counts,
            "eight_bit_blocks": count_blocks(self.model),
            "hadamard_block": max((it for it in config.hadamard_blocks if it), default=None),
            "tables": {path: self._table(path) for path in config.tables},
            "sampling": None if self.sampling is None else to_keys(self.sampling),
        }

    def describe(self) -> list[tuple[str, str]]:
        """The summary as (label, text) pairs, in the order of `mpjax info`."""
        found = self.summary()
        scales = {
            None: "none",
            "heads": "for each head, for KVfp8",
            "channels": "for each channel, for KV8s",
        }
        answers = {
            "scores": f"{found['labels']} scores of a text, with mpjax.score",
            "embeddings": "embeddings of texts, with mpjax.embed",
        }
        rows = [
            ("model", f"{found['model']} from {found['source']}"),
            *([] if self.config.predicts else [("answers", answers[found["answers"]])]),
            ("precision", found["precision"]),
            ("layers", str(found["num_layers"])),
            ("hidden size", str(found["hidden_size"])),
            ("heads", f"{found['num_heads']}, {found['num_kv_heads']} for keys and values"),
            ("longest context", str(found["max_position_embeddings"])),
            ("parameters", f"{found['parameters'] / 1e6:,.1f} million"),
            ("packed weights", f"{found['packed_bytes'] / MEGABYTE:,.1f} MB"),
            ("other weights", f"{found['other_bytes'] / MEGABYTE:,.1f} MB in {found['dtype']}"),
            ("cache scales", scales[found["cache_scales"]]),
            ("sampling", str(self.sampling or "the files say nothing, and so greedy")),
        ]
        if (blocks := found["eight_bit_blocks"]) is not None:
            share = f"{blocks.wide} of {blocks.total} blocks, {blocks.wide / blocks.total:.1%}"
            rows.append(("activations in 8 bits", f"{share}; the others in 4"))
        if (block := found["hadamard_block"]) is not None:
            rows.append(("before down", f"Hadamard's transform of blocks of {block} channels"))
        for path, table in found["tables"].items():
            is_tied = self.config.predicts and len(found["tables"]) == 1
            tied = ", and the head is tied to it" if is_tied else ""
            rows.append((path, f"{table['format']}, {table['bytes'] / MEGABYTE:,.1f} MB{tied}"))
        for kind, count in found["linear_maps"].items():
            text = ", ".join(
                f"{name} in {layers} layer{'s' if layers > 1 else ''}"
                for name, layers in count.items()
            )
            rows.append((kind, text))
        return rows

    def _table(self, path: str) -> dict[str, Any]:
        table = getattr(self.model, path)
        value = (table.kernel if isinstance(table, Linear) else table).get_value()
        format = value.format if isinstance(value, QuantizedTensor) else None
        return {"format": _describe(format, value), "bytes": value.nbytes}

    def _cache_scales(self) -> str | None:
        if self.model.cache_scales is None:
            return None
        return "heads" if self.model.cache_scales.get_value().ndim == 3 else "channels"


def stored_bits(shape: tuple[int, ...], format: WeightFormat) -> int:
    """The bits of a weight [..., K, N] with scales and zero points, without padding."""
    count, channels = math.prod(shape), shape[-2]
    if not format.is_packed:
        return 16 * count
    groups = count // channels * format.groups(channels)
    return count * format.bits + PARAMETER_BITS * groups // format.groups_of_word


def find_precision(model: Decoder, kv_format: KVFormat) -> Precision:
    """The precision of a model's weights, with the given KV format."""
    bits = jnp.dtype(model.config.dtype).itemsize * 8
    found = Precision.mixed(weight_formats(model), kv_format, bits)
    found = dataclasses.replace(found, wide_blocks=find_share(model))
    return found.with_tables(packed_tables(model))


def weight_formats(model: Decoder) -> set[WeightFormat]:
    """Weight formats of the layers' linear maps; unpacked kernels count as bfloat16."""
    return {
        part.format or WeightFormat("bfloat16")
        for place in _of_layers(model.linear_places(model.config))
        for part in place.parts(model)
    }


def packed_tables(model: Decoder) -> dict[str, WeightFormat]:
    """The formats of packed tables, by `head` and `embedding`; a tied table is listed as both."""
    found = {
        place.path: kernel.format
        for place in model.linear_places(model.config)
        for kernel in place.kernels(model)
        if place.is_table and isinstance(kernel, QuantizedTensor)
    }
    if model.config.tie_word_embeddings and "embedding" in found:
        found["head"] = found["embedding"]
    return found


def _of_layers(places: Iterable[LinearPlace]) -> list[LinearPlace]:
    return [place for place in places if not place.is_table]


def _formats(model: Decoder, place: LinearPlace) -> list[str]:
    """The W part of the precision, such as `W4`, of each part of a linear map."""
    return [_describe(part.format, part.kernel.get_value()) for part in place.parts(model)]


def _describe(format: WeightFormat | None, kernel: Any) -> str:
    return f"W{kernel.dtype.itemsize * 8}" if format is None else describe_weights(format)
