"""What the documentation shows works: examples, the page of settings, commands."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_config

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
