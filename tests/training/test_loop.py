"""`fit` is the plain loop, and nothing that stops it changes a bit of what it ends with."""

import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import fit_child
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from foliax.training import data, loop, step
from jax.sharding import NamedSharding, PartitionSpec

OPTIMIZER = optax.adam(0.1)


def loss(params, batch, key):
  error = params["w"] @ batch["x"] + 0.1 * jax.random.normal(key) - batch["y"]
  return error**2, {"error": error}


def make(key):
  x = jax.random.normal(key, (3,))
  return {"x": x, "y": x @ jnp.array([1.0, -2.0, 0.5])}


UPDATE = step.gradient_step(loss, OPTIMIZER)


def start():
  return step.init({"w": jnp.zeros(3)}, OPTIMIZER, jax.random.key(0))


def generated():
  return data.Generated(make, jax.random.key(1))


def evaluate(state):
  return {"loss": jnp.sum((state.params["w"] - jnp.array([1.0, -2.0, 0.5])) ** 2)}


def fit(steps=12, state=None, batches=None, update=UPDATE, **options):
  options = {"steps_per_call": 4, **options}
  state = start() if state is None else state
  return loop.fit(update, state, batches or generated(), steps, **options)


class Killed(Exception):
  pass


def kill_at(step_number):
  def log(step, metrics):
    if step == step_number:
      raise Killed

  return log


def same(a, b):
  return fit_child.digest(a) == fit_child.digest(b)


def test_fit_is_the_plain_loop():
  batches, state = generated(), start()
  update = jax.jit(UPDATE)
  for _ in range(12):
    state, _ = update(state, next(batches))
  fitted = fit()
  np.testing.assert_allclose(fitted.state.params["w"], state.params["w"], rtol=1e-5)
  assert (fitted.step, fitted.stopped, int(fitted.state.step)) == (12, "steps", 12)


def test_generated_batches_are_those_of_the_iterator():
  fitted = fit(batches=iter([next(b) for b in [generated()] for _ in range(12)]))
  np.testing.assert_allclose(fitted.state.params["w"], fit().state.params["w"], rtol=1e-5)


def test_the_state_of_the_caller_stays_valid_unless_it_is_given_away():
  kept, given = start(), start()
  fit(state=kept)
  assert kept.params["w"].tolist() == [0, 0, 0]
  fit(state=given, donate=True)
  assert given.params["w"].is_deleted()


@pytest.mark.parametrize("kill", [5, 8, 11])
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(tmp_path, kill):
  options = {"evaluate": evaluate, "evaluate_every": 6}
  rows = []
  whole = fit(log=lambda n, row: rows.append((n, row)), **options)
  options |= {"folder": tmp_path, "checkpoint_every": 2}
  with pytest.raises(Killed):
    fit(log=kill_at(kill), **options)
  again = []
  resumed = fit(log=lambda n, row: again.append((n, row)), **options)
  assert same(resumed.state, whole.state)
  assert resumed[1:] == whole[1:]
  assert [row for row in rows if row[0] >= again[0][0]][-len(again) :] == again
  assert 1 < again[0][0] <= kill


def test_a_finished_run_returns_at_once_and_can_be_extended(tmp_path):
  first = fit(folder=tmp_path, evaluate=evaluate, evaluate_every=5)
  never = lambda *_: pytest.fail("worked again")
  again = fit(folder=tmp_path, log=never, evaluate=never, evaluate_every=5)
  assert same(first.state, again.state)
  assert again[1:] == first[1:]
  assert same(fit(16, folder=tmp_path).state, fit(16).state)


def test_grain_batches_resume_where_they_were(tmp_path):
  rows = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
  batches = lambda: data.batches({"x": rows, "y": rows.sum(1)}, 1)
  one = lambda state, batch: UPDATE(state, jax.tree.map(lambda x: x[0], batch))
  whole = fit(batches=batches(), update=one)
  with pytest.raises(Killed):
    fit(batches=batches(), update=one, folder=tmp_path, checkpoint_every=4, log=kill_at(7))
  assert same(fit(batches=batches(), update=one, folder=tmp_path).state, whole.state)


def test_a_damaged_newest_checkpoint_is_said_and_the_run_ends_the_same(tmp_path, capsys):
  whole = fit()
  with pytest.raises(Killed):
    fit(folder=tmp_path, checkpoint_every=4, log=kill_at(9))
  assert (tmp_path / "8.json").exists()
  largest = max((tmp_path / "8").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
  largest.write_bytes(largest.read_bytes()[:-1])
  assert same(fit(folder=tmp_path).state, whole.state)
  said = capsys.readouterr().err
  assert f"{tmp_path / '8'} is damaged" in said
  assert "goes on after step 4" in said


def test_the_best_checkpoint_is_kept(tmp_path):
  values = iter([3.0, 1.0, 2.0, 2.0, float("nan"), 2.0])
  fitted = fit(folder=tmp_path, evaluate=lambda _: {"loss": next(values)}, evaluate_every=2)
  assert (fitted.best, fitted.best_step) == (1.0, 4)
  kept = sorted(int(p.stem) for p in tmp_path.glob("*.json"))
  assert kept[0] == 4
  assert kept[-1] == 12
  assert len(kept) <= 3


def test_it_stops_early_when_evaluations_stop_improving():
  values = iter([1.0, 2.0, 3.0, 2.5, 2.9])
  options = {"evaluate_every": 2, "monitor": "gain", "maximise": True, "patience": 2}
  fitted = fit(99, evaluate=lambda _: {"gain": next(values)}, **options)
  assert (fitted.stopped, fitted.step) == ("patience", 10)
  assert (fitted.best, fitted.best_step) == (3.0, 6)


def test_it_ends_with_the_data():
  fitted = fit(99, batches=iter([next(b) for b in [generated()] for _ in range(6)]))
  assert (fitted.stopped, fitted.step) == ("data", 6)


def spoiled(*bad):
  def update(state, batch):
    hurt = jnp.isin(state.step + 1, jnp.array(bad))
    return UPDATE(state, batch | {"y": jnp.where(hurt, jnp.nan, batch["y"])})

  return update


def test_steps_that_are_not_finite_are_skipped_and_counted(capsys):
  fitted = fit(update=spoiled(3, 4, 9), max_skipped=3)
  assert fitted.skipped == 3
  assert int(fitted.state.step) == 12
  assert np.isfinite(fitted.state.params["w"]).all()
  assert "loss is not finite, step 9 is skipped" in capsys.readouterr().err


def test_too_many_in_a_row_stop_the_run_naming_step_and_tensor():
  with pytest.raises(loop.NonFiniteError, match="at step 7 loss is not finite, and 3 steps in a r"):
    fit(update=spoiled(2, 3, 5, 6, 7, 8), max_skipped=3)
  root = lambda params, batch, key: (jnp.sqrt(params["w"]).sum(), {})  # its slope at 0 is infinite
  with pytest.raises(loop.NonFiniteError, match="at step 2 gradient/w is not finite"):
    fit(update=step.gradient_step(root, OPTIMIZER), max_skipped=2)


def test_steps_in_a_row_are_counted_over_a_resumption(tmp_path):
  options = {"update": spoiled(*range(6, 99)), "max_skipped": 5, "steps_per_call": 2}
  with pytest.raises(Killed):
    fit(folder=tmp_path, checkpoint_every=2, log=kill_at(9), **options)
  with pytest.raises(loop.NonFiniteError, match=r"at step 10 .*look at the batches from step 6"):
    fit(folder=tmp_path, **options)


def test_an_update_that_does_not_guard_itself_is_guarded():
  add = lambda state, batch: ({"params": state["params"] + batch}, {})
  run = lambda batches, **options: fit(
    len(batches), {"params": jnp.zeros(2)}, iter(np.float32(batches)), add, **options
  )
  fitted = run([1, 2, np.nan, 4, np.inf, 6])
  assert fitted.state["params"].tolist() == [13, 13]
  assert fitted.skipped == 2
  with pytest.raises(loop.NonFiniteError, match="at step 3 params is not finite, and 2 steps"):
    run([1, np.inf, np.nan, 4], max_skipped=2)
  assert np.isnan(run([np.nan, 2], watch=lambda *_: ()).state["params"]).all()


def test_metrics_go_to_the_log_and_to_tensorboard(tmp_path):
  from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

  options = {"folder": tmp_path / "c", "tensorboard": tmp_path / "t", "checkpoint_every": 4}
  with pytest.raises(Killed):
    fit(log=kill_at(7), **options)
  time.sleep(1.1)  # names of event files carry the second
  rows = {}
  fit(log=lambda n, row: rows.update({n: row}), evaluate=evaluate, evaluate_every=8, **options)
  assert {"loss", "error", "gradient_norm", "skipped"} <= set(rows[5])
  curves = EventAccumulator(str(tmp_path / "t")).Reload()
  assert [e.step for e in curves.Scalars("loss")] == list(range(1, 13))
  assert [e.step for e in curves.Scalars("evaluation/loss")] == [8, 12]


def test_sigterm_saves_the_state_and_exits_with_143(tmp_path):
  before = signal.getsignal(signal.SIGTERM)

  def log(n, row):
    if n == 5:
      signal.raise_signal(signal.SIGTERM)

  with pytest.raises(loop.Preempted) as caught:
    fit(40, folder=tmp_path, log=log)
  assert isinstance(caught.value, SystemExit)
  assert caught.value.code == 143
  assert 5 <= caught.value.step < 40
  assert signal.getsignal(signal.SIGTERM) is before
  assert (tmp_path / f"{caught.value.step}.json").exists()
  assert same(fit(40, folder=tmp_path).state, fit(40).state)


def test_it_runs_in_a_thread_where_signals_cannot_be_caught(tmp_path):
  results = []
  thread = threading.Thread(target=lambda: results.append(fit(folder=tmp_path)))
  thread.start()
  thread.join()
  assert same(results[0].state, fit().state)


def test_sharded_state_comes_back_with_its_sharding(tmp_path):
  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  lay = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
  state = start()
  state = state._replace(params={"w": jax.device_put(jnp.zeros(3), lay("data"))})
  options = {"state": state, "batch_sharding": lay(), "folder": tmp_path}
  fit(4, **options)
  resumed = fit(8, **options).state
  assert resumed.params["w"].sharding == lay("data")
  assert same(resumed, fit(8).state)


@pytest.mark.parametrize(
  ("options", "said"),
  [
    ({"steps_per_call": 0}, "steps_per_call is 0; it must be at least 1"),
    ({"evaluate": evaluate}, "evaluate and evaluate_every belong together"),
    ({"patience": 1}, "patience counts evaluations"),
    ({"checkpoint_every": 5}, "checkpoint_every needs a place"),
    (
      {"evaluate": evaluate, "evaluate_every": 4, "monitor": "x"},
      r"monitor is 'x', but .*\['loss'",
    ),
    ({"update": lambda s, b: (s, {"v": jnp.ones(3)})}, r"metric 'v' has shape \(3,\)"),
    ({"batches": iter([{"x": np.ones(2)}, {"x": np.ones(3)}])}, "differ in form.*pad them"),
    ({"batches": iter([]), "folder": "unused"}, "position cannot be stored"),
  ],
)
def test_arguments_that_do_not_fit_are_refused(options, said, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match=said):
    fit(**options)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
  fit(folder=tmp_path)
  other = step.init({"w": jnp.zeros(4)}, OPTIMIZER, jax.random.key(0))
  with pytest.raises(ValueError, match=r"float32\[3\] for params/w, .*use another folder"):
    fit(state=other, folder=tmp_path)


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
  page = pathlib.Path(__file__).parents[2] / "docs" / "training.md"
  blocks = re.findall(
    r"```python\n(.*?)```", page.read_text("utf-8").split("## Many devices")[0], re.S
  )
  monkeypatch.chdir(tmp_path)
  names = {}
  for block in blocks:
    exec(compile(block, "<page>", "exec"), names)
    if "runs/line/" in block and "Checkpoints" not in block:
      np.testing.assert_allclose(names["fitted"].state.params["w"], [1, -2, 0.5], atol=0.05)
  assert len(blocks) == 5
  assert capsys.readouterr().out.startswith("400 steps")


# A process that is killed.

CHILD = pathlib.Path(fit_child.__file__)
STEPS = 120


def launch(folder, pause=0.01):
  command = [sys.executable, str(CHILD), str(folder), str(STEPS), str(pause)]
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  return subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
  )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
  return ["end", *map(str, fit_child.run(tmp_path_factory.mktemp("whole"), STEPS))]


def wait_for_a_write(folder, process, seed):
  """Until a checkpoint is being written, and then a random part of the time that takes."""
  deadline = time.monotonic() + 60
  while not list(folder.glob("*.orbax-checkpoint-tmp")) and process.poll() is None:
    assert time.monotonic() < deadline
  time.sleep(random.Random(seed).uniform(0, 0.02))


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_bits(tmp_path, uninterrupted):
  kills = during_write = 0
  while kills < 6:
    process = launch(tmp_path)
    chance = random.Random(kills)
    for _ in range(chance.randrange(1, 12)):
      process.stdout.readline()
    if kills % 2:
      wait_for_a_write(tmp_path, process, kills)
    else:
      time.sleep(chance.uniform(0, 0.1))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    kills += 1
    sealed = {p.stem for p in tmp_path.glob("*.json")}
    during_write += any(p.name not in sealed for p in tmp_path.glob("*/"))
  assert during_write >= 1
  out, error = launch(tmp_path, pause=0).communicate(timeout=120)
  assert out.splitlines()[-1].split() == uninterrupted, error
  assert "goes on after step" in error


@pytest.mark.slow
def test_a_scheduler_sees_the_code_of_sigterm_and_the_run_goes_on(tmp_path, uninterrupted):
  process = launch(tmp_path)
  process.stdout.readline()
  process.send_signal(signal.SIGTERM)
  _, error = process.communicate(timeout=60)
  assert process.returncode == 143
  assert "Traceback" not in error
  out, _ = launch(tmp_path, pause=0).communicate(timeout=120)
  assert out.splitlines()[-1].split() == uninterrupted
  shutil.rmtree(tmp_path)
