//! The stages of the server's end.

use tokio::sync::watch;

/// How far the server is on its way out.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub enum Stage {
    /// The server does not drain.
    #[default]
    Serving,
    /// Still accepting and answering while clients learn that they should go elsewhere: HTTP
    /// answers end their connection.
    Leaving,
    /// The ports accept no more. Requests under way are finished, then the connections are closed.
    Draining,
    /// Everything is broken off.
    Stopped,
}

/// Tells ports the [`Stage`]. A sender that is gone means [`Stage::Stopped`].
pub type Stages = watch::Receiver<Stage>;

/// Completes once the server is at `stage` or further.
pub async fn reached(mut stages: Stages, stage: Stage) {
    // An error: the sender is gone.
    let _ = stages.wait_for(|now| *now >= stage).await;
}
