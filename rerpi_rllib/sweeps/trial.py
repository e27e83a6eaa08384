"""The algorithm of a sweep's trial. Its process starts often, so this module imports little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rerpi_rllib import RERPI, RERPIConfig
from rerpi_rllib.algorithm.rerpi import trial_name
from rerpi_rllib.runs.results import env_steps, episode_return, greedy_return
from rerpi_rllib.runs.settings import RunSettings

METRICS = {"return": episode_return, "greedy_return": greedy_return}


class SweepTrial(RERPI):
    """Any algorithm of the family, configured by ``RunSettings`` and not by RLlib's configuration."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        # When a checkpoint is restored, RLlib passes its own configuration.
        is_trial = not isinstance(config, RERPIConfig) and "settings" in config
        self._metric = METRICS[config["metric"]] if is_trial else episode_return
        self._score = float("nan")
        trial = trial_name(config)
        super().__init__(_build_config(config) if is_trial else config, trial=trial, **kwargs)

    @classmethod
    def default_resource_request(cls, config: Any) -> Any:
        return RERPI.default_resource_request(
            config if isinstance(config, RERPIConfig) else _build_config(config)
        )

    def step(self) -> dict[str, Any]:
        result = super().step()
        score = self._metric(result)
        self._score = score if score == score else self._score
        # Schedulers need both at the top level of every result.
        return {**result, "env_steps": env_steps(result), "score": self._score}


def _build_config(config: Mapping[str, Any]) -> RERPIConfig:
    settings = RunSettings(**config["settings"])
    return settings.build_config(check_env=False, accepted=settings.config)
