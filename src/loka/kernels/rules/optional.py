"""What the optional kernel libraries take. Whether one is installed is `available`'s business, not a rule's.

k is never checked: the cast pads it with zeros.
"""

from __future__ import annotations

from loka.kernels.rules.checks import all_of, needs_arch, needs_divisible, needs_e4m3, needs_float8
from loka.vocab import Device, GemmProblem, Pass, Support

__all__ = ["deep_gemm_rules", "mslk_groupwise_rules", "mslk_rules", "transformer_engine_mx_rules"]

_HOPPER = frozenset({(9, 0)})
_BLACKWELL = frozenset({(10, 0)})


def mslk_rules(problem: GemmProblem, device: Device) -> Support:
    """Whether MSLK's CUTLASS kernels, rowwise or groupwise, can run the problem.

    They store 16 bytes at a time, eight bf16 numbers: hence the rule for N.
    """
    return all_of(
        needs_float8(problem),
        needs_e4m3(problem),
        needs_arch(device, _HOPPER),
        needs_divisible("N", problem.n, 8),
    )


def mslk_groupwise_rules(problem: GemmProblem, device: Device) -> Support:
    """Whether MSLK's groupwise kernel can run the problem.

    It does not check what its tiles of 128 can take: at other shapes on an H200 it ended in an illegal
    instruction, which costs the process its CUDA context. So it is kept to whole tiles, and to more than one
    block of k as in the library's own tests.
    """
    return all_of(
        mslk_rules(problem, device),
        needs_divisible("M", problem.m, 128),
        needs_divisible("N", problem.n, 128),
        Support.yes() if problem.k > 128 else Support.no(f"needs K > 128, got K={problem.k}"),
    )


def deep_gemm_rules(problem: GemmProblem, device: Device) -> Support:
    """Whether DeepGEMM can run the problem on Hopper.

    Its bf16 kernel stops the device where N % 8 is not 0; its fp32 one needs rows of 16 bytes, N % 4. One
    rule for both, so that a site's three passes agree. The fp32 one failed on an H200 with m = 1 and 17.
    """
    return all_of(
        needs_float8(problem),
        needs_e4m3(problem),
        needs_arch(device, _HOPPER),
        needs_divisible("N", problem.n, 8),
        needs_divisible("M", problem.m, 4) if problem.pass_ is Pass.WGRAD else Support.yes(),
    )


def transformer_engine_mx_rules(problem: GemmProblem, device: Device) -> Support:
    """Whether Transformer Engine's MXFP8 product can run the problem, by its contract.

    Its tensors come in whole blocks of 32 in both dimensions.
    """
    return all_of(
        needs_float8(problem),
        needs_e4m3(problem),
        needs_arch(device, _BLACKWELL),
        needs_divisible("M", problem.m, 32),
        needs_divisible("N", problem.n, 32),
    )
