"""Where arrays live on many devices: one mesh, and rules from path patterns to PartitionSpecs.

The mesh has two axes. Batches are split over `data`, and so are parameters and optimiser state
(fully sharded data parallelism: each is gathered where it is used). Matrix products are split over
`model` (tensor parallelism). The same program runs on one device, where the mesh is 1 x 1, on the
devices of one process, and on those of many processes.

Rules are pairs of a regular expression and a PartitionSpec. The first expression found in the path
of a leaf (`layers/query`, `opt_state/1/mu/layers/query`) decides; so rules that end in `$` match
the parameters and what optax keeps for each of them. An example, with `init` and `update` of a
model:

  rules = ((r"(^|/)kernel$", P("data", "model")), (r"(^|/)bias$", P()))
  with jax.set_mesh(sharding.mesh(model=2)):
    state = sharding.init_sharded(init, jax.random.key(0), rules=rules)
    for rows in batches:
      state, metrics = jax.jit(update)(state, sharding.place_rows(rows))

Several processes: each calls `initialise_distributed` before anything else of JAX, and loads the
rows that `row_share` gives it.
"""

import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

AXES = ("data", "model")
Rules = Sequence[tuple[str, PartitionSpec]]
_AUTO = (AxisType.Auto,) * len(AXES)


def mesh(
  data: int | None = None, model: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """A mesh of `data` x `model` devices, laid out so that neighbours on the mesh are near.

  Args:
    data: devices on the axis `data`; all that `model` leaves when None.
    model: devices on the axis `model`.
    devices: which devices; all of all processes when None.
  Raises:
    ValueError: the axes do not multiply to the number of devices.
  """
  from jax.experimental import mesh_utils

  devices = jax.devices() if devices is None else devices
  if data is None:
    data = max(len(devices) // max(model, 1), 1)
  if min(data, model) < 1 or data * model != len(devices):
    raise ValueError(
      f"data is {data} and model is {model}, but there are {len(devices)} devices; "
      "choose axes whose product is the number of devices"
    )
  laid = mesh_utils.create_device_mesh((data, model), devices, allow_split_physical_axes=True)
  return Mesh(laid, AXES, axis_types=_AUTO)


def abstract_mesh(data: int, model: int = 1) -> AbstractMesh:
  """The shape of a mesh whose devices this process does not have, to compile for."""
  return AbstractMesh((data, model), AXES, axis_types=_AUTO)


def specs(
  tree: Any, rules: Rules, mesh: Mesh | AbstractMesh | None = None, *, strict: bool = True
) -> Any:
  """The PartitionSpec of every leaf, by the first rule whose expression is found in its path.

  Args:
    tree: any pytree of arrays or `jax.ShapeDtypeStruct`s. Scalars are replicated without a rule.
    rules: pairs of regular expression and spec. Axes that the mesh lacks, or on which it has one
      device, count as None.
    mesh: the mesh; the one that is set when None.
    strict: a dimension that the devices of its axes do not divide is an error; else it is left
      whole.
  Returns:
    The same tree of PartitionSpecs.
  Raises:
    ValueError: a leaf matches no rule, has fewer dimensions than its spec, or does not divide.
  """
  mesh = _set_mesh(abstract=True) if mesh is None else mesh
  leaves, treedef = jax.tree.flatten_with_path(tree)
  return treedef.unflatten(_spec(path, leaf, rules, mesh, strict) for path, leaf in leaves)


def shardings(
  tree: Any, rules: Rules, mesh: Mesh | AbstractMesh | None = None, *, strict: bool = True
) -> Any:
  """`NamedSharding`s of every leaf; arguments and errors as for `specs`."""
  mesh = _set_mesh(abstract=True) if mesh is None else mesh
  found = specs(tree, rules, mesh, strict=strict)
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), found)


def init_sharded(
  function: Callable[..., Any], *arguments: Any, rules: Rules, strict: bool = True
) -> Any:
  """`function(*arguments)` made where it belongs: no device ever holds more than its part.

  Args:
    function: pure, e.g. from a random key to the parameters and optimiser state.
    *arguments: its arguments.
    rules, strict: as for `specs`.
  Returns:
    The result, sharded over the mesh that is set. Its numbers do not depend on the mesh.
  """
  laid = shardings(jax.eval_shape(function, *arguments), rules, _set_mesh(), strict=strict)
  return jax.jit(function, out_shardings=laid)(*arguments)


def constrain(x: Array, *axes: Any) -> Array:
  """Fixes how `x` is laid over the mesh that is set; does nothing when none is set.

  Args:
    x: an array inside a jitted function.
    *axes: for each dimension the name of a mesh axis, or None; names that the mesh lacks count as
      None.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  spec = PartitionSpec(*(a if a in mesh.axis_names else None for a in axes))
  return jax.lax.with_sharding_constraint(x, spec)


def constrain_tree(tree: Any, rules: Rules, *, strict: bool = True) -> Any:
  """`constrain` for every leaf of a pytree by rules; a training step ends with it.

  So the state keeps its layout from step to step, whatever layout the compiler finds cheapest for
  the last operation.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return tree
  return jax.lax.with_sharding_constraint(tree, specs(tree, rules, strict=strict))


def row_share(mesh: Mesh | None = None) -> tuple[int, int]:
  """Which part of the rows of every batch this process loads.

  Processes whose devices differ on the axis `model` only hold the same rows, and load the same.

  Returns:
    Index of the part, and number of parts: of `n` rows, those from `index * n / parts` on.
  Raises:
    ValueError: the rows of this process are no such part.
  """
  mesh = _set_mesh() if mesh is None else mesh
  column = NamedSharding(mesh, PartitionSpec("data"))
  size = mesh.shape["data"]
  held = {i.start or 0 for (i,) in column.addressable_devices_indices_map((size,)).values()}
  index, offset = divmod(min(held), len(held))
  if size % len(held) or offset or max(held) - min(held) + 1 != len(held):
    raise ValueError(
      f"process {jax.process_index()} holds rows {sorted(held)} of {size} on the axis data; choose "
      "a mesh in which the devices of one process are neighbours on it"
    )
  return index, size // len(held)


def place_rows(local: Any, mesh: Mesh | None = None) -> Any:
  """Puts a batch on the mesh, each process giving its own share of the rows.

  Args:
    local: pytree of numpy arrays with this process's rows first, as `row_share` counts them.
    mesh: the mesh; the one that is set when None.
  Returns:
    The same pytree of arrays of all rows, split over `data`.
  Raises:
    ValueError: the devices do not divide the rows.
  """
  mesh = _set_mesh() if mesh is None else mesh
  column = NamedSharding(mesh, PartitionSpec("data"))
  parts = row_share(mesh)[1]
  here = mesh.shape["data"] // parts

  def place(path: Any, rows: Any) -> Array:
    rows = np.asarray(rows)
    if rows.ndim < 1 or rows.shape[0] % here:
      raise ValueError(
        f"batch leaf {_name(path)} has shape {rows.shape}; its first dimension must be a multiple "
        f"of {here}, the devices that this process has on the axis data"
      )
    return jax.make_array_from_process_local_data(
      column, rows, (rows.shape[0] * parts, *rows.shape[1:])
    )

  return jax.tree.map_with_path(place, local)


def initialise_distributed(heartbeat_seconds: int = 100) -> None:
  """Joins the processes of this job; call it before anything that touches a device.

  Slurm (`srun`), GKE with TPUs, TPU VMs and Open MPI are recognised by `jax.distributed`. Elsewhere
  set JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.

  Args:
    heartbeat_seconds: a process that is silent for this long counts as dead, which stops the rest.
  Raises:
    ValueError: no cluster was recognised, or one of these variables is missing or is no number.
  """
  counts: dict[str, int | None] = {"JAX_NUM_PROCESSES": None, "JAX_PROCESS_ID": None}
  if "JAX_COORDINATOR_ADDRESS" in os.environ:
    for name in counts:
      if not os.environ.get(name, "").isdigit():
        raise ValueError(
          f"{name} is {os.environ.get(name)!r}; with JAX_COORDINATOR_ADDRESS it must be a number"
        )
      counts[name] = int(os.environ[name])
  # It would catch SIGTERM before `foliax.training.loop.fit` can.
  jax.config.update("jax_enable_preemption_service", False)
  try:
    jax.distributed.initialize(
      num_processes=counts["JAX_NUM_PROCESSES"],
      process_id=counts["JAX_PROCESS_ID"],
      heartbeat_timeout_seconds=heartbeat_seconds,
    )
  except ValueError as error:
    raise ValueError(
      f"no cluster recognised ({error}); run under srun, GKE or on a TPU VM, or set "
      "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
    ) from error


def _set_mesh(abstract: bool = False) -> Any:
  """The mesh that is set; inside a traced function only its abstract form may be asked for."""
  mesh = jax.sharding.get_abstract_mesh() if abstract else jax.sharding.get_mesh()
  if mesh.empty:
    raise ValueError("no mesh is set; pass one, or enter `with jax.set_mesh(mesh(...)):`")
  return mesh


def _spec(
  path: Any, leaf: Any, rules: Rules, mesh: Mesh | AbstractMesh, strict: bool
) -> PartitionSpec:
  shape, name = np.shape(leaf), _name(path)
  if not shape:
    return PartitionSpec()
  rule = next((spec for pattern, spec in rules if re.search(pattern, name)), None)
  if rule is None:
    raise ValueError(
      f"leaf {name} of shape {shape} matches no sharding rule; add one, such as "
      f"({name.rpartition('/')[2] + '$'!r}, PartitionSpec()) to replicate it"
    )
  if len(rule) > len(shape):
    raise ValueError(
      f"leaf {name} of shape {shape} has fewer dimensions than its rule {rule}; put a rule that "
      "fits before it"
    )
  axes = []
  for i, entry in enumerate(rule):
    named = (entry,) if isinstance(entry, str) else tuple(entry or ())
    # As the compiler writes the layouts of its results: else the second step compiles again.
    named = tuple(axis for axis in named if mesh.shape.get(axis, 1) > 1)
    devices = math.prod(mesh.shape[axis] for axis in named)
    if shape[i] % devices:
      if strict:
        raise ValueError(
          f"leaf {name} of shape {shape}: the {devices} devices of mesh axis {'+'.join(named)} do "
          f"not divide dimension {i} of size {shape[i]}; choose sizes that do, or strict=False to "
          "leave it whole"
        )
      named = ()
    axes.append(named[0] if len(named) == 1 else named or None)
  while axes and axes[-1] is None:
    axes.pop()
  return PartitionSpec(*axes)


def _name(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")
