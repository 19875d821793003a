"""The guide to training names what exists, and leaves out no option and no error."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import torch.utils.data

from txstore import errors, train
from txstore.train.checkpointer import Checkpointer
from txstore.train.resume import Resume

ROOT = Path(__file__).parents[2]
GUIDE = re.sub(
    r"```.*?```", "", (ROOT / "docs" / "guides" / "training.md").read_text(encoding="utf-8"), flags=re.DOTALL
)
NAMED = set(re.findall(r"`([A-Za-z_]+)`", GUIDE))


def test_every_option_is_told() -> None:
    for options in (train.SavePolicy, train.ResumeOptions):
        rows = {
            name for row in re.findall(r"^\| (`[^|]*) \|", GUIDE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
        }
        assert {field.name for field in dataclasses.fields(options)} <= rows, options
    named = {name.partition("=")[0] for name in re.findall(r"`([^`]+)`", GUIDE)}
    assert {field.name for field in dataclasses.fields(train.ProofPolicy)} <= named


def test_every_class_that_is_named_exists() -> None:
    classes = {name for name in NAMED if re.fullmatch(r"(?:[A-Z][a-z]+){2,}", name)}
    foreign = {"StatefulDataLoader"}
    known = {*dir(errors), *dir(torch.utils.data), *train.__all__}
    assert classes - foreign - known == set()


def test_every_error_that_is_documented_has_a_row() -> None:
    documented = "".join(
        method.__doc__ or "" for method in (Checkpointer.save, Checkpointer.wait, Checkpointer.record, Resume.run)
    )
    raised = {name for line in re.findall(r"^\s+([\w, ]+): ", documented, re.MULTILINE) for name in line.split(", ")}
    raised = {name for name in raised if isinstance(getattr(errors, name, None), type)} - {"TxStoreError", "SaveError"}
    assert len(raised) > 8
    rows = re.findall(r"^\| (`.*?) \|", GUIDE.partition("## When it raises")[2], re.MULTILINE)
    assert raised <= set(re.findall(r"`(\w+)`", " ".join(rows)))
