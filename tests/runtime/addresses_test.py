"""Addresses as a command line spells them."""

import pytest

from jaxrl_tis.runtime import addresses


@pytest.mark.parametrize("text, expected", [
    ("127.0.0.1:0", ("127.0.0.1", 0)), ("learner:8000", ("learner", 8000)), ("[::1]:9", ("::1", 9)),
])
def test_an_address(text, expected):
    assert addresses.parse(text) == expected


@pytest.mark.parametrize("text", ["", "8000", ":8000", "host", "host:", "host:-1", "host:65536", "host:²"])
def test_no_address(text):
    with pytest.raises(ValueError, match="is not an address; give host:port"):
        addresses.parse(text)


@pytest.mark.parametrize("host, expected", [
    ("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("learner", False),
])
def test_who_is_on_this_machine(host, expected):
    assert addresses.is_loopback(host) == expected
