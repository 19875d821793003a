"""Complete training state: what a recovery point carries beyond the tensors of a model (ADR 0006)."""

from txstore.train.checkpointer import Checkpointer
from txstore.train.cursor import ElasticBatchSampler
from txstore.train.history import StepRecord
from txstore.train.loader import ReplayedSampler
from txstore.train.policy import SavePolicy
from txstore.train.progress import TrainProgress
from txstore.train.proof import Check, ProofPolicy, compare_with_control
from txstore.train.report import ResumeReport
from txstore.train.request import SaveHandle
from txstore.train.resume import ResumeOptions
from txstore.train.state import TrainState
from txstore.train.stateful import per_rank, repeatable, shared
from txstore.train.worker_streams import WorkerStreams

__all__ = [
    "Check",
    "Checkpointer",
    "ElasticBatchSampler",
    "ProofPolicy",
    "ReplayedSampler",
    "ResumeOptions",
    "ResumeReport",
    "SaveHandle",
    "SavePolicy",
    "StepRecord",
    "TrainProgress",
    "TrainState",
    "WorkerStreams",
    "compare_with_control",
    "per_rank",
    "repeatable",
    "shared",
]
