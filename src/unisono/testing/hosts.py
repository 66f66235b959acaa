"""Several hosts on one machine: network namespaces with an Ethernet switch between them.

    with Hosts(2, rate="1G") as hosts:
        hosts.run(["ip", "address"], host=1)
        run_on_hosts([2, 2], train, 10, hosts=hosts)

Each host is a network namespace of its own with `lo` and `eth0`; the other end of each `eth0` is a port of a bridge
in one more namespace, the switch. Abstract Unix sockets belong to a network namespace, so ranks of different hosts
cannot share memory here either.

Nothing has a name in the machine's own network, and nothing can be left behind: a namespace lives as long as somebody
holds a file descriptor of it or runs in it. Here that is the `Hosts` object and what it started, so that also SIGKILL
ends it, and the kernel takes the links and addresses with it.

To be inside is a property of a thread (setns): commands are started by a thread that has moved, the caller stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from unisono.testing import RankPool, _pickle_call, _run_once
from unisono.testing.fork_server import CLONE_NEWNET
from unisono.testing.processes import Ranks

__all__ = ["CannotMakeHosts", "HostPool", "Hosts", "place_ranks", "run_on_hosts", "why_not"]

INTERFACE = "eth0"
SEGMENT = 1514  # bytes of a full TCP segment on it
MOST_HOSTS = 250  # as many as addresses
NOBODY = "02:00:00:00:00:01"  # an Ethernet address that no host here has

T = TypeVar("T")


class CannotMakeHosts(RuntimeError):
    """Hosts cannot be made here; says what is missing."""


def why_not() -> str:
    """Why hosts cannot be made on this machine; empty if they can. For `pytest.mark.skipif`."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "hosts are made by ip and tc (package iproute2), which are not installed"
    try:
        os.close(_new_namespace())
    except OSError as error:
        return f"no network namespace can be made ({error.strerror}): this needs root, with CAP_SYS_ADMIN"
    return ""


class Hosts:
    """`n` hosts, h = 0 … n-1, with addresses `hosts.address(h)` that exist only there.

    `rate` limits what each host can send, in bits per second: "1G", "100M", or a number. Close it, or use `with`.
    """

    def __init__(self, n: int, rate: str | int | None = None) -> None:
        if not 1 <= n <= MOST_HOSTS:
            raise ValueError(f"n: expected 1 to {MOST_HOSTS} hosts, got {n}")
        if reason := why_not():
            raise CannotMakeHosts(reason)
        self.size = n
        self._namespaces: list[int] = []  # the hosts' file descriptors, then the switch's
        try:
            for _ in range(n + 1):
                self._namespaces.append(_new_namespace())
            self._connect()
            if rate is not None:
                self.limit(rate)
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        return f"10.99.0.{1 + host}"

    def namespace(self, host: int) -> str:
        """A path of the host's network namespace, as `nsenter --net=PATH` takes it; good as long as this object."""
        return f"/proc/{os.getpid()}/fd/{self._fd(host)}"

    def inside(self, host: int, fn: Callable[..., T], *args: Any) -> T:
        """`fn(*args)` in a thread that is in `host`: sockets it makes and processes it starts are there."""
        return _inside(self._fd(host), fn, *args)

    def run(self, command: Sequence[str], *, host: int, **options: Any) -> subprocess.CompletedProcess[Any]:
        """`subprocess.run` in `host`."""
        return self.inside(host, lambda: subprocess.run(command, **options))

    def sent_bytes(self) -> list[int]:
        """Bytes that have left each host so far, with headers, without what TCP sent twice (see `_count_twice`)."""
        return [self.inside(host, _count_sent) for host in range(self.size)]

    def limit(self, rate: str | int | None) -> None:
        """Limits what each host can send per second, by tc's token bucket; None takes the limit away."""
        for host in range(self.size):
            self._command(host, f"tc qdisc delete dev {INTERFACE} root", check=False)
            if rate is not None:
                bits = read_rate(rate)
                # One millisecond's worth may go at once, and no less than two of the largest packets.
                burst = max(131072, bits // 8 // 1000)
                self._command(host, f"tc qdisc add dev {INTERFACE} root tbf rate {bits}bit burst {burst} latency 50ms")

    def cut(self, host: int) -> None:
        """Pulls the host's cable out of the switch: its interface has no carrier."""
        self._command(self.size, f"ip link set port{host} down")

    def silence(self, host: int) -> None:
        """Makes what the host sends to the others go nowhere, with no sign of it."""
        for other in range(self.size):
            if other != host:
                self._command(
                    host, f"ip neigh replace {self.address(other)} lladdr {NOBODY} nud permanent dev {INTERFACE}"
                )

    def mend(self, host: int) -> None:
        """Undoes `cut` and `silence`."""
        self._command(self.size, f"ip link set port{host} up")
        for other in range(self.size):
            if other != host:
                self._command(host, f"ip neigh delete {self.address(other)} dev {INTERFACE}", check=False)

    def close(self) -> None:
        """Lets go of the hosts; they are gone once the last process in them has ended."""
        while self._namespaces:
            os.close(self._namespaces.pop())

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _connect(self) -> None:
        switch = self.size
        self._command(switch, "ip link add switch type bridge forward_delay 0")
        self._command(switch, "ip link set switch up")
        for host in range(self.size):
            port = f"port{host}"
            self._command(switch, f"ip link add {port} type veth peer name {INTERFACE} netns {self.namespace(host)}")
            self._command(switch, f"ip link set {port} master switch up")
            self._command(host, "ip link set lo up")
            # No IPv6 address, whose announcements would be counted.
            self._command(host, f"ip link set {INTERFACE} addrgenmode none")
            self._command(host, f"ip address add {self.address(host)}/24 dev {INTERFACE}")
            self._command(host, f"ip link set {INTERFACE} up")

    def _fd(self, host: int) -> int:
        if not 0 <= host < self.size or not self._namespaces:
            raise ValueError(f"host: expected 0 to {self.size - 1} of open hosts, got {host}")
        return self._namespaces[host]

    def _command(self, host: int, line: str, check: bool = True) -> None:
        """Runs a command in a host, or in the switch, whose number follows the hosts'."""
        run = partial(subprocess.run, line.split(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
        done = _inside(self._namespaces[host], run)
        if check and done.returncode:
            raise CannotMakeHosts(f"{line}: {done.stderr.strip()}")


def place_ranks(layout: Sequence[int], interleaved: bool = False) -> list[int]:
    """The host of each rank: `layout` has the number of ranks of each host.

    >>> place_ranks([2, 1]), place_ranks([2, 2], interleaved=True)
    ([0, 0, 1], [0, 1, 0, 1])
    """
    if not sum(layout) or min(layout) < 0:
        raise ValueError(f"layout: expected numbers of ranks by host such as [2, 2], got {list(layout)}")
    if not interleaved:
        return [host for host, count in enumerate(layout) for _ in range(count)]
    return [host for turn in range(max(layout)) for host, count in enumerate(layout) if turn < count]


def run_on_hosts(
    layout: Sequence[int],
    fn: Callable[..., Any],
    *args: Any,
    interleaved: bool = False,
    hosts: Hosts | None = None,
    timeout_s: float = 60.0,
    grace_s: float = 10.0,
    num_threads: int = 1,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> list[Any]:
    """Call `fn(*args)` on new ranks, `layout[h]` of them in host h, and return what each of them returned, by rank::

        def total():                                    # at the top level of a module
            dist.init_process_group("unisono")
            t = torch.ones(4)
            dist.all_reduce(t)
            dist.destroy_process_group()
            return t.tolist()

        run_on_hosts([2, 2], total)

    A rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as
    under torchrun, and UNISONO_TEST_HOST, the number of its host. The address is that of rank 0's host, the port is
    free there; rank 0 has to serve it, as `dist.init_process_group` and `Group.from_env` do. Ranks 0, 1, … fill the
    hosts one after the other, or go around them if `interleaved`. `hosts` may be given, with a rate, or to cut links
    from another thread while this runs; else new ones are made and removed. All else is as in `run_ranks`.
    """
    call = _pickle_call(fn, args)
    with contextlib.nullcontext(hosts) if hosts is not None else Hosts(len(layout)) as used:
        places = list(_describe_places(used, place_ranks(layout, interleaved)))
        return _run_once(Ranks(len(places), timeout_s, num_threads, env, places), call, timeout_s, grace_s, check)


class HostPool(RankPool):
    """Ranks on hosts that stay, for many short calls; each is as one of `run_on_hosts`, without a group::

        with Hosts(2, rate="1G") as hosts, HostPool([2, 2], hosts=hosts) as pool:
            pool.run(start, "gloo")           # def start(backend): dist.init_process_group(backend)
            pool.run(reduce_something, 1000)

    The ranks end with the pool.
    """

    def __init__(
        self,
        layout: Sequence[int],
        *,
        hosts: Hosts,
        interleaved: bool = False,
        num_threads: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> None:
        host_of = place_ranks(layout, interleaved)
        super().__init__(len(host_of))
        self._start = lambda: Ranks(self.size, 60.0, num_threads, env, list(_describe_places(hosts, host_of)))


def sent_by(namespaces: Sequence[str]) -> list[int]:
    """As `Hosts.sent_bytes`, from any process, by paths of the hosts' namespaces."""
    counts = []
    for path in namespaces:
        with open(path) as file:
            counts.append(_inside(file.fileno(), _count_sent))
    return counts


def _describe_places(hosts: Hosts, host_of: list[int]) -> Iterator[dict[str, Any]]:
    port = hosts.inside(host_of[0], _free_port)
    for rank, host in enumerate(host_of):
        env = {
            "RANK": rank,
            "WORLD_SIZE": len(host_of),
            "LOCAL_RANK": host_of[:rank].count(host),
            "LOCAL_WORLD_SIZE": host_of.count(host),
            "MASTER_ADDR": hosts.address(host_of[0]),
            "MASTER_PORT": port,
            "UNISONO_TEST_HOST": host,
        }
        yield {"namespace": hosts.namespace(host), "env": {name: str(value) for name, value in env.items()}}


def read_rate(rate: str | int) -> int:
    """Bits per second: "1G" and 1_000_000_000 are the same."""
    if isinstance(rate, int):
        return rate
    number, factor = rate, 1
    if rate and rate[-1].upper() in "KMG":
        number, factor = rate[:-1], 1000 ** ("KMG".index(rate[-1].upper()) + 1)
    try:
        bits = int(float(number) * factor)
    except ValueError:
        bits = 0
    if bits <= 0:
        raise ValueError(f"rate: expected bits per second such as 1G or 100M, got {rate!r}")
    return bits


def _in_thread(fn: Callable[[], T]) -> T:
    """`fn()` in a thread of its own, so that its moves between namespaces end with it."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((fn(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _new_namespace() -> int:
    def make() -> int:
        _call_libc("unshare", CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _in_thread(make)


def _inside(namespace: int, fn: Callable[..., T], *args: Any) -> T:
    def move_and_run() -> T:
        _call_libc("setns", namespace, CLONE_NEWNET)
        return fn(*args)

    return _in_thread(move_and_run)


def _call_libc(name: str, *args: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _count_sent() -> int:
    with open("/proc/thread-self/net/dev", encoding="ascii") as file:
        for line in file:
            name, _, fields = line.partition(":")
            if name.strip() == INTERFACE:
                return int(fields.split()[8]) - SEGMENT * _count_twice()
    raise OSError(f"{INTERFACE} is not there")


def _count_twice() -> int:
    """Segments that came to their receiver twice, as it told us: on a busy machine that may be a tenth of all.

    What was sent again because the first was lost is not among them: a full queue loses it before it is counted.
    """
    with open("/proc/thread-self/net/netstat", encoding="ascii") as file:
        names, values = (line.split() for line in file if line.startswith("TcpExt:"))
    return int(dict(zip(names, values, strict=True)).get("TCPDSACKRecvSegs", 0))  # since Linux 5.9


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
