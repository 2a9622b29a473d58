"""A run over two processes is the run over one, and outlives the death of a process."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

CHILD = pathlib.Path(__file__).with_name("distributed_child.py")
STEPS = 40


def start(folder, pause, processes=2):
  """Starts the processes of one run; their output goes to files beside the folder."""
  with socket.socket() as taken:
    taken.bind(("localhost", 0))
    address = f"localhost:{taken.getsockname()[1]}"
  children = []
  for i in range(processes):
    command = [sys.executable, str(CHILD), str(folder), str(STEPS), str(pause)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_COORDINATOR_ADDRESS": address}
    environment |= {"JAX_NUM_PROCESSES": str(processes), "JAX_PROCESS_ID": str(i)}
    if processes == 1:
      command.append("--alone")
    with open(f"{folder}-{i}.out", "ab") as out, open(f"{folder}-{i}.err", "ab") as err:
      children.append(subprocess.Popen(command, env=environment, stdout=out, stderr=err))
  return children


def finish(folder, children, seconds=300):
  """Waits for all; their exit codes must be 0. Returns losses by step, and the last line."""
  try:
    for i, child in enumerate(children):
      code = child.wait(seconds)
      assert code == 0, pathlib.Path(f"{folder}-{i}.err").read_text()[-3000:]
  finally:
    for child in children:
      child.kill()
  return read(folder)


def read(folder):
  text = pathlib.Path(f"{folder}-0.out").read_text()
  lines = [json.loads(x) for x in text.splitlines() if x.startswith("{")]  # Gloo talks too
  losses = {line["step"]: line["loss"] for line in lines if line.get("loss") is not None}
  return losses, lines[-1]


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one_and_resume_after_one_is_killed(tmp_path):
  one = tmp_path / "one"
  losses, results = finish(one, start(one, 0, processes=1))
  assert set(losses) == set(range(1, STEPS + 1))
  assert losses[STEPS] < losses[1]

  two = tmp_path / "two"
  children = start(two, pause=0.1)
  try:
    deadline = time.monotonic() + 200
    while not list((two / "checkpoints").glob("*.json")):
      assert time.monotonic() < deadline, pathlib.Path(f"{two}-0.err").read_text()[-3000:]
      assert children[0].poll() is None, pathlib.Path(f"{two}-0.err").read_text()[-3000:]
      time.sleep(0.05)
    children[1].send_signal(signal.SIGKILL)
    # The other one cannot go on alone; a scheduler ends it, here as there, if it does not end.
    with contextlib.suppress(subprocess.TimeoutExpired):
      children[0].wait(3)
  finally:
    for child in children:
      child.kill()
      child.wait()
  before, _ = read(two)
  assert STEPS not in before, "the run was over before a process could be killed"
  saved = max(int(path.stem) for path in (two / "checkpoints").glob("*.json"))

  pathlib.Path(f"{two}-0.out").unlink()
  after, again = finish(two, start(two, 0))
  assert min(after) > 1, "the run began again from the start"
  assert min(after) <= saved + 1
  assert again["processes"] == 2
  for step, loss in (before | after).items():
    np.testing.assert_allclose(loss, losses[step], atol=1e-5, err_msg=f"step {step}")
  assert set(before | after) == set(losses)
  np.testing.assert_allclose(again["held_out_loss"], results["held_out_loss"], atol=1e-5)
