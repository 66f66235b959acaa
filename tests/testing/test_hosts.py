"""`unisono.testing.hosts`: hosts that can talk, whose bytes are counted, whose links break, and that leave nothing."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from unisono.testing import RankFailure, run_ranks
from unisono.testing.hosts import CannotMakeHosts, Hosts, place_ranks, read_rate, run_on_hosts, why_not

needs_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not())


def all_reduce_on_gloo(elements, rounds=1):
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo")
    x = torch.ones(elements)
    for _ in range(rounds):
        dist.all_reduce(x)
    dist.destroy_process_group()
    return x[0].item(), x[-1].item(), os.environ["UNISONO_TEST_HOST"], os.environ["LOCAL_RANK"]


def die_on_host_1():
    if os.environ["UNISONO_TEST_HOST"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return int(os.environ["RANK"])


def without_root(group):
    os.seteuid(65534)
    try:
        return why_not()
    finally:
        os.seteuid(0)


def listen(port=0):
    server = socket.create_server(("", port))
    server.settimeout(20)
    return server


def read_all(connection):
    while connection.recv(1 << 20):
        pass


def connects(hosts, source, target, timeout_s=1.0):
    """Whether a TCP connection from one host to the other comes about."""
    server = hosts.inside(target, listen)
    with server:
        try:
            where = (hosts.address(target), server.getsockname()[1])
            hosts.inside(source, socket.create_connection, where, timeout_s).close()
        except OSError:
            return False
        return True


def test_places():
    assert place_ranks([2, 1, 3]) == [0, 0, 1, 2, 2, 2]
    assert place_ranks([2, 1, 3], interleaved=True) == [0, 1, 2, 0, 2, 2]


@pytest.mark.parametrize("layout", [[], [0, 0], [2, -1]])
def test_bad_layouts(layout):
    with pytest.raises(ValueError, match="ranks by host"):
        place_ranks(layout)


@needs_hosts
def test_hosts_that_are_not_there():
    with pytest.raises(ValueError, match="1 to 250 hosts"):
        Hosts(0)
    with Hosts(2) as hosts:
        for host in (-1, 2):  # 2 would be the switch
            with pytest.raises(ValueError, match="expected 0 to 1"):
                hosts.namespace(host)
        with pytest.raises(ValueError, match="expected 0 to 1"):
            run_on_hosts([1, 1, 1], die_on_host_1, hosts=hosts)
    with pytest.raises(ValueError, match="of open hosts"):
        hosts.inside(0, os.getpid)


@pytest.mark.parametrize(("rate", "bits"), [("1G", 10**9), ("2.5g", 2_500_000_000), ("100M", 10**8), (7, 7)])
def test_rates(rate, bits):
    assert read_rate(rate) == bits


@pytest.mark.parametrize("rate", ["", "G", "fast", "-1M", "0"])
def test_bad_rates(rate):
    with pytest.raises(ValueError, match="bits per second"):
        read_rate(rate)


@needs_hosts
def test_hosts_are_apart():
    with Hosts(3) as hosts:
        shown = [hosts.run(["ip", "-o", "address"], host=h, capture_output=True, text=True).stdout for h in range(3)]
        outside = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True).stdout
        for h in range(3):
            assert [hosts.address(other) in shown[h] for other in range(3)] == [other == h for other in range(3)]
            assert hosts.address(h) not in outside
        assert connects(hosts, 0, 2)
        assert connects(hosts, 2, 1)


@needs_hosts
@pytest.mark.parametrize("break_link", [Hosts.cut, Hosts.silence])
def test_a_broken_link(break_link):
    with Hosts(3) as hosts:
        assert connects(hosts, 0, 1)
        break_link(hosts, 1)
        assert not connects(hosts, 0, 1)
        assert not connects(hosts, 1, 2)
        assert connects(hosts, 0, 2)
        hosts.mend(1)
        assert connects(hosts, 0, 1, timeout_s=20)
        assert connects(hosts, 1, 2, timeout_s=20)


@needs_hosts
def test_the_rate_is_a_limit():
    size = 4_000_000
    with Hosts(2, rate="16M") as hosts, hosts.inside(1, listen) as server:
        where = (hosts.address(1), server.getsockname()[1])
        with hosts.inside(0, socket.create_connection, where, 20) as sender:
            receiver, _ = server.accept()
            with receiver:
                receiver.settimeout(20)
                start, before = time.monotonic(), hosts.sent_bytes()
                reading = threading.Thread(target=read_all, args=(receiver,))
                reading.start()
                sender.sendall(bytes(size))
                sender.shutdown(socket.SHUT_WR)
                reading.join()
                took, sent = time.monotonic() - start, hosts.sent_bytes()
    assert took > 0.9 * (size - 262144) * 8 / 16e6
    assert size <= sent[0] - before[0] < 1.05 * size
    assert sent[1] - before[1] < 0.05 * size


@needs_hosts
@pytest.mark.parametrize(("interleaved", "times"), [(False, 1.5), (True, 3.0)])
def test_gloo_sends_what_its_ring_must(interleaved, times):
    """A ring of N ranks sends 2(N-1)/N of the data over each of its edges; interleaved, all edges are between hosts."""
    elements = 1 << 20
    with Hosts(2) as hosts:
        results = run_on_hosts([2, 2], all_reduce_on_gloo, elements, interleaved=interleaved, hosts=hosts)
        sent = hosts.sent_bytes()
    assert [r[:2] for r in results] == [(4.0, 4.0)] * 4
    assert [int(r[2]) for r in results] == place_ranks([2, 2], interleaved)
    assert [int(r[3]) for r in results] == ([0, 0, 1, 1] if interleaved else [0, 1, 0, 1])
    for host in range(2):
        assert sent[host] == pytest.approx(times * 4 * elements, rel=0.05)


@needs_hosts
def test_a_host_that_dies():
    results = run_on_hosts([1, 2], die_on_host_1, check=False)
    assert results[0] == 0
    assert [isinstance(r, RankFailure) and r.signal for r in results] == [False, signal.SIGKILL, signal.SIGKILL]


def test_the_reason_without_root():
    assert why_not() or "root" in run_ranks(1, without_root)[0]


def test_the_reason_is_raised(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CannotMakeHosts, match="iproute2"):
        Hosts(2)


OWNER = """
import sys, time, os
from unisono.testing.hosts import Hosts, run_on_hosts
from tests.testing.test_hosts import sleep_long
hosts = Hosts(2)
print(*(os.stat(hosts.namespace(h)).st_ino for h in range(2)), flush=True)
run_on_hosts([1, 1], sleep_long, hosts=hosts)
"""


def sleep_long():
    time.sleep(100)


def users(inodes):
    """Processes that are in one of these network namespaces, or hold it."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            links = [f"/proc/{pid}/ns/net", *(f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd"))]
        except OSError:
            continue
        for link in links:
            try:
                if os.readlink(link) in {f"net:[{inode}]" for inode in inodes}:
                    found.add(pid)
            except OSError:
                continue
    return found


@needs_hosts
def test_nothing_is_left_after_a_kill():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        inodes = [int(word) for word in owner.stdout.readline().split()]
        end = time.monotonic() + 60
        while len(users(inodes)) < 3 and time.monotonic() < end:  # the owner and two ranks
            time.sleep(0.1)
        assert len(users(inodes)) == 3
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    end = time.monotonic() + 20
    while users(inodes) and time.monotonic() < end:
        time.sleep(0.1)
    assert not users(inodes)
