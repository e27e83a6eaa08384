"""``RERPIEnvRunner`` acts: RLlib's EnvRunner with a sampling loop that is two to five times as fast.

RLlib runs two connector pipelines, extends an episode object and makes callbacks at every step, which
costs more than a control-suite environment and a small policy together. A step here is one forward
pass for all environments, one step of each of them, and numbers appended to lists. The episodes are
made at the end. All else (groups of EnvRunners, fault tolerance, weights, metrics except the timers
within a step) is left to RLlib, and so is the loop itself if the user has connectors, callbacks or a
module of their own, or environments that are not stepped one by one in this process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.wrappers.vector import DictInfoToList
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.columns import Columns
from ray.rllib.env.env_runner import NUM_ENV_STEP_FAILURES_LIFETIME, EnvRunner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.evaluation.rollout_worker import RolloutWorker
from ray.rllib.utils.annotations import override
from ray.rllib.utils.debug import update_global_seed_if_necessary
from torch import Tensor

from rerpi_rllib.algorithm import progress
from rerpi_rllib.algorithm.faults import LARGEST_NUMBER, find_bad_number
from rerpi_rllib.algorithm.networks import record_act
from rerpi_rllib.algorithm.rl_module import RERPITorchRLModule
from rerpi_rllib.envs import VectorObservations, states

logger = logging.getLogger(__name__)

Array: TypeAlias = npt.NDArray[Any]


class ToEnvUnits:
    """Maps the policy's actions in [-1, 1] to the environment's units, as RLlib's connectors do.

    Actions without bounds are passed on as they are. A box that is bounded on one side only is
    refused before anything acts.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self._box = space if isinstance(space, gym.spaces.Box) and space.is_bounded() else None
        if self._box is not None:
            self._half = (self._box.high - self._box.low) / 2.0

    def __call__(self, actions: Array) -> Array:
        if self._box is None:
            return actions
        scaled = self._box.low + (actions + 1.0) * self._half
        # np.clip takes twice as long.
        clipped: Array = np.minimum(np.maximum(scaled, self._box.low), self._box.high)
        return clipped.astype(self._box.dtype, copy=False)


def later_seed(seed: int, *point: int) -> int:
    """Return a seed for what begins anew at a later point of a run that began with ``seed``."""
    return int(np.random.SeedSequence([seed, *point]).generate_state(1)[0]) >> 1


def _is_sound(observation: Array) -> bool:
    """Tell whether a policy can act on an observation; it takes a quarter of a microsecond."""
    return bool(
        np.vdot(observation, observation) <= LARGEST_NUMBER**2
        or np.abs(observation).max() <= LARGEST_NUMBER
    )


class _EnvFailed(Exception):
    """Raised from what an environment has raised, to tell it from failures of the policy."""


class _Piece:
    """The steps of one environment since the last call of ``sample`` or the start of its episode.

    Args:
        observation: the first one.
        episode_id: of the episode, if it has begun before.
        started: the number of its steps before these.
    """

    def __init__(self, observation: Array, episode_id: str | None = None, started: int = 0) -> None:
        self.episode_id, self.started = episode_id, started
        self.began = time.perf_counter()
        self.observations = [observation]
        self.is_bad = not _is_sound(observation)
        self.actions: list[Array] = []
        self.rewards: list[float] = []

    def episode(
        self, log_probs: Array, terminated: bool = False, truncated: bool = False
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


@dataclass(frozen=True)
class _Earlier:
    """What the metrics of an episode need of a piece that another process has sampled."""

    length: int
    total: float
    seconds: float

    def __len__(self) -> int:
        return self.length

    def get_return(self) -> float:
        return self.total

    def get_duration_s(self) -> float:
        return self.seconds


def _actor_name(runner: EnvRunner) -> str:
    role = "evaluation runner" if runner.config.in_evaluation else "env runner"
    name: str = runner.config.actor_name(role, runner.worker_index)
    return name


class RERPIRolloutWorker(RolloutWorker):
    """The old API stack's counterpart of an EnvRunner, with a name of ours."""

    def __repr__(self) -> str:
        return _actor_name(self)


class RERPIEnvRunner(SingleAgentEnvRunner):
    """RLlib's runner of one agent's environments, with a lean loop where nothing forbids it."""

    _num_seeded_resets = 0
    _is_sampling = False

    def __repr__(self) -> str:
        """Return the name of the actor; Ray asks for it."""
        return _actor_name(self)

    @override(SingleAgentEnvRunner)
    def make_env(self) -> None:
        super().make_env()
        self._join_parts_of_observations()
        self._to_env_units = ToEnvUnits(self.env.single_action_space)
        # A vectorised environment that is stepped as a whole has none, and RLlib's loop steps it.
        self._envs = getattr(self.env.unwrapped, "envs", [])
        self._abandon_episodes()

    def _join_parts_of_observations(self) -> None:
        """Let environments with Dict observations return vectors, as :func:`envs.make` does.

        Connectors of the user's get observations as they are.
        """
        space, made = self.env.single_observation_space, self.env.env
        if not isinstance(space, gym.spaces.Dict) or self.config._env_to_module_connector:
            return
        if type(made) is not gym.vector.SyncVectorEnv:
            raise ValueError(
                f"gym_env_vectorize_mode={self.config.gym_env_vectorize_mode!r} is not allowed with "
                "Dict observations: it must be 'sync', or wrap each environment in "
                "rerpi_rllib.envs.VectorObservations where it is made."
            )
        joined = gym.vector.SyncVectorEnv([partial(VectorObservations, env) for env in made.envs])
        joined.spec = made.spec
        made.closed = True  # Otherwise it would close the environments, which are in use.
        self.env: Any = DictInfoToList(joined)

    @override(SingleAgentEnvRunner)
    def make_module(self) -> None:
        super().make_module()
        self._act: dict[bool, Callable[[Tensor], Tensor]] = {}

    @property
    def is_lean(self) -> bool:
        """Whether the user leaves all that happens at a step to this class."""
        config = self.config
        return bool(
            # No wrapper of the user's is between RLlib's wrapper and the environments.
            type(self.env.env) is gym.vector.SyncVectorEnv
            and type(self.module) is RERPITorchRLModule
            and config.normalize_actions
            and config.episodes_to_numpy
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
                self._abandon_episodes()
                self._needs_initial_reset: bool = True
            episodes: list[SingleAgentEpisode] = super()._sample(
                num_timesteps=num_timesteps,
                num_episodes=num_episodes,
                explore=explore,
                random_actions=random_actions,
                force_reset=force_reset,
            )
            if any([not episode.is_done for episode in self._leave_out_bad(episodes)]):
                self._needs_initial_reset = True
            return episodes
        if force_reset or num_episodes is not None or self._needs_initial_reset or not self._pieces:
            self._restart()
        self._is_sampling = True
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
                logger.exception("An environment failed; all of this EnvRunner are rebuilt.")
                self.make_env()
                self._restart()
                steps = sum(map(len, done))  # The steps of unfinished episodes are lost.
        # An evaluation begins with the same seeds each time.
        self._needs_initial_reset = num_episodes is not None
        done = done[:num_episodes]
        self._done_episodes_for_metrics += done
        self._leave_out_bad(done)
        unfinished = []
        if num_timesteps is not None:
            for index, piece in enumerate(self._pieces):
                if piece.rewards:
                    episode = piece.episode(self._log_probs(piece))
                    self._ongoing_episodes_for_metrics[episode.id_].append(episode)
                    unfinished.append(episode)
                    self._pieces[index] = _Piece(piece.observations[-1], episode.id_, episode.t)
        self._is_sampling = False
        self._log_env_steps(metric=self._metrics_num_env_steps_sampled, num_steps=steps)
        self._increase_sampled_metrics(steps, len(done))
        return done + unfinished

    def _leave_out_bad(self, episodes: list[SingleAgentEpisode]) -> list[SingleAgentEpisode]:
        """Keep episodes with NaN, infinity or absurd numbers out of the metrics, and return them."""
        bad = [
            episode
            for episode in episodes
            if len(episode)
            and find_bad_number(
                {"observation": episode.get_observations(), "reward": episode.get_rewards()}
            )
        ]
        for episode in bad:
            self._ongoing_episodes_for_metrics.pop(episode.id_, None)
            if episode.is_done:
                self._done_episodes_for_metrics.remove(episode)
        return bad

    def _abandon_episodes(self) -> None:
        """Forget the episodes in progress; metrics of completed ones are kept."""
        for piece in getattr(self, "_pieces", []):
            self._ongoing_episodes_for_metrics.pop(piece.episode_id, None)
        self._pieces: list[_Piece] = []

    def _restart(self) -> None:
        """Begin new episodes in all environments."""
        self._abandon_episodes()
        seed = self._seed if self._needs_initial_reset else None
        observations, _ = self._try_env_reset(seed=seed, options=None)
        self._pieces = [_Piece(observation) for observation in np.array(observations, np.float32)]
        self._needs_initial_reset = False

    @override(SingleAgentEnvRunner)
    def _try_env_reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Any]:
        """Reset the environments; with a seed, so that no start of the run is repeated.

        RLlib gives the same seed whenever environments begin anew: after a failure, and after a
        checkpoint was restored. That is right for an evaluation only.
        """
        if seed is not None and not self.config.in_evaluation:
            # A restored algorithm tells its EnvRunners how many steps it has.
            point = int(self.num_env_steps_sampled_lifetime), self._num_seeded_resets
            self._num_seeded_resets += 1
            if any(point):
                seed = later_seed(seed, *point)
                if self.worker_index:  # This process only acts, and draws other actions, too.
                    update_global_seed_if_necessary("torch", seed)
        result: tuple[Any, Any] = super()._try_env_reset(seed=seed, options=options)
        return result

    @torch.inference_mode()
    def _step(self, explore: bool) -> list[SingleAgentEpisode]:
        """Step each environment once and return the episodes that ended with it.

        An episode ends, too, with the first number that nothing can be learned from.
        """
        # np.stack takes three times as long.
        observations = np.array([piece.observations[-1] for piece in self._pieces])
        for index, piece in enumerate(self._pieces):
            if piece.is_bad:  # It was from its start.
                observations[index] = 0.0
        inputs = torch.from_numpy(observations).to(self._device)
        if explore not in self._act:
            noise = self.module.noise if explore else None
            if noise is not None:
                noise.begin(inputs)
            self._act[explore] = record_act(self.module.nets, inputs, explore, noise)
        actions = self._act[explore](inputs).cpu().numpy()
        ended = []
        for index, (env, action) in enumerate(zip(self._envs, self._to_env_units(actions))):
            piece = self._pieces[index]
            try:
                observation, reward, terminated, truncated, _ = env.step(action)
                observation = np.array(
                    observation, np.float32
                )  # The environment may reuse its array.
                reward = float(reward)
                is_bad = (
                    piece.is_bad or not abs(reward) <= LARGEST_NUMBER or not _is_sound(observation)
                )
                start = env.reset()[0] if terminated or truncated or is_bad else None
            except Exception as failure:
                raise _EnvFailed from failure
            piece.observations.append(observation)
            piece.actions.append(actions[index])
            piece.rewards.append(reward)
            if start is not None:
                log_probs = self._log_probs(piece)
                truncated = not terminated if is_bad else bool(truncated)
                ended.append(piece.episode(log_probs, bool(terminated), truncated))
                self._pieces[index] = _Piece(np.array(start, np.float32))
        return ended

    @torch.inference_mode()
    def _log_probs(self, piece: _Piece) -> Array:
        """Compute a piece's log-probabilities at once: weights change between calls only."""
        policy = self.module.nets.policy
        observations = torch.from_numpy(np.stack(piece.observations[:-1])).to(self._device)
        actions = torch.from_numpy(np.stack(piece.actions)).to(self._device)
        encoded = policy.encode_actions(actions.view(len(actions), -1))
        log_probs: Array = policy(observations).log_prob(encoded).cpu().numpy()
        return log_probs

    # -- Checkpoints of synchronous runs: the episodes in progress go on in another process. --

    def get_progress(self) -> dict[str, Any]:
        """Return what RLlib's state of an EnvRunner leaves out, between two calls of ``sample``."""
        noise = getattr(self.module, "noise", None)
        return {
            "num_seeded_resets": self._num_seeded_resets,
            "noise": None if noise is None else noise.noise.numpy(force=True).copy(),
            "metrics": self.metrics.get_state(),
            "episodes": self._get_episodes() if self.is_lean else None,
        }

    def _get_episodes(self) -> dict[str, Any] | None:
        """Return the episodes in progress, or None if an environment's state cannot be had."""
        if self._is_sampling:  # A failure has ended the call: the replay does not have its steps.
            return None
        try:
            env_states = [states.get_state(env) for env in self._envs]
        except Exception:  # A checkpoint without it is better than none.
            logger.warning("%s does not give its state.", self.config.env, exc_info=True)
            return None
        if any(state is None for state in env_states):
            return None
        if not progress.is_storable(env_states):
            logger.warning(
                "get_state() of %s returned more than numbers, strings, lists, dictionaries and "
                "arrays: a run that is restored begins its episodes anew.",
                self.config.env,
            )
            return None
        return {
            "environments": env_states,
            "need_reset": self._needs_initial_reset,
            "pieces": [
                {
                    "id": piece.episode_id,
                    "started": piece.started,
                    "observation": piece.observations[-1],
                    "earlier": [
                        [len(earlier), earlier.get_return(), earlier.get_duration_s()]
                        for earlier in self._ongoing_episodes_for_metrics.get(piece.episode_id, [])
                    ],
                }
                for piece in self._pieces
            ],
        }

    def set_progress(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`get_progress` has returned."""
        self._abandon_episodes()
        self._needs_initial_reset, self._is_sampling = True, False
        self._num_seeded_resets = state["num_seeded_resets"]
        self.metrics.set_state(state["metrics"])
        if state["noise"] is not None and getattr(self.module, "noise", None) is not None:
            self.module.noise.noise = torch.tensor(state["noise"], device=self._device)
            self._act = {}  # What was recorded uses the noise that was there before.
        episodes = state["episodes"]
        if episodes is None or not self.is_lean or len(episodes["environments"]) != self.num_envs:
            logger.warning("Episodes begin anew: the checkpoint has no state of these environments.")
            return
        try:
            for env, env_state in zip(self._envs, episodes["environments"]):
                states.set_state(env, env_state)
        except Exception:
            logger.warning(
                "Episodes begin anew: %s does not take its state.", self.config.env, exc_info=True
            )
            return
        self._needs_initial_reset = episodes["need_reset"]
        for piece in episodes["pieces"]:
            self._pieces.append(_Piece(piece["observation"], piece["id"], piece["started"]))
            if piece["earlier"]:
                self._ongoing_episodes_for_metrics[piece["id"]] = [
                    _Earlier(*numbers) for numbers in piece["earlier"]
                ]
