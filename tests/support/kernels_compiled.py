# SPDX-License-Identifier: Apache-2.0
"""A kernel down to machine code, without a GPU.

    TRITON_CACHE_DIR=FOLDER python -m tests.support.kernels_compiled

compiles one kernel in several sizes, and prints a line for each: the size, whether the cache had it, and a digest of its code.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest


def gluon_compiles() -> bool:
    """Whether the kernels in Gluon compile with this Triton, which calls that language experimental."""
    import triton

    return str(triton.__version__).startswith(("3.6.", "3.7."))


def by_generation(variants: Sequence[Any], ways: Collection[Any], generations: Sequence[int] = (80, 90, 100)) -> list[Any]:
    """Parameters (variant, generation) of a test: all variants for Hopper, and for the generations before and after it those of
    `ways`, which together go all ways through the kernel. What else a variant changes (sizes, unrolled loops) is the same code for
    each generation."""
    assert set(ways) <= set(variants)
    chosen = [(variant, arch) for arch in generations for variant in variants if arch == 90 or variant in ways]
    return [pytest.param(variant, arch, id=f"{arch} {variant}") for variant, arch in chosen]


def compiled(kernel: Any, kinds: dict[str, Any], constants: dict[str, Any], arch: int) -> Any:
    """The Triton kernel as it compiles for compute capability `arch` (90 is Hopper), which is its SM too.

    kinds: of its arguments, as Triton names them ("*bf16", "i32"); constants: its constexprs but SM. It has machine code, and
    waits for the kernel before it where launches may overlap: from Hopper on.
    """
    result = compiled_as(kernel, kinds, constants | {"SM": arch}, arch)
    assert len(result.asm["cubin"]) > 0
    assert ("griddepcontrol.wait" in result.asm["ptx"]) == (arch >= 90)
    return result


def compiled_as(
    kernel: Any, kinds: dict[str, Any], constants: dict[str, Any], arch: int, *, aligned: Collection[str] = (), **options: Any
) -> Any:
    """As a launch compiles it. kinds: may name constants, too. aligned: the arguments that are multiples of 16, or addresses of
    such. options: of the launch (num_warps, num_stages, maxnreg)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in constants}
    make = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as make
    return triton.compile(make(kernel, signature, constants, attributes), target=GPUTarget("cuda", arch, 32), options=options)


def ordered(ptx: str) -> str:
    """The steps of a kernel with wgmma: W a GEMM's instruction, 0 and 1 a wait until so many GEMMs are under way, ? a wait at a
    barrier, a an arrival, e an exponential (those that follow one another as one)."""
    signs = {"wgmma.mma_async": "W", "wgmma.wait_group": "", "try_wait": "?", "mbarrier.arrive": "a", "ex2.approx": "e"}
    steps = ""
    for line in ptx.splitlines():
        for text, sign in signs.items():
            if text in line:
                step = sign or line.split()[-1].rstrip(";")
                steps += "" if step == "e" == steps[-1:] else step
    return steps


def spilled(kernel: Any) -> int:
    """Bytes of local memory of each thread of a compiled kernel."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60).stdout
    sizes = re.search(r"STACK:(\d+).*LOCAL:(\d+)", usage)
    assert sizes, usage
    return int(sizes[1]) + int(sizes[2])


SIZES = (256, 512, 1024)


def main() -> None:
    import triton

    from phalanx.kernels.ops.silu_and_mul import _silu_mul

    def listen(*, cache_hit: bool, **_: Any) -> None:
        cached.append(cache_hit)

    cached: list[bool] = []
    triton.knobs.compilation.listener = listen
    for size in SIZES:
        constants = {"BLOCK": size, "GELU": False, "rows": None, "columns": None}
        kernel = compiled(_silu_mul, {"gate_up": "*bf16", "width": "i32", "out": "*bf16"}, constants, 90)
        print(size, "cached" if cached[-1] else "compiled", hashlib.sha256(kernel.asm["cubin"]).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
