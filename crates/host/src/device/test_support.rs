//! A model on a device of its own, for tests of device hosts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use downbeat_core::device::ModelSpec;
use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_core::{Duration, LatencyProfile, ModelId, RequestId, Time};
use downbeat_engine::{Model, Part, Place};
use downbeat_repository::TensorBinding;
use downbeat_service::clock::Clock;
use downbeat_service::metrics::Metrics;
use downbeat_service::options::RunLimits;
use tokio::sync::oneshot;

use super::device_host::DeviceHost;
use super::lane_host::OwnLaunch;
use super::lane_setup::brief_rows;
use super::placement::{Placement, WarmUpLanes};
use super::placements::Placements;
use super::tensors::BatchTensors;
use crate::request::batch_codec::{Admitted, BatchCodec};
use crate::request::call::Call;
use crate::request::reply::{Answered, Reply};
use crate::request::version_record::{Version, VersionRecord};
use crate::run::model_health::ModelHealth;
use crate::run::watchdog::Watchdog;

/// The receiver of a client's answer.
pub type Answer = oneshot::Receiver<Answered>;

/// A model on a device.
pub struct Served {
    pub host: Arc<DeviceHost>,
    pub model: Arc<Placement>,
    pub hosts: Placements,
    pub record: Arc<Version>,
    pub metrics: Metrics,
    sent: AtomicU64,
}

/// Bytes in and out, one an item.
pub fn signature() -> Signature {
    let spec = |name: &str| TensorSpec { name: name.to_owned(), datatype: DataType::Uint8, dims: vec![-1, 1] };
    Signature { inputs: vec![spec("x")], outputs: vec![spec("y")] }
}

impl Served {
    /// A model of this [`signature`] on the first partition of a device, in batches of up to four.
    pub fn new(
        model: Arc<dyn Model>,
        policy: ModelSpec,
        parts: &[Part],
        limits: RunLimits,
        warm_up: WarmUpLanes,
    ) -> Served {
        let (clock, metrics, signature) = (Clock::start(), Metrics::new().unwrap(), model.signature());
        let binding = |spec: &TensorSpec| TensorBinding {
            client: spec.clone(),
            model_index: 0,
            model_dims: spec.dims.clone(),
            labels: [].into(),
            batched: true,
            optional: false,
        };
        let codec = BatchCodec::new(vec![binding(&signature.inputs[0])], vec![binding(&signature.outputs[0])], 4);
        let (name, version, codec) = ("m".to_owned(), "1".to_owned(), Arc::new(codec));
        let its = metrics.model(&name, &version);
        let watchdog = Watchdog::start(limits, clock, Arc::new(downbeat_engine::Emulated::new())).unwrap();
        let host = DeviceHost::start(0, parts, clock, metrics.device(0), watchdog, None).unwrap();
        let partition = downbeat_core::device::PartitionId::default();
        let place = Place { device: 0, share: host.share(partition) };
        let lanes = policy.build().unwrap().policy.lanes(partition);
        let engines = lanes.iter().map(|_| model.lane_at(place).unwrap()).collect();
        let profile = LatencyProfile::linear(Duration::from_micros(1), Duration::ZERO, 4).unwrap();
        let model = Arc::new(Placement {
            id: ModelId(0),
            health: Arc::new(ModelHealth::new(name.clone(), version.clone())),
            name,
            version,
            device: 0,
            partition,
            policy_name: policy.policy().name(),
            tensors: BatchTensors {
                codec: codec.clone(),
                rings: None,
                padding: None,
                padding_watch: None,
                row_watch: None,
            },
            brief_rows: brief_rows(&*model, &codec, &profile),
            profile,
            exits: [].into(),
            knee: None,
            listener: None,
            group: None,
            work: Default::default(),
            batch_control: OnceLock::new(),
            metrics: metrics.lanes.lanes("m", "1", 0),
            engines: Arc::default(),
            warm_up,
            model,
        });
        host.add_model(model.clone(), policy, engines).unwrap();
        let hosts = Placements::new(vec![(host.clone(), model.clone())], true, None);
        let (names, activity) = (("m".to_owned(), "1".to_owned()), hosts.activity().clone());
        let record = Arc::new(Box::new(VersionRecord::new(names, model.model.clone(), its, activity, 100)));
        Served { host, model, hosts, record, metrics, sent: AtomicU64::new(0) }
    }

    /// Sends a request of one item, which is its answer too.
    pub fn send(&self, item: u8) -> (RequestId, Answer) {
        self.send_own(item, &mut OwnLaunch::default())
    }

    /// Sends a request; the calling thread may take the launch that follows.
    pub fn send_own(&self, item: u8, own: &mut OwnLaunch) -> (RequestId, Answer) {
        self.send_with(item, Time::MAX, false, own)
    }

    /// Sends a request; a probe has `deadline` as the deadline that it would have had.
    pub fn send_with(&self, item: u8, deadline: Time, is_probe: bool, own: &mut OwnLaunch) -> (RequestId, Answer) {
        let (reply, answer) = Reply::channel();
        let admitted = Admitted::of_one(std::iter::once((vec![item].into(), vec![1])));
        let call = Call {
            admitted,
            loaded: self.record.clone(),
            arrival: self.host.clock.now(),
            deadline,
            deadline_is_slo: false,
            is_probe,
            step: None,
            charge: None,
            trace: None,
            reply,
        };
        let request = RequestId(self.sent.fetch_add(1, Ordering::Relaxed));
        self.host.submit(&self.model, request, call, 0, own);
        (request, answer)
    }

    /// A metric's value, summed over its labels.
    pub fn metric(&self, label: &str) -> f64 {
        self.hosts.update_metrics();
        let text = self.metrics.render().unwrap();
        let lines = text.lines().filter(|line| !line.starts_with('#') && line.contains(label));
        lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.host.stop();
    }
}

/// The answer.
pub fn item(answer: Answer) -> u8 {
    answer.blocking_recv().unwrap().answer.unwrap()[0].data[0]
}

/// The error that a client got instead of an answer.
pub fn failure(answer: Answer) -> String {
    answer.blocking_recv().unwrap().answer.unwrap_err().to_string()
}
