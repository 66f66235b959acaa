"""Every piece of Python in the documents and docstrings runs, and every file the documents link to exists."""

import doctest
import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest

import unisono

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
DOCUMENTS += sorted(ROOT.glob("docs/*.md"))
BLOCKS = [
    (document.name, i, block)
    for document in DOCUMENTS
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", document.read_text(), re.S))
]
MODULES = [
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(ROOT.glob("src/unisono/**/*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("document, i, block", BLOCKS, ids=[f"{name}-{i}" for name, i, _ in BLOCKS])
def test_python_blocks_run(document, i, block, tmp_path):
    script = tmp_path / f"block_{i}.py"
    tests = [f"    {name}()" for name in re.findall(r"^def (test_\w+)\(\)", block, re.M)]
    script.write_text(
        "import torch\n" + block + "\nif __name__ == '__main__':\n" + "\n".join([*tests, "    pass"]) + "\n"
    )
    start = [sys.executable]
    if "init_process_group(" in block and "run_ranks" not in block:  # a program for torchrun
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*start, str(script)], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_there_are_blocks():
    assert {name for name, _, _ in BLOCKS} >= {"README.md", "CONTRIBUTING.md"}


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module):
    failed, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert failed == 0


def anchors_of(document):
    """The headings of a document, as GitHub and the site call them in links."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_lead_somewhere(document):
    for target, _, anchor in re.findall(r"\]\(([^)#:]*)(#([^)]+))?\)", document.read_text()):
        path = document.parent / target if target else document
        assert path.exists(), target
        assert not anchor or anchor in anchors_of(path), f"{target}#{anchor}"


def test_every_make_target_named_in_the_documents_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for document in DOCUMENTS:
        for name in re.findall(r"(?:^|`)make ([a-z-]+)\b", document.read_text(), re.M):
            assert name in targets, f"{document.name}: make {name}"


def test_every_setting_is_in_the_table():
    read = set(re.findall(r'"(UNISONO_[A-Z0-9_]+)"', (ROOT / "src/unisono/base/settings.py").read_text()))
    listed = set(re.findall(r"^\| `(UNISONO_[A-Z0-9_]+)`", (ROOT / "docs/settings.md").read_text(), re.M))
    assert read == listed


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/index.md").read_text().split()
    assert not [page.stem for page in ROOT.glob("docs/*.md") if page.stem not in index and page.stem != "index"]


def test_no_machine_is_named():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    home = re.compile(r"(^|[^A-Za-z0-9_.])/(?:work|root|home)/")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".cc", ".h", ".txt"} and os.path.samefile(path, __file__) is False:
            assert not home.search(path.read_text()), name


def test_every_public_name_is_in_the_reference():
    named = set(re.findall(r":: (?:unisono\.)?(\w+)$", (ROOT / "docs/api.md").read_text(), re.M))
    assert set(unisono.__all__) <= named


def test_every_function_that_documents_call_is_there():
    """As a user has it after ``import unisono``, in a process that has imported nothing else of it."""
    said = {name for page in DOCUMENTS for name in re.findall(r"\bunisono((?:\.\w+)+)\(", page.read_text())}
    named = sorted(name[1:] for name in said if not name.startswith(".ascend"))  # which is imported by name
    assert "fsdp.use_shared_memory" in named
    program = "import operator, sys, unisono\nfor name in sys.argv[1:]: operator.attrgetter(name)(unisono)"
    done = subprocess.run([sys.executable, "-c", program, *named], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_every_async_op_says_when_results_may_be_read():
    for owner in (unisono.Group, unisono, unisono.comm_func):
        for name, function in inspect.getmembers(owner, callable):
            if not name.startswith("_") and "async_op" in _parameters(function):
                assert "wait()" in inspect.getdoc(function), f"{owner.__name__}.{name}"


def test_every_public_function_says_its_arguments_and_what_it_returns():
    for owner in (unisono.Group, unisono, unisono.comm_func):
        for name, function in inspect.getmembers(owner, inspect.isroutine):
            if name.startswith("_"):
                continue
            text, where = inspect.getdoc(function), f"{owner.__name__}.{name}"
            _, _, said = text.partition("Args:")
            for parameter in set(_parameters(function)) - {"self"}:
                assert re.search(rf"(^|[ ,*]){parameter}[,:]", said, re.M), f"{where}: {parameter}"
            returns = inspect.signature(function).return_annotation
            assert returns in (None, "None") or "Returns:" in text, where


def _parameters(function):
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def test_one_python_and_one_torch_everywhere():
    """What is needed is said alike in the documents and in pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text()
    python = re.search(r'requires-python = ">=([\d.]+)"', project)[1]
    torch = re.search(r'dependencies = \["torch>=([\d.]+)"\]', project)[1]
    for name in ("README.md", "CONTRIBUTING.md", "docs/start.md"):
        text = (ROOT / name).read_text()
        assert set(re.findall(r"Python ([\d.]+) or newer", text)) == {python}, name
        assert set(re.findall(r"torch ([\d.]+) or newer", text)) <= {torch}, name
