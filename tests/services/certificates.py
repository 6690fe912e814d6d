"""Certificates that a test makes for itself: an authority, a server of 127.0.0.1 and a client."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LIFETIME = datetime.timedelta(days=2)


class Certificates:
    """PEM files in a folder."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ca_key = ec.generate_private_key(ec.SECP256R1())
        self._ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "LMCache test authority")])
        self.ca = self._write("ca.pem", self._sign(self._ca_name, self._ca_key, is_authority=True))
        self.server_cert, self.server_key = self._pair("server", host)
        self.client_cert, self.client_key = self._pair("client", "")

    def _pair(self, name: str, host: str) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"LMCache test {name}")])
        certificate = self._write(f"{name}.pem", self._sign(subject, key, host=host))
        path = self._folder / f"{name}.key"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate, path

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, host: str = "", is_authority: bool = False
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._ca_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - LIFETIME)
            .not_valid_after(now + LIFETIME)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if host:
            alternative = x509.IPAddress(ipaddress.ip_address(host)) if host[0].isdigit() else x509.DNSName(host)
            builder = builder.add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        return builder.sign(self._ca_key, hashes.SHA256())

    def _write(self, name: str, certificate: x509.Certificate) -> Path:
        path = self._folder / name
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return path
