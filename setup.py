"""Builds the native extension; everything else about the package is in pyproject.toml.

The extension is never optional: a machine that cannot compile it gets the compiler's error.
``SFT_IDX_SANITIZE=1`` builds it with address and undefined-behaviour sanitizers instead.
"""

import os
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ROOT = Path(__file__).parent
sanitize = os.environ.get("SFT_IDX_SANITIZE") == "1"
flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"] if sanitize else ["-O3"]

native = Pybind11Extension(
    "megatron_sft_idx._native",
    sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cc")),
    include_dirs=["csrc"],
    depends=sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.h")),
    cxx_std=17,
    extra_compile_args=["-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion", *flags],
    extra_link_args=flags[:1] if sanitize else [],
)
ParallelCompile("NPY_NUM_BUILD_JOBS", default=os.cpu_count() or 1).install()
setup(ext_modules=[native])
