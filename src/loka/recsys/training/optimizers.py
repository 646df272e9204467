"""The two optimizers of a recommendation model, and their state as named plain tensors.

Dense parameters by Adam (Kingma & Ba 2015, algorithm 1), embedding tables by Adagrad (Duchi et al. 2011), as
published click models are trained. torch's own optimizers are used unchanged; Adagrad takes sparse gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from loka.errors import ArtifactError, UsageError
from loka.recsys.training.config import DenseOptimizer, SparseOptimizer, TrainConfig

__all__ = ["Optimizers", "build_optimizers"]


@runtime_checkable
class _HasParameterGroups(Protocol):
    def sparse_parameters(self) -> Iterable[nn.Parameter]: ...

    def dense_parameters(self) -> Iterable[nn.Parameter]: ...


class Optimizers:
    """Steps the dense and the sparse optimizer together.

    Args:
        named: Each optimizer by its name, with the names of its parameters in its own order.
    """

    def __init__(self, named: Mapping[str, tuple[torch.optim.Optimizer, list[str]]]) -> None:
        self._named = dict(named)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for optimizer, _ in self._named.values():
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Update all parameters that have a gradient."""
        # "Off" is torch's default; saying so spares its once-a-process warning about sparse gradients.
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            for optimizer, _ in self._named.values():
                optimizer.step()

    def state_dict(self) -> dict[str, Tensor]:
        """All state as tensors named `<optimizer>/<parameter>/<entry>`; numbers become 0-dim fp64 tensors.

        Raises:
            UsageError: if an optimizer keeps a state that is neither tensor nor number.
        """
        tensors = {}
        for name, (optimizer, parameters) in self._named.items():
            for index, entries in optimizer.state_dict()["state"].items():
                for entry, value in entries.items():
                    if not isinstance(value, Tensor | int | float):
                        raise UsageError(
                            f"optimizer state `{entry}` is a {type(value).__name__}, not a tensor"
                        )
                    key = f"{name}/{parameters[index]}/{entry}"
                    tensors[key] = (
                        value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                    )
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a saved state, exactly.

        Raises:
            ArtifactError: if the tensors name an optimizer or parameter that is not here.
        """
        states: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in self._named}
        for key, value in tensors.items():
            name, _, rest = key.partition("/")
            parameter, _, entry = rest.rpartition("/")
            if name not in self._named or parameter not in self._named[name][1]:
                raise ArtifactError(
                    f"the saved optimizer state `{key}` belongs to no parameter of this model"
                )
            index = self._named[name][1].index(parameter)
            states[name].setdefault(index, {})[entry] = value
        for name, (optimizer, _) in self._named.items():
            optimizer.load_state_dict({**optimizer.state_dict(), "state": states[name]})


def _dense(kind: DenseOptimizer, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    match kind:
        case DenseOptimizer.ADAM:
            return torch.optim.Adam(parameters, lr=lr)
        case DenseOptimizer.ADAGRAD:
            return torch.optim.Adagrad(parameters, lr=lr)
        case DenseOptimizer.SGD:
            return torch.optim.SGD(parameters, lr=lr)


def _sparse(kind: SparseOptimizer, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    match kind:
        case SparseOptimizer.ADAGRAD:
            return torch.optim.Adagrad(parameters, lr=lr)
        case SparseOptimizer.SGD:
            return torch.optim.SGD(parameters, lr=lr)


def build_optimizers(model: nn.Module, config: TrainConfig) -> Optimizers:
    """The optimizers of a model; frozen parameters are left out.

    Args:
        model: With `sparse_parameters()` and `dense_parameters()`, as `loka.recsys.models.RecModel` has.
        config: Kinds and learning rates.

    Raises:
        UsageError: if the model does not sort its parameters into those two, each into exactly one.
    """
    if not isinstance(model, _HasParameterGroups):
        raise UsageError(
            f"{type(cast(Any, model)).__name__} has no sparse_parameters() and dense_parameters()",
            hint="build it on loka.recsys.models.RecModel",
        )
    sparse, dense = list(model.sparse_parameters()), list(model.dense_parameters())
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    given = [id(p) for p in (*sparse, *dense) if p.requires_grad]
    missing = [name for key, name in trained.items() if key not in given]
    if missing or len(given) != len(set(given)) or not set(given) <= trained.keys():
        problem = (
            f"`{missing[0]}` is in neither" if missing else "one is in both, or is no parameter of the model"
        )
        raise UsageError(
            f"sparse_parameters() and dense_parameters() must share out all parameters: {problem}"
        )
    built: dict[str, tuple[torch.optim.Optimizer, list[str]]] = {}
    dense, sparse = ([p for p in group if p.requires_grad] for group in (dense, sparse))
    if dense:
        optimizer = _dense(config.dense_optimizer, dense, config.lr_dense)
        built["dense"] = (optimizer, [trained[id(p)] for p in dense])
    if sparse:
        optimizer = _sparse(config.sparse_optimizer, sparse, config.lr_sparse)
        built["sparse"] = (optimizer, [trained[id(p)] for p in sparse])
    return Optimizers(built)
