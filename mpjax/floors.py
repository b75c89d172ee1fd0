"""Finds the lower floors, `mpjax.models` and `mpjax.kernels`, in a wheel and in a checkout.

A wheel has both folders inside `mpjax`, as Python expects. A checkout has them beside `mpjax`, as
`models` and `pallas_kernels`.

These plain names are also aliases of the same module objects, in a wheel too, unless another module
or package has the name. The library itself doesn't use them.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False  # `import typing` would double the time that `import mpjax` takes
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any

# Folder in a checkout (the plain name) → name in the package, as in pyproject.toml's `sources`.
FLOORS = {"models": "mpjax.models", "pallas_kernels": "mpjax.kernels"}
PACKAGE = os.path.dirname(os.path.abspath(__file__))


def install() -> None:
    """Adds a FloorFinder to `sys.meta_path`, once."""
    if not any(isinstance(finder, FloorFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, FloorFinder())


class FloorFinder:
    """Finds `mpjax.models` beside `mpjax`, and aliases `models.layers` to `mpjax.models.layers`.

    Python itself finds `mpjax.models.layers` in the folder of `mpjax.models`.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a floor, or of a module under its plain name; None for other names."""
        root, _, rest = name.partition(".")
        if root == "mpjax":
            return _beside_the_package(name)
        if root not in FLOORS or not _is_ours(root, within=bool(rest)):
            return None
        first = importlib.util.find_spec(f"{FLOORS[root]}.{rest}" if rest else FLOORS[root])
        if first is None:
            return None
        loader: Any = _SecondName(first)  # not a subclass of Loader: importlib.abc imports slowly
        return importlib.machinery.ModuleSpec(name, loader, origin=first.origin)


class _SecondName:
    """Loads a module under an alias. first: the spec of the original name."""

    def __init__(self, first: importlib.machinery.ModuleSpec) -> None:
        self.first = first

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.first.name)
        self.spec = module.__spec__
        return module

    def get_code(self, name: str) -> Any:  # for `python -m`
        loader: Any = self.first.loader
        return loader.get_code(self.first.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # importlib has replaced it by the alias's spec


def _beside_the_package(name: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of a floor in a checkout; None for other names, and in a wheel."""
    folders = [folder for folder, floor in FLOORS.items() if floor == name]
    if not folders or os.path.isdir(os.path.join(PACKAGE, name.rpartition(".")[2])):
        return None
    folder = os.path.join(os.path.dirname(PACKAGE), folders[0])
    file = os.path.join(folder, "__init__.py")
    if not os.path.isfile(file):
        return None
    return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[folder])


def _is_ours(root: str, within: bool) -> bool:
    """Whether a plain name refers to a floor of this library, not to another package.

    root: the plain name. within: whether a module inside the package is being imported. In a
    checkout, `models` may have been imported by its plain name before mpjax; that counts, too.
    """
    if within:
        imported = sys.modules.get(root)
        origin = getattr(imported, "__file__", None)
    else:
        found = importlib.machinery.PathFinder.find_spec(root)
        if found is None:
            return True
        origin = found.origin
    floor = importlib.util.find_spec(FLOORS[root])
    if origin is None or floor is None or floor.origin is None:
        return False
    return os.path.realpath(origin) == os.path.realpath(floor.origin)
