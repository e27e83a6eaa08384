"""A bounded chaos run with a ledger at its end: nothing that was stored may be lost or stored twice.

python benchmarks/soak.py [--minutes 10] [--seed 0] [--json] [--no-reference]
python benchmarks/soak.py --cost [--json]

Half of the time a small run trains through `rllib train` and `rllib train --resume`, while
its processes are killed at random moments, many of them while a checkpoint is being written, its
environment hangs and gives NaN, and its disk fills up. In the other half a single process writes
checkpoints one after another and is killed every few seconds. The environment numbers its steps, so
that the replay in a checkpoint can be compared step by step with what was sampled and with the
checkpoint before. Then two undisturbed runs of the same number of steps are trained.

`--cost` measures instead what checkpoints, the screening of data and the copies for undoing updates
take of the time of training.

The exit code is 1 if a promise was broken; then the directory stays.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt
import soak_env

from rerpi_rllib.algorithm.replay import ReplayBuffer

IntArray = npt.NDArray[np.int64]

HERE = Path(__file__).parent
ENV = "soak_env:Soak-v0"
SETTINGS = {
    "normalize_observations": False,  # It would make the numbers of the steps large.
    "policy_layers": [32, 32],
    "critic_layers": [64, 64],
    "max_bad_episode_share": 0.5,  # A tenth would end so short parts of a run.
    "updates_per_env_step": 1.0,
    "replay_capacity": 1_000_000,
    "num_steps_sampled_before_learning_starts": 500,
    "compile_updates": "never",
}
ASYNCHRONOUS = {
    **SETTINGS,
    "num_env_runners": 1,
    "rollout_fragment_length": 10,
    "min_time_s_per_iteration": 0.5,
    "delay_between_env_runner_restarts_s": 0.0,
    "env_timeout_s": 10.0,
}
SYNCHRONOUS = {
    **SETTINGS,
    "num_env_runners": 0,
    "rollout_fragment_length": 20,
    "min_sample_timesteps_per_iteration": 40,
    "num_steps_sampled_before_learning_starts": 100,
    "updates_per_env_step": 0.2,
}
# `rllib train` with a checkpoint every two seconds in place of every minute.
TRAIN = (
    "import rerpi_rllib.runs.training as training\n"
    "training._SECONDS_TO_FIRST_CHECKPOINT = 0.5\n"
    "training._SECONDS_BETWEEN_CHECKPOINTS = 2.0\n"
    "training._SHARE_OF_TIME_FOR_CHECKPOINTS = 0.5\n"
    "from rerpi_rllib.cli import main\n"
    "main()\n"
)
DISK_BYTES = 96 * 2**20
# No promise is about how quick a machine is: after so long something hangs.
PATIENCE = 240.0
SHARE_OF_TRAINING = 0.5
EVALUATION_EPISODES = 30


class Broken(Exception):
    """A promise was broken in such a way that the chaos cannot go on."""


@dataclass
class Ledger:
    """What has happened, and what of it must not have."""

    kills: Counter[str] = field(default_factory=Counter)
    kills_in_a_write: int = 0
    other_events: Counter[str] = field(default_factory=Counter)
    seconds_lost: dict[str, list[float]] = field(default_factory=dict)
    resumes: int = 0
    refused: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    lost: int = 0
    duplicated: int = 0
    unaccounted: int = 0
    torn: int = 0
    checkpoints_compared: int = 0
    skipped: int = 0
    facts: list[tuple[str, Any, bool | None]] = field(default_factory=list)

    def lose(self, what: str, seconds: float) -> None:
        self.seconds_lost.setdefault(what, []).append(seconds)

    def add(self, name: str, value: Any, kept: bool | None = None) -> None:
        """Add a line; ``kept`` tells whether it keeps a promise, None if it is none."""
        self.facts.append((name, value, kept))

    @property
    def is_kept(self) -> bool:
        """Whether no promise in it was broken."""
        return all(kept is not False for *_, kept in self.facts)

    def close(self) -> None:
        """Add the sums of what has happened, and put them first."""
        details, self.facts = self.facts, []
        self.add("kill moments", sum(self.kills.values()))
        self.add("kill moments during a write", self.kills_in_a_write)
        for kind, count in sorted(self.kills.items()):
            self.add(f"killed: {kind}", count)
        for kind, count in sorted(self.other_events.items()):
            self.add(kind, count)
        self.add("resumes", self.resumes)
        self.add("refused resumes", len(self.refused), not self.refused)
        self.add("checkpoints compared step by step", self.checkpoints_compared)
        self.add("stored steps lost beyond the last completed checkpoint", self.lost, not self.lost)
        self.add("steps stored twice", self.duplicated, not self.duplicated)
        self.add(
            "difference between counted and stored steps", self.unaccounted, not self.unaccounted
        )
        self.add("steps with another step's successor", self.torn, not self.torn)
        self.add("checkpoints skipped as not whole", self.skipped)
        for what, seconds in sorted(self.seconds_lost.items()):
            spread = f"{statistics.median(seconds):.0f} (median; {max(seconds):.0f} at most)"
            self.add(f"seconds without results after: {what}", spread)
        self.facts += details
        for reason in [*self.refused, *self.broken]:
            self.add("broken promise", reason, False)

    def print(self, as_json: bool) -> None:
        words = {None: "", True: "kept", False: "BROKEN"}
        if not as_json:
            print("\n| fact | value | promise |\n|---|---|---|")
        for name, value, kept in self.facts:
            if as_json:
                print(json.dumps({"name": name, "value": value, "kept": kept}), flush=True)
            else:
                print(f"| {name} | {value} | {words[kept]} |", flush=True)


# -- What a checkpoint holds, step by step. --


@dataclass(frozen=True)
class Stored:
    """The steps in a checkpoint's replay, ``life * 2**32 + step`` each, and what it has counted."""

    checkpoint: str
    env_steps: int
    steps: IntArray
    dropped: int
    duplicated: int
    unaccounted: int
    torn: int


def read_stored(checkpoint: Path, bad: dict[int, set[int]]) -> Stored:
    """Read a checkpoint's replay and compare it with what its manifest and the environment say.

    Args:
        checkpoint: a whole one.
        bad: the steps of each life in which the environment gave bad numbers.
    """
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    state = json.loads((checkpoint / "replay" / "state.json").read_text())
    lanes = len(state["head"])
    replay = ReplayBuffer((state["lane_rows"] - 1) * lanes, 5, 1, num_lanes=lanes)
    replay.restore_from_path(checkpoint / "replay")
    rows = np.flatnonzero(replay._flags & 1)
    observations = replay._columns["obs"]
    lives, steps = soak_env.numbers_of(observations[rows])
    lane, place = np.divmod(rows, state["lane_rows"])
    followed_by = lane * state["lane_rows"] + (place + 1) % state["lane_rows"]
    next_lives, next_steps = soak_env.numbers_of(observations[followed_by])
    torn = int(((next_lives != lives) | (next_steps != steps + 1)).sum())
    numbers, counts = np.unique((lives << 32) + steps, return_counts=True)
    dropped, missing, possible = 0, 0, 0
    for life in np.unique(lives):
        in_life = (numbers[numbers >> 32 == life]) & (2**32 - 1)
        for first, end in _gaps(in_life):
            # An episode ends with its first bad number, and a piece of it is dropped up to there.
            if end - 1 in bad.get(int(life), set()):
                dropped += end - first
            else:
                missing += end - first
        # What was dropped last may be in the count, and nothing after it has been stored yet.
        possible += sum(b - int(in_life[-1]) for b in bad.get(int(life), ()) if b > in_life[-1])
    surplus = manifest["env_steps"] - int(counts.sum()) - dropped - missing
    if 0 < surplus <= possible:
        dropped, surplus = dropped + surplus, 0
    return Stored(
        f"{checkpoint.parent.name}/{checkpoint.name}",
        manifest["env_steps"],
        numbers,
        dropped,
        int((counts - 1).sum()),
        abs(surplus) + missing,
        torn,
    )


def _gaps(steps: IntArray) -> Iterator[tuple[int, int]]:
    """Yield the ranges of numbers from 0 on that are missing before the last of these."""
    ends = np.concatenate([[-1], steps])
    for index in np.flatnonzero(np.diff(ends) > 1):
        yield int(ends[index]) + 1, int(ends[index + 1])


def whole_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints whose files all agree with their manifests, those with most steps last.

    This is another way to find out than that of the package.
    """
    found = []
    for path in run.glob("part-*/checkpoint_*/manifest.json"):
        with contextlib.suppress(OSError, ValueError):
            manifest = json.loads(path.read_text())
            if all(
                hashlib.sha256((path.parent / name).read_bytes()).hexdigest() == measures["sha256"]
                for name, measures in manifest["files"].items()
            ):
                found.append((manifest["env_steps"], manifest["time"], path.parent))
    return [path for *_, path in sorted(found)]


class Auditor:
    """Compares the newest whole checkpoint of a run with the one at its last comparison."""

    def __init__(self, run: Path, marks: Path, ledger: Ledger) -> None:
        self._run, self._marks, self._ledger = run, marks, ledger
        self.last: Stored | None = None

    def compare(self) -> Stored | None:
        """Note what is lost or wrong in the newest whole checkpoint, which is returned."""
        for _ in range(20):
            if not (whole := whole_checkpoints(self._run)):
                break
            try:
                return self._compare(read_stored(whole[-1], soak_env.bad_steps(self._marks)))
            except OSError:  # A process that still runs has written a newer one and deleted this.
                time.sleep(0.1)
        if self.last is not None:
            self._ledger.lost += len(self.last.steps)
            self._ledger.broken.append(f"No whole checkpoint is left of {self._run.name}.")
        return None

    def _compare(self, now: Stored) -> Stored:
        ledger = self._ledger
        ledger.checkpoints_compared += 1
        wrong = {
            "lost": self._lost(now),
            "duplicated": now.duplicated,
            "unaccounted": now.unaccounted,
            "torn": now.torn,
        }
        for name, number in wrong.items():
            setattr(ledger, name, getattr(ledger, name) + number)
        if any(wrong.values()):
            before = self.last.checkpoint if self.last else None
            ledger.broken.append(f"{now.checkpoint} after {before} of {self._run}: {wrong}")
        self.last = now
        return now

    def _lost(self, now: Stored) -> int:
        if self.last is None:
            return 0
        return len(np.setdiff1d(self.last.steps, now.steps, assume_unique=True))


# -- Processes of one run: Ray leaves them all in the session of the process that has started it. --


def processes(session: int) -> dict[int, str]:
    """Return the names of the processes of a session by their numbers, zombies left out."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, of_session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(of_session) == session and state != "Z":
                words = (path / "cmdline").read_bytes().split(b"\0")
                found[int(path.name)] = b" ".join(words).decode(errors="replace").strip()
    return found


# The classes of the actors; RLlib wraps learners.
ROLES = {"EnvRunner": "RERPIEnvRunner", "learner": "_WrappedExecutable", "trial": "RERPI"}


def find(session: int, role: str) -> int | None:
    """Return the process of an actor; ``role`` is one of ``ROLES``."""
    for pid, name in processes(session).items():
        if name.split(".")[0] == f"ray::{ROLES[role]}":
            return pid
    return None


def kill_session(session: int) -> None:
    """Kill processes of a session until there are none; it may just be starting some."""
    while found := processes(session):
        _kill(found)
        time.sleep(0.01)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Writes:
    """Tells when a checkpoint of a run is being written, by what appears in its directory."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._before = self._entries()

    def _entries(self) -> set[Path]:
        return {*self._run.glob("replay/*"), *self._run.glob("part-*/checkpoint_*")}

    @property
    def going_on(self) -> bool:
        """Whether there is something new and no new checkpoint that has its manifest."""
        new = self._entries() - self._before
        if any((path / "manifest.json").exists() for path in new):
            self._before |= new
            return False
        return bool(new)


# -- The run: `rllib train`, killed and resumed. --


@dataclass(frozen=True)
class Life:
    """One `rllib train` or `rllib train --resume`: what happens to it, and what ends it.

    Args:
        events: some of "EnvRunner", "learner", "trial" and "trial in a write" (which are killed),
            "hang" and "full disk".
        end: "driver" or "all processes", killed at any time, "... in a write" or "... at its start",
            or "SIGTERM".
    """

    events: tuple[str, ...]
    end: str

    @property
    def learners(self) -> int:
        return 1 if "learner" in self.events else 0


CYCLE = (
    Life(("EnvRunner",), "all processes in a write"),
    Life(("learner", "trial in a write"), "driver in a write"),
    Life((), "all processes at its start"),
    Life(("hang", "full disk"), "all processes in a write"),
    Life(("trial", "EnvRunner"), "driver"),
    Life((), "SIGTERM"),
    Life(("learner",), "all processes"),
)


def lives(rng: random.Random) -> Iterator[Life]:
    """Yield lives for ever: first as above, so that slow machines see all kinds, then at random."""
    yield from CYCLE
    while True:
        yield from rng.sample(CYCLE, len(CYCLE))


class Chaos:
    """A run that is disturbed.

    Args:
        directory: for all that it writes.
        storage: where the run goes; a small file system of its own, if ``disk_fills``.
        disk_fills: whether the disk may be filled.
        log: called with what happens.
    """

    def __init__(
        self,
        directory: Path,
        storage: Path,
        ledger: Ledger,
        *,
        seed: int,
        disk_fills: bool,
        log: Callable[[str], None],
    ) -> None:
        self._directory, self._disk, self._disk_fills = directory, storage, disk_fills
        self._ledger, self._seed, self._log = ledger, seed, log
        self._rng = random.Random(seed)
        self.run = storage / "run"
        self._marks = directory / "marks"
        self._marks.mkdir()
        self.auditor = Auditor(self.run, self._marks, ledger)
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: list[int] = []
        self._number = 0
        self._ended: tuple[str, float] | None = None
        self.left_processes = 0
        self.last_result: dict[str, Any] = {}

    def live(self, life: Life) -> None:
        """Start or resume the run, and let happen to it what the life says."""
        self._start(life.learners)
        if life.end.endswith("at its start"):
            time.sleep(self._rng.uniform(0.0, 10.0))
            self._end(life.end.removesuffix(" at its start"), at_start=True)
            return
        self._wait("results", self._has_result, started=True)
        if self._ended is not None:
            what, ended = self._ended
            self._ledger.lose(
                f"{what}, until the resumed run's first result", time.monotonic() - ended
            )
            self._ended = None
        self._clean_up()
        for event in life.events:
            time.sleep(self._rng.uniform(0.0, 2.0))
            if event == "hang":
                self._hang()
            elif event == "full disk":
                if self._disk_fills and not self._fill_disk():
                    return
            elif event.startswith("trial"):
                self._kill_trial(in_write=event.endswith("in a write"))
            else:
                self._kill_actor(event)
        # A kill before the first checkpoint of a part would ask for nothing new of the resume.
        self._wait("a checkpoint", lambda: self._has_checkpoint_of(self._newest_part()))
        time.sleep(self._rng.uniform(0.0, 2.0))
        self._end(life.end)

    def finish(self) -> Stored:
        """Resume once more, end in order, and return what is stored."""
        self.live(Life((), "SIGTERM"))
        assert self.auditor.last is not None
        return self.auditor.last

    # Starting, and waiting for what is to happen.

    def _start(self, learners: int) -> None:
        self._number += 1
        command = [sys.executable, "-c", TRAIN, "train", "--quiet", "--num-learners", str(learners)]
        command += ["--no-dashboard"]
        if self.auditor.last is None:
            command += ["--algo", "RERPI", "--env", ENV, "--preset", "compact", "--name", "run"]
            command += ["--config", json.dumps(ASYNCHRONOUS), "--seed", str(self._seed)]
            command += ["--storage-path", str(self._disk)]
        else:
            command += ["--resume", str(self.run)]
            self._ledger.resumes += 1
        environment = _environment()
        environment |= {soak_env.DIRECTORY: str(self._marks), soak_env.SEED: str(self._seed)}
        with open(self._output, "wb") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment, start_new_session=True
            )
        self._sessions.append(self._process.pid)
        self._killed: dict[str, float] = {}
        self._part_before = self._newest_part()

    @property
    def _output(self) -> Path:
        return self._directory / f"output-{self._number:03d}.txt"

    @property
    def _session(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _newest_part(self) -> Path | None:
        parts = sorted(self.run.glob("part-*"), key=lambda path: int(path.name.split("-")[1]))
        return parts[-1] if parts else None

    def _has_checkpoint_of(self, part: Path | None) -> bool:
        return part is not None and any(path.parent == part for path in whole_checkpoints(self.run))

    def _result(self) -> dict[str, Any]:
        """Return the newest result of the newest part, empty if there is none."""
        part = self._newest_part()
        if part is None or part == self._part_before:
            return {}
        return _last_result(part)

    def _has_result(self) -> bool:
        if result := self._result():
            self.last_result = result
            return True
        return False

    def _steps(self) -> int:
        return int(self._result().get("num_env_steps_sampled_lifetime", 0))

    def _wait(self, what: str, happened: Callable[[], bool], started: bool = False) -> None:
        """Wait for something that a run which works will do."""
        began = time.monotonic()
        while not happened():
            assert self._process is not None
            ended = self._process.poll()
            if ended is not None or time.monotonic() - began > PATIENCE:
                how = f"ended with exit code {ended}" if ended is not None else "hangs"
                raise self._broken(f"the run {how} before there were {what}", refused=started)
            time.sleep(0.05)

    def _broken(self, what: str, refused: bool = False) -> Broken:
        """Note a broken promise, and return the error that ends the chaos."""
        reason = f"{self._output.name}: {what}: {self._said()}"
        (self._ledger.refused if refused else self._ledger.broken).append(reason)
        return Broken(reason)

    def _said(self) -> str:
        lines = self._output.read_text(errors="replace").splitlines()
        return " / ".join([line for line in lines if "WARNING" not in line][-3:])

    def _is_beyond(self, part: Path | None, steps: int) -> bool:
        """Tell whether the run has gone on from there, in the same part or in a new one."""
        now = self._steps()
        return bool(now) and (self._newest_part() != part or now > steps + 20)

    def _until_it_goes_on(self, what: str, began: float) -> None:
        """Wait for steps that come after what happened at ``began``, and note the seconds."""
        place = self._newest_part(), self._steps()
        self._wait(f"new steps after: {what}", lambda: self._is_beyond(*place))
        self._ledger.lose(what, time.monotonic() - began)

    # What happens.

    def _kill_actor(self, role: str) -> None:
        pid = self._find(role)
        counter = f"num_{'learner' if role == 'learner' else 'env_runner'}_restarts"
        restarts = int(self._result().get(counter, 0))
        self._note_kill(role, in_write=False)
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        self._wait(f"a new {role}", lambda: int(self._result().get(counter, 0)) > restarts)
        self._until_it_goes_on(f"{role} killed", began)

    def _find(self, role: str) -> int:
        """Wait until there is the process of an actor, and return it."""
        while (pid := find(self._session, role)) is None:
            self._wait(f"a process of the {role}", lambda: find(self._session, role) is not None)
        return pid

    def _kill_trial(self, in_write: bool) -> None:
        """Kill the process that trains; the driver starts another one by itself."""
        self._wait("a checkpoint", lambda: self._has_checkpoint_of(self._newest_part()))
        part = self._newest_part()
        pid = self._find("trial")
        writing = self._await_write() if in_write else None
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        self._note_kill("trial", in_write=writing is not None and writing.going_on)
        self.auditor.compare()
        self._wait("a new part", lambda: self._newest_part() != part and bool(self._result()))
        self._ledger.lose("trial killed", time.monotonic() - began)

    def _hang(self) -> None:
        restarts = int(self._result().get("num_env_runner_restarts", 0))
        (self._marks / soak_env.HANG).touch()
        self._wait("a hang", lambda: not (self._marks / soak_env.HANG).exists())
        began = time.monotonic()
        self._log("an environment hangs")
        self._ledger.other_events["environment hung"] += 1
        self._wait(
            "a restart of the EnvRunner",
            lambda: int(self._result().get("num_env_runner_restarts", 0)) > restarts,
        )
        self._until_it_goes_on("environment hung", began)

    def _fill_disk(self) -> bool:
        """Fill the disk and free it again; return whether the run goes on by itself."""
        self._wait("a checkpoint", lambda: self._has_checkpoint_of(self._newest_part()))
        self._log("the disk is full")
        self._ledger.other_events["disk filled"] += 1
        began = time.monotonic()
        filler = self._disk / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(2**16))
        deadline = began + self._rng.uniform(3.0, 20.0)
        assert self._process is not None
        while time.monotonic() < deadline and self._process.poll() is None:
            time.sleep(0.05)
        filler.unlink()
        place = self._newest_part(), self._steps()
        # What fails for the second time without a result ends; what does not goes on.
        while self._process.poll() is None:
            if self._is_beyond(*place):
                self._ledger.lose("disk filled", time.monotonic() - began)
                return True
            if time.monotonic() - began > PATIENCE:
                raise self._broken("the run hangs after a full disk")
            time.sleep(0.05)
        self._log(f"the run ended on the full disk: {self._said()}")
        self._ledger.other_events["runs ended by a full disk, and resumed"] += 1
        self._after_end("disk filled")
        return False

    def _await_write(self) -> Writes:
        writes = Writes(self.run)
        began = time.monotonic()
        while not writes.going_on:
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() - began > PATIENCE:
                raise self._broken("no checkpoints are written any more")
            time.sleep(0.001)
        time.sleep(self._rng.uniform(0.0, 0.03))
        return writes

    def _note_kill(self, what: str, in_write: bool) -> None:
        self._ledger.kills[what + (" during a write" if in_write else "")] += 1
        self._ledger.kills_in_a_write += in_write
        self._log(f"killed: {what}{' during a write' * in_write}")

    def _end(self, how: str, at_start: bool = False) -> None:
        assert self._process is not None
        if how == "SIGTERM":
            self._terminate()
            return
        what = how.removesuffix(" in a write")
        # Looking for them takes as long as a write.
        victims = processes(self._session) if what == "all processes" else {self._session: what}
        writing = self._await_write() if how != what else None
        if self._process.poll() is not None:
            raise self._broken("the run ended by itself", refused=at_start)
        _kill(victims)
        in_write = writing is not None and writing.going_on
        if what == "all processes":
            kill_session(self._session)
        kind = f"{what} while starting" if at_start else what
        self._note_kill(kind, in_write=in_write)
        self._after_end(f"{what} killed")

    def _terminate(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._ledger.other_events["SIGTERM"] += 1
        began = time.monotonic()
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise self._broken("the run does not end after SIGTERM") from None
        self._log(f"SIGTERM: ended after {time.monotonic() - began:.1f} s with exit code {code}")
        self._has_result()
        counted = self._steps()
        stored = self._after_end("SIGTERM")
        if code != 128 + signal.SIGTERM or stored is None or stored.env_steps != counted:
            steps = stored.env_steps if stored else None
            self._broken(
                f"after SIGTERM the exit code was {code}, and the last checkpoint has {steps} "
                f"steps, the last result {counted}"
            )

    def _after_end(self, what: str) -> Stored | None:
        """Look at what the process has left that was ended by something."""
        assert self._process is not None
        self._process.wait()
        if self._ended is None:  # Otherwise it has ended again before it had results.
            self._ended = what, time.monotonic()
        said = self._output.read_text(errors="replace")
        self._ledger.skipped += said.count("Skipped a checkpoint that is not whole")
        return self.auditor.compare()

    def _clean_up(self) -> None:
        """End what is left of earlier sessions, which the new one had to put up with so far."""
        for session in self._sessions[:-1]:
            self.left_processes += len(processes(session))
            kill_session(session)
        del self._sessions[:-1]

    def stop(self) -> None:
        for session in self._sessions:
            kill_session(session)
        if self._process is not None:
            self._process.wait()


def _environment() -> dict[str, str]:
    """Return the variables of processes that can import the environment."""
    path = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _last_result(part: Path) -> dict[str, Any]:
    try:
        with open(part / "result.json", "rb") as file:
            file.seek(max(0, (part / "result.json").stat().st_size - 2**18))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    # The last one is empty or is being written.
    for line in reversed(lines[:-1]):
        with contextlib.suppress(ValueError):
            result: dict[str, Any] = json.loads(line)
            return result
    return {}


# -- One process that writes checkpoints, killed every few seconds. --

_STARTING, _TRAINING, _SAVING = range(3)
_SECONDS_OF_A_WRITE = 0.05


def write_checkpoints(
    run: Path, marks: Path, seed: int, expected: tuple[int, int] | None, doing: Any, saved: Any
) -> None:
    """Train and save until killed, in the way in which Tune saves, but without Ray's processes.

    Args:
        run: the directory of the run.
        marks: what the environment writes.
        seed: of the algorithm.
        expected: at how many steps it has to go on, and how many of them have to be stored.
        doing: is set to what is being done.
        saved: counts the checkpoints.
    """
    os.environ |= {soak_env.DIRECTORY: str(marks), soak_env.SEED: str(seed)}
    with open(run.parent / "output.txt", "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.disable(logging.WARNING)
    import ray
    import ray.tune.trainable.trainable as trainable
    from ray.train._internal.checkpoint_manager import _CheckpointManager
    from ray.train._internal.storage import StorageContext
    from ray.tune import CheckpointConfig

    from rerpi_rllib.algorithm.saving import SHARED_REPLAY_DIRECTORY
    from rerpi_rllib.runs.checkpoints import newest_checkpoint, prune
    from rerpi_rllib.runs.settings import RunSettings

    ray.put = lambda value: value  # It would start Ray, for EnvRunners that there are none of.
    trainable.DEFAULT_STORAGE_PATH = str(marks / "logs")
    start = None if expected is None else newest_checkpoint(run, report=print)
    part = run / f"part-{1 + len(list(run.glob('part-*')))}"
    part.mkdir(parents=True)
    storage = StorageContext(
        storage_path=str(run.parent), experiment_dir_name=run.name, trial_dir_name=part.name
    )
    settings = RunSettings(env=ENV, preset="compact", config=SYNCHRONOUS, seed=seed)
    settings.save(run)
    built = settings.build_config(check_env=False)
    setattr(built, SHARED_REPLAY_DIRECTORY, str(run / "replay"))
    algorithm = built.algo_class(config=built)
    algorithm._storage = storage
    if start is not None:
        algorithm.restore(str(start))
    restored = algorithm._limiter.env_steps, len(algorithm.replay)
    assert restored == (expected or (0, 0)), f"It goes on from {restored} and not {expected} steps."
    manager = _CheckpointManager(CheckpointConfig(num_to_keep=2))
    while True:
        doing.value = _TRAINING
        algorithm.train()
        doing.value = _SAVING
        result = algorithm.save()
        manager.register_checkpoint(result)
        prune(run, Path(result.checkpoint.path), 2)
        saved.value += 1


class Storm:
    """Kills :func:`write_checkpoints` again and again, and looks at what it leaves."""

    def __init__(
        self, directory: Path, ledger: Ledger, *, seed: int, log: Callable[[str], None]
    ) -> None:
        self._ledger, self._seed, self._log = ledger, seed, log
        self._rng = random.Random(seed)
        self.run, self._marks = directory / "run", directory / "marks"
        self.run.mkdir(parents=True)
        self._marks.mkdir()
        self._output = directory / "output.txt"
        self.auditor = Auditor(self.run, self._marks, ledger)
        self._context = multiprocessing.get_context("forkserver")
        # They take ten seconds to import, once for all.
        self._context.set_forkserver_preload(
            [
                "rerpi_rllib.algorithm.rerpi",
                "rerpi_rllib.runs.checkpoints",
                "torch._inductor",
                "soak_env",
            ]
        )
        os.environ["PYTHONPATH"] = _environment()["PYTHONPATH"]

    def kill_once(self, during_write: bool) -> None:
        """Start the process, kill it during a write or at any moment, and compare."""
        doing, saved = self._context.RawValue("i", _STARTING), self._context.RawValue("i", 0)
        last = self.auditor.last
        expected = None if last is None else (last.env_steps, len(last.steps))
        arguments = (self.run, self._marks, self._seed, expected, doing, saved)
        said = self._said()
        process = self._context.Process(target=write_checkpoints, args=arguments)
        process.start()
        began = time.monotonic()
        self._ledger.resumes += expected is not None
        # The first one has to leave something.
        wanted = self._rng.randrange(6) + (last is None)
        if during_write or last is None:
            while not (saved.value >= wanted and doing.value == _SAVING) and process.is_alive():
                if time.monotonic() - began > PATIENCE:
                    break
                time.sleep(0.001)
            time.sleep(self._rng.uniform(0.0, _SECONDS_OF_A_WRITE))
        else:
            process.join(self._rng.uniform(0.0, 4.0))
        if not process.is_alive():
            reason = f"storm: resuming failed: {self._said()[len(said) :].strip()[-500:]}"
            self._ledger.refused.append(reason)
            raise Broken(reason)
        process.kill()
        process.join()
        in_write = doing.value == _SAVING
        when = {_STARTING: " while starting", _TRAINING: "", _SAVING: " during a write"}[doing.value]
        self._ledger.kills[f"all there is (one process){when}"] += 1
        self._ledger.kills_in_a_write += in_write
        skipped = self._said()[len(said) :].count("Skipped a checkpoint that is not whole")
        self._ledger.skipped += skipped
        now = self.auditor.compare()
        self._log(f"storm: killed{when}, {now.env_steps if now else 0} steps stored")

    def _said(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""


# -- Undisturbed runs. --


def final_returns(runs: Iterable[Path]) -> list[tuple[float, float]]:
    """Return the mean and the standard error of greedy episodes of each run."""
    from rerpi_rllib.runs.evaluation import evaluate

    found = []
    for run in runs:
        returns = evaluate(run, episodes=EVALUATION_EPISODES, seed=0)["returns"]
        found.append((statistics.mean(returns), statistics.stdev(returns) / EVALUATION_EPISODES**0.5))
    return found


def train_undisturbed(directory: Path, steps: int, seeds: Iterable[int]) -> list[Path]:
    """Train runs of so many steps side by side, and return their directories."""
    started = []
    environment = _environment()
    for seed in seeds:
        command = [sys.executable, "-c", TRAIN, "train", "--quiet", "--algo", "RERPI", "--env", ENV]
        command += ["--preset", "compact", "--config", json.dumps(ASYNCHRONOUS), "--seed", str(seed)]
        command += ["--stop", json.dumps({"env_steps": steps}), "--no-dashboard"]
        command += ["--storage-path", str(directory), "--name", f"reference-{seed}"]
        with open(directory / f"reference-{seed}.txt", "wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment, start_new_session=True
            )
        started.append((process, directory / f"reference-{seed}"))
    for process, _ in started:
        process.wait()
    for process, _ in started:
        kill_session(process.pid)
    return [run for _, run in started]


def compare_returns(ledger: Ledger, run: Path, directory: Path, steps: int, seed: int) -> None:
    """Compare the disturbed run's greedy return with undisturbed ones of as many steps."""
    runs = train_undisturbed(directory, steps, (seed + 1, seed + 2))
    (ours, error), *others = final_returns([run, *runs])
    undisturbed = [mean for mean, _ in others]
    # Of two seeds alone the spread is uncertain, and so is a mean of some episodes.
    spread = max(max(undisturbed) - min(undisturbed), 2.0 * max(error, *(e for _, e in others)))
    lowest = min(undisturbed) - spread
    ledger.add("final return, greedy", round(ours, 1), ours >= lowest)
    ledger.add(
        f"final returns of two undisturbed seeds after {steps:,} steps",
        ", ".join(f"{mean:.1f}" for mean in undisturbed) + f" (spread {spread:.1f})",
    )


# -- All of it. --


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[bool]:
    """Mount a small file system, if this process may, and tell whether it is there."""
    directory.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={DISK_BYTES}".encode()
    is_mounted = libc.mount(b"tmpfs", str(directory).encode(), b"tmpfs", 0, options) == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            copy = directory.with_name("disk-copy")
            shutil.copytree(directory, copy, symlinks=True)
            libc.umount2(str(directory).encode(), 2)
            shutil.rmtree(directory)
            copy.rename(directory)


def soak(directory: Path, ledger: Ledger, minutes: float, seed: int, reference: bool) -> None:
    """Let it all happen for so many minutes, and then train the undisturbed runs."""
    began = time.monotonic()

    def log(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    with small_disk(directory / "disk") as disk_fills:
        if not disk_fills:
            log("no small disk can be mounted: it is not filled")
        ledger.add("a small disk to fill", "yes" if disk_fills else "no: mounting it needs root")
        chaos = Chaos(
            directory, directory / "disk", ledger, seed=seed, disk_fills=disk_fills, log=log
        )
        try:
            plan = lives(random.Random(seed))
            while time.monotonic() - began < 60 * minutes * SHARE_OF_TRAINING:
                chaos.live(next(plan))
            stored = chaos.finish()
        except Broken as error:
            log(str(error))
            stored = chaos.auditor.last
        finally:
            chaos.stop()
    note_totals(ledger, chaos, directory / "marks", stored)
    storm = Storm(directory / "storm", ledger, seed=seed, log=log)
    try:
        kills = 0
        while time.monotonic() - began < 60 * minutes:
            storm.kill_once(during_write=kills % 4 != 3)
            kills += 1
    except Broken as error:
        log(str(error))
    if reference and stored is not None and not ledger.refused:
        log(f"two undisturbed runs of {stored.env_steps:,} steps")
        compare_returns(ledger, directory / "disk" / "run", directory, stored.env_steps, seed)


def note_totals(ledger: Ledger, chaos: Chaos, marks: Path, stored: Stored | None) -> None:
    """Add where all steps of the run of `rllib train` have gone."""
    sampled = sum(soak_env.steps_of_lives(marks).values())
    kept = len(stored.steps) if stored else 0
    dropped = stored.dropped if stored else 0
    ledger.add("steps sampled", sampled)
    ledger.add("steps stored in the end", kept)
    ledger.add("steps dropped with bad numbers", dropped)
    ledger.add("steps of killed processes after their last checkpoint", sampled - kept - dropped)
    for key, words in (
        ("num_env_runner_restarts", "EnvRunner restarts"),
        ("num_learner_restarts", "learner restarts"),
        ("num_bad_episodes", "bad episodes dropped"),
        ("num_nonfinite_updates", "undone updates"),
    ):
        ledger.add(f"{words}, as the run counts them", int(chaos.last_result.get(key, 0)))
    ledger.add("processes that killed drivers left until the next result", chaos.left_processes)


# -- What it costs. --

COST_ENV = "dm_control/cartpole-swingup-v0"
SECONDS_OF_WARM_UP, SECONDS_MEASURED = 30.0, 60.0
LARGEST_COST = 0.02


def measure_cost(directory: Path, ledger: Ledger) -> None:
    """Measure in CPU time, which other work on the machine hardly changes, what safety costs.

    Training is asynchronous, with the preset `compact` and compiled updates. What the main process
    does besides learning is compared with all that it does in the same time, what the EnvRunner does
    with all that it does, and a checkpoint of a minute's new steps with a minute.
    """
    import ray

    from rerpi_rllib import RERPIConfig
    from rerpi_rllib.algorithm.env_runner import _is_sound
    from rerpi_rllib.algorithm.faults import LARGEST_NUMBER, Screening
    from rerpi_rllib.algorithm.saving import SHARED_REPLAY_DIRECTORY
    from rerpi_rllib.core.snapshots import Snapshot

    spent, calls = Counter[str](), Counter[str]()

    def measured(owner: type, name: str, key: str) -> None:
        function = getattr(owner, name)

        def wrapper(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                spent[key] += time.thread_time() - began
                calls[f"{owner.__name__}.{name}"] += 1

        setattr(owner, name, wrapper)

    for name in ("__init__", "total"):
        measured(Snapshot, name, "snapshots")
    measured(Screening, "passes", "screening")
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    config = RERPIConfig.compact().environment(COST_ENV).env_runners(num_env_runners=1)
    config.training(num_steps_sampled_before_learning_starts=1_000, compile_updates="at_start")
    config.reporting(min_time_s_per_iteration=1).debugging(seed=0, log_level="ERROR")
    setattr(config, SHARED_REPLAY_DIRECTORY, str(directory / "run" / "replay"))
    algorithm = config.build_algo()

    def train(seconds: float) -> dict[str, Any]:
        began = time.monotonic()
        while time.monotonic() - began < seconds or not algorithm._limiter.updates:
            result: dict[str, Any] = algorithm.train()
        return result

    def counts() -> np.ndarray:
        ticks = Path(f"/proc/{runner}/stat").read_text().rpartition(")")[2].split()[11:13]
        seconds_of_runner = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        limiter = algorithm._limiter
        return np.array([time.process_time(), seconds_of_runner, limiter.env_steps, limiter.updates])

    (runner,) = algorithm.env_runner_group.foreach_env_runner(
        lambda _: os.getpid(), local_env_runner=False
    )
    train(SECONDS_OF_WARM_UP)
    algorithm.save_checkpoint(str(directory / "first"))
    spent.clear()
    calls.clear()
    before = counts()
    train(SECONDS_MEASURED)
    of_main, of_runner, steps, updates = counts() - before
    # As Tune does: into a temporary directory, from which it is copied.
    began, cpu_began = time.perf_counter(), time.process_time()
    algorithm.save_checkpoint(str(directory / "second"))
    shutil.copytree(directory / "second", directory / "run" / "part-1" / "checkpoint_000000")
    checkpoint, checkpoint_wall = time.process_time() - cpu_began, time.perf_counter() - began
    algorithm.stop()
    ray.shutdown()
    observation, number, repeats = np.ones(5, np.float32), 1.0, 20_000
    began = time.thread_time()
    for _ in range(repeats):
        assert _is_sound(observation) and abs(number) <= LARGEST_NUMBER
    looks = (time.thread_time() - began) / repeats
    shares = {
        "checkpoints, one a minute": checkpoint / 60.0,
        "screening where steps are stored": spent["screening"] / of_main,
        "screening where steps are made": looks * steps / of_runner,
        "copies for undoing updates": spent["snapshots"] / of_main,
    }
    milliseconds = 1e3 * np.array([checkpoint, checkpoint_wall, of_main / updates])
    ledger.add("env steps and updates measured", f"{steps:,.0f} and {updates:,.0f}")
    ledger.add("updates per call of the learner", f"{updates / calls['Snapshot.__init__']:.1f}")
    ledger.add("CPU time of the main process for an update", f"{milliseconds[2]:.3g} ms")
    ledger.add("CPU time of the EnvRunner for a step", f"{1e3 * of_runner / steps:.3g} ms")
    ledger.add(
        "a checkpoint", f"{milliseconds[0]:.0f} ms of CPU time, {milliseconds[1]:.0f} ms in all"
    )
    for name, share in shares.items():
        ledger.add(f"share of the time: {name}", f"{100 * share:.2f} %")
    # The EnvRunner has a core of its own.
    total = sum(shares.values())
    ledger.add("share of the time: all of it", f"{100 * total:.2f} %", total < LARGEST_COST)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--no-reference", action="store_true", help="no undisturbed runs")
    parser.add_argument("--cost", action="store_true", help="measure what safety costs instead")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"Everything goes to {directory}.", file=sys.stderr, flush=True)
    ledger = Ledger()
    if arguments.cost:
        measure_cost(directory, ledger)
    else:
        soak(directory, ledger, arguments.minutes, arguments.seed, not arguments.no_reference)
        ledger.close()
    ledger.print(arguments.json)
    if not ledger.is_kept:
        sys.exit(f"A promise was broken: {directory} is kept.")
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
