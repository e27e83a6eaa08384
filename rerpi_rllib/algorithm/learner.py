"""The learner: several updates a call, target networks copied by the count of updates."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from typing import Any

import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.utils.annotations import override

from rerpi_rllib.algorithm.rl_module import METRICS, TOTAL_LOSS

NUM_UPDATES = "num_updates"
_AT_TARGET_UPDATE = "_at_target_update"


def learner_threads(config: AlgorithmConfig) -> int:
    """As many threads as RLlib reserves CPUs for a learner."""
    cpus = config.num_cpus_per_learner if config.num_cpus_per_learner != "auto" else 1
    if config.num_learners == 0:
        cpus = max(cpus, config.num_cpus_for_main_process)
    return max(1, int(cpus))


def _keep_freed_memory() -> None:
    """Ask glibc not to hand freed memory back to the system.

    Every update frees and takes the same few megabytes for activations; getting them back from the
    system page by page costs a fifth of an update on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, top_pad, mmap_threshold, arena_max = -1, -2, -3, -8
        mallopt(mmap_threshold, 2**30)
        mallopt(trim_threshold, 2**30)
        mallopt(top_pad, 2**26)
        # One heap for all threads: the learner may run in one of its own.
        mallopt(arena_max, 1)


class RERPITorchLearner(TorchLearner):
    """Critic, policy and multipliers, each with an Adam of its own, on one backward pass."""

    @override(TorchLearner)
    def build(self) -> None:
        # Ray limits its workers' threads by their CPUs; a learner in the user's own process takes
        # the same share, so that it does not fight the EnvRunners for cores.
        torch.set_num_threads(learner_threads(self.config))
        _keep_freed_memory()
        self._num_updates = 0
        super().build()

    @override(TorchLearner)
    def configure_optimizers_for_module(self, module_id: str, config=None) -> None:
        nets = self.module[module_id].unwrapped().nets
        for name, part, lr, betas in (
            ("critic", nets.critic, config.lr, (0.9, 0.999)),
            ("policy", nets.policy, config.lr, (0.9, 0.999)),
            # A short memory: one large KL must not keep the multipliers slow for a thousand updates.
            ("dual", nets.multipliers, config.dual_lr, (0.9, 0.9)),
        ):
            parameters = list(part.parameters())
            if not parameters:  # Some ways of weighting and fitting have no multiplier.
                continue
            self.register_optimizer(
                module_id=module_id,
                optimizer_name=name,
                optimizer=torch.optim.Adam(parameters, betas=betas, fused=True),
                params=parameters,
                lr_or_lr_schedule=lr,
            )

    @override(TorchLearner)
    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out) -> torch.Tensor:
        return fwd_out[TOTAL_LOSS]

    @override(TorchLearner)
    def update(
        self,
        *,
        training_data: TrainingData,
        timesteps: dict[str, Any] | None = None,
        minibatch_size: int,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """One update for every ``minibatch_size`` rows of the batch, in order.

        What RLlib does around an update (metrics, schedules, iterators) is done once for all of
        them: at 256 rows it would otherwise cost a good part of the update itself.
        """
        self._check_is_built()
        self.before_gradient_based_update(timesteps=timesteps or {})
        training_data.validate()
        training_data.solve_refs()
        batch = self._make_batch_if_necessary(training_data=training_data)
        columns = batch.policy_batches[DEFAULT_MODULE_ID]
        self._weights_seq_no += 1

        module = self.module[DEFAULT_MODULE_ID].unwrapped()
        period = self.config.target_update_period
        logged = defaultdict(list)
        for start in range(0, batch.count, minibatch_size):
            minibatch = {k: v[start : start + minibatch_size] for k, v in columns.items()}
            self._num_updates += 1
            module.improve_policy = self._num_updates % self.config.policy_update_period == 0
            # The bounds are for the policy that is copied. Early in a period the KL is small whatever
            # the multipliers are, and would pull them down.
            module.move_multipliers = 2 * ((self._num_updates - 1) % period) >= period
            fwd_out, _, _ = self._update({DEFAULT_MODULE_ID: minibatch})
            for key, value in fwd_out[DEFAULT_MODULE_ID][METRICS].items():
                logged[key].append(value)
            if self._num_updates % period == 0:
                module.nets.update_targets()
                for key in [k for k in logged if k.startswith("kl_") and k != "kl_nonparametric"]:
                    if not key.endswith(_AT_TARGET_UPDATE):
                        logged[key + _AT_TARGET_UPDATE] += logged[key][-1:]

        names = list(logged)
        means = torch.stack([torch.stack(logged[name]).mean() for name in names]).tolist()
        self._check_finite(dict(zip(names, means)))
        for name, mean in zip(names, means):
            self.metrics.log_value((DEFAULT_MODULE_ID, name), mean, reduce="mean")
        self._log_steps_trained_metrics(batch)
        self.after_gradient_based_update(timesteps=timesteps or {})
        return self.metrics.reduce()

    def _check_finite(self, means: dict[str, float]) -> None:
        broken = [name for name, mean in means.items() if not torch.isfinite(torch.tensor(mean))]
        if broken:
            raise FloatingPointError(
                f"{', '.join(broken)} became NaN or infinite by update {self._num_updates}. "
                "Look for NaN in the environment's observations and rewards; otherwise a smaller "
                f"lr (now {self.config.lr}) or smaller bounds may help."
            )

    @override(TorchLearner)
    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().get_state(*args, **kwargs), NUM_UPDATES: self._num_updates}

    @override(TorchLearner)
    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._num_updates = state.get(NUM_UPDATES, self._num_updates)
