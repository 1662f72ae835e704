"""The flat mapping: a top-level folder is imported under a name no other distribution uses.

Everything else about the package stands in pyproject.toml; this lists the packages, which setuptools cannot
find by itself under another name.
"""

from setuptools import find_packages, setup

FOLDERS = {
    "omni_loop": "omni_loop",
    "omni_loop_bench": "bench",
    "omni_loop_configs": "configs",
    "omni_loop_envs": "envs",
    "omni_loop_policies": "policies",
    "omni_loop_sim_eval": "sim_eval",
    "omni_loop_worlds": "worlds",
}

setup(
    package_dir=FOLDERS,
    packages=[
        name for top, folder in FOLDERS.items() for name in [top, *(f"{top}.{sub}" for sub in find_packages(folder))]
    ],
)
