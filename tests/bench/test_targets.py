"""Targets: the rows they need, and what they say about rows that are given."""

from dataclasses import asdict

import pytest

from unisono.bench.plan import Place, by_ranks
from unisono.bench.ratios import compare
from unisono.bench.targets import TARGETS, judge, judgement_lines, target_items

MIB = 1 << 20


def result(time_us, limit_us, **ratios):
    return {
        "time_us": time_us,
        "times_limit": time_us / limit_us,
        "ratios": {kind: compare([ratio] * 10, [1.0] * 10).to_json() for kind, ratio in ratios.items()},
    }


def row(op="all_reduce", size=64 * MIB, ranks=2, split="-", dtype="float32", **results):
    facts = {"op": op, "size_bytes": size, "ranks": ranks, "split": split, "dtype": dtype, "busy": 0}
    return {**facts, "redop": "sum", "results": results}


def found(findings, text, who, op="all_reduce"):
    return next(f for f in findings if f["target"] == text and f["who"] == who and f["ops"][0] == op)


def test_rows_that_are_needed():
    items = target_items()
    planned = {n: [i for i in items if i.case.ranks == n] for n in (2, 3, 4, 8)}
    assert sum(map(len, planned.values())) == len(items)
    places = {Place(pin=pin, busy=busy) for pin in (False, True) for busy in (0, 2, 4)} | {Place(quota=100)}
    for on_ranks in planned.values():
        assert {i.place for i in on_ranks if i.case.op == "ddp_step"} == places
    assert list(by_ranks(planned[3])) == [(3, False, 0), (3, True, 0), (3, False, 100)]
    asked = {(i.case.op, i.case.size_bytes, i.split, i.case.dtype) for i in planned[2]}
    assert ("all_reduce", 64 * MIB, "-", "bfloat16") in asked and ("all_reduce", 64 * MIB, "-", "float32") in asked
    tiny = next(i for i in planned[2] if i.case.size_bytes == 8)
    assert set(tiny.ways) == {"group", "dist", "comm_func"}
    skewed = next(i for i in planned[2] if i.case.size_bytes == 16 * MIB and i.split == "1:15")
    assert "even" in skewed.ways
    kinds = ("heap", "ordinary")
    names = [*kinds, *(f"{way} {kind}" for way in ("dist", "comm_func", "even") for kind in kinds)]
    results = {name: result(1, 1) for name in names}
    judged = judge(
        row(i.case.op, i.case.size_bytes, i.case.ranks, i.split, i.case.dtype, **results) | asdict(i.place)
        for i in items
    )
    unmeasured = {f["target"] for f in judged if f["verdict"] == "not measured"}
    training = {"training beside busy", "the same, pinned", "training under quota"}
    assert unmeasured == {"against MPI", "nobody is faster", "on gloo, its best", *training}  # no peer took part


def test_met_and_missed():
    findings = judge([row(heap=result(120, 100), ordinary=result(255, 100))])
    assert found(findings, "64 MiB", "heap")["verdict"] == "met"
    missed = found(findings, "64 MiB", "ordinary")
    assert missed["verdict"] == "missed" and missed["missed_by"] == pytest.approx(0.5)
    text = "\n".join(judgement_lines(findings))
    assert "1.20  met" in text and "MISSED by 50%" in text and "not measured" in text
    assert len(findings) == len(TARGETS)


@pytest.mark.parametrize(
    "place, text",
    [(Place(busy=2), "training beside busy"), (Place(busy=4, pin=True), "the same, pinned"),
     (Place(quota=100), "training under quota")],
)  # fmt: skip
def test_training_where_cpus_are_scarce(place, text):
    slower = {"ordinary": result(30, 10), "gloo": result(24, 10, ordinary=0.8)}
    rows = [row("ddp_step", 5 * MIB // 4, ranks, **slower) | asdict(place) for ranks in (2, 8)]
    judged = {f["target"]: f for f in judge(rows) if f["ops"] == ["ddp_step"]}
    assert judged.pop(text)["rows"] == 2 and {f["verdict"] for f in judged.values()} == {"not measured"}
    finding = found(judge(rows), text, "ordinary", "ddp_step")
    assert finding["verdict"] == "missed" and str(place) in finding["where"]


def test_bfloat16_is_compared_with_float32():
    rows = [row(heap=result(100, 100)), row(dtype="bfloat16", heap=result(130, 100))]
    assert found(judge(rows), "bfloat16 64 MiB", "heap")["worst"] == pytest.approx(1.3)


def test_skewed_is_compared_with_even():
    rows = [row("all_gather", 16 * MIB, split="0:1", heap=result(105, 90), **{"even heap": result(100, 90)})]
    finding = found(judge(rows), "skewed against even", "heap", "all_gather")
    assert finding["verdict"] == "met" and finding["worst"] == pytest.approx(1.05)


@pytest.mark.parametrize("ratio, verdict", [(1.5, "met"), (1.0, "met"), (0.8, "missed")])
def test_nobody_is_faster(ratio, verdict):
    rows = [row(size=MIB, heap=result(10, 5), openmpi=result(10 * ratio, 5, heap=ratio))]
    finding = found(judge(rows), "nobody is faster", "heap", "all")
    assert finding["verdict"] == verdict and finding["worst"] == pytest.approx(ratio)
