"""Acting: RLlib's EnvRunner with a sampling loop of its own, two to three times as fast.

RLlib runs two connector pipelines, adds to an episode object and makes callbacks at every step, which
costs more than a control-suite environment and a small policy together. Here a step is: one forward
pass for all environments, one step of each, numbers into arrays. The episodes are made at the end.
Everything else (groups of EnvRunners, fault tolerance, weights, metrics but for the timers within a
step) stays RLlib's, and so does the loop itself where the user has connectors, callbacks or a module
of their own, or environments in other processes.
"""

from __future__ import annotations

import logging
import time

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.columns import Columns
from ray.rllib.env.env_runner import NUM_ENV_STEP_FAILURES_LIFETIME
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override

from rerpi_rllib.algorithm.networks import act
from rerpi_rllib.algorithm.rl_module import RERPITorchRLModule

logger = logging.getLogger(__name__)


class ToEnvUnits:
    """The policy's actions in [-1, 1] to the environment's units, as RLlib's connectors do it."""

    def __init__(self, space: gym.Space) -> None:
        self._box = space if isinstance(space, gym.spaces.Box) and space.is_bounded() else None
        if self._box is not None:
            self._half = (self._box.high - self._box.low) / 2.0

    def __call__(self, actions: np.ndarray) -> np.ndarray:
        if self._box is None:
            return actions
        scaled = self._box.low + (actions + 1.0) * self._half
        # np.clip takes twice as long.
        clipped = np.minimum(np.maximum(scaled, self._box.low), self._box.high)
        return clipped.astype(self._box.dtype, copy=False)


class _EnvFailed(Exception):
    """What an environment raised is this one's cause."""


class _Piece:
    """What one environment has done since the last call of ``sample``, or since its episode began."""

    def __init__(self, observation: np.ndarray, before: SingleAgentEpisode | None = None) -> None:
        self.episode_id = before.id_ if before else None
        self.started = before.t if before else 0
        self.began = time.perf_counter()
        self.observations = [observation]
        self.actions: list[np.ndarray] = []
        self.rewards: list[float] = []

    def episode(
        self, log_probs: np.ndarray, terminated: bool = False, truncated: bool = False
    ) -> SingleAgentEpisode:
        episode = SingleAgentEpisode(
            self.episode_id,
            observations=self.observations,
            actions=self.actions,
            rewards=self.rewards,
            extra_model_outputs={Columns.ACTION_LOGP: list(log_probs)},
            terminated=terminated,
            truncated=truncated,
            t_started=self.started,
            len_lookback_buffer=0,
        )
        episode._start_time, episode._last_step_time = self.began, time.perf_counter()
        return episode.to_numpy()


class RERPIEnvRunner(SingleAgentEnvRunner):
    """RLlib's runner of one agent's environments, with a lean loop where nothing forbids it."""

    @override(SingleAgentEnvRunner)
    def make_env(self) -> None:
        super().make_env()
        self._to_env_units = ToEnvUnits(self.env.single_action_space)
        self._envs = getattr(self.env.unwrapped, "envs", [])  # Those of this process.
        self._pieces: list[_Piece] = []

    @property
    def is_lean(self) -> bool:
        """Whether the user left everything at every step to us."""
        config = self.config
        return (
            type(self.env.env) is gym.vector.SyncVectorEnv  # Nothing between RLlib's wrapper and it.
            and type(self.module) is RERPITorchRLModule
            and config.normalize_actions
            and config.add_default_connectors_to_env_to_module_pipeline
            and config.add_default_connectors_to_module_to_env_pipeline
            and config._env_to_module_connector is None
            and config._module_to_env_connector is None
            and all(type(callback) is RLlibCallback for callback in self._callbacks)
            and not any(
                getattr(config, f"callbacks_on_episode_{event}")
                for event in ("created", "start", "step", "end")
            )
        )

    @override(SingleAgentEnvRunner)
    def _sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> list[SingleAgentEpisode]:
        if random_actions or not self.is_lean:
            if self._pieces:  # RLlib's loop has episodes of its own.
                self._pieces = []
                self._needs_initial_reset: bool = True
            return super()._sample(
                num_timesteps=num_timesteps,
                num_episodes=num_episodes,
                explore=explore,
                random_actions=random_actions,
                force_reset=force_reset,
            )
        if force_reset or num_episodes is not None or self._needs_initial_reset or not self._pieces:
            self._restart()
        done: list[SingleAgentEpisode] = []
        steps = 0
        wanted = float("inf") if num_timesteps is None else num_timesteps
        while steps < wanted and (num_episodes is None or len(done) < num_episodes):
            try:
                done += self._step(explore)
                steps += self.num_envs
            except _EnvFailed as failure:
                self.metrics.log_value(NUM_ENV_STEP_FAILURES_LIFETIME, 1, reduce="lifetime_sum")
                if not self.config.restart_failed_sub_environments:
                    raise failure.__cause__ or failure from None
                logger.exception("An environment failed and is built anew.")
                self.make_env()
                self._restart()
                steps = 0
        # An evaluation begins with the same seeds each time.
        self._needs_initial_reset = num_episodes is not None
        done = done[:num_episodes]
        self._done_episodes_for_metrics += done
        unfinished = []
        if num_timesteps is not None:
            for index, piece in enumerate(self._pieces):
                if piece.rewards:
                    episode = piece.episode(self._log_probs(piece))
                    self._ongoing_episodes_for_metrics[episode.id_].append(episode)
                    unfinished.append(episode)
                    self._pieces[index] = _Piece(piece.observations[-1], before=episode)
        self._log_env_steps(metric=self._metrics_num_env_steps_sampled, num_steps=steps)
        self._increase_sampled_metrics(steps, len(done))
        return done + unfinished

    def _restart(self) -> None:
        """New episodes in all environments."""
        self._ongoing_episodes_for_metrics.clear()
        seed = self._seed if self._needs_initial_reset else None
        observations, _ = self._try_env_reset(seed=seed, options=None)
        self._pieces = [_Piece(observation) for observation in np.array(observations, np.float32)]
        self._needs_initial_reset = False

    @torch.inference_mode()
    def _step(self, explore: bool) -> list[SingleAgentEpisode]:
        """One step of each environment; the episodes that ended with it."""
        observations = np.stack([piece.observations[-1] for piece in self._pieces])
        inputs = torch.from_numpy(observations).to(self._device)
        actions = act(self.module.nets, inputs, explore)[0].cpu().numpy()
        ended = []
        for index, (env, action) in enumerate(zip(self._envs, self._to_env_units(actions))):
            piece = self._pieces[index]
            try:
                observation, reward, terminated, truncated, _ = env.step(action)
                observation = np.array(observation, np.float32)  # It may be used again, by reset too.
                start = env.reset()[0] if terminated or truncated else None
            except Exception as failure:
                raise _EnvFailed from failure
            piece.observations.append(observation)
            piece.actions.append(actions[index])
            piece.rewards.append(float(reward))
            if start is not None:
                log_probs = self._log_probs(piece)
                ended.append(piece.episode(log_probs, bool(terminated), bool(truncated)))
                self._pieces[index] = _Piece(np.array(start, np.float32))
        return ended

    @torch.inference_mode()
    def _log_probs(self, piece: _Piece) -> np.ndarray:
        """Of a piece's actions, all at once: the policy's weights change between calls only."""
        policy = self.module.nets.policy
        observations = torch.from_numpy(np.stack(piece.observations[:-1])).to(self._device)
        actions = torch.from_numpy(np.stack(piece.actions)).to(self._device)
        encoded = policy.encode_actions(actions.view(len(actions), -1))
        return policy(observations).log_prob(encoded).cpu().numpy()
