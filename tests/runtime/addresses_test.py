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


def test_who_is_on_this_machine():
    here = {"127.0.0.1": True, "::1": True, "localhost": True, "0.0.0.0": False, "learner": False}
    assert {host: addresses.is_loopback(host) for host in here} == here


def test_a_list_of_urls():
    assert addresses.urls("http://a:1/, https://b,") == ["http://a:1", "https://b"]
    for text, words in {
        "": "names no address", " , ": "names no address", "http://a,b:1": "'b:1' is no address; give one as",
        "http://a/,http://a": "'http://a' stands twice",
    }.items():
        with pytest.raises(ValueError, match=words):
            addresses.urls(text)
