//! The frontends over a service without engine and scheduler, to point clients and checkers at:
//! `cargo run -p downbeat-server --example in_memory -- 8000`.

#[path = "../tests/it/support/memory_service.rs"]
#[allow(dead_code, reason = "its knobs are for tests")]
mod memory_service;
#[path = "../tests/it/support/repeat.rs"]
#[allow(dead_code, reason = "its knobs are for tests")]
mod repeat;

use std::sync::Arc;

use downbeat_frontend::connections::{Connections, Stage, bind};
use downbeat_frontend::http::{HttpOptions, HttpState, serve};
use tokio::sync::watch;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let port: u16 = std::env::args().nth(1).map_or(Ok(8000), |text| text.parse())?;
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        let listener = bind(([127, 0, 0, 1], port).into())?;
        println!("listening on {}", listener.local_addr()?);
        let service = Arc::new(memory_service::MemoryService::default());
        let state = HttpState::new(service, Arc::default(), HttpOptions::default());
        let (stage, stages) = watch::channel(Stage::Serving);
        let interrupted = async {
            tokio::signal::ctrl_c().await?;
            stage.send_replace(Stage::Draining);
            Ok(())
        };
        let connections = Connections::new(Default::default());
        let (interrupted, ()) = tokio::join!(interrupted, serve(listener, connections, state, stages));
        interrupted
    })
}
