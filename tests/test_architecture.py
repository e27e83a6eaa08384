"""The layers of the code: each imports only the layers below it."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "rerpi_rllib"

# What each layer may import from this package, and which other packages it must not import.
ALLOWED = {
    "core": {"core"},
    "shipping": {"shipping", "core"},
    "envs": {"envs"},
    "algorithm": {"algorithm", "core", "envs"},
    "runs": {"runs", "algorithm", "core", "envs", "shipping"},
    "sweeps": {"sweeps", "runs", "algorithm", "core", "envs"},
    "analysis": {"analysis", "sweeps", "runs", "algorithm", "core", "envs", "shipping"},
    "figures": {"figures", "analysis", "sweeps", "runs", "algorithm", "core", "envs"},
}
FORBIDDEN = {
    "core": {"ray", "gymnasium", "pathlib", "os"},
    "shipping": {"ray", "gymnasium", "pickle", "pandas"},
}


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_point_downwards():
    problems = []
    for floor, allowed in ALLOWED.items():
        files = list((PACKAGE / floor).rglob("*.py"))
        assert files
        for path in files:
            for name in _imports(path):
                parts = name.split(".")
                if parts[0] in FORBIDDEN.get(floor, set()):
                    problems.append(f"{path.name} imports {name}")
                inside = (
                    parts[0] == "rerpi_rllib" and len(parts) > 1 and (PACKAGE / parts[1]).is_dir()
                )
                if inside and parts[1] not in allowed:
                    problems.append(f"{path.name} imports {name}")
    assert not problems


def test_every_package_is_installed():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11.
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {
        ".".join(p.parent.relative_to(PACKAGE.parent).parts) for p in PACKAGE.rglob("__init__.py")
    }
    assert set(settings["packages"]) == packages | set(settings["package-dir"])
    for directory in settings["package-dir"].values():
        assert any(path.is_file() for path in (PACKAGE.parent / directory).rglob("*"))


def test_the_page_names_files_and_functions_that_exist():
    """docs/architecture.md follows data through the code: every hop has to be there."""
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    files = set(
        re.findall(r"`((?:core|envs|algorithm|runs|sweeps|analysis|figures|cli)/\w+\.py)`", page)
    )
    assert len(files) > 15
    for file in files:
        assert (PACKAGE / file).is_file(), file
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for name in re.findall(r"`(?:\w+\.)?(_?[a-z]\w+|[A-Z]\w+)`", page):
        assert re.search(rf"(def|class) {name}\b|\b{name}\b\s*[:=]", source), name
