"""Independent pieces of work on threads."""

import threading
import time

import jax.numpy as jnp
import pytest
from foliax.experiments.context import Context


def test_results_come_in_the_order_of_the_work(tmp_path):
  context = Context(tmp_path)
  work = {str(i): lambda i=i: time.sleep(0.02 * (3 - i)) or i for i in range(3)}
  assert list(context.parallel("counting", work, workers=3).items()) == [
    ("0", 0),
    ("1", 1),
    ("2", 2),
  ]


def test_pieces_run_at_the_same_time(tmp_path):
  both = threading.Barrier(2, timeout=20)
  work = {name: both.wait for name in "ab"}
  assert set(Context(tmp_path).parallel("meeting", work, workers=2)) == {"a", "b"}


def test_an_error_is_raised_and_nothing_more_is_begun(tmp_path):
  begun = []

  def piece(i):
    begun.append(i)
    if i == 0:
      raise RuntimeError("broken")
    time.sleep(0.05)

  with pytest.raises(RuntimeError, match="broken"):
    Context(tmp_path).parallel(
      "failing", {str(i): lambda i=i: piece(i) for i in range(50)}, workers=2
    )
  assert len(begun) < 10


def test_stages_on_threads_are_stored_and_not_repeated(tmp_path):
  def all_stages(context, function):
    work = {f"s{i}": lambda i=i: context.stage(f"s{i}", lambda: function(i)) for i in range(40)}
    return context.parallel("stages", work, workers=4)

  first = all_stages(Context(tmp_path), lambda i: i**2)
  again = all_stages(Context(tmp_path), lambda i: pytest.fail("was stored"))
  assert first == again == {f"s{i}": i**2 for i in range(40)}


def test_loops_on_threads_checkpoint_and_resume_alone(tmp_path):
  def all_loops(context, limit):
    def step(carry, i):
      if i >= limit:
        raise InterruptedError
      return carry + i, int(carry)

    work = {f"l{k}": lambda k=k: context.loop(f"l{k}", jnp.asarray(k), step, 6) for k in range(4)}
    return context.parallel("loops", work, workers=4)

  with pytest.raises(InterruptedError):
    all_loops(Context(tmp_path, save_seconds=0), 3)
  resumed = all_loops(Context(tmp_path, save_seconds=0), 99)
  whole = all_loops(Context(tmp_path / "whole", save_seconds=0), 99)
  assert resumed == whole
  assert [int(carry) for carry, _ in whole.values()] == [15, 16, 17, 18]
