"""Folders of tests that CI leaves out on its second Python, and the files of them that it runs.

The tests of these folders find faults in our arithmetic or our choices, in programs that other
files trace, compile and run as well. `tests/conftest.py` marks them `any_version`. Elsewhere, a
whole file may have the mark.
"""

from __future__ import annotations

from pathlib import PurePath

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
    "tests/mpjax/bench/test_generate.py",
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
