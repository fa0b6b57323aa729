//! How a process gets access to etcd: TLS, and a login by user and password.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use downbeat_frontend::reloaded::{Reloaded, read_bounded};
use downbeat_frontend::tls::{certificates, private_key};
use downbeat_service::options::cluster_options::ClusterOptions;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// The beginning of the URL of a server with TLS.
const HTTPS: &str = "https://";
/// Largest file of a password, bytes.
const LARGEST_PASSWORD: u64 = 4096;

/// The TLS and the login of a process at etcd. The default has neither.
#[derive(Clone, Default)]
pub struct EtcdAccess {
    tls: Option<Arc<Reloaded<ClientConfig>>>,
    login: Option<Login>,
}

/// A user of etcd.
#[derive(Clone, Debug)]
struct Login {
    user: String,
    /// The file with the password.
    password: PathBuf,
}

impl EtcdAccess {
    /// The access that the options ask for. A task on the caller's runtime follows the files of
    /// certificates.
    ///
    /// # Errors
    /// If a file cannot be read, or an option lacks another one.
    pub fn open(options: &ClusterOptions) -> anyhow::Result<Self> {
        let has_tls = options.etcd.iter().any(|server| server.starts_with(HTTPS));
        let files = [&options.etcd_ca, &options.etcd_certificate, &options.etcd_key];
        let files: Vec<PathBuf> = files.into_iter().flatten().cloned().collect();
        ensure!(
            has_tls || files.is_empty(),
            "--etcd-ca, --etcd-certificate and --etcd-key are for TLS: give --etcd an address with {HTTPS}"
        );
        ensure!(
            options.etcd_certificate.is_some() == options.etcd_key.is_some(),
            "--etcd-certificate and --etcd-key need each other"
        );
        let login = match (&options.etcd_user, &options.etcd_password) {
            (Some(user), Some(password)) => Some(Login { user: user.clone(), password: password.clone() }),
            (None, None) => None,
            _ => bail!("--etcd-user and --etcd-password need each other"),
        };
        if let Some(login) = &login {
            login.password()?;
            if options.etcd.iter().any(|server| !server.starts_with(HTTPS)) {
                tracing::warn!("the password for etcd goes over the network without TLS: give --etcd {HTTPS}HOST:PORT");
            }
        }
        let follow =
            |options: ClusterOptions| Reloaded::follow("certificates for etcd", files, move || read_config(&options));
        let tls = has_tls.then(|| follow(options.clone())).transpose()?;
        Ok(EtcdAccess { tls, login })
    }

    /// Speaks TLS on a connection to this server. `None`: the server is asked without TLS.
    ///
    /// # Errors
    /// In words, if the server has no certificate that the process trusts.
    pub async fn secured(&self, host: &str, stream: TcpStream) -> Result<TlsStream<TcpStream>, String> {
        let tls = self.tls.as_ref().ok_or("this process has no TLS for etcd")?;
        let name = ServerName::try_from(host.to_owned());
        let name = name.map_err(|error| format!("'{host}' is not the name of a server: {error}"))?;
        let secured = TlsConnector::from(tls.get()).connect(name, stream).await;
        secured.map_err(|error| format!("no TLS: {error} (--etcd-ca names the authority of its certificate)"))
    }

    /// The user and the present password; `None`: the process does not log in.
    ///
    /// # Errors
    /// In words, if the password cannot be read.
    pub fn login(&self) -> Result<Option<(&str, String)>, String> {
        let Some(login) = &self.login else { return Ok(None) };
        let password = login.password().map_err(|error| format!("{error:#}"))?;
        Ok(Some((&login.user, password)))
    }
}

impl Login {
    /// The content of the file, without the end of its line.
    fn password(&self) -> anyhow::Result<String> {
        let file = self.password.display();
        let bytes = read_bounded(&self.password, LARGEST_PASSWORD).context("--etcd-password")?;
        let text = String::from_utf8(bytes).with_context(|| format!("{file} is not UTF-8"))?;
        let password = text.trim_end_matches(['\r', '\n']);
        ensure!(!password.is_empty(), "{file} has no password (--etcd-password)");
        Ok(password.to_owned())
    }
}

/// The client's side of TLS.
fn read_config(options: &ClusterOptions) -> anyhow::Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    match &options.etcd_ca {
        Some(file) => {
            for root in certificates(file)? {
                roots.add(root).with_context(|| format!("{} has a certificate that is none", file.display()))?;
            }
        }
        None => {
            let native = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(native.certs);
            ensure!(!roots.is_empty(), "this machine has no certificates of authorities: give --etcd-ca FILE");
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    let mut config = match (&options.etcd_certificate, &options.etcd_key) {
        (Some(certificate), Some(key)) => {
            config.with_client_auth_cert(certificates(certificate)?, private_key(key)?).with_context(|| {
                format!("{} and {} are no certificate with its key", certificate.display(), key.display())
            })?
        }
        _ => config.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn options_that_lack_another_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let (empty, password) = (folder.path().join("empty"), folder.path().join("password"));
        std::fs::write(&empty, "\n").unwrap();
        std::fs::write(&password, "open sesame\n").unwrap();
        let https = || ClusterOptions { etcd: vec!["https://etcd-1:2379".to_owned()], ..ClusterOptions::default() };
        let http = || ClusterOptions { etcd: vec!["http://etcd-1:2379".to_owned()], ..ClusterOptions::default() };
        let some = |path: &PathBuf| Some(path.clone());
        let user = || Some("me".to_owned());
        for (options, said) in [
            (ClusterOptions { etcd_ca: some(&password), ..http() }, "give --etcd an address with https://"),
            (ClusterOptions { etcd_ca: some(&password), ..https() }, "has no certificate in PEM"),
            (ClusterOptions { etcd_certificate: some(&password), ..https() }, "need each other"),
            (ClusterOptions { etcd_user: user(), ..http() }, "need each other"),
            (ClusterOptions { etcd_password: some(&password), ..http() }, "need each other"),
            (ClusterOptions { etcd_user: user(), etcd_password: some(&empty), ..http() }, "has no password"),
        ] {
            let error = format!("{:#}", EtcdAccess::open(&options).err().unwrap());
            assert!(error.contains(said), "{said}: {error}");
        }
        let options = ClusterOptions { etcd_user: user(), etcd_password: some(&password), ..http() };
        let access = EtcdAccess::open(&options).unwrap();
        assert_eq!(access.login(), Ok(Some(("me", "open sesame".to_owned()))));
        std::fs::write(&password, "other").unwrap();
        assert_eq!(access.login(), Ok(Some(("me", "other".to_owned()))), "the file is read for each login");
    }
}
