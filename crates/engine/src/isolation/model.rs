//! A model in an executor process, as the server sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use downbeat_core::LatencyProfile;
use downbeat_core::tensor::Signature;

use super::executor::Supervisor;
use super::lane::{IsolatedLane, LaneLink};
use super::message::Loaded;
use crate::cut::SegmentInfo;
use crate::cut::activations::Activations;
use crate::cut::operator_profile::OperatorProfile;
use crate::memory::run_memory::RunMemory;
use crate::traits::{Executor, Lane, LoadError, Model, Place, Share};

/// Keeps an executor process for as long as its model or one of its lanes lives.
pub(super) struct Handle {
    pub executor: Arc<Supervisor>,
    /// Name of the engine in the process.
    pub engine: &'static str,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.executor.close();
    }
}

/// A model in an executor process.
pub(super) struct IsolatedModel {
    handle: Arc<Handle>,
    signature: Signature,
    segments: Vec<SegmentInfo>,
    activations: Option<Activations>,
    operators: Option<Arc<OperatorProfile>>,
    profile: Option<LatencyProfile>,
    memory: Option<Arc<RunMemory>>,
    lanes: AtomicU64,
    rewritten: Option<String>,
}

impl IsolatedModel {
    /// Makes the model. `known` is its operator profile from an earlier load.
    pub fn new(
        handle: Arc<Handle>,
        loaded: Loaded,
        known: Option<&Arc<OperatorProfile>>,
        memory: Option<RunMemory>,
    ) -> Self {
        let Loaded { inputs, outputs, segments, activations, operators, profile, rewritten, .. } = loaded;
        let operators = match (known, operators) {
            (Some(known), Some(operators)) if **known == operators => Some(known.clone()),
            (_, operators) => operators.map(Arc::new),
        };
        let signature = Signature { inputs, outputs };
        let (memory, lanes) = (memory.map(Arc::new), AtomicU64::new(0));
        IsolatedModel { handle, signature, segments, activations, operators, profile, memory, lanes, rewritten }
    }
}

impl Model for IsolatedModel {
    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn segment_info(&self) -> &[SegmentInfo] {
        &self.segments
    }

    fn activations(&self) -> Option<&Activations> {
        self.activations.as_ref()
    }

    fn operators(&self) -> Option<&Arc<OperatorProfile>> {
        self.operators.as_ref()
    }

    fn profile(&self, _: Share) -> Option<LatencyProfile> {
        self.profile.clone()
    }

    fn run_memory(&self) -> Option<&RunMemory> {
        self.memory.as_deref()
    }

    fn rewritten(&self) -> Option<&str> {
        self.rewritten.as_deref()
    }

    fn executor(&self) -> Option<&dyn Executor> {
        Some(&*self.handle.executor)
    }

    fn lane_at(&self, place: Place) -> Result<Box<dyn Lane>, LoadError> {
        let cores = match place.share {
            Share::Whole => None,
            Share::Cores(cores) => Some(cores.to_string()),
            Share::Units(_) | Share::AllBut(_) | Share::Part(_) => {
                let reason = "a model in a process of its own has cores, and no compute units of a device";
                return Err(self.handle.executor.error(false, reason.to_owned()));
            }
        };
        let link = LaneLink::new(self.lanes.fetch_add(1, Ordering::Relaxed), cores);
        self.handle.executor.add(&link)?;
        Ok(Box::new(IsolatedLane::new(self.handle.clone(), link, self.memory.clone())))
    }
}
