"""Compile and vet before anything is timed, in processes beside each other."""

from loka.kernels.preparing.carry_out import Preparer
from loka.kernels.preparing.pool import Prepared, default_workers, prepare_all
from loka.kernels.preparing.tasks import Answer, CastTask, ProductTask, Task, kernel_type

__all__ = [
    "Answer",
    "CastTask",
    "Prepared",
    "Preparer",
    "ProductTask",
    "Task",
    "default_workers",
    "kernel_type",
    "prepare_all",
]
