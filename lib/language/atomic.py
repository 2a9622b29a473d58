"""Files that are whole or not there."""

import os
import pathlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any


@contextmanager
def replacing(path: pathlib.Path) -> Iterator[IO[Any]]:
  """A new binary file that takes the place of `path` when the block ends well, and else is gone.

  Several processes may do so at once: one of their files stays.

  Args:
    path: the file, in a folder that is there.
  Raises:
    OSError: the disk is full, or the folder cannot be written.
  """
  # The name is another one for each writer, and the mode that of files made the usual way.
  umask = os.umask(0)
  os.umask(umask)
  with tempfile.NamedTemporaryFile(
    "wb", dir=path.parent, prefix=f".{path.name}-", suffix=".part", delete=False
  ) as stream:
    try:
      yield stream
      stream.flush()
      os.fsync(stream.fileno())
      os.chmod(stream.name, 0o666 & ~umask)
      os.replace(stream.name, path)
    except BaseException:
      pathlib.Path(stream.name).unlink(missing_ok=True)
      raise
