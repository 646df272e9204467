"""What importing costs: `import loka` and the command line's start load little and touch no GPU."""

from __future__ import annotations

import json

from running import run

_HEAVY = ("torch", "triton", "typer", "rich", "pyarrow", "torchmetrics", "safetensors", "numpy", "msgspec")


def _loaded_by(statement: str) -> set[str]:
    program = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    return set(json.loads(run("-c", program).splitlines()[-1]))


def test_importing_loka_loads_no_library() -> None:
    assert not _loaded_by("import loka; dir(loka); loka.__version__") & set(_HEAVY)


def test_the_public_names_load_no_library_of_data_or_of_the_command_line() -> None:
    loaded = _loaded_by("import loka.api")
    assert not loaded & {"typer", "rich", "pyarrow", "torchmetrics"}
    assert not {name for name in loaded if name.startswith(("loka.recsys", "loka.cli"))}


def test_the_public_names_leave_cuda_alone() -> None:
    said = run("-c", "import loka.api, torch; print(torch.cuda.is_initialized())")
    assert said.strip() == "False"


def test_the_command_line_starts_without_torch() -> None:
    assert "torch" not in _loaded_by("import loka.cli.main")
