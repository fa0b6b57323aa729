//! A Python model.

use std::sync::Arc;

use downbeat_core::tensor::Signature;
use downbeat_engine::{Executor, Lane, LoadError, LoadedInstance, Model, Place};

use crate::instances::Instances;
use crate::lane::PythonLane;

/// A Python model. Its lanes take requests.
pub struct PythonModel {
    instances: Arc<Instances>,
    signature: Arc<Signature>,
    configuration: Option<String>,
}

impl PythonModel {
    /// Makes the model, of which an instance is loaded.
    pub fn new(instances: Arc<Instances>, loaded: LoadedInstance) -> PythonModel {
        let LoadedInstance { signature, configuration } = loaded;
        PythonModel { instances, signature: Arc::new(signature), configuration }
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

    fn lane_at(&self, _: Place) -> Result<Box<dyn Lane>, LoadError> {
        Ok(Box::new(PythonLane::new(self.instances.clone(), self.signature.clone())?))
    }
}
