"""Click logs as batches: streaming readers, a synthetic log, and `open_source`, which finds the right one."""

from __future__ import annotations

from loka.recsys.data.registry import SOURCE_KINDS, open_source

__all__ = ["SOURCE_KINDS", "open_source"]
