"""A script for a library's authors: the failed product without LoKA, from operands made of a seed.

It imports torch and the library alone, builds FP8 values and strongly differing scales directly, calls the
library as the kernel's own `repro()` source does, compares with FP64 and exits 1 where the result is wrong
or two runs differ.
"""

from __future__ import annotations

import re
from string import Template

import torch

from loka.kernels.protocol import Kernel
from loka.kernels.vetting.limits import Limits, limits_of, one_sign_limit
from loka.kernels.vetting.verdict import Data, Trial
from loka.numerics import torch_dtype
from loka.vocab import GemmProblem, Granularity, OperandSpec, ScaleLayout

__all__ = ["repro_name", "repro_script"]


def repro_name(kernel: Kernel, trial: Trial) -> str:
    """The script's file name: `torch_rowwise_wgrad_48x272x18_e5m2_fp32.py`."""
    problem = trial.problem
    parts = [kernel.name, problem.pass_, problem.key, problem.a_format, trial.out_dtype]
    parts += ["one_signed"] if trial.data is Data.ONE_SIGNED else []
    return re.sub(r"\W", "_", "_".join(parts)) + ".py"


def repro_script(kernel: Kernel, trial: Trial, *, reason: str, device: torch.device | str) -> str:
    """The whole script; empty where the kernel is of no library, so that nobody else can be asked.

    Args:
        kernel: Its `repro()` is the call.
        trial: What failed. A bias is left out: the call takes none.
        reason: What vetting found, put at the head.
        device: Where it failed.
    """
    call = kernel.repro().strip()
    if not call:
        return ""
    problem = trial.problem
    spec_a, spec_b = kernel.operands(problem)
    limits = _limits(kernel, trial)
    return _SCRIPT.substitute(
        name=kernel.name,
        pass_=problem.pass_,
        shape=f"m = {problem.m}, n = {problem.n}, k = {problem.k}",
        reason=_one_line(reason),
        device=str(torch.device(device)),
        m=problem.m,
        n=problem.n,
        k=problem.k,
        a=_operand_arguments(spec_a),
        b=_operand_arguments(spec_b),
        one_signed=trial.data is Data.ONE_SIGNED,
        out_dtype=str(torch_dtype(trial.out_dtype)),
        norm=f"{limits.norm:.2g}",
        row=f"{limits.row:.2g}",
        call=call,
        note=_note(problem, trial),
    )


def _limits(kernel: Kernel, trial: Trial) -> Limits:
    if trial.data is Data.ONE_SIGNED:
        limit = one_sign_limit(kernel.accumulation)
        return Limits(limit, 4 * limit)
    return limits_of(trial.out_dtype, kernel.accumulation)


def _one_line(text: str) -> str:
    # It stands in a docstring: nothing in an error's text may end that.
    return re.sub(r"\s+", " ", text).replace("\\", "/").replace('"', "'").strip() or "nothing was found"


def _note(problem: GemmProblem, trial: Trial) -> str:
    signs = "one sign" if trial.data is Data.ONE_SIGNED else "both signs"
    return f"{problem.a_format} x {problem.b_format}, operands of {signs}"


def _operand_arguments(spec: OperandSpec) -> str:
    """The arguments of the script's `operand` for a spec, after the rows."""
    dtype = torch_dtype(spec.format)
    if not spec.is_quantized:
        return f"{dtype}, {spec.format.is_float8 and spec.format.max}, transposed={spec.transposed}"
    block_rows, block_k = _blocks(spec)
    return (
        f"{dtype}, {spec.format.max}, block_rows={block_rows}, block_k={block_k}, "
        f"layout={str(spec.scale_layout)!r}, pad={spec.pad}"
    )


def _blocks(spec: OperandSpec) -> tuple[int, int]:
    """Rows and columns that share a scale; 0 for all."""
    if spec.granularity is Granularity.TENSORWISE and spec.scale_layout is not ScaleLayout.VECTOR:
        return 0, 0
    if spec.granularity in (Granularity.TENSORWISE, Granularity.ROWWISE):
        return 1, 0
    return spec.granularity.block_rows or 1, spec.granularity.block_k or 0


_SCRIPT = Template('''\
"""A product that gives a wrong result: $name, $pass_, $shape ($note).

What was found: $reason

D [m, n] = A [m, k] @ B [n, k].T, both operands with their decode scales: real = value * scale.
Needs torch and the library. Exit code 1: the result is wrong, or two runs differ.
"""

import platform
import sys

import torch

DEVICE = "$device"
M, N, K = $m, $n, $k
OUT_DTYPE = $out_dtype
ONE_SIGNED = $one_signed
MOST_NORM, MOST_ROW = $norm, $row  # relative error of the whole, and of the worst row or column


$call


def operand(rows, dtype, most, *, block_rows=0, block_k=0, layout="", pad=1, transposed=False, seed=0):
    """Values [rows, k zero-padded to `pad`] and decode scales, one a block, differing up to 2^8-fold."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.rand if ONE_SIGNED else torch.randn
    x = wide(rows, K, generator=generator)
    if not most:  # not quantized: no scales
        x = x.to(DEVICE, dtype)
        return (x.t().contiguous().t() if transposed else x), torch.ones((), device=DEVICE)
    x = (x * most / (1 if ONE_SIGNED else 6)).clamp(-most, most)
    x = torch.nn.functional.pad(x, (0, -K % pad)).to(dtype)
    shape = () if not block_rows else (-(-rows // block_rows),)
    shape += (-(-x.shape[1] // block_k),) if block_k else ()
    most_power = 0 if ONE_SIGNED else 4
    scale = torch.exp2(torch.randint(-most_power, most_power + 1, shape, generator=generator).float())
    if layout == "mn_major":  # the blocks of rows lie next to one another
        scale = scale.t().contiguous().t()
    if layout == "mn_major_pad4":  # the blocks of k, padded by zeros to a multiple of 4
        scale = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
    return x.to(DEVICE), scale.to(DEVICE)


def decoded(values, scale, block_rows, block_k, start, stop):
    """Columns start to stop as FP64; start is a multiple of 128."""
    x = values[:, start:stop].double()
    if scale.dim() == 1:
        return x * scale.double()[:, None]
    if scale.dim() == 2:
        part = scale[:, start // block_k : -(-stop // block_k)].double()
        part = part.repeat_interleave(block_k, dim=1)[:, : x.shape[1]]
        return x * part.repeat_interleave(block_rows, dim=0)[: x.shape[0]]
    return x * scale.double()


def rows_of(values, scale, block_rows, rows):
    """Some rows with their scales, which are one a row then."""
    if scale.dim() == 0:
        return values[rows], scale
    return values[rows], scale[rows // block_rows]


def main():
    blocks = {}
    pairs = []
    for seed, (rows, make) in enumerate(((M, make_a), (N, make_b))):
        values, scale, blocks[seed] = make(rows, seed)
        pairs.append((values, scale))
    (a, scale_a), (b, scale_b) = pairs

    def run():
        # The output gets memory full of NaN: what the kernel leaves unwritten shows.
        del_me = torch.full((M * N * OUT_DTYPE.itemsize,), 255, dtype=torch.uint8, device=DEVICE)
        del del_me
        return product(a, b, scale_a, scale_b, OUT_DTYPE)

    out, again = run(), run()

    # FP64 of the same operands, for up to 512 of the rows, in chunks of k.
    chosen = torch.arange(M, device=DEVICE)
    if M > 512:
        middle = torch.randperm(M, generator=torch.Generator().manual_seed(2))[:256].to(DEVICE)
        chosen = torch.cat([chosen[:128], middle, chosen[-128:]]).unique()
    some, some_scale = rows_of(a, scale_a, blocks[0][0] or 1, chosen)
    ref = torch.zeros(len(chosen), N, dtype=torch.float64, device=DEVICE)
    squares_a, squares_b = (torch.zeros(r, dtype=torch.float64, device=DEVICE) for r in ref.shape)
    for start in range(0, a.shape[1], 8192):
        stop = min(a.shape[1], start + 8192)
        x = decoded(some, some_scale, 1, blocks[0][1], start, stop)
        y = decoded(b, scale_b, blocks[1][0], blocks[1][1], start, stop)
        ref += x @ y.t()
        squares_a += x.square().sum(1)
        squares_b += y.square().sum(1)

    # An element counts relative to its own size or to what is usual at its place, whichever is larger.
    size = (squares_a[:, None] * squares_b[None, :]).sqrt()
    size *= (ref / size).square().mean().sqrt()
    wrong = (out[chosen].double() - ref) / torch.maximum(size, ref.abs())
    by_row, by_column = (wrong.square().mean(d).sqrt() for d in (1, 0))
    norm = float(((wrong * torch.maximum(size, ref.abs()) / size).norm() / (ref / size).norm()))
    row, column = float(by_row.max()), float(by_column.max())
    same = torch.equal(out.view(torch.uint8), again.view(torch.uint8))

    device = torch.cuda.get_device_name(DEVICE) if DEVICE.startswith("cuda") else platform.machine()
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {device}")
    print(f"relative error of the whole {norm:.3g} (at most {MOST_NORM:g})")
    print(f"worst row {int(chosen[by_row.argmax()])}: {row:.3g} (at most {MOST_ROW:g})")
    print(f"worst column {int(by_column.argmax())}: {column:.3g} (at most {MOST_ROW:g})")
    print(f"two runs are {'the same' if same else 'different'}")
    # Written so that NaN is wrong.
    right = norm <= MOST_NORM and row <= MOST_ROW and column <= MOST_ROW and same
    print("right" if right else "WRONG")
    return 0 if right else 1


def make_a(rows, seed):
    return described(rows, $a, seed=seed)


def make_b(rows, seed):
    return described(rows, $b, seed=seed)


def described(rows, *args, **kwargs):
    values, scale = operand(rows, *args, **kwargs)
    return values, scale, (kwargs.get("block_rows", 0), kwargs.get("block_k", 0))


if __name__ == "__main__":
    sys.exit(main())
''')
