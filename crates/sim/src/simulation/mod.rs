//! A cluster, its load, and how long to look.

pub(crate) mod checker;
pub(crate) mod cluster;
pub(crate) mod execution;
pub(crate) mod network;
pub mod node;
pub(crate) mod rehearsed;
pub(crate) mod run;
pub(crate) mod system;
pub(crate) mod tally;

use std::sync::Arc;

use downbeat_core::cluster::{Behaviour, DispatchPolicy, ModelOptions, OrderPolicy};
use downbeat_core::{DeviceKind, Duration, Time};

use crate::arrivals::Arrivals;
use crate::arrivals::arrival::Arrival;
use crate::arrivals::pace::Pace;
use crate::simulation::execution::Devices;
use crate::simulation::network::Network;
use crate::simulation::system::{Downbeat, System};

/// The replayed events that the rehearsal may have in a second: about 5% of a core.
const EVENTS_PER_SECOND: u64 = 250_000;

/// A model and its requests.
#[derive(Clone, Debug)]
pub struct Load {
    /// The model's options for the scheduler.
    pub options: ModelOptions,
    /// Time from a request's arrival to its deadline.
    pub slo: Duration,
    /// The arrival process.
    pub arrivals: Arrivals,
    /// Requests per second, before [`Load::pace`] changes it.
    pub rate: f64,
    /// The change of the rate over time.
    pub pace: Pace,
}

/// A cluster, its load, and the length of the run. By default there is neither a model nor a
/// device, and 10 s count after a warm-up of 1 s.
#[derive(Clone, Debug)]
pub struct Simulation {
    /// The kind of scheduler.
    pub system: Arc<dyn System>,
    /// The models.
    pub loads: Vec<Load>,
    /// Devices, all free at the start.
    pub devices: u32,
    /// The kind of each device; a device without an entry is of kind 0.
    pub kinds: Vec<DeviceKind>,
    /// Devices with execution times of their own; `None`: the times of the profiles, with
    /// [`Simulation::noise`].
    pub given: Option<Arc<dyn Devices>>,
    /// Arrivals before this are served but not counted.
    pub warm_up: Duration,
    /// Time in which arrivals count, after the warm-up.
    pub span: Duration,
    /// Standard deviation of an execution time as a share of the profile's; 0: the profile's time
    /// without noise.
    pub noise: f64,
    /// For each model: equally likely execution times, as shares of the profile's time. A model
    /// without entry or with an empty one has [`Simulation::noise`].
    pub executions: Vec<Arc<[f64]>>,
    /// Chooses all random numbers.
    pub seed: u64,
    /// End the run early once more than this share of some model's requests is certain to be
    /// dropped or late.
    pub give_up_above: Option<f64>,
    /// Length of the windows of time of [`Report::windows`](crate::Report::windows); zero: none.
    pub window: Duration,
    /// Record every batch and request.
    pub record: bool,
    /// The delays of messages.
    pub network: Network,
    /// A time, and the dispatch policy that each model has from then on.
    pub switch: Option<(Time, Vec<DispatchPolicy>)>,
    /// Events that the rehearsal of adaptive models may replay in a second. 0: no rehearsal; the
    /// models' behaviour follows from the load of the moment.
    pub rehearsal: u64,
    /// For each adaptive model: its behaviour, where there is no rehearsal. A model without an entry,
    /// or with `None`, follows the load of the moment.
    pub behaviours: Vec<Option<Behaviour>>,
    /// The order in which candidates get devices, in Downbeat's own scheduler.
    pub order: OrderPolicy,
    /// How long before its last moment a batch that waits starts, in Downbeat's own scheduler
    /// ([`Scheduler::set_wake_margin`](downbeat_core::cluster::Scheduler::set_wake_margin)).
    pub wake_margin: Duration,
    /// Requests in order of their time, which replace the requests that the loads would draw.
    /// Requests of the warm-up do not count.
    pub recorded: Option<Arc<[Arrival]>>,
}

impl Default for Simulation {
    fn default() -> Self {
        Simulation {
            system: Arc::new(Downbeat),
            loads: Vec::new(),
            devices: 0,
            kinds: Vec::new(),
            given: None,
            warm_up: Duration::from_millis(1_000),
            span: Duration::from_millis(10_000),
            noise: 0.0,
            executions: Vec::new(),
            seed: 1,
            give_up_above: None,
            window: Duration::ZERO,
            record: false,
            network: Network::default(),
            switch: None,
            rehearsal: EVENTS_PER_SECOND,
            behaviours: Vec::new(),
            order: OrderPolicy::default(),
            wake_margin: Duration::ZERO,
            recorded: None,
        }
    }
}
