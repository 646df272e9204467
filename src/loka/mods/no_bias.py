"""No Bias: products without one, but for the layers that predict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from loka.errors import UsageError
from loka.sites import matches
from loka.sites.mods import MOD_NAME
from loka.vocab import NARROW

__all__ = ["NoBias", "looks_trained"]


@dataclass(frozen=True, slots=True)
class NoBias:
    """Drop the biases of nn.Linears, in place. Source: "LoKA" (arXiv 2605.10886), Mods.

    A prediction layer keeps its bias: one with fewer than 16 outputs, or one that `keep` names. A bias that
    training has moved away from zero is not thrown away silently: it is refused, or absorbed where that
    changes nothing the model computes:

    - into the bias of the nn.Linear that follows directly: W2 (W1 x + b1) + b2 = W2 W1 x + (W2 b1 + b2);
    - into the running mean of a BatchNorm1d that follows directly;
    - by a LayerNorm that follows directly, where all of the bias's elements are equal.

    Attributes:
        keep: Glob patterns, or one, of further layers whose biases stay.
        absorb: Absorb biases that are not near zero, instead of refusing them.
        near_zero: A largest magnitude up to which a bias may be dropped as it is.
        trained: Whether the model is. None looks at it: untrained is a model on the meta device, or one
            without gradients whose biases and weights lie within +-1/sqrt(in_features), where nn.Linear draws
            them.
    """

    keep: Sequence[str] | str = ()
    absorb: bool = False
    near_zero: float = 1e-3
    trained: bool | None = None
    name: ClassVar[str] = "no_bias"
    takes: ClassVar[str] = "nn.Linear with a bias and at least 16 outputs"

    def __post_init__(self) -> None:
        keep = (self.keep,) if isinstance(self.keep, str) else tuple(self.keep)
        object.__setattr__(self, "keep", keep)  # a list has no hash, and a rule is a key

    def applies(self, model: nn.Module, name: str) -> bool:
        """True for an nn.Linear whose bias goes; see `Mod`."""
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear) or module.bias is None or module.out_features < NARROW:
            return False
        return not matches(name, self.keep)

    def refused(self, model: nn.Module, names: Sequence[str]) -> list[str]:
        """A line for each layer whose bias can neither be dropped nor absorbed."""
        trained = looks_trained(model, names) if self.trained is None else self.trained
        if not trained:
            return []
        lines = []
        for name in names:
            bias = _linear(model, name).bias
            largest = float(bias.detach().abs().max())
            if largest <= self.near_zero:
                continue
            if not self.absorb:
                lines.append(f"{name}  largest element of the bias {largest:.3g}")
            elif _absorber(model, name) is None:
                lines.append(
                    f"{name}  largest element of the bias {largest:.3g}, nothing behind it absorbs it"
                )
        return lines

    def change(self, model: nn.Module, name: str) -> None:
        """Drop the bias, absorbed where that was asked for and something can."""
        module = _linear(model, name)
        absorber = _absorber(model, name) if self.absorb and not module.bias.is_meta else None
        if absorber is not None:
            _absorb(module.bias.detach(), absorber)
        module.register_parameter("bias", None)
        setattr(module, MOD_NAME, self.name)


def looks_trained(model: nn.Module, names: Sequence[str]) -> bool:
    """Whether the named nn.Linears were trained, as far as gradients and magnitudes tell."""
    if any(parameter.grad is not None for parameter in model.parameters()):
        return True
    for name in names:
        module = _linear(model, name)
        if module.weight.is_meta:
            continue
        limit = 1.0001 / math.sqrt(max(module.in_features, 1))
        if any(float(p.detach().abs().max()) > limit for p in (module.weight, module.bias) if p.numel()):
            return True
    return False


def _linear(model: nn.Module, name: str) -> nn.Linear:
    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear) or module.bias is None:
        raise UsageError(f"`{name}` is no nn.Linear with a bias any more")
    return module


def _absorber(model: nn.Module, name: str) -> nn.Module | None:
    """What directly follows in a Sequential and can take the bias over exactly; None where nothing can."""
    parent, _, own = name.rpartition(".")
    holder = model.get_submodule(parent)
    if not isinstance(holder, nn.Sequential) or type(holder).forward is not nn.Sequential.forward:
        return None
    links = list(holder._modules.items())
    places = [place for place, _ in links]
    behind = [m for _, m in links[places.index(own) + 1 :] if not isinstance(m, nn.Identity)]
    follower = behind[0] if behind else None
    if isinstance(follower, nn.Linear) and follower.bias is not None:
        return follower
    if isinstance(follower, nn.BatchNorm1d) and follower.running_mean is not None:
        return follower
    bias = _linear(model, name).bias.detach()
    if isinstance(follower, nn.LayerNorm) and bool((bias == bias[0]).all()):
        return follower
    return None


@torch.no_grad()
def _absorb(bias: Tensor, into: nn.Module) -> None:
    if isinstance(into, nn.Linear):
        carried = into.weight.double() @ bias.double()
        into.bias.copy_(into.bias.double() + carried)
    elif isinstance(into, nn.BatchNorm1d) and into.running_mean is not None:
        into.running_mean.sub_(bias)
