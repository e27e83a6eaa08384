"""What the documentation shows works: examples, the page of settings, commands."""

import base64
import importlib.util
import re
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from conftest import tiny_config
from nbclient import NotebookClient

from rerpi_rllib.core.critics import HEADS
from rerpi_rllib.core.policies import POLICIES

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "docs" / "scripts"


def _load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_of_settings_is_that_of_the_code():
    settings = _load(SCRIPTS / "settings.py")
    assert settings.PAGE.read_text() == settings.page(), "Run `make docs`."


@pytest.fixture
def examples(tmp_path):
    """The examples of the page as the module that it advises to put them into."""
    page = (ROOT / "docs" / "extending.md").read_text()
    path = tmp_path / "my_parts.py"
    path.write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    before = dict(POLICIES), dict(HEADS)
    yield _load(path)
    for registry, old in zip((POLICIES, HEADS), before):
        registry.clear()
        registry.update(old)


def test_a_distribution_that_the_page_adds(examples):
    torch.manual_seed(0)
    new, old = (examples.Laplace(0.3 * torch.randn(4, 3), 0.5 + torch.rand(4, 3)) for _ in range(2))
    samples = old.sample(200_000)
    estimate = (old.log_prob(samples) - new.log_prob(samples)).mean(dim=0)
    torch.testing.assert_close(new.kl(old), estimate, rtol=0.05, atol=0.01)
    for part, hybrid in new.hybrids(old).items():
        torch.testing.assert_close(new.part_kls(old)[part].sum(dim=-1), hybrid.kl(old))


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(
    "settings",
    [{"policy": "laplace", "epsilon_scale": 1e-4, "critic": "huber"}, {"policy": "relu_gaussian"}],
)
def test_what_the_page_adds_learns(examples, settings):
    config = tiny_config(**settings)
    algo = config.build_algo()
    learned = algo.train()["learners"]["default_policy"]
    algo.stop()
    parts = [part.name for part in POLICIES[settings["policy"]].PARTS]
    assert all(learned[f"kl_{part}"] > 0.0 and learned[f"alpha_{part}"] > 0.0 for part in parts)


def _printed(notebook) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def _plots(notebook) -> list[bool]:
    """Tell for each cell that shows a plot whether there is one in its outputs."""
    plotting = [cell for cell in notebook.cells if "plt.show()" in cell.source]
    pictures = [
        [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", ())]
        for cell in plotting
    ]
    return [len(p) == 1 and len(base64.b64decode(p[0])) > 5_000 for p in pictures]


def _swept(printed: str) -> list[float]:
    """Return how far the mean has moved in the two trials of the notebook's sweep."""
    return [float(number) for number in re.findall(r"target copies (\S+)", printed)]


def test_the_notebook_runs_as_it_was_saved(monkeypatch, tmp_path):
    notebook = nbformat.read(ROOT / "docs" / "tour.ipynb", as_version=4)
    saved, plots = _printed(notebook), _plots(notebook)
    assert len(plots) == 4 and all(plots)
    monkeypatch.setenv("TOUR_STEPS", "1500")
    for cell in notebook.cells:
        cell.pop("outputs", None)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=str(tmp_path))
    printed = _printed(notebook)
    assert _plots(notebook) == plots
    for text in (saved, printed):
        assert "KL of the weights 0.300, bound 0.3" in text
        tight, wide = _swept(text)
        assert tight < wide / 10.0
