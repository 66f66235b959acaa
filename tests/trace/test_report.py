"""Verdicts on records made up for the purpose: the culprit is marked, nobody else is."""

import json

import pytest

from tests.trace.made import operation, record, wait
from unisono import top
from unisono.trace import records as reading
from unisono.trace.report import groups_of, print_report, report_lines, verdicts

WORLD = {"world": [0, 1, 2]}


def _verdicts(records):
    (view,) = groups_of(records)
    return verdicts(view)


def _published(seq=2):
    return [operation("all_reduce", 1, "world"), operation("all_reduce", seq, "world", state="published")]


DIED = 'all_reduce #2 in group "world": rank 2 died (pid 102, signal 9)'


@pytest.mark.parametrize("how", ["records", "live"])
def test_a_rank_that_was_killed_inside_the_call_is_the_culprit(how):
    """It keeps its line: it seems to wait for rank 1. Rank 0 was reducing, and has none."""
    why, gone = (DIED, {}) if how == "records" else ("read by a tool", {"state": "gone"})
    made = [
        record(0, WORLD, _published(), why=why),
        record(1, WORLD, _published(), [wait("all_reduce", 2, "world", [2], "data")], why=why),
        record(2, WORLD, _published(), [wait("all_reduce", 2, "world", [1])], why=why, **gone),
    ]
    said = _verdicts(made)
    assert set(said) == {2} and said[2].startswith("<- culprit: "), said
    assert ("died (signal 9)" if how == "records" else "gone") in said[2], said


def test_who_had_not_come_yet_is_no_culprit_of_a_death():
    made = [
        record(0, WORLD, _published(), why=DIED),
        record(1, WORLD, _published()[:1], why=DIED),
        record(2, WORLD, _published(), [wait("all_reduce", 2, "world", [1])], why=DIED),
    ]
    said = _verdicts(made)
    assert "culprit" in said[2] and said[1] == "<- has not called all_reduce #2" and 0 not in said, said


def test_a_death_in_one_group_is_a_death_in_all():
    """The rank in the cause is that of the group that failed; the process has another one here."""
    groups = {"pair": [2, 1]}
    made = [
        record(2, groups, [operation("barrier", 1, "pair", state="published")], why=DIED),
        record(1, groups, [operation("barrier", 1, "pair", state="published")], why=DIED),
    ]
    assert list(_verdicts(made)) == [0]


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("rank 1 left (pid 101): the program ended", "left"),
        ("rank 1 was interrupted (reported by rank 1)", "interrupt"),
    ],
)
def test_who_left_or_was_interrupted_is_the_culprit_of_that_group_only(cause, words):
    groups = {"world": [0, 1], "other": [0, 1]}
    why = f'all_reduce #2 in group "world": {cause}'
    calls = [*_published(), operation("barrier", 1, "other")]
    by_name = {v.name: verdicts(v) for v in groups_of([record(r, groups, calls, why=why) for r in range(2)])}
    assert list(by_name["world"]) == [1] and "culprit" in by_name["world"][1] and words in by_name["world"][1]
    assert not by_name["other"]


@pytest.mark.parametrize("its_waits", [[], [wait("all_reduce", 2, "world", [1], "data")]])
def test_a_rank_stopped_inside_the_call_when_the_time_ran_out(its_waits):
    why = 'all_reduce #2 in group "world": Timed out waiting 20 s: rank 2 is stopped (reported by rank 0)'
    waits = [wait("all_reduce", 2, "world", [2], "data")]
    made = [record(r, WORLD, _published(), waits if r < 2 else its_waits, why=why) for r in range(3)]
    said = _verdicts(made)
    assert set(said) == {2} and "culprit: stopped" in said[2], said
    slow = [{**one, "why": why.replace("stopped", "slow (sleeping)")} for one in made]
    assert ("culprit: slow" in _verdicts(slow).get(2, "")) == (not its_waits), (
        "who waits may be slow by another's fault"
    )


def test_a_message_that_nobody_sends():
    made = [
        record(0, WORLD, [], [wait("recv", 1, "world", [2], "message")]),
        record(1, WORLD, []),
        record(2, WORLD, [operation("send", 1, "world", root=1)]),
    ]
    said = _verdicts(made)
    assert said == {2: "<- culprit: has not sent to rank 0"}, said
    lines = report_lines(made)
    assert any("recv from rank 2" in line for line in lines) and any(
        "last call send to rank 1" in line for line in lines
    )
    assert not any("all ranks came" in line for line in lines)


def test_a_message_that_nobody_takes():
    made = [
        record(0, WORLD, [], [wait("send", 1, "world", [1], "message")]),
        record(1, WORLD, []),
        record(2, WORLD, []),
    ]
    assert _verdicts(made) == {1: "<- culprit: has not received from rank 0"}


def test_ranks_that_wait_for_each_others_messages_are_none_of_them_the_culprit():
    made = [record(r, WORLD, [], [wait("recv", 1, "world", [(r + 1) % 3], "message")]) for r in range(3)]
    said = _verdicts(made)
    assert set(said) == {0, 1, 2} and all("waits elsewhere" in s and "culprit" not in s for s in said.values()), said


def test_a_rank_that_waits_for_a_message_is_no_culprit_of_a_call():
    """Rank 0 has not come to the barrier, but waits for rank 1, which is in it."""
    groups = {"world": [0, 1]}
    barrier = operation("barrier", 1, "world", state="published")
    made = [
        record(0, groups, [], [wait("recv", 1, "world", [1], "message")]),
        record(1, groups, [barrier], [wait("barrier", 1, "world", [0])]),
    ]
    said = _verdicts(made)
    assert set(said) == {0, 1} and not any("culprit" in s for s in said.values()), said
    assert "has not called barrier #1" in said[0], said


def test_a_message_from_anyone_has_no_sure_culprit():
    anyone = wait("recv", 1, "world", [1, 2], "message", peer=-1)
    said = _verdicts([record(0, WORLD, [], [anyone]), record(1, WORLD, []), record(2, WORLD, [])])
    assert said == {1: "<- has not sent to rank 0", 2: "<- has not sent to rank 0"}, said


EVIL = "\x1b]0;owned\x07\x1b[2Jworld\r\n\u202e\x9b"


def _evil():
    """All that another process writes freely."""
    free = {"group": EVIL, "site": EVIL}
    calls = [operation("all_reduce", 1, "g") | free]
    waits = [wait("barrier", 2, group, [0]) | free for group in "gh"]
    made = record(0, {"g": [0, 1]}, calls, waits, why=EVIL)
    made["groups"][0]["name"] = EVIL
    return [made]


def test_names_of_others_do_nothing_to_the_terminal(capsys):
    print_report(_evil())
    shown = capsys.readouterr().out
    lines = [*shown.splitlines(), *top.lines_of(top.look(_evil(), {}, 1.0))]
    assert shown.count("world") >= 3 and all(line.isprintable() for line in lines), lines
    assert any("\\x1b[2Jworld" in line for line in lines)


def test_printable_leaves_words_as_they_are():
    assert reading.printable("обучение 模型 µ") == "обучение 模型 µ"


def test_a_record_is_saved_in_the_folder(tmp_path):
    made = record(0, WORLD, [], host="../../elsewhere")
    reading.save([made], tmp_path / "in" / "here")
    (path,) = (tmp_path / "in" / "here").iterdir()
    assert json.loads(path.read_text())["pid"] == 100
