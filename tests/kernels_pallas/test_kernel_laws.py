"""The laws of kernels can be broken, and then they say so."""

import jax
import jax.numpy as jnp
import pytest
from foliax.kernels_pallas.dispatch import GPU_KERNELS, dispatch, vary_alike
from kernel_laws import RACE, simulator


@pytest.mark.skipif(not GPU_KERNELS, reason="Mosaic GPU kernels exist from jax 0.11 on")
@pytest.mark.parametrize("ordered", [True, False])
def test_the_simulator_reports_a_copy_over_memory_that_was_just_read(ordered, capfd):
  from jax.experimental.pallas import mosaic_gpu as plgpu

  def body(x_ref, y_ref, scratch, arrived):
    total = jnp.float32(0)
    for row in range(2):
      if ordered:
        plgpu.commit_smem()
      plgpu.copy_gmem_to_smem(x_ref.at[row], scratch, arrived)
      plgpu.barrier_wait(arrived)
      total += scratch[3]
    y_ref[...] = jnp.full((128,), total)

  kernel = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
    scratch_types=[plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()],
    interpret=simulator("gpu", detect_races=True),
  )
  jax.block_until_ready(kernel(jnp.ones((2, 128))))
  assert (RACE in "".join(capfd.readouterr())) != ordered


def test_simulator_parameters_without_a_kernel_are_refused():
  forms = dict.fromkeys(("xla", "tpu", "gpu"), lambda x, **_: x)
  with pytest.raises(ValueError, match="implementation='pallas'"):
    dispatch(jnp.ones(2), **forms, interpret=simulator("tpu"))
  with pytest.raises(ValueError, match="interpret is True"):
    dispatch(jnp.ones(2), **forms, implementation="pallas", interpret=True)


def test_arrays_outside_of_shard_map_are_left_alone():
  x = jnp.ones(2)
  assert vary_alike({"x": x})["x"] is x
