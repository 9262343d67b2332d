"""Imports go one way: core ← live, simulate ← lab ← study ← cli; report reads core alone; the core does no I/O."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import emulator

PACKAGE = Path(emulator.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

NOT_FOR_CORE = {"asyncio", "zmq", "cupy", "time", "random", "os", "pathlib", "socket", "threading"}
"""Clocks, chance, files, sockets and threads: a decision depends on its arguments alone."""

MAY_IMPORT = {
    "core": {"core"},
    "live": {"core", "live"},
    "simulate": {"core"},
    "report": {"core", "report"},
    "lab": {"core", "live", "simulate", "report", "lab"},
    "study": {"core", "live", "simulate", "report", "lab", "study"},
    "cli": {"core", "live", "simulate", "report", "lab", "study", "cli"},
}
"""Each part of the package and the parts that it may import. `__main__` belongs to the command line."""


def _part(module: str) -> str:
    """The part of the package that `emulator.part…` belongs to."""
    name = module.split(".")[1] if "." in module else ""
    return "cli" if name == "__main__" else name


def _module(path: Path) -> str:
    return ".".join(["emulator", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")


@cache
def _nodes(path: Path) -> list[ast.AST]:
    """All of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports anywhere in it, with full names."""
    return tuple(_imported(_nodes(path)))


def _imported(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "emulator")


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_every_module_imports_only_what_its_part_may(path: Path) -> None:
    part = _part(_module(path))
    for name in _imports(path):
        if not part or not name.startswith("emulator."):
            continue
        if _part(name) in ("__version__", ""):
            continue
        assert _part(name) in MAY_IMPORT[part], f"{part} must not import {name}"


@pytest.mark.parametrize("path", [p for p in FILES if _part(_module(p)) == "core"], ids=_module)
def test_the_core_imports_nothing_that_waits_draws_lots_or_touches_the_machine(path: Path) -> None:
    outside = {name.split(".")[0] for name in _imports(path)}
    assert not outside & NOT_FOR_CORE


def test_only_the_cuda_device_imports_cupy() -> None:
    users = {_module(path) for path in FILES if any(name.split(".")[0] in ("cupy", "cupyx") for name in _imports(path))}
    assert users == {"emulator.live.cuda"}


def test_importing_all_of_the_package_imports_no_cupy() -> None:
    modules = [_module(path) for path in FILES]
    assert "emulator.live.cuda" in modules
    code = f"import importlib, sys; [importlib.import_module(name) for name in {modules}]; print(*sorted(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = {name.split(".")[0] for name in ran.stdout.split()}
    assert "emulator" in loaded
    assert not loaded & {"cupy", "cupyx", "cupy_backends"}


def test_every_part_of_the_package_has_its_rule() -> None:
    parts = {_part(_module(path)) for path in FILES} - {""}
    assert parts <= MAY_IMPORT.keys(), "a new part needs a rule here"


def test_no_module_draws_on_the_global_random_state() -> None:
    for path in FILES:
        called = [node.func for node in _nodes(path) if isinstance(node, ast.Call)]
        calls = [ast.unparse(function) for function in called if isinstance(function, ast.Attribute)]
        drawn = [call for call in calls if call.startswith(("random.", "np.random."))]
        assert all(call.startswith(("np.random.default_rng", "np.random.SeedSequence")) for call in drawn), path.name
