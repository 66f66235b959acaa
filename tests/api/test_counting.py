"""Numbers that a group gives out, of splits, monitored barriers and requests, to threads that ask at the same time."""

import sys
import threading

import pytest
import torch
import torch.distributed as dist

import unisono
from unisono.torch_backend import monitor
from unisono.torch_backend.adapter import ProcessGroupAdapter
from unisono.transport import backend
from unisono.transport.backend import BackendTransport


def in_step(function, call):
    """The results of `call()` in two threads that begin every line of `function` together."""
    together = threading.Barrier(2)
    results, errors = [], []

    def line(frame, event, _):
        if event == "line":
            together.wait(20)
        return line

    def run():
        sys.settrace(lambda frame, event, _: line if frame.f_code is function.__code__ else None)
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
            together.abort()
        finally:
            sys.settrace(None)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and len(results) == 2, errors
    return results


@pytest.fixture
def group():
    with unisono.Group.from_store(dist.HashStore(), 0, 1, name="counting") as made:
        made.all_reduce(torch.ones(1), async_op=True).wait()  # start its thread
        yield made


def test_splits(group):
    children = in_step(unisono.Group.split, lambda: group.split([0]))
    assert sorted(child.name for child in children) == ["counting/1", "counting/2"]
    for child in children:
        child.close()


def test_splits_of_process_groups(group):
    parent = unisono.ProcessGroupUnisono(group)
    children = in_step(ProcessGroupAdapter.split_group, lambda: parent.split_group([0]))
    assert sorted(child.unisono_group.name for child in children) == ["counting/1", "counting/2"]
    for child in children:
        child.shutdown()


def test_monitored_barriers(group, monkeypatch):
    tags = []
    monkeypatch.setattr(monitor, "barrier", lambda *_, tag: tags.append(tag))
    parent = unisono.ProcessGroupUnisono(group)
    in_step(ProcessGroupAdapter.monitored_barrier, parent.monitored_barrier)
    assert sorted(tags) == [-2, -1]


class Elsewhere:
    """As much of another backend's group as a transport asks for when it is made."""

    _device_types = (torch.device("cpu"),)

    def rank(self):
        return 0

    def size(self):
        return 1


def test_compared_requests(monkeypatch):
    numbers = []
    monkeypatch.setattr(dist, "all_gather", lambda *_, **__: None)
    monkeypatch.setattr(backend, "compare", lambda pg, seq, *_: numbers.append(seq))
    pg = Elsewhere()
    transport = BackendTransport(pg)
    in_step(BackendTransport._compare, lambda: transport._compare("all_gather", torch.float32, counts=[1]))
    assert sorted(numbers) == [1, 2]
