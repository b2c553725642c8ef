"""The proof that processes are of one launch, and the TLS on which they agree."""

from __future__ import annotations

import dataclasses
import datetime
import secrets
import ssl
import tempfile

from cluster.tcp.connection import Session

_VALID = datetime.timedelta(days=3650)
"""Of the certificate, which only opens connections while a launch connects; clocks of nodes may differ."""


@dataclasses.dataclass(frozen=True)
class Credentials:
    """The secret of the two ends of a connection. It travels through Ray.

    Attributes:
      secret: by which both ends prove that they have these credentials, before anything is interpreted.
      pem: a certificate and its private key, which both ends use for TLS, and the only one that both accept.
      encryption: whether connections are encrypted; by default those between machines.
    """

    secret: bytes = dataclasses.field(repr=False)
    pem: bytes = dataclasses.field(repr=False)
    encryption: bool | None = None


def make_credentials(encryption: bool | None = None) -> Credentials:
    """New credentials, which nobody else has."""
    # Not at the top: processes that never make a certificate do not need it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "mpmd")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private_key = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM) + private_key
    return Credentials(secrets.token_bytes(32), pem, encryption)


class Handshake:
    """The beginning of a session of TLS at one end. It neither reads nor writes, and so never waits.

    Args:
      credentials: the credentials of both ends.
      name: the name of the session. Both ends have to pass the same name; the accepting end checks it.
      accepts: whether this end accepts the connection; otherwise it begins the handshake.
    """

    def __init__(self, credentials: Credentials, name: str, accepts: bool):
        context = _context(credentials.pem, accepts)
        if accepts:
            context.num_tickets = 0  # nobody resumes a session
            context.sni_callback = lambda tls, announced, _: (
                None if announced == name else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
            )
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, accepts, None if accepts else name)
        self.session = Session(tls, incoming, outgoing)

    def proceed(self, received: bytes = b"") -> bool:
        """Takes in received bytes, and returns whether the handshake is done at this end.

        In any case, ``to_send`` returns the bytes to send next.

        Raises: ``ssl.SSLError``, an ``OSError``, when the other end does not have the credentials.
        """
        self.session.incoming.write(received)
        try:
            self.session.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def to_send(self) -> bytes:
        return self.session.outgoing.read()


def _context(pem: bytes, accepts: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # there is one certificate for all; what has it, belongs to the launch
    context.verify_mode = ssl.CERT_REQUIRED
    certificate_end = pem.index(b"-----BEGIN PRIVATE KEY")
    context.load_verify_locations(cadata=pem[:certificate_end].decode())
    # Python loads a key from files only; this one belongs to the user alone, and is gone at once.
    with tempfile.NamedTemporaryFile(prefix="mpmd-") as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context
