"""The command: who may be reached, which weights are read, and a real engine behind the routes."""

import asyncio
import functools
import http.client
import json
import subprocess
import sys
import threading
import pathlib
import time

import numpy as np
import pytest
import uvicorn

from jaxrl_tis import models, serve
from jaxrl_tis.build import build, initial_params
from jaxrl_tis.serve_request import Limits
from tests import tiny
from tests.asgi import call, run

LIMITS = Limits(
    body_bytes=1000, prompt_tokens=5, max_tokens=3, choices=4, logprobs=2, seconds=60.0
)
TEXT = "/v1/completions"


@functools.cache
def setup():
    """Of the tiny config on one device, with the engine of the server."""
    return build(tiny.config(model__num_layers=1), penalties=True, top_n=2)
