"""Rules put leaves where they say, and how arrays are laid over devices changes no loss."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from foliax.experiments import decoder
from foliax.language import model
from foliax.training import sharding
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

MESH = sharding.abstract_mesh(4, 2)
PARAMS = {
  "layers": {"query": jnp.zeros((3, 8, 4)), "norm": jnp.zeros((3, 8))},
  "embedding": jnp.zeros((16, 8)),
}
RULES = (
  (r"(^|/)query$", P(None, "data", "model")),
  (r"(^|/)embedding$", P("model", "data")),
  (r"norm$", P()),
)


def test_first_rule_that_matches_the_path_decides():
  found = sharding.specs(PARAMS, ((r"layers/query", P("data")), *RULES), MESH, strict=False)
  assert found == {
    "layers": {"query": P(), "norm": P()},
    "embedding": P("model", "data"),
  }


def test_optimiser_state_is_laid_out_as_the_parameters_it_mirrors():
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  found = sharding.specs(jax.eval_shape(optimizer.init, PARAMS), RULES, MESH)
  adam = found[1][0]
  assert adam.mu == adam.nu == sharding.specs(PARAMS, RULES, MESH)
  assert adam.count == P()


def test_scalars_need_no_rule_even_when_one_matches_their_name():
  tree = {"query": jnp.zeros(()), "step": 3, "key": jax.random.key(0)}
  assert set(jax.tree.leaves(sharding.specs(tree, RULES, MESH))) == {P()}


def test_axis_that_the_mesh_lacks_counts_as_none():
  mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
  assert sharding.specs(PARAMS, RULES, mesh)["embedding"] == P(None, "data")


@pytest.mark.parametrize(
  ("shape", "rules", "message"),
  [
    ((3, 6, 4), RULES, "leaf query of shape (3, 6, 4): the 4 devices of mesh axis data do not"),
    ((3, 8, 3), RULES, "divide dimension 2 of size 3"),
    ((4, 9), ((".", P(("data", "model"))),), "the 8 devices of mesh axis data+model"),
    ((3, 8), RULES, "fewer dimensions than its rule"),
    ((3, 8, 4), RULES[1:], "leaf query of shape (3, 8, 4) matches no sharding rule"),
  ],
)
def test_leaf_that_does_not_fit_its_rule_is_named(shape, rules, message):
  with pytest.raises(ValueError, match=r"leaf query") as caught:
    sharding.specs({"query": jnp.zeros(shape)}, rules, MESH)
  assert message in str(caught.value)
  assert "\n" not in str(caught.value)


def test_dimension_that_does_not_divide_is_left_whole_when_not_strict():
  found = sharding.specs({"query": jnp.zeros((3, 6, 4))}, RULES, MESH, strict=False)
  assert found == {"query": P(None, None, "model")}


@pytest.mark.parametrize("name", ["llama-1b", "qwen3-8b"])
@pytest.mark.parametrize(("data", "axis"), [(64, 4), (256, 1), (4, 2)])
def test_rules_of_the_decoder_split_every_matrix_over_the_whole_mesh(name, data, axis):
  shapes = model.shapes(decoder.MODELS[name])
  found = sharding.specs(shapes, model.SHARDING_RULES, sharding.abstract_mesh(data, axis))
  whole = {"data", "model"} if axis > 1 else {"data"}
  specs = jax.tree.leaves_with_path(found, is_leaf=lambda x: isinstance(x, P))
  matrices = [spec for path, spec in specs if not path[-1].key.endswith("norm")]
  assert len(matrices) >= 8
  assert all(set(spec) - {None} == whole for spec in matrices)


def test_mesh_axes_must_multiply_to_the_devices():
  assert dict(sharding.mesh().shape) == {"data": jax.device_count(), "model": 1}
  with pytest.raises(ValueError, match=r"data is 3 and model is 2, but there are 1 devices"):
    sharding.mesh(3, 2, jax.devices()[:1])


def test_without_a_mesh_constraints_do_nothing_and_what_needs_one_says_so():
  x = jnp.ones((2, 2))
  assert sharding.constrain(x, "data", None) is x
  assert sharding.constrain_tree({"a": x}, ()) == {"a": x}
  with pytest.raises(ValueError, match=r"no mesh is set"):
    sharding.init_sharded(jnp.ones_like, x, rules=RULES)
  with pytest.raises(ValueError, match=r"no mesh is set"):
    sharding.place_rows(np.zeros(2))


def test_one_process_loads_all_rows_and_scalars_are_no_batch():
  mesh = sharding.mesh(devices=jax.devices()[:1])
  assert sharding.row_share(mesh) == (0, 1)
  placed = sharding.place_rows({"x": np.arange(6).reshape(3, 2)}, mesh)
  np.testing.assert_array_equal(placed["x"], np.arange(6).reshape(3, 2))
  with pytest.raises(ValueError, match=r"batch leaf x has shape \(\)"):
    sharding.place_rows({"x": np.int32(3)}, mesh)


@pytest.mark.parametrize(
  ("environment", "message"),
  [
    ({"JAX_COORDINATOR_ADDRESS": "localhost:1"}, "JAX_NUM_PROCESSES is None"),
    (
      {"JAX_COORDINATOR_ADDRESS": "localhost:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "x"},
      "JAX_PROCESS_ID is 'x'",
    ),
    ({}, "no cluster recognised"),
  ],
)
def test_process_that_cannot_join_says_what_to_set(environment, message, monkeypatch):
  for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_JOB_ID"):
    monkeypatch.delenv(name, raising=False)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)

  def outside(**options):  # what JAX says; called for real it must be the first thing of a process
    raise ValueError("coordinator_address should be defined.")

  monkeypatch.setattr(jax.distributed, "initialize", outside)
  with pytest.raises(ValueError, match=message):
    sharding.initialise_distributed()


def test_losses_do_not_depend_on_the_shape_of_the_mesh():
  child = pathlib.Path(__file__).with_name("sharding_child.py")
  done = subprocess.run(
    [sys.executable, str(child)],
    env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  one = found.pop("1x1")
  assert one["losses"][0] != one["losses"][-1]
  assert found.keys() == {"8x1", "4x2", "2x4", "1x8"}
  for shape, run in found.items():
    np.testing.assert_allclose(run["losses"], one["losses"], atol=1e-5, err_msg=shape)
    assert run["kept"], shape
    # jax 0.10 compiles some of them a second time, as it writes the layouts of results differently.
    assert run["compiled"] == 1 or jax.__version_info__ < (0, 11), shape
    assert run["parts"] == [8, 8, 8], shape
