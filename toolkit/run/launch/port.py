"""How the ranks of one machine find each other: a free port, and the environment that names it."""

from __future__ import annotations

import socket


def reserve_port() -> socket.socket:
    """A socket whose port (`bound_port`) no other process is given until it is closed, but on which a rank may listen.

    Two sockets may be bound to one port where both allow it and at most one listens; torch's store allows it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def bound_port(reserved: socket.socket) -> str:
    """The port of `reserve_port`, as MASTER_PORT has it."""
    return str(reserved.getsockname()[1])


def world_environment(count: int, reserved: socket.socket) -> dict[str, str]:
    """Returns what all of `count` ranks of one world on this machine have in their environment; none where there is
    one."""
    if count == 1:
        return {}
    return {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": bound_port(reserved),
    }
