"""Secrets of a lab: the job's tokens, the agents' tokens, and a certificate authority with one certificate an agent.

All of it is made anew for each lab, lives in its directory in files of mode 0600, and goes with it. The authority's key
is never written: once the agents have their certificates nobody needs it.
"""

from __future__ import annotations

import datetime
import getpass
import io
import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ftctl.errors import CliError
from ftctl.exit_codes import ExitCode
from ftctl.lab.layout import Node
from ftctl.lab.paths import LabPaths, make_private, write_private

# A lab is up for hours; a week covers one that was forgotten over a holiday and ends soon enough to be worth nothing.
VALID = datetime.timedelta(days=7)
CLOCK_SKEW = datetime.timedelta(hours=1)
ROLES = ("viewer", "operator", "chaos")


@dataclass(frozen=True)
class Credentials:
    """Where the files are. `agents` is the agents' list of principals; `mine` the token that ftctl uses by default."""

    job: Path
    job_operator: Path
    agents: Path
    mine: Path
    ca: Path
    certificates: dict[str, tuple[Path, Path]]  # node -> (certificate, key)


def make(paths: LabPaths, nodes: Sequence[Node]) -> Credentials:
    """Write everything. Raises CliError if `cryptography` is not installed, OSError."""
    make_private(paths.tokens)
    make_private(paths.tls)
    job, job_operator = paths.tokens / "job", paths.tokens / "job-operator"
    write_private(job, secrets.token_hex(32) + "\n")
    write_private(job_operator, secrets.token_hex(32) + "\n")
    principals = []
    # The lab's user may do everything, under the login name: that is what `ftctl faults` shows as the owner.
    for principal, role in ((user_name(), "chaos"), ("lab-operator", "operator"), ("lab-viewer", "viewer")):
        token = secrets.token_hex(32)
        principals.append({"principal": principal, "role": role, "token": token})
        write_private(paths.tokens / role, token + "\n")
    agents = paths.tokens / "agents.yaml"
    write_private(agents, to_yaml(principals))
    certificates = _certificates(paths.tls, nodes)
    return Credentials(job, job_operator, agents, paths.tokens / "chaos", paths.tls / "ca.pem", certificates)


def user_name() -> str:
    """The login name, or "lab" for a user without one (a container's bare uid)."""
    try:
        name = re.sub(r"[^a-z0-9._-]", "-", getpass.getuser().lower())
    except (OSError, KeyError):
        return "lab"
    return name.strip("-._")[:32] or "lab"


def to_yaml(value: object) -> str:
    from ruamel.yaml import YAML

    writer = YAML(typ="safe")
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    text = io.StringIO()
    writer.dump(value, text)
    return text.getvalue()


def _certificates(directory: Path, nodes: Sequence[Node]) -> dict[str, tuple[Path, Path]]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError as error:
        raise CliError("lab", f"{error.name} is not installed", "pip install 'ftctl[agent]'", ExitCode.USAGE) from None

    now = datetime.datetime.now(datetime.timezone.utc)

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def builder(subject: str, key: ec.EllipticCurvePrivateKey, issuer: str) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + VALID)
        )

    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = "ftctl lab CA"
    signs_only = x509.KeyUsage(
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
    authority = (
        builder(authority_name, authority_key, authority_name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signs_only, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    write_private(directory / "ca.pem", authority.public_bytes(serialization.Encoding.PEM).decode())
    issued: dict[str, tuple[Path, Path]] = {}
    for node in nodes:
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(node.name), x509.IPAddress(ipaddress.ip_address(node.management.address))]
        certificate = (
            builder(node.name, key, authority_name)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
            .sign(authority_key, hashes.SHA256())
        )
        certificate_file, key_file = directory / f"{node.name}.pem", directory / f"{node.name}.key"
        write_private(certificate_file, certificate.public_bytes(serialization.Encoding.PEM).decode())
        key_text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_private(key_file, key_text.decode())
        issued[node.name] = (certificate_file, key_file)
    return issued
