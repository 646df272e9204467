"""Groups of passes that are switched together, to learn what each costs in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loka.errors import UsageError
from loka.vocab import Pass, ProductRecipe, Recipe, Site

__all__ = ["PassGroup", "Switch", "block_of", "pass_groups"]


@dataclass(frozen=True, slots=True)
class Switch:
    """One pass of one site in another recipe.

    Attributes:
        site: Name of the site.
        pass_: The pass.
        recipe: What it runs in.
    """

    site: str
    pass_: Pass
    recipe: ProductRecipe


@dataclass(frozen=True, slots=True)
class PassGroup:
    """Passes that are switched together.

    Attributes:
        name: Such as `dgrad`, or `wgrad@tower.deep`.
        switches: The passes; at least one.
    """

    name: str
    switches: tuple[Switch, ...]


def block_of(site: str) -> str:
    """The block of a model that a site belongs to.

    Up to the first number in the qualified name (`tower.layers.3.fmb.1` -> `tower.layers.3`); where the
    number is the site's own place in a sequence, the sequence (`tower.deep.2` -> `tower.deep`); without a
    number, the parent module.
    """
    parts = site.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1]) or site


def pass_groups(
    sites: Sequence[Site],
    recipe: Recipe,
    *,
    passes: Sequence[Pass] = tuple(Pass),
    ran: Callable[[str, Pass], bool] | None = None,
) -> tuple[PassGroup, ...]:
    """All sites of each pass kind, then each kind by block of the model.

    Args:
        sites: Those that cannot be planned, were not reached or are too narrow for FP8 are left out.
        recipe: What is switched to; passes that it leaves in bf16 make no group.
        passes: Kinds wanted.
        ran: Whether a pass runs at a site at all (a first layer has no dgrad); None for all.

    Returns:
        `fwd`, `dgrad`, `wgrad`, then `fwd@<block>`, ...; blocks only where the model has several.

    Raises:
        UsageError: if no group is left.
    """
    eligible = [s for s in sites if s.plannable and s.rows and not s.is_narrow]
    whole: list[PassGroup] = []
    parts: list[PassGroup] = []
    for pass_ in passes:
        product = recipe.product(pass_)
        switches = [Switch(s.name, pass_, product) for s in eligible if ran is None or ran(s.name, pass_)]
        if not product.is_quantized or not switches:
            continue
        blocks: dict[str, list[Switch]] = {}
        for switch in switches:
            blocks.setdefault(block_of(switch.site), []).append(switch)
        whole.append(PassGroup(str(pass_), tuple(switches)))
        if len(blocks) > 1:
            parts += [PassGroup(f"{pass_}@{name}", tuple(own)) for name, own in blocks.items()]
    if not whole:
        raise UsageError(
            f"recipe `{recipe.name}` switches no pass of these {len(sites)} sites",
            hint="sites must be plannable, reached and at least 16 wide; `bf16` is no low precision",
        )
    return (*whole, *parts)
