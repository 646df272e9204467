"""Probe: a context manager around a training loop that the user does not change."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from types import TracebackType

import torch
from torch import Tensor, nn

from loka.artifacts.profile import Profile, StepShares
from loka.errors import UsageError
from loka.kernels import device_of
from loka.numerics import Moments
from loka.planned import is_planned
from loka.probe.build import build_profile
from loka.probe.eager import EAGER
from loka.probe.error_log import ErrorLog
from loka.probe.live import Captured, live_errors, site_generator
from loka.probe.observer import Observer
from loka.probe.state import sites_of_state, state_of_sites
from loka.probe.step_profile import StepProfiler, shares_of
from loka.probe.trial import Trial, trials_of
from loka.sites import SiteWatch, plannable_linears, why_not_plannable
from loka.vocab import Device, Operand, Pass, Site

__all__ = ["Probe"]

_TIMED_STEP = 5  # late enough that allocators, autotuning and compilation are warm
_SETTLED_DB = 0.5
_SETTLED_OBSERVATIONS = 5


class Probe:
    """Learn what every linear of a model multiplies, while it trains.

    Every `every`-th step is observed: hooks are placed before it and removed after it, it runs eagerly even
    where the model is compiled (hooks inside a compiled region do not fire), and nothing it does changes a
    number of the training. Numbers are read one observed step later, so no step waits.

    Args:
        model: The model in training. Evaluation between steps (`model.eval()`) is left out.
        every: Observe each `every`-th step.
        seed: For the samples of rows.

    Raises:
        UsageError: for every < 1, or a model without an nn.Linear that can be planned.

    Example:
        >>> with loka.Probe(model, every=100) as probe:
        ...     for batch in loader:
        ...         train_step(model, batch)
        ...         if probe.step():
        ...             break
        >>> profile = probe.profile()
    """

    def __init__(self, model: nn.Module, *, every: int = 100, seed: int = 0) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"Probe takes an nn.Module, got a {type(model).__name__}")
        if every < 1:
            raise UsageError(f"Probe(every={every}) must be at least 1")
        linears = plannable_linears(model)
        if not linears:
            raise _nothing_to_observe(model)
        self._model, self._every, self._seed = model, every, seed
        self._linears = linears
        self._where = next(iter(linears.values())).get_parameter("weight").device
        self._device: Device = device_of(self._where)
        self._observer = Observer(
            linears, on_captured=self._try_live, seed=seed, is_training=lambda: model.training
        )
        self._log = ErrorLog()
        self._trials: dict[str, list[Trial]] = {}
        self._sites: list[Site] | None = None
        self._shares: StepShares | None = None
        self._watch: SiteWatch | None = None
        self._profiler: StepProfiler | None = None
        self._forces_eager = False
        self._seen = self._observed = self._resumed_at = 0
        self._inside = self._observing = False
        self._last_clock: float | None = None
        self._plain_steps_us: list[float] = []

    # --- the loop -------------------------------------------------------------------------------------

    def __enter__(self) -> Probe:
        if self._inside:
            raise UsageError("this Probe is attached already", hint="make one Probe for each `with` block")
        self._inside = True
        self._prepare()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish(stepped=False)
        self._inside = False

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
        plain = not (observed or self._watch or self._profiler)
        self._clock(plain)
        self._finish(stepped=True)
        self._seen += 1
        self._prepare()
        return observed and self._settled()

    def _clock(self, plain: bool) -> None:
        now = time.perf_counter()
        if plain and self._last_clock is not None and len(self._plain_steps_us) < 1000:
            self._plain_steps_us.append((now - self._last_clock) * 1e6)
        self._last_clock = now

    def _prepare(self) -> None:
        """Set up what the next step needs: finding sites, observing or timing.

        The first step finds the sites. After a resume it is observed as well where that is due, so that a
        resumed training observes the steps of an unbroken one.
        """
        known = self._sites is not None
        if not known:
            self._force_eager()
            self._watch = SiteWatch(self._model, when=lambda: self._model.training)
            self._watch.__enter__()
        if (self._seen + 1) % self._every == 0 and (known or self._resumed_at):
            self._log.collect()
            self._force_eager()
            self._observing = True
            self._observer.arm(self._seen)
        elif known and self._shares is None and self._seen - self._resumed_at >= _TIMED_STEP:
            profiler = StepProfiler(self._where.type)
            profiler.start()
            self._profiler = profiler

    def _finish(self, *, stepped: bool) -> None:
        """Take down what `_prepare` set up; a step that never came to its end does not count."""
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            found = self._watch.sites()
            self._watch = None
            if any(site.rows for site in found):
                self._sites = found
                self._trials = {
                    site.name: trials_of(site, self._device) for site in found if site.plannable and site.rows
                }
        if self._observing:
            self._observer.disarm(hand_over=stepped)
            self._observing = False
            self._observed += stepped
        if self._profiler is not None:
            events = self._profiler.stop()
            self._profiler = None
            if stepped:
                self._shares = shares_of(events, self.sites, self._device, step_us=self._median_step_us())
        if self._forces_eager:
            self._forces_eager = False
            EAGER.release()

    def _force_eager(self) -> None:
        if not self._forces_eager:
            self._forces_eager = True
            EAGER.hold()

    def _try_live(self, name: str, captured: Captured) -> None:
        # Before the sites are known (the first step after a resume) every linear that ran is one.
        trials = self._trials.get(name) if self._sites is not None else self._trials_at(name)
        if trials:
            generator = site_generator(self._seed, name, f"live/{self._seen}")
            self._log.add(name, trials, live_errors(captured, trials, generator))

    def _median_step_us(self) -> float:
        return statistics.median(self._plain_steps_us) if self._plain_steps_us else 0.0

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
    def statistics(self) -> dict[str, dict[Operand, Moments]]:
        """Learned statistics by site and operand."""
        return {name: site.moments for name, site in self._observer.sites.items()}

    @property
    def statistics_bytes(self) -> int:
        """Bytes that the statistics hold."""
        return sum(m.nbytes for site in self.statistics.values() for m in site.values())

    def profile(self, *, time_kernels: bool | None = None) -> Profile:
        """Everything measured, as the file's body.

        Args:
            time_kernels: Time every kernel and cast on this machine's GPU; by default on a GPU only.

        Raises:
            UsageError: if no step was observed, or times are asked for on a CPU.
        """
        self._log.collect()
        if not self._observed or not self._sites:
            raise UsageError(
                f"no step was observed in {self._seen} steps with every={self._every}",
                hint="train longer, or observe more often with a smaller `every`; steps count where the "
                "model that Probe was given runs in training mode",
            )
        timed = self._where.type == "cuda" if time_kernels is None else time_kernels
        if timed and self._where.type != "cuda":
            raise UsageError("times of FP8 kernels need a GPU, the model is on the CPU")
        return build_profile(
            self._model,
            self._sites,
            self._trials,
            self._observer.sites,
            self._log,
            device=self._device,
            where=self._where,
            seed=self._seed,
            steps=(self._seen, self._observed),
            shares=self._shares,
            timed=timed,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors of all that was learned, to be saved beside the model's."""
        state = {"seen": torch.tensor(self._seen), "observed": torch.tensor(self._observed)}
        state |= state_of_sites(self._observer.sites)
        return state | {f"errors\t{key}": rows for key, rows in self._log.state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave."""
        self._seen, self._observed = int(state["seen"]), int(state["observed"])
        self._resumed_at = self._seen
        self._observer.sites = sites_of_state(state, where=self._where)
        self._log.load({k.partition("\t")[2]: v for k, v in state.items() if k.startswith("errors\t")})

    def _trials_at(self, name: str) -> list[Trial]:
        """The trials of a linear that the observer has just seen."""
        linear = self._linears[name]
        rows = max(self._observer.sites[name].m_seen, default=1)
        bias = linear.bias is not None
        site = Site(name, "linear", linear.out_features, linear.in_features, bias, rows)
        return trials_of(site, self._device)


def _nothing_to_observe(model: nn.Module) -> UsageError:
    name = type(model).__name__
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    if any(is_planned(module) for _, module in linears):
        return UsageError(
            f"{name} carries a plan, so there is nothing to observe", hint="call `loka.revert(model)` first"
        )
    if linears:
        return UsageError(
            f"no nn.Linear of {name} can be planned, so there is nothing to observe",
            lines=[f"{n or name}  {why_not_plannable(module)}" for n, module in linears[:12]],
            hint="`loka.find_sites` lists every product with its reason",
        )
    return UsageError(
        f"{name} has no nn.Linear, so there is nothing to observe",
        hint="attach Probe before wrappers that hide the modules",
    )
