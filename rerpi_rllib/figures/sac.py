"""stable-baselines3's SAC on the tasks of a sweep, for the figure that compares with it.

It has its own default settings. Its runs are evaluated as often as those of the sweep, and they are
kept, resumed and stopped in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.tune import PlacementGroupFactory, Trainable
from ray.tune.execution.placement_groups import resource_dict_to_pg_factory

from rerpi_rllib import RERPIConfig, envs
from rerpi_rllib.analysis.curves import Run, load_run
from rerpi_rllib.runs.settings import RunSettings
from rerpi_rllib.sweeps.running import run_sweep
from rerpi_rllib.sweeps.sweep import Sweep, trial_name

SAC = "SAC"
# RLlib evaluates with seeds that begin here, so that the starts are the same.
_FIRST_EVALUATION_SEED = 1_000_000


class SACTrial(Trainable):
    """One run of stable-baselines3's SAC; an iteration ends with an evaluation."""

    @classmethod
    def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
        return resource_dict_to_pg_factory({"CPU": 1, "GPU": int(torch.cuda.is_available())})

    def setup(self, config: dict[str, Any]) -> None:
        from stable_baselines3 import SAC

        self._settings = RunSettings(**config["settings"])
        self._env, self._test_env = (envs.make(self._settings.env) for _ in range(2))
        if not torch.cuda.is_available():
            torch.set_num_threads(1)  # There are as many trials at once as CPUs.
        self._class, self._returns = SAC, [float("nan")]
        self._model = SAC("MlpPolicy", self._env, seed=self._settings.seed)

    def step(self) -> dict[str, Any]:
        self._model.learn(
            self._settings.config["min_sample_timesteps_per_iteration"], reset_num_timesteps=False
        )
        episodes = range(self._settings.config["evaluation_duration"])
        first = _FIRST_EVALUATION_SEED + (self._settings.seed or 0)
        score = float(np.mean([self._play(first + episode) for episode in episodes]))
        steps = self._model.num_timesteps
        return {
            "num_env_steps_sampled_lifetime": steps,
            "evaluation": {"env_runners": {"episode_return_mean": score}},
            "env_steps": steps,
            "score": score,
        }

    def _play(self, seed: int) -> float:
        """Return the return of a greedy episode."""
        (observation, _), total, done = self._test_env.reset(seed=seed), 0.0, False
        while not done:
            action, _ = self._model.predict(observation, deterministic=True)
            observation, reward, terminated, truncated, _ = self._test_env.step(action)
            total, done = total + float(reward), terminated or truncated
        return total

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        self._model.save(Path(checkpoint_dir) / "model.zip")
        self._model.save_replay_buffer(Path(checkpoint_dir) / "replay.pkl")

    def load_checkpoint(self, checkpoint: Any) -> None:
        self._model = self._class.load(Path(checkpoint) / "model.zip", env=self._env)
        self._model.load_replay_buffer(Path(checkpoint) / "replay.pkl")


@dataclass
class _SACSweep(Sweep):
    """The same tasks, seeds and evaluations with SAC in the place of the variants."""

    def trials(self) -> dict[str, RunSettings]:
        trials = {}
        for settings in super().trials().values():
            evaluation = {
                key: settings.config[key]
                for key in ("min_sample_timesteps_per_iteration", "evaluation_duration")
            }
            settings = replace(settings, algo=SAC, preset=None, config=evaluation)
            trials[trial_name(settings, self.keys)] = settings
        return trials


def run_sac(sweep: Sweep, directory: Path, command: str) -> tuple[list[Run], dict[str, str]]:
    """Run SAC where a sweep has runs, or what is left of it; return the runs and the failures.

    Args:
        sweep: it has to evaluate its runs at the end of each iteration.
        directory: where the runs go.
        command: what the user typed.
    """
    peer = _SACSweep(**vars(sweep))
    config = RERPIConfig().env_runners(num_env_runners=0)
    failed = run_sweep(peer, directory, command=command, trainable=SACTrial, needs=config)
    runs = [
        replace(load_run(directory / name), settings=settings)
        for name, settings in peer.trials().items()
        if name not in failed
    ]
    return runs, failed


def check_sac() -> None:
    """Raise ``ValueError`` if stable-baselines3 is not there."""
    try:
        import stable_baselines3  # noqa: F401
    except ImportError:
        raise ValueError(
            "The figure compares with the SAC of stable-baselines3, which is not installed: "
            "pip install -c constraints.txt -e '.[benchmark]'"
        ) from None
