"""Network addresses: parsing host:port, and whether other machines can reach a host."""

import ipaddress
import urllib.parse


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host. Names other than localhost count as remote."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse(text: str) -> tuple[str, int]:
    """Reads host:port, such as "127.0.0.1:8000" or "[::1]:8000"; ValueError for anything else."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdecimal() and int(port) < 2**16):
        raise ValueError(f"{text!r} is not an address; give host:port with a port from 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def urls(text: str) -> list[str]:
    """Returns the addresses in a list with commas. ValueError where there is none, one is no http address or
    one stands twice."""
    found = [part.strip().rstrip("/") for part in text.split(",") if part.strip()]
    for url in found:
        if not is_url(url):
            raise ValueError(f"{url!r} is no address; give one as 'http://host:8000'")
        if found.count(url) > 1:
            raise ValueError(f"{url!r} stands twice in {text!r}")
    if not found:
        raise ValueError("it names no address; give one or more as 'http://host:8000,http://other:8000'")
    return found


def is_url(text: str) -> bool:
    """Whether a text is an http or https address with a host and a possible port."""
    try:
        parts = urllib.parse.urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number
        return False
