"""Every token of a text is a target once a pass, in batches that any number of processes shares."""

import numpy as np
import pytest
from foliax.language import corpus


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "a.txt").write_bytes(bytes(range(10)))
  np.save(tmp_path / "b.npy", np.arange(10, 25, dtype=np.uint16))
  (tmp_path / "c.txt").touch()
  (tmp_path / "notes.md").write_text("not a text to train on")
  return tmp_path


def test_files_of_a_folder_are_one_text_in_the_order_of_their_names(folder):
  text = corpus.Corpus(folder)
  assert len(text) == 25
  np.testing.assert_array_equal(text.read(0, 100), np.arange(25))
  np.testing.assert_array_equal(text.read(7, 6), np.arange(7, 13))
  np.testing.assert_array_equal(text.read(10, 2), [10, 11])
  assert text.read(25, 3).size == 0


def test_rows_cover_each_target_once(folder):
  windows = corpus.Windows(corpus.Corpus(folder), 4, 256)
  assert len(windows) == 6
  np.testing.assert_array_equal(np.concatenate([windows[i][1:] for i in range(6)]), range(1, 25))
  np.testing.assert_array_equal(windows[2], [8, 9, 10, 11, 12])


def test_held_out_part_shares_no_row_with_the_rest(folder):
  text = corpus.Corpus(folder)
  train, held_out = (corpus.Windows(text, 3, 256, part) for part in ((0, 0.6), (0.6, 1)))
  seen = {token for i in range(len(train)) for token in train[i].tolist()}
  assert not seen & {token for i in range(len(held_out)) for token in held_out[i].tolist()}


def test_default_text_comes_with_python():
  text = corpus.Corpus()
  assert len(text) > 100_000
  assert bytes(text.read(0, 2000).astype(np.uint8)).decode().isprintable() is False  # has lines


def test_batches_are_the_same_whatever_number_of_processes_shares_them(folder):
  windows = corpus.Windows(corpus.Corpus(folder), 2, 256)
  whole = corpus.Batches(windows, 4, seed=1)
  halves = [corpus.Batches(windows, 4, seed=1, share=(i, 2)) for i in range(2)]
  for _ in range(7):
    np.testing.assert_array_equal(next(whole), np.concatenate([next(half) for half in halves]))


def test_a_pass_sees_every_row_once_and_the_next_in_another_order(folder):
  windows = corpus.Windows(corpus.Corpus(folder), 2, 256)
  batches = corpus.Batches(windows, 4)
  firsts = [[int(row[0]) for _ in range(3) for row in next(batches)] for _ in range(2)]
  assert sorted(firsts[0]) == sorted(firsts[1]) == list(range(0, 24, 2))
  assert firsts[0] != firsts[1]


def test_position_restores_the_next_batch(folder):
  windows = corpus.Windows(corpus.Corpus(folder), 2, 256)
  batches = corpus.Batches(windows, 4)
  next(batches)
  state = batches.get_state()
  expected = next(batches)
  again = corpus.Batches(windows, 4, share=(1, 2))  # now two processes
  again.set_state(state)
  np.testing.assert_array_equal(next(again), expected[2:])
  with pytest.raises(ValueError, match="resume with the same text"):
    corpus.Batches(windows, 4, seed=5).set_state(state)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda folder: corpus.Corpus(folder / "none"), "must be a file, or a folder"),
    (lambda folder: corpus.Windows(corpus.Corpus(folder), 25, 256), "less than one row of 26"),
    (lambda folder: corpus.Windows(corpus.Corpus(folder), 4, 10)[2], "a token 12, outside"),
    (
      lambda folder: corpus.Batches(corpus.Windows(corpus.Corpus(folder), 4, 256), 3, share=(0, 2)),
      "rows is 3; it must be a multiple of 2",
    ),
  ],
)
def test_text_that_does_not_fit_is_one_line(make, message, folder):
  with pytest.raises(ValueError, match=message) as caught:
    make(folder)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("write", "message"),
  [
    (lambda path: np.save(path, np.ones((2, 2), np.int32)), r"holds int32\[2, 2\]"),
    (lambda path: np.save(path, np.ones(3)), r"holds float64\[3\]"),
    (lambda path: path.write_bytes(b"junk"), "no .npy file that can be read"),
    (lambda path: np.save(path, np.array([{}]), allow_pickle=True), "no .npy file that can be"),
  ],
)
def test_token_file_that_holds_no_tokens_is_named(write, message, tmp_path):
  write(tmp_path / "x.npy")
  with pytest.raises(ValueError, match=message) as caught:
    corpus.Corpus(tmp_path)
  assert "x.npy" in str(caught.value)
