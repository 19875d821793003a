"""Compatibility of a resume: what was saved, what is today, what differs, and who allowed it. Pure, without torch."""

from txstore.compat.code_version import code_version
from txstore.compat.differences import Difference
from txstore.compat.fingerprints import (
    DatasetFile,
    chat_template_fingerprint,
    config_fingerprint,
    dataset_files,
    dataset_fingerprint,
    packages_fingerprint,
    tokenizer_fingerprint,
)
from txstore.compat.judgement import Judgement, judge
from txstore.compat.key_tables import KeyTable, TensorFact
from txstore.compat.layouts import OptimizerLayout
from txstore.compat.load_plan import LoadPlan
from txstore.compat.matrix import Matrix, entry_for, parse_matrix, read_matrix
from txstore.compat.migrations import KeyPlan, Transform, migration
from txstore.compat.names import (
    CHAT_TEMPLATE,
    CODE_VERSION,
    DATASET_MANIFEST,
    MODEL_CONFIG,
    PACKAGES,
    RECOVERY_POINT,
    TOKENIZER,
    TRAINING_CONFIG,
    UNKNOWN,
)
from txstore.compat.topology import Topology

__all__ = [
    "CHAT_TEMPLATE",
    "CODE_VERSION",
    "DATASET_MANIFEST",
    "MODEL_CONFIG",
    "PACKAGES",
    "RECOVERY_POINT",
    "TOKENIZER",
    "TRAINING_CONFIG",
    "UNKNOWN",
    "DatasetFile",
    "Difference",
    "Judgement",
    "KeyPlan",
    "KeyTable",
    "LoadPlan",
    "Matrix",
    "OptimizerLayout",
    "TensorFact",
    "Topology",
    "Transform",
    "chat_template_fingerprint",
    "code_version",
    "config_fingerprint",
    "dataset_files",
    "dataset_fingerprint",
    "entry_for",
    "judge",
    "migration",
    "packages_fingerprint",
    "parse_matrix",
    "read_matrix",
    "tokenizer_fingerprint",
]
