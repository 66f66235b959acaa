"""Who was where when it went wrong, group by group, and whose turn it was.

A rank is called the culprit if the ranks themselves blame it (the cause that a failed group wrote into its records), if
its process is gone, or if others wait for it while it waits for nobody. A dead rank keeps the lines of its last waits,
so that where it was alone says nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .records import Record, printable

_UNDER_WAY = ("started", "published")
_MESSAGES = ("send", "recv")

# The causes of a failed group, as core/group/health.cc words them.
_LOST = re.compile(r"rank (\d+) (died|left) \(pid (\d+)(?:, ([^)]*))?\)")
_INTERRUPTED = re.compile(r"rank (\d+) was interrupted")
_LATE = re.compile(r"Timed out waiting [^:]*: rank (\d+) is ([a-z]+(?: \([^)]*\))?)")


@dataclass
class Member:
    """One rank of a group: its record, if there is one, and what it did last in the group."""

    rank: int
    pid: int
    record: Record | None = None
    last: dict[str, Any] | None = None  # its last collective in the group
    last_message: dict[str, Any] | None = None
    waits: list[dict[str, Any]] = field(default_factory=list)  # of all its threads, in any group; not of tickets
    is_open: bool = False  # it has not left the group

    @property
    def state(self) -> str:
        """What the kernel said of the process; empty: not known."""
        return str(self.record.get("state", "")) if self.record else ""

    def reached(self) -> int:
        """The number of the last collective it began."""
        return int(self.last["seq"]) if self.last else 0

    def wait_in(self, group_id: str) -> dict[str, Any] | None:
        """Its wait in this group, if it has one."""
        return next((w for w in self.waits if w["group_id"] == group_id), None)

    def waits_elsewhere(self, group_id: str) -> bool:
        """Whether it waits in another group, or for a message, and so cannot make a call of this group."""
        return any(w["group_id"] != group_id or w["for"] == "message" for w in self.waits)


@dataclass
class GroupView:
    """A group as all records together show it."""

    id: str
    name: str
    members: list[Member]
    causes: list[str] = field(default_factory=list)  # what the records of its ranks were written for

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
            member.record, member.pid, member.is_open = record, record["pid"], group["open"]
            member.waits = [w for w in record["waits"] if w["for"] != "ticket"]
            mine = [o for o in record["operations"] if o["group_id"] == group["id"]]
            member.last = next((o for o in reversed(mine) if o["op"] not in _MESSAGES), None)
            member.last_message = next((o for o in reversed(mine) if o["op"] in _MESSAGES), None)
            view.causes.append(record["why"])
    return sorted(views.values(), key=lambda view: (-len(view.members), view.name))


def words_of_call(call: dict[str, Any]) -> str:
    """ "all_reduce #41" of a collective, "recv from rank 1" of a message."""
    if call["op"] in _MESSAGES:
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
    wait, last = member.wait_in(group_id), member.last or member.last_message
    at = f" at {last['site']}" if last and last["site"] else ""
    if wait is not None:
        site = f" at {wait['site']}" if wait["site"] else ""
        for_whom = ", ".join(map(str, wait["ranks"]))
        waits = f", waits for rank {for_whom}" if for_whom else ""
        text = f"in {words_of_call(wait)}{site} for {wait['waited_ns'] / 1e9:.3g} s{waits}"
    elif last is None:
        text = "has made no call"
    elif last["state"] in _UNDER_WAY:
        text = f"in {words_of_call(last)} ({last['state']}){at}"
    else:
        text = f"last call {words_of_call(last)} ({last['state']}){at}"
    for other in member.waits:
        if other["group_id"] != group_id:
            site = f" at {other['site']}" if other["site"] else ""
            text += f'; now in {words_of_call(other)} of group "{other["group"]}"{site}'
    return text


def _at_fault(view: GroupView) -> dict[int, str]:
    """Who ended the group, by rank, in words: as the failed ranks say it, or since its process is gone."""
    found: dict[int, str] = {}
    for cause in view.causes:
        for _, how, pid, end in _LOST.findall(cause):
            # A process dies in all its groups at once, and its rank may be another in each; it leaves them one by one.
            if how == "died" or _is_about(cause, view):
                words = f"{how} ({end})" if end else str(how)
                found.update({m.rank: words for m in view.members if m.pid == int(pid)})
        for rank in _INTERRUPTED.findall(cause) if _is_about(cause, view) else []:
            found[int(rank)] = "was interrupted"
    for member in view.members:
        if member.state == "gone" and member.is_open:
            found.setdefault(member.rank, "its process is gone")
    return found


def _is_about(cause: str, view: GroupView) -> bool:
    return f'in group "{view.name}": ' in cause


def _late(view: GroupView) -> dict[int, str]:
    """Of whom ranks said that their time ran out for it, and in which state it was then."""
    found = [match for cause in view.causes if _is_about(cause, view) for match in _LATE.findall(cause)]
    return {int(rank): state for rank, state in found}


def _owed(view: GroupView, at_fault: dict[int, str]) -> tuple[set[int], dict[int, str], set[int]]:
    """Whom living ranks wait for; who owes them a message, in words; and of these, who may leave it to another."""
    awaited: set[int] = set()
    messages: dict[int, str] = {}
    unsure: set[int] = set()
    for member in view.members:
        for wait in member.waits if member.rank not in at_fault else []:
            if wait["group_id"] != view.id:
                continue
            awaited.update(wait["ranks"])
            if wait["for"] == "message":
                done = "sent to" if wait["op"] == "recv" else "received from"
                messages.update({r: f"has not {done} rank {member.rank}" for r in wait["ranks"] if r != member.rank})
                if wait["peer"] < 0:
                    unsure.update(wait["ranks"])
    return awaited, messages, unsure


def verdicts(view: GroupView) -> dict[int, str]:
    """What is to be said about a rank, by rank: who ended the group, has not come, or came with another call."""
    said: dict[int, str] = {}
    furthest = view.furthest()
    there = [m for m in view.members if m.record is not None and m.reached() == furthest and m.last is not None]
    open_calls = [m for m in there if m.last is not None and m.last["state"] != "done"]
    call = words_of_call(open_calls[0].last or {}) if open_calls else ""
    shapes = Counter(_shape(m.last) for m in there if m.last is not None)
    usual = shapes.most_common(1)[0][0] if shapes else ""
    at_fault, late = _at_fault(view), _late(view)
    awaited, messages, unsure = _owed(view, at_fault)
    for member in view.members:
        rank = member.rank
        lacks_call = bool(call) and member.reached() < furthest
        lacks = f"has not called {call}" if lacks_call else messages.get(rank, "")
        is_held_up = member.waits_elsewhere(view.id) if lacks_call else bool(member.waits)
        stopped = "stopped" if member.state == "stopped" else ""
        if rank in at_fault:
            said[rank] = "<- culprit: " + ", ".join(filter(None, (at_fault[rank], lacks if member.record else "")))
        elif member.record is None:
            if call or lacks:
                said[rank] = "<- no record: died before it could write one, or runs on another host"
        elif lacks and is_held_up:
            said[rank] = "<- " + ", ".join(filter(None, (stopped, lacks, "waits elsewhere")))
        elif lacks:  # if another rank is at fault, nobody can know whether this one would have come
            is_sure = not at_fault and (lacks_call or rank not in unsure)
            said[rank] = "<- " + ("culprit: " if is_sure else "") + ", ".join(filter(None, (stopped, lacks)))
        elif open_calls and member in there and member.last is not None and _shape(member.last) != usual:
            said[rank] = f"<- differs: {_shape(member.last)}, others {usual}"
        elif rank in late and not (
            late[rank].startswith("slow") and member.wait_in(view.id)
        ):  # slow by another's fault
            said[rank] = f"<- culprit: {late[rank]} in the call when the others' time ran out"
        elif stopped:
            said[rank] = "<- culprit: stopped in the call" if rank in awaited else "<- stopped"
    if not said:
        for member in there:
            at_work = member.last is not None and member.last["state"] in _UNDER_WAY
            if at_work and member.rank in awaited and member.wait_in(view.id) is None:
                said[member.rank] = "<- still at work in the call"
    return said


def print_report(records: list[Record]) -> None:
    """Prints every group that has made a call."""
    for line in report_lines(records):
        print(printable(line))  # names are others' words


def report_lines(records: list[Record]) -> list[str]:
    """The lines of the report."""
    lines = [f"why: {why}" for why in dict.fromkeys(record["why"] for record in records)]
    views = [view for view in groups_of(records) if view.furthest() or any(m.waits for m in view.members)]
    for view in views:
        lines += ["", f'group "{view.name}", {len(view.members)} ranks, {view.furthest()} collectives']
        said = verdicts(view)
        for member in view.members:
            mark = f"   {said[member.rank]}" if member.rank in said else ""
            lines.append(f"  rank {member.rank}   pid {member.pid}   {_where(member, view.id)}{mark}")
        if not said and view.furthest():
            lines.append("  all ranks came to the same calls")
    return lines
