"""foliax: research methods as pure functions over pytrees, with experiments that could refute them.

Import what you need from where it lives, e.g. `from foliax.search import cgp`. Importing `foliax`
itself loads neither JAX nor any extra.
"""

__version__ = "0.1.0"
