//! A small HTTP client of the protocol: one connection, one request after the other.

pub mod request;
pub mod response;
pub mod tensors;
pub mod transport;

use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use downbeat_protocol::http::{ErrorBody, INFERENCE_HEADER_CONTENT_LENGTH, RequestForm};
use downbeat_protocol::{InferRequest, InferResponse, http as codec};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;

/// Largest answer, bytes.
const MAX_ANSWER_BYTES: usize = 1 << 30;

/// A connection to a server.
pub struct Client {
    /// `HOST:PORT`, for the `Host` header.
    authority: String,
    /// Path before `/v2`, without a slash at the end.
    prefix: String,
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

/// Host, port and path prefix of `http://HOST[:PORT][/PREFIX]`; the scheme may be left out.
fn parse_url(url: &str) -> anyhow::Result<(String, u16, String)> {
    let with_scheme = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let uri: hyper::Uri = with_scheme.parse().with_context(|| format!("'{url}' is not a URL"))?;
    match uri.scheme_str() {
        Some("http") => {}
        Some("https") => {
            bail!("'{url}': TLS is not supported; send requests through a proxy that ends TLS, or use http")
        }
        _ => bail!("'{url}' is not a URL that starts with http://"),
    }
    let host = uri.host().filter(|h| !h.is_empty()).ok_or_else(|| anyhow!("'{url}' names no host"))?;
    let prefix = uri.path().trim_end_matches('/');
    Ok((host.trim_matches(['[', ']']).to_owned(), uri.port_u16().unwrap_or(8000), prefix.to_owned()))
}

impl Client {
    /// Connects to the server at `url`; each step may take `limit`.
    ///
    /// # Errors
    /// If the URL is invalid, or there is no server.
    pub async fn connect(url: &str, limit: Duration) -> anyhow::Result<Client> {
        let (host, port, prefix) = parse_url(url)?;
        let stream = tokio::time::timeout(limit, TcpStream::connect((host.as_str(), port)))
            .await
            .map_err(|_| anyhow!("no answer from {host}:{port} within {limit:?}"))?
            .with_context(|| {
                format!("cannot reach {host}:{port}; is `downbeat serve` running there? (--url names another server)")
            })?;
        stream.set_nodelay(true)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // Ends with the sender; its errors reach the requests.
        tokio::spawn(connection);
        let authority = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        Ok(Client { authority, prefix, sender, limit })
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
        assert_eq!(parsed("localhost"), ("localhost".into(), 8000, "".into()));
        assert_eq!(parsed("localhost:9000"), ("localhost".into(), 9000, "".into()));
        assert_eq!(parsed("http://10.0.0.1:80/triton/"), ("10.0.0.1".into(), 80, "/triton".into()));
        assert_eq!(parsed("http://[::1]:8000"), ("::1".into(), 8000, "".into()));
        for wrong in ["https://localhost", "ftp://localhost", "http://", "http://a b", ""] {
            assert!(parse_url(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn names_are_escaped_in_paths() {
        assert_eq!(codec::model_path("a/b c", ""), "/v2/models/a%2Fb%20c");
        assert_eq!(codec::model_path("m", "3"), "/v2/models/m/versions/3");
    }
}
