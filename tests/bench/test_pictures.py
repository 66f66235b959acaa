"""Pictures and pages of a run written down by hand."""

import html.parser
import json
import subprocess
import sys

import pytest

from unisono.bench import page, panels, picture
from unisono.bench.ratios import compare

SIZES = (8, 4096, 1 << 20, 64 << 20)


def result(time_us):
    ratio = compare([2.0] * 10, [1.0] * 10).to_json()
    return {
        "time_us": time_us, "min_us": 0.9 * time_us, "p95_us": 1.4 * time_us, "times_limit": 1.5, "wrong": 0,
        "variant": "<best>", "ratios": {"heap": ratio}, "rounds_us": [time_us],
    }  # fmt: skip


def document(ranks=(2,), memory=False):
    rows = []
    for n in ranks:
        for op, split in (("all_reduce", "-"), ("all_gather", "1:3")):
            for size in SIZES:
                base = 1 + size / 1e4
                rows.append(
                    {
                        "op": op, "split": split, "ranks": n, "busy": 0, "dtype": "float32", "redop": "sum",
                        "size_bytes": size,
                        "limit": result(base / 2), "lacks": {"oneccl": "no <such> thing"},
                        "results": {"heap": result(base), "dist heap": result(base + 3), "gloo": result(base * 50)},
                    }
                )  # fmt: skip
    rows.append({**rows[-1], "size_bytes": 1 << 30, "left_out": 5 << 30})
    del rows[-1]["results"]
    machine = {"cpu": "A <CPU>", "cpus": 2, "unisono": "0.1", "torch": "2.13", "date": "2030-01-01 00:00:00"}
    made = {"machine": machine, "command": ["all_reduce"], "peers": {"mpich": "MPICH Version: 5.0.2"}, "rows": rows}
    if memory:
        made["memory"] = {str(n): {"mean_bytes": 5e5, "most_bytes": 6e5} for n in ranks}
    return made


class Balance(html.parser.HTMLParser):
    """Open tags; everything must be closed in order, and nothing may be loaded from elsewhere."""

    VOID = ("meta", "circle", "path", "i")

    def __init__(self):
        super().__init__()
        self.open, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        assert not any(name in ("src", "href") for name, _ in attrs)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("memory", [False, True])
def test_page(memory):
    text = page.make(document((2, 4), memory))
    balance = Balance()
    balance.feed(text)
    assert balance.open == []
    shown = " ".join(balance.texts)
    assert "A <CPU>" in shown and "left out: needs 5 GiB" in shown and "lacking" in shown and "MPICH 5.0.2" in shown


def test_points_lie_inside():
    """Every point of every line is inside its panel's axes."""
    import re

    text = page.make(document())
    for x, y in re.findall(r"cx='([\d.-]+)' cy='([\d.-]+)'", text):
        assert page.LEFT <= float(x) <= page.WIDTH - page.RIGHT
        assert page.TOP <= float(y) <= page.HEIGHT - page.BOTTOM


def test_panels():
    found = panels.panels_of(document())
    assert [panel.title for panel in found] == ["all_reduce, 2 ranks", "all_gather, 2 ranks, split 1:3"]
    labels = [line.label for line in found[0].lines]
    assert labels == ["limit (least memory traffic)", "unisono, in shared memory", "unisono, dist, heap", "gloo"]
    by_ranks = panels.panels_of(document((1, 2, 4), memory=True))
    assert [line.label for line in by_ranks[0].lines] == ["8 B", "4 KiB", "1 MiB", "64 MiB"]
    assert [point[0] for point in by_ranks[0].lines[0].points] == [1, 2, 4]


@pytest.mark.parametrize("us, text", [(0.1, "100 ns"), (1, "1 µs"), (1e3, "1 ms"), (1e5, "100 ms"), (1e6, "1 s")])
def test_ticks(us, text):
    assert panels.show_time(us) == text


@pytest.mark.parametrize("memory", [False, True])
def test_plot(tmp_path, memory):
    if not picture.available():
        pytest.skip("matplotlib is not installed")
    # In a process of its own, since matplotlib keeps its fonts open.
    program = "import json, sys; from unisono.bench import picture; picture.draw(json.load(sys.stdin), sys.argv[1])"
    given = json.dumps(document((1, 2), memory))
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "x.png")], input=given, text=True, check=True)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
