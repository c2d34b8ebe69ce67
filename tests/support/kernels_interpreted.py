# SPDX-License-Identifier: Apache-2.0
"""A module of tests in Triton's interpreter, on a CPU."""

from __future__ import annotations

import functools
import importlib
import math
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest


def interpreted(module: str, *arguments: str) -> str:
    """What the module prints when it is executed in the interpreter, in a process of its own: Triton asks for it once, as it is
    imported. An error in the module is an error here. A module of checks (`interpret`) prints the name of each that has passed."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", __name__, module, *arguments], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=1000, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def interpret(checks: Sequence[Callable[[], None]]) -> None:
    """The checks, functions of one module of tests, one after the other in the interpreter."""
    names = [check.__name__ for check in checks]
    assert interpreted(checks[0].__module__, *names).split() == names


FILLED = 7.0


@contextmanager
def filled_memory() -> Iterator[None]:
    """What torch.empty gives holds FILLED everywhere, so that it is seen what a kernel leaves as it was."""
    import torch

    # torch lists the constructors that `with torch.device(...)` applies to when one is first entered: it must find the real one.
    with torch.device("cpu"):
        empty = torch.empty
        empty(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(FILLED))
        yield


def let_loops_begin_anywhere() -> None:
    """The interpreter's scalars are arrays of one element, which numpy no longer accepts as an integer, as a loop's bounds need."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patched


def patch_language_once() -> None:
    """Makes the interpreter (of Triton 3.6) two to three times as fast, with the same results.

    Inside a launch, the interpreter patches all of `triton.language` again at each call of a jitted function by another, though
    the launch has done so: more than half of its time. Patched modules are skipped here until the launch restores them.
    """
    from triton.runtime import interpreter

    language, patch = interpreter.tl, interpreter._patch_lang
    patched: set[int] = set()

    @functools.cache
    def modules_of(function: Any) -> set[int]:
        return {id(value) for value in function.__globals__.values() if value is language or value is language.core}

    class Launch(interpreter._LangPatchScope):
        """The scope of the outermost call: what it restores, the next launch patches again."""

        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch_once(function: Any) -> Any:
        modules = modules_of(function)
        if modules and modules <= patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        if not patched:
            launch = Launch()
            launch._changes, scope = scope._changes, launch
        patched.update(modules)
        return scope

    interpreter._patch_lang = patch_once


def lighten_types() -> None:
    """Makes the interpreter (of Triton 3.6) twice as fast, with the same results: what it computes for each value, and mostly never
    reads (the type of a shape, the name of a type, whether a sum of integers overflows) or has computed before (the shape of a
    type, its numpy dtype, the common type of two operands)."""
    import triton
    from triton.language import core
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.6."):
        return
    _lighten_shapes(core)
    _lighten_operands(core)
    numpy_dtype, dtypes = interpreter._get_np_dtype, dict[Any, Any]()

    def remembered(tt_dtype: Any) -> Any:
        if isinstance(tt_dtype, core.pointer_type):
            return numpy_dtype(tt_dtype)
        scalar = tt_dtype.scalar
        if isinstance(scalar, core.pointer_type):
            return numpy_dtype(scalar)
        if scalar not in dtypes:
            dtypes[scalar] = numpy_dtype(scalar)
        return dtypes[scalar]

    interpreter._get_np_dtype = remembered


def _lighten_shapes(core: Any) -> None:
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    blocks: dict[tuple[int, ...], tuple[Any, int]] = {}
    unwrap = core._unwrap_shape

    def type_of(values: Any) -> Any:
        if values.__dict__.get("_type") is None:
            values._type = core._type_for_tuple_values(values.values)
        return values._type

    def begin_tuple(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        self._type = type if type is None or isinstance(type, core.tuple_type) else core.tuple_type(type)

    def begin_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        known = shapes.get(sizes)
        if known is None:
            known = shapes[sizes] = core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known

    def unwrapped(shape: Any) -> list[int]:
        values = shape.values if isinstance(shape, core.tuple) else shape
        if isinstance(values, tuple | list) and all(type(size) is int for size in values):
            return list(values)
        result: list[int] = unwrap(shape)
        return result

    def begin_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(unwrapped(shape))
        known = blocks.get(sizes)
        if known is None:
            if not sizes:
                raise TypeError("0d block_type is forbidden")
            known = blocks[sizes] = core.tuple(sizes), core.validate_block_shape(sizes)
        self.element_ty = element_ty
        self.shape, self.numel = known

    core.tuple.__init__ = begin_tuple
    core.tuple.type = property(type_of, lambda self, type: setattr(self, "_type", type))
    core.tensor.__init__ = begin_tensor
    core._unwrap_shape = unwrapped
    core.block_type.__init__ = begin_block
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")


def _lighten_operands(core: Any) -> None:
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    computation_type, broadcast = TritonSemantic.computation_type_impl, TritonSemantic.broadcast_impl_value
    computation_types: dict[Any, Any] = {}

    def equal(self: Any, other: Any) -> bool:
        if isinstance(other, core.constexpr):
            other = other.value
        return self is other or (isinstance(other, core.dtype) and self.name == other.name)

    def remembered(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in computation_types:
            computation_types[key] = computation_type(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return computation_types[key]

    def broadcast_unless_alike(self: Any, left: Any, right: Any) -> Any:
        shapes = [operand.type.shape if operand.type.is_block() else None for operand in (left, right)]
        return (left, right) if shapes[0] is shapes[1] else broadcast(self, left, right)  # equal shapes are the same object

    def patch_attribute(thing: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = TritonSemantic(builder)

        def with_semantic(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(thing, name, with_semantic)

    core.dtype.__eq__ = equal
    TritonSemantic.computation_type_impl = remembered
    TritonSemantic.broadcast_impl_value = broadcast_unless_alike
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None  # what it finds is only told where `debug` is set, here never
    interpreter._patch_attr = patch_attribute


def fold_slices() -> None:
    """Makes reductions with a function of one's own as many times faster as there are results, with the same: the interpreter (of
    Triton 3.6) calls the function for each element, and here it is called for a whole slice, in the same order."""
    import numpy as np
    from triton.runtime import interpreter

    by_elements = interpreter.ReduceOps.generic_reduce

    def generic_reduce(self: Any, input: Any) -> Any:
        axis, values = self.axis, [arg.handle.data for arg in input]
        if axis is None or values[0].ndim < 2:
            return by_elements(self, input)

        def tensors(each: Any) -> tuple[Any, ...]:
            return tuple(self.to_tensor(data, arg.dtype) for data, arg in zip(each, input, strict=True))

        total = tensors(data.take(0, axis) for data in values)
        for place in range(1, values[0].shape[axis]):
            combined = self.combine_fn.fn(*total, *tensors(data.take(place, axis) for data in values))
            total = tensors(one.handle.data for one in (combined if isinstance(combined, tuple) else (combined,)))
        results = (one.handle.data for one in total)
        return list(tensors(np.expand_dims(data, axis) if self.keep_dims else data for data in results))

    interpreter.ReduceOps.generic_reduce = generic_reduce


def main() -> None:
    warnings.simplefilter("ignore")
    patch_language_once()
    lighten_types()
    fold_slices()
    sys.argv = sys.argv[1:]
    checks = [name for name in sys.argv[1:] if name.isidentifier()]
    if not checks:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    import torch

    torch.manual_seed(0)
    let_loops_begin_anywhere()
    module = importlib.import_module(sys.argv[0])
    for name in checks:
        getattr(module, name)()
        print(name)


if __name__ == "__main__":
    main()
