"""The sockets of a server."""

from __future__ import annotations

import socket

import pytest

from mpjax.cli import listening

pytestmark = pytest.mark.any_version


def test_nobody_connects_before_listening():
    sockets = listening.bind("127.0.0.1", 0)
    address = sockets[0].getsockname()
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        assert listening.listen(sockets, "127.0.0.1") == f"http://127.0.0.1:{address[1]}"
        socket.create_connection(address, timeout=5).close()
        with pytest.raises(ValueError, match=f"port {address[1]} is in use: choose another with"):
            listening.bind("127.0.0.1", address[1])
    finally:
        listening.close(sockets)


def test_a_port_that_another_program_opens_meanwhile():
    first = listening.bind("127.0.0.1", 0)
    port = first[0].getsockname()[1]
    second = listening.bind("127.0.0.1", port)
    try:
        listening.listen(second, "127.0.0.1")
        with pytest.raises(ValueError, match=f"port {port} is in use"):
            listening.listen(first, "127.0.0.1")
    finally:
        listening.close([*first, *second])


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("no-such-host.invalid", "the host 'no-such-host.invalid' has no address: choose another"),
        ("a" * 70, "has no address: choose another with --host"),
        ("192.0.2.1", "'192.0.2.1' is no address of this machine: choose another with --host"),
    ],
)
def test_hosts_that_can_not_be_listened_at(host, message):
    with pytest.raises(ValueError, match=message):
        listening.bind(host, 0)
