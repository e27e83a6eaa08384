"""Writes docs/settings.md from the docstring of `RERPIConfig.training`, its checks and the presets.

python docs/scripts/settings.py
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rerpi_rllib.algorithm.checks import Check

PAGE = Path(__file__).parents[1] / "settings.md"

# The groups of the page, each by the first of its settings in the order of the docstring.
GROUPS = {
    "epsilon": "Bounds",
    "weighting": "Weights and fit (Steps 2 and 3)",
    "policy": "The policy's distribution, and what the networks see",
    "critic": "The critic",
    "temperature_solver": "Policy evaluation (Step 1) and the number of samples",
    "target_update_period": "Updates and replay",
    "network": "Networks and exploration",
    "compile_updates": "Speed and faults",
}
INTRODUCTION = """\
# Every setting

Each setting is an argument of `RERPIConfig().training(...)`, of `--set KEY=VALUE` and `--config
JSON` on the command line, and a key under `config:` in a YAML file. RLlib's own settings work in
the same places. A value that is not allowed is refused when the configuration is built, with an
error that names the key, the value and what is allowed; so is a setting that would have no
effect, such as `n_step` with TD(0) ([RLlib's settings](rllib-settings.md)).

The defaults are those of the paper, which assume millions of updates on a GPU. `compact`
(`--preset compact`, `RERPIConfig.compact()`) is for tens of thousands of updates on a CPU: small
residual networks on normalized observations, exploration noise that stays similar from step to
step, small batches, two updates for each step, sharper weights, wider bounds and more frequent
target copies. `strong` is `compact` with more learning for each step. An empty cell means: as the
default.

This page is generated from the code by `make docs`.
"""
OF_RLLIB = """\
## RLlib's own settings with another default here

All other settings of RLlib's `AlgorithmConfig` have RLlib's defaults;
[RLlib's settings](rllib-settings.md) says which of them have an effect.

| setting | RLlib | here | `compact` | `strong` |
|---|---|---|---|---|
"""


def page() -> str:
    """Return the text of the page."""
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

    from rerpi_rllib import RERPIConfig
    from rerpi_rllib.algorithm.config import setting_checks

    configs = [vars(make()) for make in (RERPIConfig, RERPIConfig.compact, RERPIConfig.strong)]
    checks, meanings = setting_checks(), descriptions(inspect.getdoc(RERPIConfig.training) or "")
    own = [key for key in inspect.signature(RERPIConfig.training).parameters]
    undescribed = ({*own, *GROUPS} - {"self", "kwargs"}) - set(meanings)
    if undescribed:
        raise ValueError(f"The docstring of RERPIConfig.training lacks {sorted(undescribed)}.")
    lines = [INTRODUCTION]
    for key, meaning in meanings.items():
        if key in GROUPS:
            lines += [
                f"\n## {GROUPS[key]}\n",
                "| setting | default | `compact` | `strong` | meaning |",
            ]
            lines += ["|---|---|---|---|---|"]
        values = _values([config[key] for config in configs])
        lines.append(_row([f"`{key}`", *values, _explained(meaning, checks[key])]))
    rllib = vars(AlgorithmConfig())
    lines += ["", OF_RLLIB.rstrip()]
    for key in sorted(set(checks) - set(own)):
        if key in rllib and any(rllib[key] != config[key] for config in configs):
            values = _values([config[key] for config in configs])
            lines.append(_row([f"`{key}`", _shown(rllib[key]), *values]))
    if any(config["train_batch_size"] != rllib["train_batch_size"] for config in configs):
        values = _values([config["train_batch_size"] for config in configs])
        lines.append(_row(["`train_batch_size`", _shown(rllib["train_batch_size"]), *values]))
    return "\n".join(lines) + "\n"


def descriptions(docstring: str) -> dict[str, str]:
    """Return what the section on arguments says of each of them."""
    section = docstring.split("Args:\n")[1].split("\n\n")[0]
    entries = re.split(r"^    (?=\w+: |\*\*)", section, flags=re.MULTILINE)
    pairs = [
        entry.split(": ", 1) for entry in entries if not entry.startswith("**") and entry.strip()
    ]
    return {key: " ".join(text.split()).replace("``", "`") for key, text in pairs}


def _explained(meaning: str, check: Check) -> str:
    """Add what is allowed to a description that does not name all choices itself."""
    text = meaning[0].upper() + meaning[1:]
    is_named = check.choices and all(f'"{choice}"' in meaning for choice in check.choices)
    return text if is_named else f"{text} Allowed: {check.allowed}."


def _values(values: list[Any]) -> list[str]:
    """Show the default, and the values of the presets where they differ from it."""
    default, *others = values
    return [_shown(default), *("" if other == default else _shown(other) for other in others)]


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) if value else "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, str):
        return f"`{value}`"
    return str(value)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page())
