"""The rules that keep the house in order, read from the source files themselves."""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpjax.floors import FLOORS as IMPORTED  # the names by which the library imports its folders

ROOT = Path(__file__).resolve().parents[1]

# From the lowest floor to the highest; a floor imports only from itself and from below.
FLOORS = ("pallas_kernels", "models", "mpjax")
FILES = [
    path.relative_to(ROOT) for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))
]
TEST_FILES = [path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("*.py"))]
BENCHMARK_FILES = [path.relative_to(ROOT) for path in sorted((ROOT / "benchmarks").rglob("*.py"))]

MAXIMUM_LINES = 500
MAXIMUM_BODY = 60
KERNEL_DEPENDENCIES = {"jax", "jaxlib", "numpy", "ml_dtypes", "pallas_kernels"} | set(
    sys.stdlib_module_names
)
# Backends, and the modules that may know each.
DOORS = {
    "jax.experimental.pallas.triton": ("pallas_kernels/launch.py",),
    "jax._src.pallas.triton": ("pallas_kernels/launch.py",),
    "jax.experimental.pallas.mosaic_gpu": (
        "pallas_kernels/mosaic/decoding.py",
        "pallas_kernels/mosaic/launch.py",
        "pallas_kernels/mosaic/memory.py",
        "pallas_kernels/mosaic/inline_ptx.py",
        "pallas_kernels/mosaic/products.py",
    ),
}

# Rooms whose modules only one folder imports; others take the names that `__init__` makes public.
CLOSED = {
    "pallas_kernels.attention.plans": "pallas_kernels/attention",
    "pallas_kernels.gemm.plans": "pallas_kernels/gemm",
    "pallas_kernels.gemm.warpgroups": "pallas_kernels/gemm",
}

MOST_PARAMETERS = 7  # but for commands: theirs are the options of the command line
# Functions whose parameters are the options of a generation, which people write in a call.
CALLS_WITH_OPTIONS = {
    "mpjax/generation/decoding.py": {"generate_tokens": 13},
    "mpjax/engine/engine.py": {"__init__": 11, "submit": 14, "generate": 11},
    "mpjax/engine/generate.py": {"generate": 13, "stream": 13, "stream_batch": 13},
}


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def floor_name(name: str) -> str:
    """A module's name below its floor: `models.config` of `mpjax.models.config`."""
    for floor, imported in IMPORTED.items():
        if name == imported or name.startswith(f"{imported}."):
            return floor + name.removeprefix(imported)
    return name


@functools.cache
def imported_names(path: Path) -> tuple[str, ...]:
    """Every module that a file may import, by its floor: `from a import b` gives `a` and `a.b`."""
    return tuple(_imported_names(path))


def _imported_names(path: Path) -> Iterator[str]:
    package = path.parent.parts
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (floor_name(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            yield floor_name(module)
            yield from (floor_name(f"{module}.{alias.name}") for alias in node.names)


def test_the_floors_have_files():
    assert {path.parts[0] for path in FILES} == set(FLOORS)


def test_packages_and_checkouts_name_the_floors_alike():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["sources"] == {folder: name.replace(".", "/") for folder, name in IMPORTED.items()}


def test_no_file_is_a_link():
    """Programs that walk through folders would find its target twice, or never."""
    folders = [ROOT / name for name in (*FLOORS, "tests", "benchmarks", "docs", "examples")]
    assert not [path for folder in folders for path in folder.rglob("*") if path.is_symlink()]


def test_imports_point_down():
    for path in FILES:
        above = FLOORS[FLOORS.index(path.parts[0]) + 1 :]
        wrong = [name for name in imported_names(path) if name.split(".")[0] in (*above, "tests")]
        assert not wrong, f"{path} is on floor {path.parts[0]} and imports {wrong}"


@pytest.mark.parametrize(("backend", "doors"), DOORS.items(), ids=DOORS)
def test_a_backend_has_its_doors(backend, doors):
    for path in FILES:
        wrong = [name for name in imported_names(path) if f"{name}.".startswith(f"{backend}.")]
        assert str(path) in doors or not wrong, (
            f"{path} imports {wrong}: only {' and '.join(doors)} may"
        )


@pytest.mark.parametrize(("room", "folder"), CLOSED.items(), ids=CLOSED)
def test_a_closed_room_is_entered_by_its_door(room, folder):
    modules = {f"{room}.{file.stem}" for file in (ROOT / room.replace(".", "/")).glob("[!_]*.py")}
    assert modules
    for path in FILES:
        wrong = modules & set(imported_names(path))
        assert str(path).startswith(folder) or not wrong, f"{path} imports {sorted(wrong)}"


def files_that_are_imported(path: Path) -> set[Path]:
    """The files of the floors that a file imports, but for types alone."""
    for_types = {
        inner
        for node in ast.walk(parse(path))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in node.body
    }
    names = set()
    for node in ast.walk(parse(path)):
        if node not in for_types and isinstance(node, ast.Import):
            names |= {floor_name(alias.name) for alias in node.names}
        elif node not in for_types and isinstance(node, ast.ImportFrom) and node.module:
            # `from a import b` is `a.b` where that is a module, and else what `a` has.
            module = floor_name(node.module)
            inner = {f"{module}.{alias.name}" for alias in node.names}
            names |= {name if file_of(name) else module for name in inner}
    return {file for name in names if (file := file_of(name))}


def file_of(module: str) -> Path | None:
    """The file of a module or a package of these floors, else None."""
    path = Path(*module.split("."))
    return next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f in FILES), None)


@pytest.mark.parametrize("floor", FLOORS)
def test_no_room_of_a_floor_is_in_a_circle(floor):
    rooms: dict[Path, set[Path]] = {}
    for path in FILES:
        if path.parts[0] == floor:
            room = Path(*path.parts[:2])
            others = {Path(*file.parts[:2]) for file in files_that_are_imported(path)} - {room}
            rooms.setdefault(room, set()).update(others)
    assert rooms
    require_no_circle(rooms)


@pytest.mark.parametrize("floor", FLOORS)
def test_no_file_of_a_floor_is_in_a_circle(floor):
    files = {path: files_that_are_imported(path) for path in FILES if path.parts[0] == floor}
    assert files
    require_no_circle(files)


def require_no_circle(imports: dict[Path, set[Path]]) -> None:
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"these import each other: {' ← '.join(map(str, error.args[1]))}")


def test_a_circle_is_seen():
    one, other = Path("one.py"), Path("other.py")
    with pytest.raises(pytest.fail.Exception, match=r"one\.py ← other\.py|other\.py ← one\.py"):
        require_no_circle({one: {other}, other: {one}})


def test_the_root_is_the_public_face():
    """What is neither imported by people nor by several folders has a folder of its own."""
    root = [path for path in FILES if path.parts[0] == "mpjax" and len(path.parts) == 2]
    assert 0 < len(root) <= 12


def test_kernels_need_only_jax_and_numpy():
    for path in FILES:
        if path.parts[0] == "pallas_kernels":
            wrong = {name.split(".")[0] for name in imported_names(path)} - KERNEL_DEPENDENCIES
            assert not wrong, f"{path} imports {sorted(wrong)}"


def test_files_are_short():
    for path in FILES + TEST_FILES + BENCHMARK_FILES:
        lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        assert lines <= MAXIMUM_LINES, f"{path} has {lines} lines: one idea a file"


def test_functions_are_short():
    """Outside of kernels, whose code is one program; a docstring does not count."""
    for path, node in ((file, node) for file in FILES for node in ast.walk(parse(file))):
        if path.parts[0] != "pallas_kernels" and isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= MAXIMUM_BODY, f"{path}: {node.name} has {lines} lines"


def test_functions_have_few_parameters():
    """Arguments that travel together are a type; `*arguments` is one parameter."""
    for path, node in ((file, node) for file in FILES for node in ast.walk(parse(file))):
        if not isinstance(node, ast.FunctionDef):
            continue
        is_command = path.parts[:2] == ("mpjax", "cli") and node.name.endswith("command")
        a = node.args
        names = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
        count = len([name for name in names if name.arg not in ("self", "cls")])
        most = CALLS_WITH_OPTIONS.get(path.as_posix(), {}).get(node.name, MOST_PARAMETERS)
        assert is_command or count <= most, f"{path}: {node.name} has {count} parameters"


def test_what_is_public_is_documented():
    for path in FILES:
        module = parse(path)
        public = [
            node
            for node in module.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if "overload" not in map(ast.unparse, node.decorator_list)
        ]
        bare = [node.name for node in public if not ast.get_docstring(node)]
        assert ast.get_docstring(module), f"{path} has no docstring"
        assert not bare, f"{path} does not document {bare}"
