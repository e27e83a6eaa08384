"""Checkpoints: whole or not taken, cheap to write, and safe to look at."""

import json
import os
import pickle
import shutil
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import ray.cloudpickle
import torch
from conftest import networks_of, on_old_stack, tiny_config

from rerpi_rllib import RERPI
from rerpi_rllib.algorithm import checkpoint as manifests
from rerpi_rllib.algorithm.replay import ReplayBuffer
from rerpi_rllib.algorithm.saving import SHARED_REPLAY_DIRECTORY
from rerpi_rllib.runs import checkpoints
from rerpi_rllib.runs.checkpoints import is_checkpoint, load_networks, newest_checkpoint, prune
from rerpi_rllib.runs.evaluation import evaluate
from rerpi_rllib.runs.planning import Options, plan_run
from rerpi_rllib.runs.settings import RunSettings

# What a manifest holds beside files, time and versions.
ABOUT = {
    **{"algo": "RERPI", "env": "x", "env_config": {}, "api_stack": "new", "env_steps": 1},
    **{"updates": 1, "replay_size": 1, "settings": {}, "spaces": {}},
}


def _config(stack, **training):
    config = tiny_config(**training)
    if stack == "old":
        on_old_stack(config)
    return config


def _save(algo, run, part, number):
    """Write a checkpoint as Tune does: into a directory elsewhere, which is then copied."""
    elsewhere = run.parent / "elsewhere"
    algo.save_checkpoint(str(elsewhere))
    target = run / f"part-{part}" / f"checkpoint_{number:06d}"
    shutil.copytree(elsewhere, target)
    shutil.rmtree(elsewhere)
    return target


@pytest.fixture(scope="module", params=["new", "old"])
def run(request, tmp_path_factory):
    """Return the directory of a run with two checkpoints, and the algorithm that wrote them."""
    run = tmp_path_factory.mktemp("storage") / "run"
    config = _config(request.param, normalize_observations=True)
    settings = {
        key: config.to_dict()[key]
        for key in ("policy_layers", "critic_layers", "train_batch_size", "replay_capacity")
    }
    stack = request.param == "new"
    settings |= {"normalize_observations": True, "num_env_runners": 0}
    settings |= dict.fromkeys(
        ("enable_rl_module_and_learner", "enable_env_runner_and_connector_v2"), stack
    )
    RunSettings(env="Pendulum-v1", config=settings).save(run)
    setattr(config, SHARED_REPLAY_DIRECTORY, str(run / "replay"))
    algo = config.build_algo()
    for number in range(2):
        algo.train()
        _save(algo, run, 1, number)
    yield run, algo
    algo.stop()


def _copy(run, tmp_path) -> Path:
    copy = tmp_path / "run"
    shutil.copytree(run[0], copy)
    return copy


def _files(checkpoint):
    manifest = manifests.read_manifest(checkpoint)
    return [checkpoint / name for name in manifest["files"]]


def test_what_a_manifest_tells(run):
    manifest = manifests.check_whole(newest_checkpoint(run[0]))
    expected = {"algo": "RERPI", "env": "Pendulum-v1", "env_config": {}, "env_steps": 400}
    expected |= {"updates": 200, "replay_size": 400}
    assert {key: manifest[key] for key in expected} == expected
    assert manifest["settings"]["policy_layers"] == [16, 16]
    assert {"ray", "torch", "python"} <= manifest["versions"].keys()
    assert manifest["written_by"].keys() == {"host", "user"}
    written = {path.resolve() for path in _files(newest_checkpoint(run[0]))}
    on_disk = {path for path in newest_checkpoint(run[0]).rglob("*") if path.is_file()}
    assert on_disk - written == {newest_checkpoint(run[0]) / "manifest.json"}


def test_networks_are_loaded_without_pickle(run, monkeypatch):
    monkeypatch.setattr(pickle, "load", None)
    monkeypatch.setattr(pickle, "loads", None)
    nets = load_networks(newest_checkpoint(run[0]))
    expected = networks_of(run[1]).state_dict()
    assert nets.state_dict().keys() == expected.keys()
    for name, value in nets.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)
    assert evaluate(run[0], episodes=1)["episode_lengths"] == [200]


def test_damage_to_any_file_is_noticed(run, tmp_path):
    copy = _copy(run, tmp_path)
    old, new = (copy / "part-1" / f"checkpoint_{number:06d}" for number in (0, 1))
    of_the_newest = {path.resolve() for path in _files(new)} - {p.resolve() for p in _files(old)}
    assert any(path.parent.name == "replay" and path.suffix == ".bin" for path in of_the_newest)
    for path in sorted(of_the_newest | {new / "manifest.json"}):
        content = path.read_bytes()
        middle = len(content) // 2
        flipped = bytes(byte ^ 255 for byte in content[middle : middle + 64])
        for damaged in (
            None,
            b"",
            content[:middle],
            content[:middle] + flipped + content[middle + 64 :],
        ):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            if damaged == content:
                continue
            said = []
            assert newest_checkpoint(copy, report=said.append) == old, path
            assert len(said) == 1 and "checkpoint_000001" in said[0] and path.name in said[0]
            path.write_bytes(content)
            assert newest_checkpoint(copy) == new


def test_a_copy_that_is_cut_off_at_any_file_is_passed_over(run, tmp_path):
    copy = _copy(run, tmp_path)
    old, new = (copy / "part-1" / f"checkpoint_{number:06d}" for number in (0, 1))
    whole = tmp_path / "whole"
    new.rename(whole)
    files = [path for path in whole.rglob("*") if path.is_file()]
    # Tune copies the files in no certain order: the manifest may be the first.
    for order in (sorted(files), sorted(files, key=lambda path: path.name != "manifest.json")):
        new.mkdir()
        for path in order:
            assert newest_checkpoint(copy) == old
            target = new / path.relative_to(whole)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        assert newest_checkpoint(copy) == new
        shutil.rmtree(new)


def test_no_whole_checkpoint_is_one_clear_error(run, tmp_path):
    copy = _copy(run, tmp_path)
    for path in copy.glob("part-1/*/manifest.json"):
        path.unlink()
    with pytest.raises(ValueError, match=r"no whole checkpoint.*older version") as error:
        newest_checkpoint(copy)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"is not a whole checkpoint: manifest\.json is missing"):
        newest_checkpoint(copy / "part-1" / "checkpoint_000000")
    with pytest.raises(ValueError, match="older version"):
        RERPI.from_checkpoint(str(copy / "part-1" / "checkpoint_000000"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no whole checkpoint"):
        newest_checkpoint(tmp_path / "empty")


@pytest.mark.parametrize(
    "content",
    [b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"format": 2}', b'{"format": 1, "algo": "RERPI"}'],
    ids=lambda content: content[:10],
)
def test_a_manifest_of_another_shape_is_refused(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    assert not is_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "../../replay/../../secret", "a\0b"])
def test_a_manifest_names_only_files_of_its_run(tmp_path, name):
    manifest = {"format": 1, "time": 1.0, **ABOUT, "files": {name: {"bytes": 1, "sha256": ""}}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="not in the checkpoint"):
        manifests.check_whole(tmp_path)


@pytest.mark.parametrize("key", [*ABOUT, "time", "files"])
def test_a_manifest_that_lacks_something_is_damaged(tmp_path, key):
    manifests.write_manifest(tmp_path, ABOUT, {})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifests.check_whole(tmp_path)
    for other in ({}, {key: ("wrong",)}):
        changed = {name: value for name, value in manifest.items() if name != key} | other
        (tmp_path / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=f"manifest.json has no {key}"):
            manifests.check_whole(tmp_path)


@pytest.mark.parametrize("name", ["_dict_checkpoint.pkl", "replay/more.bin"])
def test_a_file_that_was_added_is_noticed(tmp_path, name):
    manifests.write_manifest(tmp_path, ABOUT, {})
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(pickle.dumps(_Harmful(tmp_path / "marker")))
    with pytest.raises(ValueError, match=f"{name} was added to it later"):
        manifests.check_whole(tmp_path)


def test_a_run_whose_shared_replay_is_damaged_goes_on_without(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(manifests, "versions", dict)
    run, buffer, said = tmp_path / "run", ReplayBuffer(100, 2, 1, seed=0), []
    for number in range(2):
        _add_steps(buffer, 10)
        path = run / "part-1" / f"checkpoint_{number:06d}"
        buffer.save_to_path(path / "replay", shared=run / "replay")
        manifests.write_manifest(path, ABOUT, buffer.shared_files)
    oldest = (path / "replay" / buffer.files.segments[0]["file"]).resolve()
    content = bytearray(oldest.read_bytes())
    content[5] ^= 1
    oldest.write_bytes(content)
    assert newest_checkpoint(run, report=said.append) == path.resolve()
    assert len(said) == 1 and said[0].startswith("The replay of part-1/checkpoint_000001 is lost (")
    restored = ReplayBuffer(100, 2, 1)
    restored.restore_from_path(path / "replay")
    assert len(restored) == 0 and "The replay of the checkpoint is lost: " in caplog.text
    # What was learned of all steps is not.
    assert restored.moments.get_state() == buffer.moments.get_state()
    _add_steps(restored, 5)
    assert len(restored) == 5


class _Harmful:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def _make_harmful(run, marker, sign=False):
    """Put a pickle that runs a program in the place of every pickle, as a stranger would."""
    planted = 0
    for checkpoint in run.glob("part-1/checkpoint_*"):
        manifest = manifests.read_manifest(checkpoint)
        for path in checkpoint.rglob("*.pkl"):
            path.write_bytes(pickle.dumps(_Harmful(marker)))
            with open(path, "rb") as file:
                name = path.relative_to(checkpoint).as_posix()
                manifest["files"][name] = manifests._measure(file)
            planted += 1
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return planted


def test_nothing_of_a_stranger_is_run(run, tmp_path):
    copy, marker = _copy(run, tmp_path), tmp_path / "was-here"
    assert _make_harmful(copy, marker) >= 4
    newest = newest_checkpoint(copy)
    assert is_checkpoint(newest) and len(evaluate(copy, episodes=1)["returns"]) == 1
    with pytest.raises(ValueError, match=r"not written by you on this machine.*--trust"):
        plan_run(Options(), resume=copy)
    plan_run(Options(), resume=copy, trust=True)
    assert not marker.exists()
    pickle.loads(next(newest.rglob("*.pkl")).read_bytes())
    assert marker.exists(), "The pickles would not have been harmful."


def test_a_pickle_that_was_changed_in_the_user_s_own_run_is_noticed(run, tmp_path):
    copy, marker = _copy(run, tmp_path), tmp_path / "was-here"
    for path in copy.rglob("*.pkl"):
        path.write_bytes(pickle.dumps(_Harmful(marker)))
    with pytest.raises(ValueError, match="no whole checkpoint"):
        plan_run(Options(), resume=copy)
    with pytest.raises(ValueError, match="pkl"):
        RERPI.from_checkpoint(str(copy / "part-1" / "checkpoint_000001"))
    assert not marker.exists()


def test_a_run_of_another_user_needs_trust(run, tmp_path, monkeypatch):
    copy = _copy(run, tmp_path)
    assert plan_run(Options(), resume=copy).checkpoint == newest_checkpoint(copy)
    with pytest.raises(ValueError, match="--trust is for --resume"):
        plan_run(Options(env="Pendulum-v1", algo="RERPI"), trust=True)
    # Another user has another home directory, and some have none that can be written to.
    for home in (tmp_path / "home", Path("/proc/nowhere")):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
        with pytest.raises(ValueError, match=r"by .* on .*--trust"):
            plan_run(Options(), resume=copy)
        assert plan_run(Options(), resume=copy, trust=True).checkpoint
    manifests.write_manifest(tmp_path, {}, {})
    assert json.loads((tmp_path / "manifest.json").read_text())["signature"] is None


def test_the_key_is_the_user_s_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert manifests._key() == manifests._key() and len(manifests._key()) == 32
    (key,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert key.stat().st_mode & 0o077 == 0


def test_a_moved_run_is_restored_and_goes_on_adding_rows(run, tmp_path):
    copy, algo = _copy(run, tmp_path), run[1]
    config = algo.config.copy(copy_frozen=False)
    setattr(config, SHARED_REPLAY_DIRECTORY, str(copy / "replay"))
    restored = config.build_algo()
    try:
        restored.load_checkpoint(str(newest_checkpoint(copy)))
        assert restored.replay.get_state() == algo.replay.get_state()
        before = set((copy / "replay").iterdir())
        restored.train()
        _save(restored, copy, 2, 0)
        (added,) = set((copy / "replay").iterdir()) - before
        # The newest row is written again, and each episode has a row more than steps.
        per_row = added.stat().st_size / 202
        assert per_row == sum(c[:1].nbytes for c in restored.replay._columns.values())
        newest = newest_checkpoint(copy)
        assert newest.parent.name == "part-2"
        if not config.uses_old_api_stack:  # From Python it is saved with all that belongs to it.
            restored.save_to_path(tmp_path / "alone")
            manifest = manifests.check_whole(tmp_path / "alone")
            assert not manifests.shared_files(manifest) and manifest["replay_size"] == 600
    finally:
        restored.stop()
    again = RERPI.from_checkpoint(str(newest))
    assert len(again.replay) == 600 and again._shared_replay is None
    again.stop()
    alone = newest.rename(tmp_path / "checkpoint_000000")
    with pytest.raises(ValueError, match="copy the whole run"):
        newest_checkpoint(alone)
    assert evaluate(alone, episodes=1)["env"] == "Pendulum-v1"


def test_checkpoints_are_pruned_over_all_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "versions", dict)
    run, buffer = tmp_path / "run", ReplayBuffer(100, 2, 1, seed=0)

    def write(part, number):
        _add_steps(buffer, 10)
        path = run / f"part-{part}" / f"checkpoint_{number:06d}"
        buffer.save_to_path(path / "replay", shared=run / "replay")
        manifests.write_manifest(path, ABOUT, buffer.shared_files)
        prune(run, path, keep=2)
        return path

    def names():
        return sorted(str(path.relative_to(run)) for path in run.glob("part-*/*"))

    for number in range(3):  # Tune deletes the oldest ones of its part itself.
        write(1, number)
    shutil.rmtree(run / "part-1" / "checkpoint_000000")
    (run / "part-1" / "checkpoint_000002" / "replay" / "state.json").write_text("cut")
    write(2, 0)
    # Of the two that remain one is not whole, and does not count.
    assert names() == ["part-1/checkpoint_000001", "part-2/checkpoint_000000"]
    last = write(2, 1)
    assert names() == ["part-2/checkpoint_000000", "part-2/checkpoint_000001"]
    for number in range(2, 30):
        shutil.rmtree(run / "part-2" / f"checkpoint_{number - 2:06d}")
        last = write(2, number)
    restored = ReplayBuffer(100, 2, 1)
    restored.restore_from_path(last / "replay")
    assert restored.get_state()["stored"] == buffer.get_state()["stored"]
    # Rows that were overwritten long ago are gone.
    needed = manifests.shared_files(manifests.check_whole(last))
    needed |= manifests.shared_files(manifests.check_whole(last.with_name("checkpoint_000028")))
    assert {path.name for path in (run / "replay").iterdir()} == needed and len(needed) < 14
    # What belongs to a checkpoint that is not finished yet stays.
    _add_steps(buffer, 10)
    buffer.save_to_path(tmp_path / "unfinished", shared=run / "replay")
    prune(run, last, keep=2)
    assert all((run / "replay" / name).is_file() for name in buffer.shared_files)


def _add_steps(buffer, length, episode="a", done=False):
    rng = np.random.default_rng(buffer._additions)
    buffer.add(
        episode,
        observations=rng.normal(size=(length + 1, 2)).astype(np.float32),
        actions=rng.normal(size=(length, 1)).astype(np.float32),
        rewards=rng.normal(size=length).astype(np.float32),
        log_probs=rng.normal(size=length).astype(np.float32),
        terminated=done,
        done=done,
    )


@pytest.mark.parametrize("capacity,lanes", [(50, 1), (60, 3), (10_000, 2)])
def test_new_rows_alone_are_written(tmp_path, capacity, lanes):
    buffer = ReplayBuffer(capacity, 2, 1, num_lanes=lanes, seed=0)
    rng, shared = np.random.default_rng(1), tmp_path / "replay"
    per_row = sum(column[:1].nbytes for column in buffer._columns.values())
    for number in range(25):
        files, steps = set(shared.glob("*")), 0
        for _ in range(int(rng.integers(0, 4))):
            lane, length = int(rng.integers(lanes)), int(rng.integers(1, 30))
            _add_steps(buffer, length, f"{lane}", done=bool(rng.random() < 0.3))
            steps += length
        path = tmp_path / "part-1" / f"checkpoint_{number}" / "replay"
        buffer.save_to_path(path, shared=shared)
        written = sum(file.stat().st_size for file in set(shared.glob("*")) - files)
        # Each episode begins with a row of its own, and each lane's newest row is written again.
        assert written <= (steps + 4 + lanes) * per_row
        restored = ReplayBuffer(capacity, 2, 1, num_lanes=lanes)
        restored.restore_from_path(path)
        assert restored.get_state() == buffer.get_state()
        if number % 3 == 2:  # The run is resumed, and goes on as if nothing had happened.
            buffer = restored
    # If rows are lost, a checkpoint is written that needs none of the old files.
    next(iter(shared.iterdir())).unlink()
    for file in list(shared.iterdir())[::2]:
        file.unlink()
    buffer.save_to_path(path, shared=shared)
    restored.restore_from_path(path)
    assert restored.get_state() == buffer.get_state()


def test_a_full_disk_leaves_no_half_rows(tmp_path, monkeypatch):
    buffer = ReplayBuffer(100, 2, 1, seed=0)
    _add_steps(buffer, 10)

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            buffer.save_to_path(tmp_path / "1", shared=tmp_path / "replay")
    assert not list((tmp_path / "replay").iterdir())
    buffer.save_to_path(tmp_path / "a" / "b" / "replay", shared=tmp_path / "replay")
    assert len(list((tmp_path / "replay").iterdir())) == 1


@pytest.mark.parametrize("stack", ["new", "old"])
def test_writing_that_is_cut_off_leaves_no_whole_checkpoint(stack, tmp_path, monkeypatch):
    """Also where an older checkpoint is overwritten."""
    algo = _config(stack).build_algo()
    path = tmp_path / "checkpoint_000000"
    try:
        algo.train()
        algo.save_checkpoint(str(path))
        assert is_checkpoint(path)
        by_rllib = (ray.cloudpickle, "dump")
        for module, name in (by_rllib, (manifests, "save_networks"), (os, "replace")):

            def fail(*args, **kwargs):
                raise OSError("killed")

            with monkeypatch.context() as context:
                context.setattr(module, name, fail)
                with pytest.raises(OSError, match="killed"):
                    algo.save_checkpoint(str(path))
            assert not is_checkpoint(path), name
        algo.save_checkpoint(str(path))
        assert is_checkpoint(path)
    finally:
        algo.stop()


@pytest.mark.parametrize("stack", ["new", "old"])
def test_without_the_replay_a_restored_run_fills_it_before_it_learns(stack, tmp_path):
    config = _config(stack, checkpoint_replay=False, normalize_observations=True)
    algo = config.build_algo()
    for _ in range(2):
        algo.train()
    algo.save_checkpoint(str(tmp_path))
    moments = algo.replay.moments
    algo.stop()
    assert not list(tmp_path.rglob("*.bin"))
    assert manifests.check_whole(tmp_path)["replay_size"] == 0
    restored = RERPI.from_checkpoint(str(tmp_path))
    try:
        assert len(restored.replay) == 0 and restored._limiter.updates == 200
        # What the networks' inputs are normalized with is kept.
        np.testing.assert_array_equal(restored.replay.moments.mean, moments.mean)
        assert restored.replay.moments.count == moments.count
        restored.training_step()
        while restored._limiter.env_steps < 500:
            assert restored._limiter.updates == 200
            restored.training_step()
        result = restored.train()
        # A hundred steps without updates, and then the ratio of one half again.
        steps, updates = restored._limiter.env_steps, result["num_updates_lifetime"]
        assert updates == 200 + (steps - 500) // 2
    finally:
        restored.stop()


def test_a_run_without_replay_says_so_when_it_is_resumed(tmp_path, monkeypatch):
    from rerpi_rllib.runs import planning

    RunSettings(env="Pendulum-v1", config={"checkpoint_replay": False}).save(tmp_path)
    checkpoint = tmp_path / "part-1" / "checkpoint_000000"
    monkeypatch.setattr(planning, "newest_checkpoint", lambda *a, **k: checkpoint)
    for name in ("check_resumable", "check_trusted"):
        monkeypatch.setattr(planning, name, lambda *given: None)
    monkeypatch.setattr(planning, "holds_replay", lambda checkpoint: False)
    said = []
    run = plan_run(Options(), resume=tmp_path, report=said.append)
    assert said == ["checkpoint_000000 holds no replay: learning goes on after 1000 new steps."]
    assert run.config.checkpoint_replay is False
    run = plan_run(Options(checkpoint_replay=True), resume=tmp_path, report=said.append)
    assert run.config.checkpoint_replay is True


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Box(-np.inf, np.inf, (3,), np.float64),
        gym.spaces.Box(np.float32([-1.0, -0.1]), np.float32([2.0, np.inf])),
        gym.spaces.Discrete(4),
    ],
    ids=str,
)
def test_spaces_are_read_from_json(space):
    text = json.dumps(manifests.describe_space(space), allow_nan=False)
    assert manifests.make_space(json.loads(text)) == space


def test_checkpoints_on_another_filesystem(tmp_path):
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    remote = PyFileSystem(FSSpecHandler(DirFileSystem(str(tmp_path), LocalFileSystem())))
    algo = _config("new").build_algo()
    algo.train()
    algo.save_to_path("bucket/one", filesystem=remote)
    algo.stop()
    assert is_checkpoint(tmp_path / "bucket" / "one")
    restored = RERPI.from_checkpoint("bucket/one", filesystem=remote)
    assert len(restored.replay) == 200
    restored.stop()


def test_env_config_that_json_cannot_hold(tmp_path):
    config = _config("new").environment(env_config={"g": 9.0})
    algo = config.build_algo()
    algo.save_to_path(tmp_path / "a")
    algo.config.__dict__["env_config"] = {"g": object()}
    algo.save_to_path(tmp_path / "b")
    algo.stop()
    assert manifests.read_manifest(tmp_path / "a")["env_config"] == {"g": 9.0}
    with pytest.raises(ValueError, match=r"env_config of .* holds objects"):
        evaluate(tmp_path / "b")


def test_networks_that_do_not_fit_are_refused(run, tmp_path):
    copy = _copy(run, tmp_path)
    checkpoint = newest_checkpoint(copy)
    manifest = manifests.read_manifest(checkpoint)
    for changed in (
        {"settings": manifest["settings"] | {"policy_layers": [8]}},
        {"spaces": {"observation": {"n": 3}, "action": {}}},
        {"settings": {key: 1 for key in manifest["settings"]}},
    ):
        (checkpoint / "manifest.json").write_text(json.dumps(manifest | changed))
        with pytest.raises(ValueError):
            checkpoints.load_networks(checkpoint)
