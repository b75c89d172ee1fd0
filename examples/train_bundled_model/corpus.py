"""The training text: the Python standard library of the interpreter that runs this.

A document is one source file. The corpus depends on the Python version, but the split into
training and held-out files does not: it follows from the module's name alone. So perplexity is
measured on a fixed file, `mpjax/bundled/held_out.jsonl`, and no version of Python can bring those
modules into the training set.
"""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BUNDLED = Path(__file__).resolve().parents[2] / "mpjax" / "bundled"
HELD_OUT_FILE = BUNDLED / "held_out.jsonl"

HELD_OUT_SHARE = 0.035  # of all modules
BUNDLED_DOCUMENT_BYTES = 40_000  # longer held-out files would outweigh all the others

# Installed packages are not the standard library; test suites are mostly data and repetition;
# `encodings` is tables and dozens of copies of one codec class.
EXCLUDED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__",
}  # fmt: skip
# These describe one machine's build.
EXCLUDED_NAMES = re.compile(r"_sysconfigdata.*\.py|sitecustomize\.py|python-config\.py")
# A line that starts with a string or number literal, as in a table; a docstring is not one.
TABLE_ROW = re.compile(r"""\s*[\[({]*\s*(?!\w*(?:'''|\"\"\"))(?:[rbuf]*['"]|-?\d)""")


@dataclass(frozen=True)
class Document:
    """One source file: its `path` relative to the standard library, with `/`, and its `text`."""

    path: str
    text: str


def documents(folder: Path | None = None) -> list[Document]:
    """Python sources under `folder` (default: this interpreter's standard library), by path.

    Leaves out test suites, installed packages, codecs, files that are mostly a table, files
    that are blank or not UTF-8, and all but the first of files with equal text. Line ends
    become line feeds. Raises ValueError if nothing remains.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    found: dict[str, Document] = {}  # by text
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    for name, path in sorted(paths.items()):
        if EXCLUDED_FOLDERS.intersection(path.relative_to(folder).parts[:-1]):
            continue
        if EXCLUDED_NAMES.fullmatch(path.name):
            continue
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if text.strip() and not is_table(text):
            found.setdefault(text, Document(name, text))
    if not found:
        raise ValueError(
            f"{folder} holds no Python sources to train on; use a Python whose standard library "
            "is installed as .py files."
        )
    return list(found.values())


def is_table(text: str) -> bool:
    """Whether more than half of the non-blank lines begin with a literal."""
    lines = [line for line in text.splitlines() if line.strip()]
    return 2 * sum(TABLE_ROW.match(line) is not None for line in lines) > len(lines)


def is_held_out(path: str) -> bool:
    """Whether the module at this relative path belongs to the held-out set, in every version.

    The hash is of the module's name, so `zipfile.py` stays on its side of the split when a
    later Python turns it into `zipfile/__init__.py`.
    """
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    digest = hashlib.sha256(module.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def split(documents: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """The documents as (train, held_out), each in the given order."""
    train: list[Document] = []
    held_out: list[Document] = []
    for document in documents:
        (held_out if is_held_out(document.path) else train).append(document)
    return train, held_out


def select_bundled(held_out: Iterable[Document]) -> list[Document]:
    """The held-out documents short enough to ship, so that no single one dominates."""
    return [d for d in held_out if len(d.text.encode()) <= BUNDLED_DOCUMENT_BYTES]


def write_held_out(documents: Sequence[Document], file: Path = HELD_OUT_FILE) -> None:
    """Write one JSON object `{"path", "text"}` per line, ASCII only, so line ends are safe."""
    lines = (json.dumps(asdict(document)) + "\n" for document in documents)
    file.write_bytes("".join(lines).encode("ascii"))


def read_held_out(file: Path = HELD_OUT_FILE) -> list[Document]:
    """The documents that `write_held_out` wrote: the text that perplexity is measured on."""
    return [Document(**json.loads(line)) for line in file.read_bytes().splitlines()]
