"""`make stubs`: mypy's stubtest on the C++ modules, less what it says of everything that nanobind makes."""

import re
import subprocess
import sys

MODULES = ["unisono._core", "unisono._yardstick"]
# nanobind's functions are objects of its own (tests/api/test_stubs.py compares their parameters), its classes have a
# metaclass, and a class without a constructor refuses all arguments.
OF_NANOBIND = re.compile(
    r" is not a function$| is inconsistent, metaclass differs$| is a disjoint base at runtime, "
    r'|__init__ is inconsistent, stub does not have \*args parameter "args"$'
)


def main() -> int:
    command = [sys.executable, "-m", "mypy.stubtest", "--concise", "--mypy-config-file", "pyproject.toml", *MODULES]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    found = [line for line in lines if not OF_NANOBIND.search(line)]
    print(f"{len(lines) - len(found)} remarks about nanobind itself left out, {len(found)} about the stubs")
    print("\n".join(found) + done.stderr, end="")
    return 1 if found or (done.returncode and not lines) else 0


if __name__ == "__main__":
    sys.exit(main())
