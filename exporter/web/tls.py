"""TLS, headers and users from a file in the format of Prometheus' exporter-toolkit.

One file serves every exporter of a shop, so it is read as strictly as the toolkit reads it: an
unknown key is an error, relative paths start at the file. What Python's TLS cannot do is refused
with the reason, never ignored, because each of these keys promises some protection. The file
and what it names are read again when they change, certificates are renewed while we run.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

MAX_SIZE = 1 << 20
MAX_COST = 18  # of a bcrypt hash; one more doubles the time, and 18 already takes many seconds

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BCRYPT = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]+")
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_POLICIES = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert")
_HEADERS: Mapping[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
# names of the format (Go's) and of OpenSSL; those of TLS 1.3 can't be chosen in either
_CIPHERS = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
}
_CIPHERS_13 = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
_REFUSED = {
    "tls_server_config.cert": "certificates in the file itself are not supported; use cert_file",
    "tls_server_config.key": "keys in the file itself are not supported; use key_file",
    "tls_server_config.client_ca": "certificates in the file itself are not supported; use client_ca_file",
    "tls_server_config.curve_preferences": "curves can't be chosen here; remove it",
    "rate_limit": "rate limits are not supported; remove it",
}


class WebConfigError(ValueError):
    """A web configuration has mistakes. ``problems`` lists each as ``file: place: what``.

    ``files`` are those that, once changed, may make it right.
    """

    def __init__(self, problems: list[str], files: tuple[Path, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
        self.files = files


@dataclass(frozen=True, slots=True)
class WebConfig:
    """What the file asks for. ``ssl_context`` is None for plain HTTP, ``users`` maps to bcrypt hashes."""

    files: tuple[Path, ...]
    ssl_context: ssl.SSLContext | None = None
    allowed_sans: frozenset[str] = frozenset()
    headers: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)


def load_web_config(path: Path) -> WebConfig:
    """Read the file and all it names; raises ``WebConfigError`` with every problem found."""
    return _Reader(path).read()


class WebConfigFile:
    """A web configuration that follows its file. Blocks on files: call it in a thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tried = self._seen = {path: _stamp(path)}
        self.current = load_web_config(path)
        self._follow(self.current.files)

    def refresh(self) -> bool:
        """Read a file that changed, and then stayed the same from one call to the next.

        True where ``current`` is new. Raises ``WebConfigError`` once for a change that is not
        right; ``current`` then stays as it was. A file caught half-written thus changes nothing.
        """
        before, self._seen = self._seen, {path: _stamp(path) for path in self._tried}
        if self._seen == self._tried or self._seen != before:
            return False
        self._tried = self._seen
        try:
            self.current = load_web_config(self._path)
        except WebConfigError as error:
            self._follow(error.files)
            raise
        self._follow(self.current.files)
        return True

    def _follow(self, files: tuple[Path, ...]) -> None:
        """Watch these files. Stamps from before they were read stay, so no change is missed."""
        self._tried = self._seen = {
            path: self._tried[path] if path in self._tried else _stamp(path) for path in files
        }


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class _Reader:
    """Turns one file into a ``WebConfig``, collecting problems instead of stopping at one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = [path]
        self._problems: list[str] = []

    def problem(self, place: str, what: str) -> None:
        self._problems.append(f"{self._path}: {place}: {what}")

    def error(self) -> WebConfigError:
        return WebConfigError(self._problems, tuple(self._files))

    def read(self) -> WebConfig:
        raw = self.mapping("file", self.parse())
        self.keys("", raw, ("tls_server_config", "http_server_config", "basic_auth_users"))
        context, sans = None, frozenset[str]()
        if raw.get("tls_server_config"):
            context, sans = self.tls(self.mapping("tls_server_config", raw["tls_server_config"]))
        http = self.mapping("http_server_config", raw.get("http_server_config"))
        self.keys("http_server_config.", http, ("http2", "headers"))
        self.boolean("http_server_config.http2", http.get("http2"))  # HTTP/1.1 is served either way
        headers = self.headers(self.mapping("http_server_config.headers", http.get("headers")))
        users = self.users(self.mapping("basic_auth_users", raw.get("basic_auth_users")))
        if self._problems:
            raise self.error()
        return WebConfig(tuple(self._files), context, sans, headers, users)

    def parse(self) -> object:
        """The YAML as plain data. Nothing of the content is quoted in a problem: it holds secrets."""
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_SIZE + 1)
            if len(data) > MAX_SIZE:
                self.problem("file", "is larger than 1 MiB; is it the right file?")
                raise self.error()
            text = data.decode()
            node = yaml.compose(text, _LOADER)
            raw = yaml.load(text, _LOADER)  # noqa: S506 - one of the two safe loaders
        except OSError as error:
            self.problem("file", f"can't be read: {error.strerror}")
            raise self.error() from None
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
            if isinstance(error, WebConfigError):
                raise
            mark = getattr(error, "problem_mark", None)
            self.problem(f"line {mark.line + 1}" if mark else "file", "is not YAML")
            raise self.error() from None
        if node is None or raw is None:
            # also what a file looks like between being emptied and being written anew
            self.problem("file", "is empty; write {} for neither TLS nor users")
            raise self.error()
        for key, line in _repeated(node, set()):
            self.problem(f"line {line}", f"{key} is there twice")
        return raw

    # --- pieces ---------------------------------------------------------------------------

    def mapping(self, place: str, raw: object) -> Mapping[str, object]:
        if raw is None:
            return {}
        if isinstance(raw, dict):
            if all(isinstance(key, str) for key in raw):
                return raw
            self.problem(place, "has a name that is no text; quote it")
        else:
            self.problem(place, "must be a mapping of names to values")
        return {}

    def keys(self, prefix: str, raw: Mapping[str, object], known: tuple[str, ...]) -> None:
        for key in raw:
            if prefix + key in _REFUSED:
                self.problem(prefix + key, _REFUSED[prefix + key])
            elif key not in known:
                self.problem(prefix + key, f"is unknown; known are {', '.join(known)}")

    def text(self, place: str, raw: object) -> str | None:
        if raw is None or raw == "":
            return None
        if isinstance(raw, str):
            return raw
        self.problem(place, "must be text; quote it")
        return None

    def texts(self, place: str, raw: object) -> Iterator[str]:
        if raw is not None and not isinstance(raw, list):
            self.problem(place, "must be a list")
            return
        for i, one in enumerate(raw or []):
            if (text := self.text(f"{place}[{i}]", one)) is not None:
                yield text

    def boolean(self, place: str, raw: object) -> bool | None:
        if raw is None or isinstance(raw, bool):
            return raw
        self.problem(place, "must be true or false")
        return None

    def path(self, place: str, raw: object) -> Path | None:
        text = self.text(place, raw)
        if text is None:
            return None
        path = self._path.parent / text
        self._files.append(path)
        try:
            with path.open("rb"):
                return path
        except (OSError, ValueError) as error:
            self.problem(place, f"{path} can't be read: {getattr(error, 'strerror', None) or 'no such path'}")
            return None

    # --- sections -------------------------------------------------------------------------

    def tls(self, raw: Mapping[str, object]) -> tuple[ssl.SSLContext | None, frozenset[str]]:
        at = "tls_server_config."
        self.keys(
            at,
            raw,
            (
                "cert_file", "key_file", "client_auth_type", "client_ca_file", "client_allowed_sans",
                "min_version", "max_version", "cipher_suites", "prefer_server_cipher_suites",
            ),
        )  # fmt: skip
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = self.version(at + "min_version", raw.get("min_version"), "TLS12")
        context.maximum_version = self.version(at + "max_version", raw.get("max_version"), "TLS13")
        if context.minimum_version > context.maximum_version:
            self.problem(at + "max_version", "is below min_version")
        self.ciphers(context, list(self.texts(at + "cipher_suites", raw.get("cipher_suites"))))
        if self.boolean(at + "prefer_server_cipher_suites", raw.get("prefer_server_cipher_suites")) is False:
            context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        self.clients(context, raw)
        sans = frozenset(self.texts(at + "client_allowed_sans", raw.get("client_allowed_sans")))
        if sans and context.verify_mode is not ssl.CERT_REQUIRED:
            self.problem(at + "client_allowed_sans", "needs client_auth_type RequireAndVerifyClientCert")
        for name in ("cert_file", "key_file"):
            if raw.get(name) in (None, ""):
                self.problem(at + name, "is missing; TLS needs a certificate and its key")
        cert, key = (self.path(at + name, raw.get(name)) for name in ("cert_file", "key_file"))
        if cert and key:
            try:
                # an empty password, or OpenSSL asks on the terminal for that of an encrypted key
                context.load_cert_chain(cert, key, password="")
            except (ssl.SSLError, OSError, ValueError):
                self.problem(
                    at + "cert_file",
                    f"{cert} and {key} are no PEM certificate and unencrypted key that belong together",
                )
        return context, sans

    def clients(self, context: ssl.SSLContext, raw: Mapping[str, object]) -> None:
        at = "tls_server_config."
        policy = self.text(at + "client_auth_type", raw.get("client_auth_type")) or "NoClientCert"
        authority = self.path(at + "client_ca_file", raw.get("client_ca_file"))
        if policy in _UNVERIFIED:
            self.problem(
                at + "client_auth_type",
                f"{policy} accepts any certificate and is not supported; use RequireAndVerifyClientCert",
            )
            return
        if policy not in _POLICIES:
            self.problem(at + "client_auth_type", f"is unknown; known are {', '.join(_POLICIES)}")
            return
        context.verify_mode = _POLICIES[policy]
        named = raw.get("client_ca_file") not in (None, "")
        if context.verify_mode is not ssl.CERT_NONE and not named:
            self.problem(at + "client_ca_file", f"is missing; {policy} needs it")
        if context.verify_mode is ssl.CERT_NONE and named:
            self.problem(at + "client_auth_type", "is missing; client_ca_file does nothing without it")
        if authority:
            try:
                context.load_verify_locations(authority)
            except (ssl.SSLError, OSError):
                self.problem(at + "client_ca_file", f"{authority} holds no PEM certificates")

    def version(self, place: str, raw: object, default: str) -> ssl.TLSVersion:
        name = self.text(place, raw) or default
        if name not in _VERSIONS:
            self.problem(place, "must be TLS12 or TLS13")
        return _VERSIONS.get(name, _VERSIONS[default])

    def ciphers(self, context: ssl.SSLContext, names: list[str]) -> None:
        place = "tls_server_config.cipher_suites"
        for name in names:
            if name not in _CIPHERS and name not in _CIPHERS_13:
                known = ", ".join([*_CIPHERS, *_CIPHERS_13])
                self.problem(place, f"{name!r} is unknown or unsafe; known are {known}")
        chosen = [_CIPHERS[name] for name in names if name in _CIPHERS]
        if chosen:
            try:
                context.set_ciphers(":".join(chosen))
            except ssl.SSLError:
                self.problem(place, "the OpenSSL installed here offers none of them")

    def headers(self, raw: Mapping[str, object]) -> dict[str, str]:
        found = {}
        for name, value in raw.items():
            place = f"http_server_config.headers.{name}"
            if name not in _HEADERS:
                self.problem(place, f"can't be set; known are {', '.join(_HEADERS)}")
            elif (text := self.text(place, value)) is not None:
                if _HEADERS[name] and text not in _HEADERS[name]:
                    self.problem(place, f"must be {' or '.join(_HEADERS[name])}")
                elif not _HEADER_VALUE.fullmatch(text):
                    self.problem(place, "must be one line of ASCII")
                else:
                    found[name] = text
        return found

    def users(self, raw: Mapping[str, object]) -> dict[str, str]:
        found = {}
        for name, value in raw.items():
            place = f"basic_auth_users.{name}"
            match = _BCRYPT.fullmatch(value) if isinstance(value, str) else None
            if ":" in name or not name:
                self.problem(place, "a user name must not be empty nor hold a colon")
            elif match is None:
                self.problem(place, "is no bcrypt hash; make one with 'htpasswd -nBC 10 NAME'")
            elif not 4 <= int(match[1]) <= MAX_COST:
                self.problem(place, f"the cost of the hash must be 4 to {MAX_COST}")
            else:
                found[name] = match[0]
        return found


def _repeated(node: yaml.Node, seen: set[int]) -> Iterator[tuple[str, int]]:
    """Names that a mapping has twice, with the line of the second. ``seen`` ends circles."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for one in node.value:
            yield from _repeated(one, seen)
    elif isinstance(node, yaml.MappingNode):
        names = set()
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name is not None and name in names:
                yield name, key.start_mark.line + 1
            names.add(name)
            yield from _repeated(value, seen)
