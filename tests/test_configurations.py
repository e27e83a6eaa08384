"""The files of configs/: each can be built for each of its tasks, and trains."""

from dataclasses import replace

import pytest
from conftest import SMALL
from dm_control import suite

from rerpi_rllib.runs.files import CONFIGS
from rerpi_rllib.runs.settings import Configuration

FILES = sorted(CONFIGS.glob("*.yaml"))
# With smaller networks and batches, two iterations take moments.
SHORT = {
    **{key: SMALL[key] for key in ("policy_layers", "critic_layers", "train_batch_size")},
    "num_steps_sampled_before_learning_starts": 50,
    "evaluation_interval": 1,
    "evaluation_duration": 1,
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_task_of_every_file_builds(path):
    file = Configuration.from_file(path)
    assert file.description and file.run.stop
    for task in file.tasks:
        replace(file.run, env=task).build_config()


def test_the_groups_are_those_of_the_paper():
    tasks = {f"dm_control/{domain}-{task}-v0" for domain, task in suite.BENCHMARKING}
    tasks |= {"dm_control/humanoid_CMU-stand-v0", "dm_control/humanoid_CMU-run-v0"}
    gym = {f"{name}-v5" for name in ("Ant", "Walker2d", "Humanoid", "HumanoidStandup")}
    parkour = {f"parkour/{name}-v0" for name in ("walker2d", "humanoid-walls", "humanoid-gaps")}
    for name, expected in (("control-suite", tasks), ("gym", gym), ("parkour", parkour)):
        for variant in (name, f"{name}-cpu"):
            assert set(Configuration.from_file(CONFIGS / f"{variant}.yaml").tasks) == expected


def test_the_paper_s_settings_are_the_defaults():
    config = Configuration.from_file(CONFIGS / "control-suite.yaml").run.build_config()
    assert (config.train_batch_size, config.epsilon_mu, config.epsilon_sigma) == (3072, 5e-4, 1e-5)
    assert (
        Configuration.from_file(CONFIGS / "gym.yaml").run.build_config().policy_evaluation
        == "retrace"
    )


@pytest.mark.parametrize(
    "name,task",
    [
        ("control-suite", "dm_control/humanoid_CMU-stand-v0"),
        ("control-suite-cpu", "dm_control/cheetah-run-v0"),
        ("gym", "Walker2d-v5"),
        ("gym-cpu", "HumanoidStandup-v5"),
        ("parkour-cpu", "parkour/walker2d-v0"),
    ],
)
def test_two_iterations(name, task, ray_session):
    run = Configuration.from_file(CONFIGS / f"{name}.yaml").run
    pace = {"min_sample_timesteps_per_iteration": 200}
    algo = replace(run, env=task, config={**run.config, **SHORT, **pace}).build_config().build_algo()
    try:
        for _ in range(2):
            result = algo.train()
        assert result["num_env_steps_sampled_lifetime"] >= 400
        assert result["num_updates_lifetime"] > 0
        assert result["evaluation"]["env_runners"]["num_episodes"] >= 1
    finally:
        algo.stop()
