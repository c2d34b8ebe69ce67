# SPDX-License-Identifier: Apache-2.0
"""A kernel down to machine code, without a GPU."""

from __future__ import annotations

from typing import Any


def compiled(kernel: Any, kinds: dict[str, Any], constants: dict[str, Any], arch: int) -> Any:
    """The Triton kernel as it compiles for compute capability `arch` (90 is Hopper), which is its PTX too.

    kinds: of its arguments, as Triton names them ("*bf16", "i32"); constants: its constexprs but PTX. It has machine code, and
    waits for the kernel before it where launches may overlap: from Hopper on.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = constants | {"SM": arch}
    source = ASTSource(kernel, kinds | dict.fromkeys(known, "constexpr"), known)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    assert len(made.asm["cubin"]) > 0
    assert ("griddepcontrol.wait" in made.asm["ptx"]) == (arch >= 90)
    return made
