"""An engine over several processes: process 0 tells the others which programs to launch.

A message is a JSON object and arrays in binary: nothing that is received is executed or unpickled.
The connections are as private as those of JAX: unencrypted, for a network of one's own. A process
proves that it belongs to the engine by a secret that JAX has passed to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import math
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from mpjax.engine.planner import Decode
from mpjax.engine.programs import Reading, Stepping
from mpjax.errors import ProcessLostError
from mpjax.sampling.settings import RowSettings

# The methods of `Programs` that launch a program.
LAUNCHES = frozenset(
    ["extend", "decode", "forward", "choose", "begin_history", "begin_control", "clear", "copy"]
)
CONNECT_SECONDS = 60.0  # for all processes to connect
MOST_STRANGERS = 64  # connections that have not shown the secret yet
SECRET_WORDS = 8
LENGTHS = struct.Struct("!II")  # bytes of a message's JSON, and of its arrays
HELLO = struct.Struct(f"!{4 * SECRET_WORDS}sI")  # the secret, and the number of the process


@dataclasses.dataclass(frozen=True)
class Launch:
    """A call of a method of `Programs`, without its state.

    controlled: whether the state has logits processors. arguments: those after the state, without
    results of `forward` and rows of the plan, and the arrays of a Control in place of the Control.
    how: the keyword arguments, as pairs.
    """

    name: str
    controlled: bool
    arguments: tuple[Any, ...]
    how: tuple[tuple[str, bool], ...]

    @classmethod
    def of(cls, name: str, controlled: bool, arguments: tuple[Any, ...], how: Any) -> Launch:
        """The Launch of a call with these arguments."""
        if name == "choose":
            stepping, plan, _, masks = arguments
            arguments = stepping, plan, masks
        if name == "begin_control":
            numbers, control = arguments
            leaves = None if control is None else tuple(jax.tree.leaves(control))
            arguments = numbers, leaves
        return cls(name, controlled, arguments, tuple(how.items()))


KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (Launch, Reading, Stepping, RowSettings, Decode)
}


def pack(message: Any) -> bytes:
    """A message as bytes: None, bools, numbers, texts, tuples, arrays and the classes of KINDS."""
    arrays: list[np.ndarray] = []

    def written(value: Any) -> Any:
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            arrays.append(np.asarray(value))
            return {"array": [arrays[-1].dtype.name, *arrays[-1].shape]}
        if isinstance(value, tuple | list):
            return [written(one) for one in value]
        if isinstance(value, Decode):
            value = dataclasses.replace(value, rows=[], entries=[])
        if (kind := type(value).__name__) in KINDS:
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return {"kind": kind, **{name: written(one) for name, one in fields.items()}}
        return value

    head = json.dumps(written(message)).encode()
    body = b"".join(array.tobytes() for array in arrays)
    return LENGTHS.pack(len(head), len(body)) + head + body


def unpack(head: bytes, body: bytes) -> Any:
    """The message of `pack`. Lists are tuples. Raises ValueError for other bytes."""
    at = 0

    def read(value: Any) -> Any:
        nonlocal at
        if isinstance(value, list):
            return tuple(read(one) for one in value)
        if not isinstance(value, dict):
            return value
        if "array" in value:
            name, *shape = value["array"]
            dtype, begin = jnp.dtype(name), at
            at += dtype.itemsize * math.prod(shape)
            if min(shape, default=0) < 0 or at > len(body):
                raise ValueError(f"an array of shape {shape} in {len(body)} bytes")
            return np.frombuffer(body[begin:at], dtype).reshape(shape)
        kind = value.pop("kind")
        return KINDS[kind](**{name: read(one) for name, one in value.items()})

    try:
        message = read(json.loads(head))
        if at != len(body):
            raise ValueError(f"{len(body)} bytes for arrays of {at}")
        return message
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a message of another process can't be read: {error!r}") from error


def _received(connection: socket.socket, count: int) -> bytes:
    """The next `count` bytes. Raises ConnectionError if the other side ends before."""
    found = bytearray(count)
    view = memoryview(found)
    while view:
        read = connection.recv_into(view)
        if not read:
            raise ConnectionError("the connection has ended")
        view = view[read:]
    return bytes(found)


def _message(connection: socket.socket) -> Any:
    head, body = LENGTHS.unpack(_received(connection, LENGTHS.size))
    return unpack(_received(connection, head), _received(connection, body))


def _tune(connection: socket.socket) -> None:
    """Sends small messages at once, and notices a machine that is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _shared(port: int) -> tuple[int, bytes]:
    """Process 0's port, and a secret that it has drawn; `port` of other processes is ignored."""
    words = np.frombuffer(secrets.token_bytes(4 * SECRET_WORDS), np.uint32)
    given = np.concatenate([np.array([port], np.uint32), words])
    port, *found = np.asarray(multihost_utils.broadcast_one_to_all(given)).tolist()
    return port, np.array(found, "<u4").tobytes()


class Followers:
    """Process 0's connections to the other processes.

    host: the name or address of this machine for the others. lose: called in another thread with a
    ProcessLostError when one of them has ended.

    Raises ValueError for a host that is not of this machine, and ProcessLostError if a process does
    not connect.
    """

    def __init__(self, host: str, lose: Callable[[Exception], None]) -> None:
        self._lose, self._lock = lose, threading.Lock()
        self._lost: ProcessLostError | None = None
        self._has_lost, self._is_closed = threading.Event(), False
        with _server(host) as server:
            _, secret = _shared(server.getsockname()[1])
            self._connections = _accepted(server, secret)
        for pair in self._connections.items():
            threading.Thread(
                target=self._watch, args=pair, name="mpjax process", daemon=True
            ).start()

    @property
    def lost(self) -> ProcessLostError | None:
        """The error that names the first process that has ended."""
        return self._lost

    def tell(self, name: str, controlled: bool, arguments: tuple[Any, ...], how: Any) -> None:
        """Sends a Launch to all. Raises ProcessLostError if one has ended."""
        message = pack(Launch.of(name, controlled, arguments, how))
        for process, connection in self._connections.items():
            try:
                connection.sendall(message)
            except OSError as error:
                raise self._end_of(process, str(error)) from error

    def why(self, error: Exception, seconds: float = 2.0) -> Exception:
        """The cause of an error: that a process has ended, if that is noticed within `seconds`."""
        self._has_lost.wait(seconds)
        return self._lost or error

    def close(self) -> None:
        """Ends `follow` in the other processes, with the error if a process has ended.

        A second call has no effect.
        """
        self._is_closed = True
        lost = self._lost
        message = pack(None if lost is None else (lost.process, lost.why))
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(message)
                connection.shutdown(socket.SHUT_WR)

    def _watch(self, process: int, connection: socket.socket) -> None:
        """Waits for the end of a process; it says why, if it can."""
        why = "its connection has ended"
        with contextlib.suppress(Exception):  # whatever it has sent, it is lost
            why = str(_message(connection))
        if not self._is_closed:
            self._lose(self._end_of(process, why))
        connection.close()

    def _end_of(self, process: int, why: str) -> ProcessLostError:
        with self._lock:
            self._lost = self._lost or ProcessLostError(process, why)
        self._has_lost.set()
        return self._lost


def _server(host: str) -> socket.socket:
    """A listening socket at a free port of an address of this machine."""
    failure: OSError | None = None
    with contextlib.suppress(UnicodeError):
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        except OSError as error:
            found, failure = [], error
        for family, _, _, _, address in found:
            try:
                return socket.create_server(address[:2], family=family)
            except OSError as error:
                failure = error
    raise ValueError(
        f"host is {host!r}: expected the name or address of process 0's machine, by which the "
        f"other processes reach it ({failure})"
    )


def _accepted(server: socket.socket, secret: bytes) -> dict[int, socket.socket]:
    """A connection to each other process, by its number. Connections without the secret are closed.

    All connections are read at the same time, so that no stranger delays a process.
    """
    others, found = jax.process_count() - 1, dict[int, socket.socket]()
    strangers = dict[socket.socket, bytearray]()  # and what each has sent
    end = time.monotonic() + CONNECT_SECONDS
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ, server)
        try:
            while len(found) < others and (left := end - time.monotonic()) > 0:
                for connection in [key.data for key, _ in selector.select(left)]:
                    if connection is server:
                        with contextlib.suppress(BlockingIOError, ConnectionError):
                            stranger, _ = server.accept()
                            stranger.setblocking(False)
                            strangers[stranger] = bytearray()
                            selector.register(stranger, selectors.EVENT_READ, stranger)
                        if len(strangers) > MOST_STRANGERS:
                            oldest = next(iter(strangers))
                            selector.unregister(oldest)
                            del strangers[oldest]
                            oldest.close()
                    elif connection in strangers and _has_ended_hello(
                        connection, strangers[connection]
                    ):
                        selector.unregister(connection)
                        given = strangers.pop(connection)
                        if len(given) == HELLO.size and hmac.compare_digest(given[:-4], secret):
                            _tune(connection)
                            found[HELLO.unpack(given)[1]] = connection
                        else:
                            connection.close()
        finally:
            for connection in (*strangers, *(found.values() if len(found) < others else ())):
                connection.close()
    if len(found) < others:
        missing = min(set(range(1, others + 1)) - set(found))
        why = f"it has not connected within {CONNECT_SECONDS:.0f} seconds"
        raise ProcessLostError(missing, why)
    return found


def _has_ended_hello(connection: socket.socket, given: bytearray) -> bool:
    """Appends what has been sent to `given`; whether that is a HELLO, or nothing more comes."""
    try:
        read = connection.recv(HELLO.size - len(given))
    except BlockingIOError:
        return False
    except OSError:
        read = b""
    given += read
    return not read or len(given) == HELLO.size


@contextlib.contextmanager
def launches(host: str) -> Iterator[Iterator[Launch]]:
    """The launches of process 0, for another process, until process 0 closes its engine.

    host: the name or address of process 0's machine. If the block raises, process 0 gets the error.

    The iterator raises ProcessLostError if process 0 ends otherwise, or closes its engine because
    another process has ended.
    """
    port, secret = _shared(0)
    try:
        connection = socket.create_connection((host, port), CONNECT_SECONDS)
    except (OSError, UnicodeError) as error:
        raise ProcessLostError(0, f"{host}:{port} can't be reached: {error}") from error
    with connection:
        connection.sendall(HELLO.pack(secret, jax.process_index()))
        _tune(connection)
        try:
            yield _launches(connection)
        except Exception as error:
            with contextlib.suppress(OSError):
                connection.sendall(pack(f"{type(error).__name__}: {error}"))
            raise


def _launches(connection: socket.socket) -> Iterator[Launch]:
    while True:
        try:
            message = _message(connection)
        except OSError as error:
            raise ProcessLostError(0, str(error)) from error
        if message is None:
            return
        if isinstance(message, tuple):
            raise ProcessLostError(*message)
        if not isinstance(message, Launch) or message.name not in LAUNCHES:
            raise ValueError("process 0 has sent a message that launches no program")
        yield message
