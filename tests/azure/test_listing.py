"""Pages of listings that Azurite does not give."""

from __future__ import annotations

import pytest

from txstore.errors import TransientError
from txstore_azure.listing import in_order, parse_page


def page(*blobs, marker=""):
    return (
        f"<?xml version='1.0'?><EnumerationResults><Blobs>{''.join(blobs)}</Blobs>"
        f"<NextMarker>{marker}</NextMarker></EnumerationResults>"
    ).encode()


def blob(name, size="1", more="", **attributes):
    said = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return (
        f"<Blob><Name{said}>{name}</Name><Properties><Last-Modified>Sun, 29 Nov 2026 13:00:00 GMT</Last-Modified>"
        f"<Content-Length>{size}</Content-Length>{more}</Properties></Blob>"
    )


def keys(document, prefix="run/"):
    return [info.key for info in parse_page(document, prefix).objects]


def test_a_page_is_read():
    one = parse_page(page(blob("run/a", "5"), marker="next"), "run/")
    (info,) = one.objects
    assert (info.key, info.size, info.crc32c, info.modified_s) == ("a", 5, None, 1795957200.0)
    assert one.marker == "next"


def test_names_are_decoded_where_they_are_encoded():
    assert keys(page(blob("run%2Fa%2Bb", Encoded="true"), blob("run/a%2Bc"))) == ["a+b"]


def test_directories_of_a_hierarchical_namespace_are_passed_over():
    assert keys(page(blob("run/data", "0", "<ResourceType>directory</ResourceType>"), blob("run/data/x"))) == ["data/x"]


def test_what_lies_outside_the_prefix_is_passed_over():
    assert keys(page(blob("other/data"), blob("run/data"))) == ["data"]


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"<html><Blobs/></html>",
        b"<EnumerationResults/>",
        page(blob("run/a"))[:-30],
        page(blob("run/a", "many")),
        page(blob("run/a", "")),
        page("<Blob/>"),
        page("<Blob><Name></Name></Blob>"),
    ],
)
def test_what_is_no_listing_is_never_an_empty_one(document):
    with pytest.raises(TransientError):
        parse_page(document, "run/")


def test_a_listing_out_of_order_is_an_error_unless_a_page_can_be_sorted():
    def listed(*documents, after=""):
        return [info.key for info in in_order((parse_page(one, "") for one in documents), after)]

    assert listed(page(blob("b"), blob("a"), blob("c"))) == ["a", "b", "c"]
    assert listed(page(blob("a")), page(blob("b")), after="a") == ["b"]
    with pytest.raises(TransientError, match="order"):
        listed(page(blob("b")), page(blob("a")))
