"""What a web page of somebody else can have a browser send is not answered."""

import pytest

from tests.asgi import call, run
from tests.endpoint.app_test import TEXT, TOKEN, application

BODY = {"prompt": "abc", "max_tokens": 2}


def ask(path=TEXT, body=BODY, app=None, **headers):
    return run(app or application(), lambda app: call(app, path, body, **headers))


@pytest.mark.parametrize("host", [
    "localhost", "localhost:8000", "127.0.0.1:1", "127.9.9.9", "[::1]", "[::1]:8000", "LOCALHOST:8",
])
def test_this_machine_has_these_names(host):
    assert ask(host=host).status == ask("/health", None, host=host).status == 200


@pytest.mark.parametrize("host", [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "",
    "10.0.0.1:8000", "0.0.0.0", "[::1", "localhost@evil.example", None,
])
@pytest.mark.parametrize("path, body", [(TEXT, BODY), ("/health", None), ("/nothing", None)])
def test_no_name_of_another_server_leads_here(host, path, body):
    reply = ask(path, body, host=host)
    assert reply.status == 421 and "--hosts" in reply.error


def test_names_that_the_server_was_given():
    app = lambda: application(hosts=("My.Box",))
    assert ask(app=app(), host="my.box:8000").status == 200
    assert ask(app=app(), host="localhost").status == 200
    for other in ("my.box.example", "not.my.box"):
        assert ask(app=app(), host=other).status == 421


def test_a_server_that_needs_the_token_is_asked_by_any_name_unless_it_was_given_some():
    closed = lambda **options: application(token=TOKEN, is_closed=True, **options)
    assert ask(app=closed(), host="evil.example").status == 401
    assert ask(app=closed(), host="a.example", token=TOKEN).status == 200
    assert ask(app=closed(hosts=("a.example",)), host="b.example", token=TOKEN).status == 421


@pytest.mark.parametrize("origin, status", [
    ("http://localhost:8000", 200), ("https://localhost:8000", 200), ("http://LOCALHOST:8000", 200),
    (None, 200),  # curl and SDKs
    ("http://localhost:3000", 403), ("http://localhost", 403), ("http://evil.example", 403),
    ("http://127.0.0.1:8000", 403), ("null", 403), ("", 403), ("http://[", 403),
    ("http://evil.example/http://localhost:8000", 403),
])
def test_pages_of_other_origins_get_nothing(origin, status):
    assert ask(host="localhost:8000", origin=origin).status == status
    assert ask("/v1/models", None, host="localhost:8000", origin=origin).status == status


@pytest.mark.parametrize("kind, status", [
    ("application/json", 200), ("application/json; charset=utf-8", 200), ("Application/JSON", 200),
    # What a page may send without asking before: these, and a Blob without a type.
    ("text/plain", 415), ("application/x-www-form-urlencoded", 415), ("multipart/form-data", 415),
    ("text/plain; application/json", 415), ("text/plain,application/json", 415), (None, 415),
    ("application/jsonp", 415),
])
@pytest.mark.parametrize("path", [TEXT, "/weights"])
def test_a_body_says_that_it_is_json(kind, status, path):
    reply = ask(path, content_type=kind)
    assert reply.status == (403 if status == 200 and path == "/weights" else status)
    assert status == 200 or "Content-Type: application/json" in reply.error


@pytest.mark.parametrize("headers, is_clear", [
    (dict(content_length="31"), True), (dict(transfer_encoding="chunked"), True),
    (dict(content_length="31", transfer_encoding="chunked"), False),
    (dict(transfer_encoding="chunked", http_version="1.0"), False),
])
def test_a_body_of_two_lengths_ends_the_connection(headers, is_clear):
    reply = ask(**headers)
    assert reply.status == (200 if is_clear else 400)
    assert is_clear or reply.headers["connection"] == "close"
