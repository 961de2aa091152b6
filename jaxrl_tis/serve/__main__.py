"""The command of the server.

It speaks the OpenAI protocol and listens on this machine alone. Another --host needs --token_file,
and then every request needs the token. On this machine only a change of weights needs it.

Examples:

    python -m jaxrl_tis.serve --config=configs/quickstart.py --workdir=runs/quickstart-tis
    python -m jaxrl_tis.serve --config=configs/quickstart.py --host=0.0.0.0 --token_file=token.txt
"""

import socket

from absl import flags

from jaxrl_tis import cli_flags
from jaxrl_tis.build import build
from jaxrl_tis.endpoint.request import Limits
from jaxrl_tis.learner.state import as_begun
from jaxrl_tis.runtime.addresses import is_loopback

CONFIG = cli_flags.define_config()
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of a run whose newest checkpoint is served; default: the weights that "
    "the config starts from."
)
ADAPTER = flags.DEFINE_string("adapter", None, "Folder of a PEFT adapter of the model.")
HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
PORT = flags.DEFINE_integer("port", 8000, "Port to listen on.", lower_bound=0, upper_bound=65535)
HOSTS = flags.DEFINE_list(
    "hosts", [], "Names in the Host of requests, beside localhost and its addresses; a server that "
    "needs the token takes any name unless some are given."
)
TOKEN_FILE = flags.DEFINE_string("token_file", None, "File that holds the bearer token.")
MAX_PENDING = flags.DEFINE_integer("max_pending", 64, "Choices in work or queued.", lower_bound=1)
MAX_CHOICES = flags.DEFINE_integer(
    "max_choices", 64, "Choices of a request: its prompts times n; at most --max_pending.",
    lower_bound=1,
)
MAX_BODY_BYTES = flags.DEFINE_integer("max_body_bytes", 2**20, "Size of a request.", lower_bound=1)
MAX_SECONDS = flags.DEFINE_float("max_seconds", 300.0, "Time of a request.", lower_bound=0.0)

LOGPROBS = 5  # likeliest tokens recorded per sampled token


def main() -> None:
    try:
        import uvicorn

        from jaxrl_tis.endpoint import connection
        from jaxrl_tis.serve.setup import load, make_app, read_token
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'jaxrl_tis[serve]'") from error
    token = read_token(TOKEN_FILE.value)
    if token is None and not is_loopback(HOST.value):
        raise ValueError(f"--host={HOST.value} is reachable from other machines; give --token_file")
    try:
        family = socket.AF_INET6 if ":" in HOST.value else socket.AF_INET
        socket.create_server((HOST.value, PORT.value), family=family).close()
    except OSError as error:
        raise ValueError(
            f"--host={HOST.value} --port={PORT.value}: {error.strerror}; give another --port"
        ) from error
    config = as_begun(CONFIG.value, WORKDIR.value) if WORKDIR.value else CONFIG.value
    setup = build(config, penalties=True, top_n=LOGPROBS)
    limits = Limits(
        MAX_BODY_BYTES.value, setup.engine.max_length, setup.config.rollout.max_new_tokens,
        min(MAX_CHOICES.value, MAX_PENDING.value), LOGPROBS, MAX_SECONDS.value,
    )
    start = WORKDIR.value, ADAPTER.value
    application = make_app(
        setup, load(setup, *start), limits, MAX_PENDING.value, token, HOST.value, HOSTS.value, start
    )
    uvicorn.run(application, host=HOST.value, port=PORT.value, **connection.OPTIONS)


if __name__ == "__main__":
    cli_flags.run(main, required=["config"])
