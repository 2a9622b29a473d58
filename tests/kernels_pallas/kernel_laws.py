"""What must hold for every kernel, whatever it computes.

A test file subclasses `KernelLaws` and says three things: how to call the operation, how to make
arguments of given sizes, and how close the forms must be. It inherits the tests:

- each kernel, in the simulator of its platform, equals the XLA form on ragged sizes and all dtypes;
- the gradient of the XLA form is that of finite differences, and that of the kernels is its own;
- vmap is a loop, jit and shard_map change nothing, arguments that mean the same give the same
  result (padding, ties), hostile arguments never give NaN;
- one traced program takes the kernel on TPU and GPU and none on CPU;
- a kernel reads no memory that another thread or copy may be writing;
- the compilers of the targets accept it and stay within the limits of its `compile_cases`.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foliax.kernels_pallas.dispatch import GPU_KERNELS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.test_util import check_grads

if GPU_KERNELS:
  from jax.experimental.pallas import mosaic_gpu as plgpu

FORMS = (
  "tpu",
  pytest.param(
    "gpu",
    marks=pytest.mark.skipif(not GPU_KERNELS, reason="Mosaic GPU kernels exist from jax 0.11 on"),
  ),
)
RACE = "RACE DETECTED"  # what the simulators print


def simulator(form: str, **parameters: Any) -> Any:
  """Parameters that run the `"tpu"` or `"gpu"` form on a CPU."""
  if form == "tpu":
    return pltpu.InterpretParams(**parameters)
  return plgpu.InterpretGPUParams(**parameters)


def _settings(examples: int) -> Callable:
  # An example costs seconds of tracing. The same examples every time: a failure can be repeated.
  return settings(
    max_examples=examples,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
  )


class Twin(NamedTuple):
  """Arguments that must give the same result as the ones they were made from."""

  name: str
  arguments: tuple
  project: Callable[[Any], Any] = lambda result: result


class KernelLaws:
  """Subclass it with a name that starts with `Test`. See the module's docstring.

  Attributes:
    module: the kernel's module, which has `compile_cases`.
    operation: name of its public function.
    sizes: name of each axis to its least and greatest size in the fast tests; the slow ones go to
      twice that. A simulator takes about a millisecond for each load that a kernel makes.
    small: sizes for the laws that call the kernel many times, multiples of nothing.
    streaming: sizes that take several steps along every axis of the kernel's grid and loops.
    edges: sizes to try always: tile borders, one more and one less, ones and zeros.
    dtypes: dtypes of the arguments.
    tolerance: dtype to relative and absolute tolerance between a kernel and the XLA form.
    differentiable: positions of the arguments that have gradients.
    batches: values of `in_axes` to try under vmap.
  """

  module: Any
  operation: str
  sizes: dict[str, tuple[int, int]]
  small: dict[str, int]
  streaming: dict[str, int]
  edges: tuple[dict[str, int], ...] = ()
  dtypes: tuple = (jnp.float32, jnp.bfloat16)
  tolerance: dict = {jnp.float32: 1e-6, jnp.bfloat16: 1e-6}  # noqa: RUF012
  differentiable: tuple[int, ...] = (0,)
  batches: tuple = (0,)

  def arguments(self, random: np.random.Generator, dtype: Any, **sizes: int) -> tuple:
    """Arguments of the operation."""
    raise NotImplementedError

  def twins(self, random: np.random.Generator, *arguments: Any) -> Iterator[Twin]:
    """Arguments whose results must be bitwise those of `arguments`: padding, ties."""
    yield from ()

  def hostile(self, random: np.random.Generator, *arguments: Any) -> Iterator[tuple]:
    """Arguments with NaN, infinities or nothing in them, whose results are defined."""
    yield from ()

  # ---- how the laws call the operation

  def call(self, *arguments: Any, **options: Any) -> Any:
    return getattr(self.module, self.operation)(*arguments, **options)

  def xla(self, *arguments: Any) -> Any:
    return self.call(*arguments, implementation="xla")

  def kernel(self, form: str, **parameters: Any) -> Callable:
    options = {"implementation": "pallas", "interpret": simulator(form, **parameters)}
    return functools.partial(self.call, **options)

  def typical(self, seed: int = 0, dtype: Any = jnp.float32) -> tuple:
    """Arguments of the small size."""
    return self.arguments(np.random.default_rng(seed), dtype, **self.small)

  def loss(self, function: Callable, weights_seed: int = 5) -> Callable:
    """The result as one number, every float in it weighted differently."""

    def scalar(*arguments):
      random = np.random.default_rng(weights_seed)
      floats = [x for x in jax.tree.leaves(function(*arguments)) if _is_float(x)]
      return sum(jnp.sum(x * random.uniform(-1, 1, x.shape).astype(x.dtype)) for x in floats)

    return scalar

  def assert_forms_agree(self, form: str, arguments: tuple, dtype: Any) -> None:
    _assert_close(self.kernel(form)(*arguments), self.xla(*arguments), self.tolerance[dtype])

  # ---- the laws

  def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
    if "compile_index" in metafunc.fixturenames:
      cases = self.module.compile_cases()
      pairs = [(i, target) for i, case in enumerate(cases) for target in case.targets]
      # The first case is the operation itself; gradients and other sizes can wait for CI.
      marks = [[pytest.mark.slow] if i else [] for i, _ in pairs]
      metafunc.parametrize(
        ("compile_index", "target"),
        [pytest.param(*pair, marks=mark) for pair, mark in zip(pairs, marks, strict=True)],
        ids=[f"{cases[i].name}-{target}".replace(" ", "-") for i, target in pairs],
      )
    if "edge" in metafunc.fixturenames:
      ids = ["-".join(f"{k}{v}" for k, v in edge.items()) for edge in self.edges]
      metafunc.parametrize("edge", self.edges, ids=ids)

  @pytest.mark.parametrize("form", FORMS)
  def test_kernel_equals_xla_form_at_tile_borders(self, form, edge):
    arguments = self.arguments(np.random.default_rng(1), self.dtypes[0], **edge)
    self.assert_forms_agree(form, arguments, self.dtypes[0])

  @pytest.mark.parametrize("form", FORMS)
  @given(data=st.data())
  @_settings(examples=3)
  def test_kernel_equals_xla_form_on_ragged_sizes(self, form, data):
    self._check_ragged(form, data, 1)

  @pytest.mark.slow
  @pytest.mark.parametrize("form", FORMS)
  @given(data=st.data())
  @_settings(examples=10)
  def test_kernel_equals_xla_form_on_many_ragged_sizes(self, form, data):
    self._check_ragged(form, data, 2)

  def _check_ragged(self, form, data, scale):
    sizes = {
      name: data.draw(st.integers(low, scale * high), name)
      for name, (low, high) in self.sizes.items()
    }
    dtype = data.draw(st.sampled_from(self.dtypes), "dtype")
    random = np.random.default_rng(data.draw(st.integers(0, 999), "seed"))
    self.assert_forms_agree(form, self.arguments(random, dtype, **sizes), dtype)

  def test_gradient_is_that_of_finite_differences(self):
    with jax.enable_x64(True):
      arguments = list(self.typical(dtype=jnp.float64))
      chosen = tuple(arguments[i] for i in self.differentiable)

      def function(*values):
        full = list(arguments)
        for i, value in zip(self.differentiable, values, strict=True):
          full[i] = jax.tree.map(jnp.asarray, value)
        return self.loss(self.xla)(*full)

      check_grads(function, chosen, order=1, modes=["rev"], eps=1e-6, atol=1e-6, rtol=1e-6)

  @pytest.mark.parametrize("form", FORMS)
  def test_kernel_and_xla_form_have_the_same_gradient(self, form):
    arguments = self.typical()
    gradient = lambda f: jax.grad(self.loss(f), self.differentiable)(*arguments)
    got, want = gradient(self.kernel(form)), gradient(self.xla)
    assert all(jnp.any(x != 0) for x in jax.tree.leaves(want))
    _assert_close(got, want, 10 * self.tolerance[jnp.float32])

  @pytest.mark.parametrize("form", ["xla", *FORMS])
  def test_vmap_is_a_loop(self, form):
    self._check_vmap(form, self.batches[:1] if form != "xla" else self.batches)

  @pytest.mark.slow
  @pytest.mark.parametrize("form", FORMS)
  def test_vmap_over_some_arguments_is_a_loop(self, form):
    self._check_vmap(form, self.batches[1:])

  def _check_vmap(self, form, batches):
    function = self.xla if form == "xla" else self.kernel(form)
    members = [self.typical(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *members)
    for in_axes in batches:
      axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(stacked)
      pick = lambda i, axes=axes: [
        jax.tree.map(lambda x, a=a: x[0 if a is None else i], s)
        for s, a in zip(stacked, axes, strict=True)
      ]
      batched = [
        jax.tree.map(lambda x: x[0], s) if a is None else s
        for s, a in zip(stacked, axes, strict=True)
      ]
      got = jax.vmap(function, axes)(*batched)
      want = jax.tree.map(lambda *xs: jnp.stack(xs), *[function(*pick(i)) for i in range(3)])
      _assert_close(got, want, self.tolerance[jnp.float32])

  def test_vmap_of_the_gradient_is_a_loop(self):
    gradient = jax.grad(self.loss(self.xla), self.differentiable)
    members = [self.typical(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *members)
    want = jax.tree.map(lambda *xs: jnp.stack(xs), *[gradient(*m) for m in members])
    _assert_close(jax.vmap(gradient)(*stacked), want, 10 * self.tolerance[jnp.float32])

  def test_shard_map_changes_nothing(self):
    # Without an implementation named, all forms are traced and their types compared.
    self._check_shard_map(self.call)

  @pytest.mark.slow
  @pytest.mark.parametrize("form", FORMS)
  def test_shard_map_changes_no_kernel(self, form):
    self._check_shard_map(self.kernel(form))

  def _check_shard_map(self, function):
    """On a mesh of one device, which is enough to ask along which axes arrays vary."""
    arguments = self.typical()
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.PartitionSpec("x")
    member = lambda *xs: function(*jax.tree.map(lambda x: x[0], xs))
    gradient = jax.grad(self.loss(member), self.differentiable)

    def both(*xs):
      return jax.tree.map(lambda x: x[None], member(*xs)), gradient(*xs)

    stacked = jax.tree.map(lambda x: x[None], arguments)
    result, slopes = jax.shard_map(both, mesh=mesh, in_specs=split, out_specs=split)(*stacked)
    _assert_close(jax.tree.map(lambda x: x[0], result), function(*arguments), 1e-6)
    _assert_close(slopes, gradient(*stacked), 1e-5)

  @pytest.mark.parametrize("form", ["xla", *FORMS])
  def test_jit_changes_nothing(self, form):
    function = self.xla if form == "xla" else self.kernel(form)
    arguments = self.typical()
    _assert_close(jax.jit(function)(*arguments), function(*arguments), 1e-6)

  @pytest.mark.parametrize("form", ["xla", *FORMS])
  def test_arguments_that_mean_the_same_give_the_same_result(self, form):
    function = self.xla if form == "xla" else self.kernel(form)
    arguments = self.typical()
    want = function(*arguments)
    for twin in self.twins(np.random.default_rng(2), *arguments):
      got = twin.project(function(*twin.arguments))
      for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=twin.name)

  @pytest.mark.parametrize("form", ["xla", *FORMS])
  def test_hostile_arguments_never_give_nan(self, form):
    function = self.xla if form == "xla" else self.kernel(form)
    for arguments in self.hostile(np.random.default_rng(3), *self.typical()):
      got = function(*arguments)
      assert not any(jnp.isnan(x).any() for x in jax.tree.leaves(got) if _is_float(x))
      _assert_close(got, self.xla(*arguments), self.tolerance[jnp.float32])
      # The gradient's rule is shared by all forms.
      if form == "xla":
        gradients = jax.grad(self.loss(_finite(function)), self.differentiable)(*arguments)
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradients))

  @pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
  def test_one_traced_program_takes_the_form_of_its_platform(self, platform):
    if platform == "cuda" and not GPU_KERNELS:
      pytest.skip("Mosaic GPU kernels exist from jax 0.11 on")
    case = self.module.compile_cases()[0]
    device = contextlib.nullcontext()
    if platform == "cuda":
      gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
      mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=gpu)
      device = jax.sharding.use_abstract_mesh(mesh)
    with device:
      traced = jax.jit(case.function).trace(*case.arguments)
      text = traced.lower(lowering_platforms=(platform,)).as_text()
    found = {name for name in ("tpu_custom_call", "mosaic_gpu") if name in text}
    want = {"cpu": set(), "tpu": {"tpu_custom_call"}, "cuda": {"mosaic_gpu"}}
    assert found == want[platform]

  def test_unknown_implementation_is_refused(self):
    with pytest.raises(ValueError, match="'xla', 'pallas' and None"):
      self.call(*self.typical(), implementation="triton")

  def test_kernel_on_cpu_without_simulator_is_refused(self):
    with pytest.raises(ValueError, match="pass None or 'xla'"):
      self.call(*self.typical(), implementation="pallas")

  @pytest.mark.slow
  @pytest.mark.parametrize("form", FORMS)
  def test_kernel_equals_xla_form_over_several_tiles(self, form):
    arguments = self.arguments(np.random.default_rng(4), self.dtypes[0], **self.streaming)
    self.assert_forms_agree(form, arguments, self.dtypes[0])

  @pytest.mark.slow
  @pytest.mark.parametrize("form", FORMS)
  def test_kernel_has_no_race(self, form, capfd):
    arguments = self.arguments(np.random.default_rng(4), jnp.float32, **self.streaming)
    jax.block_until_ready(self.kernel(form, detect_races=True)(*arguments))
    assert RACE not in "".join(capfd.readouterr())

  @pytest.mark.preflight
  def test_compiles_within_limits(self, compile_index, target):
    preflight = pytest.importorskip("foliax.training.preflight")
    if missing := preflight.missing_compiler(target):
      pytest.skip(missing)
    case = self.module.compile_cases()[compile_index]
    report = preflight.preflight(case.function, case.arguments, target, limits=case.limits)
    assert report.ok, report.error

  def test_docstring_states_cost_and_roofline(self):
    text = inspect.getdoc(self.module)
    assert all(word in text for word in ("FLOP", "byte", "roof"))


def _is_float(x: Any) -> bool:
  return jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)


def _finite(function: Callable) -> Callable:
  """The function without its infinite results, so that a sum over them has a gradient."""
  clean = lambda x: jnp.where(jnp.isfinite(x), x, 0) if _is_float(x) else x
  return lambda *arguments: jax.tree.map(clean, function(*arguments))


def _assert_close(got: Any, want: Any, tolerance: float) -> None:
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=False)
