"""Who was where when it went wrong, group by group, and whose turn it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .records import Record

_UNDER_WAY = ("started", "published")


@dataclass
class Member:
    """One rank of a group: its record, if there is one, and what it did last in the group."""

    rank: int
    pid: int
    record: Record | None = None
    last: dict[str, Any] | None = None  # its last collective in the group
    waits: list[dict[str, Any]] = field(default_factory=list)  # of all its threads, in any group

    def reached(self) -> int:
        """The number of the last collective it began."""
        return int(self.last["seq"]) if self.last else 0

    def wait_in(self, group_id: str) -> dict[str, Any] | None:
        """Its wait in this group, if it has one."""
        return next((w for w in self.waits if w["group_id"] == group_id and w["for"] != "ticket"), None)


@dataclass
class GroupView:
    """A group as all records together show it."""

    id: str
    name: str
    members: list[Member]

    def furthest(self) -> int:
        """The number of the last collective that any rank began."""
        return max(member.reached() for member in self.members)


def groups_of(records: Iterable[Record]) -> list[GroupView]:
    """All groups in the records, those of most ranks first."""
    views: dict[str, GroupView] = {}
    for record in records:
        for group in record["groups"]:
            view = views.setdefault(
                group["id"],
                GroupView(group["id"], group["name"], [Member(r, pid) for r, pid in enumerate(group["pids"])]),
            )
            if group["rank"] >= len(view.members):
                continue
            member = view.members[group["rank"]]
            member.record, member.pid = record, record["pid"]
            member.waits = record["waits"]
            mine = [o for o in record["operations"] if o["group_id"] == group["id"] and o["op"] not in ("send", "recv")]
            member.last = mine[-1] if mine else None
    return sorted(views.values(), key=lambda view: (-len(view.members), view.name))


def words_of_call(call: dict[str, Any]) -> str:
    """ "all_reduce #41" of a collective, "recv from rank 1" of a message."""
    if call["op"] in ("send", "recv"):
        peer = call.get("peer", call.get("root", -1))
        who = f"rank {peer}" if peer >= 0 else "anyone"
        return f"{call['op']} {'to' if call['op'] == 'send' else 'from'} {who}"
    return f"{call['op']} #{call['seq']}"


def _shape(call: dict[str, Any]) -> str:
    """What must be equal on all ranks, in words."""
    words = [call["op"], call["dtype"], call.get("reduce", "")]
    if call["op"] in ("all_gather", "reduce_scatter"):
        words.append(f"parts {call.get('out_splits') or call.get('in_splits') or '?'}")
    elif call["op"] not in ("all_to_all", "gather", "scatter"):
        words.append(f"{call['count']} elements")
    if call["root"] >= 0:
        words.append(f"root {call['root']}")
    return " ".join(filter(None, words))


def _where(member: Member, group_id: str) -> str:
    if member.record is None:
        return "no record"
    wait, last = member.wait_in(group_id), member.last
    at = f" at {last['site']}" if last and last["site"] else ""
    if wait is not None:
        site = f" at {wait['site']}" if wait["site"] else ""
        for_whom = ", ".join(map(str, wait["ranks"]))
        text = f"in {words_of_call(wait)}{site} for {wait['waited_ns'] / 1e9:.3g} s, waits for rank {for_whom}"
    elif last is None:
        text = "has made no call"
    elif last["state"] in _UNDER_WAY:
        text = f"in {words_of_call(last)} ({last['state']}){at}"
    else:
        text = f"last call {words_of_call(last)} ({last['state']}){at}"
    for other in member.waits:
        if other["group_id"] != group_id and other["for"] != "ticket":
            site = f" at {other['site']}" if other["site"] else ""
            text += f'; now in {words_of_call(other)} of group "{other["group"]}"{site}'
    return text


def verdicts(view: GroupView) -> dict[int, str]:
    """What is to be said about a rank, by rank: who has not come, or came with another call."""
    said: dict[int, str] = {}
    furthest = view.furthest()
    there = [m for m in view.members if m.record is not None and m.reached() == furthest and m.last is not None]
    open_calls = [m for m in there if m.last is not None and m.last["state"] != "done"]
    if furthest == 0 or not open_calls:
        return said
    call = words_of_call(open_calls[0].last or {})
    shapes = Counter(_shape(m.last) for m in there if m.last is not None)
    usual = shapes.most_common(1)[0][0]
    for member in there:
        if member.last is not None and _shape(member.last) != usual:
            said[member.rank] = f"<- differs: {_shape(member.last)}, others {usual}"
    for member in view.members:
        if member.record is None:
            said[member.rank] = "<- no record: died before it could write one, or runs on another host"
        elif member.reached() < furthest:
            elsewhere = any(w["group_id"] != view.id and w["for"] != "ticket" for w in member.waits)
            mark = "has not called" if elsewhere else "culprit: has not called"
            said[member.rank] = f"<- {mark} {call}" + (", waits elsewhere" if elsewhere else "")
    if not said:
        for member in there:
            wait = member.wait_in(view.id)
            if member.last is not None and member.last["state"] in _UNDER_WAY and wait is None:
                said[member.rank] = "<- still at work in the call"
    return said


def print_report(records: list[Record]) -> None:
    """Prints every group that has made a call."""
    for why in dict.fromkeys(record["why"] for record in records):
        print(f"why: {why}")
    views = [view for view in groups_of(records) if view.furthest() or any(m.waits for m in view.members)]
    for view in views:
        print(f'\ngroup "{view.name}", {len(view.members)} ranks, {view.furthest()} collectives')
        said = verdicts(view)
        for member in view.members:
            mark = f"   {said[member.rank]}" if member.rank in said else ""
            print(f"  rank {member.rank}   pid {member.pid}   {_where(member, view.id)}{mark}")
        if not said:
            print("  all ranks came to the same calls")
