"""Reference models, data and a trainer: what LoKA is tried on. Nothing below imports this."""

from loka.recsys.batch import Batch, FieldSchema, Ids, Schema
from loka.recsys.comparison import Comparison
from loka.recsys.data import open_source
from loka.recsys.job import JobResult, run_job
from loka.recsys.job_config import JobConfig
from loka.recsys.models import build_model
from loka.recsys.paired import paired
from loka.recsys.paired_result import PairedResult
from loka.recsys.source import OnBadRow, Source, Split
from loka.recsys.train_config import TrainConfig
from loka.recsys.trainer import Trainer

__all__ = [
    "Batch",
    "Comparison",
    "FieldSchema",
    "Ids",
    "JobConfig",
    "JobResult",
    "OnBadRow",
    "PairedResult",
    "Schema",
    "Source",
    "Split",
    "TrainConfig",
    "Trainer",
    "build_model",
    "open_source",
    "paired",
    "run_job",
]
