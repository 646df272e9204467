"""The fixed workload of every speed claim: Wukong-style dense towers on given embeddings.

step = TowerStep("L")        # fp32 parameters, bf16 autocast, torch.compile, SGD; gradients of the input too
step()
serve = TowerInference("L")  # bf16 parameters, no gradients, torch.compile

`change` is done to the model before it is compiled: `tuned`, or what `loka.apply_mods` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.recsys.models.layers import initialize
from loka.recsys.models.wukong import TOWER_L, TOWER_M, WukongConfig, WukongLayer, WukongTower


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of a tower: B rows of n embeddings."""

    config: WukongConfig
    rows: int
    embeddings: int


WORKLOADS = {"M": Workload(TOWER_M, 8192, 128), "L": Workload(TOWER_L, 6144, 192)}


class Tower(nn.Module):
    """A tower that takes embeddings [B, n, d] alone, and gives fp32 logits [B, 1]."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.tower = WukongTower(workload.config, dense_features=0, fields=workload.embeddings, tasks=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x.new_zeros(x.shape[0], 0), x)


class TunedLayer(WukongLayer):
    """A Wukong layer that computes the same without a transpose in memory: W @ x of each sample.

    FM projection, LCB and residual are one product, whose weight is put together in every forward.
    """

    def forward(self, x: Tensor) -> Tensor:
        linears = [self.fm_projection, self.lcb]
        if not isinstance(self.residual, nn.Identity):
            linears.append(self.residual)
        sizes = [linear.out_features for linear in linears]
        merged = torch.matmul(torch.cat([linear.weight for linear in linears]), x)
        fm_y, lcb, *rest = merged.split(sizes, dim=1)
        fm = torch.bmm(x, fm_y.transpose(1, 2).to(x.dtype))
        fmb = self.fmb(fm.flatten(1)).unflatten(1, (-1, x.shape[2]))
        out: Tensor = self.norm(torch.cat([fmb, lcb], dim=1) + (rest[0] if rest else x))
        return out


def tuned(model: nn.Module) -> None:
    """Make every Wukong layer a `TunedLayer`, in place."""
    for module in model.modules():
        if type(module) is WukongLayer:
            module.__class__ = TunedLayer


def _built(
    workload: Workload, device: str, seed: int, change: Callable[[nn.Module], object] | None
) -> nn.Module:
    with torch.device("meta"):
        model = Tower(workload)
    if change is not None:
        change(model)
    model.to_empty(device=device)
    initialize(model, seed=seed)
    return model


class TowerInference:
    """One batch through a tower in bf16, without gradients.

    Args:
        name: M or L.
        rows: Rows of the batch; by default the tower's.
        change: Done to the model before it is compiled.
    """

    def __init__(
        self,
        name: str,
        *,
        device: str = "cuda",
        rows: int | None = None,
        change: Callable[[nn.Module], object] | None = None,
        compiled: bool = True,
    ) -> None:
        workload = WORKLOADS[name]
        self.model = _built(workload, device, 0, change).to(torch.bfloat16).eval()
        shape = (rows or workload.rows, workload.embeddings, workload.config.dim)
        self.x = 0.1 * torch.randn(shape, device=device, dtype=torch.bfloat16)
        if compiled:
            self.model.compile()

    def __call__(self) -> Tensor:
        with torch.no_grad():
            out: Tensor = self.model(self.x)
        return out


class TowerStep:
    """One training step of a tower: forward, backward and SGD.

    Attributes:
        model: The tower; attach Probe or a plan here.
        x: fp32 leaf [B, n, d], 0.1 * N(0, 1).
        labels: 0 or 1, [B, 1].
    """

    def __init__(
        self,
        name: str,
        *,
        device: str = "cuda",
        compiled: bool = True,
        seed: int = 0,
        change: Callable[[nn.Module], object] | None = None,
    ) -> None:
        workload = WORKLOADS[name]
        self.model = _built(workload, device, seed, change)
        generator = torch.Generator(device).manual_seed(seed)
        shape = (workload.rows, workload.embeddings, workload.config.dim)
        self.x = (0.1 * torch.randn(shape, device=device, generator=generator)).requires_grad_()
        self.labels = (torch.rand(shape[0], 1, device=device, generator=generator) < 0.25).float()
        if compiled:
            self.model.compile()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._device = device

    def loss_per_row(self) -> Tensor:
        """fp32 [B], under bf16 autocast."""
        with torch.autocast(self._device, torch.bfloat16):
            logits = self.model(self.x)
        losses = nn.functional.binary_cross_entropy_with_logits(logits.float(), self.labels, reduction="none")
        return losses[:, 0]

    def __call__(self) -> Tensor:
        self._optimizer.zero_grad()
        self.x.grad = None
        loss = self.loss_per_row().mean()
        loss.backward()
        self._optimizer.step()
        return loss.detach()
