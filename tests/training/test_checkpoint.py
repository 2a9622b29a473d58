"""Checkpoints come back bit for bit, and damage or a full disk never costs the ones before."""

import contextlib
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foliax.training.checkpoint import Checkpoints, abstract


def a_tree(seed=0):
  key = jax.random.key(seed)
  return {
    "key": key,
    "keys": jax.random.split(key, (2, 3)),
    "half": jax.random.normal(key, (5,), jnp.bfloat16),
    "count": jnp.int32(7),
    "empty": jnp.zeros((0, 3)),
    "nested": (None, [jnp.array([jnp.nan, -0.0, jnp.inf])]),
    "host": np.arange(3, dtype=np.int64),
    "number": 0.1,
  }


def bits(tree):
  raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
  leaves = [np.asarray(raw(jnp.asarray(x))) for x in jax.tree.leaves(tree)]
  return [(x.shape, str(x.dtype), x.tobytes()) for x in leaves]


@contextlib.contextmanager
def opened(folder, **options):
  with contextlib.closing(Checkpoints(folder, **options)) as checkpoints:
    yield checkpoints


def write(folder, steps, **options):
  with opened(folder, **options) as checkpoints:
    for step in steps:
      checkpoints.save(step, {"x": jnp.full(1000, step)}, {"step": step})


def test_trees_come_back_bit_for_bit_with_their_record(tmp_path):
  tree = a_tree()
  with opened(tmp_path) as checkpoints:
    assert checkpoints.newest() is None
    checkpoints.save(3, tree, {"best": 0.1})
    assert checkpoints.newest() == 3
    restored, record = checkpoints.restore(jax.tree.map(abstract, a_tree(1)), 3)
  assert jax.tree.structure(restored) == jax.tree.structure(tree)
  assert bits(restored) == bits(tree)
  assert record == {"best": 0.1}


def test_the_newest_are_kept_and_those_protected(tmp_path):
  with opened(tmp_path, keep=2) as checkpoints:
    for step in range(1, 6):
      checkpoints.save(step, {"x": jnp.ones(2)}, protect=(2,))
    checkpoints.wait()
    assert checkpoints.steps() == [5, 4, 2]
  assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "2.json", "4", "4.json", "5", "5.json"]


def test_a_step_that_exists_gets_only_the_new_record(tmp_path):
  write(tmp_path, [1])
  before = {p: p.stat().st_mtime_ns for p in (tmp_path / "1").rglob("*")}
  with opened(tmp_path) as checkpoints:
    checkpoints.save(1, {"x": jnp.full(1000, 1)}, "new")
    assert checkpoints.newest() == 1
    assert checkpoints.restore({"x": jnp.zeros(1000, int)}, 1)[1] == "new"
  assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "1").rglob("*")}


def _largest(folder):
  return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def _flip_a_bit(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


DAMAGE = {
  "truncated": lambda folder: _largest(folder / "2").write_bytes(b"short"),
  "bit flipped": lambda folder: _flip_a_bit(_largest(folder / "2")),
  "file missing": lambda folder: _largest(folder / "2").unlink(),
  "seal truncated": lambda folder: (folder / "2.json").write_bytes(b'{"sha256": "0'),
  "seal altered": lambda folder: _flip_a_bit(folder / "2.json"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(tmp_path, damage):
  write(tmp_path, [1, 2])
  damage(tmp_path)
  said = []
  with opened(tmp_path, say=said.append) as checkpoints:
    assert checkpoints.newest() == 1
    tree, record = checkpoints.restore({"x": jnp.zeros(1000, int)}, 1)
  assert tree["x"].tolist() == [1] * 1000
  assert record == {"step": 1}
  assert len(said) == 1
  assert str(tmp_path / "2") in said[0]
  assert "damaged" in said[0]
  assert not (tmp_path / "2").exists()


def test_what_a_killed_save_left_is_no_checkpoint(tmp_path):
  write(tmp_path, [1, 2])
  (tmp_path / "2.json").unlink()  # killed between Orbax's end and the seal
  (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
  with opened(tmp_path) as checkpoints:
    assert checkpoints.newest() == 1
    checkpoints.save(2, {"x": jnp.ones(1000, int)})
  assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "1.json", "2", "2.json"]


def test_a_tree_of_another_form_is_refused_by_name_and_nothing_is_lost(tmp_path):
  write(tmp_path, [1])
  with opened(tmp_path) as checkpoints:
    for other in ({"x": jnp.zeros(999, int)}, {"x": jnp.zeros(1000)}):
      with pytest.raises(
        ValueError, match=r"has int32\[1000\] for x, but this run has .* another f"
      ):
        checkpoints.restore(other, 1)
    with pytest.raises(ValueError, match=r"has nothing for y, but this run has float32\[\]"):
      checkpoints.restore({"x": jnp.zeros(1000, int), "y": jnp.float32(0)}, 1)
    assert checkpoints.newest() == 1


def test_the_next_step_may_reuse_the_memory_of_what_is_being_saved(tmp_path):
  step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)
  tree = step({str(i): jnp.full(1_000_000, i, jnp.float32) for i in range(4)})
  expected = bits(tree)
  with opened(tmp_path) as checkpoints:
    checkpoints.save(1, tree)
    assert checkpoints.busy
    while checkpoints.busy:
      tree = step(tree)
    restored, _ = checkpoints.restore(tree, 1)
  assert bits(restored) == expected


@contextlib.contextmanager
def full_disk(limit):
  """Writes past so many bytes of a file fail, as they do on a full disk."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_and_the_checkpoint_before_is_intact(tmp_path):
  tree = {"x": jax.random.normal(jax.random.key(0), (300_000,))}
  with opened(tmp_path) as checkpoints:
    checkpoints.save(1, tree, "first")
    checkpoints.wait()
    with full_disk(100_000):
      checkpoints.save(2, tree)
      deadline = time.monotonic() + 60
      while checkpoints.busy and time.monotonic() < deadline:
        time.sleep(0.01)
      with pytest.raises(OSError, match=r"step 2 could not .*that of step 1 is intact; free space"):
        checkpoints.check()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "1.json"]
    assert checkpoints.newest() == 1
    restored, record = checkpoints.restore(tree, 1)
    assert (bits(restored), record) == (bits(tree), "first")
    checkpoints.save(2, tree)  # there is space again
    assert checkpoints.newest() == 2


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
  (tmp_path / "file").write_text("not a folder")
  checkpoints = Checkpoints(tmp_path / "file" / "checkpoints")
  with pytest.raises(OSError, match=r"step 1 could not be written to .* there is no earlier one"):
    checkpoints.save(1, {"x": jnp.ones(2)})
  checkpoints.close()


def test_keeping_nothing_is_refused(tmp_path):
  with pytest.raises(ValueError, match="keep is 0; keep at least 1"):
    Checkpoints(tmp_path, keep=0)
