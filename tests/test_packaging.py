"""What users who install the package rely on: versions, dependencies, types, files."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
CANDIDATES = [f"3.{minor}" for minor in range(8, 30)]


def promised_versions() -> list[str]:
    """Return the Python versions that ``requires-python`` allows."""
    return [v for v in CANDIDATES if v in SpecifierSet(PROJECT["requires-python"])]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def requirements(*extras: str) -> dict[str, Requirement]:
    """Return the requirements of an installation with these extras, by distribution name."""
    given = list(PROJECT["dependencies"])
    for extra in extras:
        given += PROJECT["optional-dependencies"][extra]
    found = {}
    for requirement in map(Requirement, given):
        if requirement.name == PROJECT["name"]:
            found |= requirements(*requirement.extras)
        else:
            found[canonicalize_name(requirement.name)] = requirement
    return found


def imports(node: ast.AST, *, also_in_functions: bool) -> set[str]:
    """Return the top-level names of all imported modules."""
    names = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            names |= {alias.name.split(".")[0] for alias in child.names}
        elif isinstance(child, ast.ImportFrom) and child.level == 0:
            names.add(child.module.split(".")[0])
        elif also_in_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            names |= imports(child, also_in_functions=also_in_functions)
    return names


# Distributions that the tests do not install, by a module of theirs that has another name.
_OTHER_NAMES = {"sbx": "sbx-rl"}


def undeclared(directory: str, *extras: str, also_in_functions: bool = True) -> list[str]:
    """Return third-party imports below a directory that dependencies and extras do not declare."""
    declared = set(requirements(*extras))
    distributions = importlib.metadata.packages_distributions()
    paths = list((ROOT / directory).rglob("*.py"))
    assert paths
    local = {path.stem for path in (ROOT / directory).glob("*.py")} | {"rerpi_rllib"}
    problems = []
    for path in paths:
        names = imports(ast.parse(path.read_text()), also_in_functions=also_in_functions)
        for name in sorted(names - local - sys.stdlib_module_names):
            # A distribution that is not installed most likely has the name of its module.
            of_name = distributions.get(name, [_OTHER_NAMES.get(name, name)])
            owners = {canonicalize_name(d) for d in of_name}
            if not owners & declared:
                problems.append(f"{path.relative_to(ROOT)} imports {name} ({', '.join(owners)})")
    return problems


def test_the_python_versions_agree_everywhere():
    versions = promised_versions()
    assert versions, PROJECT["requires-python"]
    classifier = "Programming Language :: Python :: "
    named = [c.removeprefix(classifier) for c in PROJECT["classifiers"] if c.startswith(classifier)]
    assert named == ["3", *versions]
    assert re.search(r"^PYTHON_VERSIONS := (.*)$", MAKEFILE, re.M)[1].split() == versions
    assert f"You need Python {' or '.join(versions)} and" in (ROOT / "README.md").read_text()
    table = re.findall(r"^\| (3\.\d+) \| yes", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert table == versions
    # The tools are set to the oldest version.
    assert SETTINGS["tool"]["ruff"]["target-version"] == "py" + versions[0].replace(".", "")
    assert SETTINGS["tool"]["mypy"]["python_version"] == versions[0]
    # The tests run with one of the supported versions.
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in versions


def test_every_dependency_is_pinned_to_a_version_that_it_allows():
    for name, requirement in requirements(*PROJECT["optional-dependencies"]).items():
        assert name in pins(), f"{name} has no line in constraints.txt"
        assert pins()[name] in requirement.specifier, f"{requirement}, but {pins()[name]} is pinned"


def test_every_import_of_the_package_is_a_dependency():
    assert not undeclared("rerpi_rllib", also_in_functions=False)
    # Imports within a function may also come from the extra that the feature needs.
    assert not undeclared("rerpi_rllib", "search", "onnx", "benchmark")


@pytest.mark.parametrize(
    "directory, extra",
    [
        ("tests", "test"),
        ("benchmarks", "benchmark"),
        ("docs/scripts", "docs"),
        ("examples", "onnx"),
    ],
)
def test_every_other_import_is_in_an_extra(directory, extra):
    assert not undeclared(directory, extra)


def test_the_tests_need_none_of_the_peers():
    peers = requirements("benchmark").keys() - requirements().keys()
    assert "jax" in peers and not peers & requirements("test").keys()


def test_an_undeclared_import_is_noticed():
    source = ast.parse(
        "import os\nfrom a.b import c\ntry:\n import d\nexcept E: pass\ndef f(): import e"
    )
    assert imports(source, also_in_functions=False) == {"os", "a", "d"}
    assert imports(source, also_in_functions=True) == {"os", "a", "d", "e"}


def test_what_is_installed_is_typed_and_has_the_version_of_the_source():
    """Ask setuptools itself what it would put into a wheel."""
    script = """
from setuptools import Distribution
distribution = Distribution({"script_name": "setup.py"})
distribution.parse_config_files()
distribution.include_package_data = False  # By the patterns alone, not by an old list of files.
command = distribution.get_command_obj("build_py")
command.ensure_finalized()
print(distribution.metadata.version, distribution.metadata.license_expression)
print(*command.get_outputs(include_bytecode=False), sep="\\n")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    first, *files = done.stdout.splitlines()
    source = (ROOT / "rerpi_rllib" / "__init__.py").read_text()
    version = re.search(r'^__version__ = "(.*)"$', source, re.M)[1]
    assert first == f"{version} Apache-2.0"
    assert "build/lib/rerpi_rllib/py.typed" in files
    modules = {f"build/lib/{p.relative_to(ROOT)}" for p in (ROOT / "rerpi_rllib").rglob("*.py")}
    assert modules <= set(files)
    assert any(file.endswith("configs/quickstart.yaml") for file in files)
    assert any(file.endswith("zoo/walker-walk/policy.safetensors") for file in files)


def test_the_citation_has_the_version_of_the_source():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    source = (ROOT / "rerpi_rllib" / "__init__.py").read_text()
    assert f'__version__ = "{citation["version"]}"' in source
    assert citation["license"] == PROJECT["license"]
    assert citation["preferred-citation"]["url"] == PROJECT["urls"]["Paper"]


def test_pre_commit_runs_what_make_lint_runs():
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)[1]
    expected = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    configuration = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in configuration["repos"] for hook in repo["hooks"]]
    assert [hook["entry"] for hook in hooks] == expected
    # Nothing is downloaded, and each command checks the whole project.
    assert all(repo["repo"] == "local" for repo in configuration["repos"])
    assert all(h["language"] == "system" and not h["pass_filenames"] for h in hooks)
