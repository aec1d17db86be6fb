"""The certificate and key of a server that speaks HTTPS, and error messages for its operator.

A file that cannot be used is reported with the reason in one line, before the port is bound. An encrypted key
is rejected: OpenSSL would ask for its passphrase on the terminal that started the server.
"""

from __future__ import annotations

import _ssl
import logging
import ssl
import time
from pathlib import Path

from infer.config.server import ServerConfig
from infer.errors import ConfigError

logger = logging.getLogger(__name__)


class EncryptedKey(Exception):
    """A key needs a passphrase; caught in this file."""


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS context; None: this server speaks HTTP."""
    cert, key = config.tls_cert, config.tls_key
    if cert is None or key is None:
        return None
    for knob, file in (("tls_cert", cert), ("tls_key", key)):
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {knob} {file!r}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION  # a handshake costs us far more than the client
    try:
        _read_certificate(cert)
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert)  # checks the rest of the chain
    except ssl.SSLError:
        raise ConfigError(f"tls_cert {cert!r} has no certificate, or a damaged one, in PEM format") from None
    try:
        context.load_cert_chain(cert, key, password=_refuse_passphrase)
    except EncryptedKey:
        advice = f"write it without a passphrase: openssl pkey -in {key} -out FILE"
        raise ConfigError(f"tls_key {key!r} is encrypted; {advice}") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"tls_key {key!r} is not the key of tls_cert {cert!r}") from None
        why = f" ({error.reason})" if error.reason else ""
        raise ConfigError(
            f"tls_key {key!r} has no private key, or a damaged one, in PEM format{why}"
        ) from None
    return context


def warn_if_expired(config: ServerConfig) -> None:
    """Log a warning if the certificate is expired or not yet valid."""
    if config.tls_cert is None:
        return
    facts, now = _read_certificate(config.tls_cert), time.time()
    if ssl.cert_time_to_seconds(facts["notAfter"]) < now:
        logger.warning("certificate has expired tls_cert=%s not_after=%r", config.tls_cert, facts["notAfter"])
    if ssl.cert_time_to_seconds(facts["notBefore"]) > now:
        logger.warning(
            "certificate not valid yet tls_cert=%s not_before=%r", config.tls_cert, facts["notBefore"]
        )


def _read_certificate(file: str) -> dict[str, str]:
    """Return the fields of the first certificate in a file; the only such parser in the standard library."""
    facts: dict[str, str] = _ssl._test_decode_cert(file)  # type: ignore[attr-defined]
    return facts


def _refuse_passphrase() -> str:
    raise EncryptedKey
