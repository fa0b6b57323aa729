"""Certificates for tests of TLS."""
import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Authority:
    """A root of certificates."""

    def __init__(self, folder, name):
        self.folder, self.name, self.key = folder, name, ec.generate_private_key(ec.SECP256R1())
        self.root = self._sign(name, self.key, x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]), x509.BasicConstraints(True, None))
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self.root.public_bytes(serialization.Encoding.PEM))

    def _sign(self, subject, key, issuer, constraints):
        now = datetime.datetime.now(datetime.timezone.utc)
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = x509.CertificateBuilder().subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)])).issuer_name(issuer)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number()).add_extension(constraints, True).add_extension(names, False)
        return builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=9)).sign(self.key, hashes.SHA256())

    def certificate(self, name):
        """The files of a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(name, key, self.root.subject, x509.BasicConstraints(False, None))
        files = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        return [str(file) for file in files]
