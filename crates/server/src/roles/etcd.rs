//! Epochs out of etcd: no two schedulers get the same, whoever can hear whom.
//!
//! One key has the last epoch that was allotted. Whoever is to lead raises it in a transaction that fails if another has raised it meanwhile. What is asked for and
//! not used, as its answer was lost, is a number that nobody has.
//!
//! It is spoken to by its JSON gateway (`/v3/kv/...`, since etcd 3.4), over HTTP.

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
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

use super::status::StatusBoard;

/// How long one of its servers may take to answer before the next is asked.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);
/// How often it is asked whether it is there, while nothing else is wanted of it.
const LOOKS_EVERY: Duration = Duration::from_secs(2);
/// How often others may be faster in one request for an epoch.
const TRIES: usize = 8;
/// Most bytes of an answer.
const LARGEST_ANSWER: usize = 64 << 10;
/// Characters of an answer that are shown to people.
const SHOWN: usize = 200;

/// Asks etcd for epochs.
pub struct Etcd {
    /// `HOST:PORT` of its servers; the first is the one that answered last.
    servers: Vec<String>,
    /// Of the last epoch that was allotted, as etcd writes keys in JSON.
    key: String,
}

/// `HOST:PORT` of an etcd server, from how people write it.
///
/// # Errors
/// In words, if it is something else, or asks for what is not there.
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
    /// That on these servers, `HOST:PORT`; its keys begin with `prefix`.
    pub fn new(servers: Vec<String>, prefix: &str) -> Self {
        Etcd { servers, key: BASE64_STANDARD.encode(format!("{prefix}/epoch")) }
    }

    /// Allots an epoch above each number that is `wanted`, and hands it to `give`; `None`: it has none now. Says on `board` and in the log whether etcd is there. Ends when
    /// nobody can want one any more.
    pub async fn serve(
        mut self,
        mut wanted: mpsc::UnboundedReceiver<u64>,
        board: StatusBoard,
        mut give: impl FnMut(Option<u64>),
    ) {
        let mut was_there = None;
        let mut looks = tokio::time::interval(LOOKS_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let found = tokio::select! {
                biased;
                asked = wanted.recv() => {
                    let Some(mut above) = asked else { return };
                    // Whoever has asked again meanwhile wants one answer.
                    while let Ok(later) = wanted.try_recv() {
                        above = later;
                    }
                    let allotted = self.allot(above).await;
                    give(allotted.as_ref().ok().copied());
                    allotted.map(drop)
                }
                _ = looks.tick() => self.last().await.map(drop),
            };
            let is_there = found.is_ok();
            if was_there.replace(is_there) != Some(is_there) {
                match found {
                    Ok(()) => tracing::info!(servers = ?self.servers, "etcd answers"),
                    Err(reason) => tracing::warn!(
                        servers = ?self.servers, %reason,
                        "no epochs from etcd: whoever leads goes on, but nobody else can begin to until there are"
                    ),
                }
                board.etcd_answers(is_there);
            }
        }
    }

    /// An epoch above this number that nobody else has.
    async fn allot(&mut self, above: u64) -> Result<u64, String> {
        let (mut last, mut revision) = self.last().await?;
        for _ in 0..TRIES {
            let epoch = last.max(above).checked_add(1).ok_or("there are no epochs left")?;
            let value = BASE64_STANDARD.encode(epoch.to_string());
            let compare =
                json!({ "key": self.key, "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string() });
            let put = json!({ "request_put": { "key": self.key, "value": value } });
            let get = json!({ "request_range": { "key": self.key } });
            let answer = self.ask("txn", &json!({ "compare": [compare], "success": [put], "failure": [get] })).await?;
            if answer["succeeded"] == true {
                return Ok(epoch);
            }
            (last, revision) = value_of(&answer["responses"][0]["response_range"])?;
        }
        Err("others raised the epoch again and again".to_owned())
    }

    /// The last epoch that was allotted, and the revision of its key; 0 and 0: none.
    async fn last(&mut self) -> Result<(u64, u64), String> {
        let range = json!({ "key": self.key });
        value_of(&self.ask("range", &range).await?)
    }

    /// What etcd says to this: that of its servers which answers first, one after the other.
    async fn ask(&mut self, what: &str, body: &Value) -> Result<Value, String> {
        let mut reason = "no server is named".to_owned();
        for _ in 0..self.servers.len() {
            let server = &self.servers[0];
            let answer = tokio::time::timeout(ANSWERS_WITHIN, post(server, what, body)).await;
            match answer.unwrap_or_else(|_| Err(format!("no answer within {ANSWERS_WITHIN:?}"))) {
                Ok(answer) => return Ok(answer),
                Err(said) => reason = format!("{server}: {said}"),
            }
            self.servers.rotate_left(1);
        }
        Err(reason)
    }
}

/// The number that an answer has, and the revision of its key.
fn value_of(range: &Value) -> Result<(u64, u64), String> {
    let Some(pair) = range["kvs"].get(0) else { return Ok((0, 0)) };
    let number = |bytes: Vec<u8>| std::str::from_utf8(&bytes).ok()?.parse().ok();
    let value = pair["value"].as_str().and_then(|value| BASE64_STANDARD.decode(value).ok()).and_then(number);
    // Numbers of 64 bits are texts in its JSON.
    let revision = pair["mod_revision"].as_str().and_then(|revision| revision.parse().ok());
    value.zip(revision).ok_or_else(|| {
        format!("its key of the last epoch has something else: {pair}; delete it, or take another prefix")
    })
}

/// One request to one server.
async fn post(server: &str, what: &str, body: &Value) -> Result<Value, String> {
    fn words(error: impl std::fmt::Display) -> String {
        error.to_string()
    }
    let stream = TcpStream::connect(server).await.map_err(words)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(words)?;
    let request = hyper::Request::post(format!("/v3/kv/{what}"))
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
            // All that etcd says has one.
            Ok(answer) if answer["header"].is_object() => Ok(answer),
            _ => Err(format!("it is no etcd, and says {}", shown())),
        }
    };
    // The connection is driven as long as its answer is waited for.
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
    fn the_last_epoch_is_read_and_garbage_is_not_taken_for_one() {
        assert_eq!(value_of(&json!({})), Ok((0, 0)));
        let range = |value: &str, revision: Value| json!({ "kvs": [{ "value": value, "mod_revision": revision }] });
        assert_eq!(value_of(&range(&BASE64_STANDARD.encode("41"), "7".into())), Ok((41, 7)));
        for wrong in [range("?", "7".into()), range(&BASE64_STANDARD.encode("x"), "7".into()), range("NDE=", 7.into())]
        {
            assert!(value_of(&wrong).unwrap_err().contains("delete it"), "{wrong}");
        }
    }
}
