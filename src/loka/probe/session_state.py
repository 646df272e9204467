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

__all__ = ["check_is_state", "counts_in_state", "errors_in_state", "sites_in_state", "state_of_session"]

_SITES, _ERRORS = "sites", "errors\t"
_COUNTS = ("seen", "observed", "raised_to")


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


def check_is_state(state: object) -> None:
    """Raise UsageError unless it maps names to tensors."""
    is_state = isinstance(state, Mapping) and all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()
    )
    if not is_state:
        raise UsageError(
            f"this is no state of a Probe but a {type(state).__name__} that does not map names to tensors",
            hint="load what `state_dict()` of a Probe gave",
        )


def counts_in_state(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Steps `seen` and `observed`, and what `every` was `raised_to`.

    Raises:
        UsageError: for a state that no Probe made.
    """
    if "seen" not in state or "observed" not in state:
        raise UsageError(
            "this is no state of a Probe: it holds no `seen` and `observed`",
            hint="load what `state_dict()` of a Probe gave",
        )
    known = {name: state[name] for name in _COUNTS if name in state}
    for name, tensor in known.items():
        if tensor.numel() != 1 or tensor.is_floating_point() or int(tensor) < 0:
            raise UsageError(f"this state of a Probe is damaged: `{name}` is no count but {tensor}")
    return dict.fromkeys(_COUNTS, 0) | {name: int(tensor) for name, tensor in known.items()}


def sites_in_state(state: Mapping[str, Tensor]) -> list[Site] | None:
    """The sites that were found; None in a state that was taken before, or by an older LoKA."""
    if _SITES not in state:
        return None
    text = state[_SITES].cpu().numpy().tobytes()
    try:
        return msgspec.json.decode(text, type=list[Site])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"the sites in this state of a Probe cannot be read: {error}") from error


def errors_in_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Errors measured so far, as `ErrorLog.load` takes them.

    Raises:
        UsageError: for errors that it would not take.
    """
    errors = {key.removeprefix(_ERRORS): rows for key, rows in state.items() if key.startswith(_ERRORS)}
    ErrorLog().load(errors)
    return errors
