"""Casts to FP8 in Triton: each operator reads its tensor as few times as the scales allow."""

from loka.kernels.triton.casts.blockwise import K_MAJOR, MN_MAJOR, MN_MAJOR_PAD4, cast_blockwise
from loka.kernels.triton.casts.outputs import FORMAT_NUMBER
from loka.kernels.triton.casts.rowwise import cast_columnwise, cast_rowwise
from loka.kernels.triton.casts.tensorwise import cast_tensorwise

__all__ = [
    "FORMAT_NUMBER",
    "K_MAJOR",
    "MN_MAJOR",
    "MN_MAJOR_PAD4",
    "cast_blockwise",
    "cast_columnwise",
    "cast_rowwise",
    "cast_tensorwise",
]
