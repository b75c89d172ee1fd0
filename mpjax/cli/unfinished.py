"""Results of an interrupted `mpjax generate --output`, kept until all are there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mpjax.cli import output


def job_name(*what: Any) -> str:
    """A hash of what determines a job's results, from its parts as texts."""
    return hashlib.sha256(repr(what).encode("utf-8", "surrogatepass")).hexdigest()


class Unfinished:
    """A hidden file beside the output with the results so far, in the order in which they came.

    target: the output. job: of `job_name`; the results of another job are dropped.

    Raises ValueError while another process writes results for the same target.

    Attributes:
      results: by the number of the request, those of an earlier run of the same job.
    """

    def __init__(self, target: Path, job: str) -> None:
        from mpjax.checkpoint.staging import try_to_lock  # imports JAX

        target = target.resolve()
        self.path = target.with_name(f".{target.name}.unfinished")
        self._job = job
        self._file = self.path.open("a", encoding="utf-8", newline="\n")
        if try_to_lock(self._file.fileno()) is False:
            self._file.close()
            raise ValueError(
                f"{target} is the output of another process, which is still running: choose "
                "another file, or wait"
            )
        self._has_begun = False
        self.results: dict[int, dict[str, Any]] = self._read()

    def add(self, number: int, result: dict[str, Any]) -> None:
        """Keeps the result of a request."""
        if not self._has_begun:
            self._begin()
        self._file.write(output.to_json({"number": number, "result": result}) + "\n")
        self._file.flush()

    def close(self, *, is_done: bool) -> None:
        """Closes the file, and removes it if the output has been written, or it has no results."""
        if is_done or not (self._has_begun or self.results):
            self.path.unlink(missing_ok=True)
        self._file.close()

    def _begin(self) -> None:
        """Writes the file anew, without the end of a line that was being written."""
        lines: list[dict[str, Any]] = [{"job": self._job}]
        lines += [{"number": n, "result": result} for n, result in self.results.items()]
        self._file.truncate(0)
        self._file.writelines(output.to_json(line) + "\n" for line in lines)
        self._has_begun = True

    def _read(self) -> dict[int, dict[str, Any]]:
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return {}
        first, *others = text.split("\n")
        results = {}
        if _parse(first).get("job") == self._job:
            for line in others:
                found = _parse(line)
                if isinstance(found.get("number"), int) and isinstance(found.get("result"), dict):
                    results[found["number"]] = found["result"]
        return results


def _parse(line: str) -> dict[str, Any]:
    """The object in a line; an empty one for a line that was not written to its end."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
