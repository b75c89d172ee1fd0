"""A wheel, an sdist, an editable install and a checkout are one library.

By default, they are built in this process and compared. With `-m install`, pip installs each in a
fresh environment, in which a user's script runs and is checked by mypy and pyright.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import pytest

import mpjax
from mpjax.floors import FLOORS
from tests.packages import ROOT, build, contents, copy_checkout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The files of a wheel of this checkout."""
    return contents(build("wheel", ROOT, tmp_path_factory.mktemp("wheel")))


def test_a_wheel_has_every_file_of_the_floors(wheel):
    expected = set()
    for folder, name in {"mpjax": "mpjax", **FLOORS}.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.parent.name != "__pycache__":
                inside = path.relative_to(ROOT / folder).as_posix()
                expected.add(f"{name.replace('.', '/')}/{inside}")
    assert {name for name in wheel if ".dist-info/" not in name} == expected
    for file in ("models/layers.py", "kernels/tuned/nvidia_h200.json", "bundled/tokenizer.json"):
        assert f"mpjax/{file}" in wheel


def test_a_wheel_of_the_sdist_is_that_of_the_checkout(wheel, tmp_path):
    with tarfile.open(build("sdist", ROOT, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    [source] = (path for path in tmp_path.iterdir() if path.is_dir())
    for file in ("LICENSE", "README.md", "tests/test_packages.py", "pallas_kernels/launch.py"):
        assert (source / file).is_file()
    assert contents(build("wheel", source, tmp_path)) == wheel


def test_an_editable_install_has_a_tree_like_a_wheel(wheel, tmp_path):
    source = copy_checkout(tmp_path / "source")
    (source / "build" / "tree" / "mpjax").mkdir(parents=True)
    (source / "build" / "tree" / "mpjax" / "gone.py").touch()  # of an install before
    editable = contents(build("wheel", source, tmp_path, "editable"))
    assert editable["_mpjax.pth"].decode().split("\n") == [str(source), f"{source}/build/tree"]
    tree = {}
    for folder, _, files in os.walk(source / "build" / "tree", followlinks=True):
        paths = [Path(folder, file) for file in files]
        tree |= {str(p.relative_to(source / "build" / "tree")): p.read_bytes() for p in paths}
    assert tree == {name: data for name, data in wheel.items() if ".dist-info/" not in name}
    # Hatchling reads a folder once: what it meets in the tree would be missing in its place.
    with tarfile.open(build("sdist", source, tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"models/layers.py", "pallas_kernels/launch.py", "mpjax/engine/engine.py"} <= names
    assert not any(name.startswith("build/") for name in names)
    assert contents(build("wheel", source, tmp_path)) == wheel


# --- fresh environments -------------------------------------------------------------------------

USER = """
import models
assert models.OWNER == "somebody else"
import mpjax
from mpjax.kernels.plans.tables import SHIPPED
assert mpjax.models.Llama.__module__ == "mpjax.models.llama"
assert mpjax.kernels.quantize.__module__ == "mpjax.kernels.quantize"
assert list(SHIPPED.glob("nvidia_*.json"))
lm = mpjax.load(mpjax.bundled_model(), precision="W4A16KV8")
print(len(mpjax.generate(lm, ["def "], max_new_tokens=2).tokens[0]), "tokens")
import pallas_kernels.formats
assert pallas_kernels.formats is mpjax.kernels.formats
print("from", mpjax.__file__)
"""
# Types that are the business of whoever writes a proposer, or a spec of modules.
ANY = ("mpjax.Ngram.", "mpjax.models.AttentionSpec.build", "mpjax.models.MLPSpec.build")
INSTALLED = {
    "wheel": ["{dist}/mpjax-0.1.0-py3-none-any.whl"],
    "wheel of the sdist": ["{dist}/of_sdist/mpjax-0.1.0-py3-none-any.whl"],
    "sdist": ["{dist}/of_sdist/mpjax-0.1.0.tar.gz"],
    "folder": ["{checkout}"],
    "editable": ["--editable", "{checkout}"],
    "checkout": [],
}


def call(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Runs a program and returns its output, which the failure shows too."""
    unset = ("PYTHONPATH", "PYTHONSAFEPATH", "MYPYPATH", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in unset} | variables
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def make_environment(folder: Path) -> Path:
    """An environment that has what this one has, except for mpjax. Returns its Python."""
    call(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    site = call(python, "-c", "import site; print(*site.getsitepackages())", cwd=folder).strip()
    # Folders that a .pth file names are searched, and .pth files in them, as mpjax's, aren't read.
    libraries = [entry for entry in sys.path if Path(entry).name == "site-packages"]
    Path(site, "libraries.pth").write_text("\n".join(libraries))
    return python


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """A Python with build, mypy and pyright."""
    folder = tmp_path_factory.mktemp("tools")
    call(sys.executable, "-m", "venv", folder, cwd=folder)
    python = folder / "bin" / "python"
    call(python, "-m", "pip", "install", "build", "mypy", "pyright", cwd=folder)
    return python


@pytest.fixture(scope="module")
def places(tools, tmp_path_factory):
    """A copy of the checkout, and what `python -m build` makes of it."""
    folder = tmp_path_factory.mktemp("places")
    checkout, dist = copy_checkout(folder / "checkout"), folder / "dist"
    call(tools, "-m", "build", "--wheel", "--outdir", dist, ".", cwd=checkout)
    call(tools, "-m", "build", "--outdir", dist / "of_sdist", ".", cwd=checkout)
    return {"checkout": checkout, "dist": dist}


@pytest.mark.install
@pytest.mark.parametrize("kind", INSTALLED)
def test_an_installation_works_beside_other_models(kind, places, tools, tmp_path):
    python, here = make_environment(tmp_path / "env"), tmp_path / "here"
    here.mkdir()
    (here / "models.py").write_text('OWNER: str = "somebody else"\n')
    (here / "user.py").write_text(USER)
    path = {}
    if arguments := [text.format(**places) for text in INSTALLED[kind]]:
        install = ("-m", "pip", "install", "--no-deps", "--ignore-installed")
        call(python, *install, *arguments, cwd=here)
        assert "generate" in call(python.parent / "mpjax", "--help", cwd=here)
    else:
        path = {"PYTHONPATH": str(places["checkout"])}
    assert "generate" in call(python, "-m", "mpjax", "--help", cwd=here, **path)
    output = call(python, "user.py", cwd=here, **path)
    expected = places["checkout"] if kind in ("editable", "checkout") else tmp_path / "env"
    assert "2 tokens" in output
    assert f"from {expected}/" in output
    if arguments:  # checkers find what is installed
        check_types(tools, python, here)


def check_types(tools: Path, python: Path, here: Path) -> None:
    """Checks that mypy and pyright know the types of the public API, and find misspelt names."""
    names = {**public_names(), "models.OWNER": "reveal_type(models.OWNER)"}
    lines = ["import models, mpjax", "from typing import reveal_type", *names.values(), ""]
    (here / "types_of.py").write_text("\n".join(lines))
    (here / "misspelt.py").write_text("import mpjax\nmpjax.quantise\nmpjax.kernels.quantise\n")
    mypy = [tools, "-m", "mypy", "--strict", "--python-executable", python]
    pyright = [tools, "-m", "pyright", "--pythonpath", python]
    for command in (mypy, pyright):
        output = call(*command, "types_of.py", cwd=here)
        revealed = dict(re.findall(r':(\d+):.*(?:type|Type of ".*") is "(.*)"', output))
        types = {name: revealed[str(number)] for number, name in enumerate(names, 3)}
        unknown = {name: text for name, text in types.items() if is_unknown(text)}
        assert not {name: text for name, text in unknown.items() if not name.startswith(ANY)}
        with pytest.raises(AssertionError, match="quantise") as wrong:
            call(*command, "misspelt.py", cwd=here)
        assert str(wrong.value).count(" error: ") == 2


def is_unknown(text: str) -> bool:
    """Whether a revealed type is unknown, or is a function whose result is."""
    return text.rpartition("-> ")[2] in ("Any", "Unknown") or text.startswith("Module")


def public_names() -> dict[str, str]:
    """The functions, classes and attributes of the public API; for each a line with its type."""
    lines = {}
    for module in (mpjax, mpjax.kernels, mpjax.models):
        for name in module.__all__:
            value, full = getattr(module, name), f"{module.__name__}.{name}"
            if not isinstance(value, types.ModuleType):
                lines[full] = f"reveal_type({full})"
            for member in sorted(members_of(value)) if inspect.isclass(value) else ():
                lines[f"{full}.{member}"] = f"def _(x: {full}) -> None: reveal_type(x.{member})"
    return lines


def members_of(kind: type) -> set[str]:
    """The public attributes and methods that this library gives a class."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("mpjax")]
    names = {name for base in ours for name in (*vars(base), *inspect.get_annotations(base))}
    return {name for name in names if not name.startswith("_")}
