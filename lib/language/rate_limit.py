"""A limit on how much is asked of a server in any minute."""

import collections
import threading
import time

_WINDOW = 60.0  # seconds


class Stopped(Exception):
  """There is no more reason to wait: another request failed, or the caller was interrupted."""


class RateLimit:
  """Requests and tokens over the last minute, for several threads."""

  def __init__(self, requests: float | None, tokens: float | None):
    """Counts from now.

    Args:
      requests: at most so many in any window, or None.
      tokens: likewise.
    """
    self._requests, self._tokens = requests, tokens
    self._recent: collections.deque[list[float]] = collections.deque()  # [when, tokens]
    self._lock = threading.Lock()

  def wait(self, tokens: float, stopping: threading.Event) -> list[float]:
    """Waits until a request fits.

    Args:
      tokens: its estimated tokens.
      stopping: ends the wait.
    Returns:
      Its entry, [when, tokens]; the second may be corrected later.
    Raises:
      Stopped: `stopping` was set.
    """
    while True:
      with self._lock:
        now = time.monotonic()
        while self._recent and self._recent[0][0] <= now - _WINDOW:
          self._recent.popleft()
        used = sum(entry[1] for entry in self._recent)
        fits = self._requests is None or len(self._recent) + 1 <= self._requests
        # A request over the limit by itself would wait forever: it goes alone.
        fits &= self._tokens is None or not self._recent or used + tokens <= self._tokens
        if fits:
          entry = [now, tokens]
          self._recent.append(entry)
          return entry
        oldest = self._recent[0][0]
      if stopping.wait(max(oldest + _WINDOW - now, 0.001)):
        raise Stopped
