"""A run on a simulated cluster of three nodes, one of which is lost in the middle."""

from conftest import SMALL, in_a_cluster_of_its_own

TRAINS_ON_THREE_NODES = """
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray
from conftest import tiny_config
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
config = tiny_config(num_replay_shards=2, normalize_observations=True)
config.env_runners(
    num_env_runners=4, num_envs_per_env_runner=2
)
config.learners(num_learners=2, num_cpus_per_learner=1)
config.reporting(min_time_s_per_iteration=1)
algorithm = config.build_algo()

def train_until(done):
    result = algorithm.train()
    while not done(result):
        result = algorithm.train()
    return result

result = train_until(lambda result: result["num_env_steps_sampled_lifetime"] > 800)
assert sum(algorithm.replay.sizes) <= result["num_env_steps_sampled_lifetime"]
assert min(algorithm.replay.sizes) > 0

# Shards and EnvRunners are spread over the nodes.
def node_of(actor):
    ask = lambda self: ray.get_runtime_context().get_node_id()
    while True:
        try:
            return ray.get(actor.__ray_call__.remote(ask))
        except ray.exceptions.ActorUnavailableError:  # It is being started anew.
            time.sleep(0.5)

runners = algorithm.env_runner_group._worker_manager.actors()
places = {number: node_of(runner) for number, runner in runners.items()}
shards = [node_of(actor) for actor in algorithm.replay.actors]
learners = [node_of(actor) for actor in algorithm.learner_group._workers]
# What was asked for: a raylet that does not know the newest node yet puts a shard elsewhere.
assert len(set(algorithm.replay._nodes.values())) == 2

# A node is lost with all that is on it, but not with the whole replay.
may_be_lost = [node for node in nodes if shards.count(node.node_id) < 2]
lost = max(may_be_lost, key=lambda node: [*places.values(), *shards].count(node.node_id))
shards_on_it = shards.count(lost.node_id)
cluster.remove_node(lost, allow_graceful=False)
before = algorithm._limiter.env_steps, algorithm._limiter.updates
result = train_until(
    lambda result: result["num_env_steps_sampled_lifetime"] > before[0] + 400
    and result["num_updates_lifetime"] > before[1] + 100
    and result["num_replay_shard_restarts"] == shards_on_it
)
# Whether or not there was place for the lost EnvRunners before, there is with a new node.
cluster.add_node(num_cpus=2)
assert lost.node_id not in [node_of(runner) for runner in runners.values()]
steps = algorithm._limiter.env_steps
result = train_until(lambda result: result["num_env_steps_sampled_lifetime"] > steps + 400)
# The updates of the last requests may still be due.
ahead = algorithm._limiter.env_steps - algorithm._limiter.updates / 0.5
assert -10 < ahead < 2000, ahead
assert (result["num_learner_restarts"] > 0) == (lost.node_id in learners)
algorithm.stop()
ray.shutdown()

# The command line joins the same cluster, by its address.
with tempfile.TemporaryDirectory() as directory:
    settings = {**SETTINGS, "num_replay_shards": 1}
    command = [sys.executable, "-c", "from rerpi_rllib.cli import main; main()", "train"]
    command += ["--algo", "RERPI", "--env", "Pendulum-v1", "--config", json.dumps(settings)]
    command += ["--stop", '{"env_steps": 300}', "--address", cluster.address, "--quiet"]
    done = subprocess.run(
        [*command, "--storage-path", directory, "--name", "joined"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert list(Path(directory).glob("joined/part-1/checkpoint_*/replay/shard-0"))
cluster.shutdown()
print("survived", flush=True)
"""


def test_a_run_on_a_cluster_goes_on_without_one_of_its_nodes():
    in_a_cluster_of_its_own(TRAINS_ON_THREE_NODES.replace("{**SETTINGS,", f"{{**{SMALL!r},"))
