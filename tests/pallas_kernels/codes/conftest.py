"""Every way in which a decoder runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mpjax.kernels import WeightFormat
from tests.pallas_kernels.codes import decoding


@pytest.fixture(
    params=["twin", "interpreted_ptx", pytest.param("ptx_on_gpu", marks=pytest.mark.gpu)]
)
def decode(request: pytest.FixtureRequest) -> Callable[..., np.ndarray]:
    """`decode(words, parameters, table, format=..., operand=...)`: planes [planes, rows, width].

    A test runs with the decoder's twin in jnp, with its PTX as numpy interprets it, and with the
    PTX in a kernel on a GPU.
    """
    if request.param == "interpreted_ptx":
        request.getfixturevalue("interpreted_ptx")

    def run(
        words: np.ndarray,
        parameters: np.ndarray,
        table: np.ndarray | None = None,
        *,
        format: str,
        operand: str,
        scale_dtype: str = "float16",
        scaled: bool = False,
    ) -> np.ndarray:
        planes = decoding.decode(
            words,
            parameters,
            table,
            format=WeightFormat.parse(format),
            operand=operand,
            scale_dtype=scale_dtype,
            ptx=request.param != "twin",
            interpret=request.param != "ptx_on_gpu",
            scaled=scaled,
        )
        return np.asarray(planes)

    return run
