//! TLS to a server.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Names a file of roots, in PEM, that are trusted in place of this machine's.
const ROOTS: &str = "DOWNBEAT_CA";

/// How connections to one server speak TLS.
#[derive(Clone, Debug)]
pub struct Tls {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Tls {
    /// For connections to `host` that carry `protocol` (`http/1.1` or `h2`).
    ///
    /// # Errors
    /// If the roots cannot be read, or `host` is no name of a server.
    pub fn new(host: &str, protocol: &str) -> Result<Tls> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots()?)
            .with_no_client_auth();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let name = ServerName::try_from(host.to_owned()).with_context(|| format!("'{host}' is no name of a server"))?;
        Ok(Tls { config: Arc::new(config), name })
    }

    /// Speaks TLS on a connection.
    ///
    /// # Errors
    /// If the server does not speak TLS, or its certificate is not trusted.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> std::io::Result<TlsStream<S>> {
        TlsConnector::from(self.config.clone()).connect(self.name.clone(), stream).await
    }

    /// The state of a connection whose owner moves the bytes.
    ///
    /// # Errors
    /// If the configuration is of no use.
    pub fn session(&self) -> Result<ClientConnection, rustls::Error> {
        ClientConnection::new(self.config.clone(), self.name.clone())
    }
}

fn roots() -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    match std::env::var_os(ROOTS).map(PathBuf::from) {
        Some(file) => {
            let shown = file.display();
            let found =
                CertificateDer::pem_file_iter(&file).with_context(|| format!("cannot read {shown} ({ROOTS})"))?;
            for root in found {
                roots.add(root.with_context(|| format!("{shown} is not in PEM"))?)?;
            }
            if roots.is_empty() {
                bail!("{shown} ({ROOTS}) has no certificate");
            }
        }
        None => {
            let native = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(native.certs);
        }
    }
    Ok(roots)
}
