"""The processes of `mpjax serve`, among whose devices the model is divided."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from mpjax.cli import output

if TYPE_CHECKING:
    import mpjax

Count = Annotated[
    int,
    typer.Option(
        "--processes",
        min=1,
        help="Processes among whose devices the model is divided, on one machine or several; each "
        "is started with the same options and its own --process.",
    ),
]
Number = Annotated[
    int,
    typer.Option(
        "--process", min=0, help="This process's number: 0 takes requests, the others follow it."
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        show_default=False,
        help="Process 0's machine and a free port there, by which processes find each other.",
    ),
]


def join(processes: int, process: int, coordinator: str | None) -> str | None:
    """Waits for the other processes; returns the host of process 0, None if there is one process.

    JAX's devices are those of all processes afterwards.

    Raises ValueError for options that don't fit together, and if the others can't be reached.
    """
    if processes == 1:
        if process or coordinator:
            raise ValueError(
                "--process and --coordinator are for several processes: give their number with "
                "--processes"
            )
        return None
    if process >= processes:
        raise ValueError(
            f"--process is {process}: expected 0 to {processes - 1} with --processes {processes}"
        )
    host, _, port = (coordinator or "").rpartition(":")
    if not host or not port.isdecimal():
        found = "is missing" if coordinator is None else f"is {coordinator!r}"
        raise ValueError(
            f"--coordinator {found}: expected the machine of process 0 and a free port there, such "
            "as 10.0.0.1:12355, the same for all processes"
        )
    import jax

    # JAX waits outside of Python, where Python's handler of Ctrl-C would not be called.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with output.status(f"Waiting for {processes} processes"):
            jax.distributed.initialize(coordinator, processes, process)
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        raise ValueError(f"--coordinator is {coordinator}: no connection ({line})") from error
    finally:
        signal.signal(signal.SIGINT, handler)
    return host.strip("[]")


def all_devices() -> int:
    """The number of devices of all processes."""
    import jax

    return jax.device_count()


def follow(engine: mpjax.Engine, host: str) -> None:
    """Runs process 0's programs until it ends; ends this process if process 0 is lost."""
    from mpjax.errors import ProcessLostError

    output.note("mpjax: follows process 0")
    try:
        engine.follow(host)
    except ProcessLostError as error:
        leave(error)


def leave(error: Exception | None) -> NoReturn:
    """Ends this process with an error: JAX would wait for the lost process, and then abort."""
    output.note(f"mpjax: {error}")
    os._exit(1)
