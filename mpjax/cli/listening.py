"""The sockets of `mpjax serve`: bound before the model loads, listening once it can answer."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence

BACKLOG = 2048
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # the machine lacks an address


def bind(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to each address of a host, not listening yet.

    port: 0 for any free port, the same at each address.

    Raises ValueError for a host without an address on this machine, and for a port that is in use
    or not permitted to this user.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"the host {host!r} has no address: choose another with --host") from error
    sockets: list[socket.socket] = []
    failure: ValueError | None = None
    for family, _, _, _, (address, _, *rest) in dict.fromkeys(found):
        port = sockets[0].getsockname()[1] if sockets else port
        try:
            with _explained(host, port):
                sockets.append(_bound(family, (address, port, *rest)))
        except ValueError as error:
            cause = error.__cause__
            # Many machines resolve a name to IPv6's loopback without having that address.
            if not (isinstance(cause, OSError) and cause.errno in ABSENT):
                close(sockets)
                raise
            failure = error
    if failure is not None and not sockets:
        raise failure
    return sockets


def _bound(family: int, address: tuple[str | int, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def listen(sockets: Sequence[socket.socket], host: str) -> str:
    """Makes the sockets of `bind` listen; returns the server's URL.

    Raises ValueError if another program has opened the port since it was bound.
    """
    port = sockets[0].getsockname()[1]
    with _explained(host, port):
        for one in sockets:
            one.listen(BACKLOG)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def close(sockets: Sequence[socket.socket]) -> None:
    """Closes sockets."""
    for one in sockets:
        one.close()


@contextlib.contextmanager
def _explained(host: str, port: int) -> Iterator[None]:
    """Turns the system's errors into a ValueError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} is in use: choose another with --port"
        elif error.errno in ABSENT:
            message = f"{host!r} is no address of this machine: choose another with --host"
        else:
            message = f"port {port} can't be taken ({error.strerror}): choose another with --port"
        raise ValueError(message) from error
