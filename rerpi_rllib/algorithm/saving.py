"""How an algorithm is saved and restored: what RLlib saves, replay, progress and manifest."""

from __future__ import annotations

import logging
import shutil
import tempfile
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, Self

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import (
    COMPONENT_LEARNER,
    COMPONENT_LEARNER_GROUP,
    COMPONENT_RL_MODULE,
    DEFAULT_MODULE_ID,
)
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.debug import update_global_seed_if_necessary
from ray.tune import Checkpoint
from ray.tune.result import STDERR_FILE, STDOUT_FILE, TRIAL_INFO

from rerpi_rllib.algorithm import checkpoint, progress
from rerpi_rllib.algorithm.config import RERPIConfig
from rerpi_rllib.algorithm.env_runner import RERPIEnvRunner, later_seed
from rerpi_rllib.algorithm.faults import LearnerBackup
from rerpi_rllib.algorithm.rate_limiter import RateLimiter
from rerpi_rllib.algorithm.replay import Replay
from rerpi_rllib.algorithm.weights import Weights
from rerpi_rllib.core import layers

logger = logging.getLogger(__name__)

REPLAY = "replay"
PROGRESS = "progress"
# The key in a trial's configuration for the directory in which its checkpoints share their replay.
SHARED_REPLAY_DIRECTORY = "__shared_replay_directory__"
_LIMITER = "rate_limiter"
_TIME_TOTAL = "time_total"


class SavedAlgorithm(Algorithm):
    """An algorithm whose checkpoints hold all that it needs to go on; how it trains is a subclass's.

    The subclass sets the attributes below in its :meth:`setup`.
    """

    replay: Replay
    # The newest weights that the EnvRunners get, and the number of updates when they got any.
    _weights: Weights | None = None
    _updates_sent = 0
    _limiter: RateLimiter
    _backup: LearnerBackup
    _learner_thread: Executor

    @override(Algorithm)
    def setup(self, config: RERPIConfig) -> None:
        shared = vars(self.config).get(SHARED_REPLAY_DIRECTORY)
        self._shared_replay = None if shared is None else Path(shared)
        self._saves_for_trial = False
        for key in (STDOUT_FILE, STDERR_FILE, TRIAL_INFO, SHARED_REPLAY_DIRECTORY):
            # These are of this trial; who restores its checkpoints must not inherit them.
            self.config.__dict__.pop(key, None)
        super().setup(config)

    @property
    def _is_asynchronous(self) -> bool:
        return bool(self.config.num_env_runners > 0)

    @override(Algorithm)
    def step(self) -> dict[str, Any]:
        """Make an iteration; in a run of `rllib train`, one that fails leaves a checkpoint."""
        try:
            result: dict[str, Any] = super().step()
        except Exception:
            if self._shared_replay is not None and self._limiter.env_steps:
                self._save_after_failure()
            raise
        return result

    def _save_after_failure(self) -> None:
        """Save what there is: updates that fail change nothing, and bad data is not stored."""
        try:
            self._learner_thread.submit(lambda: None).result()  # After what it still does.
            self.save()
        except Exception:
            logger.exception("There is no checkpoint of the moment of the failure.")

    def _own_state(self) -> dict[str, Any]:
        return {_LIMITER: self._limiter.get_state(), _TIME_TOTAL: self._time_total}

    def _set_own_state(self, state: dict[str, Any]) -> None:
        if _LIMITER in state:
            self._limiter.set_state(state[_LIMITER])
            self._time_total = state[_TIME_TOTAL]
        self._backup.forget()  # The learners get another state.
        self._weights, self._updates_sent = None, 0

    @override(Algorithm)
    def get_state(
        self, components: Any = None, *, not_components: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        state: dict[str, Any] = super().get_state(components, not_components=not_components, **kwargs)
        if self._check_component(REPLAY, components, not_components):
            state[REPLAY] = self.replay.get_state()
        if self._check_component(PROGRESS, components, not_components):
            state[PROGRESS] = self._get_progress()
        return state | self._own_state()

    @override(Algorithm)
    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._set_own_state(state)
        if REPLAY in state:
            self.replay.set_state(state[REPLAY])
        if PROGRESS in state:
            self._set_progress(state[PROGRESS])

    def _get_progress(self) -> dict[str, Any]:
        """Return the random states, and what an EnvRunner of this process is in the middle of."""
        state: dict[str, Any] = {"random": progress.random_states()}
        if isinstance(self.env_runner, RERPIEnvRunner) and not self._is_asynchronous:
            state["env_runner"] = self.env_runner.get_progress()
            state["layers"] = layers.get_choices()
        return state

    def _set_progress(self, state: dict[str, Any] | None) -> None:
        """Go on where :meth:`_get_progress` was called, after all else has been restored."""
        if isinstance(self.env_runner, RERPIEnvRunner) and not self._is_asynchronous:
            if state is not None and "env_runner" in state:
                self.env_runner.set_progress(state["env_runner"])
                layers.set_choices(state["layers"])
            else:
                # Of an asynchronous run: new episodes, which begin otherwise than the first ones.
                self.env_runner.num_env_steps_sampled_lifetime = self._limiter.env_steps
        if state is not None:
            progress.set_random_states(state["random"])

    @override(Algorithm)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let the machine that loads a checkpoint look for GPUs itself."""
        (config,), kwargs = super().get_ctor_args_and_kwargs()
        if self.config.gpus_were_auto:
            config = {**config, "num_gpus_per_learner": "auto"}
        return (config,), kwargs

    @override(Algorithm)
    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        return [*super().get_checkpointable_components(), (REPLAY, self.replay)]

    @override(Algorithm)
    def save_to_path(
        self, path: Any = None, *, state: Any = None, filesystem: Any = None, **kwargs: Any
    ) -> str:
        """Write a checkpoint that holds everything, or what is in ``state``."""
        path = path or tempfile.mkdtemp()
        with checkpoint.local_target(path, filesystem) as directory:
            self._write_checkpoint(directory, state=state, **kwargs)
        return str(path)

    def _write_checkpoint(
        self,
        directory: Path,
        *,
        state: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write what RLlib saves, then networks and replay in open formats, and last the manifest.

        The replay is left out of the state that RLlib saves, which is a copy in memory.
        """
        self._clear(directory)
        saved = dict(state) if state is not None else self.get_state(not_components=REPLAY)
        stored, in_progress = saved.pop(REPLAY, None), saved.pop(PROGRESS, None)
        module = _part(
            saved, COMPONENT_LEARNER_GROUP, COMPONENT_LEARNER, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
        )
        super().save_to_path(str(directory), state=saved, **kwargs)
        networks = {
            key.removeprefix("nets."): value
            for key, value in (module or {}).items()
            if key.startswith("nets.")
        }
        if in_progress is not None:
            progress.save(directory / PROGRESS, in_progress)
        has_replay = state is None or stored is not None
        self._finish_checkpoint(directory, networks, has_replay, stored)

    def _finish_checkpoint(
        self,
        directory: Path,
        networks: dict[str, Any],
        has_replay: bool = True,
        stored: dict[str, Any] | None = None,
    ) -> None:
        """Write networks, replay and manifest; ``stored`` is another state of the replay to save."""
        if networks:
            checkpoint.save_networks(directory, networks)
        keeps_rows = has_replay and self.config.checkpoint_replay
        shared = self._shared_replay if self._saves_for_trial else None
        if has_replay:
            self.replay.save_to_path(
                directory / REPLAY, state=stored, shared=shared, with_rows=keeps_rows
            )
        is_shared = keeps_rows and shared is not None and stored is None
        checkpoint.write_manifest(
            directory,
            {**self._description(), "replay_size": len(self.replay) if keeps_rows else 0},
            self.replay.shared_files if is_shared else {},
        )

    @staticmethod
    def _clear(directory: Path) -> None:
        """Take away what an earlier checkpoint in the same place has left; it is whole no longer."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / checkpoint.MANIFEST).unlink(missing_ok=True)
        (directory / checkpoint.NETWORKS).unlink(missing_ok=True)
        for part in (REPLAY, PROGRESS):
            shutil.rmtree(directory / part, ignore_errors=True)

    @property
    def spaces_of_networks(self) -> tuple[Any, Any]:
        """The observation and action spaces that the networks see."""
        if self.config.uses_old_api_stack:  # RLlib shows the space from before it joined its parts.
            policy = self.get_policy()
            return policy.observation_space, policy.action_space
        observation_space, action_space = self.spaces[DEFAULT_MODULE_ID]
        return observation_space, action_space

    def _description(self) -> dict[str, Any]:
        """Describe the checkpoint for those who must not unpickle it."""
        config = self.config
        observation_space, action_space = self.spaces_of_networks
        return {
            "algo": config.algo_class.__name__,
            "env": config.env if isinstance(config.env, str) else repr(config.env),
            # None if it holds objects.
            "env_config": dict(config.env_config) if checkpoint.is_json(config.env_config) else None,
            "api_stack": "old" if config.uses_old_api_stack else "new",
            "iteration": self.iteration,
            "env_steps": self._limiter.env_steps,
            "updates": self._limiter.updates,
            "settings": checkpoint.describe_settings(config.to_dict()),
            "spaces": {
                "observation": checkpoint.describe_space(observation_space),
                "action": checkpoint.describe_space(action_space),
            },
        }

    @override(Algorithm)
    def restore_from_path(
        self, path: Any, *args: Any, component: Any = None, filesystem: Any = None, **kwargs: Any
    ) -> None:
        if component is not None:
            kwargs |= {"component": component, "filesystem": filesystem}
            super().restore_from_path(path, *args, **kwargs)
            return
        with checkpoint.local_copy(path, filesystem) as directory:
            checkpoint.check_whole(directory, with_replay=False)
            for group in filter(None, (self.env_runner_group, self.eval_env_runner_group)):
                group.foreach_env_runner(_take_any_weights)
            super().restore_from_path(str(directory), *args, **kwargs)
            in_progress = progress.load(directory / PROGRESS)
        self._note_missing_replay()
        self._set_progress(in_progress)

    def _note_missing_replay(self) -> None:
        """After restoring: learning waits if there was no replay in the checkpoint."""
        if not len(self.replay) and self._limiter.env_steps:
            logger.warning("The checkpoint holds no replay: it is filled before learning goes on.")
            self._limiter.refill()

    @override(Algorithm)
    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the checkpoint of a trial, in whose run all checkpoints may share their replay."""
        directory = Path(checkpoint_dir).absolute()
        self._saves_for_trial = True
        try:
            if not self.config.uses_old_api_stack:
                super().save_checkpoint(str(directory))  # It calls save_to_path.
                return
            self._clear(directory)
            super().save_checkpoint(str(directory))
            networks = self.get_policy().model.nets.state_dict()
            networks = {name: value.numpy(force=True) for name, value in networks.items()}
            progress.save(directory / PROGRESS, self._get_progress())
            self._finish_checkpoint(directory, networks)
        finally:
            self._saves_for_trial = False

    # Checkpoints of the old stack are one pickled state with the replay beside it.

    @override(Algorithm)
    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | self._own_state()

    @override(Algorithm)
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        is_new = not self._limiter.env_steps
        self._set_own_state(state)
        if is_new and self.config.seed is not None:
            # Otherwise its workers would begin as they began the run.
            seed = later_seed(self.config.seed, self._limiter.env_steps)
            self.env_runner_group.foreach_env_runner(partial(_seed_anew, seed=seed))

    @override(Algorithm)
    def load_checkpoint(self, checkpoint_dir: str) -> None:
        if not self.config.uses_old_api_stack:
            super().load_checkpoint(checkpoint_dir)
            return
        directory = Path(checkpoint_dir).absolute()
        checkpoint.check_whole(directory, with_replay=False)
        super().load_checkpoint(str(directory))
        self._restore_old_stack_replay(directory)

    def _restore_old_stack_replay(self, directory: Path) -> None:
        self.replay.restore_from_path(directory / REPLAY)
        self._note_missing_replay()
        self._set_progress(progress.load(directory / PROGRESS))

    @classmethod
    @override(Algorithm)
    def from_checkpoint(cls, path: Any, filesystem: Any = None, *args: Any, **kwargs: Any) -> Self:
        """Build the algorithm that wrote a checkpoint. This unpickles: see SECURITY.md."""
        path = path.to_directory() if isinstance(path, Checkpoint) else path
        with checkpoint.local_copy(path, filesystem) as directory:
            checkpoint.check_whole(directory, with_replay=False)
            algorithm: Self = super().from_checkpoint(str(directory), None, *args, **kwargs)
            if algorithm.config.uses_old_api_stack:
                algorithm._restore_old_stack_replay(directory)
        return algorithm


def _seed_anew(worker: Any, seed: int) -> None:
    """Seed the environments of the old stack's worker, and its process if it only acts."""
    seed = later_seed(seed, worker.worker_index)
    if worker.worker_index:
        update_global_seed_if_necessary("torch", seed)
    for index, env in enumerate(worker.foreach_env(lambda env: env)):
        env.reset(seed=seed + index)


def _take_any_weights(env_runner: EnvRunner) -> None:
    """Let an EnvRunner take weights that are older than its own, which it would ignore."""
    env_runner._weights_seq_no = 0


def _part(state: dict[str, Any], *names: str) -> dict[str, Any] | None:
    """Return the state of a component's component, or None if it is not in the state."""
    for name in names:
        if name not in state:
            return None
        state = state[name]
    return state
