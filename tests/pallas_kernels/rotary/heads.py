"""Products of the query, key and value projections, and what becomes of them, in numpy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mpjax.kernels import HeadNorms, KVFormat, KVPages, Rotation, Span
from tests.pallas_kernels.kv_cache.pages import (
    Append,
    assert_same_bits,
    ragged_append,
    random_pages,
    vectors,
)
from tests.pallas_kernels.oracles import NUMPY_DTYPES, hadamard, wide

EPSILON = 1e-3

# Largest error over the largest value of a head: three roundings, and half a step of the codes,
# of which 2**bits - 1 span at most twice the largest value, or one of e4m3's three bits.
ROUNDING = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": 1e-5}
CODING = {16: 0.0, 8: 1 / 255, 4: 1 / 15, "fp8": 2.0**-4}
# The share of numbers that float32's error rounds the other way, and of those that have other codes
# then, a whole token's where it is its scale. One rounding too few changes 0.15 and more.
NEAR_TIES, OTHER_CODES = 0.01, 0.1


@dataclasses.dataclass(frozen=True)
class Scene:
    """Arguments of `rotate_and_append`, ragged as `ragged_append` makes them."""

    terms: np.ndarray  # [splits, batch, tokens, (query heads + 2 · KV heads) · dim]
    pages: KVPages
    angles: np.ndarray  # float64 [batch, tokens, dim / 2]
    places: Append  # keys and values before the rotation
    queries: np.ndarray
    norms: tuple[np.ndarray, np.ndarray] | None

    @property
    def dtype(self) -> str:
        return self.queries.dtype.name

    @property
    def heads(self) -> tuple[int, int]:
        return self.queries.shape[2], self.places.keys.shape[2]

    @property
    def rotation(self) -> Rotation:
        """With the transform of queries."""
        cosines, sines = np.cos(self.angles), np.sin(self.angles)
        if self.turns_by_quarters:
            cosines, sines = np.round(cosines), np.round(sines)
        norms = None
        if self.norms is not None:
            norms = HeadNorms(*map(jnp.asarray, self.norms), EPSILON)  # type: ignore[call-arg]
        turn = (jnp.asarray(x.astype(np.float32)) for x in (cosines, sines))
        return Rotation(*turn, self.heads, norms, transform_queries=True)  # type: ignore[call-arg]

    @property
    def arguments(self) -> tuple[jax.Array, KVPages, Span, Rotation]:
        return jnp.asarray(self.terms), self.pages, self.places.span(), self.rotation

    def run(self, function: Callable[..., Any], *arguments: Any) -> tuple[jax.Array, KVPages]:
        """By a compiled implementation, or the public function, of `rotate_and_append`.

        arguments: in the place of the scene's own.
        """
        compute = jax.jit(functools.partial(function, dtype=jnp.dtype(self.dtype)))
        return compute(*(arguments or self.arguments))

    def token(self, number: int) -> tuple[np.ndarray, Span, Rotation]:
        """Terms, span and rotation of one token of each sequence."""
        one = slice(number, number + 1)
        span = jax.tree.map(np.asarray, self.places.span())
        counts = (span.counts > number).astype(np.int32)
        rotation = self.rotation.map_angles(lambda x: np.asarray(x)[:, one])
        span = Span(span.block_tables, span.starts + np.int32(number), counts)
        return self.terms[:, :, one], span, rotation

    @property
    def turns_by_quarters(self) -> bool:
        """As `angles` says, up to its own rounding."""
        return bool((self.angles % (np.pi / 2) == 0).all())

    @property
    def is_exact(self) -> bool:
        """Whether nothing needs rounding before keys and values are quantised."""
        return self.turns_by_quarters and self.norms is None

    def turned(self, x: np.ndarray, norm: int) -> np.ndarray:
        """Queries (norm 0) or keys (1), normed and rotated, in their dtype."""
        values = wide(x)
        if self.norms is not None:
            root = np.sqrt((values * values).mean(-1, keepdims=True) + EPSILON)
            values = wide((values / root * wide(self.norms[norm])).astype(x.dtype))
        half = values.shape[-1] // 2
        turn = np.exp(1j * self.angles)[:, :, None]
        if self.turns_by_quarters:
            turn = np.round(turn)
        pairs = (values[..., :half] + 1j * values[..., half:]) * turn
        return np.concatenate([pairs.real, pairs.imag], -1).astype(x.dtype)

    def in_pages(self, x: np.ndarray) -> np.ndarray:
        """Queries or keys after the transform that the format of the pages may have."""
        return hadamard(x) if self.pages.format.keys == 4 else x

    def expected_pages(self) -> KVPages:
        keys = self.turned(self.places.keys, 1)
        return dataclasses.replace(self.places, keys=keys).oracle(self.pages)

    def exact_pages(self) -> KVPages:
        """The same in 16 or 32 bits, whatever the format of the pages."""
        keys = self.in_pages(self.turned(self.places.keys, 1))
        shape = (*self.pages.keys.shape[:3], keys.shape[-1])
        empty = [jnp.zeros(shape, keys.dtype) for _ in range(2)]
        pages = KVPages(empty[0], empty[1], None, None, KVFormat(16))
        return dataclasses.replace(self.places, keys=keys).oracle(pages)

    @property
    def smallest(self) -> np.ndarray:
        """The step of subnormal keys in FP8 [KV heads, 1]; 0 for other formats."""
        if self.pages.format.key_codes.scaling != "head":
            return np.zeros((1, 1))
        return wide(self.pages.key_parameters)[:, None] * 2.0**-9

    def written(self) -> np.ndarray:
        """bool [pages, page size]."""
        places, size = self.places, self.pages.page_size
        mask = np.zeros((self.pages.keys.shape[0], size), bool)
        for table, start, count in zip(
            places.block_tables, places.starts, places.counts, strict=True
        ):
            for position in range(start, min(start + count, len(table) * size)):
                mask[table[position // size], position % size] = True
        return mask

    def check(self, queries: jax.Array, pages: KVPages) -> None:
        """Bit by bit where every step is exact, and to within roundings else."""
        expected = self.in_pages(self.turned(self.queries, 0))
        assert queries.dtype == self.dtype
        if self.is_exact:
            np.testing.assert_array_equal(wide(queries), wide(expected))
            assert_same_bits(pages, self.expected_pages())
            return
        assert head_error(wide(queries), wide(expected)) < ROUNDING[self.dtype]
        half = NUMPY_DTYPES["bfloat16" if self.dtype == "bfloat16" else "float16"]
        mask = self.written()
        decoded, coded, exact = (
            stored(p, mask, half) for p in (pages, self.expected_pages(), self.exact_pages())
        )
        # Not against codes: a key that is rounded the other way may have the next one.
        limit = ROUNDING[self.dtype] + CODING[self.pages.format.keys]
        assert head_error(decoded[0], exact[0], self.smallest / 2) < limit
        if self.dtype != "float32":
            assert differing(wide(queries), wide(expected.astype(self.queries.dtype))) < NEAR_TIES
            assert differing(decoded[0], coded[0]) < OTHER_CODES
        np.testing.assert_array_equal(decoded[1], coded[1])  # values go in as they are
        for one, other in zip(jax.tree.leaves(pages), jax.tree.leaves(self.pages), strict=True):
            if one.ndim < 3:  # scales that were given
                np.testing.assert_array_equal(one, other)
                continue
            kept = (np.moveaxis(np.asarray(leaf), 2, 1)[~mask] for leaf in (one, other))
            np.testing.assert_array_equal(*(leaf.view(np.uint8) for leaf in kept))


def head_error(actual: np.ndarray, expected: np.ndarray, absolute: Any = 0.0) -> float:
    """The worst max|Δ| / max|expected| of a head [..., dim]; Δ beyond what may be off anyway."""
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    beyond = np.maximum(np.abs(actual - expected) - absolute, 0)
    largest = np.maximum(np.abs(expected).max(-1), np.finfo(np.float32).tiny)
    return float((beyond.max(-1) / largest).max())


def differing(found: np.ndarray, expected: np.ndarray) -> float:
    """The share of numbers that are not the expected ones."""
    return float((found != expected).mean())


def stored(pages: KVPages, mask: np.ndarray, half: np.dtype) -> list[np.ndarray]:
    """Keys and values float64 [tokens, KV heads, dim] of some slots, read from their bits.

    Keys that went through a transform, as they came out.
    """
    result = []
    for words, parameters, codes, _ in pages.sides:
        rows = np.moveaxis(np.asarray(words), 2, 1)[mask]  # [tokens, KV heads, words]
        if parameters is None:
            result.append(wide(rows))
            continue
        planes = [rows >> (j * codes.bits) & (2**codes.bits - 1) for j in range(codes.planes)]
        if codes.scaling == "head":
            values = np.concatenate(planes, -1).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
            result.append(wide(values) * wide(parameters)[:, None])
            continue
        pairs = np.moveaxis(np.asarray(parameters), 2, 1)[mask][..., None]
        scale, zero = (
            wide((pairs >> shift & 0xFFFF).astype(np.uint16).view(half)) for shift in (0, 16)
        )
        result.append(wide(np.concatenate(planes, -1)) * scale + zero)
    return result


def scene(
    rng: np.random.Generator,
    bits: int | str,
    dtype: str,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    page_size: int = 64,
    tokens: int = 1,
    splits: int = 1,
    normed: bool = False,
    quarters: bool = False,
    pages: int = 11,
) -> Scene:
    """bits: of keys and values, or a format's text.

    Several terms are float32 and add up exactly; one alone is in `dtype`.
    """
    before = random_pages(
        rng,
        KVFormat(bits) if isinstance(bits, int) else KVFormat.parse(bits),
        pages=pages,
        kv_heads=heads[1],
        page_size=page_size,
        head_dim=head_dim,
        dtype=dtype,
    )
    # The numbers have few bits also if they are float32, so that all shares of them are exact.
    drawn = "float16" if dtype == "float32" else dtype
    places = ragged_append(rng, before, tokens, drawn)
    batch = len(places.starts)
    queries = vectors(rng, (batch, tokens, heads[0], head_dim), drawn)
    # No zeros, whose sign a rotation turns as well, and no negative ones, which a sum turns too.
    queries, keys = (np.where(x == 0, x.dtype.type(2**-8), x) for x in (queries, places.keys))
    values = np.where(places.values == 0, places.values.dtype.type(0), places.values)
    queries, keys, values = (
        x.astype(NUMPY_DTYPES.get(dtype, dtype)) for x in (queries, keys, values)
    )
    places = dataclasses.replace(places, keys=keys, values=values)
    product = np.concatenate([queries, keys, values], 2).reshape(batch, tokens, -1)
    terms = product[None]
    if splits > 1:
        shares = rng.choice([0.0, 0.25, 0.5, 1.5], (splits - 1, *product.shape))
        terms = np.concatenate([shares, 1 - shares.sum(0, keepdims=True)])
        terms = (terms * wide(product)).astype(np.float32)
    steps = rng.integers(0, 4, (batch, tokens, head_dim // 2))
    angles = steps * (np.pi / 2) if quarters else rng.uniform(-100, 100, steps.shape)
    weights = rng.standard_normal((2, head_dim)) + 1
    norms = weights.astype(NUMPY_DTYPES.get(dtype, dtype)) if normed else None
    return Scene(terms, before, angles, places, queries, None if norms is None else (*norms,))
