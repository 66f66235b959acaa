"""How ranks find each other: through any torch ``Store``, which carries one nonce and a socket name per rank."""

from __future__ import annotations

import secrets
from datetime import timedelta

from torch._C._distributed_c10d import Store

from . import _core
from .errors import CollectiveTimeoutError


def meet(store: Store, rank: int, size: int, name: str, timeout_s: float) -> _core.Communicator:
    """Joins the group ``name`` as one of ``size`` ranks; every rank calls this with the same store, name and size."""
    if not 0 <= rank < size:
        raise ValueError(f"rank must be from 0 to {size - 1}, got {rank}")
    # The same name may be used again later: each rank counts its own uses.
    use = store.add(f"unisono/{name}/uses/{rank}", 1)
    prefix = f"unisono/{name}/{use}"
    door = _core.Door()
    if rank == 0:
        store.set(f"{prefix}/nonce", secrets.token_hex(16))
    store.set(f"{prefix}/{rank}", door.name)
    keys = [f"{prefix}/nonce", *(f"{prefix}/{r}" for r in range(size))]
    values: list[str] = []
    for r, key in enumerate(keys, start=-1):
        try:
            store.wait([key], timedelta(seconds=timeout_s))
        except Exception as error:
            who = "rank 0" if r < 0 else f"rank {r}"
            late = CollectiveTimeoutError(f'group "{name}": {who} did not come within {timeout_s:g} s ({error})')
            late.op, late.group, late.rank, late.peers = "join", name, rank, (max(r, 0),)
            raise late from None
        values.append(store.get(key).decode())
    nonce = bytes.fromhex(values[0])
    identity = int.from_bytes(nonce[:8], "little") | 1
    return door.join(rank, size, name, nonce, identity, timeout_s, values[1:])
