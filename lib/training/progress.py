"""A progress bar with the time left for anything that takes longer than two seconds.

On a terminal it is a rich bar (plain lines when rich is not installed); elsewhere a line every ten
seconds, so that log files stay readable. Work done in less than two seconds shows nothing.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foliax import extras

DELAY_SECONDS = 2.0
LINE_SECONDS = 10.0


class Progress:
  """Counts work done; made by `progress`. Call `advance` after each unit of work."""

  def __init__(self, description: str, total: int, done: int, stream: Any):
    self.description, self.total, self.done = description, total, done
    self._first = done
    self._stream = stream
    self._start = self._last_line = time.monotonic()
    self._bar = None
    self._task = None
    self._lock = threading.RLock()
    self._shown = self._closed = self._said_done = False
    self._timer = threading.Timer(DELAY_SECONDS, self._show)
    self._timer.daemon = True
    self._timer.start()

  def advance(self, n: int = 1) -> None:
    """Says that n more units of work are done."""
    with self._lock:
      self.done += n
      if self._bar is not None:
        self._bar.update(self._task, completed=self.done)
      elif self._shown and time.monotonic() - self._last_line >= LINE_SECONDS:
        self._line()

  def seconds_left(self) -> float | None:
    """Time left at the pace so far; None before any work was done."""
    done = self.done - self._first
    if done <= 0:
      return None
    return (time.monotonic() - self._start) / done * max(self.total - self.done, 0)

  def close(self) -> None:
    """Takes the bar off the screen."""
    with self._lock:
      self._closed = True
      self._timer.cancel()
      if self._bar is not None:
        self._bar.stop()
      elif self._shown and not self._said_done:
        self._line()

  def _show(self) -> None:
    with self._lock:
      if self._closed:
        return
      self._shown = True
      self._bar = _start_bar(self._stream) if self._stream.isatty() else None
      if self._bar is None:
        self._line()
      else:
        self._task = self._bar.add_task(self.description, total=self.total, completed=self.done)

  def _line(self) -> None:
    self._last_line = time.monotonic()
    left = self.seconds_left()
    self._said_done = self.done >= self.total
    if self._said_done:
      tail = f"done in {duration(self._last_line - self._start)}"
    else:
      tail = "" if left is None else f"{duration(left)} left"
    line = f"{self.description}: {self.done}/{self.total}  {tail}"
    print(line.rstrip(), file=self._stream, flush=True)


def _start_bar(stream: Any):
  try:
    columns = extras.require("rich.progress", "experiments")
    errors = extras.require("rich.errors", "experiments")
    consoles = extras.require("rich.console", "experiments")
  except ModuleNotFoundError:
    return None
  bar = columns.Progress(
    columns.TextColumn("{task.description}"),
    columns.BarColumn(),
    columns.MofNCompleteColumn(),
    columns.TextColumn("left"),
    columns.TimeRemainingColumn(),
    console=consoles.Console(file=stream),
    transient=True,
  )
  try:
    bar.start()
  except errors.LiveError:  # a bar around this one is already on the screen
    return None
  return bar


def duration(seconds: float | int) -> str:
  """Seconds as people say them: `8 s`, `3 min 20 s`, `2 h 05 min`."""
  whole = round(seconds)
  if whole < 60:
    return f"{whole} s"
  if whole < 3600:
    return f"{whole // 60} min {whole % 60:02d} s"
  return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


@contextmanager
def progress(description: str, total: int, done: int = 0, stream: Any = None) -> Iterator[Progress]:
  """Shows the progress of a block of work.

  Args:
    description: what is being done, a few words.
    total: number of units of work.
    done: units already done, e.g. before a run was resumed; they do not count for the pace.
    stream: text file to write to; standard error by default.
  Yields:
    An object whose `advance(n=1)` is called after each unit of work.
  """
  bar = Progress(description, total, done, sys.stderr if stream is None else stream)
  try:
    yield bar
  finally:
    bar.close()
