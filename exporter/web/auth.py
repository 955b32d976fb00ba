"""Who may ask: basic authentication against bcrypt hashes, and names in client certificates.

bcrypt is slow on purpose, so it runs beside the event loop, one comparison at a time, and what it
found is remembered under a keyed hash: a scrape every few seconds costs nothing, and the
passwords themselves are not kept. Guessing can't grow a queue or the memory without bound.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import ipaddress
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import bcrypt

MAX_REMEMBERED = 256
MAX_WAITING = 16
MAX_PASSWORD = 72  # bytes that bcrypt looks at


class TooBusyError(Exception):
    """So many comparisons wait already that one more would not be answered in time."""


class BasicAuth:
    """Checks ``Authorization`` headers against users (name to bcrypt hash)."""

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = users
        self._decoy = _decoy(users.values())
        self._key = secrets.token_bytes(32)
        # apart, so that guessing does not push out what is known to be right
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._wrong: OrderedDict[bytes, None] = OrderedDict()
        self._waiting = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="bcrypt")

    async def allows(self, header: str | None) -> bool:
        """Whether ``header`` names a user and their password. Raises ``TooBusyError``."""
        found = credentials(header)
        if found is None:
            return False
        user, password = found
        key = self._fingerprint(user, password)
        for seen, answer in ((self._right, True), (self._wrong, False)):
            if key in seen:
                seen.move_to_end(key)
                return answer
        right = await self._compare(user, password)
        seen = self._right if right else self._wrong
        seen[key] = None
        if len(seen) > MAX_REMEMBERED:
            seen.popitem(last=False)
        return right

    def close(self, drop: bool = False) -> None:
        """Compare no more after those that wait, or not even those with ``drop``."""
        self._worker.shutdown(wait=False, cancel_futures=drop)

    async def _compare(self, user: str, password: bytes) -> bool:
        if self._waiting >= MAX_WAITING:
            raise TooBusyError
        # an unknown user takes as long as a known one, so time does not tell who exists
        known = user in self._users
        wanted = self._users[user] if known else self._decoy
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            same = await loop.run_in_executor(self._worker, _same, password, wanted)
        finally:
            self._waiting -= 1
        return same and known

    def _fingerprint(self, user: str, password: bytes) -> bytes:
        parts = hashlib.sha256(user.encode()).digest() + hashlib.sha256(password).digest()
        return hashlib.blake2b(parts, key=self._key, digest_size=32).digest()


def credentials(header: str | None) -> tuple[str, bytes] | None:
    """User and password of an ``Authorization: Basic`` header, or None where it is no such thing."""
    scheme, _, encoded = (header or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (user.decode(), password) if colon else None
    except (binascii.Error, ValueError):
        return None


def _same(password: bytes, wanted: str) -> bool:
    try:
        return bcrypt.checkpw(password[:MAX_PASSWORD], wanted.encode())
    except ValueError:
        return False


def _decoy(hashes: Iterable[str]) -> str:
    """A hash that no password has, as costly as the costliest of ``hashes``."""
    cost = max((int(one.split("$")[2]) for one in hashes), default=10)
    salt = bcrypt.gensalt(cost).decode()
    return salt + "." * 31


def names_in(certificate: Mapping[str, object] | None) -> frozenset[str]:
    """Subject alternative names of a certificate as ``ssl`` gives it: DNS, IP, e-mail, URI."""
    found = (certificate or {}).get("subjectAltName", ())
    return frozenset(
        _address(name) if kind == "IP Address" else name
        for kind, name in (found if isinstance(found, tuple) else ())
        if kind in ("DNS", "IP Address", "email", "URI")
    )


def _address(name: str) -> str:
    """``0:0:0:0:0:0:0:1`` as people write it."""
    try:
        return str(ipaddress.ip_address(name.strip()))
    except ValueError:
        return name
