"""The operators with a symbolic number of rows, as torch.compile traces them when batches vary.

Traced on fake tensors, so nothing is launched. Under Triton's interpreter a kernel would be, hence a process
of its own.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys


def test_rows_stay_symbolic() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["scaled", "blockwise", "plain", "split", "features", "gradients"]


def _main() -> None:
    import torch
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    from loka.kernels.triton.products import bf16, blockwise, features, scaled

    mode = FakeTensorMode(shape_env=ShapeEnv())
    names = itertools.count()

    def rows_free(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with unset_fake_temporarily():
            real = torch.empty(shape, dtype=dtype)
        sizes = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (len(shape) - 1)
        return mode.from_tensor(
            real, source=ConstantSource(f"t{next(names)}"), symbolic_context=StatelessSymbolicContext(sizes)
        )

    def check(name: str, out: torch.Tensor, axis: int = 0) -> None:
        free = isinstance(out.shape[axis], torch.SymInt) and out.shape[axis].node.maybe_as_int() is None
        sys.stdout.write(f"{name}\n" if free else f"{name}: {tuple(out.shape)}\n")

    with mode:
        code = torch.float8_e4m3fn
        a, b = rows_free(3000, 256, dtype=code), torch.empty(520, 256, dtype=code)
        scale, column = torch.empty(()), torch.empty(520)
        check("scaled", scaled.scaled_product(a, b, scale, column, None, torch.bfloat16, False, 0, 0, 0.0))
        scales = rows_free(3000, 2), torch.empty(5, 2)
        check("blockwise", blockwise.blockwise_product(a, b, *scales, None, torch.bfloat16, True, 0, 0, 0.0))
        x, w = rows_free(30_000, 128), torch.empty(24, 128)
        out = bf16.plain_product(x, w, None, torch.bfloat16, torch.bfloat16, 0, 0, 0.0)
        check("plain", out)
        # The sum over symbolic rows is split; its result has none of them.
        dw = bf16.plain_product(out.t(), x.t(), None, torch.float32, torch.bfloat16, 0, 0, 0.0)
        sys.stdout.write("split\n" if tuple(dw.shape) == (24, 128) else f"{tuple(dw.shape)}\n")
        y = rows_free(4000, 20, 64).requires_grad_()
        weights = [torch.empty(8, 20, requires_grad=True), torch.empty(3, 20, requires_grad=True)]
        outs = features.feature_products(y, weights, compute_dtype=torch.bfloat16)
        check("features", outs[1])
        dy, *_ = torch.autograd.grad(outs, [y, *weights], [torch.ones_like(o) for o in outs])
        check("gradients", dy)


if __name__ == "__main__":
    _main()
