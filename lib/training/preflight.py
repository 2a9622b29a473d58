"""Compile a function for a TPU or GPU slice that nobody has to own, and say whether it fits.

The compilers of the accelerators install from PyPI and need no device: `libtpu` brings Mosaic and
XLA:TPU, `jax-cuda13-pjrt` brings XLA:GPU. `preflight` compiles in a child process, because a
compiler that aborts, is killed for memory or never ends must not take its caller with it.

The number in the name of a TPU target counts TensorCores, as Google Cloud's accelerator types do.
A v5e or v6e chip has one, so `v5e-256` is 256 chips; a v5p or TPU7x chip has two, so `v5p-512` is
256 chips. What JAX calls a device differs once more: v5p drives both cores of a chip as one device
(`v5p-512` has 256 devices of 95 GiB), TPU7x does not (`tpu7x-128` has 128 devices of 96 GiB).
GPU targets name the GPU and how many of them one host holds: `h200`, `h200x8`.

Sources of names, slice shapes and memory: the TPU pages of the Google Cloud documentation (v5e,
v5p, v6e, TPU7x), the table of accelerator types in github.com/AI-Hypercomputer/xpk, and the GPU
target configurations that XLA publishes, from which the `.txtpb` files beside this one are made.

Example: does one step, sharded over 16 chips, fit?

  mesh = jax.sharding.AbstractMesh((16,), ("data",))
  batch = jax.ShapeDtypeStruct(
    (4096, 1024), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data"))
  )
  print(preflight(jax.jit(step, donate_argnums=0), (params, batch), "v5e-16"))
"""

import contextlib
import difflib
import importlib.resources
import importlib.util
import io
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from foliax import extras

_GIB = 2**30
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from foliax.training import preflight
preflight._child(*sys.argv[2:])
"""
_COLLECTIVE = re.compile(
  r"[\s)}\]](all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|"
  r"collective-broadcast)(?:-start)?\("
)
# What the compilers write to stderr whether or not anything is wrong, and their stack dumps.
_CHATTER = re.compile(
  r"^\s*$|^[IWE]\d{4} |^WARNING: |worker_hostnames|worker hostname|TPU_ACCELERATOR_TYPE|host bounds"
  r"|Source Location Trace|libtpu_init_utils|^(PC: )?\s*@ |^\*\*\* SIG|symbolize|^https?://"
)
_ERROR_LINES = 12


class Target(NamedTuple):
  """An accelerator slice to compile for.

  Attributes:
    name: what it is called, e.g. `"v5e-256"`.
    platform: `"tpu"` or `"cuda"`.
    topology: chips per axis of the slice (`"v5e:16x16"`), or slices x hosts x GPUs (`"1x1x8"`).
    devices: how many JAX devices the slice has.
    device_bytes: memory of one device, in bytes.
  """

  name: str
  platform: str
  topology: str
  devices: int
  device_bytes: int


class Report(NamedTuple):
  """What the compiler said; `report._asdict()` can be written as JSON.

  Attributes:
    target: name of the target.
    ok: it compiled, it fits into the memory of a device, and no limit was exceeded.
    error: why not, in the compiler's own words where it had any; None when ok.
    seconds: wall time of the child process.
    argument_bytes, output_bytes, temp_bytes, alias_bytes: memory of one device. Aliased bytes
      (donated arguments that outputs reuse) are counted in both arguments and outputs.
    device_bytes: memory that one device has.
    flops: floating point operations of one device, None when unknown. The body of a loop or scan
      counts once, and a kernel counts what its cost estimate says.
    collectives: how often each kind of collective stands in the compiled program. One inside a loop
      body counts once.
  """

  target: str
  ok: bool
  error: str | None
  seconds: float
  argument_bytes: int | None
  output_bytes: int | None
  temp_bytes: int | None
  alias_bytes: int | None
  device_bytes: int
  flops: float | None
  collectives: dict[str, int]

  @property
  def peak_bytes(self) -> int | None:
    """Upper bound on the memory of one device in bytes: arguments, outputs and temporaries."""
    if self.temp_bytes is None:
      return None
    held = (self.argument_bytes, self.output_bytes, self.temp_bytes)
    return sum(filter(None, held)) - (self.alias_bytes or 0)

  def __str__(self) -> str:
    verdict = "compiles" if self.ok else f"fails: {self.error}"
    line = f"{self.target}: {verdict} ({self.seconds:.1f} s)"
    if self.temp_bytes is None:
      return line
    flops = "unknown" if self.flops is None else f"{self.flops:.3g}"
    collectives = ", ".join(f"{n} {kind}" for kind, n in sorted(self.collectives.items())) or "none"
    return (
      f"{line}\n  memory a device {_size(self.peak_bytes)} of {_size(self.device_bytes)}"
      f" (arguments {_size(self.argument_bytes)}, outputs {_size(self.output_bytes)},"
      f" temporaries {_size(self.temp_bytes)}, reused {_size(self.alias_bytes)})"
      f"\n  FLOPs a device {flops}; collectives: {collectives}"
    )


def _targets() -> dict[str, Target]:
  plane = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
  cube = {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8"}
  cube |= {512: "4x8x8", 1024: "8x8x8", 2048: "8x8x16", 4096: "8x16x16"}
  # Generation: slice shapes by number of TensorCores, cores per device, GiB per device.
  generations = {
    "v5e": (plane, 1, 16),
    "v5p": (cube, 2, 95),
    "v6e": (plane, 1, 32),
    "tpu7x": ({2: "1x1x1"} | cube, 1, 96),
  }
  targets = [
    Target(f"{generation}-{cores}", "tpu", f"{generation}:{shape}", cores // per_device, gib * _GIB)
    for generation, (shapes, per_device, gib) in generations.items()
    for cores, shape in shapes.items()
  ]
  for gpu, device_bytes in (("h100", 84942979072), ("h200", 151397597184), ("b200", 191514411008)):
    for count in (1, 2, 4, 8):
      name = gpu if count == 1 else f"{gpu}x{count}"
      targets.append(Target(name, "cuda", f"1x1x{count}", count, device_bytes))
  return {target.name: target for target in targets}


TARGETS: Mapping[str, Target] = _targets()


def target(name: str) -> Target:
  """The target called `name`.

  Raises:
    ValueError: no target has this name; the message lists the nearest ones.
  """
  if name in TARGETS:
    return TARGETS[name]
  nearest = difflib.get_close_matches(name.lower(), TARGETS, n=4, cutoff=0.5)
  known = "nearest: " + ", ".join(nearest) if nearest else "known: " + ", ".join(TARGETS)
  raise ValueError(f"target is {name!r}, which is no known accelerator; {known}")


def missing_compiler(name: str) -> str | None:
  """One line on how to install the compiler of target `name`; None when it is installed."""
  if target(name).platform == "tpu":
    if importlib.util.find_spec("libtpu"):
      return None
    return (
      f"the compiler for {name} is not installed; it comes with: pip install 'foliax[preflight]'"
    )
  if sys.version_info < (3, 12):
    return (
      f"GPU targets such as {name} need Python >= 3.12 (jax >= 0.11); this is {sys.version[:4]}"
    )
  if importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13"):
    return None
  return f"the compiler for {name} is not installed; it comes with: pip install 'foliax[preflight]'"


def preflight(
  function: Callable[..., Any],
  arguments: tuple[Any, ...],
  target: str,
  *,
  limits: Mapping[str, float] | None = None,
  timeout_seconds: float = 600,
) -> Report:
  """Compiles `function(*arguments)` for `target` in a child process and reports.

  No array is made and no device is needed. The function travels by cloudpickle: by reference when
  it can be imported, else by value; `jax.jit` around it, or inside it, keeps its options, so that
  `jax.jit(step, donate_argnums=0)` is measured with its buffers reused.

  Sharding: leaves of `arguments` may carry a `NamedSharding` over any mesh with as many devices as
  the target, normally a `jax.sharding.AbstractMesh`; leaves without one are replicated. The
  function is traced with that mesh set, laid over the devices of the target. So it can use
  `with_sharding_constraint` with bare PartitionSpecs and `shard_map` without naming a mesh.

  Args:
    function: what to compile; static arguments are bound with `functools.partial`.
    arguments: positional arguments, pytrees of ShapeDtypeStructs or arrays, of which only shape,
      dtype and sharding are used.
    target: a name in `TARGETS`.
    limits: largest allowed value of fields of the report, e.g. `{"temp_bytes": 25_000_000}`.
    timeout_seconds: after this time the child and all it started are killed.
  Returns:
    A report. A compile error, a crash of the compiler, a kill or the end of the time are reports
    with `ok=False`, never exceptions.
  Raises:
    ValueError: unknown target or limit, or the mesh does not have the target's number of devices.
    ModuleNotFoundError: the target's compiler is not installed; names the extra.
  """
  if missing := missing_compiler(target):
    raise ModuleNotFoundError(missing)
  chosen = TARGETS[target]
  unknown = set(limits or {}) - set(Report._fields[4:10])
  if unknown:
    raise ValueError(f"limits has {sorted(unknown)}; allowed: {', '.join(Report._fields[4:10])}")
  payload = _pickle((chosen, function, *_abstract(arguments, chosen)))
  started = time.monotonic()
  with tempfile.TemporaryDirectory(prefix="foliax-preflight-") as folder:
    outcome = _run_child(pathlib.Path(folder), payload, chosen, timeout_seconds)
  report = Report(
    target=target,
    ok=outcome["error"] is None,
    error=None,
    seconds=time.monotonic() - started,
    argument_bytes=None,
    output_bytes=None,
    temp_bytes=None,
    alias_bytes=None,
    device_bytes=chosen.device_bytes,
    flops=None,
    collectives={},
  )._replace(**outcome)
  return _judge(report, limits or {}) if report.ok else report


def _judge(report: Report, limits: Mapping[str, float]) -> Report:
  over = [
    f"{name} is {getattr(report, name)}, over the limit of {limit}"
    for name, limit in limits.items()
    if getattr(report, name) is None or getattr(report, name) > limit
  ]
  peak = report.peak_bytes
  if peak is not None and peak > report.device_bytes:
    over.insert(0, f"needs {_size(peak)} a device, which has {_size(report.device_bytes)}")
  return report._replace(ok=not over, error="; ".join(over) or None)


def _size(count: int | None) -> str:
  if count is None:
    return "unknown"
  unit = min(int(math.log(max(count, 1), 1024)), 3)
  return f"{count / 1024**unit:.4g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def _abstract(arguments: tuple[Any, ...], chosen: Target) -> tuple[Any, ...]:
  """Structs without shardings, their PartitionSpecs, and the mesh they name (or None)."""
  import jax

  def struct(leaf):
    if isinstance(leaf, jax.ShapeDtypeStruct):
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    return jax.eval_shape(lambda x: x, leaf)

  leaves, treedef = jax.tree.flatten(tuple(arguments))
  named = jax.sharding.NamedSharding
  shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
  shardings = [s if isinstance(s, named) else None for s in shardings]
  meshes = {
    (m.axis_sizes, m.axis_names, m.axis_types) for m in (s.mesh for s in shardings if s is not None)
  }
  if len(meshes) > 1:
    raise ValueError(f"arguments are sharded over different meshes {meshes}; use one mesh")
  mesh = meshes.pop() if meshes else None
  if mesh and math.prod(mesh[0]) != chosen.devices:
    raise ValueError(
      f"the mesh {dict(zip(mesh[1], mesh[0], strict=True))} has {math.prod(mesh[0])} devices, but "
      f"target {chosen.name} has {chosen.devices}; choose axis sizes with that product"
    )
  specs = [jax.sharding.PartitionSpec() if s is None else s.spec for s in shardings]
  return treedef.unflatten([struct(leaf) for leaf in leaves]), specs, mesh


def _pickle(payload: Any) -> bytes:
  """Pickles code too, including jitted functions, which do not survive pickling by themselves."""
  import jax

  def reduce(function):
    if _importable(function):
      return function.__qualname__
    return _jit, (function.__wrapped__, _jit_options(function))

  base = extras.require("cloudpickle", "preflight").CloudPickler
  table = {**base.dispatch_table, type(jax.jit(_size)): reduce}
  buffer = io.BytesIO()
  type("Pickler", (base,), {"dispatch_table": table})(buffer).dump(payload)
  return buffer.getvalue()


def _importable(function: Any) -> bool:
  module = sys.modules.get(function.__module__)
  return (
    function.__module__ != "__main__" and getattr(module, function.__qualname__, None) is function
  )


def _jit(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
  import jax

  return jax.jit(function, **options)


def _jit_options(function: Any) -> dict[str, Any]:
  info = function._jit_info
  names = ("static_argnums", "static_argnames", "donate_argnums", "keep_unused")
  options = {name: getattr(info, name) for name in names}
  for side in ("in", "out"):
    leaves = getattr(info, f"{side}_shardings_leaves")
    if not any(type(leaf).__name__ == "UnspecifiedValue" for leaf in leaves):
      tree = getattr(info, f"{side}_shardings_treedef")
      options[f"{side}_shardings"] = tree.unflatten(leaves)
  return options


def _run_child(
  folder: pathlib.Path, payload: bytes, chosen: Target, timeout_seconds: float
) -> dict[str, Any]:
  """Runs `_child` on the payload; its result, or `{"error": ...}` for any other way to end."""
  (folder / "payload").write_bytes(payload)
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",  # else JAX looks for accelerators first
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu's lock guards a TPU, and none is used here
    "JAX_ENABLE_COMPILATION_CACHE": "0",  # a compile-only client cannot load what it stored
  }
  command = [sys.executable, "-c", _BOOT, json.dumps(sys.path)]
  command += [str(folder / "payload"), str(folder / "result")]
  with (folder / "log").open("wb") as log:
    child = subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=log,
      env=environment,
      start_new_session=True,
    )
    try:
      code = child.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
      return {"error": f"did not compile within {timeout_seconds:g} s"}
    finally:
      _kill_group(child)
  if code == 0:
    return json.loads((folder / "result").read_text())
  said = _meaningful((folder / "log").read_text(errors="replace"))
  if code == -signal.SIGKILL:
    return {"error": f"the compiler for {chosen.name} was killed, probably for host memory\n{said}"}
  how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
  return {"error": f"the compiler for {chosen.name} crashed with {how}: {said}"}


def _kill_group(child: subprocess.Popen) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.killpg(child.pid, signal.SIGKILL)
  child.wait()


def _meaningful(text: str) -> str:
  """The lines a reader needs: no start-up chatter, no stack, and the end rather than the start."""
  lines = [line.rstrip()[:400] for line in text.splitlines() if not _CHATTER.search(line)]
  fatal = next(
    (i for i, line in enumerate(lines) if re.match(r"F\d{4} |LLVM ERROR|Fatal", line)), 0
  )
  lines = lines[fatal : fatal + _ERROR_LINES] if fatal else lines[-_ERROR_LINES:]
  return "\n".join(lines) or "it said nothing"


def _child(payload_path: str, result_path: str) -> None:
  """Body of the child process: unpickle, compile, write the outcome as JSON."""
  import pickle

  try:
    outcome = _compile(*pickle.loads(pathlib.Path(payload_path).read_bytes()))
  except Exception as error:
    # The compiler's message comes first; what follows is its dump of the program.
    lines = [line.rstrip()[:400] for line in str(error).splitlines() if not _CHATTER.search(line)]
    outcome = {
      "error": "\n".join([f"{type(error).__name__}: {''.join(lines[:1])}", *lines[1:_ERROR_LINES]])
    }
  pathlib.Path(result_path).write_text(json.dumps(outcome))


def _topology(chosen: Target) -> Any:
  from jax.experimental import topologies

  if chosen.platform == "tpu":
    options = {}
    if math.prod(map(int, chosen.topology.split(":")[1].split("x"))) == 1:
      options = {"chips_per_host_bounds": (1, 1, 1)}  # the default host has four chips
    return topologies.get_topology_desc(chosen.topology, "tpu", **options)
  text = importlib.resources.files(__package__).joinpath(f"{chosen.name.split('x')[0]}.txtpb")
  return topologies.get_topology_desc(
    platform="cuda", target_config=text.read_text(), topology=chosen.topology
  )


def _compile(
  chosen: Target, function: Callable[..., Any], arguments: Any, specs: list[Any], mesh: Any
) -> dict[str, Any]:
  import jax
  from jax.experimental import mesh_utils

  auto = jax.sharding.AxisType.Auto
  sizes, names, types = mesh or ((chosen.devices,), ("device",), (auto,))
  devices = mesh_utils.create_device_mesh(
    sizes, _topology(chosen).devices, allow_split_physical_axes=True
  )
  laid = jax.sharding.Mesh(devices, names, axis_types=types)
  leaves, treedef = jax.tree.flatten(arguments)
  placed = treedef.unflatten(
    leaf.update(sharding=jax.sharding.NamedSharding(laid, spec))
    for leaf, spec in zip(leaves, specs, strict=True)
  )
  jitted = function if hasattr(function, "trace") else jax.jit(function)
  with jax.set_mesh(laid):
    compiled = jitted.trace(*placed).lower(lowering_platforms=(chosen.platform,)).compile()
  memory = compiled.memory_analysis()
  flops = (compiled.cost_analysis() or {}).get("flops")
  if flops is None:
    flops = _flops(function, treedef, leaves, specs, laid.abstract_mesh)
  collectives: dict[str, int] = {}
  for kind in _COLLECTIVE.findall(compiled.as_text()):
    collectives[kind] = collectives.get(kind, 0) + 1
  return {
    "error": None,
    "argument_bytes": memory.argument_size_in_bytes,
    "output_bytes": memory.output_size_in_bytes,
    "temp_bytes": memory.temp_size_in_bytes,
    "alias_bytes": memory.alias_size_in_bytes,
    "flops": flops,
    "collectives": collectives,
  }


def _flops(
  function: Callable[..., Any], treedef: Any, leaves: list[Any], specs: list[Any], mesh: Any
) -> float | None:
  """FLOPs of one device, counted in the program lowered for the CPU: XLA:GPU reports none."""
  import jax

  mesh = jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)
  arguments = treedef.unflatten(
    leaf.update(sharding=jax.sharding.NamedSharding(mesh, spec))
    for leaf, spec in zip(leaves, specs, strict=True)
  )
  # Without the options of its jit: output shardings by PartitionSpec want devices.
  jitted = jax.jit(getattr(function, "__wrapped__", function))
  try:
    with jax.sharding.use_abstract_mesh(mesh):
      lowered = jitted.trace(*arguments).lower(lowering_platforms=("cpu",))
    return lowered.cost_analysis()["flops"] / mesh.size
  except Exception:  # a kernel that exists for the GPU alone has no CPU lowering
    return None
