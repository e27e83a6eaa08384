"""``RERPI``: the training step, in which acting and learning go on at the same time."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import (
    DEFAULT_MODULE_ID,
)
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.policy.policy import Policy
from ray.rllib.policy.sample_batch import DEFAULT_POLICY_ID
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    NUM_AGENT_STEPS_SAMPLED,
    NUM_AGENT_STEPS_TRAINED,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_ENV_STEPS_TRAINED,
    SAMPLE_TIMER,
    SYNCH_WORKER_WEIGHTS_TIMER,
    TIMERS,
)
from ray.rllib.utils.metrics.learner_info import LEARNER_STATS_KEY
from ray.tune.result import TRIAL_INFO

from rerpi_rllib.algorithm.config import RERPIConfig
from rerpi_rllib.algorithm.exporter import NUM_UPDATES_LIFETIME, MetricsExporter
from rerpi_rllib.algorithm.faults import (
    FAULTS,
    NUM_BAD_EPISODES,
    NUM_ENV_RUNNER_RESTARTS,
    NUM_LEARNER_RESTARTS,
    NUM_NONFINITE_UPDATES,
    NUM_REPLAY_SHARD_RESTARTS,
    LearnerBackup,
    Revival,
    Waiting,
)
from rerpi_rllib.algorithm.histograms import HISTOGRAMS, Histograms
from rerpi_rllib.algorithm.learner import NO_BATCH, UNDONE
from rerpi_rllib.algorithm.process import compile_for_learning, set_up_learning
from rerpi_rllib.algorithm.rate_limiter import RateLimiter
from rerpi_rllib.algorithm.replay import Replay, ReplayBuffer
from rerpi_rllib.algorithm.replay_shards import ReplayShards
from rerpi_rllib.algorithm.saving import SavedAlgorithm
from rerpi_rllib.algorithm.weights import Weights
from rerpi_rllib.core.threads import one_torch_thread_each
from rerpi_rllib.core.updates import NonFiniteUpdates

logger = logging.getLogger(__name__)


def trial_name(config: Any) -> str | None:
    """Return the name of the trial from what Tune gives as configuration; RLlib drops it."""
    trial = config.get(TRIAL_INFO) if isinstance(config, dict) else None
    return None if trial is None else str(trial.trial_name)


_MAX_UPDATES_PER_CALL = 50
_MAX_ROWS_PER_CALL = 2**18
_SECONDS_PER_CALL = 1.0
_SECONDS_BETWEEN_LOOKS = 0.05
_MAX_FAILURES_IN_A_ROW = 3
_MAX_LOST_BATCHES_IN_A_ROW = 10
_SECONDS_TO_STOP = 10.0
_SECONDS_TO_ANSWER = 30.0


def _sample_and_get_metrics(
    env_runner: EnvRunner,
    store: Callable[[Any], Any] | None = None,
    weights: Weights | None = None,
) -> tuple[Any, dict[str, Any] | None] | str:
    """Return a fragment and its metrics, or what went wrong in the environment.

    If there is somebody to store the fragment, what they return takes its place.
    """
    if weights is not None:
        weights.give_to(env_runner)
    try:
        samples = env_runner.sample()
        # RLlib itself asks the workers of the old stack for their metrics, once an iteration.
        metrics = env_runner.get_metrics() if isinstance(samples, list) else None
    except Exception:
        failure = traceback.format_exc()
    else:
        return samples if store is None else store(samples), metrics
    try:
        # Workers of the old stack cannot rebuild their environments.
        if env_runner.config.enable_env_runner_and_connector_v2:
            env_runner.make_env()
    except Exception:
        failure += traceback.format_exc()
    return failure


class NoBatch(Exception):
    """Learners could not fetch the batch of an update call, and have done nothing."""


class RERPI(SavedAlgorithm):
    """Relative Entropy Regularized Policy Iteration.

    Abdolmaleki et al., 2018: policy evaluation by TD learning, weights over sampled actions from
    the Q-function, and a policy fitted to them with separate bounds for mean and covariance.
    """

    def __init__(
        self, config: Any = None, *args: Any, trial: str | None = None, **kwargs: Any
    ) -> None:
        self._trial = trial_name(config) if trial is None else trial
        if not ray.is_initialized() and "RAY_ADDRESS" not in os.environ:
            # RLlib would start Ray with its dashboard, which nobody has asked for here.
            ray.init(include_dashboard=False)
        super().__init__(config, *args, **kwargs)

    @classmethod
    @override(Algorithm)
    def get_default_config(cls) -> RERPIConfig:
        return RERPIConfig()

    @classmethod
    @override(Algorithm)
    def get_default_policy_class(cls, config: RERPIConfig) -> type[Policy] | None:
        """Return the policy of RLlib's old API stack."""
        from rerpi_rllib.algorithm.torch_policy import RERPITorchPolicy

        return RERPITorchPolicy

    @override(Algorithm)
    def setup(self, config: RERPIConfig) -> None:
        if config.num_learners == 0:
            # While the EnvRunners start, for whose spaces the learner has to wait.
            threading.Thread(target=compile_for_learning, args=(config,)).start()
        super().setup(config)
        self.replay = self._make_replay()
        self._limiter = RateLimiter(
            self.config.updates_per_env_step,
            self.config.num_steps_sampled_before_learning_starts,
        )
        self._seconds_per_update = 0.0
        self._failures_in_a_row = self._undone_in_a_row = self._losses_in_a_row = 0
        self._lost_batches_in_a_row = 0
        self._has_named_bad_episode = False
        self._waiting = Waiting()
        self._backup, self._revival = LearnerBackup(), Revival()
        for name in FAULTS:
            self._count(name, 0)
        self._old_stack_results: dict[str, Any] = {}
        self._exporter = MetricsExporter(self.config, self._trial)
        self._histograms = Histograms()
        if self.config.uses_old_api_stack:
            set_up_learning(self.config)
        # The learner works in a thread of its own, so that samples keep coming in meanwhile.
        self._learner_thread = one_torch_thread_each(1)
        if self.config.num_gpus_per_learner == 0:
            logger.warning("No GPU for the learner: it runs on the CPU.")

    def __repr__(self) -> str:
        """Return the name of the actor; Ray asks for it."""
        is_learner = self.learner_group is None or self.learner_group.is_local
        return str(self.config.actor_name("learner" if is_learner else "algorithm"))

    @override(Algorithm)
    def log_result(self, result: dict[str, Any]) -> None:
        super().log_result(result)
        self._exporter.export(result, len(self.replay))
        if self._trial is not None and (found := self._histograms.due(self.learner_group)):
            result[HISTOGRAMS] = found

    def _make_replay(self) -> Replay:
        config = self.config
        observation_space, action_space = self.spaces_of_networks
        sizes = {
            "observation_size": int(np.prod(observation_space.shape)),
            "action_size": int(np.prod(action_space.shape)),  # This is 1 for a discrete action.
        }
        common = {"gamma": config.gamma, "seed": config.seed, **sizes}
        if not config.num_replay_shards:
            return ReplayBuffer(config.replay_capacity, num_lanes=config.num_environments, **common)
        return ReplayShards(
            config.replay_capacity,
            num_shards=config.num_replay_shards,
            num_env_runners=config.num_env_runners,
            lanes_per_env_runner=config.num_envs_per_env_runner,
            length=config.window_length,
            num_learners=config.num_learners,
            shown_as=partial(config.actor_name, "replay shard"),
            **common,
        )

    @override(Algorithm)
    def training_step(self) -> dict[str, Any] | None:
        """Gather what the EnvRunners have sampled, learn as much as is due, send out new weights."""
        if self._has_lost_learners:
            self._replace_learners()
        with self.metrics.log_time((TIMERS, SAMPLE_TIMER)):
            # While updates are due, do not wait for the environments.
            self._collect(wait=0.0 if self._updates_due() else 0.2)
        try:
            while updates := self._updates_due():
                with self.metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
                    self._learn(updates)
                if self._is_asynchronous or self.config.updates_per_env_step is None:
                    break  # There may always be more to do.
            if self._limiter.updates != self._updates_sent:
                with self.metrics.log_time((TIMERS, SYNCH_WORKER_WEIGHTS_TIMER)):
                    self._send_weights()
        except RayError as error:
            if not self._has_lost_learners or (
                isinstance(error, RayTaskError) and not self._is_a_learner_dead()
            ):
                raise
            # The next call replaces them.
            logger.warning("A learner was lost:\n%s", traceback.format_exc())
        return self._old_stack_results if self.config.uses_old_api_stack else None

    def _send_weights(self) -> None:
        if self._is_asynchronous and not self.config.uses_old_api_stack:
            self._weights = Weights.of(self.learner_group)  # Requests carry them.
        else:
            self.env_runner_group.sync_weights(
                from_worker_or_learner_group=self.learner_group,
                inference_only=self.learner_group is not None,
            )
        self._updates_sent = self._limiter.updates

    @override(Algorithm)
    def step(self) -> dict[str, Any]:
        result: dict[str, Any] = super().step()
        # Whoever asks the algorithm for its module gets the one of this EnvRunner.
        if self._weights is not None and self.env_runner is not None:
            self._weights.give_to(self.env_runner)
        return result

    def _updates_due(self) -> int:
        return self._limiter.updates_due(self._updates_per_call()) if len(self.replay) else 0

    def _collect(self, wait: float) -> None:
        """Move finished fragments into the replay and request the next ones."""
        if not self._is_asynchronous:
            results = [(0, _sample_and_get_metrics(self.env_runner))]
        else:
            self._request_samples()
            if not self.env_runner_group.num_in_flight_async_reqs("sample"):
                time.sleep(wait)
            results = self.env_runner_group.fetch_ready_async_reqs(
                tags="sample", timeout_seconds=wait
            )
        for runner, result in results:
            self._waiting.answered(runner)
            if isinstance(result, str):
                self._note_failure(result)
                continue
            self._failures_in_a_row = 0
            samples, metrics = result
            steps = self.replay.take(samples)
            self._limiter.env_steps += steps
            if self.config.uses_old_api_stack:
                self._counters[NUM_ENV_STEPS_SAMPLED] += steps
                self._counters[NUM_AGENT_STEPS_SAMPLED] += steps
            else:
                self.metrics.aggregate([metrics], key=ENV_RUNNER_RESULTS)
            self._note_bad_episodes(runner)
        self._replace_lost_shards()
        if self._is_asynchronous:
            if results:
                self._request_samples()
            self._restart_hanging_env_runners()

    def _replace_lost_shards(self) -> None:
        """Count lost shards of the replay; if no steps are left, learning waits for some."""
        if lost := self.replay.replace_lost():
            self._count(NUM_REPLAY_SHARD_RESTARTS, lost)
            if not len(self.replay):
                self._limiter.refill()

    def _note_failure(self, failure: str) -> None:
        """Log a failed environment, which has been rebuilt; several failures in a row end the run."""
        self._failures_in_a_row += 1
        allowed = 1 if self.config.uses_old_api_stack else _MAX_FAILURES_IN_A_ROW
        if self._failures_in_a_row >= allowed:
            # RLlib raises an error without a message from the one that says what happened.
            reasons = re.findall(r"^\w[\w.]*(?:Error|Exception): .+$", failure, re.MULTILINE)
            raise RuntimeError(
                f"The environment {self.config.env} failed {self._failures_in_a_row} times in a row: "
                f"{reasons[0] if reasons else ''}\n{failure}"
            )
        logger.warning("An environment failed and was rebuilt:\n%s", failure)

    def _note_bad_episodes(self, runner: int) -> None:
        """Count and name what the replay has refused; too much of it ends the run."""
        screening = self.replay.screening
        if not screening.found:
            return
        share = self.config.max_bad_episode_share
        source = f"{self.config.env}" + (f" (EnvRunner {runner})" if runner else "")
        last = screening.found[-1]
        if not self._has_named_bad_episode:
            self._has_named_bad_episode = True
            logger.warning(
                "%s gave the %s. The rest of such an episode is dropped, and training goes on. This "
                "is named once; the results count all of them (%s).",
                source,
                last,
                NUM_BAD_EPISODES,
            )
        self._count(NUM_BAD_EPISODES, len(screening.found))
        screening.found.clear()
        if screening.exceeds(share):
            bad, episodes = screening.counted
            raise RuntimeError(
                f"{source} gave NaN, infinite or absurd numbers in {bad} of the last {episodes} "
                f"episodes, which is more than max_bad_episode_share={share} allows: the last time "
                f"the {last}. Nothing of that was learned from. Correct the environment, or allow a "
                "larger share."
            )

    def _count(self, name: str, number: int) -> None:
        """Add to one of the counts of faults in the results."""
        if self.config.uses_old_api_stack:
            self._counters[name] += number
        else:
            self.metrics.log_value(name, number, reduce="lifetime_sum")

    def _restart_hanging_env_runners(self) -> None:
        """Kill EnvRunners that have not answered for too long; RLlib starts them anew."""
        limit = self.config.env_timeout_s
        if limit is None:
            return
        group = self.env_runner_group
        hanging = self._waiting.longer_than(limit, group.healthy_env_runner_ids())
        for runner, seconds in hanging.items():
            message = (
                f"EnvRunner {runner} has returned no steps of {self.config.env} for {seconds:.0f} s "
                f"(env_timeout_s={limit})"
            )
            if not (self.config.restart_failed_env_runners or self.config.ignore_env_runner_failures):
                raise RuntimeError(f"{message}, and restart_failed_env_runners is False.")
            logger.warning("%s: it hangs, and is killed and started anew.", message)
            manager = group._worker_manager
            ray.kill(manager.actors()[runner], no_restart=False)
            manager.set_actor_state(runner, healthy=False)
            self._waiting.forget(runner)

    @override(Algorithm)
    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        self._revival.look(env_runner_group._worker_manager)
        restored: list[int] = super().restore_env_runners(env_runner_group)
        if env_runner_group is self.env_runner_group and restored:
            self._count(NUM_ENV_RUNNER_RESTARTS, len(restored))
            for runner in restored:
                self._waiting.forget(runner)
                logger.warning("EnvRunner %d was started anew.", runner)
        return restored

    def _request_samples(self) -> None:
        per_runner = self.config.get_rollout_fragment_length() * self.config.num_envs_per_env_runner
        in_flight = self.env_runner_group.num_in_flight_async_reqs("sample") * per_runner
        if self._limiter.may_sample(in_flight, per_runner * self.config.num_env_runners):
            for runner in self.env_runner_group.healthy_env_runner_ids():
                if self.env_runner_group.foreach_env_runner_async(
                    partial(
                        _sample_and_get_metrics,
                        store=self.replay.store_for(runner),
                        weights=self._weights,
                    ),
                    tag="sample",
                    remote_worker_ids=[runner],
                ):
                    self._waiting.asked(runner)

    def _updates_per_call(self) -> int:
        """Choose how many updates a call makes at most.

        These are enough to make the work around a call negligible, and few enough to stay responsive.
        Without remote EnvRunners the number is fixed, because a run has to be the same for a seed.
        """
        limit: int = min(
            _MAX_UPDATES_PER_CALL, _MAX_ROWS_PER_CALL // self.config.total_train_batch_size
        )
        if self._is_asynchronous:
            known = self._seconds_per_update > 0.0
            limit = min(limit, int(_SECONDS_PER_CALL / self._seconds_per_update) if known else 1)
        return max(1, limit)

    def _learn(self, updates: int) -> None:
        started = time.perf_counter()
        if self.learner_group is not None and self.learner_group.is_remote:
            self._backup.keep(self.learner_group, self._limiter.updates)
        rows = updates * self.config.total_train_batch_size // self.config.steps_per_row
        data = self.replay.draw(rows, self.config.window_length)
        # Taken here, since more steps come in while the learner works.
        known, scale = self.replay.moments, self.replay.returns.scale
        moments = (known.mean, known.stddev) if self.config.normalize_observations else None
        learning = self._learner_thread.submit(self._update, data, moments, scale)
        try:
            while self._is_asynchronous and not wait([learning], _SECONDS_BETWEEN_LOOKS).done:
                self._collect(wait=0.0)
        finally:  # If the environments fail, what is learned stays as sound as its count.
            self._note_results(learning, updates, started)

    def _note_results(self, learning: Future[Any], updates: int, started: float) -> None:
        """Wait for the learner, and count and log what it has done."""
        try:
            results = learning.result()
        except NonFiniteUpdates as reason:
            self._note_undone(reason, updates)
            return
        except NoBatch as reason:
            self._note_lost_batch(reason)
            return
        self._undone_in_a_row = self._losses_in_a_row = self._lost_batches_in_a_row = 0
        self._limiter.updates += updates
        self._seconds_per_update = (time.perf_counter() - started) / updates
        if self.config.uses_old_api_stack:
            self._old_stack_results = {DEFAULT_POLICY_ID: results}
            self._counters[NUM_ENV_STEPS_TRAINED] += results[NUM_AGENT_STEPS_TRAINED]
            self._counters[NUM_AGENT_STEPS_TRAINED] += results[NUM_AGENT_STEPS_TRAINED]
        else:
            self.metrics.aggregate(results, key=LEARNER_RESULTS)
            self.metrics.log_value(NUM_UPDATES_LIFETIME, updates, reduce="lifetime_sum")

    def _note_undone(self, reason: NonFiniteUpdates, updates: int) -> None:
        """Count updates that were undone; several calls in a row end the run."""
        self._count(NUM_NONFINITE_UPDATES, updates)
        self._undone_in_a_row += 1
        if self._undone_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            raise FloatingPointError(
                f"Updates had to be undone {self._undone_in_a_row} times in a row, the last time "
                f"because {reason} The weights are those before these updates. A smaller lr or "
                "smaller bounds may help."
            )
        logger.warning("%d updates were undone: %s", updates, reason)

    def _note_lost_batch(self, reason: NoBatch) -> None:
        """Look for the shards that were lost with it; several batches in a row end the run."""
        self._lost_batches_in_a_row += 1
        if self._lost_batches_in_a_row > _MAX_LOST_BATCHES_IN_A_ROW:
            raise RuntimeError(
                f"The learners could not get their batch {self._lost_batches_in_a_row} times in a "
                f"row, the last time because of: {reason}"
            )
        logger.warning("Updates are put off, since their batch was lost: %s", reason)
        self.replay.find_lost()

    @property
    def _has_lost_learners(self) -> bool:
        group = self.learner_group
        return bool(
            group is not None
            and group.is_remote
            and group._worker_manager.num_healthy_actors() < len(group)
        )

    def _is_a_learner_dead(self) -> bool:
        """Tell whether an error of one learner may come from the loss of another one."""
        actors = self.learner_group._worker_manager.actors().values()
        try:
            ray.get([actor.__ray_ready__.remote() for actor in actors], timeout=_SECONDS_TO_ANSWER)
        except RayError:
            return True
        return False

    def _replace_learners(self) -> None:
        """Build new learners with the newest state that is known of the lost ones."""
        self._losses_in_a_row += 1
        if self._losses_in_a_row > _MAX_FAILURES_IN_A_ROW:
            raise RuntimeError(
                f"The learners were lost {self._losses_in_a_row} times in a row, without an update "
                "in between: their logs, or the system's (memory), say why."
            )
        before = self._limiter.updates
        learners, self._limiter.updates = self._backup.rebuild(self.learner_group, before)
        self.learner_group: Any = learners
        self._updates_sent = 0
        lost = before - self._limiter.updates
        self.metrics.log_value(NUM_UPDATES_LIFETIME, -lost, reduce="lifetime_sum")
        self._count(NUM_LEARNER_RESTARTS, 1)
        logger.warning(
            "A lost learner was replaced. It goes on from update %d: %d updates are lost and will be "
            "made again.",
            self._limiter.updates,
            lost,
        )

    def _update(
        self,
        data: TrainingData,
        moments: tuple[np.ndarray, np.ndarray] | None,
        return_scale: float,
    ) -> Any:
        """Make several updates, in the learners or in the old stack's policy."""
        if self.config.uses_old_api_stack:
            policy = self.get_policy()
            if moments is not None:
                policy.model.nets.set_observation_moments(*map(torch.from_numpy, moments))
            policy.model.nets.set_return_scale(return_scale)
            return policy.learn_on_batch(data.batch.policy_batches[DEFAULT_POLICY_ID])
        results = self.learner_group.update(
            training_data=data,
            # Batches of shards are fetched by the learners themselves.
            defer_solve_refs_to_learner=True,
            timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: self._limiter.env_steps},
            minibatch_size=self.config.train_batch_size_per_learner // self.config.steps_per_row,
            observation_moments=moments,
            return_scale=return_scale,
        )
        for result in results:
            if UNDONE in result:
                raise NonFiniteUpdates(result[UNDONE])
            if NO_BATCH in result:
                raise NoBatch(result[NO_BATCH])
        return results

    @override(Algorithm)
    def _compile_iteration_results_old_api_stack(self, **kwargs: Any) -> dict[str, Any]:
        """Add our results to RLlib's, in the places where the new stack has them."""
        results: dict[str, Any] = super()._compile_iteration_results_old_api_stack(**kwargs)
        learned = self._old_stack_results.get(DEFAULT_POLICY_ID, {})
        results[LEARNER_RESULTS] = {DEFAULT_MODULE_ID: learned.get(LEARNER_STATS_KEY, {})}
        results[NUM_UPDATES_LIFETIME] = self._limiter.updates
        return results | {name: self._counters[name] for name in FAULTS}

    @override(Algorithm)
    def cleanup(self) -> None:
        self._learner_thread.shutdown()
        # RLlib would wait for an environment that hangs.
        self.env_runner_group.foreach_env_runner(
            "stop", local_env_runner=False, timeout_seconds=_SECONDS_TO_STOP
        )
        self.env_runner_group.reset([])
        self.replay.stop()
        super().cleanup()
