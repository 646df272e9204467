"""What a mod does to a module that a pattern names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import nn

from loka.errors import UsageError
from loka.mods.modules import BlockNorm, BlockNormHardSwish, HardSwish
from loka.vocab import BlockNormSpec

__all__ = ["SWISH_NORMS", "Mod", "UseBlockNorm", "UseHardSwish", "put"]

# Modules that compute x * sigmoid(norm(x)): full name of the class, and where it holds its LayerNorm.
SWISH_NORMS: Mapping[str, str] = {
    "torchrec.modules.activation.SwishLayerNorm": "norm.0",
    "loka.recsys.models.layers.NormSwish": "norm",
}


class Mod(Protocol):
    """A rule. `apply_mods` checks all modules that its pattern names before it changes any.

    Attributes:
        name: As in `apply_mods` and in a plan.
        takes: What it changes, for messages.
    """

    name: ClassVar[str]
    takes: ClassVar[str]

    def applies(self, model: nn.Module, name: str) -> bool:
        """Whether the module of this name is one that it changes.

        Raises:
            UsageError: for a module of the right kind that cannot be changed.
        """
        ...

    def change(self, model: nn.Module, name: str) -> None:
        """Change it, in place."""
        ...


@dataclass(frozen=True, slots=True)
class UseBlockNorm:
    """BlockNorm in place of LayerNorm and RMSNorm, also of the norm inside x * sigmoid(norm(x)).

    The old norm's learned weight and bias are dropped. A norm that stands in several places becomes one in
    each.

    Attributes:
        block: Features of a block at most.
        eps: Added to the mean square; None keeps that of the old norm.
        affine: Give the new one a learned weight, initially 1.
        whole_rows: Widths that are no multiple of `block` become one block, which is RMSNorm; else they are
            cut into blocks of about equal width.

    Raises:
        UsageError: for a block or an eps that cannot be.
    """

    block: int = 256
    eps: float | None = None
    affine: bool = False
    whole_rows: bool = False
    name: ClassVar[str] = "block_norm"
    takes: ClassVar[str] = "LayerNorm and RMSNorm"

    def __post_init__(self) -> None:
        BlockNormSpec(self.block, 1e-6 if self.eps is None else self.eps)  # refuses what cannot be

    def applies(self, model: nn.Module, name: str) -> bool:
        """True for a LayerNorm or RMSNorm; see `Mod`."""
        module = model.get_submodule(name)
        if not isinstance(module, nn.LayerNorm | nn.RMSNorm):
            return False
        if len(module.normalized_shape) != 1:
            raise UsageError(
                f"`{name}` normalizes over {list(module.normalized_shape)}, BlockNorm over one dimension",
                hint="leave it out of the pattern",
            )
        return True

    def change(self, model: nn.Module, name: str) -> None:
        """Put a BlockNorm of the same width in its place."""
        old = model.get_submodule(name)
        if not isinstance(old, nn.LayerNorm | nn.RMSNorm):
            raise UsageError(f"`{name}` is no LayerNorm or RMSNorm any more")
        features = old.normalized_shape[0]
        block = features if self.whole_rows and features % self.block else self.block
        kept = 1e-6 if old.eps is None else old.eps
        weight = old.weight
        new = BlockNorm(
            features,
            block,
            eps=kept if self.eps is None else self.eps,
            affine=self.affine,
            device=None if weight is None else weight.device,
            dtype=None if weight is None else weight.dtype,
        )
        put(model, name, new)


@dataclass(frozen=True, slots=True)
class UseHardSwish:
    """Hard swish in place of SiLU, GELU and ReLU, and of the activation in x * sigmoid(norm(x)).

    The last becomes hard swish of its norm: one module where that is a BlockNorm. So do a BlockNorm and an
    activation directly behind it in an nn.Sequential; the second's place is kept by an nn.Identity, so that
    names stay.

    Attributes:
        swish_norms: Classes that compute x * sigmoid(norm(x)), besides those known: full name of the class to
            where it holds its norm.
    """

    swish_norms: Mapping[str, str] = field(default_factory=dict)
    name: ClassVar[str] = "hard_swish"
    takes: ClassVar[str] = "SiLU, GELU, ReLU, Hardswish and x * sigmoid(norm(x))"

    def applies(self, model: nn.Module, name: str) -> bool:
        """True for an activation or a module that computes x * sigmoid(norm(x))."""
        module = model.get_submodule(name)
        activation = isinstance(module, nn.SiLU | nn.GELU | nn.ReLU | nn.Hardswish)
        return activation or self._norm_in(module) is not None

    def change(self, model: nn.Module, name: str) -> None:
        """Put hard swish in its place."""
        module = model.get_submodule(name)
        held = self._norm_in(module)
        if held is not None:
            norm = module.get_submodule(held)
            links = OrderedDict(norm=norm, activation=HardSwish())
            put(model, name, _fused(norm) if type(norm) is BlockNorm else nn.Sequential(links))
            return
        parent, before = _link_before(model, name)
        if parent is not None and type(before) is BlockNorm:
            put(model, f"{parent}.{_place_before(name)}" if parent else _place_before(name), _fused(before))
            put(model, name, nn.Identity())
            return
        put(model, name, HardSwish())

    def _norm_in(self, module: nn.Module) -> str | None:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        return {**SWISH_NORMS, **self.swish_norms}.get(kind)


def put(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module in another's place, in its mode."""
    parent, _, own = name.rpartition(".")
    new.train(model.get_submodule(name).training)
    setattr(model.get_submodule(parent), own, new)


def _fused(norm: BlockNorm) -> BlockNormHardSwish:
    both = BlockNormHardSwish(norm.features, norm.norm.block, eps=norm.norm.eps)
    both.register_parameter("weight", norm.weight)
    return both


def _place_before(name: str) -> str:
    own = name.rpartition(".")[2]
    return str(int(own) - 1)


def _link_before(model: nn.Module, name: str) -> tuple[str | None, nn.Module | None]:
    """The Sequential that runs a module, and what it runs right before; None where there is no such thing."""
    parent, _, own = name.rpartition(".")
    holder = model.get_submodule(parent)
    runs_in_order = isinstance(holder, nn.Sequential) and type(holder).forward is nn.Sequential.forward
    if not runs_in_order or not own.isdigit() or int(own) == 0:
        return None, None
    return parent, holder._modules.get(_place_before(name))
