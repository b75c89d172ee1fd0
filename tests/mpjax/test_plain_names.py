import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[2]
# Who has a module of the name uses his own, and mpjax works beside it, its command line too.
BESIDE_A_NEIGHBOUR = """
import models, pallas_kernels
assert models.OWNER == pallas_kernels.OWNER == "somebody else"
import mpjax, mpjax.cli
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
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site-packages")
    return folder / "site-packages"


@pytest.fixture
def neighbour(tmp_path):
    """A folder of somebody who has modules of both names, one of them a package."""
    (tmp_path / "models").mkdir()
    for file in ("models/__init__.py", "models/layers.py", "pallas_kernels.py"):
        (tmp_path / file).write_text('OWNER = "somebody else"\n')
    return tmp_path


def test_a_wheel_installs_one_package(installed):
    folders = {path.name for path in installed.iterdir()}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"mpjax"}
    for file in ("models/layers.py", "kernels/tuned/nvidia_h200.json", "bundled/tokenizer.json"):
        assert (installed / "mpjax" / file).is_file()


def test_a_wheel_works_beside_other_models(installed, neighbour):
    run(BESIDE_A_NEIGHBOUR, neighbour, installed)


def test_a_checkout_works_beside_other_models(neighbour):
    run(BESIDE_A_NEIGHBOUR, neighbour, ROOT)


def test_plain_names_of_a_wheel_are_the_same_modules(installed, tmp_path):
    run(ALONE, tmp_path, installed)


def test_plain_names_of_a_checkout_are_the_same_modules(tmp_path):
    run(ALONE, tmp_path, ROOT)


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
