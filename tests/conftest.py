import pytest

pytest.register_assert_rewrite("txstore.testing.conformance")
