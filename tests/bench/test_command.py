"""`unisono bench` as people run it: its text read as a parser of nccl-tests would, its JSON, its exit code."""

import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from unisono.bench import command
from unisono.bench.apart.cases import OPS
from unisono.bench.plan import op_names
from unisono.bench.table import Progress

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUICK = ["-b", "8", "-e", "8K", "-f", "1024", "--rounds", "8"]


def bench(*args):
    """Exit code and text of a run started from this process."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = command.main(list(args))
    return code, text.getvalue()


def launched(*args, launcher=(), env=None):
    run = [sys.executable, *launcher, "-m", "unisono.cli", "bench", *args]
    return subprocess.run(run, capture_output=True, text=True, timeout=100, env={**os.environ, **(env or {})})


def parse(text):
    """Rows as nccl-tests' parsers take them: lines that do not start with #, split at blanks."""
    rows = []
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        size, count, dtype, redop, root, time_us, algbw, busbw, wrong, *rest = line.split()
        rows.append(
            {
                "size": int(size), "count": int(count), "type": dtype, "redop": redop, "root": int(root),
                "time": float(time_us), "algbw": float(algbw), "busbw": float(busbw), "wrong": int(wrong),
                "min": float(rest[0]), "p95": float(rest[1]), "limit": float(rest[2]), "times_limit": float(rest[3]),
                "who": rest[4],
            }
        )  # fmt: skip
    return rows


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """One run of all operations at two sizes, with all ways to call, against gloo."""
    folder = tmp_path_factory.mktemp("bench")
    code, text = bench(
        "all", *QUICK, "--splits", "1:3", "--calls", "all", "-J", str(folder / "out.json"),
        "--html", str(folder / "out.html"),
    )  # fmt: skip
    assert code == 0, text[-2000:]
    return text, json.loads((folder / "out.json").read_text()), (folder / "out.html").read_text()


def test_columns(everything):
    rows = parse(everything[0])
    assert {row["who"] for row in rows} >= {"heap", "ordinary", "dist", "gloo"}
    for row in rows:
        assert row["wrong"] == 0 and row["type"] == "float32"
        assert row["min"] <= row["time"] * 1.01 and row["time"] <= row["p95"] * 1.01
        assert row["times_limit"] == pytest.approx(row["time"] / row["limit"], rel=0.05, abs=0.05)
        assert row["algbw"] == pytest.approx(row["size"] / row["time"] / 1e3, rel=0.05, abs=0.011)
        assert row["count"] * 4 == row["size"]
    text = everything[0]
    assert re.search(r"^#\s+size\s+count\s+type\s+redop\s+root\s+time\s+algbw\s+busbw\s+#wrong", text, re.M)
    assert "wrong elements: 0" in text and "within the noise" in text


def test_every_operation_is_there(everything):
    assert {row["op"] for row in everything[1]["rows"]} == set(OPS)


def test_json(everything):
    document = everything[1]
    assert document["format"] == "unisono-bench/2"
    assert {"cpu", "cpus", "torch", "unisono", "date", "load"} <= document["machine"].keys()
    for row in document["rows"]:
        assert {"op", "ranks", "split", "counts", "size_bytes", "count", "dtype", "redop", "root"} <= row.keys()
        assert row["limit"]["time_us"] > 0 and row["lacks"].keys().isdisjoint(row["results"])
        for name, result in row["results"].items():
            numbers = ("time_us", "min_us", "p95_us", "algbw", "busbw", "times_limit")
            assert all(result[key] >= 0 for key in numbers) and result["wrong"] == 0
            assert len(result["rounds_us"]) == 8
            assert result["busbw"] == pytest.approx(result["algbw"] * OPS[row["op"]].bus(2))
            for ratio in result["ratios"].values():
                assert ratio["low"] <= ratio["ratio"] * 1.0001 and ratio["verdict"] in ("slower", "faster", "noise")
            assert name not in result["ratios"]


def test_page(everything):
    page = everything[2]
    assert page.count("<svg") >= len(OPS) - 1 and "http" not in page and "<script" not in page
    assert page.count("<table>") == page.count("</table>")


def test_a_saved_run_is_shown_again(everything, tmp_path, capsys):
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(everything[1]))
    assert command.main(["--from", str(path), "--html", str(tmp_path / "again.html")]) == 0
    assert parse(capsys.readouterr().out) == parse(everything[0])
    assert (tmp_path / "again.html").read_text() == everything[2]


@pytest.mark.parametrize("how, code, wrong", [("good", 0, 0), ("wrong", 1, 6), ("dies", 0, None)])
def test_a_peer_in_the_same_run(fake_peer, tmp_path, how, code, wrong):
    fake_peer(how)
    got, text = bench("all_reduce", *QUICK, "--heap", "--against", "mpich", "-J", str(tmp_path / "out.json"))
    assert got == code, text
    rows = [row for row in parse(text) if row["who"] == "mpich"]
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["peers"] == {"mpich": "Fake MPI 1.2.3"}
    if how == "dies":
        assert rows == [] and "mpich lacking: lost in run" in text
        assert all("heap" in row["results"] for row in document["rows"])
        return
    assert [row["wrong"] for row in rows] == [wrong, wrong]
    assert rows[0]["time"] == pytest.approx(4.0)  # the fake's slower rank: 2 us for each of 2 elements
    ratio = document["rows"][0]["results"]["mpich"]["ratios"]["heap"]
    assert ratio["ratio"] == pytest.approx(4.0 / document["rows"][0]["results"]["heap"]["time_us"], rel=0.01)


def test_a_hopelessly_slow_peer_is_left_out(fake_peer):
    """After its first call, and after two such rows without one."""
    fake_peer("slow")
    code, text = bench("all_reduce", "-b", "8", "-e", "2K", "-f", "16", "--rounds", "2", "--against", "mpich")
    assert code == 0 and {row["who"] for row in parse(text)} == {"heap", "ordinary"}
    assert text.count("mpich lacking: left out of this row: its first call took 10.0 s") == 1  # the same is told once
    assert text.count("mpich lacking: left out: too slow in 2 rows of all_reduce before") == 1


def test_the_table_of_the_readme():
    code, text = bench("readme", "--rounds", "8")
    assert code == 0
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 7 and all(line.count("|") == 6 for line in table)
    assert table[0] in (ROOT / "README.md").read_text()
    assert re.fullmatch(r"\| all_gather 1:3, 256 KiB( \| [\d.]+ [µm]s){3} \| .* × \|", table[5])


def test_small_calls(tmp_path, capsys):
    code, text = bench("small", "--rounds", "8", "-J", str(tmp_path / "out.json"))
    assert code == 0 and parse(text) == [] and "bench small --rounds 8" in text
    table = text[text.index("# small calls, 2 ranks") :].splitlines()
    assert table[1].split() == [
        "#",
        "verb",
        "bytes",
        "Group",
        "comm_func",
        "dist",
        "uneven",
        "gloo",
        "gloo",
        "/",
        "dist",
    ]
    lines = [re.split(r"  +", line.removeprefix("#").strip()) for line in table[2:15]]
    assert [line[0] for line in lines] == [
        "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all",
        "barrier", "send and recv", "all_gather 1:3", "reduce_scatter 1:3", "all_to_all 1:3",
    ]  # fmt: skip
    assert all("-" not in line[2:5] + line[6:] for line in lines)  # every way has every verb
    assert [line[5] == "-" for line in lines] == [True] * 10 + [False] * 3
    assert command.main(["--from", str(tmp_path / "out.json")]) == 0
    assert "\n".join(table[:15]) in capsys.readouterr().out


def test_busy_and_pinned(tmp_path):
    code, text = bench(
        "ddp_matrix", "-n", "2", "--busy", "0,1", "--pin", "--rounds", "8", "-J", str(tmp_path / "out.json")
    )
    assert code == 0 and "# ddp_step, 2 ranks, 1 busy neighbours, pinned: a training step" in text
    assert re.search(r"#\s+2 ranks\n#\s+pinned\s+~?[\d.]+ \[.*\]\n#\s+1 busy neighbours, pinned\s+~?[\d.]+ \[", text)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["busy"], row["pin"], row["quota"]) for row in rows] == [(0, True, 0), (1, True, 0)]


def test_what_skew_costs():
    """As many bytes in equal chunks, without being told to cut the others unevenly."""
    code, text = bench("all_gather", "-b", "64", "-e", "64", "--rounds", "8", "--calls", "even", "--against", "none")
    assert code == 0 and "split 1:3" in text and "lacking" not in text
    assert [row["who"] for row in parse(text)] == ["heap", "ordinary", "even", "even"] * 4


@pytest.mark.slow
def test_two_builds_by_turns(capsys):
    args = [
        "barrier",
        "--rounds",
        "8",
        "--against",
        "none",
        "--builds",
        f"{sys.executable},{sys.executable}",
        "--turns=2",
    ]
    assert command.main(args) == 0
    told = capsys.readouterr()
    assert "turn 2 of 2 done" in told.err
    assert re.search(r"^( +[\d.]+ +[\d.]+  \?[\d.]+){2} +heap +barrier, 2 ranks, 0 B$", told.out, re.M)
    assert command.main(["barrier", "--builds", "false,false"]) == 1
    assert "false ended with 1" in capsys.readouterr().err


def test_under_torchrun():
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    done = launched("all_reduce", "barrier", *QUICK, "--against", "none", launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert [row["who"] for row in parse(done.stdout)] == ["heap", "ordinary"] * 2 + ["heap"]
    refused = launched("all_reduce", "-n", "3", env={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"})
    assert refused.returncode == 2 and "launcher has started 2 ranks" in refused.stderr
    refused = launched("all_reduce", "--pin", env={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"})
    assert refused.returncode == 2 and "not for those of a launcher" in refused.stderr


def test_scaling(tmp_path):
    code, text = bench("scaling", "-n", "1,3", *QUICK, "--heap", "--against", "none", "-J", str(tmp_path / "out.json"))
    assert code == 0
    assert re.search(r"#\s+ranks\s+8 B\s+8 KiB\n#\s+1\s+[\d.]+\s+[\d.]+\n#\s+3\s+[\d.]+\s+[\d.]+\n", text)
    document = json.loads((tmp_path / "out.json").read_text())
    assert [row["limit"] is None for row in document["rows"]] == [True, True, False, False]  # alone, nothing is moved
    memory = document["memory"]
    assert memory.keys() == {"1", "3"}
    assert all(0 < cost["most_bytes"] <= 1 << 20 for cost in memory.values()), memory


@pytest.mark.parametrize(
    "args, text",
    [
        (["all_reduxe"], "expected an operation of"),
        (["-f", "1"], "factor of at least 2"),
        (["--against", "nccl"], "expected peers of gloo, openmpi"),
        (["--calls", "mpi"], "expected ways to call of group"),
        (["--redop", "bxor"], "needs an integer --dtype"),
        (["-b", "1M", "-e", "8"], "is more than"),
        (["--rounds", "0"], "at least 1"),
        (["-J", "no/such/folder/x.json"], "there is no folder"),
        (["--splits", "1;3"], "expected even, zipf"),
        (["--busy", "-1"], "expected numbers of processes"),
        (["--quota", "half"], "expected percents of one CPU"),
        (["small", "barrier"], "small stands alone"),
        (["--builds", "one"], "expected two programs"),
        (["all_reduce", "--calls", "even"], "none of these rows has uneven ones"),
    ],
)
def test_bad_arguments(args, text, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(args)
    assert ended.value.code == 2 and text in capsys.readouterr().err


def test_help_names_everything(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in op_names()) and "examples:" in text
    for line in re.findall(r"^  unisono bench(.*?)(?:  .*)?$", text, re.M):  # every example is a valid command
        command.make_parser().parse_args(line.split())


def test_plot_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr("unisono.bench.picture.available", lambda: False)
    with pytest.raises(SystemExit):
        command.main(["--plot", "x.png"])
    assert "unisono[plot]" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(terminal, capsys, monkeypatch):
    """Nothing in the first seconds; then one line that is written over, or on no terminal a line now and then."""
    now = [100.0]
    monkeypatch.setattr("unisono.bench.table.time.monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    progress = Progress(4, start=100.0)
    now[0] += 1
    progress.show("all_reduce 8 B")
    assert capsys.readouterr().err == ""
    now[0] += 9
    progress.step()
    capsys.readouterr()
    progress.show("all_reduce 1 MiB")
    line = "1/4 rows, about 30 s left; now all_reduce 1 MiB"
    assert capsys.readouterr().err == (f"\r\x1b[K[######..................] {line}" if terminal else "")
    now[0] += 30
    progress.show("all_reduce 1 MiB")
    assert capsys.readouterr().err.endswith("s left; now all_reduce 1 MiB" + ("" if terminal else "\n"))
