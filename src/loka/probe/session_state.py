"""A Probe's state as plain tensors: counts, sites, statistics and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from loka.errors import UsageError
from loka.probe.error_log import ErrorLog
from loka.probe.schedule import Schedule
from loka.vocab import Site

__all__ = ["load_counts", "load_errors", "sites_in_state", "state_of_session"]

_SITES, _ERRORS = "sites", "errors\t"


def state_of_session(schedule: Schedule, sites: Sequence[Site] | None, log: ErrorLog) -> dict[str, Tensor]:
    """Everything but the statistics. `sites` is their JSON as bytes, so that all values are tensors."""
    state = {
        "seen": torch.tensor(schedule.seen),
        "observed": torch.tensor(schedule.observed),
        "raised_to": torch.tensor(schedule.raised_to),
    }
    if sites is not None:
        text = msgspec.json.encode(list(sites))
        state[_SITES] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return state | {f"{_ERRORS}{key}": rows for key, rows in log.state().items()}


def load_counts(state: Mapping[str, Tensor], schedule: Schedule) -> None:
    """Steps seen and observed, and what `every` was raised to.

    Raises:
        UsageError: for a state that no Probe made.
    """
    if "seen" not in state or "observed" not in state:
        raise UsageError(
            "this is no state of a Probe: it holds no `seen` and `observed`",
            hint="load what `state_dict()` of a Probe gave",
        )
    raised_to = int(state["raised_to"]) if "raised_to" in state else 0
    schedule.resume(seen=int(state["seen"]), observed=int(state["observed"]), raised_to=raised_to)


def sites_in_state(state: Mapping[str, Tensor]) -> list[Site] | None:
    """The sites that were found; None in a state that was taken before, or by an older LoKA."""
    if _SITES not in state:
        return None
    text = state[_SITES].cpu().numpy().tobytes()
    try:
        return msgspec.json.decode(text, type=list[Site])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"the sites in this state of a Probe cannot be read: {error}") from error


def load_errors(state: Mapping[str, Tensor], log: ErrorLog) -> None:
    """Errors measured so far."""
    log.load({key.removeprefix(_ERRORS): rows for key, rows in state.items() if key.startswith(_ERRORS)})
