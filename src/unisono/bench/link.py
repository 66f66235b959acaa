"""The limit between hosts: plain sockets that carry what must leave each host, and nothing else.

One connection per lane, between ranks of the same place on both hosts; each carries an equal share both ways at once.
Nothing is compared, reduced or spread inside the hosts. What TCP does with its queues still differs from run to run.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from .apart.cases import Case
from .apart.turns import Call
from .host_bytes import must_go

if TYPE_CHECKING:
    from unisono.group.group import Group

_START_S = 30.0


@dataclass
class _Share:
    """What goes over one connection in a call."""

    connection: socket.socket
    sends: int
    gets: int

    @property
    def wanted(self) -> int:
        """What poll is to wait for."""
        return (select.POLLOUT if self.sends else 0) | (select.POLLIN if self.gets else 0)


class Link:
    """This rank's connections to other hosts; ``addresses`` are the hosts'. All ranks make theirs together."""

    def __init__(self, group: Group, host_of: Sequence[int], addresses: Sequence[str]) -> None:
        self._host_of = host_of
        self._host = host_of[group.rank]
        self._connections: dict[int, socket.socket] = {}  # by host
        hosts = [[r for r, h in enumerate(host_of) if h == host] for host in range(len(addresses))]
        place = hosts[self._host].index(group.rank)
        self._lanes = [min(len(ranks), len(hosts[self._host])) for ranks in hosts]
        peers = {
            host: ranks[place] for host, ranks in enumerate(hosts) if host != self._host and place < self._lanes[host]
        }
        with socket.create_server((addresses[self._host], 0), backlog=len(hosts)) as listener:
            ports = torch.empty(group.size, dtype=torch.int64)
            group.all_gather(ports, torch.tensor([listener.getsockname()[1]]))
            for host, peer in peers.items():
                if peer > group.rank:
                    connection = socket.create_connection((addresses[host], int(ports[peer])), _START_S)
                    connection.sendall(bytes([self._host]))
                    self._connections[host] = connection
            listener.settimeout(_START_S)
            for _ in range(sum(peer < group.rank for peer in peers.values())):
                connection, _ = listener.accept()
                connection.settimeout(_START_S)
                self._connections[connection.recv(1)[0]] = connection
        for connection in self._connections.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def call(self, case: Case) -> Call | None:
        """Moves this rank's shares; None if the operation has no formula for what must go."""
        table = must_go(case, self._host_of)
        if table is None:
            return None
        shares = []
        for host, connection in self._connections.items():
            sends, gets = (
                -(-int(table[a][b]) // self._lanes[host]) for a, b in ((self._host, host), (host, self._host))
            )
            shares.append(_Share(connection, sends, gets))
        most = max((max(share.sends, share.gets) for share in shares), default=0)
        source, target = memoryview(bytearray(most)), memoryview(bytearray(most))

        def move() -> None:
            _move(shares, source, target)

        return move


def _move(shares: Sequence[_Share], source: memoryview, target: memoryview) -> None:
    left = {share.connection.fileno(): replace(share) for share in shares if share.wanted}
    poll = select.poll()
    for number, share in left.items():
        poll.register(number, share.wanted)
    while left:
        for number, ready in poll.poll():
            share, before = left[number], left[number].wanted
            if share.sends and ready & select.POLLOUT:
                share.sends -= share.connection.send(source[: share.sends])
            if share.gets and ready & ~select.POLLOUT:
                got = share.connection.recv_into(target[: share.gets])
                if not got:
                    raise EOFError("the other host's end of the link is closed")
                share.gets -= got
            if not share.wanted:
                poll.unregister(number)
                del left[number]
            elif share.wanted != before:
                poll.modify(number, share.wanted)
