"""Makes the floors also importable by their plain names, `models` and `pallas_kernels`.

The library imports its floors as `mpjax.models` and `mpjax.kernels`, so that a `models.py` in the
working folder, or another installed package of that name, does not get in the way. Where there is
none, the plain names are second names of the same module objects.
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

PLAIN_NAMES = {"models": "mpjax.models", "pallas_kernels": "mpjax.kernels"}


def install() -> None:
    """Adds the finder of plain names to `sys.meta_path`, once."""
    if not any(isinstance(finder, PlainNameFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, PlainNameFinder())


class PlainNameFinder:
    """Finds `models.layers` as `mpjax.models.layers`, unless `models` is another package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a floor's module under its plain name; None for other names."""
        root, _, rest = name.partition(".")
        if root not in PLAIN_NAMES or not _is_ours(root, within=bool(rest)):
            return None
        real = f"{PLAIN_NAMES[root]}.{rest}" if rest else PLAIN_NAMES[root]
        if importlib.util.find_spec(real) is None:
            return None
        loader: Any = _SecondName(real)  # not a subclass of Loader: importlib.abc imports slowly
        return importlib.machinery.ModuleSpec(name, loader)


class _SecondName:
    """Loads a module under a second name. real: its first name."""

    def __init__(self, real: str) -> None:
        self.real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.real)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # importlib has replaced it by the second name's spec


def _is_ours(root: str, within: bool) -> bool:
    """Whether a plain name means a floor of this library, and not another package.

    root: the plain name. within: whether a module inside the package is being imported. In a
    checkout, `models` may have been imported by its plain name before mpjax; it counts as ours too.
    """
    if within:
        imported = sys.modules.get(root)
        origin = getattr(imported, "__file__", None)
    else:
        found = importlib.machinery.PathFinder.find_spec(root)
        if found is None:
            return True
        origin = found.origin
    folder = os.path.join(os.path.dirname(__file__), PLAIN_NAMES[root].rpartition(".")[2])
    floor = os.path.realpath(os.path.join(folder, "__init__.py"))
    return origin is not None and os.path.realpath(origin) == floor
