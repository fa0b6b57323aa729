//! A client of etcd, by its JSON gateway (`/v3/...`, since etcd 3.4), over plain HTTP.
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
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;

/// How long a server may take to answer before the next one is asked.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);
/// The most bytes of an answer.
const LARGEST_ANSWER: usize = 2 << 20;
/// The most characters of an answer in a message to people.
const SHOWN: usize = 200;

/// A client of etcd, which asks the servers one after the other.
pub struct Etcd {
    /// `HOST:PORT` of each server. The server that answered last comes first.
    servers: Vec<String>,
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

/// `HOST:PORT` of an etcd server, from how people write it.
///
/// # Errors
/// In words, if the text is not such a URL, or asks for users, passwords or TLS, which are not
/// supported.
pub fn etcd_server(url: &str) -> Result<String, String> {
    let uri: hyper::Uri = url.parse().map_err(|error| format!("'{url}': {error}"))?;
    let shape = format!("'{url}' is not http://HOST:PORT, such as http://etcd-1:2379");
    let authority = uri.authority().filter(|_| matches!(uri.path(), "" | "/") && uri.query().is_none());
    let authority = authority.filter(|authority| authority.port_u16().is_some_and(|port| port > 0)).ok_or(&*shape)?;
    if authority.as_str().contains('@') {
        return Err(format!(
            "'{url}': users and passwords are not supported; let etcd listen in a network of your own"
        ));
    }
    match uri.scheme_str() {
        Some("http") => Ok(authority.as_str().to_owned()),
        Some("https") => {
            Err(format!("'{url}': TLS is not supported; let etcd listen over http in a network of your own"))
        }
        _ => Err(shape),
    }
}

impl Etcd {
    /// A client for these servers, `HOST:PORT`.
    pub fn new(servers: Vec<String>) -> Self {
        Etcd { servers, local: Ipv4Addr::LOCALHOST.into() }
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
            let server = &self.servers[0];
            let answer = tokio::time::timeout(ANSWERS_WITHIN, post(server, what, body)).await;
            match answer.unwrap_or_else(|_| Err(format!("no answer within {ANSWERS_WITHIN:?}"))) {
                Ok((local, answer)) => {
                    self.local = local;
                    return Ok(answer);
                }
                Err(said) => reason = format!("{server}: {said}"),
            }
            self.servers.rotate_left(1);
        }
        Err(reason)
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

/// Sends one request to one server. Returns the local address and the answer.
async fn post(server: &str, what: &str, body: &Value) -> Result<(IpAddr, Value), String> {
    fn words(error: impl std::fmt::Display) -> String {
        error.to_string()
    }
    let stream = TcpStream::connect(server).await.map_err(words)?;
    let local = stream.local_addr().map_err(words)?.ip();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(words)?;
    let request = hyper::Request::post(format!("/v3/{what}"))
        .header(HOST, server)
        .header(CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body.to_string())))
        .map_err(words)?;
    let answer = async {
        let response = sender.send_request(request).await.map_err(words)?;
        let status = response.status();
        let body = Limited::new(response.into_body(), LARGEST_ANSWER).collect().await.map_err(words)?.to_bytes();
        let shown = || String::from_utf8_lossy(&body).chars().take(SHOWN).collect::<String>();
        match serde_json::from_slice::<Value>(&body) {
            _ if !status.is_success() => Err(format!("{status}: {}", shown())),
            // All answers of etcd have a header.
            Ok(answer) if answer["header"].is_object() || answer["result"]["header"].is_object() => Ok((local, answer)),
            _ => Err(format!("the server is not etcd: it says {}", shown())),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_written_as_urls_and_what_is_not_supported_is_said() {
        assert_eq!(etcd_server("http://etcd-1:2379").as_deref(), Ok("etcd-1:2379"));
        assert_eq!(etcd_server("http://[::1]:2379/").as_deref(), Ok("[::1]:2379"));
        for (url, said) in [
            ("etcd-1:2379", "is not http://HOST:PORT"),
            ("http://etcd-1", "is not http://HOST:PORT"),
            ("http://etcd-1:0", "is not http://HOST:PORT"),
            ("http://etcd-1:2379/v3", "is not http://HOST:PORT"),
            ("https://etcd-1:2379", "TLS is not supported"),
            ("http://root:secret@etcd-1:2379", "users and passwords are not supported"),
        ] {
            let reason = etcd_server(url).unwrap_err();
            assert!(reason.contains(said), "{url}: {reason}");
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
