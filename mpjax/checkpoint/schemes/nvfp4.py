"""Reads NVFP4 checkpoints of compressed-tensors and ModelOpt: e2m1 in groups of 16.

With K input and N output channels, a module has codes uint8 [N, K / 2] with the even channel in the
low nibble, scales e4m3 [N, K / 16], and a float32 global scale. compressed-tensors names them
`weight_packed`, `weight_scale` and `weight_global_scale`, and divides: w = e2m1 · (scale / global).
ModelOpt names them `weight`, `weight_scale` and `weight_scale_2`, and multiplies. Weights are
dequantised and rounded; activations stay in 16 bits, whatever the checkpoint says. Source:
compressed-tensors, compressors/nvfp4; TensorRT Model Optimizer,
torch/quantization/qtensor/nvfp4_tensor.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.checkpoint.schemes import checks, compressed_tensors, modelopt
from mpjax.checkpoint.schemes.compressed_tensors import METHOD, NVFP4
from mpjax.checkpoint.schemes.rounded import RoundedReader, describe_rounding
from mpjax.checkpoint.schemes.scheme import Scheme
from mpjax.checkpoint.schemes.tensors import Shape, Specs, Tensors
from mpjax.errors import CheckpointError
from mpjax.kernels.codes.float4 import E2M1

SOURCE = "quantization_config of an NVFP4 checkpoint"
GROUP = 16
# Method → names of codes, scales and the global scale.
NAMES = {
    METHOD: ("weight_packed", "weight_scale", "weight_global_scale"),
    modelopt.METHOD: ("weight", "weight_scale", "weight_scale_2"),
}


@dataclasses.dataclass(frozen=True)
class NVFP4Reader(RoundedReader):
    """NVFP4 weights, for 16-bit activations.

    method: `compressed-tensors` or `modelopt`, which name the tensors differently.
    """

    suffixes: ClassVar[tuple[str, ...]] = tuple(dict.fromkeys(sum(NAMES.values(), ())))
    on_host: ClassVar[tuple[str, ...]] = tuple(
        dict.fromkeys(suffix for names in NAMES.values() for suffix in names[1:])
    )

    method: str

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module has a global scale."""
        return any(names[-1] in specs for names in NAMES.values())

    def check(self, specs: Specs, name: str, shape: Shape | None = None) -> Shape:
        """Checks a module's tensors by shape and dtype and returns its (K, N)."""
        codes, scales, global_scale = NAMES[self.method]
        outputs, halves = (*getattr(specs.get(codes), "shape", ()), 0, 0)[:2]
        checks.check_weight_shape(name, (2 * halves, outputs), shape, GROUP)
        one: tuple[int, ...] = (1,) if self.method == METHOD else ()
        expected = {
            codes: ((outputs, halves), ("uint8",)),
            scales: ((outputs, 2 * halves // GROUP), ("float8_e4m3fn",)),
            global_scale: (one, ("float32",)),
        }
        checks.check_tensors(name, specs, expected)
        return 2 * halves, outputs

    def dequantize(self, tensors: Tensors, name: str, shape: Shape | None = None) -> jax.Array:
        """The weight float32 [K, N]; raises CheckpointError as `check` does."""
        self.check(tensors, name, shape)
        codes, scales, global_scale = (tensors[suffix] for suffix in NAMES[self.method])
        steps: np.ndarray = np.asarray(scales).astype(np.float32)
        whole = np.asarray(global_scale)
        with np.errstate(all="ignore"):  # `check_scales` reports infinities and NaN
            # On the host, because XLA turns the division into an inexact multiplication.
            steps = steps / whole.reshape(()) if self.method == METHOD else steps * whole
        checks.check_scales(name, jnp.asarray(steps))
        return _values(jnp.asarray(codes), jnp.asarray(steps))

    @property
    def loss(self) -> str:
        """A description of the rounding of all weights."""
        return f"NVFP4 is rounded to {describe_rounding(self.target)}"


def read(config: Mapping[str, Any]) -> NVFP4Reader:
    """Reads a `quantization_config`. Raises CheckpointError for unsupported settings."""
    if checks.method_of(config) == METHOD:
        group, source = compressed_tensors.read_only_group(config, (NVFP4,), SOURCE)
        weights, where = group.get("weights"), f"{source}, weights"
        if not isinstance(weights, Mapping):
            raise CheckpointError(f"{where} is {weights!r:.80}: expected an object")
        checks.require_choice(weights, "num_bits", (4,), where)
        checks.require_choice(weights, "type", ("float",), where)
        checks.require_choice(weights, "group_size", (GROUP,), where)
    return NVFP4Reader(checks.method_of(config))


def matches(config: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is of this format."""
    if checks.method_of(config) == modelopt.METHOD:
        return "NVFP4" in modelopt.algorithm(config)
    return compressed_tensors.is_layout(config, NVFP4)


SCHEME = Scheme(
    title="NVFP4",
    article="an",
    methods=tuple(NAMES),
    reader=NVFP4Reader,
    read=read,
    matches=matches,
    ignored=(
        *("input_global_scale", "input_scale"),
        *("k_scale", "v_scale"),  # of an FP8 cache that config.json doesn't mention
    ),
)


@jax.jit
def _values(codes: jax.Array, steps: jax.Array) -> jax.Array:
    nibbles = jnp.stack([codes & jnp.uint8(15), codes >> jnp.uint8(4)], axis=-1)
    table = jnp.asarray(E2M1, jnp.float32)
    groups = table[nibbles.reshape(*steps.shape, GROUP)] * steps[..., None]
    return groups.reshape(codes.shape[0], -1).T
