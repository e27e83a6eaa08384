"""Reading runs: which results count, and to which run they belong."""

import json
import os

import numpy as np
import pytest

from rerpi_rllib.algorithm.config import RERPIConfig
from rerpi_rllib.analysis.curves import find_runs, load_run
from rerpi_rllib.analysis.groups import aligned, group_runs, score_matrix, scores
from rerpi_rllib.analysis.plots import plot_runs, run_figure
from rerpi_rllib.analysis.report import write_report
from rerpi_rllib.core.constraints import Constraint
from rerpi_rllib.runs.settings import RunSettings


def _write(directory, rows, *, interval=None, **settings):
    """Write a run's directory; rows are (env steps, return, greedy return or None)."""
    RunSettings(**{"env": "Pendulum-v1", "stop": {"env_steps": 300}, **settings}).save(directory)
    lines = []
    for iteration, (steps, value, greedy) in enumerate(rows, start=1):
        result = {
            "training_iteration": iteration,
            "num_env_steps_sampled_lifetime": steps,
            "time_total_s": iteration,
            "env_runners": {"episode_return_mean": value},
            "config": {"evaluation_interval": interval},
        }
        if greedy is not None:
            result["evaluation"] = {"env_runners": {"episode_return_mean": greedy}}
        lines.append(json.dumps(result))
    (directory / "result.json").write_text("\n".join(lines) + "\n")
    return directory


def test_equal_evaluations_are_kept_and_repeated_ones_are_not(tmp_path):
    rows = [(100, 0, None), (200, 0, 7.0), (300, 0, 7.0), (400, 0, 7.0), (500, 0, 7.0)]
    curves = load_run(_write(tmp_path / "a", rows, interval=2)).curves
    known = curves[curves["greedy_return"].notna()]
    assert known["env_steps"].tolist() == [200, 400]


def test_rows_of_one_step_count_are_all_kept_and_repeated_parts_are_not(tmp_path):
    rows = [(50, 1, None), (50, 2, 7.0), (50, 3, None), (100, 4, None)]
    assert load_run(_write(tmp_path / "a", rows, interval=1)).curves["return"].tolist() == [
        1,
        2,
        3,
        4,
    ]
    rows = [(100, 1, None), (200, 2, None), (100, 3, None), (200, 4, None)]
    kept = load_run(_write(tmp_path / "b", rows)).curves
    assert kept["return"].tolist()[-2:] == [3, 4] and 2 not in kept["return"].tolist()


def test_parts_come_in_the_order_of_their_results_in_a_copy_too(tmp_path):
    run = _write(tmp_path / "a", [(100, 1, None), (200, 2, None)])
    for part, (timestamp, value) in {"part-1": (10, 3), "part-2": (20, 4)}.items():
        result = {
            **{"training_iteration": 3, "num_env_steps_sampled_lifetime": 300, "time_total_s": 3},
            **{"timestamp": timestamp, "env_runners": {"episode_return_mean": value}},
        }
        (run / part).mkdir()
        (run / part / "result.json").write_text(json.dumps(result) + "\n")
    for age, path in enumerate(sorted(run.glob("**/result.json"), reverse=True)):
        os.utime(path, (age, age))  # The newest part has the oldest file time.
    assert load_run(run).curves["return"].tolist() == [1, 2, 3, 4]


def test_a_line_that_was_being_written_is_passed_over(tmp_path):
    run = _write(tmp_path / "a", [(100, 1, None)])
    with open(run / "result.json", "a") as file:
        file.write('{"training_iter')
    assert len(load_run(run).curves) == 1


def test_runs_that_differ_by_seed_alone_are_one_group(tmp_path):
    for seed in (0, 1):
        _write(tmp_path / f"a{seed}", [(100, seed, None), (300, seed, None)], seed=seed)
        other = [(200, seed, None), (300, 5, None)]
        _write(tmp_path / f"b{seed}", other, seed=seed, config={"epsilon": 0.2})
    groups = group_runs(find_runs([tmp_path]))
    assert {label: len(runs) for label, runs in groups.items()} == {"default": 2, "epsilon=0.2": 2}
    steps, curves = aligned(groups["default"], "return")
    assert steps.tolist() == [100, 300] and curves.tolist() == [[0, 0], [1, 1]]
    assert all(run.is_complete for runs in groups.values() for run in runs)


def test_settings_come_back_as_they_were(tmp_path):
    _write(tmp_path / "a", [(300, 1, None)], config={"epsilon_sigma": 1e-6, "policy_layers": [8]})
    config = load_run(tmp_path / "a").settings.config
    assert config == {"epsilon_sigma": 1e-6, "policy_layers": [8]}


def test_scores_and_what_is_missing(tmp_path):
    _write(tmp_path / "a", [(300, 500.0, None)], env="dm_control/cheetah-run-v0")
    _write(tmp_path / "b", [(300, -200.0, None)])
    _write(tmp_path / "c", [(300, -100.0, None)], algo="MPO")
    table = scores(group_runs(find_runs([tmp_path])), "return")
    assert table.set_index(["group", "task"])["normalised"].to_dict() == {
        ("RERPI", "cheetah-run"): 0.5,
        ("RERPI", "Pendulum-v1"): 0.0,
        ("MPO", "Pendulum-v1"): 1.0,
    }
    tasks = ["cheetah-run", "Pendulum-v1"]
    assert score_matrix(table, "score", "RERPI", tasks).tolist() == [[500.0, -200.0]]
    assert len(score_matrix(table, "score", "MPO", tasks)) == 0
    plot_runs([tmp_path], tmp_path / "x" / "all.png")
    assert {path.name for path in (tmp_path / "x").iterdir()} == {
        *("all.png", "all.svg", "all.csv", "all-scores.png", "all-scores.svg")
    }


def test_a_run_without_updates_has_a_report(tmp_path):
    page = write_report(_write(tmp_path / "a", [(100, 1, None)], seed=3)).read_text()
    assert "rllib train --algo RERPI --env Pendulum-v1 --seed 3" in page and "100 (100/s)" in page


def test_a_constraint_that_nobody_has_heard_of_is_drawn(tmp_path, monkeypatch):
    skew = Constraint("skew", "skewness", 0.25, "alpha_skew")
    monkeypatch.setattr(RERPIConfig, "constraints", property(lambda self: (skew,)))
    run = _write(tmp_path / "a", [(100, 1, None), (300, 2, None)])
    rows = [json.loads(line) for line in (run / "result.json").read_text().splitlines()]
    metrics = {"kl_skew": 0.5, "kl_skew_at_target_update": 1.0, "alpha_skew": 7.0}
    for row in rows:
        row["learners"] = {"default_policy": metrics}
    (run / "result.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_run(run)
    assert loaded.curves["kl_skew"].tolist() == [0.5, 0.5]
    figure = run_figure(loaded)
    lines = {line.get_label(): line for axis in figure.axes for line in axis.get_lines()}
    assert lines["kl_skew / 0.25"].get_ydata().tolist() == [2.0, 2.0]
    assert lines["alpha_skew"].get_ydata().tolist() == [7.0, 7.0]
    assert "4.00 times its bound of 0.25" in write_report(run).read_text()
    assert "kl_skew" in plot_runs([run]).with_suffix(".csv").read_text()


def test_nothing_there(tmp_path):
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match=str(directory)):
            find_runs([directory])
    assert np.isnan(load_run(_write(tmp_path / "a", [(1, 1, None)])).final("greedy_return"))


def test_a_recorded_run_is_drawn_whatever_is_refused_today(tmp_path):
    config = {"weighting": "ranking", "epsilon": 0.2}
    _write(tmp_path / "a", [(100, 1, None), (200, 2, None)], config=config)
    assert plot_runs([tmp_path / "a"]).is_file() and write_report(tmp_path / "a").is_file()
