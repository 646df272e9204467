"""A run's checkpoint: all that decides its next step, in one file of plain tensors and JSON.

Keys: `model/...` the state_dict, `optimizer/...`, `metrics/...` the running sums, `extra/<name>/...` what the
caller keeps beside (Probe's statistics). Random draws are seeded from (seed, step) and
need no state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from loka.errors import ArtifactError
from loka.recsys.evaluation.running import RunningMetrics
from loka.recsys.training.optimizers import Optimizers
from loka.recsys.training.tensor_file import read_tensor_file, write_tensor_file

__all__ = [
    "CHECKPOINT_NAME",
    "RunParts",
    "Stateful",
    "TrainState",
    "load_checkpoint",
    "load_model_state",
    "save_checkpoint",
]

CHECKPOINT_NAME = "checkpoint.safetensors"
_VERSION = 1


class Stateful(Protocol):
    """Something with a state of plain tensors."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Its state now."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> object:
        """Take over a state."""
        ...


@dataclass(slots=True)
class TrainState:
    """Where a run is.

    Attributes:
        step: Steps done.
        epoch: Passes over the training rows completed.
        batch: Batches done in the current pass.
        rows: Rows trained on in all.
        finished: True once the last step is done.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    rows: int = 0
    finished: bool = False


@dataclass(frozen=True, slots=True)
class RunParts:
    """The parts of a run that a checkpoint covers."""

    model: nn.Module
    optimizers: Optimizers
    metrics: RunningMetrics
    extras: Mapping[str, Stateful]
    identity: Mapping[str, Any]


def save_checkpoint(path: Path, parts: RunParts, state: TrainState) -> None:
    """Write a checkpoint; an older one at the path stays until the new one is complete.

    Raises:
        ArtifactError: if it cannot be written, or the model keeps a state that is not a tensor.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in parts.model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ArtifactError(f"the model's state `{name}` is a {type(value).__name__}, not a tensor")
        tensors[f"model/{name}"] = value
    tensors |= {f"optimizer/{name}": value for name, value in parts.optimizers.state_dict().items()}
    tensors |= {f"metrics/{name}": value for name, value in parts.metrics.state_dict().items()}
    for extra, part in parts.extras.items():
        tensors |= {f"extra/{extra}/{name}": value for name, value in part.state_dict().items()}
    document = {
        "version": _VERSION,
        "identity": parts.identity,
        "extras": sorted(parts.extras),
        "state": asdict(state),
    }
    write_tensor_file(path, tensors, document=document)


def load_checkpoint(path: Path, parts: RunParts) -> TrainState:
    """Put a run back to where a checkpoint was written.

    Everything is checked before anything is changed.

    Raises:
        ArtifactError: if the file cannot be read, or was written by a run with other settings, another model
            or another source; the message lists what differs.
    """
    tensors, document = read_tensor_file(path)
    if document.get("version") != _VERSION:
        raise ArtifactError(
            f"{path} has checkpoint version {document.get('version')}, this LoKA reads {_VERSION}"
        )
    model_state = _below("model/", tensors)
    current = json.loads(json.dumps(parts.identity))  # as it would come back from a file
    different = _differences(document["identity"], current) + _tensor_differences(model_state, parts.model)
    if document["extras"] != sorted(parts.extras):
        different.append(f"kept beside: {document['extras']} in the checkpoint, {sorted(parts.extras)} now")
    if different:
        raise ArtifactError(
            f"the checkpoint {path} belongs to another run",
            lines=different[:12] + ([f"... and {len(different) - 12} more"] if len(different) > 12 else []),
            hint="resume with the settings, model and data it was made with, or use another folder",
        )
    parts.optimizers.load_state_dict(_below("optimizer/", tensors))
    parts.model.load_state_dict(model_state, strict=True)
    parts.metrics.load_state_dict(_below("metrics/", tensors))
    for name, part in parts.extras.items():
        part.load_state_dict(_below(f"extra/{name}/", tensors))
    known = {f.name for f in fields(TrainState)}
    return TrainState(**{k: v for k, v in document["state"].items() if k in known})


def load_model_state(path: Path, model: nn.Module) -> None:
    """Give a model the weights of a checkpoint, whatever run that was.

    Args:
        path: Of a checkpoint.
        model: With the same parameter names, shapes and dtypes; planned or not.

    Raises:
        ArtifactError: if the file cannot be read, or its weights are those of another model; the model is
            then left as it was.
    """
    tensors, _ = read_tensor_file(path)
    state = _below("model/", tensors)
    different = _tensor_differences(state, model)
    if different:
        raise ArtifactError(f"the weights in {path} are those of another model", lines=different[:12])
    model.load_state_dict(state, strict=True)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= _flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    absent = object()
    old, new = _flat(saved), _flat(current)
    return [
        f"{key}: {old.get(key, 'absent')} in the checkpoint, {new.get(key, 'absent')} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, absent) != new.get(key, absent)
    ]


def _tensor_differences(saved: Mapping[str, Tensor], model: nn.Module) -> list[str]:
    def described(state: Mapping[str, Tensor]) -> dict[str, str]:
        return {name: f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in state.items()}

    return _differences(described(saved), described(model.state_dict()))
