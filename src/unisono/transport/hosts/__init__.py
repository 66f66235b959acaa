"""Groups whose ranks live on several hosts: shared memory inside a host, another engine (gloo) between them.

    joining     who shares a host, found by connecting; the engine; one communicator of the core per host
    layout      which rank is where, and which bytes each lane carries
    engine      send and receive between hosts: a c10d backend (gloo), or MPI
    links       messages of one call between hosts, and how one notices that they have come
    waiting     how one waits for that, asleep if it takes long
    control     who died, left or gave up, told to every host
    presence    whether a rank is still there, asked by those that shrink a group
    survivors   how they agree on who is left
    rejoining   how those make a new group, also if one dies meanwhile
    agreement   how a call begins: all ranks compare what they were asked for
    small       small calls, which are over with that
    bulk        large calls: steps inside the hosts and bytes between them, in pieces that overlap
    streams     what comes from one rank: heads of messages, answers
    message     one send or receive that is under way
    messages    send and recv between hosts
    life        who is in a group, what has happened to them, and how it ends
    calling     how a call is made, and how it waits for messages
    transport   the verbs

Words: a *lane* is one rank on each host, and these exchange messages; the *leader* of a host is its rank of lane 0.
"""

from . import joining

__all__ = ["joining"]
