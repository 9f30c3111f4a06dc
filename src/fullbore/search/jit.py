"""Compiles the kernels of the search with numba, which keeps them on disk between runs.

Numba compiles a kernel anew when the file that it stands in has changed, and does not see that
another one has which it calls. So each kernel gets a cell of closure with a digest of all files of
this package: numba takes those into account.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import CellType, FunctionType
from typing import TypeVar, cast

import numba

__all__ = ["kernel"]

_Function = TypeVar("_Function", bound=Callable[..., object])


def _digest() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


_SOURCES = CellType(_digest())


def kernel(function: _Function) -> _Function:
    """The function as machine code, compiled when it is first called with these types."""
    plain = cast(FunctionType, function)
    assert plain.__closure__ is None
    marked = FunctionType(
        plain.__code__.replace(co_freevars=("sources",)),
        plain.__globals__,
        plain.__name__,
        plain.__defaults__,
        (_SOURCES,),
    )
    try:
        compiled: object = numba.njit(cache=True)(marked)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written to
        compiled = numba.njit(marked)
    return cast(_Function, compiled)
