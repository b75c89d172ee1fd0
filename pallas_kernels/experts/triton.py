"""The grouped product in Triton: the main loop of `gemm/triton.py` over tiles of experts.

A program has a tile of pairs (tokens with one of their experts) of one expert. It gathers their
rows of x by index while it loads them, and indexes the expert's matrix in the stack. The epilogue
adds the bias, multiplies by the routing weight, and stores each pair's result at the pair's index,
so that nothing is permuted in memory.

For few tokens, programs may also find the experts of pairs in the router's logits, and store them
with their weights for the next product (`routed_products`).

With a gate, a tile of outputs has equally many channels of gate and of the corresponding up values,
and the epilogue combines them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.experts import plain
from mpjax.kernels.experts.choosing import choose
from mpjax.kernels.experts.epilogue import Epilogue
from mpjax.kernels.experts.gate import Gate
from mpjax.kernels.experts.logits import RouterLogits
from mpjax.kernels.experts.tiles import Tiles
from mpjax.kernels.gemm.plans import TritonConfig
from mpjax.kernels.gemm.triton import Operands, Program, parts_of, steps_of
from mpjax.kernels.launch import Settings, first_program_id, launch, load, load_masked, store
from mpjax.kernels.quantized_tensor import QuantizedTensor

Inputs = tuple[Operands, Tiles, Epilogue]  # of the kernel: arrays outside, references inside


class _Job(NamedTuple):
    """The static facts of a launch.

    weight: the stack, of ShapeDtypeStructs. steps: of the loop over K, by all splits. channels: K
    of x, less than the channels of all blocks of words if these are padded. per_row: the number of
    pairs with the same row of x: k, or 1 if each pair has its own.
    """

    weight: Any
    config: TritonConfig
    steps: int
    channels: int
    per_row: int


# This function has its own `jit`, so that calls outside of any `jit` compile once.
@functools.partial(jax.jit, static_argnames=("config", "out_dtype", "interpret"))
def products(
    x: jax.Array | QuantizedActivations,
    weight: jax.Array | QuantizedTensor,
    tiles: Tiles,
    epilogue: Epilogue,
    config: TritonConfig,
    out_dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The products of all pairs, [splits, pairs, N], or with a gate [1, pairs, N / 2].

    With routing weights they are terms [splits · k, tokens, N] that sum to each token's weighted
    products. Several splits are float32 and must be summed; a single split has `out_dtype`.

    x: [tokens, K], or [pairs, K] with a row for each pair. weight: [experts, K, N], packed or in 16
    bits. A gate requires `config.splits` 1, because it needs whole sums.
    """
    operands, job = _read(x, weight, tiles.count, config)
    splits = min(config.splits, job.steps)
    terms = launch(
        functools.partial(_kernel, job=job),
        (operands, tiles, epilogue),
        out_shape=_result(job, splits, tiles.count, epilogue, out_dtype),
        grid=(len(tiles.expert), pl.cdiv(weight.shape[-1], config.tile_n), splits),
        settings=Settings(f"experts_{_codes(weight)}", warps=config.warps, stages=config.stages),
        interpret=interpret,
    )
    if epilogue.routing_weights is None:
        return terms
    tokens, per_token = epilogue.routing_weights.shape
    return terms.reshape(splits * per_token, tokens, terms.shape[-1])


@functools.partial(jax.jit, static_argnames=("config", "out_dtype", "interpret"))
def routed_products(
    x: jax.Array | QuantizedActivations,
    weight: jax.Array | QuantizedTensor,
    logits: RouterLogits,
    epilogue: Epilogue,
    config: TritonConfig,
    out_dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The products [1, pairs, N], or with a gate [1, pairs, N / 2], of tokens that it routes.

    Also returns the experts int32 [tokens, k] of tokens, and their weights float32 [tokens, k], as
    `route` does. Each pair has a tile, whose programs find its expert in the logits.

    x: [tokens, K]. logits: [tokens, experts], accepted by `choosing.why_not`. epilogue: without
    routing weights. Other arguments are as for `products`; there is one split.
    """
    shape = logits.logits.shape[0], logits.routing.per_token
    pairs = shape[0] * shape[1]
    operands, job = _read(x, weight, pairs, config)
    chosen: tuple[jax.Array, jax.Array, jax.Array] = launch(
        functools.partial(_routing_kernel, job=job),
        (operands, logits, epilogue),
        out_shape=(
            _result(job, 1, pairs, epilogue, out_dtype),
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=(pairs, pl.cdiv(weight.shape[-1], config.tile_n) + 1, 1),
        settings=Settings(
            f"experts_routed_{_codes(weight)}", warps=config.warps, stages=config.stages
        ),
        interpret=interpret,
    )
    return chosen


def _read(
    x: jax.Array | QuantizedActivations,
    weight: jax.Array | QuantizedTensor,
    pairs: int,
    config: TritonConfig,
) -> tuple[Operands, _Job]:
    """The arrays and the static facts of a launch."""
    packed = weight if isinstance(weight, QuantizedTensor) else None
    values, x_scales = parts_of(x, None if packed is None else packed.format)
    steps = plain.steps_of(weight.shape[1]) if packed is None else steps_of(packed, config)
    shapes = jax.eval_shape(lambda: weight)
    job = _Job(shapes, config, steps, values.shape[1], pairs // len(values))
    if packed is None:
        return Operands(values, x_scales, weight, *(None,) * 3), job
    arrays = packed.words, packed.parameters, packed.channel_scales, packed.table
    return Operands(values, x_scales, *arrays), job


def _codes(weight: jax.Array | QuantizedTensor) -> str:
    return weight.format.codes if isinstance(weight, QuantizedTensor) else "plain"


def _result(
    job: _Job, splits: int, pairs: int, epilogue: Epilogue, dtype: jnp.dtype
) -> jax.ShapeDtypeStruct:
    """The shape of a launch's products, float32 if there are several splits."""
    outputs = job.weight.shape[-1]
    if epilogue.gate is not None:
        assert splits == 1, "a gate needs whole sums"
        outputs //= 2
    return jax.ShapeDtypeStruct((splits, pairs, outputs), dtype if splits == 1 else jnp.float32)


class _Experts(Program):
    """A program for rows of x that are shorter than the blocks of words."""

    def __init__(self, *arguments: Any, channels: int):
        self.channels = channels
        super().__init__(*arguments)

    def x_mask(self, channel: jax.Array) -> jax.Array | None:
        """The mask of a tile of x; channels beyond K load as zeros."""
        assert self.row_mask is not None
        if self.channels % self.format.block == 0:
            return self.row_mask
        return self.row_mask[:, None] & (channel < self.channels)


class _OneExpert:
    """A reference to one expert's part of a stack: prepends the expert to any index."""

    def __init__(self, stack: Any, expert: jax.Array):
        self.stack, self.expert = stack, expert
        self.shape, self.dtype = stack.shape[1:], stack.dtype

    @property
    def at(self) -> _OneExpert:
        """Itself, so that `ref.at[index]` works as for references."""
        return self

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        if index == (Ellipsis,):
            return self.stack[self.expert]
        return self.stack.at[(self.expert, *index)]


def _kernel(
    inputs: Inputs,
    out_ref: Any,  # [splits, pairs, N], or with a gate [1, pairs, N / 2]
    *,
    job: _Job,
) -> None:
    operands, tiles, epilogue = inputs
    number = first_program_id()
    expert = load(tiles.expert.at[number])
    is_used, expert = expert >= 0, jnp.maximum(expert, 0)
    pair = jnp.where(is_used, _pairs(tiles, number, job.config.tile_m), tiles.count)
    _multiply(operands, epilogue, out_ref, _Place(expert, is_used, pair), job)


def _routing_kernel(
    inputs: tuple[Operands, RouterLogits, Epilogue],
    out_ref: Any,  # [1, pairs, N], or with a gate [1, pairs, N / 2]
    experts_ref: Any,  # [tokens, k]
    weights_ref: Any,  # [tokens, k]
    *,
    job: _Job,
) -> None:
    operands, logits, epilogue = inputs
    number, per_token = first_program_id(), experts_ref.shape[1]
    token, choice = jax.lax.div(number, per_token), jax.lax.rem(number, per_token)
    chosen = choose(logits, token, choice)
    # A pair has one program more than tiles of outputs. It computes the routing weight, which no
    # product waits for.
    has_outputs = pl.program_id(1) < pl.num_programs(1) - 1
    pair = jnp.where(jnp.arange(job.config.tile_m) == 0, number, out_ref.shape[1])
    _multiply(operands, epilogue, out_ref, _Place(chosen.expert, has_outputs, pair), job)

    @pl.when(~has_outputs)
    def _() -> None:
        store(experts_ref.at[token, choice], chosen.expert)
        store(weights_ref.at[token, choice], chosen.weight())


class _Place(NamedTuple):
    """The task of a program in a grouped product.

    expert: of its tile. is_used: whether the program has products. pairs: int32 [tile_m], the
    indices of the tile's pairs; the number of all pairs stands for no pair.
    """

    expert: jax.Array
    is_used: jax.Array
    pairs: jax.Array


def _multiply(
    operands: Operands, epilogue: Epilogue, out_ref: Any, place: _Place, job: _Job
) -> None:
    """Computes the products of a program's tile, and stores each at its pair's index."""
    expert, is_used, pair = place
    count = out_ref.shape[1]
    output = _outputs(job, epilogue.gate)
    tile = jax.lax.div(pair, job.per_row), output
    program = _program(_of_expert(operands, expert), job, tile)
    splits = out_ref.shape[0]
    first = program.split * job.steps // splits
    last = jnp.where(is_used, (program.split + 1) * job.steps // splits, first)
    accumulator = jax.lax.fori_loop(first, last, program.step, program.zeros)
    product = program.scaled(accumulator.astype(jnp.float32))  # [tile_n, tile_m]
    if epilogue.bias is not None:  # added by one of the splits
        bias = load_masked(epilogue.bias.at[expert, output], program.output_mask)
        bias = jnp.where(program.split == 0, bias.astype(jnp.float32), 0.0)
        product += bias[:, None]
    row = pair
    if epilogue.gate is not None:
        product = epilogue.gate(*_halves(product))
        output = pl.program_id(1) * len(product) + jnp.arange(len(product))
    if epilogue.routing_weights is not None:
        tokens, per_token = epilogue.routing_weights.shape
        token, choice = jax.lax.div(pair, per_token), jax.lax.rem(pair, per_token)
        weights = load_masked(epilogue.routing_weights.at[token, choice], pair < count)
        product *= weights.astype(jnp.float32)[None, :]
        row = jnp.where(pair < count, choice * tokens + token, count)
    store(
        out_ref.at[program.split, row[:, None], output[None, :]],
        product.T.astype(out_ref.dtype),
        mask=(pair < count)[:, None] & (output < out_ref.shape[2])[None, :],
    )


def _pairs(tiles: Tiles, number: jax.Array, tile_m: int) -> jax.Array:
    """The indices of a tile's pairs, int32 [tile_m]."""
    row = jnp.arange(tile_m)
    if tiles.pairs is None:
        return jnp.where(row == 0, number, tiles.count)
    return load(tiles.pairs.at[number, row])


def _program(
    operands: Operands, job: _Job, tile: tuple[jax.Array, jax.Array]
) -> _Experts | plain.PlainProgram:
    if not isinstance(job.weight, QuantizedTensor):
        return plain.PlainProgram(operands.x, operands.words, job.config, tile)
    weight = job.weight
    return _Experts(
        *(operands, weight.format, weight.scale_dtype, job.config, 0, tile), channels=job.channels
    )


def _outputs(job: _Job, gate: Gate | None) -> jax.Array:
    """The output channels of a program's tile; with a gate, half of them are up values."""
    number, tile_n = jnp.arange(job.config.tile_n), job.config.tile_n
    if gate is None:
        return pl.program_id(1) * tile_n + number
    half, inner = tile_n // 2, job.weight.shape[-1] // 2
    is_up = number >= half
    return pl.program_id(1) * half + jnp.where(is_up, number + (inner - half), number)


def _halves(product: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first and the second half of a tile's rows.

    They are computed as sums over two candidates of which one is 0, since Triton can't slice a
    tile.
    """
    halves = product.reshape(2, product.shape[0] // 2, product.shape[1])
    which = jax.lax.broadcasted_iota(jnp.int32, halves.shape, 0)
    first, second = (jnp.where(which == half, halves, 0.0).sum(0) for half in (0, 1))
    return first, second


def _of_expert(operands: Operands, expert: jax.Array) -> Operands:
    """The operands of a product with one expert's matrix."""
    stacks = operands._asdict()
    for name in ("words", "parameters", "channel_scales", "table"):
        if stacks[name] is not None:
            stacks[name] = _OneExpert(stacks[name], expert)
    return Operands(**stacks)
