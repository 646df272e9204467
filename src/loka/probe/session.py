"""Probe: a context manager around a training loop that the user does not change."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from loka.artifacts.profile import ErrorTable, Overhead, Profile, StepShares
from loka.errors import UsageError
from loka.kernels import device_of
from loka.numerics import OperandStatistics, statistics_bytes
from loka.probe.attach import (
    changes_between,
    check_sites_of_state,
    device_of_linears,
    nothing_observed,
    nothing_to_observe,
    observable_linears,
    unwrapped,
)
from loka.probe.build import Learned, build_profile
from loka.probe.eager import EAGER
from loka.probe.error_log import ErrorLog
from loka.probe.finding import SiteFinder
from loka.probe.held_out import Evaluate, HeldOut
from loka.probe.live import Captured, live_errors, site_generator
from loka.probe.observer import Observer
from loka.probe.overhead import StepKind
from loka.probe.ranks import Ranks
from loka.probe.saving import PeriodicSaving
from loka.probe.schedule import Schedule
from loka.probe.session_state import load_counts, load_errors, sites_in_state, state_of_session
from loka.probe.state import sites_of_state, state_of_sites
from loka.probe.step_profile import StepProfiler, shares_of
from loka.probe.trial import Trial, trials_of
from loka.vocab import Operand, Pass, Site

__all__ = ["Probe"]

_TIMED_STEP = 5  # late enough that allocators, autotuning and compilation are warm
_SETTLED_DB = 0.5
_SETTLED_OBSERVATIONS = 5
_log = logging.getLogger("loka.probe")


class Probe:
    """Learn what every linear of a model multiplies, while it trains.

    Every `every`-th step is observed: hooks are placed before it and removed after it, it runs eagerly even
    where the model is compiled (hooks inside a compiled region do not fire), and nothing it does changes a
    number of the training. The first observed step and then each `live_every`-th is a full one: it takes
    distributions and tries every recipe on real rows besides. Numbers are read one observed step later, so no
    step waits.

    Nothing is assumed of who runs the loop: a trainer may call `step()` from a callback, and a pipeline may
    have called the next batch's forward before.

    Args:
        model: The model in training, compiled or not, inside DistributedDataParallel or not. Evaluation
            between steps (`model.eval()`) is left out.
        every: Observe each `every`-th step.
        live_every: Each such observed step is a full one.
        max_overhead: Largest share of the training that observing may cost. Where an observed step costs
            more (its eager run included), `every` is raised and a warning says so; None for no limit.
        evaluate: `evaluate(model, batch)` gives the loss of each held-out row, [rows]; with `batches`.
        batches: Held-out batches that can be read again and again; with `evaluate`.
        seed: For the samples of rows and the draws.
        save_to: A file into which the statistics are written in the background; its folder must exist.
        save_every: Steps from one such write to the next.
        on_observed: Called with this Probe and the number of a full observed step, once its numbers are read.
        across_ranks: Whether every rank of an initialised process group has its Probe. They then decide
            together, and `profile()` reduces over ranks. False for a Probe on one rank alone.

    Raises:
        UsageError: for an option out of range, `evaluate` without `batches` or the other way round, or a
            model without an nn.Linear that can be planned.

    Example:
        >>> with loka.Probe(model, every=100) as probe:
        ...     for batch in loader:
        ...         train_step(model, batch)
        ...         if probe.step():
        ...             break
        >>> profile = probe.profile()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        live_every: int = 10,
        max_overhead: float | None = 0.01,
        evaluate: Evaluate | None = None,
        batches: Iterable[object] | None = None,
        seed: int = 0,
        save_to: str | os.PathLike[str] | None = None,
        save_every: int = 10_000,
        on_observed: Callable[[Probe, int], object] | None = None,
        across_ranks: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"Probe takes an nn.Module, got a {type(model).__name__}")
        self._model, self._seed = unwrapped(model), seed
        self._linears = observable_linears(self._model)
        if not self._linears:
            raise nothing_to_observe(self._model)
        self._where = device_of_linears(self._linears)
        self._device = device_of(self._where)
        self._ranks = Ranks(together=across_ranks, where=self._where)
        self._schedule = Schedule(
            every=every,
            live_every=live_every,
            max_overhead=max_overhead,
            where=self._where,
            ranks=self._ranks,
        )
        self._held_out = HeldOut.of(evaluate, batches)
        self._saving = PeriodicSaving(save_to, save_every)
        self._on_observed = on_observed
        self._observer = self._new_observer()
        self._log = ErrorLog()
        self._trials: dict[str, list[Trial]] = {}
        self._sites: list[Site] | None = None
        self._shares: StepShares | None = None
        self._finder = SiteFinder(self._model)
        self._profiler: StepProfiler | None = None
        self._kind = StepKind.PLAIN  # what the step under way is
        self._inside = self._observing = self._forces_eager = False
        self._unread: int | None = None  # the full step whose numbers are still to be read
        self._notes: list[str] = []

    def _new_observer(self) -> Observer:
        return Observer(
            self._linears,
            on_captured=self._try_live,
            seed=self._seed,
            is_training=lambda: self._model.training,
        )

    # --- the loop -------------------------------------------------------------------------------------

    def __enter__(self) -> Probe:
        if self._inside:
            raise UsageError("this Probe is attached already", hint="make one Probe for each `with` block")
        schedule = self._schedule
        options = {"every": schedule.every, "live_every": schedule.live_every, "sites": len(self._linears)}
        self._ranks.check_agreement(options | {"steps seen": schedule.seen})
        _log.info(
            "observing each %dth step of %d linears, whose statistics hold at most %.1f MB",
            schedule.every,
            len(self._linears),
            self._planned_bytes() / 1e6,
        )
        self._inside = True
        schedule.clock.mark(None)
        try:
            self._prepare()
        except BaseException:
            self._finish(stepped=False)
            self._inside = False
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish(stepped=False)
        self._inside = False
        if error is not None:
            return
        self._read_numbers()
        self._schedule.clock.read_all()
        self._saving.close()
        if not self._schedule.observed and (not self._schedule.seen or not self._sites):
            _log.warning("%s", str(self._why_nothing()).replace("\n\n", "; "))

    def step(self) -> bool:
        """Tell Probe that one training step is over (the optimizer's step included).

        Returns:
            True once the errors of forward and input gradient have settled: at least 5 observations and a
            90 % interval of SQNR within +-0.5 dB for every recipe at every site.

        Raises:
            UsageError: outside the `with` block.
        """
        if not self._inside:
            raise UsageError("Probe.step() was called outside its `with` block")
        observed = self._observing
        self._finish(stepped=True)
        self._schedule.over(self._kind, observed=observed)
        self._saving.after_step(self._schedule.seen, self._schedule.observed, lambda: self.statistics)
        self._prepare()
        return observed and self._settled()

    def _prepare(self) -> None:
        """Set up what the next step needs: finding sites, observing or timing.

        The first step finds the sites. After a resume from a state that does not know them it is observed as
        well where that is due, so that a resumed training observes the steps of an unbroken one.
        """
        schedule = self._schedule
        due = schedule.is_due and (self._sites is not None or schedule.resumed_at > 0)
        self._kind = StepKind.PLAIN
        if due:
            self._read_numbers()
            schedule.adjust()
            self._follow_model()
            self._observe()
        if self._sites is None:
            self._force_eager()
            self._kind = StepKind.OTHER
            self._finder.start(self._linears)
        elif not due and self._shares is None and schedule.seen - schedule.resumed_at >= _TIMED_STEP:
            self._profile_step()

    def _observe(self) -> None:
        full = self._schedule.is_full
        self._kind = StepKind.FULL if full else StepKind.OBSERVED
        self._unread = self._schedule.seen + 1 if full else self._unread
        self._force_eager()
        self._observing = True
        self._observer.arm(self._schedule.seen, full=full)

    def _profile_step(self) -> None:
        if torch._C._autograd._profiler_enabled():  # the user's own: torch has one at a time
            return
        self._kind = StepKind.OTHER
        profiler = StepProfiler(self._where.type)
        profiler.start()
        self._profiler = profiler

    def _finish(self, *, stepped: bool) -> None:
        """Take down what `_prepare` set up; a step that never came to its end does not count."""
        try:
            found = self._finder.stop()
            if found is not None:
                self._take_sites(found)
            if self._observing:
                self._observing = False
                self._observer.disarm(hand_over=stepped)
            if self._profiler is not None:
                profiler, self._profiler = self._profiler, None
                self._take_shares(profiler, stepped=stepped)
        finally:
            if self._forces_eager:
                self._forces_eager = False
                EAGER.release()

    def _take_sites(self, sites: list[Site]) -> None:
        self._sites = sites
        self._trials = {
            site.name: trials_of(site, self._device) for site in sites if site.plannable and site.rows
        }

    def _take_shares(self, profiler: StepProfiler, *, stepped: bool) -> None:
        events, clock = profiler.stop(), self._schedule.clock
        if stepped:
            clock.read_all()  # the device is at rest now
            self._shares = shares_of(events, self.sites, self._device, step_us=clock.median_plain_us())

    def _force_eager(self) -> None:
        if not self._forces_eager:
            self._forces_eager = True
            EAGER.hold()

    def _follow_model(self) -> None:
        """Linears that were added, replaced or removed since: statistics of another shape start anew."""
        linears = observable_linears(self._model)
        changes = changes_between(self._linears, linears)
        if changes is None:
            return
        _log.warning("%s; sites are found anew", changes.text)
        self._notes.append(changes.text)
        sites = self._observer.sites
        self._linears, self._sites, self._trials = linears, None, {}
        self._observer = self._new_observer()
        self._observer.sites = {n: site for n, site in sites.items() if n not in changes.stale}
        self._log.drop_sites(changes.stale)

    def _try_live(self, name: str, captured: Captured) -> None:
        # Before the sites are known (the first step after a resume) every linear that ran is one.
        trials = self._trials.get(name) if self._sites is not None else self._trials_at(name)
        if not trials or _is_freed(captured.w):
            return
        generator = site_generator(self._seed, name, f"live/{self._schedule.seen}")
        self._log.add(name, trials, live_errors(captured, trials, generator))

    def _trials_at(self, name: str) -> list[Trial]:
        """The trials of a linear that the observer has just seen."""
        linear = self._linears[name]
        rows = max(self._observer.sites[name].m_seen, default=1)
        bias = linear.bias is not None
        site = Site(name, "linear", linear.out_features, linear.in_features, bias, rows)
        return trials_of(site, self._device)

    def _read_numbers(self) -> None:
        """Read what the last observed steps measured, and tell who wants to know."""
        self._log.collect()
        step, self._unread = self._unread, None
        if step is not None and step <= self._schedule.seen and self._on_observed is not None:
            self._on_observed(self, step)

    def _settled(self) -> bool:
        intervals = [
            interval
            for key, interval in self._log.intervals()
            if key.pass_ is not Pass.WGRAD  # a mean gradient fluctuates by itself
        ]
        return bool(intervals) and all(
            i.count >= _SETTLED_OBSERVATIONS and i.high - i.low <= 2 * _SETTLED_DB for i in intervals
        )

    # --- what was learned -----------------------------------------------------------------------------

    @property
    def sites(self) -> list[Site]:
        """The products found in the first step; empty before it."""
        return self._sites or []

    @property
    def shares(self) -> StepShares | None:
        """Where the step's time goes and what FP8 could give at most; None before the sixth step."""
        return self._shares

    @property
    def every(self) -> int:
        """Steps from one observed step to the next, as it is now."""
        return self._schedule.every

    @property
    def statistics(self) -> dict[str, dict[Operand, OperandStatistics]]:
        """Learned statistics by site and operand, of this rank."""
        return {name: site.operands for name, site in self._observer.sites.items()}

    @property
    def statistics_bytes(self) -> int:
        """Bytes that the statistics hold; before the first observed step, what they will hold at most."""
        held = sum(known.nbytes for site in self.statistics.values() for known in site.values())
        return held or self._planned_bytes()

    @property
    def errors(self) -> ErrorTable:
        """Live errors read so far, of this rank: all but those of the last observed step."""
        return self._log.table()

    @property
    def overhead(self) -> Overhead | None:
        """What observing costs, as far as it was read; None before a plain and an observed step were."""
        schedule = self._schedule
        return schedule.clock.overhead(every=schedule.every, live_every=schedule.live_every)

    def _planned_bytes(self) -> int:
        return statistics_bytes((m.out_features, m.in_features) for m in self._linears.values())

    def profile(self, *, time_kernels: bool | None = None, rows: Sequence[int] | None = None) -> Profile:
        """Everything measured, as the file's body.

        With several ranks every one of them must call it: what they learned is reduced. No data of the user
        is needed, but for `evaluate`: a state that was loaded is enough, on any machine with the model.

        Args:
            time_kernels: Time every kernel and cast on this machine's GPU; by default on a GPU only.
            rows: Values of M (rows of a call) beside those that were seen, at which kernels are timed and
                weight gradients tried.

        Raises:
            UsageError: if no step was observed, times are asked for on a CPU, rows are not positive, or
                `evaluate` gives something else than a finite loss a row.
        """
        self._read_numbers()
        if not self._schedule.observed or not self._sites:
            raise self._why_nothing()
        timed = self._where.type == "cuda" if time_kernels is None else time_kernels
        if timed and self._where.type != "cuda":
            raise UsageError("times of FP8 kernels need a GPU, the model is on the CPU")
        extra = _checked_rows(rows or ())
        self._schedule.clock.read_all()
        held_out, model = self._held_out, self._model
        return build_profile(
            self._learned(self._sites),
            timed=timed,
            rows=extra,
            loss=None if held_out is None else lambda products: held_out.table(model, products),
        )

    def _learned(self, sites: Sequence[Site]) -> Learned:
        """What this rank learned, or all ranks together."""
        schedule = self._schedule
        notes = [*([schedule.note] if schedule.note else []), *dict.fromkeys(self._notes)]
        if self._ranks.count > 1:
            notes.append(f"statistics and errors are of {self._ranks.count} ranks")
        return Learned(
            model=self._model,
            linears=self._linears,
            sites=sites,
            observed=self._ranks.reduced(self._observer.sites),
            log=self._ranks.merged(self._log),
            device=self._device,
            where=self._where,
            seed=self._seed,
            steps_seen=schedule.seen,
            steps_observed=schedule.observed,
            shares=self._shares,
            overhead=self.overhead,
            notes=notes,
        )

    def _why_nothing(self) -> UsageError:
        return nothing_observed(
            seen=self._schedule.seen,
            every=self._schedule.every,
            ran=self._finder.ran,
            found=self._sites is not None,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors of all that this rank learned, to be saved beside the model's."""
        state = state_of_session(self._schedule, self._sites, self._log)
        return state | state_of_sites(self._observer.sites)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave, or make profiles of it without a loop.

        Raises:
            UsageError: for what is no state of a Probe, or one of another model.
        """
        sites = sites_in_state(state)
        if sites is not None:
            check_sites_of_state(sites, self._linears)
        load_counts(state, self._schedule)
        self._observer.sites = sites_of_state(state, where=self._where)
        load_errors(state, self._log)
        if sites is not None:
            self._take_sites(sites)


def _is_freed(w: Tensor) -> bool:
    """A sharded weight (FSDP2) has its memory only while its module runs forward or backward."""
    return w.numel() > 0 and w.untyped_storage().nbytes() == 0


def _checked_rows(rows: Sequence[int]) -> list[int]:
    for m in rows:
        if isinstance(m, bool) or not isinstance(m, int) or m < 1:
            raise UsageError(f"profile(rows={list(rows)!r}) takes whole numbers from 1 on, got {m!r}")
    return list(rows)
