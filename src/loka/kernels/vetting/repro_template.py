"""The text of the script that shows a fault without LoKA; `loka.kernels.vetting.repro` fills it in."""

from __future__ import annotations

from string import Template

__all__ = ["SCRIPT"]

SCRIPT = Template('''\
"""A product that gives a wrong result: $name, $pass_, $shape ($note).

What was found: $reason

D [m, n] = A [m, k] @ B [n, k].T, both operands with their decode scales: real = value * scale.
Needs torch and the library. Exit code 1: the result is wrong, or two runs differ.
"""

import math
import platform
import sys
from importlib import metadata

import torch

DEVICE = "$device"
M, N, K = $m, $n, $k
OUT_DTYPE = $out_dtype
ONE_SIGNED = $one_signed
# One scale a block of rows x k (0: of all), laid out as named; k is zero-padded to a multiple of pad.
A = dict($a)
B = dict($b)
MOST_NORM, MOST_ROW = $norm, $row  # relative error of the whole, and of the worst row or column


$call


def operand(rows, spec, seed):
    """Values [rows, k] and decode scales, which differ up to 2^8-fold (operands of one sign: not at all)."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.rand if ONE_SIGNED else torch.randn)(rows, K, generator=generator)
    most = spec["most"]
    if not most:  # not quantized
        x = x.to(DEVICE, spec["dtype"])
        return (x.t().contiguous().t() if spec["transposed"] else x), torch.ones((), device=DEVICE)
    x = (x * most / (1 if ONE_SIGNED else 6)).clamp(-most, most)
    x = torch.nn.functional.pad(x, (0, -K % spec["pad"])).to(spec["dtype"])
    shape = [-(-rows // spec["block_rows"])] if spec["block_rows"] else []
    shape += [-(-x.shape[1] // spec["block_k"])] if spec["block_k"] else []
    power = 0 if ONE_SIGNED else 4
    scale = torch.exp2(torch.randint(-power, power + 1, shape, generator=generator).float())
    scale *= 2.0 ** -round(math.log2(most))
    if spec["layout"] == "mn_major":  # the scales of neighbouring rows lie next to one another
        scale = scale.t().contiguous().t()
    if spec["layout"] == "mn_major_pad4":  # those along k do, padded by zeros to a multiple of 4
        scale = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
    return x.to(DEVICE), scale.to(DEVICE)


def scale_of_rows(scale, spec, rows):
    """The scales of some rows, one a row."""
    return scale[rows // spec["block_rows"]] if scale.dim() else scale


def decoded(values, scale_of_row, spec, start, stop):
    """Columns start to stop as FP64; start is a multiple of 128."""
    scale = scale_of_row.double()
    if scale.dim() == 1:
        scale = scale[:, None]
    if scale.dim() == 2 and spec["block_k"]:
        part = scale[:, start // spec["block_k"] : -(-stop // spec["block_k"])]
        scale = part.repeat_interleave(spec["block_k"], dim=1)[:, : stop - start]
    return values[:, start:stop].double() * scale


def reference(a, b, scale_a, scale_b, rows):
    """FP64 product of some rows of a with b, and the usual size of each element, in chunks of k."""
    a, scale_a = a[rows], scale_of_rows(scale_a, A, rows)
    scale_b = scale_of_rows(scale_b, B, torch.arange(N, device=DEVICE))
    ref = torch.zeros(len(rows), N, dtype=torch.float64, device=DEVICE)
    squares_a, squares_b = (torch.zeros(size, dtype=torch.float64, device=DEVICE) for size in ref.shape)
    for start in range(0, a.shape[1], 8192):
        stop = min(a.shape[1], start + 8192)
        x, y = decoded(a, scale_a, A, start, stop), decoded(b, scale_b, B, start, stop)
        ref += x @ y.t()
        squares_a += x.square().sum(1)
        squares_b += y.square().sum(1)
    size = (squares_a[:, None] * squares_b[None, :]).sqrt()
    return ref, size * (ref / size).square().mean().sqrt()


def run(a, b, scale_a, scale_b):
    # The output gets memory full of NaN: what the kernel leaves unwritten shows.
    poison = torch.full((M * N * OUT_DTYPE.itemsize,), 255, dtype=torch.uint8, device=DEVICE)
    del poison
    return product(a, b, scale_a, scale_b, OUT_DTYPE)


def main():
    (a, scale_a), (b, scale_b) = operand(M, A, 0), operand(N, B, 1)
    out, again = (run(a, b, scale_a, scale_b) for _ in range(2))

    rows = torch.arange(M, device=DEVICE)
    if M > 512:  # the first, the last, and some between
        between = torch.randperm(M, generator=torch.Generator().manual_seed(2))[:256].to(DEVICE)
        rows = torch.cat([rows[:128], between, rows[-128:]]).unique()
    ref, size = reference(a, b, scale_a, scale_b, rows)
    wrong = out[rows].double() - ref
    norm = float((wrong / size).norm() / (ref / size).norm())
    # An element counts relative to its own size or to what is usual at its place, whichever is larger.
    wrong /= torch.maximum(size, ref.abs())
    by_row, by_column = (wrong.square().mean(dim).sqrt() for dim in (1, 0))
    row, column = float(by_row.max()), float(by_column.max())
    same = torch.equal(out.view(torch.uint8), again.view(torch.uint8))

    device = torch.cuda.get_device_name(DEVICE) if DEVICE.startswith("cuda") else platform.machine()
    print(f"{device}, CUDA {torch.version.cuda}")
    for package in ("torch", "triton", "mslk-cuda", "sgl-deep-gemm", "transformer-engine"):
        try:
            print(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            pass
    print(f"relative error of the whole {norm:.3g} (at most {MOST_NORM:g})")
    print(f"worst row {int(rows[by_row.argmax()])}: {row:.3g} (at most {MOST_ROW:g})")
    print(f"worst column {int(by_column.argmax())}: {column:.3g} (at most {MOST_ROW:g})")
    print(f"two runs are {'the same' if same else 'different'}")
    right = norm <= MOST_NORM and row <= MOST_ROW and column <= MOST_ROW and same  # NaN is wrong
    print("right" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
''')
