"""Every way in which a decoder runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mpjax.kernels import WeightFormat
from mpjax.kernels.target import PLAIN
from tests.pallas_kernels.codes import decoding
from tests.pallas_kernels.numpy_ptx import NumpyPTX

NUMPY = NumpyPTX()


@pytest.fixture(
    params=["twin", "interpreted_ptx", pytest.param("ptx_on_gpu", marks=pytest.mark.gpu)]
)
def decode(request: pytest.FixtureRequest) -> Callable[..., np.ndarray]:
    """`decode(words, parameters, table, format=..., operand=...)`: planes [planes, rows, width].

    A test runs with the decoder's twin in jnp, with its PTX as numpy interprets it, and with the
    PTX in a kernel on a GPU.
    """

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
            interpret=request.param != "ptx_on_gpu",
            scaled=scaled,
            target=NUMPY if request.param == "interpreted_ptx" else PLAIN,
        )
        return np.asarray(planes)

    return run
