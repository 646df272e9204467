"""The norm operators with a symbolic number of rows, as torch.compile traces them when batches vary.

Traced on fake tensors, so nothing is launched. Under Triton's interpreter a kernel would be, hence a process
of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys


def test_rows_stay_symbolic() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["forward", "gradient", "straight", "transposed", "rows"]


def _main() -> None:
    import torch
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    from loka.kernels.triton.norms import host
    from loka.vocab import BlockNormSpec, Format, Granularity, OperandSpec

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with unset_fake_temporarily():
        real = torch.empty(3000, 512, dtype=torch.bfloat16)
    x = mode.from_tensor(
        real,
        source=ConstantSource("x"),
        symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC]),
    ).requires_grad_()

    def check(name: str, out: torch.Tensor, axis: int = 0) -> None:
        free = isinstance(out.shape[axis], torch.SymInt) and out.shape[axis].node.maybe_as_int() is None
        sys.stdout.write(f"{name}\n" if free else f"{name}: {tuple(out.shape)}\n")

    norm = BlockNormSpec(256, 1e-6, True)
    tensor = OperandSpec.of(Format.E4M3, Granularity.TENSORWISE, pad=16)
    rows = OperandSpec.of(Format.E4M3, Granularity.ROWWISE, pad=16)
    with mode:
        y = host.block_norm(x, norm, None)
        check("forward", y)
        check("gradient", torch.autograd.grad(y, x, torch.ones_like(y))[0])
        with torch.no_grad():
            made = host.normed_operands(x, norm, (tensor, tensor.with_transposed(True), rows), None)
        check("straight", made[0].values)
        check("transposed", made[1].values, axis=1)
        check("rows", made[2].values)


if __name__ == "__main__":
    _main()
