"""Trials on operands drawn from what was learned, with the model's own weights.

For what training did not show: kernels that did not stand for their recipe, other devices, other M. Rows are
independent, so the error of fwd and dgrad does not depend on M and is tried on 256 rows; wgrad contracts over
M and is tried at each.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from loka.numerics import OperandStatistics
from loka.probe.error_log import ErrorKey, ErrorLog
from loka.probe.live import LIVE_ROWS, Captured, KeptCasts, live_errors, site_generator
from loka.probe.observer import SiteObservation
from loka.probe.sampler import OperandModel, RowModel, row_model
from loka.probe.trial import Trial, kernel_trials_of
from loka.probe.trial_tasks import trial_key, trial_problem, wgrad_rows
from loka.timing import attempt
from loka.vocab import Device, Operand, Pass, Site

__all__ = ["MAX_DRAWS", "MIN_DRAWS", "sample_errors"]

_log = logging.getLogger("loka.probe")

MIN_DRAWS, MAX_DRAWS = 3, 20
SETTLED_DB = 0.2  # width of the 90 % interval of SQNR at which no more is drawn
SAMPLED = "sampled"


def sample_errors(
    sites: Sequence[Site],
    weight_of: Callable[[str], Tensor],
    observed: Mapping[str, SiteObservation],
    log: ErrorLog,
    *,
    device: Device,
    rows_of: Callable[[Site], Sequence[int]],
    seed: int,
    left_out: Mapping[str, str] | None = None,
) -> list[str]:
    """Replace the log's sampled errors by new ones.

    Each (pass, recipe, kernel, M) is drawn at least 3 and at most 20 times, until the 90 % interval of its
    SQNR is no wider than 0.2 dB.

    Args:
        sites: Those that can be planned and ran.
        weight_of: A site's weight [N, K], whole.
        observed: Statistics by site.
        log: Where errors go.
        device: The machine.
        rows_of: The M at which a site's weight gradient is tried, where `wgrad_rows` allows as many.
        seed: Of the draws, with the site's name.
        left_out: What not to run, with the reason: `name`, `name:pass`, or a single trial as `trial_key`
            gives it.

    Returns:
        Notes: a kernel that failed, and sites that were drawn without what a copula needs.

    Raises:
        DeviceLostError: where a kernel leaves the GPU unusable.
    """
    log.drop(SAMPLED)
    failures: dict[tuple[str, Pass], str] = {}
    not_tried, plain = dict(left_out or {}), list[str]()
    begun, spent = time.monotonic(), _Seconds()
    for site in sites:
        learned = observed.get(site.name)
        if learned is None or not _has_rows(learned.operands.get(Operand.INPUT)):
            continue
        drawn = _Site(site, weight_of(site.name), learned, device, seed)
        if drawn.model is not OperandModel.COPULA:
            plain.append(site.name)
        drawn.choose(rows_of(site), not_tried)
        drawn.run(log)
        _log.debug("drawn trials of `%s`: %s", site.name, drawn.seconds)
        spent.add(drawn.seconds)
        not_tried.update(drawn.failed_trials)
        failures = {**drawn.failures, **failures}  # the first site's words
    _log.info("drawn trials of %d sites in %.1f s: %s", len(sites), time.monotonic() - begun, spent)
    notes = list(failures.values())
    if plain:
        shown = ", ".join(f"`{name}`" for name in plain[:3]) + (", ..." if len(plain) > 3 else "")
        notes.append(
            f"sampled errors at {len(plain)} sites ({shown}) are of independent normal features: no full "
            "observed step gave their distributions"
        )
    return notes


def _has_rows(statistics: OperandStatistics | None) -> bool:
    return statistics is not None and int(statistics.moments.count) > 0


@dataclass(slots=True)
class _Operand:
    """How one operand is drawn."""

    rows: RowModel
    amax: Tensor

    @classmethod
    def of(cls, statistics: OperandStatistics, model: OperandModel) -> _Operand:
        # The scale of a tensorwise cast comes from all rows of a batch, of which a draw has a part: what the
        # observed batches had.
        seen = statistics.history.values()
        seen = seen if seen.numel() else statistics.moments.amax.amax().view(1)
        return cls(row_model(statistics, model=model), seen.median())

    def draw(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows [rows, F], and the amax of the batch they stand for."""
        x = self.rows.draw(rows, generator)
        return x, torch.maximum(self.amax.to(x.device), x.abs().amax())


@dataclass(slots=True)
class _Seconds:
    """Where they went; draws and trials end with a wait for the device only where numbers are read."""

    fitting: float = 0.0
    drawing: float = 0.0
    trying: float = 0.0
    draws: int = 0
    trials: int = 0

    def add(self, other: _Seconds) -> None:
        for name in ("fitting", "drawing", "trying", "draws", "trials"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def __str__(self) -> str:
        return (
            f"fitting {self.fitting:.2f} s, {self.draws} draws {self.drawing:.2f} s, "
            f"{self.trials} trials {self.trying:.2f} s"
        )


@dataclass(slots=True)
class _Site:
    """The trials of one site.

    Attributes:
        failures: Why a kernel failed in a pass, in words for a note.
        failed_trials: The same by trial, as `trial_key` gives it: another site need not try it again.
        seconds: Where they went.
    """

    site: Site
    weight: Tensor
    learned: SiteObservation
    device: Device
    seed: int
    failures: dict[tuple[str, Pass], str] = field(default_factory=dict)
    failed_trials: dict[str, str] = field(default_factory=dict)
    seconds: _Seconds = field(default_factory=_Seconds)
    _open: dict[int, list[Trial]] = field(default_factory=dict)  # m to the trials to go on with

    @property
    def model(self) -> OperandModel:
        """The richest that the statistics of every operand allow."""
        known = [s for o, s in self._statistics().items() if o is not Operand.WEIGHT]
        whole = all(
            s.covariance is not None and s.marginals is not None and int(s.covariance.count) for s in known
        )
        return OperandModel.COPULA if whole else OperandModel.NORMAL

    def _statistics(self) -> dict[Operand, OperandStatistics]:
        return {o: s for o, s in self.learned.operands.items() if _has_rows(s)}

    def choose(self, rows: Sequence[int], left_out: Mapping[str, str]) -> None:
        """What is tried: fwd and dgrad once (m = 0), wgrad at each M."""
        passes = set(self.learned.passes or Pass)
        if Operand.GRAD_OUTPUT not in self._statistics():
            passes &= {Pass.FWD}
        row_wise = tuple(p for p in (Pass.FWD, Pass.DGRAD) if p in passes)
        chosen = {0: kernel_trials_of(replace(self.site, rows=LIVE_ROWS), self.device, row_wise)}
        if Pass.WGRAD in passes:
            for m in wgrad_rows(self.site, rows):
                chosen[m] = kernel_trials_of(replace(self.site, rows=m), self.device, (Pass.WGRAD,))
        self._open = {
            m: [t for t in trials if not left_out.keys() & self._names(t, m)] for m, trials in chosen.items()
        }

    def _names(self, trial: Trial, m: int) -> set[str]:
        """What would leave a trial out."""
        kernel = trial.kernel.name
        return {kernel, f"{kernel}:{trial.pass_}", trial_key(kernel, trial_problem(self.site, trial, m))}

    def run(self, log: ErrorLog) -> None:
        """Draw until everything has settled."""
        statistics, model = self._statistics(), self.model
        begun = time.monotonic()
        x_of = _Operand.of(statistics[Operand.INPUT], model)
        g_of = (
            _Operand.of(statistics[Operand.GRAD_OUTPUT], model) if Operand.GRAD_OUTPUT in statistics else None
        )
        self.seconds.fitting += time.monotonic() - begun
        kept: KeptCasts = {}
        for draw in range(MAX_DRAWS):
            self._open = {m: left for m, left in self._open.items() if left}
            if not self._open:
                return
            generator = site_generator(self.seed, self.site.name, f"draw/{draw}")
            needed = max(LIVE_ROWS if m == 0 else m for m in self._open)
            begun = time.monotonic()
            x, x_amax = x_of.draw(needed, generator)
            g, g_amax = self._gradient(g_of, needed, generator)
            self.seconds.drawing += time.monotonic() - begun
            self.seconds.draws += 1
            begun = time.monotonic()
            for m, trials in self._open.items():
                rows = m or LIVE_ROWS
                passes = frozenset(trial.pass_ for trial in trials)
                captured = Captured(
                    x[:rows], self.weight, x_amax, None if g is None else g[:rows], g_amax, passes
                )
                self.seconds.trials += len(trials)
                for trial, values in self._tried(captured, trials, generator, kept, m):
                    log.add(self.site.name, [trial], values, source=SAMPLED, m=m)
            log.collect()
            self.seconds.trying += time.monotonic() - begun
            if draw + 1 >= MIN_DRAWS:
                self._close_settled(log)

    def _gradient(
        self, g_of: _Operand | None, rows: int, generator: torch.Generator
    ) -> tuple[Tensor | None, Tensor | None]:
        """Drawn only while a pass is open that takes it."""
        needs = any(trial.pass_ is not Pass.FWD for trials in self._open.values() for trial in trials)
        return g_of.draw(rows, generator) if g_of is not None and needs else (None, None)

    def _tried(
        self, captured: Captured, trials: list[Trial], generator: torch.Generator, kept: KeptCasts, m: int
    ) -> Iterator[tuple[Trial, Tensor]]:
        """Each trial with its numbers [1, 9]; one that fails is noted and not tried again.

        On a GPU each is awaited: an error there is told at some later call.
        """
        where, state = captured.x.device, generator.get_state()

        def errors_of(some: list[Trial]) -> Tensor:
            generator.set_state(state)
            with torch.no_grad():
                return live_errors(captured, some, generator, kept=kept)

        if where.type == "cpu":  # nothing but emulated kernels, which do not fail
            values: Tensor | None = errors_of(trials)
        else:
            values, _ = attempt("trials", functools.partial(errors_of, trials), where=where)
        if values is not None:
            yield from zip(trials, values.split(1), strict=True)
            return
        for trial in trials:  # one of them fails: which?
            row, failure = attempt(trial.kernel.name, functools.partial(errors_of, [trial]), where=where)
            if row is not None:
                yield trial, row
                continue
            self.failed_trials[trial_key(trial.kernel.name, trial_problem(self.site, trial, m))] = failure
            self.failures.setdefault(
                (trial.kernel.name, trial.pass_),
                f"{trial.kernel.name} failed on drawn operands at {trial.pass_} of `{self.site.name}`: "
                f"{failure}",
            )
        for m, left in self._open.items():
            self._open[m] = [t for t in left if (t.kernel.name, t.pass_) not in self.failures]

    def _close_settled(self, log: ErrorLog) -> None:
        # What no draw gave a number for (a kernel that refuses the sample's shape) gives none later.
        for m, trials in self._open.items():
            known = [(t, log.interval(self._key(t, m))) for t in trials]
            self._open[m] = [t for t, sqnr in known if sqnr and sqnr.high - sqnr.low > SETTLED_DB]

    def _key(self, trial: Trial, m: int) -> ErrorKey:
        return ErrorKey(self.site.name, *trial.key, trial.kernel.name, SAMPLED, m)
