"""Preflight against the real compilers of the preflight extra."""

import jax
import jax.numpy as jnp
import pytest
from foliax.training.preflight import preflight
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

pytestmark = [pytest.mark.preflight, pytest.mark.slow]

GPU = pytest.mark.preflight_gpu


def sharded_product(devices, axis_type=AxisType.Auto):
  """Rows of x over `data`, the contracted axis over `model`: the product needs a reduction."""
  mesh = AbstractMesh((devices // 2, 2), ("data", "model"), axis_types=(axis_type,) * 2)

  def struct(shape, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

  return struct((1024, 512), "data", "model"), struct((512, 256), "model", None)


def product(x, w):
  return jax.lax.with_sharding_constraint(x @ w, PartitionSpec("data", None))


@pytest.mark.parametrize(
  ("target", "devices"),
  [
    ("v5e-16", 16),
    ("v5p-32", 16),
    ("v6e-8", 8),
    ("tpu7x-16", 16),
    pytest.param("h200x8", 8, marks=GPU),
  ],
)
def test_sharded_product_reduces_once_and_each_device_holds_its_share(target, devices):
  report = preflight(product, sharded_product(devices), target)
  assert report.ok, report.error
  assert sum(report.collectives.values()) == 1
  assert set(report.collectives) <= {"all-reduce", "reduce-scatter"}
  # Devices hold x / devices and w / 2; the layout of a TPU may pad, here it has no reason to.
  assert report.argument_bytes == 4 * (1024 * 512 // devices + 512 * 256 // 2)
  # 2 m k n FLOPs over all devices, up to the additions of the reduction.
  assert report.flops * devices == pytest.approx(2 * 1024 * 512 * 256, rel=0.05)


@pytest.mark.parametrize("target", ["v5e-16", pytest.param("h200x8", marks=GPU)])
def test_shard_map_finds_the_mesh_of_the_slice(target):
  devices = 16 if target == "v5e-16" else 8
  mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))
  batch = jax.ShapeDtypeStruct(
    (64, 32), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data"))
  )

  def mean(x):
    one = jax.shard_map(
      lambda x: jax.lax.pmean(x.mean(0), "data"),
      in_specs=PartitionSpec("data"),
      out_specs=PartitionSpec(),
    )
    return one(x)

  report = preflight(mean, (batch,), target)
  assert report.ok, report.error
  assert report.collectives == {"all-reduce": 1}


@pytest.mark.parametrize("target", ["v5e-16", pytest.param("h200x8", marks=GPU)])
def test_sharded_train_step_gathers_parameters_and_reuses_donated_state(target):
  """Parameters split over both axes, batch over `data`, as in fully sharded training."""
  devices = 16 if target == "v5e-16" else 8
  mesh = AbstractMesh((devices // 2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

  def struct(shape, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

  params = {"w": struct((4, 512, 512), None, "data", "model")}
  specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)

  def step(params, x):
    def loss(params):
      h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])
      return (h**2).mean()

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

  jitted = jax.jit(step, donate_argnums=0, out_shardings=(specs, PartitionSpec()))
  report = preflight(jitted, (params, struct((256, 512), "data", None)), target)
  assert report.ok, report.error
  assert report.alias_bytes == 4 * 4 * 512 * 512 // devices
  assert report.collectives["all-gather"] > 0
  assert report.collectives["all-reduce"] + report.collectives.get("reduce-scatter", 0) > 0
  assert report.flops > 0


def test_donated_state_is_reused_not_doubled():
  state = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}

  def step(state):
    return {"w": state["w"] * 0.9}

  donated = preflight(jax.jit(step, donate_argnums=0), (state,), "v5e-1")
  kept = preflight(step, (state,), "v5e-1")
  assert donated.alias_bytes == 4 * 1024 * 1024
  assert kept.peak_bytes - donated.peak_bytes == 4 * 1024 * 1024


def test_program_that_does_not_fit_a_tpu_fails_with_the_compilers_words():
  matrix = jax.ShapeDtypeStruct((100_000, 100_000), jnp.float32)
  report = preflight(lambda x: x @ x, (matrix,), "v5e-1")
  assert not report.ok
  assert "RESOURCE_EXHAUSTED" in report.error


@GPU
def test_program_that_does_not_fit_a_gpu_fails_with_both_sizes():
  matrix = jax.ShapeDtypeStruct((200_000, 200_000), jnp.float32)
  report = preflight(lambda x: x @ x, (matrix,), "h200")
  assert not report.ok
  assert report.error == "needs 298 GiB a device, which has 141 GiB"


@pytest.mark.parametrize("target", ["v5e-1", "v5p-8", "v6e-1", "tpu7x-2"])
def test_every_tpu_generation_compiles_on_its_smallest_slice(target):
  report = preflight(jnp.sin, (jax.ShapeDtypeStruct((8, 128), jnp.float32),), target)
  assert report.ok, report.error


@GPU
@pytest.mark.parametrize("target", ["h100", "h200", "b200"])
def test_every_gpu_compiles_with_its_text_target(target):
  report = preflight(jnp.sin, (jax.ShapeDtypeStruct((8, 128), jnp.float32),), target)
  assert report.ok, report.error


def test_kernel_that_the_tpu_compiler_refuses_is_a_report():
  from jax.experimental import pallas as pl

  def kernel(x_ref, o_ref):
    o_ref[...] = jnp.sort(x_ref[...], axis=0)

  def sort(x):
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

  report = preflight(sort, (jax.ShapeDtypeStruct((128, 128), jnp.float32),), "v5e-1")
  assert not report.ok
  assert "sort" in report.error
  assert len(report.error.splitlines()) <= 12
