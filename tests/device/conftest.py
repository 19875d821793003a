"""Tests that need an accelerator. Without one they are not collected: a skip would fail with CI=true."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.accelerator.is_available() else ["test_*.py"]
