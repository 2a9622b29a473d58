"""Whatever stops a run, the same command ends with the same results."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

HERE = pathlib.Path(__file__).parent
STEPS = 40
COMMAND = [
  sys.executable, "-m", "foliax.experiments.cli", "run", "outside.random_walk:smoke",
  f"--config.steps={STEPS}", "--config.walk.pause_seconds=0.05", "--config.save_seconds=0.2",
]  # fmt: skip


def _start(workdir, *flags):
  environment = os.environ | {"PYTHONPATH": str(HERE)}
  return subprocess.Popen(
    [*COMMAND, f"--workdir={workdir}", *flags],
    env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip


def _finish(workdir):
  process = _start(workdir)
  out, error = process.communicate(timeout=120)
  assert process.returncode == 0, error
  document = json.loads((workdir / "results.json").read_text())
  document.pop("provenance")
  return document, out


def _wait_for_steps(workdir, count, process):
  log = workdir / "steps.log"
  deadline = time.monotonic() + 120
  while not log.exists() or log.read_text().count("\n") < count:
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline
    time.sleep(0.01)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
  return _finish(tmp_path_factory.mktemp("whole") / "run")[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_killed_at_a_random_point_it_ends_with_the_same_results(tmp_path, uninterrupted, seed):
  point = random.Random(seed)
  steps, instant = point.randrange(2, STEPS), point.uniform(0, 0.3)
  process = _start(tmp_path)
  _wait_for_steps(tmp_path, steps, process)
  time.sleep(instant)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  assert not (tmp_path / "results.json").exists()
  assert _finish(tmp_path)[0] == uninterrupted


@pytest.mark.slow
def test_killed_again_and_again_it_keeps_what_it_did(tmp_path, uninterrupted):
  for goal in (15, 30):
    process = _start(tmp_path)
    _wait_for_steps(tmp_path, goal, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
  assert _finish(tmp_path)[0] == uninterrupted
  done = [int(line) for line in (tmp_path / "steps.log").read_text().split()]
  assert len(done) < 2 * STEPS  # three runs from the start would need 15 + 15 + 40 and more
  assert sorted(set(done)) == list(range(STEPS))
  assert done.count(0) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_asked_to_stop_it_says_how_to_continue(tmp_path, uninterrupted, name):
  process = _start(tmp_path)
  _wait_for_steps(tmp_path, 5, process)
  process.send_signal(getattr(signal, name))
  _, error = process.communicate(timeout=60)
  assert process.returncode == 130
  assert "stopped; the same command continues from here" in error
  assert "Traceback" not in error
  assert _finish(tmp_path)[0] == uninterrupted


@pytest.mark.slow
def test_second_process_on_one_directory_is_told_who_works_there(tmp_path, uninterrupted):
  first = _start(tmp_path)
  _wait_for_steps(tmp_path, 1, first)
  second = _start(tmp_path)
  _, error = second.communicate(timeout=60)
  assert second.returncode == 2
  assert error.strip().splitlines() == [
    f"foliax: {tmp_path} is in use by process {first.pid}; wait for it, or choose another --workdir"
  ]
  assert first.wait(timeout=60) == 0
  document, out = _finish(tmp_path)
  assert document == uninterrupted
  assert "finished already" in out


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["stages/starts.json", "checkpoints/walk/*.json"])
def test_damage_after_a_kill_is_said_and_repaired(tmp_path, uninterrupted, damaged):
  process = _start(tmp_path)
  _wait_for_steps(tmp_path, 25, process)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  path = sorted(tmp_path.glob(damaged), key=lambda p: p.stat().st_mtime)[-1]
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  process = _start(tmp_path)
  _, error = process.communicate(timeout=120)
  assert process.returncode == 0
  assert "is damaged" in error
  assert _finish(tmp_path)[0] == uninterrupted
