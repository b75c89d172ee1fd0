"""What CI leaves out on its second Python: folders, but for some files, and most cases of tests.

The tests of these folders find faults in our arithmetic or our choices, in programs that other
files trace, compile and run as well. Elsewhere, a whole file may have the mark `any_version`, with
which `tests/conftest.py` marks what is listed here. A fault of a version of JAX is in what a test's
cases share, so that few of them find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from tests.sweeps import sampled

FOLDERS = (
    "tests/benchmarks",
    "tests/examples/train_bundled_model",
    "tests/mpjax/bench",
    "tests/mpjax/checkpoint",
    "tests/mpjax/cli",
    "tests/mpjax/quantization",
    "tests/pallas_kernels/codes",
)
# They load and save files, call other packages, and run a folder's programs from end to end.
REPRESENTATIVES = (
    "tests/mpjax/bench/test_measure.py",
    "tests/mpjax/checkpoint/gguf/test_source.py",
    "tests/mpjax/checkpoint/test_huggingface.py",
    "tests/mpjax/checkpoint/test_restoring.py",
    "tests/mpjax/checkpoint/test_saving.py",
    "tests/mpjax/cli/test_compilation.py",
    "tests/mpjax/cli/test_convert.py",
    "tests/mpjax/cli/test_generate.py",
    "tests/mpjax/quantization/learning/test_layer.py",
    "tests/mpjax/quantization/test_api.py",
    "tests/mpjax/quantization/test_pipeline.py",
)


def is_any_version(path: str) -> bool:
    """Whether the tests of a file say the same on any Python and JAX. path: from the root."""
    folders = {str(folder) for folder in PurePath(path).parents}
    return path not in REPRESENTATIVES and not folders.isdisjoint(FOLDERS)


ONE_OF = 3  # the second Python runs one of so many cases of a test


def repeated(ids: Sequence[str]) -> set[int]:
    """The indices of the tests of these ids that are cases which the second Python leaves out."""
    return sampled(ids, [ONE_OF] * len(ids))
