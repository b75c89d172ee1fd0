import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packages import ROOT, build

# Who has a module of the name uses his own, and mpjax works beside it, its command line too.
BESIDE_A_NEIGHBOUR = """
import models, pallas_kernels
assert models.OWNER == pallas_kernels.OWNER == "somebody else"
import mpjax, mpjax.cli
assert not hasattr(mpjax.models, "OWNER") and mpjax.kernels.matmul
from mpjax.models import Qwen3
from mpjax.kernels import matmul
mpjax.load, mpjax.generate
import models.layers
assert models.layers.OWNER == "somebody else"
"""
ALONE = """
import mpjax
from models import Qwen3
import models.layers
import mpjax.models.layers
import pallas_kernels.gemm.api as plain
import mpjax.kernels.gemm.api as real
assert models is mpjax.models and Qwen3 is mpjax.models.Qwen3
assert models.layers is mpjax.models.layers and plain is real
assert real.__spec__.name == real.__name__ == "mpjax.kernels.gemm.api"
try:
    import pallas_kernels.gemm.nothing
except ModuleNotFoundError as error:
    assert "pallas_kernels.gemm.nothing" in str(error), error
else:
    raise AssertionError("a module that does not exist was found")
"""
# What Python's own tools ask of a module: its source, resources and spec, and its name in a pickle.
TOOLS = """
import importlib.resources, importlib.util, inspect, os, pickle, runpy, sys
import mpjax.kernels, mpjax.models, pallas_kernels
for module in (mpjax.kernels, mpjax.models.config, pallas_kernels.formats):
    assert os.path.samefile(inspect.getsourcefile(module), module.__spec__.origin)
    assert importlib.util.find_spec(module.__name__) is module.__spec__
    assert importlib.reload(module) is module is sys.modules[module.__name__]
assert importlib.resources.files("mpjax.kernels").joinpath("tuned", "nvidia_h200.json").is_file()
assert importlib.resources.files("pallas_kernels").joinpath("tuned", "nvidia_h200.json").is_file()
data = pickle.dumps(mpjax.models.Llama)
assert b"mpjax.models.llama" in data and pickle.loads(data) is mpjax.models.Llama
for name in ("mpjax.models.presets", "models.presets"):
    names = runpy.run_module(name, run_name="__main__")  # what `python -m` does
    assert names["__name__"] == "__main__" and names["QWEN3_8B"]
    assert os.path.samefile(names["__file__"], importlib.util.find_spec(name).origin)
"""
# In a checkout, whose folders have the plain names, they are found before mpjax was imported.
PLAIN_NAME_FIRST = """
from models import Qwen3
import models.layers
import mpjax.models.layers
from pallas_kernels import matmul
assert Qwen3 is mpjax.models.Qwen3 and matmul is mpjax.kernels.matmul
assert models.layers is mpjax.models.layers
"""


def run(code: str, folder: Path, library: Path) -> None:
    """Runs Python with `folder` first on the path, as `python -m` does, and `library` next."""
    # An editable install of the checkout would put its folders behind a wheel's.
    path = f"['', {str(library)!r}, *(entry for entry in sys.path if entry != {str(ROOT)!r})]"
    subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path = {path}\n{code}"],
        cwd=folder,
        check=True,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the files that a wheel of this checkout installs."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(build("wheel", ROOT, folder)) as archive:
        archive.extractall(folder / "site-packages")
    return folder / "site-packages"


@pytest.fixture
def neighbour(tmp_path):
    """A folder of somebody who has modules of both names, one of them a package."""
    (tmp_path / "models").mkdir()
    for file in ("models/__init__.py", "models/layers.py", "pallas_kernels.py"):
        (tmp_path / file).write_text('OWNER = "somebody else"\n')
    return tmp_path


def test_a_wheel_works_beside_other_models(installed, neighbour):
    run(BESIDE_A_NEIGHBOUR, neighbour, installed)


def test_a_checkout_works_beside_other_models(neighbour):
    run(BESIDE_A_NEIGHBOUR, neighbour, ROOT)


def test_plain_names_of_a_wheel_are_the_same_modules(installed, tmp_path):
    run(ALONE, tmp_path, installed)


def test_plain_names_of_a_checkout_are_the_same_modules(tmp_path):
    run(ALONE, tmp_path, ROOT)


@pytest.mark.parametrize("kind", ["wheel", "checkout"])
def test_tools_of_python_know_the_modules(kind, installed, tmp_path):
    run(TOOLS, tmp_path, installed if kind == "wheel" else ROOT)


def test_plain_names_may_be_imported_first_in_a_checkout(tmp_path):
    run(PLAIN_NAME_FIRST, tmp_path, ROOT)


def test_the_command_line_runs_beside_other_models(neighbour):
    result = subprocess.run(
        [sys.executable, "-m", "mpjax", "info"],
        cwd=neighbour,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Llama from" in result.stdout
