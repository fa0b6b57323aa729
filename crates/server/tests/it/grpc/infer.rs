//! `ModelInfer`.

use super::server::{Server, check_good};

#[tokio::test]
async fn a_request_is_answered() {
    let server = Server::start().await;
    check_good(&mut server.client().await).await;
}
