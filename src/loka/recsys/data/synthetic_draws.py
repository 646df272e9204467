"""Counter-based random draws: a draw is a function of (seed, purpose, counter), whatever is drawn beside it.

All integers are int64 arithmetic modulo 2**64, so draws are bitwise the same on every device. The mixer is
SplitMix64's finalizer (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; the
constants are Stafford's variant 13) over counter * golden ratio + key.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

__all__ = ["Zipf", "bits", "key_of", "mix64", "normals", "permutation", "unit_interval"]


def _signed(x: int) -> int:
    return (x & (2**64 - 1)) - (2**64 if x & 2**63 else 0)


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_STEP = _signed(0xD1B54A32D192ED03)
_C1 = _signed(0xBF58476D1CE4E5B9)
_C2 = _signed(0x94D049BB133111EB)


def key_of(seed: int, purpose: str) -> int:
    """A signed 64-bit key for one purpose; keys of different purposes are unrelated."""
    digest = hashlib.blake2b(f"{seed}:{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def mix64(x: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64 of any shape; a bijection of 64-bit words."""
    # An arithmetic shift fills with the sign; the mask makes it a logical one.
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _C1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _C2
    return x ^ ((x >> 31) & (2**33 - 1))


def bits(counter: Tensor, key: int, *, position: Tensor | None = None) -> Tensor:
    """64 random bits for each counter (or counter and position, broadcast); int64.

    Args:
        counter: int64, such as row numbers.
        key: From `key_of`.
        position: int64, a second counter, such as the place of an id in its row.
    """
    x = counter * _GOLDEN + key
    return mix64(x if position is None else x + position * _STEP)


def unit_interval(random: Tensor) -> Tensor:
    """Bits -> float64 in [0, 1), the top 53 bits."""
    return ((random >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53


def normals(random: Tensor) -> tuple[Tensor, Tensor]:
    """Bits -> two independent standard normal draws each, float64, |z| < 6.8 (Box and Muller 1958)."""
    u = ((random >> 32).to(torch.float64) + (2.0**31 + 0.5)) * 2.0**-32
    angle = (random & (2**32 - 1)).to(torch.float64) * (2 * math.pi * 2.0**-32)
    radius = torch.sqrt(-2 * torch.log(u))
    return radius * torch.cos(angle), radius * torch.sin(angle)


def permutation(n: int, key: int) -> Tensor:
    """A fixed random permutation of 0 .. n - 1, int64 [n], on the CPU."""
    return torch.argsort(bits(torch.arange(n), key), stable=True)


class Zipf:
    """Ranks 0 .. n - 1, probability proportional to 1 / (rank + shift) ** alpha, from 32 bits a draw.

    Probabilities are rounded to multiples of 2**-32 once, on the CPU in float64; a draw is a search in a
    table of int32, so that ranks are bitwise the same on every device.

    Args:
        n: Number of ranks.
        alpha: Exponent.
        shift: 1 for Zipf's law; larger flattens the head (Zipf-Mandelbrot).
    """

    def __init__(self, n: int, alpha: float, *, shift: float = 1.0) -> None:
        weight = (np.arange(n, dtype=np.float64) + shift) ** -alpha
        cumulative = np.cumsum(weight)[:-1] / weight.sum()
        self.n = n
        table = np.rint(cumulative * 2.0**32) - 2.0**31
        self.table = torch.from_numpy(np.minimum(table, 2.0**31 - 1).astype(np.int32))

    def ranks(self, random: Tensor) -> Tensor:
        """Ranks from the upper 32 bits of each word; int64 of the same shape."""
        draw = (random >> 32).to(torch.int32)
        return torch.searchsorted(self.table, draw, right=True)
