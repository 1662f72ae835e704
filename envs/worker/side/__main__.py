"""``python -I side/__main__.py FD`` in another environment, ``python -m omni_loop_envs.worker.side FD`` in this one.

``FD`` is the number of the open socket to speak over.
"""

import sys


def _start() -> None:
    if __package__:
        from .server import main
    else:  # by path: the folder becomes a package, so that its modules are found, and shadow no one else's
        from importlib import import_module, util
        from pathlib import Path

        spec = util.spec_from_file_location("omni_loop_worker", Path(__file__).with_name("__init__.py"))
        if spec is None:
            raise SystemExit("the files of the worker are incomplete")
        sys.modules[spec.name] = util.module_from_spec(spec)
        main = import_module("omni_loop_worker.server").main
    main(int(sys.argv[1]))


if __name__ == "__main__":
    _start()
