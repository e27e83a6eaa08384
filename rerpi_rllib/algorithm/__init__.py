"""RLlib: how the algorithm is trained."""

import gc

from rerpi_rllib.envs.rendering import no_display_warning

# Looking for garbage takes a fifth of the time in which RLlib is imported, and every process of a run
# imports it.
_collects = gc.isenabled()
gc.disable()
try:
    with no_display_warning():
        import ray.rllib.algorithms.algorithm
        import ray.rllib.core.learner.torch.torch_learner  # noqa: F401
finally:
    if _collects:
        gc.enable()
