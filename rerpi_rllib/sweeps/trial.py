"""What runs in the process of a sweep's trial; it starts often, so it imports little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rerpi_rllib import RERPI, RERPIConfig
from rerpi_rllib.experiments.settings import RunSettings, env_steps, episode_return, greedy_return

METRICS = {"return": episode_return, "greedy_return": greedy_return}


class SweepTrial(RERPI):
    """Any algorithm of the family; its configuration is ``RunSettings`` instead of RLlib's."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        # A checkpoint is restored with RLlib's configuration.
        of_sweep = not isinstance(config, RERPIConfig) and "settings" in config
        self._metric = METRICS[config["metric"]] if of_sweep else episode_return
        self._score = float("nan")
        super().__init__(_config(config) if of_sweep else config, **kwargs)

    @classmethod
    def default_resource_request(cls, config: Any) -> Any:
        return RERPI.default_resource_request(
            config if isinstance(config, RERPIConfig) else _config(config)
        )

    def step(self) -> dict[str, Any]:
        result = super().step()
        score = self._metric(result)
        self._score = score if score == score else self._score
        # Schedulers want both at the top, in every result.
        return {**result, "env_steps": env_steps(result), "score": self._score}


def _config(config: Mapping[str, Any]) -> RERPIConfig:
    return RunSettings(**config["settings"]).build_config(check_env=False)
