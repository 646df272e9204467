"""The loop as Probe sees it: what is set up before a step and taken down after it.

Hooks, the eager stance and a profiler exist only while a step needs them; whatever happens in the step, they
are gone after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from loka.artifacts.profile import StepShares
from loka.errors import UsageError
from loka.kernels import device_of
from loka.probe.attach import (
    changes_between,
    device_of_linears,
    devices_of,
    not_reached_anymore,
    nothing_to_observe,
    observable_linears,
    shape_of,
)
from loka.probe.broken_off import holders_of
from loka.probe.eager import EAGER
from loka.probe.error_log import ErrorLog
from loka.probe.finding import SiteFinder
from loka.probe.later import LaterWork
from loka.probe.live import Captured, live_errors, site_generator
from loka.probe.observer import Observer
from loka.probe.overhead import StepKind
from loka.probe.schedule import Schedule
from loka.probe.step_profile import StepProfiler, shares_of
from loka.probe.trial import Trial, trials_of
from loka.sites.reasons import NOT_REACHED
from loka.vocab import Pass, Site

__all__ = ["Loop"]

_TIMED_STEP = 5  # late enough that allocators, autotuning and compilation are warm
_PIECES_A_STEP = 1  # the trials of a pass of a site: about 20 ms of the host's; a distribution: about 5
_FREE_STEPS = 4  # one plain step in so many has no piece beside it
_SETTLED_DB = 0.5
_SETTLED_OBSERVATIONS = 5
_log = logging.getLogger("loka.probe")


class Loop:
    """Finds sites, observes steps and profiles one, as the schedule says.

    Attributes:
        model: The model, without wrappers.
        linears: Site name to what is observed.
        where: The torch device of the first of them.
        device: What the machine is.
        observer: With the statistics.
        log: Errors.
        finder: Says whether the model was called.
        sites: The products found; None before the first step.
        shares: Where the step's time goes; None before the sixth step.
        notes: What was out of the ordinary.

    Args:
        model: As above.
        seed: For the samples of rows.
        on_read: Told the number of an observed step with which every site was looked at in full again, once
            its numbers were read.

    Raises:
        UsageError: for a model without an nn.Linear that can be planned.
    """

    def __init__(self, model: nn.Module, *, seed: int, on_read: Callable[[int], object]) -> None:
        self.model = model
        self.linears = observable_linears(model)
        if not self.linears:
            raise nothing_to_observe(model)
        self._shapes = {name: shape_of(linear) for name, linear in self.linears.items()}
        self._devices = devices_of(self.linears)
        self.where = device_of_linears(self.linears)
        self.device = device_of(self.where)
        self.log = ErrorLog()
        self._later = LaterWork(self.log, self.where)
        self.finder = SiteFinder(model)
        self.sites: list[Site] | None = None
        self._seeks = True  # the sites are still to be found, or to be found anew
        self.shares: StepShares | None = None
        self.notes: list[str] = []
        self._seed, self._on_read = seed, on_read
        self.observer = self._new_observer()
        self._trials: dict[str, list[Trial]] = {}
        self._profiler: StepProfiler | None = None
        self._kind = StepKind.PLAIN  # what the step under way is
        self._observing = self._forces_eager = self._is_over = False
        self._plain_steps = 0
        self._step = 0  # number of the step under way, from 0
        self._unread: int | None = None  # the full step whose numbers are still to be read

    def _new_observer(self) -> Observer:
        return Observer(
            self.linears,
            on_captured=self._try_live,
            seed=self._seed,
            is_training=lambda: self.model.training,
            holders=holders_of(self.model, self.linears.values()),
            on_restart=self._forget_waiting,
            on_sampled=self._later.add_distributions if self.puts_off else None,
        )

    def _forget_waiting(self) -> None:
        self._later.clear()
        self.log.forget_since_mark()

    def prepare(self, schedule: Schedule) -> None:
        """Set up what the next step needs: finding sites, observing or timing.

        The first step finds the sites, and so does the first due one after the model was changed. None is
        observed meanwhile: what Probe multiplies would be found as well.
        """
        self._step = schedule.seen
        self._kind = StepKind.PLAIN
        due, flushed = schedule.is_due and not self._seeks, False
        if due:
            flushed = self._unread is not None and self._later.run()
            self.read_numbers(wait=self._unread is not None)
            # After reading: what is launched now is read beside the plain steps, so that nothing waits.
            flushed = self._later.run() or flushed
        if schedule.is_due:
            schedule.adjust()  # with or without anything to observe: other ranks wait for this one
        if due:
            self._follow_model()
        if self._is_over:
            return
        if self._seeks:
            self._force_eager()
            self._kind = StepKind.OTHER
            self.finder.start(self.linears)
        elif due:
            self._observe(schedule)
            if flushed and schedule.observed == 1:
                self._kind = StepKind.OTHER  # what the first full look of all sites left is paid once
        elif self.observer.is_waiting:
            self._kind = StepKind.OTHER  # the gradients of a forward that ran ahead are looked at
        elif self.shares is None and schedule.seen - schedule.resumed_at >= _TIMED_STEP:
            self._profile_step()
        else:
            self._run_beside()

    def over(self, schedule: Schedule) -> bool:
        """A step came to its end.

        Returns:
            Whether it was observed.
        """
        observed = self._observing
        self.finish(schedule, stepped=True)
        if observed and self.observer.was_broken_off:
            self.notes.append(f"step {self._step + 1} was broken off by an exception and not observed")
            observed = schedule.observe_next()
            self._kind = StepKind.OTHER
        schedule.over(self._kind, observed=observed)
        return observed

    def finish(self, schedule: Schedule, *, stepped: bool) -> None:
        """Take down what `prepare` set up; a step that never came to its end does not count."""
        try:
            found = self.finder.stop()
            if found is not None:
                self.take_sites(found)
            self.observer.end_wait(hand_over=stepped)
            if self._observing:
                self._observing = False
                self.observer.disarm(hand_over=stepped, await_gradients=stepped)
                self._take_late_sites()
                gone = not stepped or self.observer.was_broken_off
                if gone and self._unread == self._step + 1:
                    self._unread = None
            if self._profiler is not None:
                profiler, self._profiler = self._profiler, None
                self._take_shares(profiler, schedule, stepped=stepped)
        finally:
            if self._forces_eager:
                self._forces_eager = False
                EAGER.release()

    def take_sites(self, sites: list[Site]) -> None:
        """Products found, or known from a saved state."""
        self.sites, self._seeks = sites, False
        self._trials = {
            site.name: trials_of(site, self.device) for site in sites if site.plannable and site.rows
        }

    def _take_late_sites(self) -> None:
        """Sites that the first step did not reach and an observed one did: a branch that was taken later."""
        known = self.observer.sites
        late = [s.name for s in self.sites or () if s.not_planned == NOT_REACHED and s.name in known]
        if not late:
            return
        sites = [
            replace(s, not_planned="", rows=max(known[s.name].m_seen, default=0), calls=known[s.name].calls)
            if s.name in late
            else s
            for s in self.sites or ()
        ]
        self.take_sites(sites)
        _log.info("first reached in step %d: %s", self._step + 1, ", ".join(late))

    def forget_step(self) -> None:
        """Drop what the step under way gave, and the work that waits; a half is not observed."""
        began = self.observer.forget_step()
        self._forget_waiting()
        if self._observing and began:
            self._unread = None
            self._observing = False
            self.observer.disarm(hand_over=False)
            self._kind = StepKind.OTHER

    def what_was_left_out(self) -> list[str]:
        """A note for each site of which calls were not looked at."""
        return [
            f"calls of `{name}` were not looked at: {why}" for name, why in self.observer.left_out.items()
        ]

    def read_numbers(self, *, wait: bool = True) -> None:
        """Read what the last observed steps measured, and tell who wants to know once all of it is read.

        Args:
            wait: For the device; else what it has not done yet is left for later.
        """
        self.log.collect(wait=wait)
        if self._unread is not None and (wait or not (self.log.pending or len(self._later))):
            step, self._unread = self._unread, None
            self._on_read(step)

    def _run_beside(self) -> None:
        """Read what the device has done, then a piece of what waits; some steps stay plain, for the clock."""
        if self.puts_off:
            self.read_numbers(wait=False)
        self._plain_steps += 1
        if self._plain_steps % _FREE_STEPS and self._later.run(_PIECES_A_STEP):
            self._kind = StepKind.LATER

    @property
    def puts_off(self) -> bool:
        """Whether trials and distributions wait for plain steps; a CPU would only do them at another time."""
        return self.where.type == "cuda"

    def run_later(self) -> None:
        """Do what the last observed steps left to be done."""
        self._later.run()

    def has_settled(self) -> bool:
        """Whether 5 observations or more bound the SQNR of every recipe of fwd and dgrad within +-0.5 dB."""
        narrow = {site.name for site in self.sites or () if site.is_narrow}  # they stay in bf16
        intervals = [
            interval
            for key, interval in self.log.intervals()
            # A mean gradient fluctuates by itself.
            if key.pass_ is not Pass.WGRAD and key.site not in narrow
        ]
        return bool(intervals) and all(
            i.count >= _SETTLED_OBSERVATIONS and i.high - i.low <= 2 * _SETTLED_DB for i in intervals
        )

    def _observe(self, schedule: Schedule) -> None:
        all_at_once = schedule.is_first or schedule.live_every == 1
        self._kind = StepKind.FULL if all_at_once else StepKind.OBSERVED
        self._unread = self._step + 1 if schedule.ends_round else None
        self._force_eager()
        self._observing = True
        self.log.mark()
        self.observer.arm(self._step, full=schedule.full_sites(list(self.linears)))

    def _profile_step(self) -> None:
        if torch._C._autograd._profiler_enabled():  # the user's own: torch has one at a time
            return
        self._kind = StepKind.OTHER
        profiler = StepProfiler(self.where.type)
        profiler.start()
        self._profiler = profiler

    def _take_shares(self, profiler: StepProfiler, schedule: Schedule, *, stepped: bool) -> None:
        events = profiler.stop()
        if stepped:
            schedule.clock.read_all()  # the device is at rest now
            plain_us = schedule.clock.median_plain_us()
            self.shares = shares_of(events, self.sites or [], self.device, step_us=plain_us)

    def _force_eager(self) -> None:
        if not self._forces_eager:
            self._forces_eager = True
            EAGER.hold()

    def _follow_model(self) -> None:
        """Linears that were added, replaced or removed since: statistics of another shape start anew.

        Where none is left, as after `apply_plan`, what was learned stays.
        """
        linears = observable_linears(self.model)
        changes = changes_between(self.linears, linears, self._shapes)
        if changes is None or self._is_over:
            return
        if not linears:
            self._is_over = True
            self.notes.append(f"{changes.text}: nothing was observed from step {self._step + 1} on")
            _log.warning("%s: nothing is observed from here on", changes.text)
            return
        _log.warning("%s; sites are found anew", changes.text)
        self.notes.append(changes.text)
        known = self.observer.sites
        self._keep_sites(linears, changes.stale)
        self.linears, self._seeks = linears, True
        self._shapes = {name: shape_of(linear) for name, linear in linears.items()}
        self._devices = devices_of(linears)
        self.observer = self._new_observer()
        self.observer.sites = {name: site for name, site in known.items() if name not in changes.stale}
        self.log.drop_sites(changes.stale)

    def _keep_sites(self, linears: Mapping[str, nn.Linear], stale: Collection[str]) -> None:
        """Of what was found, that which holds until the model runs again: nothing of a stale site."""
        if self.sites is not None:
            kept = [
                not_reached_anymore(site, linears[site.name]) if site.name in stale else site
                for site in self.sites
                if site.name not in stale or site.name in linears
            ]
            self.take_sites(kept)

    def drop_reshaped(self) -> None:
        """Forget the sites whose weights got another shape since they were observed: no error holds."""
        stale = {name for name, linear in self.linears.items() if shape_of(linear) != self._shapes[name]}
        if not stale:
            return
        named = ", ".join(f"`{name}`" for name in sorted(stale))
        self.notes.append(f"weights got another shape after they were observed, nothing is known of {named}")
        seeks = self._seeks
        self._keep_sites(self.linears, stale)
        self._seeks = seeks
        self._shapes |= {name: shape_of(self.linears[name]) for name in stale}
        for name in stale & self.observer.sites.keys():
            del self.observer.sites[name]
        self.log.drop_sites(stale)

    def check_device(self) -> None:
        """Raise UsageError where the model has been moved since Probe got it."""
        for name, now in devices_of(self.linears).items():
            if now == self._devices[name]:
                continue
            raise UsageError(
                f"`{name}` was on {self._devices[name]} when Probe looked for linears and is on {now} now",
                hint="move the model before, and move it back for `profile()`",
            )

    def _try_live(self, name: str, captured: Captured) -> None:
        trials = self._trials.get(name)
        if not trials or _is_freed(captured.w):
            return
        generator = site_generator(self._seed, name, f"live/{self._step}")
        if self.puts_off:
            self._later.add_trials(name, trials, captured, generator)
        else:
            self.log.add(name, trials, live_errors(captured, trials, generator))


def _is_freed(w: Tensor) -> bool:
    """A sharded weight (FSDP2) has its memory only while its module runs forward or backward."""
    return w.numel() > 0 and w.untyped_storage().nbytes() == 0
