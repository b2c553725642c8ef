"""The certificate by which the processes of one launch recognise one another."""

from __future__ import annotations

import dataclasses
import datetime
import ssl
import tempfile

_VALID = datetime.timedelta(days=3650)
"""Of the certificate, which only opens connections while a launch connects; clocks of nodes may differ."""


@dataclasses.dataclass(frozen=True)
class Credentials:
    """The certificate that both ends of a connection show, and its key. It travels through Ray.

    Attributes:
      pem: the certificate and its private key. It is the only certificate that both ends accept.
      encryption: whether connections are encrypted; by default those between machines.
    """

    pem: bytes = dataclasses.field(repr=False)
    encryption: bool | None = None

    def context(self, accepts: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # all processes of the launch have the same certificate
        context.verify_mode = ssl.CERT_REQUIRED
        if accepts:
            context.num_tickets = 0  # nobody resumes a session
        certificate_end = self.pem.index(b"-----BEGIN PRIVATE KEY")
        context.load_verify_locations(cadata=self.pem[:certificate_end].decode())
        # Python loads a key from files only; this one belongs to the user alone, and is gone at once.
        with tempfile.NamedTemporaryFile(prefix="mpmd-") as file:
            file.write(self.pem)
            file.flush()
            context.load_cert_chain(file.name)
        return context


def make_credentials(encryption: bool | None = None) -> Credentials:
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
    return Credentials(pem, encryption)
