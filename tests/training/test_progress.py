"""Progress shows itself only when it is worth reading."""

import io
import time

import pytest
from foliax.training import progress


@pytest.fixture
def fast(monkeypatch):
  monkeypatch.setattr(progress, "DELAY_SECONDS", 0.02)
  monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_short_work_shows_nothing():
  stream = io.StringIO()
  with progress.progress("work", 3, stream=stream) as bar:
    bar.advance(3)
  time.sleep(0.05)
  assert stream.getvalue() == ""


@pytest.mark.usefixtures("fast")
def test_long_work_writes_plain_lines_without_a_terminal():
  stream = io.StringIO()
  with progress.progress("work", 3, stream=stream) as bar:
    time.sleep(0.1)
    bar.advance()
    bar.advance(2)
  lines = stream.getvalue().splitlines()
  assert lines[0] == "work: 0/3"
  assert lines[1].startswith("work: 1/3  ")
  assert lines[1].endswith(" left")
  assert lines[-1].startswith("work: 3/3  done in")
  assert "\x1b" not in stream.getvalue()


@pytest.mark.usefixtures("fast")
def test_long_work_draws_a_bar_on_a_terminal():
  stream = Terminal()
  with progress.progress("work", 3, stream=stream) as bar:
    time.sleep(0.1)
    bar.advance()
    assert bar._bar is not None
    time.sleep(0.15)
  assert "work" in stream.getvalue()
  assert "\x1b" in stream.getvalue()


@pytest.mark.usefixtures("fast")
def test_a_bar_inside_a_bar_does_not_break():
  with progress.progress("outer", 2, stream=Terminal()) as outer:
    time.sleep(0.1)
    with progress.progress("inner", 2, stream=Terminal()) as inner:
      time.sleep(0.1)
      inner.advance()
    outer.advance()
  assert (outer.done, inner.done) == (1, 1)


def test_time_left_does_not_count_what_was_done_before_resuming():
  with progress.progress("work", 100, done=90, stream=io.StringIO()) as bar:
    assert bar.seconds_left() is None
    bar._start -= 10.0
    bar.advance(5)
    assert bar.seconds_left() == pytest.approx(10.0, rel=0.01)


def test_an_error_ends_the_bar():
  with pytest.raises(KeyError), progress.progress("work", 2, stream=io.StringIO()) as bar:
    raise KeyError
  assert not bar._timer.is_alive() or bar._closed


@pytest.mark.parametrize(
  ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations_read_like_speech(seconds, text):
  assert progress.duration(seconds) == text
