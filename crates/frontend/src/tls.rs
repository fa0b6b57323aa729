//! TLS of the ports: the server's certificate, and the certificates that clients must have.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use downbeat_core::pages::Pointer;
use downbeat_service::options::TlsOptions;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

use crate::connections::Protocol;
use crate::reloaded::{Reloaded, read_bounded};

/// Largest file of certificates or keys, bytes.
const MAX_FILE: u64 = 4 << 20;

/// The TLS of a process's ports, which follows its files.
#[derive(Clone)]
pub struct Tls(Arc<Reloaded<Configs>>);

/// The configurations of the ports. Connections keep the one that they began with.
struct Configs {
    http: Arc<ServerConfig>,
    grpc: Arc<ServerConfig>,
}

impl Tls {
    /// The TLS that the options ask for; `None`: the ports speak no TLS. A task on the caller's runtime
    /// follows the files.
    ///
    /// # Errors
    /// If a file cannot be read, or the key is not that of the certificate.
    pub fn open(options: &TlsOptions) -> anyhow::Result<Option<Tls>> {
        let (certificate, key) = match (&options.certificate, &options.key) {
            (Some(certificate), Some(key)) => (certificate.clone(), key.clone()),
            (None, None) if options.client_ca.is_none() => return Ok(None),
            (given, _) => {
                let missing = if given.is_some() { "--tls-key FILE" } else { "--tls-certificate FILE" };
                bail!("TLS needs a certificate and its key: {missing} is missing ({})", Pointer::TLS)
            }
        };
        let client_ca = options.client_ca.clone();
        let files = [Some(certificate.clone()), Some(key.clone()), client_ca.clone()].into_iter().flatten().collect();
        let read = move || Configs::read(&certificate, &key, client_ca.as_deref());
        Ok(Some(Tls(Reloaded::follow("TLS certificates", files, read)?)))
    }

    /// The configuration of a new connection.
    pub fn config(&self, protocol: Protocol) -> Arc<ServerConfig> {
        let configs = self.0.get();
        match protocol {
            Protocol::Http => Arc::clone(&configs.http),
            Protocol::Grpc => Arc::clone(&configs.grpc),
        }
    }
}

impl Configs {
    fn read(certificate: &Path, key: &Path, client_ca: Option<&Path>) -> anyhow::Result<Configs> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder =
            ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
        let builder = match client_ca {
            None => builder.with_no_client_auth(),
            Some(file) => {
                let mut roots = RootCertStore::empty();
                for root in certificates(file)? {
                    roots.add(root).with_context(|| format!("{} has a certificate that is none", file.display()))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
                builder.with_client_cert_verifier(verifier.build()?)
            }
        };
        let chain = certificates(certificate)?;
        let mut config = builder.with_single_cert(chain, private_key(key)?).with_context(|| {
            format!("{} and {} are no certificate with its key", certificate.display(), key.display())
        })?;
        // Clients that come again skip most of the handshake.
        config.ticketer = rustls::crypto::ring::Ticketer::new()?;
        let with = |protocol: &[u8]| {
            let mut config = config.clone();
            config.alpn_protocols = vec![protocol.to_vec()];
            Arc::new(config)
        };
        Ok(Configs { http: with(b"http/1.1"), grpc: with(b"h2") })
    }
}

/// The certificates of a file in PEM.
///
/// # Errors
/// If the file cannot be read, or has no certificate.
pub fn certificates(file: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let text = read_bounded(file, MAX_FILE)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.with_context(|| format!("{} is not in PEM", file.display()))?;
    if found.is_empty() {
        bail!("{} has no certificate in PEM (-----BEGIN CERTIFICATE-----)", file.display());
    }
    Ok(found)
}

/// The private key of a file in PEM.
///
/// # Errors
/// If the file cannot be read, or has no key.
pub fn private_key(file: &Path) -> anyhow::Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_slice(&read_bounded(file, MAX_FILE)?)
        .with_context(|| format!("{} has no private key in PEM (-----BEGIN PRIVATE KEY-----)", file.display()))
}
