//! A client of etcd, by its JSON gateway (`/v3/...`, since etcd 3.4), over HTTP with or without TLS.
//!
//! Values change only by compare and replace. A writer names the revision of the value that it has
//! seen.
//!
//! Written by hand because two requests are all that the roles need. A client of the gRPC interface
//! would bring a second stack of generated messages.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::StatusCode;
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::etcd_access::EtcdAccess;

/// How long a server may take to answer before the next one is asked.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);
/// How long a login may take: etcd hashes the password slowly, on purpose.
const LOGS_IN_WITHIN: Duration = Duration::from_secs(3);
/// The most bytes of an answer.
const LARGEST_ANSWER: usize = 2 << 20;
/// The most characters of an answer in a message to people.
const SHOWN: usize = 200;

/// A client of etcd, which asks the servers one after the other.
pub struct Etcd {
    /// The URL of each server. The server that answered last comes first.
    servers: Vec<String>,
    access: EtcdAccess,
    /// The proof of the login.
    token: Option<String>,
    /// The local address of the connection to etcd, as of the last answer.
    local: IpAddr,
}

/// The value of a key.
#[derive(PartialEq, Eq, Debug)]
pub struct Kept {
    /// Any bytes.
    pub value: Vec<u8>,
    /// The revision of the key's last change.
    pub revision: u64,
}

/// A lease. Keys that were written under it vanish if it is not renewed in time.
pub struct Lease(String);

/// Why a server did not answer a request: its status, if it had one, and the reason in words.
struct Refused {
    status: Option<StatusCode>,
    reason: String,
}

fn words(error: impl std::fmt::Display) -> Refused {
    Refused { status: None, reason: error.to_string() }
}

/// The URL of an etcd server, from how people write it.
///
/// # Errors
/// In words, if the text is not such a URL, or has a user.
pub fn etcd_server(url: &str) -> Result<String, String> {
    let uri: hyper::Uri = url.parse().map_err(|error| format!("'{url}': {error}"))?;
    let shape = format!("'{url}' is not http://HOST:PORT or https://HOST:PORT, such as https://etcd-1:2379");
    let authority = uri.authority().filter(|_| matches!(uri.path(), "" | "/") && uri.query().is_none());
    let authority = authority.filter(|authority| authority.port_u16().is_some_and(|port| port > 0)).ok_or(&*shape)?;
    if authority.as_str().contains('@') {
        return Err(
            "the address of etcd has a user; give it by --etcd-user, and a file with the password by --etcd-password"
                .to_owned(),
        );
    }
    match uri.scheme_str() {
        Some(scheme @ ("http" | "https")) => Ok(format!("{scheme}://{authority}")),
        _ => Err(shape),
    }
}

impl Etcd {
    /// A client for these servers, by their URLs.
    pub fn new(servers: Vec<String>, access: EtcdAccess) -> Self {
        Etcd { servers, access, token: None, local: Ipv4Addr::LOCALHOST.into() }
    }

    /// The servers.
    pub fn servers(&self) -> &[String] {
        &self.servers
    }

    /// The local address of the connection to etcd, as of the last answer.
    pub fn local(&self) -> IpAddr {
        self.local
    }

    /// The value of a key; `None`: there is no such key.
    ///
    /// # Errors
    /// In words, like all requests here: if no server answers like etcd.
    pub async fn get(&mut self, key: &str) -> Result<Option<Kept>, String> {
        let answer = self.ask("kv/range", &json!({ "key": encoded(key) })).await?;
        Ok(pairs(&answer)?.pop().map(|(_, kept)| kept))
    }

    /// All keys that begin with `folder` and a slash, up to `most`. The returned names lack this
    /// prefix.
    pub async fn list(&mut self, folder: &str, most: u32) -> Result<Vec<(String, Kept)>, String> {
        let (from, to) = (format!("{folder}/"), format!("{folder}{}", char::from(b'/' + 1)));
        let range = json!({ "key": encoded(&from), "range_end": encoded(&to), "limit": most.to_string() });
        let mut found = pairs(&self.ask("kv/range", &range).await?)?;
        found.iter_mut().for_each(|(key, _)| *key = key.strip_prefix(&from).unwrap_or_default().to_owned());
        Ok(found)
    }

    /// Sets the value of a key, if the key's last change has this revision (0: there is no such
    /// key). Returns whether it did.
    pub async fn replace(
        &mut self,
        key: &str,
        revision: u64,
        value: &[u8],
        lease: Option<&Lease>,
    ) -> Result<bool, String> {
        let (key, revision) = (encoded(key), revision.to_string());
        let lease = lease.map_or("0", |Lease(number)| number);
        let compare = json!({ "key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision });
        let put = json!({ "request_put": { "key": key, "value": encoded(value), "lease": lease } });
        let answer = self.ask("kv/txn", &json!({ "compare": [compare], "success": [put] })).await?;
        // The JSON leaves out fields that are false.
        Ok(answer["succeeded"] == true)
    }

    /// A lease that ends after `lasts`, in whole seconds, unless it is renewed.
    pub async fn grant(&mut self, lasts: Duration) -> Result<Lease, String> {
        let answer = self.ask("lease/grant", &json!({ "TTL": lasts.as_secs().to_string() })).await?;
        let number = answer["ID"].as_str().ok_or_else(|| format!("a lease has no number: {answer}"))?;
        Ok(Lease(number.to_owned()))
    }

    /// Renews a lease for its full time. Returns false if it has ended.
    pub async fn renew(&mut self, Lease(number): &Lease) -> Result<bool, String> {
        let answer = self.ask("lease/keepalive", &json!({ "ID": number })).await?;
        Ok(answer["result"]["TTL"].as_str().is_some())
    }

    /// Ends a lease, which deletes its keys.
    pub async fn revoke(&mut self, Lease(number): Lease) -> Result<(), String> {
        self.ask("lease/revoke", &json!({ "ID": number })).await.map(drop)
    }

    /// Sends a request to the servers, one after the other, and returns the first answer.
    async fn ask(&mut self, what: &str, body: &Value) -> Result<Value, String> {
        let mut reason = "no server is named".to_owned();
        for _ in 0..self.servers.len() {
            match self.ask_first(what, body).await {
                Ok((local, answer)) => {
                    self.local = local;
                    return Ok(answer);
                }
                Err(refused) => reason = format!("{}: {}", self.servers[0], refused.reason),
            }
            self.servers.rotate_left(1);
        }
        Err(reason)
    }

    /// Sends a request to the first server. A process without a token logs in before. If the server
    /// refuses the token, the process logs in again: tokens end with time and with their server.
    async fn ask_first(&mut self, what: &str, body: &Value) -> Result<(IpAddr, Value), Refused> {
        let had_token = self.token.is_some();
        self.log_in().await?;
        let mut answer = self.post(what, body, ANSWERS_WITHIN).await;
        let is_refused =
            |refused: &Refused| matches!(refused.status, Some(StatusCode::UNAUTHORIZED | StatusCode::BAD_REQUEST));
        if had_token && answer.as_ref().is_err_and(is_refused) {
            self.token = None;
            self.log_in().await?;
            answer = self.post(what, body, ANSWERS_WITHIN).await;
        }
        if answer.is_err() {
            // A server that has lost its data keeps silent to a token that it has not given.
            self.token = None;
        }
        answer
    }

    /// Gets a token from the first server, if the process has a user and no token.
    async fn log_in(&mut self) -> Result<(), Refused> {
        if self.token.is_some() {
            return Ok(());
        }
        let Some((user, password)) = self.access.login().map_err(words)? else { return Ok(()) };
        let login = json!({ "name": user, "password": password });
        let (_, answer) = self.post("auth/authenticate", &login, LOGS_IN_WITHIN).await.map_err(|refused| Refused {
            reason: format!("the login as '{user}' failed: {}", refused.reason),
            ..refused
        })?;
        let token = answer["token"].as_str().ok_or_else(|| words("the answer to the login has no token"))?;
        self.token = Some(token.to_owned());
        Ok(())
    }

    /// Sends one request to the first server. Returns the local address and the answer.
    async fn post(&self, what: &str, body: &Value, limit: Duration) -> Result<(IpAddr, Value), Refused> {
        let uri: hyper::Uri = self.servers[0].parse().map_err(words)?;
        let authority = uri.authority().ok_or_else(|| words("the address has no host"))?.as_str();
        let request = hyper::Request::post(format!("/v3/{what}"))
            .header(HOST, authority)
            .header(CONTENT_TYPE, "application/json");
        let request = self.token.iter().fold(request, |request, token| request.header(AUTHORIZATION, token));
        let request = request.body(Full::new(Bytes::from(body.to_string()))).map_err(words)?;
        let answer = async {
            let stream = TcpStream::connect(authority).await.map_err(words)?;
            let local = stream.local_addr().map_err(words)?.ip();
            let answer = if uri.scheme_str() == Some("https") {
                let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
                exchange(self.access.secured(host, stream).await.map_err(words)?, request).await
            } else {
                exchange(stream, request).await
            };
            Ok((local, answer?))
        };
        tokio::time::timeout(limit, answer).await.unwrap_or_else(|_| Err(words(format!("no answer within {limit:?}"))))
    }
}

/// Keys and values in the form of etcd's JSON.
fn encoded(bytes: impl AsRef<[u8]>) -> String {
    BASE64_STANDARD.encode(bytes)
}

/// The keys and values in an answer.
fn pairs(range: &Value) -> Result<Vec<(String, Kept)>, String> {
    let pair = |pair: &Value| {
        let bytes = |name: &str| match &pair[name] {
            // The JSON leaves out empty fields.
            Value::Null => Some(Vec::new()),
            text => BASE64_STANDARD.decode(text.as_str()?).ok(),
        };
        let (key, value) = (String::from_utf8(bytes("key")?).ok()?, bytes("value")?);
        // Numbers of 64 bits are strings in the JSON.
        let revision = pair["mod_revision"].as_str()?.parse().ok()?;
        Some((key, Kept { value, revision }))
    };
    let all = range["kvs"].as_array().map_or(&[][..], Vec::as_slice);
    all.iter().map(|its| pair(its).ok_or_else(|| format!("the server is not etcd: it has {its}"))).collect()
}

/// Sends a request on a connection, and reads the answer.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    request: hyper::Request<Full<Bytes>>,
) -> Result<Value, Refused> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(words)?;
    let answer = async {
        let response = sender.send_request(request).await.map_err(words)?;
        let status = response.status();
        let body = Limited::new(response.into_body(), LARGEST_ANSWER).collect().await.map_err(words)?.to_bytes();
        let shown = || String::from_utf8_lossy(&body).chars().take(SHOWN).collect::<String>();
        match serde_json::from_slice::<Value>(&body) {
            _ if !status.is_success() => {
                Err(Refused { status: Some(status), reason: format!("{status}: {}", hinted(shown())) })
            }
            // All answers of etcd have a header.
            Ok(answer) if answer["header"].is_object() || answer["result"]["header"].is_object() => Ok(answer),
            _ => Err(words(format!("the server is not etcd: it says {}", shown()))),
        }
    };
    // The connection is driven only until its answer has come.
    tokio::pin!(answer);
    tokio::select! {
        biased;
        answer = &mut answer => answer,
        ended = connection => {
            ended.map_err(words)?;
            answer.await
        }
    }
}

/// An error of etcd, with advice if the process has not logged in.
fn hinted(said: String) -> String {
    let advice = if said.contains("user name is empty") { "; give --etcd-user and --etcd-password" } else { "" };
    said + advice
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_written_as_urls_and_what_is_not_supported_is_said() {
        assert_eq!(etcd_server("http://etcd-1:2379").as_deref(), Ok("http://etcd-1:2379"));
        assert_eq!(etcd_server("https://[::1]:2379/").as_deref(), Ok("https://[::1]:2379"));
        for (url, said) in [
            ("etcd-1:2379", "is not http://HOST:PORT"),
            ("http://etcd-1", "is not http://HOST:PORT"),
            ("http://etcd-1:0", "is not http://HOST:PORT"),
            ("http://etcd-1:2379/v3", "is not http://HOST:PORT"),
            ("ftp://etcd-1:2379", "is not http://HOST:PORT or https://HOST:PORT"),
            ("http://root:secret@etcd-1:2379", "--etcd-user"),
        ] {
            let reason = etcd_server(url).unwrap_err();
            assert!(reason.contains(said) && !reason.contains("secret"), "{url}: {reason}");
        }
    }

    #[test]
    fn keys_are_read_and_garbage_is_not_taken_for_some() {
        assert_eq!(pairs(&json!({})), Ok(Vec::new()));
        let range = |value: Value, revision: Value| json!({ "kvs": [{ "key": "YQ==", "value": value, "mod_revision": revision }] });
        let kept = |value: &[u8]| Ok(vec![("a".to_owned(), Kept { value: value.to_vec(), revision: 7 })]);
        assert_eq!(pairs(&range("NDE=".into(), "7".into())), kept(b"41"));
        assert_eq!(pairs(&range(Value::Null, "7".into())), kept(b""));
        for wrong in [range("?".into(), "7".into()), range(3.into(), "7".into()), range("NDE=".into(), 7.into())] {
            assert!(pairs(&wrong).unwrap_err().contains("the server is not etcd"), "{wrong}");
        }
    }
}
