"""Makes `build/tree/mpjax`, where tools that read files find an editable install whole.

A checkout has the folders `models` and `pallas_kernels` beside `mpjax`, and Python finds them by
`mpjax/floors.py`. Type checkers, and programs that write documentation or draw import graphs, don't
run that. The tree has links to all folders, and these two are where a wheel has them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LinkedTree(BuildHookInterface):
    """Makes the tree before an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Links what is in `mpjax`, and the folders that pyproject.toml's `sources` move there."""
        if version != "editable":
            return
        root, tree = Path(self.root), Path(self.root, "build", "tree")
        shutil.rmtree(tree, ignore_errors=True)
        (tree / "mpjax").mkdir(parents=True)
        links = {f"mpjax/{path.name}": path for path in (root / "mpjax").iterdir()}
        links |= {name: root / folder for folder, name in self.build_config.sources.items()}
        for name, path in links.items():
            (tree / name).symlink_to(os.path.relpath(path, (tree / name).parent))
