"""Pins: what the user fixed, by site pattern and pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from loka.dispatch.planner.candidates import pass_problem, supports_every_m
from loka.errors import NoKernelError, UnknownNameError, unknown_name
from loka.kernels import HIGH_PRECISION, KERNELS, Kernel, kernel
from loka.vocab import A_FORMATS, Device, Format, Pass, Site

__all__ = ["Pin", "Pins", "resolve_pins"]


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned pass.

    Attributes:
        kernel: The kernel that must run.
        pattern: The pattern that said so.
        a_formats: Formats of operand A in which the kernel runs there, the preferred first.
    """

    kernel: Kernel
    pattern: str
    a_formats: tuple[Format, ...]

    @property
    def is_bf16(self) -> bool:
        """True when the pass is pinned to bf16."""
        return self.kernel.name == HIGH_PRECISION


Pins = dict[tuple[str, Pass], Pin]


def resolve_pins(pins: Mapping[str, str], sites: Sequence[Site], device: Device) -> Pins:
    """(site, pass) to its pin. Where several patterns match, the last one wins.

    Raises:
        UnknownNameError: for a pattern that matches no site that can be planned, an unknown pass or kernel.
        NoKernelError: for a pinned kernel that cannot run a pass, with what every kernel needs.
    """
    resolved: Pins = {}
    for pattern, name in pins.items():
        glob, passes = _split(pattern)
        wanted = kernel(name)
        matched = [s for s in sites if s.plannable and fnmatchcase(s.name, glob)]
        if not matched:
            raise _no_match(pattern, glob, sites)
        for site in matched:
            for pass_ in passes:
                formats = _formats(wanted, site, pass_, device, pattern)
                resolved[site.name, pass_] = Pin(wanted, pattern, formats)
    return resolved


def _split(pattern: str) -> tuple[str, tuple[Pass, ...]]:
    glob, colon, pass_name = pattern.rpartition(":")
    if not colon:
        return pattern, tuple(Pass)
    if pass_name not in list(Pass):
        raise unknown_name("pass", pass_name, [str(p) for p in Pass], where=f"pin `{pattern}`")
    return glob, (Pass(pass_name),)


def _no_match(pattern: str, glob: str, sites: Sequence[Site]) -> UnknownNameError:
    for site in sites:
        if fnmatchcase(site.name, glob):
            return UnknownNameError(
                f"pin `{pattern}` matches only sites that cannot be planned, such as `{site.name}`",
                hint=f"`{site.name}` is not planned: {site.not_planned}",
            )
    names = [s.name for s in sites if s.plannable]
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return UnknownNameError(f"pin `{pattern}` matches no site", hint=f"sites: {shown or 'none'}")


def _formats(wanted: Kernel, site: Site, pass_: Pass, device: Device, pattern: str) -> tuple[Format, ...]:
    formats = A_FORMATS[pass_]
    usable = tuple(f for f in formats if supports_every_m(wanted, site, pass_problem(site, pass_, f), device))
    if usable:
        return usable
    problem = pass_problem(site, pass_)
    # By the rules alone: a plan is the same whatever is installed where it is made.
    found = [(k, supports_every_m(k, site, problem, device)) for k in KERNELS.values()]
    width = max(len(k.name) for k, _ in found)
    reason = supports_every_m(wanted, site, problem, device).reason
    lines = [f"{wanted.name.ljust(width)}  {reason}"]
    lines += [f"{k.name.ljust(width)}  {s.reason}" for k, s in found if not s and k.name != wanted.name]
    able = [k.name for k, s in found if s]
    raise NoKernelError(
        f"`{wanted.name}`, pinned by `{pattern}`, cannot run at `{site.name}` for {pass_} "
        f"(M={problem.m} N={problem.n} K={problem.k})",
        lines=lines,
        hint=f"pin one that can: {', '.join(able)}",
    )
