"""`unisono bench --hosts`, and the cost model that is fitted to its rows."""

import argparse
import json

import pytest

from tests.bench.test_command import bench
from unisono.bench import scale
from unisono.bench.apart.cases import Case
from unisono.bench.command import make_parser
from unisono.bench.host_bytes import must_leave
from unisono.bench.hosts import Layout, parse_hosts, parse_rate
from unisono.testing.hosts import why_not
from unisono.transport.hosts import agreement, engine

GIGA = 10**9


@pytest.mark.parametrize(("text", "ranks"), [("2x3", (3, 3)), ("1x1", (1,)), ("2,1,4", (2, 1, 4))])
def test_hosts_are_read(text, ranks):
    assert parse_hosts(text) == ranks


@pytest.mark.parametrize("text", ["", "2", "2x", "0x2", "2x0", "2,0", "x2", "2x2x2"])
def test_bad_hosts_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="2x2"):
        parse_hosts(text)


def test_rates():
    assert parse_rate("10G") == 10 * GIGA
    assert parse_rate("none") is None
    with pytest.raises(argparse.ArgumentTypeError, match="bits per second"):
        parse_rate("quick")


@pytest.mark.parametrize("host_of", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 2, 2]])
def test_bytes_that_must_leave(host_of):
    """The formulas beside a count, element by element, of what a host's ranks lack."""
    counts = (1, 2, 3, 10)
    hosts, whole = max(host_of) + 1, sum(counts)
    held = [sum(n for n, h in zip(counts, host_of, strict=True) if h == host) for host in range(hosts)]

    def leaves(op):
        return must_leave(Case(op, whole, counts, "int8"), host_of)

    assert leaves("all_gather") == [held[h] * (hosts - 1) for h in range(hosts)]
    assert leaves("reduce_scatter") == [sum(held[o] for o in range(hosts) if o != h) for h in range(hosts)]
    assert sum(leaves("all_reduce")) == pytest.approx(2 * (hosts - 1) * whole)
    assert sum(leaves("broadcast")) == (hosts - 1) * whole
    assert leaves("all_to_all") == [host_of.count(h) * (whole - held[h]) for h in range(hosts)]
    assert leaves("barrier") is None


def test_wrong_options(capsys):
    for options in (["-n", "4"], ["--against", "openmpi"], ["--busy", "2"]):
        with pytest.raises(SystemExit):
            bench("--hosts", "2x2", *options)
    assert "--hosts" in capsys.readouterr().err


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_run(tmp_path):
    path = tmp_path / "out.json"
    options = ["-b", "1M", "-e", "1M", "--rounds", "8", "--ordinary", "--rate", "none", "-J", str(path)]
    code, text = bench("--hosts", "2x2", "all_reduce", "all_gather_uneven", "--calls", "group,on_gloo", *options)
    assert code == 0
    assert "2 hosts x 2 ranks, contiguous, no limit" in text
    for row in json.loads(path.read_text())["rows"]:
        sent, must = row["results"]["ordinary"]["sent"], row["hosts"]["must_leave"]
        assert sent == pytest.approx(must, rel=0.05, abs=60_000)
        # gloo's ring sends more in an all_reduce; in an all-gather each rank gets its own copy.
        assert all(s > 1.4 * m for s, m in zip(row["results"]["gloo"]["sent"], must, strict=True))
        assert set(row["results"]) >= {"ordinary", "gloo"}
        # The link's limit carries what must go and nothing else.
        assert row["limit"]["sent"] == pytest.approx(must, rel=0.05, abs=60_000)
        assert row["results"]["ordinary"]["times_limit"] > 0


def invented(models, settings):
    return [
        (setting, {who: model.time(scale.work_of(who, setting), setting.rate) for who, model in models.items()})
        for setting in settings
    ]


def settings(hosts, rates, ops=scale.OPS):
    return [
        scale.Setting(op, size, h, ranks, rate, shared_cpus=True)
        for op in ops
        for size in (8, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
        for h, ranks in hosts
        for rate in rates
    ]


def test_the_fit_finds_the_constants():
    """Rows that follow a model exactly give that model back, and so what it says about rows that were not fitted."""
    models = {
        scale.OURS: scale.Model(1.5e-3, 8e-5, 0.93, 1.2e-9),
        scale.RING: scale.Model(4e-4, 3e-4, 0.95, 2.5e-9),
    }
    found = scale.fit_rows(invented(models, settings([(2, 2), (3, 1), (2, 1)], [GIGA, 10 * GIGA])))
    unseen = invented(models, settings([(4, 2), (8, 4)], [2 * GIGA]))
    for who, model in models.items():
        assert found[who].call == pytest.approx(model.call, rel=0.05)
        assert found[who].share == pytest.approx(model.share, rel=0.05)
        assert scale.errors(found, unseen, who) == pytest.approx([1.0] * len(scale.errors(found, unseen, who)), rel=0.1)


@pytest.mark.parametrize("op", scale.OPS)
@pytest.mark.parametrize(
    ("hosts", "ranks", "most"), [(2, 1, 1 << 20), (2, 2, 1 << 20), (2, 8, 1 << 18), (3, 2, 1 << 20), (9, 2, 1 << 18)]
)
def test_what_the_model_takes_for_one_message_is_the_transports(op, hosts, ranks, most):
    """Up to there one message to each other host, beyond it pieces."""
    assert agreement.most_small(hosts, ranks, engine.GLOO_EAGER_BYTES) == most
    one, more = (scale.Setting(op, size, hosts, ranks, GIGA).ours() for size in (most, most + 1))
    whole = agreement.most_whole(hosts, most) == most or op != "all_reduce"
    assert one.messages == (hosts - 1 if whole else 2 * (hosts - 1)) < more.messages
    if hosts == 2:
        assert one.wire_bytes == pytest.approx(more.wire_bytes, rel=0.01)
        assert one.near_bytes == pytest.approx(more.near_bytes, rel=0.01)


def test_a_wrong_model_is_noticed():
    """If time grew with the number of hosts in another way, the check would show it."""
    models = {scale.OURS: scale.Model(1.5e-3, 8e-5, 0.93, 1.2e-9)}
    fitted = scale.fit_rows(invented(models, settings([(2, 2), (2, 1)], [GIGA, 10 * GIGA])))
    unseen = [(s, {scale.OURS: 2 * t[scale.OURS]}) for s, t in invented(models, settings([(4, 2)], [GIGA]))]
    assert max(scale.errors(fitted, unseen, scale.OURS)) < 0.6


def test_the_command(tmp_path, capsys):
    layout = Layout((2, 2), False, GIGA)
    models = {
        scale.OURS: scale.Model(1.5e-3, 8e-5, 0.93, 1.2e-9),
        scale.RING: scale.Model(4e-4, 3e-4, 0.95, 2.5e-9),
    }
    rows = []
    for setting, times in invented(models, settings([(2, 2)], [GIGA])):
        count = int(setting.size_bytes // 4)
        hosts = {"ranks": layout.ranks, "interleaved": False, "rate": layout.rate, "host_of": layout.host_of}
        results = {"ordinary": {"time_us": times[scale.OURS] * 1e6}, "gloo": {"time_us": times[scale.RING] * 1e6}}
        counts = [count - count // 4 * 3, *[count // 4] * 3]
        row = {"op": setting.op, "size_bytes": setting.size_bytes, "counts": counts, "hosts": hosts, "results": results}
        rows.append(row)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"machine": {"cpus": 2}, "rows": rows}))
    assert scale.main([str(path), "--check", str(path), "--rows"]) == 0
    text = capsys.readouterr().out
    assert "1024" in text
    assert "checked on" in text


def test_one_command_measures_and_fits(monkeypatch, tmp_path, capsys):
    """It runs the bench with arguments that the bench takes, and fits to what it wrote; here the bench is invented."""
    models = {scale.OURS: scale.Model(1.5e-3, 8e-5, 0.93, 1.2e-9)}
    ran = []

    def invented_bench(command, **options):
        args = make_parser().parse_args(command[3:])
        ran.append(args)
        hosts, size = len(args.hosts), sum(args.hosts)
        host_of = [r // args.hosts[0] for r in range(size)]
        place = {"ranks": args.hosts, "interleaved": False, "rate": args.rate, "host_of": host_of}
        rows = []
        for op in args.ops:
            for n in (8 << 10, args.most):
                setting = scale.Setting(op, n, hosts, args.hosts[0], args.rate, shared_cpus=True)
                us = 1e6 * models[scale.OURS].time(setting.ours(), args.rate)
                row = {"op": op, "size_bytes": n, "counts": [n // 4 // size] * size, "hosts": place}
                rows.append({**row, "results": {"ordinary": {"time_us": us}}})
        args.json.write_text(json.dumps({"machine": {"cpus": 2}, "rows": rows}))

    monkeypatch.setattr(scale.subprocess, "run", invented_bench)
    assert scale.main(["--measure", str(tmp_path / "new")]) == 0
    assert len(ran) == len(scale.PLACES) * 4
    said = capsys.readouterr().out
    assert "fitted to" in said and "checked on rows it was not fitted to" in said and "call 15" in said, said
    assert scale.main(["--measure", str(tmp_path / "new")]) == 0
    assert len(ran) == len(scale.PLACES) * 4, "what is there was measured again"
