"""Results of an unfinished `mpjax generate --output`, kept so that a later run can resume."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, TextIO

from mpjax.cli import output


def job_name(*what: Any) -> str:
    """A hash of everything that determines a job's results (the repr of the arguments)."""
    return hashlib.sha256(repr(what).encode("utf-8", "surrogatepass")).hexdigest()


class Unfinished:
    """A hidden file beside the output with the results so far, in order of completion.

    target: the output. job: of `job_name`. discards: whether results of another job are dropped.

    Raises ValueError while another process writes results for the same target, and for results of
    another job unless `discards`.

    Attributes:
      results: request number → result of an earlier run of the same job.
    """

    def __init__(self, target: Path, job: str, *, discards: bool = False) -> None:
        target = target.resolve()
        self.path = target.with_name(f".{target.name}.unfinished")
        self._job = job
        self._file = _open_locked(self.path, target)
        self._has_begun = False
        self.results: dict[int, dict[str, Any]] = {}
        found_job, results = self._read()
        if found_job == job:
            self.results = results
        elif results and not discards:
            self._file.close()
            raise ValueError(
                f"{self.path} holds {len(results)} finished result{'s' * (len(results) > 1)} of "
                "another command: run that command again to go on, or give --overwrite to discard "
                "them"
            )

    def add(self, number: int, result: dict[str, Any]) -> None:
        """Appends the result of a request."""
        if not self._has_begun:
            self._begin()
        self._file.write(output.to_json({"number": number, "result": result}) + "\n")
        self._file.flush()

    def close(self, *, is_done: bool) -> None:
        """Closes the file; removes it if the output is written or the file has no results."""
        if is_done or not (self._has_begun or self.results):
            self.path.unlink(missing_ok=True)
        self._file.close()

    def _begin(self) -> None:
        """Writes the job to an empty file; a file with results of an earlier run keeps them."""
        if self.results:
            self._file.write("\n")  # ends a line that was cut off
        else:
            self._file.truncate(0)
            self._file.write(output.to_json({"job": self._job}) + "\n")
        self._has_begun = True

    def _read(self) -> tuple[Any, dict[int, dict[str, Any]]]:
        """The job in the file (None if it names none), and the file's results."""
        text = self.path.read_text(encoding="utf-8", errors="replace")
        first, *others = text.split("\n")
        results = {}
        for line in others:
            found = _parse(line)
            if isinstance(found.get("number"), int) and isinstance(found.get("result"), dict):
                results[found["number"]] = found["result"]
        return _parse(first).get("job"), results


def _open_locked(path: Path, target: Path) -> TextIO:
    """The hidden file of a target, open for appending, and locked while it is open.

    Raises ValueError, which names the target, if another process has locked it.
    """
    from mpjax.checkpoint.staging import try_to_lock  # imports JAX

    while True:
        file = path.open("a", encoding="utf-8", newline="\n")
        if try_to_lock(file.fileno()) is False:
            file.close()
            raise ValueError(
                f"{target} is the output of another process, which is still running: choose "
                "another file, or wait"
            )
        # Another process may have removed the file between its opening and its locking.
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
        file.close()


def _parse(line: str) -> dict[str, Any]:
    """The object in a line; {} for a line that was cut off."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
