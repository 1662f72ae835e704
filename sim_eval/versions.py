"""Which version an env is, and its simulator: results of two of them are not of one run."""

from __future__ import annotations

from importlib import metadata

from omni_loop.env import Env

_OURS = "omni_loop"
OF = "version."  # of a fingerprint's entries: before the name of a package
_NO_MATTER = frozenset({"python"})  # of what a worker says: it decides nothing that the packages leave open


def simulator(env: Env) -> dict[str, str]:
    """Entries of a fingerprint for the packages that decide what happens in ``env``; none where it names none."""
    named = getattr(env, "versions", None) or {}
    return {f"{OF}{name}": str(version) for name, version in named.items() if name not in _NO_MATTER}


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
