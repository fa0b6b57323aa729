//! The streams of a backend: requests of decoupled models, which may give any number of answers.

use std::collections::BTreeMap;

use crate::message::{NodeId, RequestKey};

/// How far a request is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Progress {
    /// The frontend has heard that the run is over.
    has_run: bool,
    /// The last answer is sent.
    has_last: bool,
}

/// The requests that have given an answer or have run, and that may give more answers. The run and the
/// last answer may end in either order.
#[derive(Debug, Default)]
pub(super) struct Streams(BTreeMap<RequestKey, Progress>);

impl Streams {
    /// The number of these requests.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// A request has given an answer.
    pub fn answered(&mut self, request: RequestKey, is_last: bool) {
        self.advance(request, Progress { has_run: false, has_last: is_last });
    }

    /// The run of a request is over.
    pub fn ran(&mut self, request: RequestKey) {
        self.advance(request, Progress { has_run: true, has_last: false });
    }

    fn advance(&mut self, request: RequestKey, to: Progress) {
        let progress = self.0.entry(request).or_default();
        progress.has_run |= to.has_run;
        progress.has_last |= to.has_last;
        if progress.has_run && progress.has_last {
            self.0.remove(&request);
        }
    }

    /// A request has failed, and gives no more answers.
    pub fn failed(&mut self, request: RequestKey) {
        self.0.remove(&request);
    }

    /// Forgets the requests of a frontend that is lost.
    pub fn handle_lost(&mut self, frontend: NodeId) {
        self.0.retain(|request, _| request.frontend != frontend);
    }
}
