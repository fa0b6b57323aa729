//! Downbeat's models in an axum service of one's own:
//!
//! ```text
//! cargo run --release -p downbeat-embed -- examples/models
//! curl localhost:8080/hello
//! curl localhost:8080/v2/models/digits/infer -d @examples/digit.json
//! ```

use std::sync::Arc;

use axum::Router;
use axum::routing::get;
use downbeat_frontend::http::{HttpOptions, HttpState, checked_router};
use downbeat_frontend::shared_memory::SharedMemory;
use downbeat_server::open_models;
use downbeat_service::options::ServerOptions;
use tokio::net::TcpListener;

/// The service: a route of its own, and the Open Inference Protocol for all models.
async fn service(listener: &TcpListener, options: ServerOptions) -> anyhow::Result<Router> {
    let models = open_models(options).await?;
    let options = HttpOptions { budget: models.budget().clone(), ..HttpOptions::default() };
    let state = HttpState::new(Arc::new(models), Arc::new(SharedMemory::disabled()), options);
    Ok(checked_router(listener, state).route("/hello", get(async || "hello")))
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let repositories = std::env::args_os().skip(1).map(|path| std::path::PathBuf::from(path).into()).collect();
    let listener = TcpListener::bind("127.0.0.1:8080").await?;
    let service = service(&listener, ServerOptions { repositories, ..ServerOptions::default() }).await?;
    Ok(axum::serve(listener, service).await?)
}

#[cfg(test)]
mod tests {
    use downbeat_service::options::ProfilingOptions;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;

    const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

    /// Sends a request on a connection of its own, and returns the answer.
    async fn answer(listener: std::net::SocketAddr, head: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(listener).await.unwrap();
        let length = body.len();
        let request = format!("{head}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_service_answers_its_own_route_and_inference_requests() {
        let cache = tempfile::tempdir().unwrap();
        let profiling = ProfilingOptions { enabled: false, cache_dir: Some(cache.path().into()), ..Default::default() };
        let repositories = vec![format!("{EXAMPLES}/models").as_str().into()];
        let options = ServerOptions { repositories, profiling, ..ServerOptions::default() };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = service(&listener, options).await.unwrap();
        tokio::spawn(async move { axum::serve(listener, service).await });

        let hello = answer(address, "GET /hello HTTP/1.1\r\nHost: localhost", "").await;
        assert!(hello.ends_with("hello"), "{hello}");
        let body = std::fs::read_to_string(format!("{EXAMPLES}/digit.json")).unwrap();
        let digit = answer(address, "POST /v2/models/digits/infer HTTP/1.1\r\nHost: localhost", &body).await;
        assert!(digit.starts_with("HTTP/1.1 200") && digit.contains(r#""model_name":"digits""#), "{digit}");
        let unload = "POST /v2/repository/models/digits/unload HTTP/1.1\r\nHost: localhost";
        let from_a_page = answer(address, &format!("{unload}\r\nOrigin: http://other.example"), "").await;
        assert!(from_a_page.starts_with("HTTP/1.1 403"), "{from_a_page}");
    }
}
