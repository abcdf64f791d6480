"""A certificate authority of the tests: names in, files with certificates out, as a cluster mounts them."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from eyas.config import PeersConfig, TlsConfig

WORKERS = "workers.eyas"
_PEM = serialization.Encoding.PEM


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=30))
        .not_valid_after(now + timedelta(days=days))
    )


@dataclass
class Authority:
    """Signs certificates. Its own is `pem`."""

    name: str = "authority"
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def pem(self) -> bytes:
        built = _builder(self.name, self.name, self.key.public_key(), 1)
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        return built.sign(self.key, hashes.SHA256()).public_bytes(_PEM)

    def write(self, folder: Path, name: str = WORKERS, days: int = 1) -> None:
        """tls.crt, tls.key and ca.crt, as in a Secret; valid for `days` from now, or until so long ago."""
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName(name), x509.IPAddress(ip_address("127.0.0.1"))]
        built = _builder(name, self.name, key.public_key(), days)
        built = built.add_extension(x509.SubjectAlternativeName(names if name != WORKERS else names[:1]), critical=False)
        form = serialization.PrivateFormat.PKCS8
        files = {
            "tls.crt": built.sign(self.key, hashes.SHA256()).public_bytes(_PEM),
            "tls.key": key.private_bytes(_PEM, form, serialization.NoEncryption()),
            "ca.crt": self.pem,
        }
        for file, content in files.items():
            (folder / file).write_bytes(content)


def tls_config(folder: Path) -> TlsConfig:
    """Settings of a server that name the files of a folder."""
    return TlsConfig(str(folder / "tls.crt"), str(folder / "tls.key"))


def peers(folder: Path, **changes: object) -> PeersConfig:
    """Settings that name the files of a folder."""
    crt, key, ca = (str(folder / file) for file in ("tls.crt", "tls.key", "ca.crt"))
    return PeersConfig(**({"cert_file": crt, "key_file": key, "ca_file": ca, "tls_server_name": WORKERS} | changes))  # type: ignore[arg-type]
