"""Probe: a context manager around a training loop that the user does not change."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType

from torch import Tensor, nn

from loka.artifacts.profile import ErrorTable, Overhead, Profile, StepShares
from loka.errors import UsageError
from loka.numerics import OperandStatistics, statistics_bytes
from loka.probe.attach import check_learned_of_state, check_sites_of_state, nothing_observed, unwrapped
from loka.probe.build import Learned, build_profile
from loka.probe.held_out import Evaluate, HeldOut
from loka.probe.later import QUEUE_BYTES
from loka.probe.loop import Loop
from loka.probe.ranks import Ranks
from loka.probe.saving import PeriodicSaving
from loka.probe.schedule import Schedule
from loka.probe.session_state import (
    check_is_state,
    counts_in_state,
    errors_in_state,
    sites_in_state,
    state_of_session,
)
from loka.probe.state import sites_of_state, state_of_sites
from loka.vocab import Operand, Site

__all__ = ["Probe"]

_log = logging.getLogger("loka.probe")


class Probe:
    """Learn what every linear of a model multiplies, while it trains.

    Every `every`-th step is observed: hooks are placed before it and removed after it, it runs eagerly even
    where the model is compiled (hooks inside a compiled region do not fire), and nothing it does changes a
    number of the training. At the first observed step, and then at each `live_every`-th, a site is looked at
    in full: its distributions are taken and every recipe is tried on real rows besides. After the first step
    the sites take turns, so that every observed step costs about the same. Numbers are read one observed step
    later, so no step waits.

    Nothing is assumed of who runs the loop: a trainer may call `step()` from a callback, and a pipeline may
    have called the next batch's forward before.

    Args:
        model: The model in training, compiled or not, inside DistributedDataParallel or not. Evaluation
            between steps (`model.eval()`) is left out.
        every: Observe each `every`-th step.
        live_every: Observed steps from one full look at a site to the next.
        max_overhead: Largest share of the training that observing may cost. Where an observed step costs
            more (its eager run included), `every` is raised and a warning says so; None for no limit.
        evaluate: `evaluate(model, batch)` gives the loss of each held-out row, [rows]; with `batches`.
        batches: Held-out batches that can be read again and again; with `evaluate`.
        seed: For the samples of rows and the draws.
        save_to: A file into which the statistics are written in the background; its folder must exist.
        save_every: Steps from one such write to the next.
        on_observed: Called with this Probe and the number of a step, each time that every site was looked at
            in full again and the numbers are read.
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
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise UsageError(f"Probe(seed={seed!r}) must be a whole number")
        if not isinstance(across_ranks, bool):
            raise UsageError(f"Probe(across_ranks={across_ranks!r}) must be True or False")
        if on_observed is not None and not callable(on_observed):
            raise UsageError(
                f"Probe(on_observed={on_observed!r}) must be a function of this Probe and a step"
            )
        self._loop = Loop(unwrapped(model), seed=seed, on_read=self._tell)
        self._ranks = Ranks(together=across_ranks)
        self._schedule = Schedule(
            every=every,
            live_every=live_every,
            max_overhead=max_overhead,
            where=self._loop.where,
            ranks=self._ranks,
        )
        self._held_out = HeldOut.of(evaluate, batches)
        self._saving = PeriodicSaving(save_to, save_every)
        self._on_observed = on_observed
        self._seed = seed
        self._inside = False
        self._thread = 0  # the one that entered

    def _tell(self, step: int) -> None:
        if self._on_observed is not None:
            self._on_observed(self, step)

    # --- the loop -------------------------------------------------------------------------------------

    def __enter__(self) -> Probe:
        if self._inside:
            raise UsageError("this Probe is attached already", hint="make one Probe for each `with` block")
        schedule, linears = self._schedule, self._loop.linears
        options = {"every": schedule.every, "live_every": schedule.live_every, "sites": len(linears)}
        self._ranks.check_agreement(options | {"steps seen": schedule.seen})
        _log.info(
            "observing one step in %d at %d linears, whose statistics will hold at most %.1f MB%s",
            schedule.every,
            len(linears),
            self._planned_bytes() / 1e6,
            f", operands of trials about {QUEUE_BYTES / 1e9:.1f} GB" if self._loop.puts_off else "",
        )
        self._loop.check_device()
        self._inside, self._thread = True, threading.get_ident()
        schedule.clock.mark(None)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._leave)
            self._loop.prepare(schedule)
            on_failure.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if error is not None:
            return
        self._loop.run_later()
        self._loop.read_numbers()
        self._schedule.clock.read_all()
        self._saving.close()
        if not self._schedule.observed and (not self._schedule.seen or not self._loop.sites):
            _log.warning("%s", str(self._why_nothing()).replace("\n\n", "; "))

    def _leave(self) -> None:
        self._inside = False
        self._loop.finish(self._schedule, stepped=False)

    def step(self) -> bool:
        """Tell Probe that one training step is over (the optimizer's step included).

        Returns:
            True once the errors of forward and input gradient have settled: at least 5 full observed steps
            and a 90 % interval of SQNR within +-0.5 dB for every recipe at every site.

        Raises:
            UsageError: outside the `with` block, or in another thread than it was entered in.
        """
        if not self._inside:
            raise UsageError("Probe.step() was called outside its `with` block")
        if threading.get_ident() != self._thread:
            raise UsageError(
                "Probe.step() was called in another thread than the one that entered its `with` block",
                hint="torch follows what runs thread by thread: enter it where the training loop runs",
            )
        schedule = self._schedule
        observed = self._loop.over(schedule)
        self._saving.after_step(schedule.seen, schedule.observed, lambda: self.statistics)
        self._loop.prepare(schedule)
        return observed and self._loop.has_settled()

    # --- what was learned -----------------------------------------------------------------------------

    @property
    def sites(self) -> list[Site]:
        """The products found in the first step; empty before it."""
        return self._loop.sites or []

    @property
    def shares(self) -> StepShares | None:
        """Where the step's time goes and what FP8 could give at most; None before the sixth step."""
        return self._loop.shares

    @property
    def every(self) -> int:
        """Steps from one observed step to the next, as it is now."""
        return self._schedule.every

    @property
    def statistics(self) -> dict[str, dict[Operand, OperandStatistics]]:
        """Learned statistics by site and operand, of this rank; does what waits for a plain step first."""
        self._loop.run_later()
        return {name: site.operands for name, site in self._loop.observer.sites.items()}

    @property
    def statistics_bytes(self) -> int:
        """Bytes that the statistics hold; before the first observed step, what they will hold at most."""
        held = sum(site.nbytes for site in self._loop.observer.sites.values())
        return held or self._planned_bytes()

    @property
    def errors(self) -> ErrorTable:
        """Live errors read so far, of this rank: perhaps not yet those of the last observed step."""
        return self._loop.log.table()

    @property
    def overhead(self) -> Overhead | None:
        """What observing costs, as far as it was read; None before a plain and an observed step were."""
        schedule = self._schedule
        return schedule.clock.overhead(every=schedule.every, live_every=schedule.live_every)

    def _planned_bytes(self) -> int:
        return statistics_bytes((m.out_features, m.in_features) for m in self._loop.linears.values())

    def profile(
        self,
        *,
        time_kernels: bool | None = None,
        rows: Sequence[int] | None = None,
        workers: int | None = None,
    ) -> Profile:
        """Everything measured, as the file's body.

        With several ranks every one of them must call it: what they learned is reduced. No data of the user
        is needed, but for `evaluate`: a state that was loaded is enough, on any machine with the model.

        Args:
            time_kernels: Time every kernel and cast on this machine's GPU; by default on a GPU only.
            rows: Values of M (rows of a call) beside those that were seen, at which kernels are timed and
                weight gradients tried.
            workers: Processes that compile and vet before anything is timed; 0 does it in this one. By
                default one for each core, 14 at most, on a GPU.

        Raises:
            UsageError: if no step was observed, times are asked for on a CPU, rows are not positive, the
                model was moved to another device, or `evaluate` gives something else than a finite loss a
                row.
        """
        extra = _checked_rows(rows)
        if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 0):
            raise UsageError(f"profile(workers={workers!r}) must be a whole number from 0 on")
        self._loop.check_device()
        self._loop.run_later()
        self._loop.read_numbers()
        self._loop.drop_reshaped()
        sites = self._loop.sites or []
        # All ranks or none: one that raised alone would leave the others waiting for it.
        if not self._ranks.maximum(int(self._schedule.observed > 0 and bool(sites))):
            raise self._why_nothing()
        timed = self._loop.where.type == "cuda" if time_kernels is None else time_kernels
        if timed and self._loop.where.type != "cuda":
            raise UsageError("times of FP8 kernels need a GPU, the model is on the CPU")
        self._schedule.clock.read_all()
        held_out, model = self._held_out, self._loop.model
        return build_profile(
            self._learned(sites),
            timed=timed,
            rows=extra,
            workers=workers,
            loss=None if held_out is None else lambda products: held_out.table(model, products),
        )

    def _learned(self, sites: Sequence[Site]) -> Learned:
        """What this rank learned, or all ranks together."""
        schedule = self._schedule
        notes = [*([schedule.note] if schedule.note else []), *dict.fromkeys(self._loop.notes)]
        notes += self._loop.what_was_left_out()
        if self._ranks.count > 1:
            notes.append(f"statistics and errors are of {self._ranks.count} ranks")
        return Learned(
            model=self._loop.model,
            linears=self._loop.linears,
            sites=self._ranks.united(sites),
            observed=self._ranks.reduced(self._loop.observer.sites),
            log=self._ranks.merged(self._loop.log),
            device=self._loop.device,
            where=self._loop.where,
            seed=self._seed,
            steps_seen=schedule.seen,
            steps_observed=schedule.observed,
            shares=self._loop.shares,
            overhead=self.overhead,
            notes=notes,
        )

    def _why_nothing(self) -> UsageError:
        return nothing_observed(
            seen=self._schedule.seen,
            every=self._schedule.every,
            ran=self._loop.finder.ran,
            found=self._loop.sites is not None,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors of all that this rank learned, to be saved beside the model's."""
        self._loop.run_later()
        state = state_of_session(self._schedule, self._loop.sites, self._loop.log)
        return state | state_of_sites(self._loop.observer.sites)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave, or make profiles of it without a loop.

        Raises:
            UsageError: for what is no state of a Probe, a damaged one, or one of another model; nothing is
                changed then.
        """
        check_is_state(state)
        sites = sites_in_state(state)
        if sites is not None:
            check_sites_of_state(sites, self._loop.linears)
        learned = sites_of_state(state, where=self._loop.where)
        check_learned_of_state(learned, self._loop.linears)
        counts, errors = counts_in_state(state), errors_in_state(state)
        # All is read: from here on nothing can fail, so that no half of a state is taken up.
        self._loop.forget_step()
        self._schedule.resume(**counts)
        self._loop.observer.sites = learned
        self._loop.log.load(errors)
        if sites is not None:
            self._loop.take_sites(sites)


def _checked_rows(rows: object) -> list[int]:
    if rows is None:
        return []
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise UsageError(f"profile(rows={rows!r}) takes a list of whole numbers")
    for m in rows:
        if isinstance(m, bool) or not isinstance(m, int) or m < 1:
            raise UsageError(f"profile(rows={list(rows)!r}) takes whole numbers from 1 on, got {m!r}")
    return list(rows)
