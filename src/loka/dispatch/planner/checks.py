"""Whether a plan, perhaps edited by hand, says something that can be run."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

from loka.artifacts.plan import Choice, Plan, SitePlan
from loka.errors import ArtifactError
from loka.kernels import HIGH_PRECISION, kernel
from loka.vocab import GemmProblem, OperandSpec, Pass

__all__ = ["MAX_CHOICES", "validate_plan"]

MAX_CHOICES = 4  # decision 5


def validate_plan(plan: Plan, *, where: str = "plan") -> None:
    """Check what types cannot: order of M, known kernels, and specs that the kernels take.

    Args:
        plan: The plan.
        where: The file it came from, for messages.

    Raises:
        ArtifactError: for a basis, a list of choices or specs that cannot be, naming site, pass and value.
        UnknownNameError: for a kernel that does not exist.
    """
    if plan.basis not in ("accuracy", "time"):
        raise ArtifactError(
            f"`{where}`: basis `{plan.basis}` is not known", hint="it is `accuracy` or `time`"
        )
    for name, count in Counter(site.name for site in plan.sites).items():
        if count > 1:
            raise ArtifactError(f"`{where}`: site `{name}` stands {count} times", hint="keep one")
    for site in plan.sites:
        if site.n < 1 or site.k < 1:
            raise ArtifactError(f"`{where}`: site `{site.name}` has N={site.n} K={site.k}")
        for pass_ in Pass:
            _check_order(site, pass_, where)
            for choice in site.choices(pass_):
                _check_choice(site, pass_, choice, where)


def _check_order(site: SitePlan, pass_: Pass, where: str) -> None:
    at = f"`{where}`: {pass_} of `{site.name}`"
    choices = site.choices(pass_)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ArtifactError(f"{at} has {len(choices)} choices", hint=f"give 1 to {MAX_CHOICES}")
    if choices[-1].m_below is not None:
        raise ArtifactError(
            f"{at}: the last choice ends at m_below={choices[-1].m_below}",
            hint="the last choice has m_below=null, so that every M has a kernel",
        )
    last = 0
    for choice in choices[:-1]:
        if choice.m_below is None:
            raise ArtifactError(f"{at}: a choice with m_below=null is not the last", hint="order them by M")
        if choice.m_below <= last:
            raise ArtifactError(
                f"{at}: m_below={choice.m_below} does not rise above {last}", hint="order the choices by M"
            )
        last = choice.m_below


def _check_choice(site: SitePlan, pass_: Pass, choice: Choice, where: str) -> None:
    found = kernel(choice.kernel)
    at = f"`{where}`: {pass_} of `{site.name}`"
    if found.operands(GemmProblem(1, 1, 1, pass_))[0].is_quantized:
        for letter, spec in (("spec_a", choice.spec_a), ("spec_b", choice.spec_b)):
            if not spec.is_quantized:
                raise ArtifactError(
                    f"{at}: {choice.kernel} takes 8-bit operands, {letter} has format {spec.format}",
                    hint=f"use `{HIGH_PRECISION}` to leave the pass in bf16",
                )
    rows = choice.m_below - 1 if choice.m_below is not None else 1
    problem = replace(
        GemmProblem.of_linear(pass_, rows=rows, out_features=site.n, in_features=site.k),
        a_format=choice.spec_a.format,
        b_format=choice.spec_b.format,
    )
    needed = found.operands(problem)
    for letter, spec, want in zip(("spec_a", "spec_b"), (choice.spec_a, choice.spec_b), needed, strict=True):
        if spec != want:
            raise ArtifactError(
                f"{at}: {letter} is not what {choice.kernel} takes",
                lines=_differences(spec, want),
                hint="a kernel's specs go with it: copy all of them, or change the kernel's name only "
                "through `Requirement(pin=...)`",
            )


def _differences(spec: OperandSpec, want: OperandSpec) -> list[str]:
    """A line for each field that differs: needed and found."""
    lines = []
    for field in fields(OperandSpec):
        found, needed = getattr(spec, field.name), getattr(want, field.name)
        if found != needed:
            lines.append(f"{field.name.ljust(14)}  needs {needed}, found {found}")
    return lines
