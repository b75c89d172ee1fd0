"""Rows of all kinds, and what the operations between two products make of them, in numpy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mpjax.kernels import ActivationFormat, ProductFormat, QuantizedActivations
from tests.pallas_kernels.oracles import NUMPY_DTYPES, wide

EPSILON = 1e-3  # of the size of the small rows' squares: left out, it is missed

# The formats whose activations are quantised a token at a time, and some that are none of them.
QUANTIZING = ("int8/int8", "liquid4:g64/int8", "float8:gK/float8")

# How far a result may be off, relatively: its rounding, and a little float32 arithmetic.
TOLERANCES = {"bfloat16": 1.02 * 2.0**-8, "float16": 1.02 * 2.0**-11, "float32": 2e-5}


@dataclasses.dataclass(frozen=True)
class Rows:
    """Arguments of `add_rms_norm` and `gated_silu`, with sums that are exact in float32."""

    terms: np.ndarray  # [splits, ..., channels]
    residual: np.ndarray | None
    weight: np.ndarray

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        shape: tuple[int, ...],
        dtype: str,
        *,
        splits: int = 1,
        residual: bool = False,
        terms_dtype: str = "float32",
    ) -> Rows:
        """Multiples of 1/64 below 8, of which the last row is small and the one above it zero."""
        stored = NUMPY_DTYPES.get(dtype, dtype)
        stored_terms = NUMPY_DTYPES.get(terms_dtype, terms_dtype)

        def draw(*sizes: int, dtype: Any) -> np.ndarray:
            x = rng.integers(-512 // splits, 512 // splits + 1, sizes) / 64
            x[..., -1, :] /= 2**8
            return x.astype(dtype)

        terms = draw(splits, *shape, dtype=stored_terms)
        added = draw(*shape, dtype=stored) if residual else None
        if shape[-2] > 1:
            terms[..., -2, :] = 0
            if added is not None:
                terms[0, ..., -2, :] = -added[..., -2, :].astype(stored_terms)
        weight = rng.standard_normal(shape[-1]) + 1
        return cls(terms, added, weight.astype(stored))

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        residual = None if self.residual is None else jnp.asarray(self.residual)
        return jnp.asarray(self.terms), residual, jnp.asarray(self.weight)

    def stream(self) -> np.ndarray:
        """The sum, in the dtype of the weight."""
        total = wide(self.terms).sum(0)
        if self.residual is not None:
            total = total + wide(self.residual)
        return total.astype(self.weight.dtype)

    def normed(self) -> np.ndarray:
        """float64 [..., H], of the stream as it is stored."""
        x = wide(self.stream())
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * wide(self.weight)

    def gated(self) -> np.ndarray:
        """float64 [..., channels / 2]."""
        gate, up = np.split(wide(self.terms).sum(0), 2, axis=-1)
        return gate * sigmoid(gate) * up

    def norm_gradients(
        self, of_stream: np.ndarray, of_normed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The gradients of each term (the residual's, too) [..., H], and of the weight [H]."""
        x = wide(self.stream())
        inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON)
        unit, scaled = x * inverse, of_normed * wide(self.weight)
        of_x = of_stream + inverse * (scaled - (scaled * unit).mean(-1, keepdims=True) * unit)
        return of_x, (of_normed * unit).reshape(-1, x.shape[-1]).sum(0)

    def gated_gradient(self, of_gated: np.ndarray) -> np.ndarray:
        """The gradient of each term [..., channels]."""
        gate, up = np.split(wide(self.terms).sum(0), 2, axis=-1)
        chance = sigmoid(gate)
        of_gate = of_gated * up * (chance + gate * chance * (1 - chance))
        return np.concatenate([of_gate, of_gated * gate * chance], -1)


def with_nearly_zeros(rows: Rows, peak: float) -> Rows:
    """One channel of `peak` and zeros in the first of the terms' rows, and nothing to add."""
    terms = rows.terms.copy()
    terms[..., 0, :] = 0
    terms[0, ..., 0, 5] = peak
    return dataclasses.replace(rows, terms=terms, residual=None)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


def run(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Compiled, for one call."""
    return jax.jit(functools.partial(function, **keywords))(*arguments)


def parsed(text: str | None) -> ActivationFormat | None:
    """The activation format that is multiplied with a weight format."""
    return None if text is None else ProductFormat.of(text).activations


def assert_result(
    actual: Any, expected: np.ndarray, dtype: str, text: str | None, *, error: float = 0.0
) -> None:
    """`expected` float64, rounded to `dtype`, or to what a weight of format `text` multiplies.

    error: of float32 sums before codes are rounded, as a part of the row's largest magnitude.
    """
    if text not in QUANTIZING:
        assert isinstance(actual, jax.Array)
        assert actual.dtype == dtype
        half_of_subnormals = 2.0**-25 if dtype == "float16" else 0.0
        np.testing.assert_allclose(
            wide(actual), expected, rtol=TOLERANCES[dtype], atol=half_of_subnormals + 1e-30
        )
        return
    assert isinstance(actual, QuantizedActivations)
    is_int8 = text.endswith("/int8")
    top, stored = (127, np.int8) if is_int8 else (448, ml_dtypes.float8_e4m3fn)
    assert actual.dtype == dtype
    assert actual.values.dtype == stored
    assert actual.scales.dtype == jnp.float32
    assert actual.scales.shape == (*expected.shape[:-1], 1)
    scales = np.abs(expected).max(-1, keepdims=True) / top
    zero = scales < 1e-30 / top
    scales[zero] = 1
    np.testing.assert_allclose(actual.scales, scales, rtol=2e-5)
    np.testing.assert_array_equal(np.asarray(actual.scales)[zero], 1)
    values, exact = wide(actual.values), expected / scales
    assert values.shape == expected.shape
    assert ((np.abs(values).max(-1, keepdims=True) == top) | zero).all()
    # Half a step: of integers 1, of e4m3 2⁻³ of the power of two below, but 2⁻⁹ at least.
    step = 1.0 if is_int8 else np.maximum(np.abs(exact) * 2.0**-3, 2.0**-9)
    np.testing.assert_array_less(np.abs(values - exact), step * 0.505 + error * top)
