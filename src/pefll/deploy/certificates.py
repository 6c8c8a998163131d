"""Makes a federation's TLS authority, the server's certificate and the clients' keys."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pefll.core.errors import PefllError
from pefll.deploy.private import make_private_folder, write_private

AUTHORITY_YEARS, SERVER_YEARS = 10, 2


def make_certificates(folder: Path, hosts: Sequence[str], days: int = 365 * SERVER_YEARS) -> None:
    """Write ca.crt, the authority's certificate for everybody, and server.crt and server.key for the server.

    Args:
        folder: the server's folder. An existing authority is reused, so clients need no new file.
        hosts: names and addresses of the server.
        days: number of days that the server's certificate is valid.
    """
    make_private_folder(folder)
    if (folder / "ca.key").exists():
        authority_key = _read_key(folder / "ca.key")
        authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    else:
        authority_key = ec.generate_private_key(ec.SECP384R1())
        authority = _authority(authority_key)
        write_private(folder / "ca.key", _pem(authority_key))
        write_private(folder / "ca.crt", authority.public_bytes(serialization.Encoding.PEM))
    key = ec.generate_private_key(ec.SECP384R1())
    certificate = _server(key, hosts, authority, authority_key, days)
    write_private(folder / "server.key", _pem(key))
    write_private(folder / "server.crt", certificate.public_bytes(serialization.Encoding.PEM))


def make_node_key(private: Path, public: Path, curve: ec.EllipticCurve | None = None) -> None:
    """Write a node's key pair in OpenSSH's format, which Flower reads.

    Args:
        private: file of the private key, for the node.
        public: file of the public key, for the server.
        curve: P-256 by default. A waiting client signs a request every 3 s, and the server checks it. With P-384 each
            request is about 90 bytes longer and costs the server more time (benchmarks/flower_polls.py).
    """
    key = ec.generate_private_key(curve or ec.SECP256R1())
    known = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_private(private, _pem(key, PrivateFormat.OpenSSH))
    write_private(public, known + b"\n")


def public_key_as_pem(path: Path) -> bytes:
    """Return a node's public key as PEM, the format of Flower's database."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError(f"{type(key).__name__} is not an elliptic curve key")
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise PefllError(f"{path} is not a node's public key: {error}", code="PEFLL-F004") from None
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    content: bytes = key.public_bytes(serialization.Encoding.PEM, form)
    return content


def expiry(path: Path) -> datetime:
    """Return the time at which a certificate expires."""
    try:
        until: datetime = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise PefllError(f"{path} is not a certificate: {error}", code="PEFLL-F404") from None
    return until


def _pem(key: ec.EllipticCurvePrivateKey, form: PrivateFormat = PrivateFormat.PKCS8) -> bytes:
    content: bytes = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return content


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    now = datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(_name("pefll federation"))
        .issuer_name(_name("pefll federation"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=365 * AUTHORITY_YEARS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def _server(
    key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.Certificate:
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"]):  # the server's app uses the last one
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    now = datetime.now(UTC)
    begins, ends = now - timedelta(hours=1), now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(hosts[0] if hosts else "localhost"))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(begins, ends - timedelta(days=1)))
        .not_valid_after(ends)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
