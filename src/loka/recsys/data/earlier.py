"""For each event of a log, the earlier events of the same key (user, item): how many, and the latest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Earlier"]


class Earlier:
    """Strictly earlier events of the same key, for n events sorted by time.

    Args:
        keys: int64 [n].
        times: [n], rising. Events of equal time do not see one another.

    Attributes:
        counts: int64 [n], how many earlier events each event has.
    """

    def __init__(self, keys: NDArray[np.int64], times: NDArray[np.float64]) -> None:
        n = len(keys)
        self._order = np.lexsort((np.arange(n), times, keys))
        key, time = keys[self._order], times[self._order]
        position = np.arange(n)
        new_key = np.ones(n, dtype=np.bool_)
        new_key[1:] = key[1:] != key[:-1]
        new_time = new_key.copy()
        new_time[1:] |= time[1:] != time[:-1]
        # In the sorted order: where the key's events begin, and where those of this very time do.
        key_start = np.maximum.accumulate(np.where(new_key, position, 0))
        time_start = np.maximum.accumulate(np.where(new_time, position, 0))
        self.counts = np.empty(n, dtype=np.int64)
        self.counts[self._order] = time_start - key_start
        self._stop = np.empty(n, dtype=np.int64)
        self._stop[self._order] = time_start

    def latest(self, events: NDArray[np.int64], *, limit: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The up to `limit` latest earlier events of each of m events, oldest first.

        Returns:
            Events int64 [total] and offsets int64 [m + 1] into them.
        """
        lengths = np.minimum(self.counts[events], limit)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        start = self._stop[events] - lengths
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        return self._order[np.repeat(start, lengths) + within], offsets
