"""Which version of a simulator an env is: results of two of them are not of one run."""

from __future__ import annotations

from importlib import metadata

from omni_loop.env import Env

_OURS = "omni_loop"


def env_version(env: Env) -> str:
    """What ``env`` says of itself (``version``, if it has that), else the version of the package that brings it."""
    own = getattr(env, "version", None)
    if own:
        return f"{env.name} {own}"
    module = type(env).__module__.partition(".")[0]
    package = "omni-loop" if module.startswith(_OURS) else module
    try:
        return f"{env.name} of {package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:  # a module that nobody packaged
        return f"{env.name} of {module}"
