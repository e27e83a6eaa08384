"""The examples of deploy/: their commands are allowed, and they fit the schemas of their readers."""

import json
import re
import shlex
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import ray
import yaml
from typer.testing import CliRunner

from rerpi_rllib import RERPIConfig
from rerpi_rllib.cli import app
from rerpi_rllib.runs import process
from rerpi_rllib.runs.files import parse_assignments

DEPLOY = Path(__file__).parents[1] / "deploy"

# What these files use of KubeRay's schemas: each key with the type of its value, or the keys in it.
# A list with one element stands for any number of them.
CONTAINER = {
    "name": str,
    "image": str,
    "resources": {"requests": {str: str}, "limits": {str: str}},
    "ports": [{"containerPort": int, "name": str}],
    "volumeMounts": [{"name": str, "mountPath": str}],
}
TEMPLATE = {
    "spec": {
        "containers": [CONTAINER],
        "volumes": [
            {
                "name": str,
                "persistentVolumeClaim": {"claimName": str},
                "emptyDir": {"medium": str, "sizeLimit": str},
            }
        ],
        "tolerations": [{"key": str, "operator": str, "effect": str}],
    }
}
CLUSTER = {
    "rayVersion": str,
    "enableInTreeAutoscaling": bool,
    "autoscalerOptions": {"idleTimeoutSeconds": int},
    "headGroupSpec": {"rayStartParams": {str: str}, "template": TEMPLATE},
    "workerGroupSpecs": [
        {
            "groupName": str,
            "replicas": int,
            "minReplicas": int,
            "maxReplicas": int,
            "rayStartParams": {str: str},
            "template": TEMPLATE,
        }
    ],
}
JOB = {
    "entrypoint": str,
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "backoffLimit": int,
    "rayClusterSpec": CLUSTER,
}


def _check(value, schema, place=""):
    if isinstance(schema, type):
        assert type(value) is schema, f"{place}: {value!r}"
    elif isinstance(schema, list):
        assert isinstance(value, list) and value, place
        for number, element in enumerate(value):
            _check(element, schema[0], f"{place}[{number}]")
    else:
        for key, inner in value.items():
            assert key in schema or str in schema, f"{place}.{key}"
            _check(inner, schema.get(key, schema.get(str)), f"{place}.{key}")


def _kuberay(kind):
    document = yaml.safe_load((DEPLOY / f"kuberay-{kind}.yaml").read_text())
    assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert document["apiVersion"] == "ray.io/v1"
    return document


@pytest.mark.parametrize("kind", ["cluster", "job"])
def test_kuberay(kind):
    document = _kuberay(kind)
    _check(document["spec"], CLUSTER if kind == "cluster" else JOB)
    cluster = document["spec"] if kind == "cluster" else document["spec"]["rayClusterSpec"]
    assert document["kind"] == {"cluster": "RayCluster", "job": "RayJob"}[kind]
    assert cluster["rayVersion"] == version("ray")
    assert [group["groupName"] for group in cluster["workerGroupSpecs"]] == ["cpu", "gpu"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {"runs": "/runs", "shm": "/dev/shm"}
        assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()
        resources = pod["containers"][0]["resources"]
        assert ("nvidia.com/gpu" in resources["limits"]) == (group.get("groupName") == "gpu")
        assert resources["limits"] == resources["requests"]
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_cluster_launcher():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    document = yaml.safe_load((DEPLOY / "cluster-launcher.yaml").read_text())
    jsonschema.validate(document, schema)
    kinds = document["available_node_types"]
    assert document["head_node_type"] in kinds and kinds["head"]["resources"]["CPU"] == 0
    assert sum(kind.get("max_workers", 0) for kind in kinds.values()) <= document["max_workers"]


def test_the_image_has_the_pinned_ray():
    (image,) = re.findall(r"^FROM rayproject/ray:(\S+)", (DEPLOY / "Dockerfile").read_text(), re.M)
    assert image == f"{version('ray')}-py311-gpu"


def _command(text):
    """Return the words of the ``rllib train`` command in a text, with variables as they are."""
    text = re.sub(r"\\\n\s*", " ", text)
    (line,) = re.findall(r"^[^#\n]*?\brllib (train .+?)(?: &)?$", text, re.MULTILINE)
    return shlex.split(line)


def _files_with_commands():
    yield "kuberay-job.yaml", lambda: _kuberay("job")["spec"]["entrypoint"]
    for name in ("slurm.sh", "submit.sh"):
        yield name, (DEPLOY / name).read_text


@pytest.mark.parametrize("name,read", list(_files_with_commands()), ids=lambda value: str(value)[:9])
def test_commands(name, read, monkeypatch):
    words = _command(read())
    if name == "slurm.sh":  # The task is in a variable.
        words[words.index("${what[@]}")] = "--algo=RERPI"
        words[words.index("$address")] = "10.0.0.1:6379"
    options = {}

    def take(given, **kwargs):
        options.update(vars(given))
        raise ValueError("seen")

    # All options are known and have values of the right kind; the process is left as it is.
    monkeypatch.setattr("rerpi_rllib.runs.planning.plan_run", take)
    monkeypatch.setattr(process, "prepare_process", lambda: None)
    monkeypatch.setenv("RAY_ADDRESS", "")
    result = CliRunner().invoke(app, words)
    assert str(result.exception) == "seen", result.output
    settings = options["config"]
    assert settings == parse_assignments(["num_envs_per_env_runner=4", "num_replay_shards=4"])
    config = RERPIConfig().environment("Pendulum-v1").training(num_replay_shards=4)
    config.env_runners(num_env_runners=options["num_env_runners"], num_envs_per_env_runner=4)
    config.learners(num_learners=options["num_learners"], num_gpus_per_learner=options["num_gpus"])
    config.validate()
    # They fit into the nodes.
    bundles = config.algo_class.default_resource_request(config.to_dict()).required_resources
    cpus, gpus = {"kuberay-job.yaml": (40, 2), "slurm.sh": (64, 4), "submit.sh": (32, 4)}[name]
    assert bundles["CPU"] <= cpus and bundles["GPU"] <= gpus


@pytest.mark.parametrize("name", ["slurm.sh", "submit.sh"])
def test_scripts(name):
    script = (DEPLOY / name).read_text()
    assert script.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in script
    subprocess.run(["bash", "-n", DEPLOY / name], check=True)


def test_slurm_script_starts_ray_on_each_node_and_trains(tmp_path):
    """It is run with commands that only write down how they were called."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    calls = tmp_path / "calls"
    stubs = {
        "scontrol": 'if [[ $1 == show ]]; then printf "a\\nb\\nc\\n"; fi',
        "srun": 'case "$*" in *hostname*) echo "10.0.0.1 fe80::1";; esac',
        "ray": "",
        # The nodes start meanwhile.
        "rllib": f'until [[ $(grep -c "ray start" {calls}) == 3 ]]; do sleep 0.05; done; '
        "[[ $RAY_AUTH_MODE == token ]] && exit ${RLLIB_CODE:-0}",
    }
    for name, body in stubs.items():
        path = tmp_path / ".venv" / "bin" / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> {calls}\n{body}\n')
        path.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / '.venv' / 'bin'}:/usr/bin:/bin",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "nodes",
        "SLURM_CPUS_PER_TASK": "16",
    }

    def run(**more):
        calls.unlink(missing_ok=True)
        done = subprocess.run(["bash", DEPLOY / "slurm.sh"], env=environment | more, timeout=60)
        return done.returncode, calls.read_text().splitlines()

    code, lines = run()
    starts = sorted(line for line in lines if "ray start" in line)
    assert code == 0 and [re.findall(r"--nodelist=(\w)", line)[0] for line in starts] == [
        "a",
        "b",
        "c",
    ]
    assert lines[0] == "ray get-auth-token --generate"
    assert "--head --port 10017" in starts[0] and "--address 10.0.0.1:10017" in starts[2]
    (train,) = [line for line in lines if line.startswith("rllib train")]
    assert "--address 10.0.0.1:10017" in train and "--name slurm-17" in train
    (tmp_path / "runs" / "slurm-17").mkdir(parents=True)
    code, lines = run(RLLIB_CODE="143")  # The time was up.
    (train,) = [line for line in lines if line.startswith("rllib train")]
    assert code == 143 and "--resume runs/slurm-17" in train and "scontrol requeue 17" in lines
    code, lines = run(RLLIB_CODE="1")
    assert code == 1 and not any("requeue" in line for line in lines)


def test_an_address_is_checked_and_taken(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    process.choose_cluster(None)
    assert process.os.environ["RAY_ADDRESS"] == "elsewhere:1"
    for address in ("auto", "10.0.0.1:6379", "head.example:6379"):
        process.choose_cluster(address)
        assert process.os.environ["RAY_ADDRESS"] == address
    for address in ("", "10.0.0.1", "ray://10.0.0.1:10001", "a b:1", "head:port"):
        with pytest.raises(ValueError, match="must be 'auto' or HOST:PORT"):
            process.choose_cluster(address)
