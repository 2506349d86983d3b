"""Makes the certificates and keys of a federation, and registers its nodes.

python keys.py server HOST ...      at the server: CA, certificate for these names, secret
python keys.py site NAME            at a site: node key, secret
python keys.py federation N         all of it, for N sites on one host (docker/federation.yaml)
python keys.py register FOLDER      at the server: every public key in FOLDER not yet registered

They go below the current directory. Existing files are kept, except the server's certificate: it is
renewed, also with other names. Only their owner can read private keys.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CONNECTION = "fedhet"
OWN_NAMES = ("superlink", "localhost", "127.0.0.1", "::1")  # the operator's and the executor's
CA_DAYS = 3650
SERVER_DAYS = 365
IN_USE = "public key already in use"
CONFIG = f"""\
[superlink]
default = "{CONNECTION}"

[superlink.{CONNECTION}]
address = "127.0.0.1:8000"
root-certificates = "/run/secrets/ca.crt"
"""


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("server", help="CA, server certificate, secret")
    command.add_argument(
        "hosts", nargs="+", type=host_alone, help="names and addresses that sites use"
    )
    command.set_defaults(run=lambda o: make_server(Path("ca"), Path("server"), o.hosts))
    command = commands.add_parser("site", help="node key, secret")
    command.add_argument("name", help="of the site")
    command.set_defaults(run=lambda o: make_site(Path("site"), o.name))
    command = commands.add_parser("federation", help="server and N sites on one host")
    command.add_argument("sites", type=int, metavar="N")
    command.set_defaults(run=lambda o: make_federation(o.sites))
    command = commands.add_parser("register", help="the nodes whose public keys are in FOLDER")
    command.add_argument("folder", type=Path, metavar="FOLDER")
    command.set_defaults(run=lambda o: register(o.folder))
    options = parser.parse_args(words)
    options.run(options)


def host_alone(text: str) -> str:
    """Return a word of the command line that is a name or an address, without a port."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if re.fullmatch(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", text) is None:
            raise argparse.ArgumentTypeError(
                f"{text} must be only a name or an address, such as fl.example.org or 10.1.2.3"
            ) from None
    return text


def make_federation(sites: int) -> None:
    """Make a server's folder and those of its sites."""
    make_server(Path("ca"), Path("server"), [])
    for number in range(sites):
        name = f"site-{number}"
        public = make_site(Path(name), name)
        write(Path("server", "nodes", public.name), public.read_bytes())


# ---- the server ----------------------------------------------------------------------------------


def make_server(authority: Path, server: Path, hosts: Sequence[str]) -> None:
    """Make a server's folder, whose certificate is for ``hosts``.

    ca.key is in ``authority``: no container needs it, so you may keep it elsewhere.
    """
    for name in ("state/flwr", "results", "data", "nodes"):
        (server / name).mkdir(parents=True, exist_ok=True)
    keys = server / "keys"
    if not (keys / "ca.crt").exists():
        make_authority(authority / "ca.key", keys / "ca.crt")
    if not (authority / "ca.key").exists():
        sys.exit(f"{authority / 'ca.key'} is missing: it signs the server's certificates")
    make_certificate(authority / "ca.key", keys, [*dict.fromkeys([*hosts, *OWN_NAMES])])
    make_secret(keys / "executor.secret")
    write(server / "state" / "flwr" / "config.toml", CONFIG.encode())
    print(f"{keys / 'ca.crt'}: copy it to site/keys/ of every site", file=sys.stderr)


def make_authority(key_path: Path, certificate_path: Path) -> None:
    """Make the key and the certificate of the CA that signs server certificates.

    An existing key is kept: what it has signed stays valid with the new certificate.
    """
    kept = key_path.exists()
    key = load_key(key_path) if kept else ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedhet CA")])
    certificate = (
        new_certificate(key, CA_DAYS, subject=name, issuer=name, ca=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    if not kept:
        write(key_path, private_pem(key, PrivateFormat.PKCS8), secret=True)
    write(certificate_path, certificate.public_bytes(Encoding.PEM))


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in a PEM file."""
    key = load_pem_private_key(path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def make_certificate(authority_key: Path, keys: Path, hosts: Sequence[str]) -> None:
    """Make the server's key and its certificate for these names and addresses."""
    signer = load_key(authority_key)
    authority = x509.load_pem_x509_certificate((keys / "ca.crt").read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    names = x509.SubjectAlternativeName([alternative_name(host) for host in hosts])
    certificate = (
        new_certificate(key, SERVER_DAYS, subject=subject, issuer=authority.subject, ca=False)
        .add_extension(usage, critical=False)
        .add_extension(names, critical=False)
        .add_extension(signed_by, critical=False)
        .sign(signer, hashes.SHA384())
    )
    write(keys / "server.key", private_pem(key, PrivateFormat.PKCS8), secret=True)
    write(keys / "server.crt", certificate.public_bytes(Encoding.PEM))
    print(f"{keys / 'server.crt'}: for {', '.join(hosts)}; {SERVER_DAYS} days", file=sys.stderr)


def new_certificate(
    key: ec.EllipticCurvePrivateKey, days: int, *, subject: x509.Name, issuer: x509.Name, ca: bool
) -> x509.CertificateBuilder:
    """Return a key's certificate for the issuer to sign; ``ca``: the key signs others."""
    now = datetime.datetime.now(datetime.UTC)
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    usage = x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
        **dict.fromkeys(others, False),
    )
    return (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(usage, critical=True)
    )


def alternative_name(host: str) -> x509.GeneralName:
    """Return a name or an address in the form of a certificate."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


# ---- a site --------------------------------------------------------------------------------------


def make_site(site: Path, name: str) -> Path:
    """Make a site's folder: keys/, data/, state/; return the path of its public key."""
    for folder in ("data", "state/clients", "state/cache"):
        (site / folder).mkdir(parents=True, exist_ok=True)
    keys = site / "keys"
    public = keys / f"{name}.pub"
    if not (keys / "node.key").exists():
        made = ec.generate_private_key(ec.SECP384R1())
        write(keys / "node.key", private_pem(made, PrivateFormat.OpenSSH), secret=True)
    key = load_ssh_private_key((keys / "node.key").read_bytes(), None)
    line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write(public, line + f" {name}\n".encode())
    make_secret(keys / "executor.secret")
    print(f"{public}: copy it to server/nodes/ of the server", file=sys.stderr)
    return public


def make_secret(path: Path) -> None:
    """Make the secret that an executor presents to its SuperLink or SuperNode."""
    if not path.exists():
        write(path, secrets.token_bytes(32), secret=True)


def private_pem(key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> bytes:
    """Return a private key as text."""
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Write a file atomically; only its owner can read a secret one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    new.replace(path)


# ---- registration --------------------------------------------------------------------------------


def register(folder: Path) -> None:
    """Register every public key in a folder; the file's name becomes the node's."""
    keys = sorted(folder.glob("*.pub"))
    if not keys:
        print(f"{folder} holds no public key (NAME.pub) to register", file=sys.stderr)
    for key in keys:
        words = ["flwr", "supernode", "register", str(key), CONNECTION, "--name", key.stem]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        said = " ".join((done.stdout + done.stderr).split())
        if done.returncode == 0:
            print(f"{key.stem}: {said}")
        elif IN_USE in said.lower():
            print(f"{key.stem}: its key was registered before; unregistered nodes need new keys")
        else:
            sys.exit(f"{key.stem} could not be registered: {said}")


if __name__ == "__main__":
    main()
