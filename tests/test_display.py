"""What a user sees during a run, on a terminal and in a file."""

import io
from types import SimpleNamespace

import pytest
from conftest import METRICS
from rich.console import Console

from rerpi_rllib.core.constraints import Constraint
from rerpi_rllib.runs import display as module
from rerpi_rllib.runs.display import TrainingDisplay
from rerpi_rllib.sweeps.display import SweepDisplay

CONSTRAINTS = (
    Constraint("mu", "mean", 1e-3, "alpha_mu"),
    Constraint("sigma", "covariance", 1e-5, "alpha_sigma"),
    Constraint("nonparametric", "weights", 0.1, "temperature", is_trust_region=False),
)


@pytest.fixture(autouse=True)
def outside_of_continuous_integration(monkeypatch):
    monkeypatch.delenv("CI", raising=False)


def _result(step, learning=True, value=float("nan")):
    learners = {name: 0.5 for name in METRICS} | {"nested": {"more": 1.0}}
    return {
        "num_env_steps_sampled_lifetime": 1000 * step,
        "num_updates_lifetime": 500 * step if learning else None,
        "env_runners": {"episode_return_mean": value},
        "learners": {"default_policy": learners} if learning else {},
        "time_total_s": 10.0 * step,
        "training_iteration": step,
    }


def _watch(monkeypatch, **console):
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", -1.0)
    output = io.StringIO()
    display = TrainingDisplay(
        "RERPI on a task", {"env_steps": 10_000}, CONSTRAINTS, console=Console(file=output, **console)
    )
    display.setup()
    for number, result in enumerate(
        [_result(1, learning=False), _result(2, value=100.0), _result(3), _result(4, value=250.5)]
    ):
        display.on_trial_result(number, [], None, result)
    display.close()
    assert display.last_return == 250.5
    return output.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_everything_worth_watching_is_shown(monkeypatch, terminal):
    text = _watch(monkeypatch, force_terminal=terminal, width=160)
    for words in ("RERPI on a task", "4,000", "2,000", "250.5", "of 1e-03", "of 1e-05", "0.5"):
        assert words in text, words
    for words in ("KL of mean", "temperature", "time left") if terminal else ("kl_mu", "left"):
        assert words in text, words


def test_a_constraint_that_nobody_has_heard_of_is_shown(monkeypatch):
    skew = Constraint("skew", "skewness", 0.25, "alpha_skew")
    result = _result(1, value=3.0)
    result["learners"]["default_policy"] |= {"kl_skew": 0.125, "alpha_skew": 7.0}
    for terminal, words in (
        (True, ("KL of skewness", "1.25e-01 of 2e-01", "multiplier", "7")),
        (False, ("kl_skew 1.25e-01 of 2e-01",)),
    ):
        output = io.StringIO()
        monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", -1.0)
        console = Console(file=output, force_terminal=terminal, width=160)
        display = TrainingDisplay("x", {}, (*CONSTRAINTS, skew), console=console)
        display.setup()
        display.on_trial_result(0, [], None, result)
        display.close()
        assert all(word in output.getvalue() for word in words), output.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_faults_are_shown_if_there_were_any(monkeypatch, terminal):
    assert "bad episodes" not in _watch(monkeypatch, force_terminal=terminal, width=200)
    result = _result(1, value=3.0) | {"num_bad_episodes": 3, "num_learner_restarts": 0}
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=200)
    display = TrainingDisplay("x", {}, CONSTRAINTS, console=console)
    display.setup()
    display.on_trial_result(0, [], None, result | {"num_nonfinite_updates": 1050})
    display.close()
    assert "bad episodes 3, undone updates 1,050" in output.getvalue()
    assert "learner restarts" not in output.getvalue()


def test_continuous_integration_gets_lines(monkeypatch):
    monkeypatch.setenv("CI", "true")
    assert "kl_mu" in _watch(monkeypatch, force_terminal=True, width=160)


def test_quiet_is_quiet():
    output = io.StringIO()
    display = TrainingDisplay("x", {}, CONSTRAINTS, quiet=True, console=Console(file=output))
    display.setup()
    display.on_trial_result(0, [], None, _result(1, value=3.0))
    display.close()
    assert output.getvalue() == "" and display.last_return == 3.0


@pytest.mark.parametrize("terminal", [True, False])
def test_a_sweep_shows_what_runs_and_what_has_ended(terminal):
    output = io.StringIO()
    display = SweepDisplay(
        *("a sweep", 3, {"env_steps": 4000}),
        console=Console(file=output, force_terminal=terminal, width=120),
    )
    first, second, third = (
        SimpleNamespace(trial_id=n, path=f"/x/seed={n}", status="PENDING", last_result={})
        for n in range(3)
    )
    trials = [first, second, third]
    display.setup()
    display.on_step_begin(0, trials)
    for step in (1, 4):
        first.status, first.last_result = "RUNNING", _result(step, value=7.0) | {"score": 7.0}
        display.on_trial_result(0, trials, first, first.last_result)
    first.status = "TERMINATED"
    display.on_trial_complete(0, trials, first)
    second.status, second.last_result = "RUNNING", _result(2, value=9.25)
    display.on_trial_result(0, trials, second, second.last_result)
    third.status = "ERROR"
    display.on_trial_error(0, trials, third)
    display.on_trial_result(0, trials, second, second.last_result)
    display.close()
    text = output.getvalue()
    assert "seed=0: score 7.0" in text and "seed=2: failed" in text
    if terminal:
        for words in ("1 of 3 done, 1 failed", "seed=1", "2,000", "9.2", "left"):
            assert words in text, words
