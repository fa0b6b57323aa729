//! A small HTTP client of the protocol: one connection, one request after the other.

pub mod request;
pub mod response;
pub mod tensors;
pub mod tls;
pub mod transport;

use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use downbeat_protocol::http::{ErrorBody, INFERENCE_HEADER_CONTENT_LENGTH, RequestForm};
use downbeat_protocol::{InferRequest, InferResponse, http as codec};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper::header::HeaderValue;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::client::tls::Tls;

/// Largest answer, bytes.
const MAX_ANSWER_BYTES: usize = 1 << 30;

/// A connection to a server.
pub struct Client {
    /// `HOST:PORT`, for the `Host` header.
    authority: String,
    /// Path before `/v2`, without a slash at the end.
    prefix: String,
    /// The value of `Authorization`; `None`: the requests have no key.
    authorization: Option<HeaderValue>,
    sender: http1::SendRequest<Full<Bytes>>,
    limit: Duration,
}

/// A request that the server answered with an error.
#[derive(Debug, thiserror::Error)]
#[error("the server answered {status}: {message}")]
pub struct Refused {
    /// The status.
    pub status: StatusCode,
    /// The server's words.
    pub message: String,
}

/// Whether a URL asks for TLS, and its host, port and path prefix.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Address {
    tls: bool,
    host: String,
    port: u16,
    prefix: String,
}

/// The parts of `http://HOST[:PORT][/PREFIX]` or `https://...`; `http://` may be left out.
fn parse_url(url: &str) -> anyhow::Result<Address> {
    let with_scheme = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let uri: hyper::Uri = with_scheme.parse().with_context(|| format!("'{url}' is not a URL"))?;
    let tls = match uri.scheme_str() {
        Some("http") => false,
        Some("https") => true,
        _ => bail!("'{url}' is not a URL that starts with http:// or https://"),
    };
    let host = uri.host().filter(|h| !h.is_empty()).ok_or_else(|| anyhow!("'{url}' names no host"))?;
    let prefix = uri.path().trim_end_matches('/');
    let (host, port) = (host.trim_matches(['[', ']']).to_owned(), uri.port_u16().unwrap_or(8000));
    Ok(Address { tls, host, port, prefix: prefix.to_owned() })
}

impl Client {
    /// Connects to the server at `url`; each step may take `limit`. Requests have the API key of the
    /// environment (`DOWNBEAT_API_KEY`). Over TLS the server's certificate must have a root of this
    /// machine, or of the file that `DOWNBEAT_CA` names.
    ///
    /// # Errors
    /// If the URL is invalid, there is no server, or its certificate is not trusted.
    pub async fn connect(url: &str, limit: Duration) -> anyhow::Result<Client> {
        let Address { tls, host, port, prefix } = parse_url(url)?;
        let authorization = authorization()?;
        let stream = tokio::time::timeout(limit, TcpStream::connect((host.as_str(), port)))
            .await
            .map_err(|_| anyhow!("no answer from {host}:{port} within {limit:?}"))?
            .with_context(|| {
                format!("cannot reach {host}:{port}; is `downbeat serve` running there? (--url names another server)")
            })?;
        stream.set_nodelay(true)?;
        let authority = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let sender = if tls {
            let tls = Tls::new(&host, "http/1.1")?;
            let stream = tokio::time::timeout(limit, tls.connect(stream))
                .await
                .map_err(|_| anyhow!("{authority} did not answer over TLS within {limit:?}"))?
                .context(
                    "a server with a certificate of its own needs DOWNBEAT_CA=FILE with the certificate or its root",
                )
                .with_context(|| format!("no TLS with {authority}"))?;
            speak_http(stream).await?
        } else {
            speak_http(stream).await?
        };
        Ok(Client { authority, prefix, authorization, sender, limit })
    }

    /// Sends `GET path` and parses the answer.
    ///
    /// # Errors
    /// If the server refuses, or its answer does not follow the protocol.
    pub async fn get<T: DeserializeOwned>(&mut self, path: &str) -> anyhow::Result<T> {
        serde_json::from_slice(&self.get_bytes(path).await?)
            .with_context(|| format!("the answer to GET {path} does not follow the protocol"))
    }

    /// The body of `GET path`.
    ///
    /// # Errors
    /// If the server refuses.
    pub async fn get_bytes(&mut self, path: &str) -> anyhow::Result<Bytes> {
        Ok(self.send(Method::GET, path, Bytes::new(), None).await?.0)
    }

    /// Sends `POST path` with an empty object, and parses the answer.
    ///
    /// # Errors
    /// If the server refuses, or its answer does not follow the protocol.
    pub async fn post<T: DeserializeOwned>(&mut self, path: &str) -> anyhow::Result<T> {
        let (answer, _) = self.send(Method::POST, path, Bytes::from_static(b"{}"), None).await?;
        serde_json::from_slice(&answer)
            .with_context(|| format!("the answer to POST {path} does not follow the protocol"))
    }

    /// Runs an inference, with tensors as bytes.
    ///
    /// # Errors
    /// If the server refuses, or its answer does not follow the protocol.
    pub async fn infer(&mut self, request: &InferRequest) -> anyhow::Result<InferResponse> {
        let body = codec::write_request(request, RequestForm::BINARY)?;
        let path = codec::model_path(&request.model_name, &request.model_version) + "/infer";
        self.infer_body(&path, body.bytes, body.header_length).await
    }

    /// Runs an inference with a ready body.
    ///
    /// # Errors
    /// If the server refuses, or its answer does not follow the protocol.
    pub async fn infer_body(
        &mut self,
        path: &str,
        body: Bytes,
        header_length: Option<usize>,
    ) -> anyhow::Result<InferResponse> {
        let (body, header_length) = self.send(Method::POST, path, body, header_length).await?;
        Ok(codec::parse_response(body, header_length)?)
    }

    async fn send(
        &mut self,
        method: Method,
        path: &str,
        body: Bytes,
        header_length: Option<usize>,
    ) -> anyhow::Result<(Bytes, Option<usize>)> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.prefix))
            .header(hyper::header::HOST, &self.authority)
            .header(hyper::header::USER_AGENT, concat!("downbeat/", env!("CARGO_PKG_VERSION")));
        if let Some(authorization) = &self.authorization {
            request = request.header(hyper::header::AUTHORIZATION, authorization);
        }
        if let Some(length) = header_length {
            request = request
                .header(INFERENCE_HEADER_CONTENT_LENGTH, length)
                .header(hyper::header::CONTENT_TYPE, "application/octet-stream");
        } else if !body.is_empty() {
            request = request.header(hyper::header::CONTENT_TYPE, "application/json");
        }
        let request = request.body(Full::new(body))?;
        let authority = &self.authority;
        let exchange = async {
            let response = self.sender.send_request(request).await.map_err(|error| broke_off(authority, error))?;
            let (head, body) = response.into_parts();
            let body = Limited::new(body, MAX_ANSWER_BYTES)
                .collect()
                .await
                .map_err(|e| anyhow!("the answer broke off: {e}"))?;
            anyhow::Ok((head, body.to_bytes()))
        };
        let (head, body) = tokio::time::timeout(self.limit, exchange)
            .await
            .map_err(|_| anyhow!("{} did not answer within {:?}", self.authority, self.limit))??;
        if !head.status.is_success() {
            let message = match serde_json::from_slice::<ErrorBody>(&body) {
                Ok(error) => error.error,
                Err(_) => String::from_utf8_lossy(&body).chars().take(300).collect(),
            };
            return Err(Refused { status: head.status, message }.into());
        }
        let header_length = match head.headers.get(INFERENCE_HEADER_CONTENT_LENGTH) {
            None => None,
            Some(value) => Some(
                value
                    .to_str()
                    .ok()
                    .and_then(|v| v.parse().ok())
                    .ok_or_else(|| anyhow!("the answer's {INFERENCE_HEADER_CONTENT_LENGTH} is not a number"))?,
            ),
        };
        Ok((body, header_length))
    }
}

/// Speaks HTTP/1.1 on a connection. The task of the connection ends with the sender, and errors of the
/// connection reach the requests.
async fn speak_http<S>(stream: S) -> anyhow::Result<http1::SendRequest<Full<Bytes>>>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

/// The value of `Authorization` with the API key of the environment.
pub(crate) fn authorization() -> anyhow::Result<Option<HeaderValue>> {
    let Ok(key) = std::env::var("DOWNBEAT_API_KEY") else { return Ok(None) };
    let mut value = HeaderValue::try_from(format!("Bearer {}", key.trim()))
        .context("DOWNBEAT_API_KEY has characters that no API key has")?;
    value.set_sensitive(true);
    Ok(Some(value))
}

/// The error of a request whose connection ended before the answer.
fn broke_off(authority: &str, error: hyper::Error) -> anyhow::Error {
    if error.is_parse() {
        return anyhow!(
            "{authority} answers, but not in HTTP/1.1: a gRPC port does so; ask the server's HTTP port (8000, unless the \
             server was told otherwise)"
        );
    }
    anyhow::Error::new(error).context("the connection broke off")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_taken_with_and_without_their_parts() {
        let parsed = |url| parse_url(url).unwrap();
        let plain = |host: &str, port, prefix: &str| Address {
            tls: false,
            host: host.to_owned(),
            port,
            prefix: prefix.to_owned(),
        };
        assert_eq!(parsed("localhost"), plain("localhost", 8000, ""));
        assert_eq!(parsed("localhost:9000"), plain("localhost", 9000, ""));
        assert_eq!(parsed("http://10.0.0.1:80/triton/"), plain("10.0.0.1", 80, "/triton"));
        assert_eq!(parsed("http://[::1]:8000"), plain("::1", 8000, ""));
        assert_eq!(parsed("https://models:8443"), Address { tls: true, ..plain("models", 8443, "") });
        for wrong in ["ftp://localhost", "http://", "http://a b", ""] {
            assert!(parse_url(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn names_are_escaped_in_paths() {
        assert_eq!(codec::model_path("a/b c", ""), "/v2/models/a%2Fb%20c");
        assert_eq!(codec::model_path("m", "3"), "/v2/models/m/versions/3");
    }
}
