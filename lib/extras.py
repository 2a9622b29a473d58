"""Optional dependencies: one line that names the extra to install when one is missing."""

import importlib
import types


def require(module: str, extra: str) -> types.ModuleType:
  """Imports `module`, or says which extra of foliax brings it.

  Args:
    module: dotted name of the module to import, e.g. `"matplotlib.pyplot"`.
    extra: name of the extra of foliax that installs it, e.g. `"experiments"`.
  Returns:
    The imported module.
  Raises:
    ModuleNotFoundError: the package of `module` is not installed.
  """
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
      raise
    raise ModuleNotFoundError(
      f"{module} is not installed; it comes with: pip install 'foliax[{extra}]'", name=error.name
    ) from None
