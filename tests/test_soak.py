"""A little of `benchmarks/soak.py`: kills, resumes, and a ledger that finds what is wrong."""

import importlib
import json
import shutil

import numpy as np
import pytest
from test_benchmarks import BENCHMARKS

from rerpi_rllib.algorithm.checkpoint import write_manifest
from rerpi_rllib.algorithm.replay import ReplayBuffer


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("soak")


@pytest.fixture
def auditor(soak, tmp_path):
    (tmp_path / "marks").mkdir()
    return soak.Auditor(tmp_path / "run", tmp_path / "marks", soak.Ledger())


def _write(auditor, number, pieces, env_steps):
    """Write a checkpoint with pieces of episodes, each a life and its first and last step."""
    replay = ReplayBuffer(1000, 5, 1)
    for index, (life, first, last) in enumerate(pieces):
        observations = np.zeros((last - first + 2, 5), np.float32)
        observations[:, 3] = life * 2.0**-20
        observations[:, 4] = np.arange(first, last + 2) * 2.0**-32
        zeros = np.zeros(last - first + 1, np.float32)
        replay.add(
            f"{index}",
            observations=observations,
            actions=zeros[:, None],
            rewards=zeros,
            log_probs=zeros,
            terminated=False,
            done=True,
        )
    checkpoint = auditor._run / "part-1" / f"checkpoint_{number:06d}"
    replay.save_to_path(checkpoint / "replay")
    write_manifest(checkpoint, {"env_steps": env_steps}, {})
    return checkpoint


def test_the_ledger_balances(auditor):
    _write(auditor, 0, [(1, 0, 99), (1, 100, 149)], 150)
    stored = auditor.compare()
    assert (len(stored.steps), stored.dropped) == (150, 0)
    # Steps 150 to 159 were dropped with a bad number in the last one, and so were 180 to 182.
    (auditor._marks / "bad.txt").write_text("1 159 nan\n1 182 inf\n")
    _write(auditor, 1, [(1, 0, 99), (1, 100, 149), (1, 160, 179), (3, 0, 6)], 190)
    stored = auditor.compare()
    assert (len(stored.steps), stored.dropped) == (177, 13)
    ledger = auditor._ledger
    ledger.close()
    assert ledger.is_kept and ledger.checkpoints_compared == 2


@pytest.mark.parametrize(
    "pieces,env_steps,wrong",
    [
        ([(1, 0, 98)], 99, "lost"),
        ([(1, 0, 99), (1, 20, 29)], 110, "duplicated"),
        ([(1, 0, 99)], 101, "unaccounted"),
        ([(1, 0, 99), (1, 110, 119)], 120, "unaccounted"),  # No bad number explains the gap.
    ],
)
def test_the_ledger_finds_what_is_wrong(auditor, pieces, env_steps, wrong):
    _write(auditor, 0, [(1, 0, 99)], 100)
    auditor.compare()
    shutil.rmtree(auditor._run)
    _write(auditor, 1, pieces, env_steps)
    auditor.compare()
    ledger = auditor._ledger
    found = {name for name in ("lost", "duplicated", "unaccounted", "torn") if getattr(ledger, name)}
    assert found == {wrong}
    ledger.close()
    assert not ledger.is_kept


def test_no_whole_checkpoint_is_a_loss(auditor):
    checkpoint = _write(auditor, 0, [(1, 0, 99)], 100)
    auditor.compare()
    (checkpoint / "replay" / "rows.bin").write_bytes(b"")
    assert auditor.compare() is None
    assert auditor._ledger.lost == 100


def test_a_process_killed_while_it_writes(soak, tmp_path):
    ledger = soak.Ledger()
    storm = soak.Storm(tmp_path / "storm", ledger, seed=0, log=print)
    for _ in range(4):
        storm.kill_once(during_write=True)
    ledger.close()
    assert ledger.is_kept, ledger.facts
    assert ledger.resumes == 3 and sum(ledger.kills.values()) == 4 and ledger.checkpoints_compared


def test_a_run_killed_while_it_writes(soak, tmp_path, capsys):
    ledger = soak.Ledger()
    options = {"seed": 0, "disk_fills": False, "log": print}
    chaos = soak.Chaos(tmp_path, tmp_path / "disk", ledger, **options)
    try:
        chaos.live(soak.Life((), "all processes in a write"))
        stored = chaos.finish()
    finally:
        chaos.stop()
    soak.note_totals(ledger, chaos, tmp_path / "marks", stored)
    ledger.close()
    capsys.readouterr()
    ledger.print(as_json=True)
    facts = {
        row["name"]: row["value"] for row in map(json.loads, capsys.readouterr().out.split("\n")[:-1])
    }
    assert ledger.is_kept, facts
    assert facts["steps sampled"] >= facts["steps stored in the end"] > 0
    assert facts["resumes"] == facts["kill moments"] == 1 and facts["SIGTERM"] == 1
