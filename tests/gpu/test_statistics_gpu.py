"""Statistics on a GPU: equal to plain torch in FP64 on the CPU, deterministic, and no step waits for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from loka.kernels.column_statistics import cast_counts_of, marginals_of, merge_moments, moments_of
from loka.kernels.triton.statistics.host import HISTOGRAM_ALL
from loka.numerics import BatchStatistics, Marginals, Moments, OperandStatistics, cast_counts
from loka.probe.live import SAMPLED_ROWS, Captured
from loka.probe.observer import Observer
from loka.probe.state import sites_of_state, state_of_sites
from loka.sites import plannable_linears
from loka.vocab import Format, Operand

pytestmark = [
    pytest.mark.gpu,
    # torch 2.11 warns about itself when its compiler is imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
]

SHAPES = [
    (1, 1), (6144, 1), (1, 4096), (37, 13), (100_000, 32), (60_000, 192), (4097, 257), (3000, 1024),
    (3000, 1025), (2000, 4096), (300, 32768),
]  # fmt: skip


def data(R: int, C: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(R * 1000 + C)
    x = torch.randn(R, C, generator=generator, device="cuda")
    x *= torch.exp2(torch.randint(-30, 12, (R, 1), generator=generator, device="cuda").float())
    x[torch.rand(R, C, generator=generator, device="cuda") < 0.3] = 0.0
    x = x + 50.0 * torch.randint(0, 2, (C,), generator=generator, device="cuda")
    if R > 8:
        x[0, 0], x[3], x[5, C // 2], x[7, -1] = -torch.inf, 0.0, torch.nan, torch.inf
    return x.to(dtype)


def check(found: Moments, x: Tensor) -> None:
    wanted = Moments.of(x.cpu())
    largest = wanted.amax.double()
    for name, tensor in wanted.tensors().items():
        got = found.tensors()[name].cpu()
        assert got.dtype is tensor.dtype, name
        assert got.shape == tensor.shape, name
        if name == "mean":
            assert ((got - tensor).abs() <= 1e-13 * largest).all()
        elif name == "m2":
            assert ((got - tensor).abs() <= 1e-12 * largest.square() * x.shape[0]).all()
        elif "exponents" in name and x.numel() > HISTOGRAM_ALL:
            assert (got <= tensor).all(), name  # of an eighth of the rows
            assert got.sum() > 0, name
        else:
            assert torch.equal(got, tensor), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_moments_equal_those_of_the_cpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = data(*shape, dtype)
    first, second = moments_of(x), moments_of(x)
    check(first, x)
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, second.tensors()[name]), name
    half = shape[0] // 2
    if half:
        check(merge_moments(moments_of(x[:half]), moments_of(x[half:])), x)


def test_views_and_dtypes_that_triton_does_not_take() -> None:
    wide = data(400, 300, torch.bfloat16)
    for x in (
        wide[:, 7:207],
        wide.t(),
        wide[:, 3:4],
        wide[::2, ::3],
        wide.double(),
        wide[:, :1].expand(400, 9),
    ):
        check(moments_of(x), x)
    f8 = wide.nan_to_num(0, 0, 0).clamp(-400, 400).to(torch.float8_e4m3fn)
    check(moments_of(f8), f8.float())


def test_nothing_waits_for_the_gpu() -> None:
    """Every part of an observed step that reads a number from the device would raise."""
    xs = [data(5000, 64, torch.bfloat16) for _ in range(3)]
    known = OperandStatistics.empty(64, "cuda")

    def observe(step: int) -> None:
        for i, x in enumerate(xs):
            batch = BatchStatistics.of(x, sample_SK=x[:1000], moments_of=moments_of)
            known.take(batch, step=step + i, merged=merge_moments)

    observe(0)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        observe(3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert known.moments.count.item() == 2 * (3 * 5000 - 3 * 3)


class Shared(nn.Module):
    """Two linears on one tensor, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 48), nn.Linear(64, 48), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.c(self.a(x) + self.b(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("autocast", [True, False])
def test_an_observed_step_does_not_wait(autocast: bool) -> None:
    model = Shared().cuda()
    captured: list[tuple[str, Captured]] = []
    observer = Observer(
        plannable_linears(model),
        on_captured=lambda name, what: captured.append((name, what)),
        seed=0,
        is_training=lambda: True,
    )
    x = torch.randn(6000, 64, device="cuda")
    x[7, 3] = torch.nan

    def step(number: int, *, full: bool) -> None:
        observer.arm(number, full=None if full else ())
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().sum()
        loss.backward()
        observer.disarm()

    for number in range(2):
        step(number, full=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(2, full=False)
        step(3, full=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    known = observer.sites["a"].operands[Operand.INPUT]
    assert (known.moments.count.item(), known.moments.nonfinite_rows.item()) == (4 * 5999, 4)
    good = torch.cat([x[:7], x[8:]]).double()
    assert torch.allclose(known.moments.mean, good.mean(dim=0), rtol=1e-9, atol=1e-12)
    assert observer.sites["c"].operands[Operand.INPUT].moments.count.item() == 4 * 2 * 5999
    assert known.covariance is not None
    assert known.covariance.count.item() in range(3 * SAMPLED_ROWS - 3, 3 * SAMPLED_ROWS + 1)
    assert {name for name, _ in captured} == {"a", "b", "c"}
    for name, what in captured:
        assert what.g is not None, name
    state = state_of_sites(observer.sites)
    again = sites_of_state(state, where=torch.device("cuda"))
    assert all(t.device.type == "cpu" for t in state.values())
    for name, tensor in known.tensors().items():
        assert torch.equal(again["a"].operands[Operand.INPUT].tensors()[name].cpu(), tensor.cpu()), name


def test_deterministic_algorithms_are_enough() -> None:
    x = data(3000, 96, torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (BatchStatistics.of(x, sample_SK=x[:800], moments_of=moments_of) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert first.marginals is not None
    assert second.marginals is not None
    for name, tensor in first.marginals.tensors().items():
        assert torch.equal(tensor, second.marginals.tensors()[name]), name
    for name, tensor in first.moments.tensors().items():
        assert torch.equal(tensor, second.moments.tensors()[name]), name


@pytest.mark.parametrize("shape", [(1, 1), (1024, 192), (700, 4096), (5000, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_marginals_equal_those_of_plain_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Positions but for quotients that fall on a step of 1/256."""
    x = data(*shape, dtype)
    found, wanted = marginals_of(x).tensors(), Marginals.of(x).tensors()
    for name, tensor in wanted.items():
        if name in ("inside", "inside_squares"):
            assert float((found[name] - tensor).abs().max()) <= 4 / 256, name
            assert int((found[name] != tensor).sum()) <= tensor.numel() // 100, name
        else:
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("shape", [(1, 1), (256, 4096), (33, 300)])
@pytest.mark.parametrize("given", [False, True])
def test_counts_of_casts_equal_those_of_plain_torch(shape: tuple[int, int], given: bool) -> None:
    x = data(*shape, torch.float32)
    codes = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    scale = torch.tensor(2.0**-6, device="cuda") if given else None
    wanted = cast_counts(x, codes, Format.E4M3, scale).tolist()
    assert cast_counts_of(x, codes, Format.E4M3, scale).tolist() == wanted
    turned = x.t().contiguous().t(), codes.t().contiguous().t()
    assert cast_counts_of(*turned, Format.E4M3, scale).tolist() == wanted
