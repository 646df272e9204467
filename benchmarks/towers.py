"""The fixed workload of every speed claim: Wukong-style dense towers on given embeddings.

step = TowerStep("L")        # fp32 parameters, bf16 autocast, torch.compile, SGD; gradients of the input too
step()
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.recsys.models.layers import initialize
from loka.recsys.models.wukong import TOWER_L, TOWER_M, WukongConfig, WukongTower


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


class TowerStep:
    """One training step of a tower: forward, backward and SGD.

    Attributes:
        model: The tower; attach Probe or a plan here.
        x: fp32 leaf [B, n, d], 0.1 * N(0, 1).
        labels: 0 or 1, [B, 1].
    """

    def __init__(self, name: str, *, device: str = "cuda", compiled: bool = True, seed: int = 0) -> None:
        workload = WORKLOADS[name]
        with torch.device("meta"):
            self.model: nn.Module = Tower(workload)
        self.model.to_empty(device=device)
        initialize(self.model, seed=seed)
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
