"""Which bytes each lane carries: all of them, once, in equal shares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.transport.hosts.layout import Layout, lane_pieces
from unisono.transport.spans import joined, spans_of


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 5), st.integers(1, 30), st.data())
def test_lanes_share_everything_equally(counts, lanes, piece, data):
    chosen = [span for span in spans_of(counts) if data.draw(st.booleans())]
    shares = lane_pieces(chosen, lanes, piece)
    covered = sorted(i for pieces in shares for start, end in pieces for i in range(start, end))
    assert covered == [i for start, end in chosen for i in range(start, end)]
    sizes = [sum(end - start for start, end in pieces) for pieces in shares]
    assert max(sizes) - min(sizes) <= 1
    assert all(0 < end - start <= piece for pieces in shares for start, end in pieces)


def test_joined():
    assert joined([(0, 2), (2, 2), (2, 5), (7, 9), (9, 10)]) == [(0, 5), (7, 10)]


@pytest.mark.parametrize(
    ("hosts", "contiguous", "lanes"),
    [([[2, 3], [0, 1]], True, 2), ([[0, 2], [1, 3]], False, 2), ([[0], [1, 2, 3]], True, 3)],
)
def test_layout(hosts, contiguous, lanes):
    layout = Layout(3, hosts, [f"host{h[0]}" for h in hosts])
    assert layout.hosts == sorted(map(sorted, hosts))
    assert layout.is_contiguous is contiguous and layout.lanes == lanes
    assert layout.words(0).startswith("rank 0 on host 0 (host")
    assert layout.mine[layout.local] == 3


def test_tags_of_messages_under_way_differ():
    """Of all groups, calls and pieces that may be under way between two ranks; a hash of 30 bits met itself."""
    from unisono.transport.hosts.links import ACK, CONTROL, DATA, HEADER, LETTER, MOST_CONTEXTS, SEAL, Links

    tags = [
        Links(None, context, 1, [0, 1], 0).tag(kind, seq, index)
        for context in range(8)
        for kind in (HEADER, DATA, SEAL, ACK, CONTROL)
        for seq in range(40, 56)
        for index in range(0, 2048, 7)
    ]
    slots = [
        Links(None, context, 1, [0, 1], 0).message_tag(kind, slot)
        for context in (0, 1, MOST_CONTEXTS - 1)
        for kind in (LETTER, DATA, SEAL, ACK)
        for slot in range(2048 if kind in (DATA, SEAL) else 1)
    ]
    assert len({*tags, *slots}) == len(tags) + len(slots) and min(tags) >= 0 and max(slots) < 1 << 31
