"""Tells how a module's tensors are packed and checks them; looks at shapes and dtypes only.

AWQ and GPTQ both call their tensors `qweight`, `qzeros` and `scales`; they differ in the axis that
`qweight` is packed along, so the shapes say which of them it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from mpjax.errors import CheckpointError

SCALE_DTYPES = ("float16", "bfloat16", "float32")


class TensorSpec(Protocol):
    """Anything with a shape and a dtype: a TensorInfo, an array, a jax.ShapeDtypeStruct."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's dimensions."""

    @property
    def dtype(self) -> Any:
        """The tensor's numpy dtype."""


def describe(spec: TensorSpec) -> str:
    """A tensor's dtype and shape for messages, such as `int32 [512, 4096]`."""
    return f"{spec.dtype} {list(spec.shape)}"


def packing(specs: Mapping[str, TensorSpec]) -> Literal["awq", "gptq"] | None:
    """Which method packed a module, judged by shapes alone; None when it is neither.

    specs: the module's tensors by suffix. With N output channels, AWQ's 4-bit `qweight` has N / 8
    columns and GPTQ's has N.
    """
    if "qweight" not in specs or "scales" not in specs:
        return None
    qweight, scales = specs["qweight"].shape, specs["scales"].shape
    if len(qweight) != 2 or len(scales) != 2:
        return None
    if qweight[1] * 8 == scales[1]:
        return "awq"
    return "gptq" if qweight[1] == scales[1] else None


def check_packing(name: str, specs: Mapping[str, TensorSpec], method: str | None) -> None:
    """Raises CheckpointError when a module isn't packed as config.json's `quant_method` says.

    name: the module. specs: its tensors by suffix. method: the config's, None when it has none.
    """
    for suffix in ("qweight", "scales"):
        if suffix not in specs:
            raise CheckpointError(
                f"{name} has no tensor {suffix}: found {', '.join(sorted(specs)) or 'none'}"
            )
    found = packing(specs)
    if found == method and found is not None:
        return
    layout = f"qweight {describe(specs['qweight'])} beside scales {describe(specs['scales'])}"
    if found is None:
        raise CheckpointError(
            f"{name}: {layout} is neither AWQ gemm (8 · columns of qweight = columns of scales) "
            "nor GPTQ (equal columns); other layouts can't be read"
        )
    given = f"says quant_method {method!r}" if method else "has no quantization_config"
    raise CheckpointError(
        f"{name}: config.json {given}, but the tensors are packed as {found.upper()} ({layout}); "
        f"put the quantization_config of the {found.upper()} checkpoint in config.json, with "
        f'"quant_method": "{found}"'
    )


def check_tensors(
    name: str,
    specs: Mapping[str, TensorSpec],
    expected: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]],
    said: str = "",
) -> None:
    """Raises CheckpointError when a tensor is missing or of another shape or dtype than expected.

    expected: for each suffix, the shape and the names of the dtypes that may be. said: what
    config.json says that makes it so, such as `group_size 128`.
    """
    reason = f", by {said} in config.json" if said else ""
    for suffix, (shape, dtypes) in expected.items():
        if suffix not in specs:
            raise CheckpointError(
                f"{name} has no tensor {suffix}: expected {' or '.join(dtypes)} {list(shape)}"
                f"{reason}"
            )
        spec = specs[suffix]
        if tuple(spec.shape) != shape or str(spec.dtype) not in dtypes:
            raise CheckpointError(
                f"{name}.{suffix} is {describe(spec)}: expected {' or '.join(dtypes)} {list(shape)}"
                f"{reason}"
            )


def check_weight_shape(
    name: str,
    found: tuple[int, int],
    expected: tuple[int, int] | None,
    group_size: int | None,
    said: str = "",
) -> None:
    """Raises CheckpointError when [K, N] isn't as the model expects, or K isn't whole groups.

    found: what the module's tensors hold. expected: what the model's config wants, None for any.
    said: what config.json says of the tensors that makes it so, such as `bits 8`.
    """
    if expected is not None and found != tuple(expected):
        reason = f", by {said} in config.json" if said else ""
        raise CheckpointError(
            f"{name} holds a weight of {found[0]} input and {found[1]} output channels{reason}: "
            f"the model expects {expected[0]} and {expected[1]}"
        )
    if group_size is not None and found[0] % group_size:
        raise CheckpointError(
            f"{name} has {found[0]} input channels: "
            f"expected a multiple of the config's group_size {group_size}"
        )


def parse_integer(config: Mapping[str, Any], keys: tuple[str, ...], source: str) -> int:
    """The first of the keys that a quantization_config has, which must be an integer."""
    for key in keys:
        if key in config:
            if type(config[key]) is not int:
                raise CheckpointError(
                    f"{source}: {key} is {config[key]!r:.80}: expected an integer"
                )
            return config[key]
    raise CheckpointError(f"{source} has no {keys[0]}: expected an integer")


def parse_switch(config: Mapping[str, Any], key: str, source: str) -> bool | None:
    """What a quantization_config says of a key, true or false; None where it says nothing."""
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise CheckpointError(f"{source}: {key} is {value!r:.80}: expected true or false")
    return value


def parse_group_size(config: Mapping[str, Any], keys: tuple[str, ...], source: str) -> int | None:
    """The input channels per group; −1 in the file means all of them and is returned as None."""
    group_size = parse_integer(config, keys, source)
    if group_size != -1 and group_size < 1:
        raise CheckpointError(
            f"{source}: {keys[0]} is {group_size}: expected a positive number, or -1 for one group"
        )
    return None if group_size == -1 else group_size
