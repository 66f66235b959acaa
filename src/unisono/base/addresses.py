"""The addresses of this host, and which of them another one reaches."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence

_SIOCGIFADDR = 0x8915


def addresses() -> list[str]:
    """The addresses of this host, the one that reaches the master first; loopback comes last."""
    found = []
    master = os.environ.get("MASTER_ADDR", "")
    if master and (own := address_towards(master)):
        found.append(own)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            own = _address_of(probe, name)
            if own:
                found.append(own)
    return sorted(dict.fromkeys(found), key=lambda a: a.startswith("127."))


def address_towards(host: str) -> str:
    """The address of this host that packets to another have; empty if there is no way."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def choose_address(mine: Sequence[str], theirs: Sequence[str]) -> str:
    """This host's address towards another that has ``theirs``: not loopback, if there is another way."""
    for address in theirs:
        own = address_towards(address)
        if own and (not own.startswith("127.") or address.startswith("127.")):
            return own
    return mine[0] if mine else "127.0.0.1"


def address_of(interface: str) -> str:
    """The address of an interface; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return _address_of(probe, interface)


def interface_of(address: str) -> str:
    """The interface that has an address; empty if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return next((name for _, name in socket.if_nameindex() if _address_of(probe, name) == address), "")


def _address_of(probe: socket.socket, interface: str) -> str:
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
    except OSError:
        return ""
    return socket.inet_ntoa(answer[20:24])
