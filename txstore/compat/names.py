"""The names of fingerprints: one home, so that a checkpoint and a resume mean the same by them."""

from __future__ import annotations

MODEL_CONFIG = "model_config"
TOKENIZER = "tokenizer"
CHAT_TEMPLATE = "chat_template"
DATASET_MANIFEST = "dataset_manifest"
TRAINING_CONFIG = "training_config"
CODE_VERSION = "code_version"
PACKAGES = "packages"

RECOVERY_POINT = (MODEL_CONFIG, TOKENIZER, CHAT_TEMPLATE, DATASET_MANIFEST, TRAINING_CONFIG, CODE_VERSION)
"""The fingerprints that a recovery point carries."""

UNKNOWN = "unknown"
"""A fingerprint that could not be had. It equals nothing, itself included."""
