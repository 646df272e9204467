"""Stable hashes of categorical tokens, vectorised.

An id must be the same in every process, on every machine and in every later version, because trained
embeddings are looked up by it. So the functions are spelled out here and depend on no library's hash:

- splitmix64: the finaliser of Steele, Lea and Flood, "Fast splittable pseudorandom number generators"
  (OOPSLA 2014), with Stafford's variant 13 constants;
- FNV-1a, 64 bits (Fowler, Noll, Vo), over the UTF-8 bytes of a text;
- a field's key = splitmix64(FNV-1a(name)), so that equal tokens of two fields differ;
- token hash = splitmix64(token ^ key), the token being an integer (two's complement, 64 bits) or the FNV-1a
  of a text;
- id = 1 + (high 32 bits of the token hash * (cardinality - 1)) >> 32, which lies in [1, cardinality); 0 is
  kept for "missing".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loka.errors import UsageError

__all__ = ["MAX_CARDINALITY", "field_key", "hash_texts", "int_ids", "splitmix64", "text_ids"]

MAX_CARDINALITY = 2**31

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3
_MASK_64 = 2**64 - 1


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64-bit integers: a bijection whose output bits all depend on all input bits.

    Args:
        x: uint64, any shape.

    Returns:
        uint64 of the same shape; x is left as it was.
    """
    z = np.atleast_1d(x) + np.uint64(_GOLDEN)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MIX_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX_2)
    z ^= z >> np.uint64(31)
    return z.reshape(x.shape)


def field_key(name: str) -> int:
    """The 64-bit key of a field: splitmix64 of the FNV-1a of its name in UTF-8."""
    state = _FNV_OFFSET
    for byte in name.encode():
        state = ((state ^ byte) * _FNV_PRIME) & _MASK_64
    return int(splitmix64(np.array([state], dtype=np.uint64))[0])


def hash_texts(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """FNV-1a (64 bits) of n texts that lie one after another in a byte array.

    Works one byte position at a time over all texts that are that long, so the cost is the number of bytes
    plus the length of the longest text, and no padded matrix is built.

    Args:
        data: uint8 [total].
        offsets: int64 [n + 1]; text i is data[offsets[i]:offsets[i + 1]].

    Returns:
        uint64 [n].
    """
    starts = offsets[:-1]
    lengths = np.diff(offsets)
    longest_first = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[longest_first], lengths[longest_first]
    state = np.full(len(lengths), _FNV_OFFSET, dtype=np.uint64)
    # How many texts are longer than j, for each j; they are a prefix of the sorted order.
    longest = int(lengths[0]) if len(lengths) else 0
    active = np.searchsorted(-lengths, -np.arange(longest), side="left")
    for j, count in enumerate(active.tolist()):
        head = state[:count]
        head ^= data[starts[:count] + j]
        head *= np.uint64(_FNV_PRIME)
    hashes = np.empty_like(state)
    hashes[longest_first] = state
    return hashes


def int_ids(tokens: NDArray[np.uint64], *, field: str, cardinality: int) -> NDArray[np.int64]:
    """Ids of integer tokens.

    Args:
        tokens: uint64 [n].
        field: The field's name; equal tokens of two fields get unrelated ids.
        cardinality: Number of ids including 0; ids lie in [1, cardinality).

    Returns:
        int64 [n].

    Raises:
        UsageError: if the cardinality is not in [2, 2**31].
    """
    check_cardinality(cardinality, field=field)
    hashes = splitmix64(tokens ^ np.uint64(field_key(field)))
    hashes >>= np.uint64(32)
    hashes *= np.uint64(cardinality - 1)
    hashes >>= np.uint64(32)
    hashes += np.uint64(1)
    return hashes.view(np.int64)


def text_ids(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], *, field: str, cardinality: int
) -> NDArray[np.int64]:
    """Ids of texts laid out as in `hash_texts`; else as `int_ids`. An empty text is a token like others."""
    return int_ids(hash_texts(data, offsets), field=field, cardinality=cardinality)


def check_cardinality(cardinality: int, *, field: str) -> None:
    """Raise UsageError unless 2 <= cardinality <= 2**31."""
    if not 2 <= cardinality <= MAX_CARDINALITY:
        raise UsageError(
            f"cardinality {cardinality} of field `{field}` is not in [2, {MAX_CARDINALITY}]",
            hint="id 0 stands for `missing`, so a hashed field needs at least 2 ids",
        )
