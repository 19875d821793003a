"""What is printed of URLs and names: no secret, no terminal control."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txstore.redact import printable, redact, redact_text, scrub


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("file:///data/run-1", "file:///data/run-1"),
        ("/data/a?b#c@d", "/data/a?b#c@d"),
        ("s3://bucket/run@2", "s3://bucket/run@2"),
        ("s3://AKIA:pass@bucket/run", "s3://***@bucket/run"),
        ("S3://AKIA@bucket", "S3://***@bucket"),
        ("s3://AKIA:pa@ss@bucket/run", "s3://***@bucket/run"),
        ("s3://AKIA:pa/s@s@bucket/run", "s3://***@bucket/run"),
        ("https://host:9000/run", "https://host:9000/run"),
        ("az://account/c?sv=2024&sig=abcdef", "az://account/c?sv=***&sig=***"),
        ("s3://bucket/run?TOKEN", "s3://bucket/run?***"),
        ("s3://bucket/run?endpoint=http://u:p@h/x", "s3://bucket/run?endpoint=***"),
        ("s3://bucket/run#secret", "s3://bucket/run#***"),
        ("s3:/bucket?x=y", "s3:/bucket?x=***"),
        ("s3://bucket/run;aws_secret_access_key=abc;region=eu", "s3://bucket/run;aws_secret_access_key=***;region=eu"),
        ("bucket/run,token=abc", "bucket/run,token=***"),
        ("s3://bucket/run/password%3Dabc", "s3://bucket/run/password%3D***"),
    ],
)
def test_redact(url: str, shown: str) -> None:
    assert redact(url) == shown
    assert redact(shown) == shown


def test_scrub_hides_the_parts_that_a_backend_quotes() -> None:
    url = "s3://AKIA:hunter%2F22@bucket/run?sig=abcdef&sv=20"
    for part in (url, "AKIA:hunter%2F22", "hunter%2F22", "hunter/22", "abcdef", "sig=abcdef&sv=20"):
        shown = scrub(f"cannot use {part!r} here", url)
        assert not any(secret in shown for secret in ("hunter", "abcdef"))
        assert shown.startswith("cannot use '")
        assert shown.endswith("' here")


def test_scrub_leaves_other_text_alone() -> None:
    assert scrub("a plain message about step-1", "s3://a:b@bucket") == "a plain message about step-1"


def test_redact_text_finds_urls_in_messages() -> None:
    assert redact_text("GET 'https://u:pw@h/x?sig=1' failed") == "GET 'https://***@h/x?sig=***' failed"


@given(st.text(st.characters(codec="utf-8", exclude_characters="/?#@:;&,= \n"), min_size=4), st.text())
def test_a_password_is_never_shown(password: str, rest: str) -> None:
    assert password not in redact(f"s3://user:{password}@b/").removeprefix("s3://***")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("model.weight", "model.weight"),
        ("schön 模型", "schön 模型"),
        ("a\x1b[31mb", r"a\x1b[31mb"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x9b2J\x7f", r"\x9b2J\x7f"),
        ("abc\u202egpj.exe", r"abc\u202egpj.exe"),
        ("\ud800", r"\ud800"),
        ("a\u2028b\u200b", r"a\u2028b\u200b"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_printable_is_printable(text: str) -> None:
    assert printable(text).isprintable()


@pytest.mark.parametrize("piece", ["a", "a.", "a-", "token", "s3:", "//", "a@", "key=", "%3d"])
def test_a_megabyte_without_a_break_takes_no_minutes(piece):
    """Time by the square of the length would be hours; pytest's own limit ends that."""
    text = piece * (1_000_000 // len(piece))
    assert len(redact_text(text)) > 0
    assert len(redact(f"s3://bucket/{text}")) > 0


@pytest.mark.parametrize("before", ["1", "x" * 200, "-", "a" * 100 + "1"])
def test_a_url_is_found_whatever_stands_before_it(before):
    assert "hunter22" not in redact_text(f"{before}https://user:hunter22@host/x")
    assert "hunter22" not in redact(f"s3://bucket/{before}token=hunter22")
