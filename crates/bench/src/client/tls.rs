//! TLS to a server.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Names a file of roots, in PEM, that are trusted in place of this machine's.
const ROOTS: &str = "DOWNBEAT_CA";

/// Speaks TLS on a connection to `host`.
pub(super) async fn connect(host: &str, stream: TcpStream) -> anyhow::Result<TlsStream<TcpStream>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots()?)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let name = ServerName::try_from(host.to_owned()).with_context(|| format!("'{host}' is no name of a server"))?;
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
    stream.context("a server with a certificate of its own needs DOWNBEAT_CA=FILE with the certificate or its root")
}

fn roots() -> anyhow::Result<RootCertStore> {
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
