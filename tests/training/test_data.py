"""Data come in an order that follows from a seed or key, and their position can be stored."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foliax.training import data

ROWS = {"x": np.arange(10), "y": np.arange(10) * 0.5}


def rows_of(batches, count):
  return [batch["x"].tolist() for batch in itertools.islice(batches, count)]


def test_each_epoch_sees_every_row_once_in_an_order_of_its_own():
  first, second = rows_of(data.batches(ROWS, 10, seed=3), 2)
  assert sorted(first) == sorted(second) == list(range(10))
  assert first != second
  assert first == rows_of(data.batches(ROWS, 10, seed=3), 1)[0]
  assert first != rows_of(data.batches(ROWS, 10, seed=4), 1)[0]


def test_rows_of_a_batch_belong_together():
  batch = next(data.batches(ROWS, 4))
  np.testing.assert_array_equal(batch["y"], batch["x"] * 0.5)
  assert batch["x"].shape == (4,)


def test_sequences_of_rows_serve_too_and_epochs_end():
  batches = data.batches([{"x": np.int32(i)} for i in range(5)], 2, shuffle=False, epochs=2)
  assert rows_of(batches, 99) == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_stored_position_goes_on_with_the_same_batches(threads):
  whole = rows_of(data.batches(ROWS, 3, threads=threads), 9)
  batches = data.batches(ROWS, 3, threads=threads)
  rows_of(batches, 4)
  position = json.loads(json.dumps(batches.get_state()))
  again = data.batches(ROWS, 3, threads=threads)
  next(again)
  again.set_state(position)
  assert rows_of(again, 5) == whole[4:]


def test_generated_batches_depend_on_the_key_and_their_number_alone():
  make = lambda key: jax.random.normal(key, (2,))
  key = jax.random.key(1)
  batches = data.Generated(make, key)
  whole = list(itertools.islice(batches, 3))
  np.testing.assert_array_equal(whole[2], make(jax.random.fold_in(key, 2)))
  assert whole[0].tolist() != whole[1].tolist()
  again = data.Generated(make, jax.random.key(1))
  again.set_state(json.loads(json.dumps({**batches.get_state(), "next": 1})))
  np.testing.assert_array_equal(next(again), whole[1])


def test_generated_batches_of_another_key_are_refused():
  state = data.Generated(jnp.sin, jax.random.key(1)).get_state()
  with pytest.raises(ValueError, match="resume with the same key"):
    data.Generated(jnp.sin, jax.random.key(2)).set_state(state)


def test_both_kinds_follow_the_protocol():
  assert isinstance(data.batches(ROWS, 2), data.Batches)
  assert isinstance(data.Generated(jnp.sin, jax.random.key(0)), data.Batches)
  assert not isinstance(iter([1]), data.Batches)


def test_datasets_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match=r"lengths {'x': 3, 'y': 2}; they must share"):
    data.batches({"x": np.ones(3), "y": np.ones(2)}, 1)
  with pytest.raises(ValueError, match="batch_size is 0"):
    data.batches(ROWS, 0)
  with pytest.raises(ValueError, match="source has 0 rows"):
    data.batches([], 1)
