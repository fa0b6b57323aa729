//! The frontends over a service without engine and scheduler, to point clients and checkers at:
//! `cargo run -p downbeat-server --example in_memory -- 8000`.

#[path = "../tests/it/support/memory_service.rs"]
#[allow(dead_code, reason = "its knobs are for tests")]
mod memory_service;

use std::sync::Arc;

use downbeat_server::http::{HttpOptions, HttpState, serve};
use tokio::net::TcpListener;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let port: u16 = std::env::args().nth(1).map_or(Ok(8000), |text| text.parse())?;
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        let listener = TcpListener::bind(("127.0.0.1", port)).await?;
        println!("listening on {}", listener.local_addr()?);
        let service = Arc::new(memory_service::MemoryService::default());
        let state = HttpState::new(service, Arc::default(), HttpOptions::default());
        serve(listener, state, async { drop(tokio::signal::ctrl_c().await) }).await;
        Ok(())
    })
}
