//! A Python model.

use std::sync::Arc;

use downbeat_core::tensor::Signature;
use downbeat_engine::{Executor, Lane, LoadError, LoadedInstance, Model, OnReady, Place};

use crate::instances::Instances;
use crate::lane::PythonLane;

/// A Python model. Its lanes take requests.
pub struct PythonModel {
    instances: Arc<Instances>,
    signature: Arc<Signature>,
    configuration: Option<String>,
    checks_ready: bool,
}

impl PythonModel {
    /// Makes the model, of which an instance is loaded.
    pub fn new(instances: Arc<Instances>, loaded: LoadedInstance) -> PythonModel {
        let LoadedInstance { signature, configuration, checks_ready } = loaded;
        PythonModel { instances, signature: Arc::new(signature), configuration, checks_ready }
    }
}

impl Model for PythonModel {
    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn takes_requests(&self) -> bool {
        true
    }

    fn configuration(&self) -> Option<&str> {
        self.configuration.as_deref()
    }

    fn executor(&self) -> Option<&dyn Executor> {
        Some(&*self.instances)
    }

    fn ask_ready(&self, on_ready: OnReady) -> bool {
        if self.checks_ready {
            self.instances.ask_ready(on_ready);
        }
        self.checks_ready
    }

    fn lane_at(&self, _: Place) -> Result<Box<dyn Lane>, LoadError> {
        Ok(Box::new(PythonLane::new(self.instances.clone(), self.signature.clone())?))
    }
}
