"""Work that is stored is never done twice, and damage to it is noticed."""

import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foliax.experiments import storage
from foliax.experiments.context import Context
from hypothesis import given
from hypothesis import strategies as st


def test_stage_runs_once_and_returns_its_stored_form(tmp_path):
  calls = []

  def work():
    calls.append(1)
    return {"x": jnp.array([1.0, 0.1], jnp.float32), "n": np.int64(3), "t": (1, 2.5)}

  first = Context(tmp_path).stage("a/b", work)
  second = Context(tmp_path).stage("a/b", work)
  assert first == second == {"x": [1.0, float(np.float32(0.1))], "n": 3, "t": [1, 2.5]}
  assert len(calls) == 1


def test_floats_come_back_bit_for_bit(tmp_path):
  values = np.random.default_rng(0).standard_normal(601) * 10.0 ** np.arange(-300, 301)
  values = np.concatenate([values, [math.inf, -math.inf, -0.0, 5e-324]])
  Context(tmp_path).stage("s", lambda: {"v": values})
  back = np.array(Context(tmp_path).stage("s", lambda: None)["v"])
  assert back.tobytes() == values.tobytes()
  assert math.isnan(Context(tmp_path).stage("nan", lambda: math.nan))


def test_stage_is_done_again_when_its_dependencies_change(tmp_path, capsys):
  assert Context(tmp_path).stage("s", lambda: 1, size=3) == 1
  assert Context(tmp_path).stage("s", lambda: 2, size=3) == 1
  assert Context(tmp_path).stage("s", lambda: 2, size=4) == 2
  assert "depends on has changed" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["truncate", "alter", "empty", "garbage"])
def test_damaged_stage_is_done_again_and_said(tmp_path, capsys, damage):
  Context(tmp_path).stage("s", lambda: {"v": [1.25, 2.5]})
  path = tmp_path / "stages" / "s.json"
  text = path.read_text()
  path.write_bytes(
    {
      "truncate": text[:-20].encode(),
      "alter": text.replace("1.25", "1.75").encode(),
      "empty": b"",
      "garbage": b"\xff\xfe\x00{}",
    }[damage]
  )
  assert Context(tmp_path).stage("s", lambda: {"v": "again"}) == {"v": "again"}
  assert "damaged" in capsys.readouterr().err
  assert Context(tmp_path).stage("s", lambda: None) == {"v": "again"}


def test_failed_stage_stores_nothing(tmp_path):
  with pytest.raises(ZeroDivisionError):
    Context(tmp_path).stage("s", lambda: 1 / 0)
  assert Context(tmp_path).stage("s", lambda: 5) == 5


@pytest.mark.parametrize("name", ["", "../up", "a//b", "/abs", "a b", ".."])
def test_names_that_leave_the_work_directory_are_refused(tmp_path, name):
  with pytest.raises(ValueError, match="must be letters"):
    Context(tmp_path).stage(name, lambda: 1)


def test_a_name_serves_once_per_run(tmp_path):
  context = Context(tmp_path)
  context.stage("s", lambda: 1)
  with pytest.raises(ValueError, match="already used"):
    context.loop("s", 0, lambda c, i: (c, i), 1)


def test_what_json_cannot_hold_is_refused_by_name(tmp_path):
  with pytest.raises(TypeError, match="object cannot be stored"):
    Context(tmp_path).stage("s", lambda: object())
  with pytest.raises(TypeError, match="random key"):
    Context(tmp_path).stage("k", lambda: jax.random.key(0))
  assert storage.round_trip(jnp.array([0.5], jnp.bfloat16)) == [0.5]


class Killed(Exception):
  pass


def _walk(stop_at=None):
  def step(carry, i):
    if i == stop_at:
      raise Killed
    key, x, count, total = carry
    key, noise = jax.random.split(key)
    x = x * 0.9 + jax.random.normal(noise, x.shape)
    return (key, x, count + np.int32(1), total + 0.1), {"norm": jnp.linalg.norm(x), "i": i}

  return step


def _start():
  # a weakly typed array, a numpy scalar and a Python float: the forms that checkpoints tend to lose
  return (jax.random.key(1), jnp.asarray(1.0) * jnp.ones(3), np.int32(0), 0.0)


def _bits(carry):
  key, x, count, total = carry
  return jax.random.key_data(key).tobytes(), np.asarray(x).tobytes(), int(count), total


@pytest.mark.parametrize("stop_at", [1, 7, 19])
def test_resumed_loop_ends_with_the_same_bits(tmp_path, stop_at):
  carry, records = Context(tmp_path / "whole").loop("w", _start(), _walk(), 20)
  with pytest.raises(Killed):
    Context(tmp_path / "cut", save_seconds=0).loop("w", _start(), _walk(stop_at), 20)
  done = []

  def counted(carry, i):
    done.append(i)
    return _walk()(carry, i)

  again, records_again = Context(tmp_path / "cut").loop("w", _start(), counted, 20)
  assert _bits(again) == _bits(carry)
  assert records_again == records
  assert done[0] == stop_at
  assert [r["i"] for r in records] == list(range(20))


def test_finished_loop_is_not_run_again(tmp_path):
  carry, records = Context(tmp_path).loop("w", _start(), _walk(), 5)
  again, records_again = Context(tmp_path).loop("w", _start(), _walk(stop_at=0), 5)
  assert (_bits(again), records_again) == (_bits(carry), records)


@pytest.mark.parametrize("damage", ["seal", "array", "missing"])
def test_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, capsys, damage):
  whole, records = Context(tmp_path / "whole").loop("w", _start(), _walk(), 9)
  Context(tmp_path / "cut").loop("w", _start(), _walk(), 4)
  Context(tmp_path / "cut").loop("w", _start(), _walk(), 8)
  folder = tmp_path / "cut" / "checkpoints" / "w"
  if damage == "seal":
    (folder / "8.json").write_text(json.dumps({"sha256": "0", "value": 1}))
  elif damage == "array":
    files = [p for p in (folder / "8").rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
  else:
    for path in sorted((folder / "8").rglob("*"), reverse=True):
      path.unlink() if path.is_file() else path.rmdir()
  done = []

  def counted(carry, i):
    done.append(i)
    return _walk()(carry, i)

  carry, again = Context(tmp_path / "cut").loop("w", _start(), counted, 9)
  assert done == [4, 5, 6, 7, 8]
  assert "damaged" in capsys.readouterr().err
  assert (_bits(carry), again) == (_bits(whole), records)


def test_loop_refuses_a_step_that_changes_the_form_of_its_state(tmp_path):
  with pytest.raises(ValueError, match="step 0 of loop 'w' changed its state"):
    Context(tmp_path).loop("w", jnp.zeros(2), lambda c, i: (jnp.zeros(3), i), 2)


def test_scalars_are_written_for_tensorboard(tmp_path):
  context = Context(tmp_path)
  context.scalars("arm", {"regret": np.float32(0.5)}, 3)
  context.close()
  assert any((tmp_path / "tensorboard" / "arm").glob("events.out.tfevents.*"))


def test_resumed_curves_do_not_run_backwards(tmp_path):
  from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

  for steps in (range(6), range(3, 9)):  # killed after step 5, resumed from step 3
    context = Context(tmp_path)
    for i in steps:
      context.scalars("arm", {"regret": i * 0.5}, i)
    context.close()
    time.sleep(1.1)  # names of event files carry the second
  events = EventAccumulator(str(tmp_path / "tensorboard" / "arm")).Reload().Scalars("regret")
  assert [(e.step, e.value) for e in events] == [(i, i * 0.5) for i in range(9)]


def test_remainders_of_a_killed_save_are_removed(tmp_path):
  Context(tmp_path).loop("w", _start(), _walk(), 3)
  folder = tmp_path / "checkpoints" / "w"
  (folder / "5.orbax-checkpoint-tmp").mkdir()
  (folder / "4").mkdir()
  Context(tmp_path).loop("w", _start(), _walk(), 5)
  assert sorted(p.name for p in folder.iterdir()) == ["3", "3.json", "5", "5.json"]


@pytest.mark.parametrize("init", [0, None, (), {}, jnp.zeros(2), (None, {"a": np.ones(1)}, [])])
def test_state_may_be_any_pytree_of_arrays(tmp_path, init):
  first = Context(tmp_path).loop("w", init, lambda c, i: (c, i), 2)
  again = Context(tmp_path).loop("w", init, lambda c, i: pytest.fail("ran again"), 2)
  assert jax.tree.structure(first) == jax.tree.structure(again)
  jax.tree.map(np.testing.assert_array_equal, again, first)


def test_loops_whose_folders_would_overlap_are_refused(tmp_path):
  context = Context(tmp_path)
  context.loop("w", 0, lambda c, i: (c, i), 1)
  with pytest.raises(ValueError, match="share a folder"):
    context.loop("w/3", 0, lambda c, i: (c, i), 1)


def test_elapsed_time_adds_up_over_resumed_runs(tmp_path):
  first = Context(tmp_path)
  first._start -= 100.0
  first.close()
  assert 100.0 <= Context(tmp_path).elapsed() < 110.0


@given(
  st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text("[]{}, \n\"'a"),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("[]{},\n a"), inner),
  )
)
def test_json_lists_on_one_line_hold_the_same_values(value):
  text = storage.to_json(value)
  assert json.loads(text) == value
  assert storage.round_trip(value) == value


def test_json_lists_of_numbers_take_one_line():
  assert storage.to_json({"a": [1, 2.5], "b": []}) == '{\n "a": [1, 2.5],\n "b": []\n}'
