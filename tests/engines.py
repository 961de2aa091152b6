"""Our own server over loopback, as an engine of others."""

import contextlib
from unittest import mock

from jaxrl_tis.endpoint.request import Limits
from jaxrl_tis.learner.state import initial_policy
from jaxrl_tis.serve import setup as serving
from tests import asgi

TOKEN = "let-me-in"


@contextlib.contextmanager
def served(made, token=TOKEN, context_tokens=8, max_tokens=3, logprobs=0):
    """The URL of a server of a Setup, with the weights that its config starts from."""
    limits = Limits(
        body_bytes=20000, context_tokens=context_tokens, max_tokens=max_tokens, choices=4,
        logprobs=logprobs, seconds=60.0,
    )
    params = made.engine.load(initial_policy(made.training))
    with mock.patch.object(serving, "warm_up", lambda *_: None):
        app = serving.make_app(made, params, limits, 64, token, "127.0.0.1")
    with asgi.listening(app) as port:
        yield f"http://127.0.0.1:{port}"
