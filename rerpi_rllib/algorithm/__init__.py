"""RLlib: how the algorithm is trained."""

from rerpi_rllib.envs.rendering import no_display_warning

with no_display_warning():
    import ray.rllib  # noqa: F401
