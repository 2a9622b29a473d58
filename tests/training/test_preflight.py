"""Preflight: names, what crosses into the child, how each way of failing is reported."""

import json
import os
import pickle
import re
import signal
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from foliax.training import preflight as module
from foliax.training.preflight import TARGETS, Report, preflight, target
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

VECTOR = jax.ShapeDtypeStruct((8,), jnp.float32)


@pytest.fixture
def compilers_present(monkeypatch):
  """For what happens before or around the compiler: the child never reaches one."""
  monkeypatch.setattr(module, "missing_compiler", lambda name: module.target(name) and None)


def sharded(shape, sizes, names, *spec):
  mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
  return jax.ShapeDtypeStruct(
    shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
  )


@pytest.mark.parametrize(
  ("name", "devices", "chips", "gib"),
  [
    # Cloud TPU documentation, pages v5e, v5p (table "Topology | Cores | Chips"), v6e, TPU7x.
    ("v5e-1", 1, 1, 16),
    ("v5e-256", 256, 256, 16),
    ("v5p-8", 4, 4, 95),
    ("v5p-512", 256, 256, 95),
    ("v6e-256", 256, 256, 32),
    ("tpu7x-128", 128, 64, 96),
  ],
)
def test_number_in_a_tpu_name_counts_tensorcores(name, devices, chips, gib):
  found = target(name)
  assert found.devices == devices
  shape = found.topology.split(":")[1]
  assert eval(shape.replace("x", "*")) == chips
  assert found.device_bytes == gib * 2**30


def test_gpu_memory_in_the_table_is_that_of_the_text_target():
  for name in ("h100", "h200", "b200"):
    text = module.importlib.resources.files("foliax.training").joinpath(f"{name}.txtpb").read_text()
    size = int(re.search(r"device_memory_size: (\d+)", text)[1])
    assert {t.device_bytes for t in TARGETS.values() if t.name.startswith(name)} == {size}


@pytest.mark.parametrize(
  ("wrong", "near"), [("v5-256", "v5e-256"), ("H200x8", "h200x8"), ("v6e-255", "v6e-256")]
)
def test_unknown_target_lists_the_nearest_names(wrong, near):
  with pytest.raises(ValueError, match=rf"{wrong}.*nearest: .*{near}"):
    preflight(jnp.sin, (VECTOR,), wrong)


def test_missing_tpu_compiler_names_the_extra(monkeypatch):
  monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ModuleNotFoundError, match=r"v5e-1 .*pip install 'foliax\[preflight\]'"):
    preflight(jnp.sin, (VECTOR,), "v5e-1")


def test_missing_gpu_compiler_names_the_extra_or_the_python_it_needs(monkeypatch):
  monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
  monkeypatch.setattr(sys, "version_info", (3, 11, 7))
  with pytest.raises(ModuleNotFoundError, match=r"Python >= 3\.12"):
    preflight(jnp.sin, (VECTOR,), "h200")
  monkeypatch.setattr(sys, "version_info", (3, 13, 0))
  with pytest.raises(ModuleNotFoundError, match=r"pip install 'foliax\[preflight\]'"):
    preflight(jnp.sin, (VECTOR,), "h200")


@pytest.mark.usefixtures("compilers_present")
def test_mesh_of_another_size_than_the_target_is_refused():
  with pytest.raises(ValueError, match=r"\{'data': 8\} has 8 devices.*v5e-16 has 16"):
    preflight(jnp.sin, (sharded((16,), (8,), ("data",), "data"),), "v5e-16")


@pytest.mark.usefixtures("compilers_present")
def test_two_meshes_are_refused():
  arguments = sharded((16,), (16,), ("a",), "a"), sharded((16,), (16,), ("b",), "b")
  with pytest.raises(ValueError, match="different meshes"):
    preflight(jnp.add, arguments, "v5e-16")


@pytest.mark.usefixtures("compilers_present")
def test_unknown_limit_is_refused():
  with pytest.raises(ValueError, match=r"limits has \['temp'\]; allowed: .*temp_bytes"):
    preflight(jnp.sin, (VECTOR,), "v5e-1", limits={"temp": 3})


def test_jitted_closure_crosses_with_its_options():
  factor = 3.0
  inner = jax.jit(lambda x: x * factor)
  outer = jax.jit(lambda s, n: inner(s) + n, donate_argnums=0, static_argnums=1)
  copy = pickle.loads(module._pickle(outer))
  assert copy._jit_info.donate_argnums == (0,)
  assert copy(jnp.ones(2), 2).tolist() == [5.0, 5.0]


def test_importable_jitted_function_crosses_by_name():
  assert pickle.loads(module._pickle(jnp.sin)) is jnp.sin


def test_struct_of_typed_keys_crosses():
  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4))
  arguments, _, _ = pickle.loads(module._pickle(module._abstract((keys,), TARGETS["v5e-1"])))
  assert arguments == (keys,)


def test_collectives_are_counted_by_kind_and_starts_only_once():
  text = """
  %ar = f32[8]{0} all-reduce(f32[8]{0} %x), replica_groups={}
  %s = (f32[8]{0:T(128)}, f32[8]{0:T(128)S(1)}) all-gather-start(f32[8]{0} %y), dimensions={0}
  %d = f32[8]{0} all-gather-done((f32[8]{0}, f32[8]{0}) %s)
  ROOT %rs = f32[1]{0} reduce-scatter(%all-reduce.1), to_apply=%add
  %f = f32[8]{0} fusion(%all-gather.3), calls=%all-reduce-fusion
  """
  assert module._COLLECTIVE.findall(text) == ["all-reduce", "all-gather", "reduce-scatter"]


def crash():
  sys.stderr.write("W0000 00:00 start-up chatter\nLLVM ERROR: Cannot select: intrinsic %wgmma\n")
  sys.stderr.flush()
  os.abort()


@pytest.mark.usefixtures("compilers_present")
class TestChildThat:
  """Ends in some other way than by compiling; tracing happens in the child, so it stands in."""

  @pytest.fixture(autouse=True)
  def _cpu_in_place_of_the_slice(self, monkeypatch):
    # The child unpickles by reference; this makes it find a topology without any compiler.
    monkeypatch.setattr(
      module,
      "_BOOT",
      module._BOOT.replace(
        "preflight._child",
        "import jax, types\n"
        "preflight._topology = lambda t: types.SimpleNamespace(devices=jax.devices())\n"
        "preflight._child",
      ),
    )

  def test_aborts_is_a_failed_report_with_the_compilers_last_words(self):
    report = preflight(lambda x: crash(), (VECTOR,), "v5e-1")
    assert not report.ok
    assert "crashed with SIGABRT: LLVM ERROR: Cannot select" in report.error
    assert "chatter" not in report.error

  def test_is_killed_is_a_failed_report_that_suspects_host_memory(self):
    report = preflight(lambda x: os.kill(os.getpid(), signal.SIGKILL), (VECTOR,), "v5e-1")
    assert not report.ok
    assert "host memory" in report.error

  @pytest.mark.slow
  def test_never_ends_is_killed_with_all_it_started(self, tmp_path):
    def hang(x):
      import subprocess

      sleeper = subprocess.Popen(["sleep", "600"])
      (tmp_path / "pid").write_text(str(sleeper.pid))
      time.sleep(600)

    report = preflight(hang, (VECTOR,), "v5e-1", timeout_seconds=8)
    assert report.error == "did not compile within 8 s"
    assert report.seconds < 30
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while _alive(pid):
      assert time.monotonic() < deadline, "the grandchild outlived the time limit"
      time.sleep(0.05)

  def test_raises_is_a_failed_report_with_its_first_lines(self):
    def step(x):
      return jnp.dot(x, jnp.ones(3))

    report = preflight(step, (VECTOR,), "v5e-1")
    assert re.match(r"TypeError: dot.* \(8,\) and \(3,\)", report.error)
    assert report.temp_bytes is None
    assert json.loads(json.dumps(report._asdict()))["ok"] is False
    assert "fails: TypeError" in str(report)


def _alive(pid):
  try:
    with open(f"/proc/{pid}/stat") as stat:
      return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
  except FileNotFoundError:
    return False


REPORT = Report("v5e-1", True, None, 1.0, 60, 50, 30, 40, 100, 1e9, {"all-reduce": 2})


def test_peak_counts_aliased_bytes_once():
  assert REPORT.peak_bytes == 100


def test_program_larger_than_the_device_fails():
  assert module._judge(REPORT, {}).ok
  judged = module._judge(REPORT._replace(temp_bytes=31), {})
  assert not judged.ok
  assert judged.error == "needs 101 B a device, which has 100 B"


def test_value_over_its_limit_fails_and_at_its_limit_does_not():
  assert module._judge(REPORT, {"temp_bytes": 30}).ok
  judged = module._judge(REPORT, {"temp_bytes": 29})
  assert judged.error == "temp_bytes is 30, over the limit of 29"
  assert not module._judge(REPORT._replace(flops=None), {"flops": 1}).ok


def test_report_reads_as_lines_with_units():
  text = str(REPORT)
  assert "memory a device 100 B of 100 B" in text
  assert "FLOPs a device 1e+09; collectives: 2 all-reduce" in text
