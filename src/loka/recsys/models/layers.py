"""Building blocks that more than one model uses, and their seeded initialization.

Shapes: B rows, d embedding width, n embeddings a row, T tasks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from loka.errors import UsageError
from loka.mods import BlockNorm

__all__ = ["MLP", "DenseRow", "LogitHead", "NormSwish", "check_width", "initialize"]


def check_width(name: str, value: int | Sequence[int], *, where: str) -> None:
    """Raise UsageError unless `value` (one width, or several) holds positive integers only."""
    widths = value if isinstance(value, Sequence) else (value,)
    for width in widths:
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise UsageError(
                f"`{name}` of {where} holds {width!r}, expected a positive integer",
                hint="FP8 kernels want widths that are multiples of 16",
            )


class NormSwish(nn.Module):
    """x * sigmoid(LayerNorm(x)), the activation of the Wukong towers. Shape [..., width] kept."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [..., width]."""
        return x * torch.sigmoid(self.norm(x))


class MLP(nn.Sequential):
    """Linear and ReLU for each width: [B, in_features] -> [B, widths[-1]].

    Args:
        in_features: Width of the input.
        widths: Output widths; none makes it the identity.
    """

    def __init__(self, in_features: int, widths: Sequence[int]) -> None:
        layers: list[nn.Module] = []
        for width in widths:
            layers += [nn.Linear(in_features, width), nn.ReLU()]
            in_features = width
        super().__init__(*layers)
        self.out_features = in_features


class DenseRow(nn.Module):
    """The dense features as one more embedding: MLP and ReLU, [B, D] -> [B, d].

    Naumov et al. 2019 (arXiv 1906.00091), section 2.

    Args:
        dense_features: D; at least 1.
        hidden: Widths between D and d.
        dim: d.
    """

    def __init__(self, dense_features: int, hidden: Sequence[int], dim: int) -> None:
        super().__init__()
        self.mlp = MLP(dense_features, (*hidden, dim))

    def forward(self, dense: Tensor) -> Tensor:
        """[B, D] -> [B, d]."""
        out: Tensor = self.mlp(dense)
        return out


class LogitHead(nn.Module):
    """The final prediction layer, always in the weights' own precision: [B, in_features] -> fp32 [B, T].

    Autocast is off inside: a bf16 logit of 4 has steps of 1/64, which is more than the differences in loss
    that the comparison of two runs is about.
    """

    def __init__(self, in_features: int, tasks: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, tasks)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, fp32 [B, T]."""
        # The meta device has no autocast to switch off.
        device = "cpu" if x.device.type == "meta" else x.device.type
        with torch.autocast(device, enabled=False):
            logits: Tensor = self.linear(x.to(self.linear.weight.dtype))
        return logits.float()


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:init:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))


@torch.no_grad()
def initialize(model: nn.Module, *, seed: int) -> None:
    """Set every parameter of `model` in place from (seed, parameter name); no global random state is touched.

    Linear: uniform in +-1/sqrt(in_features), bias too (torch's own default). EmbeddingBag: uniform in
    +-0.1/sqrt(width): a row's norm does not depend on the width, and ids that are seen seldom stay near zero.
    LayerNorm: 1 and 0. BlockNorm: 1.

    Args:
        model: A model on a real device, its parameters perhaps uninitialized.
        seed: Any integer. One (seed, name) gives the same values wherever the parameter stands in the model.

    Raises:
        UsageError: if the model holds a parameter of another kind of module.
    """
    for prefix, module in model.named_modules():
        own = list(module.named_parameters(recurse=False))
        if not own:
            continue
        if isinstance(module, nn.LayerNorm | BlockNorm):
            module.reset_parameters()
            continue
        if isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
        elif isinstance(module, nn.EmbeddingBag):
            bound = 0.1 / math.sqrt(module.embedding_dim)
        else:
            raise UsageError(f"no initialization is known for {type(module).__name__} at `{prefix}`")
        for name, parameter in own:
            generator = _generator(seed, f"{prefix}.{name}")
            # Drawn on the CPU whatever the device, so that a seed means the same weights everywhere.
            parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
