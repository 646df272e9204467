"""What Probe times and tries launches no Triton kernel that was not prepared: it would compile in between.

Without a GPU: Triton's driver is a stand-in, its compiler a listener that writes down what it is asked for.
The casts are given tensors on the CPU. Run in a process of its own, since here Triton is set to interpret.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

SHAPES = [(96, 160), (32, 64), (2304, 128), (40, 72)]  # one with more outputs than a trial computes
ROWS = 640


def test_what_is_timed_or_tried_was_prepared() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["prepared"] > 50
    assert found["timing"] == []
    assert found["trying"] == []


def main() -> None:
    import types
    from dataclasses import replace

    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from loka.kernels import cast_engine
    from loka.kernels.preparing import CastTask, Preparer, ProductTask
    from loka.kernels.preparing.carry_out import known_kernel
    from loka.probe import live, timed_casts, timed_products, trial
    from loka.probe.times import _arrival_dtypes
    from loka.probe.trial_tasks import trial_tasks, wgrad_rows
    from loka.vocab import Device, Pass, Site

    cpu, hopper = torch.device("cpu"), Device("cuda", "NVIDIA H200", (9, 0))
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            get_active_torch_device=lambda: cpu,
            utils=types.SimpleNamespace(
                get_device_properties=lambda device: {
                    "max_shared_mem": 232448,
                    "multiprocessor_count": 132,
                    "warpSize": 32,
                }
            ),
        )
    )
    asked: dict[str, None] = {}

    def listen(*, key: str, fn: object, **_: object) -> bool:
        asked[f"{getattr(fn, 'name', fn)} {key}"] = None
        return True  # nothing is compiled or launched

    triton.knobs.runtime.jit_cache_hook = listen
    cast_engine._on_gpu = lambda x: x.numel() > 0 and x.dtype in cast_engine._GPU_DTYPES
    live.device_of = lambda where: hopper

    sites = [Site(name=f"site{n}", kind="linear", n=n, k=k, bias=True, rows=ROWS) for n, k in SHAPES]
    dtypes = _arrival_dtypes()

    preparer = Preparer(cpu)
    tasks = [
        *timed_casts.cast_tasks(sites, hopper, dtypes=dtypes),
        *timed_products.product_tasks(sites, hopper, dtypes=dtypes),
        *trial_tasks(sites, hopper, rows_of=lambda site: [site.rows]),
    ]
    for task in tasks:
        if isinstance(task, CastTask):
            preparer._cast(task)
            continue
        assert isinstance(task, ProductTask)
        kernel = known_kernel(task)
        assert kernel is not None
        if kernel.name.startswith("triton."):
            kernel.warm_up(task.problem, cpu)
            preparer._run(kernel, task)
        else:  # its casts alone: the library is not here
            sides = zip(
                (task.problem.m, task.problem.n), kernel.operands(task.problem), task.dtypes, strict=True
            )
            for rows, spec, dtype in sides:
                preparer._operand(rows, task.problem.k, spec, dtype, given=task.given_scale)
    prepared = set(asked)

    for problem in timed_products._problems(sites, dtypes):
        operands = timed_products._Operands(problem, cpu)
        for kernel in timed_products.timed_kernels(problem, hopper):
            a, b = operands.of(kernel)
            if kernel.name.startswith("triton."):
                kernel.matmul(a, b, out_dtype=timed_products.torch_dtype(problem.out_dtype))
    for (rows, columns, dtype), spec_sets in timed_casts._wanted(sites, hopper, dtypes).items():
        for specs in spec_sets:
            cast_engine.cast(torch.zeros(rows, columns, dtype=dtype), specs)
    timing = sorted(set(asked) - prepared)

    for site in sites:
        row_wise = (live.LIVE_ROWS, (Pass.FWD, Pass.DGRAD))
        for m, passes in [row_wise, *((m, (Pass.WGRAD,)) for m in wgrad_rows(site, [site.rows]))]:
            generator = torch.Generator().manual_seed(0)
            x, g, w = (torch.randn(r, c) for r, c in ((m, site.k), (m, site.n), (site.n, site.k)))
            captured = live.Captured(x, w, x.abs().amax(), g, g.abs().amax(), frozenset(passes))
            trials = [
                t
                for t in trial.kernel_trials_of(replace(site, rows=m), hopper, passes)
                if not t.kernel.emulated and t.spec_a.is_quantized
            ]
            ours = [t for t in trials if t.kernel.name.startswith("triton.")]
            live.live_errors(captured, ours, generator)
            taken = live.live_operands(captured, set(passes), generator)
            for t in trials:
                for side, spec in enumerate((t.spec_a, t.spec_b)):
                    trial.cast_sample(taken[t.pass_][side], spec)
    trying = sorted(set(asked) - prepared - set(timing))
    print(json.dumps({"prepared": len(prepared), "timing": timing, "trying": trying}))


if __name__ == "__main__":
    main()
