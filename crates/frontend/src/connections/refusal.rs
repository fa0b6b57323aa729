//! The answer to a client whose connection finds no room.

use std::time::Duration;

use downbeat_service::options::connection_options::ConnectionOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::open::Refused;

/// How long a refused client may take to notice.
const NOTICE: Duration = Duration::from_secs(1);
/// Most bytes of its request that are read meanwhile, so that the answer is not lost in a reset.
const MAX_DISCARDED: u64 = 64 << 10;

/// Answers that there is no room, and ends the connection. The answer is HTTP/1 on every port: gRPC
/// clients take that for a failed connection, and try again after a while. A GOAWAY after SETTINGS
/// would tell them the reason, but they take such a connection for a good one and come back at
/// once, again and again.
pub(super) async fn refuse(mut stream: TcpStream, why: Refused, options: &ConnectionOptions) {
    let (whose, max, option) = match why {
        Refused::Full => ("the server", options.max, "--max-connections"),
        Refused::Address => ("this address", options.max_per_address.unwrap_or(0), "--connections-per-address"),
    };
    let body = format!(
        "{{\"error\":\"{whose} has as many connections as it takes ({max}, {option}); try again later or reuse \
         connections\"}}"
    );
    let length = body.len();
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n\
         content-length: {length}\r\n\r\n{body}"
    );
    let told = async {
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await?;
        tokio::io::copy(&mut stream.take(MAX_DISCARDED), &mut tokio::io::sink()).await
    };
    // A client that has gone, or does not notice, is not waited for.
    let _ = timeout(NOTICE, told).await;
}
