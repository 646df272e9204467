"""Reference models, data and a trainer: what LoKA is tried on. Nothing below imports this."""

from loka.recsys.batch import Batch, FieldSchema, Ids, Schema
from loka.recsys.data import open_source
from loka.recsys.evaluation.comparison import Comparison
from loka.recsys.job.config import JobConfig
from loka.recsys.job.main_job import JobResult, run_job
from loka.recsys.models import build_model
from loka.recsys.pairs.paired import paired
from loka.recsys.pairs.paired_result import PairedResult
from loka.recsys.source import OnBadRow, Source, Split
from loka.recsys.training.config import TrainConfig
from loka.recsys.training.trainer import Trainer

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
