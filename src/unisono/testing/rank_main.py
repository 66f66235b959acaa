"""A rank's side of `unisono.testing`: join the group, answer calls, say where it stands when asked."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import runpy
import socket
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.group.group import Group

importing_main: bool | None = None  # None until a rank needed something of the main script


def serve_calls(channel: socket.socket, rank: int, setting: dict[str, Any]) -> None:
    """Answer calls until the caller closes its side."""
    import torch

    folder = Path(setting["files"])
    torch.set_num_threads(setting["num_threads"])
    groups: dict[str, Group] = {}
    while data := channel.recv(4096):
        order = json.loads(data)
        number = order["call"]
        name = f"own-{number}" if order["own_group"] else "world"
        try:
            if name not in groups and setting["places"] is None:
                groups[name] = _join_group(folder / f"store-{name}", rank, name, setting)
            fn, args = _read_call(folder / f"call-{number}", setting["main"])
            given = (groups[name], *args) if name in groups else args
            answer = pickle.dumps(("result", fn(*given)))
            if name in groups and (order["last"] or order["own_group"]):
                groups.pop(name).close()
        except BaseException as error:
            answer = pickle.dumps(("error", _type_name(error), traceback.format_exc()))
            # The other ranks shall hear of this, rather than wait for their deadline.
            while groups:
                with contextlib.suppress(Exception):
                    groups.popitem()[1].close()
        sys.stdout.flush()
        sys.stderr.flush()
        (folder / f"result-{number}-{rank}").write_bytes(answer)
        channel.send(json.dumps({"done": number}).encode())
    for group in groups.values():
        group.close()


def _join_group(path: Path, rank: int, name: str, setting: dict[str, Any]) -> Group:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from unisono.group.group import Group

    store = FileStore(str(path), setting["size"])
    return Group.from_store(store, rank, setting["size"], name=name, timeout_s=setting["group_timeout_s"])


def _read_call(path: Path, main: dict[str, str]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module == "__main__":
                _import_main(main)
            return super().find_class(module, name)

    fn, args = Unpickler(io.BytesIO(path.read_bytes())).load()
    return fn, args


def _import_main(main: dict[str, str]) -> None:
    """Import the caller's main script as multiprocessing does, so that its main part does not run."""
    global importing_main
    if importing_main is not None:
        return
    importing_main = True
    if "module" in main:
        names = runpy.run_module(main["module"], run_name="__mp_main__", alter_sys=True)
    elif "path" in main and os.path.exists(main["path"]):
        names = runpy.run_path(main["path"], run_name="__mp_main__")
    else:
        raise TypeError(
            "fn is defined in a main program that has no file, so a rank cannot import it\n"
            '  Put it into a module, or: pip install "unisono[notebook]"'
        )
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(names)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    importing_main = False


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
