"""The libraries users would take instead: where they live, how each is started at its best, and how it takes its turn.

A peer has *settings*, ways to start it that its documents recommend; one *team* of ranks is started per setting and
stays for the whole run, asleep in a socket while it is not its turn. For each row the fastest setting is the peer's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .apart.cases import Case, Lacking
from .apart.turns import START_S, Channel, accept, listen

SILENCE_S = 300.0  # a team that says nothing for so long is lost
# What an outer mpiexec or torchrun left in the environment would be taken for the peer's own.
FOREIGN = ("OMPI_", "PMIX", "PMI_", "PRTE_", "HYD", "MPI", "I_MPI_", "CCL_", "FI_", "UCX_", "TORCHELASTIC_", "SLURM_")
FOREIGN_NAMES = ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
COMPILED = "lib/unisono_oneccl.so"
_OF_TORCH = ("matmul_all_reduce", "ddp_step")  # rows that need torch, which peers do without
MARK = "unisono-peer.json"  # written last, so an environment without it is not complete


@dataclass(frozen=True)
class Setting:
    """One recommended way to start a peer."""

    name: str
    launch: tuple[str, ...]  # the launcher with its options, without `-n ranks program`
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """One library: what pip installs for it and how it is started."""

    name: str
    title: str
    wheels: tuple[str, ...]
    settings: Callable[[bool], list[Setting]]  # by whether there are more ranks than CPUs
    alone: tuple[str, ...] = ()  # wheels installed without what they ask for
    program: str = "mpi_rank"
    compiled: str | None = None  # a source file in apart/ that becomes a library in the environment

    @property
    def folder(self) -> Path:
        return peers_folder() / self.name

    def facts(self) -> dict[str, Any] | None:
        """What --setup-peers wrote when it was done; None if it was not."""
        try:
            found: dict[str, Any] = json.loads((self.folder / MARK).read_text())
        except (OSError, ValueError):
            return None
        return found


def peers_folder() -> Path:
    """Where the peers' environments are: $XDG_CACHE_HOME/unisono/peers."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "unisono" / "peers"


def _open_mpi(crowded: bool) -> list[Setting]:
    base = ["mpirun", "--mca", "pml", "ob1", "--mca", "btl", "self,sm", "--mca", "smsc", "cma"]
    if crowded:
        base += ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [
        Setting("default", tuple(base), env),
        Setting("coll sm", (*base, "--mca", "coll_sm_priority", "100"), env),
        Setting("coll han", (*base, "--mca", "coll_han_priority", "100"), env),
    ]


def _mpich(crowded: bool) -> list[Setting]:
    if crowded:
        return [Setting("yielding", ("mpiexec", "-iface", "lo"), {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"})]
    return [Setting("default", ("mpiexec", "-iface", "lo", "-bind-to", "core"))]


def _intel_mpi(crowded: bool) -> list[Setting]:
    env = {"I_MPI_FABRICS": "shm"}
    if crowded:
        env |= {"I_MPI_THREAD_YIELD": "3", "I_MPI_PIN": "0"}
    return [Setting("shm", ("mpiexec", "-iface", "lo"), env)]


def _one_ccl(crowded: bool) -> list[Setting]:
    [below] = _intel_mpi(crowded)
    env = {**below.env, "CCL_ATL_TRANSPORT": "mpi", "CCL_LOG_LEVEL": "error"}
    if crowded:
        env["CCL_YIELD"] = "sched_yield"
    return [Setting("mpi", below.launch, env)]


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("openmpi", "Open MPI", ("openmpi", "mpi4py", "numpy"), _open_mpi),
        Peer("mpich", "MPICH", ("mpich", "mpi4py", "numpy"), _mpich),
        Peer("intelmpi", "Intel MPI", ("impi-rt", "mpi4py", "numpy"), _intel_mpi),
        Peer(
            "oneccl",
            "oneCCL",
            # The static library wants hwloc (in tcmlib) and Intel's libc extras; SYCL, which is gigabytes, it does not.
            ("impi-rt", "tcmlib", "intel-cmplr-lib-rt", "mpi4py", "numpy"),
            _one_ccl,
            alone=("oneccl-devel",),
            program="oneccl_rank",
            compiled="oneccl_calls.cc",
        ),
    )
}


class Team:
    """The ranks of one setting of a peer: started once, then told what to do turn by turn."""

    def __init__(self, name: str, command: list[str], env: Mapping[str, str], ranks: int, place: str) -> None:
        """Starts a program that serves turns at `place`; :meth:`join` then waits, so several teams start together."""
        self.name, self.ranks, self.log = name, ranks, Path(f"{place}.log")
        self.channels: list[Channel] = []
        self.lifelines: list[Channel] = []
        self.library = ""
        self.listener = listen(place)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def join(self, timeout_s: float = START_S) -> None:
        """Waits until all ranks have said hello."""
        try:
            met = accept(self.listener, 2 * self.ranks, lambda: self.process.poll() is None, timeout_s)
        except (OSError, EOFError) as error:
            self.close()
            raise Lacking(f"did not start: {self._last_words() or error}") from None
        self.lifelines = [channel for hello, channel in met if hello["rank"] < 0]
        self.channels = [channel for hello, channel in met if hello["rank"] >= 0]
        self.library = str(met[-1][0]["library"])

    def prepare(self, case: Case) -> tuple[int, float]:
        """Makes the case ready on all ranks and checks it; wrong elements of all ranks, and how long the call took."""
        if case.op in _OF_TORCH:
            raise Lacking(f"it has no {case.op}")
        answers = self._ask({"prepare": case.to_json()})
        lacks = [answer["lacks"] for answer in answers if "lacks" in answer]
        if lacks:
            raise Lacking(lacks[0])
        return sum(answer["wrong"] for answer in answers), max(answer["seconds"] for answer in answers)

    def run(self, warmup: int, calls: int) -> float:
        """Seconds per call of the slowest rank."""
        return float(max(answer["seconds"] for answer in self._ask({"run": [warmup, calls]})))

    def drop(self) -> None:
        """Frees the case's memory."""
        self._ask({"drop": 1})

    def close(self) -> None:
        """Ends all ranks, the politest way that works."""
        for channel in [*self.channels, *self.lifelines]:
            channel.close()
        self.channels, self.lifelines = [], []
        self.listener.close()
        for number, patience_s in ((0, 3.0), (signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
            if number:
                with contextlib.suppress(ProcessLookupError):  # its process group is its session: its own ranks only
                    os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
                return

    @property
    def alive(self) -> bool:
        return bool(self.channels)

    def _ask(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's answer. A team in which one rank is lost is ended, since the others may spin for ever."""
        if not self.channels:
            raise Lacking("ended before")
        try:
            for channel in self.channels:
                channel.send(order)
            deadline = time.monotonic() + SILENCE_S
            return [channel.receive(max(1.0, deadline - time.monotonic())) for channel in self.channels]
        except (OSError, EOFError) as error:
            self.close()
            raise Lacking(f"lost in {next(iter(order))}: {self._last_words() or error}") from None

    def _last_words(self) -> str:
        try:
            lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            return ""
        told = [line for line in lines if "error" in line.lower()]
        return (told or lines or [""])[-1][:200]


def start_team(peer: Peer, setting: Setting, ranks: int, folder: str) -> Team:
    """Starts the ranks of one setting, in the peer's own environment."""
    if peer.facts() is None:
        raise Lacking(f"not set up: unisono bench --setup-peers --against {peer.name}")
    bin_folder = peer.folder / "bin"
    place = os.path.join(folder, f"{peer.name}-{setting.name.replace(' ', '-')}")
    program = "import sys; sys.path.append(sys.argv[1]); from apart.{} import main; main()"
    command = [str(bin_folder / setting.launch[0]), *setting.launch[1:], "-n", str(ranks)]
    command += [str(bin_folder / "python"), "-c", program.format(peer.program), str(Path(__file__).parent)]
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(FOREIGN) and name not in FOREIGN_NAMES
    }
    env |= setting.env
    env |= {
        "PATH": f"{bin_folder}:{env.get('PATH', '')}",
        "OMP_NUM_THREADS": "1",
        "UNISONO_BENCH_TURNS": place,
        "UNISONO_BENCH_ONECCL": str(peer.folder / COMPILED),
    }
    return Team(setting.name, command, env, ranks, place)


def start_teams(
    names: list[str], ranks: int, crowded: bool, folder: str
) -> tuple[dict[str, list[Team]], dict[str, str]]:
    """Teams by peer, with what each peer lacks entirely."""
    teams: dict[str, list[Team]] = {}
    lacks: dict[str, str] = {}
    for name in names:
        for setting in PEERS[name].settings(crowded):
            try:
                teams.setdefault(name, []).append(start_team(PEERS[name], setting, ranks, folder))
            except (Lacking, OSError) as why:
                lacks[name] = str(why)
    for name in list(teams):
        started = teams[name]
        for team in list(started):
            try:
                team.join()
            except Lacking as why:
                lacks[name] = str(why)
                started.remove(team)
        if started:
            lacks.pop(name, None)
        else:
            del teams[name]
    return teams, lacks
