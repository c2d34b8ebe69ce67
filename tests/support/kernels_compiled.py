# SPDX-License-Identifier: Apache-2.0
"""A kernel down to machine code, without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any


def compiled(kernel: Any, kinds: dict[str, Any], constants: dict[str, Any], arch: int) -> Any:
    """The Triton kernel as it compiles for compute capability `arch` (90 is Hopper), which is its SM too.

    kinds: of its arguments, as Triton names them ("*bf16", "i32"); constants: its constexprs but SM. It has machine code, and
    waits for the kernel before it where launches may overlap: from Hopper on.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = constants | {"SM": arch}
    source = ASTSource(kernel, kinds | dict.fromkeys(known, "constexpr"), known)
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    assert len(result.asm["cubin"]) > 0
    assert ("griddepcontrol.wait" in result.asm["ptx"]) == (arch >= 90)
    return result


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
