"""Reading the next piece while the last one is being used."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

__all__ = ["read_ahead"]

T = TypeVar("T")


def read_ahead(items: Generator[T, None, None]) -> Iterator[T]:
    """The items in order, each made in a thread while the caller uses the one before.

    One item waits at a time, so memory grows by one item. An error is raised where its item would have
    come. The thread ends with the iterator, also when that is closed early.
    """
    done = object()
    # Closing comes last: the pool has waited by then for a piece that was still being read.
    with closing(items), ThreadPoolExecutor(1, thread_name_prefix="loka-read-ahead") as pool:
        coming = pool.submit(next, items, done)
        while (item := coming.result()) is not done:
            coming = pool.submit(next, items, done)
            yield item  # type: ignore[misc]
