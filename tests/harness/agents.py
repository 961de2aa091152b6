"""Harnesses of the tests of host.py and process.py. Standard library only."""

import asyncio
import math
import os
import re
import time

from jaxrl_tis.harness.protocol import Result

NUMBER = 3


def plain(session):
    print("a harness may print")
    return session.example["reward"]


async def waiting(session):
    await asyncio.sleep(session.example["seconds"])
    return Result(1.0, {"seconds": session.example["seconds"]}, [([1, 2], None), ([3], [-0.5])])


async def blocking(session):
    open(session.example["note"], "w").close()
    time.sleep(session.example["seconds"])
    return 1.0


class Agent:
    async def __call__(self, session):
        return session.seed


agent = Agent()


def sleeping(session):
    time.sleep(session.example["seconds"])
    return 1


def dying(session):
    if session.example.get("dies", True):
        os._exit(3)
    time.sleep(0.3)
    return 2.0


def torn(session):
    """Ends within a reply: it writes a part of one to every pipe of its process."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if number > 2 and os.readlink(f"/proc/self/fd/{number}").startswith("pipe"):
                os.write(number, b'{"key": "0"')
        except OSError:
            pass
    os._exit(3)


def chatty(session):
    """Writes a line of its own to every pipe of its process, and stays."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if number > 2 and os.readlink(f"/proc/self/fd/{number}").startswith("pipe"):
                os.write(number, b'{"note": 1}\n')
        except OSError:
            pass
    time.sleep(60)


def holding(session):
    """A search that holds the interpreter's lock for longer than anybody waits."""
    return re.match("(a+)+$", "a" * 60 + "b")


def exhausted(session):
    return next(iter(()))


async def giving_up(session):
    raise asyncio.CancelledError


def two(session, more):
    return 0.0


def told(session):
    return {
        "text": "good", "nan": math.nan, "none": None, "metrics": Result(1.0, {"x": "y"}),
        "score": Result(1.0, {"score": 0.5}), "numpy": 2**5000, "large": 1e39, "list": [1],
        "calls": Result(1.0, {}, [([1], [math.inf])]),
        "raise": None,
    }[session.example["kind"]] if session.example["kind"] != "raise" else 1 / 0
