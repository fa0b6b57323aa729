//! The interface of the schedulers that a simulation runs: Downbeat's and the lab's.

use downbeat_core::cluster::{
    Behaviour, DispatchPolicy, DropReason, ModelOptions, NetworkBudget, Output, Reject, Request, Scheduler,
};
use downbeat_core::{BatchId, DeviceId, DeviceKind, Duration, ModelId, RequestId, Time};

/// A cluster scheduler under simulation: the contract of [`Scheduler`], as far as a run uses it.
///
/// A pure state machine. Events come with their time; after each, every [`ClusterScheduler::poll_decision`]
/// is taken and [`ClusterScheduler::poll_timeout`] says when to call [`ClusterScheduler::handle_timeout`] if nothing
/// happens before.
pub trait ClusterScheduler {
    /// Adds a model. Its requests have `slo` from arrival to deadline and arrive at `rate` a
    /// second; only planners that work in epochs use the rate. Ids are given out in order from
    /// zero.
    fn add_model(&mut self, now: Time, options: ModelOptions, slo: Duration, rate: f64) -> ModelId;

    /// Adds a free device of a kind. Ids are given out in order from zero. Systems with only one
    /// kind ignore `kind`.
    fn add_device(&mut self, now: Time, kind: DeviceKind) -> DeviceId;

    /// Replaces a model's dispatch policy. Systems without a choice of dispatch policies ignore the
    /// call.
    fn set_dispatch(&mut self, _now: Time, _model: ModelId, _dispatch: DispatchPolicy) {}

    /// Sets the behaviour of an adaptive model. Systems without behaviours, or with a rehearsal that
    /// finds them, ignore the call.
    fn set_behaviour(&mut self, _now: Time, _model: ModelId, _behaviour: Behaviour) {}

    /// Sets the network delays to plan with. Systems that plan without a network ignore the call.
    fn set_network(&mut self, _now: Time, _network: NetworkBudget) {}

    /// A request has arrived.
    ///
    /// # Errors
    /// If the request is not accepted; no decision will name it.
    fn handle_request(&mut self, now: Time, request: Request) -> Result<(), Reject>;

    /// A batch that was dispatched and not preempted is done.
    fn handle_completion(&mut self, now: Time, device: DeviceId, batch: BatchId);

    /// Carries out timers that are due.
    fn handle_timeout(&mut self, now: Time);

    /// The next decision.
    fn poll_decision(&mut self) -> Option<Decision>;

    /// The time for the next [`ClusterScheduler::handle_timeout`] if no other event comes before.
    fn poll_timeout(&self) -> Option<Time>;

    /// Returns the member vector of a dispatch for reuse.
    fn recycle(&mut self, members: Vec<RequestId>);
}

/// A decision of a simulated scheduler.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Decision {
    /// Send this batch now.
    Dispatch {
        /// The id for [`ClusterScheduler::handle_completion`].
        batch: BatchId,
        /// A device that runs no batch; with a network, a device with at most one batch.
        device: DeviceId,
        /// The model of the batch.
        model: ModelId,
        /// The requests.
        members: Vec<RequestId>,
        /// Items: the sum of the members' sizes.
        size: u32,
        /// The planned start: now, unless the batch has a way to go or the device has another batch
        /// before it.
        start: Time,
        /// `l(size)`.
        expected: Duration,
    },
    /// This request will not run.
    Drop {
        /// The request.
        request: RequestId,
        /// Its model.
        model: ModelId,
        /// The reason.
        reason: DropReason,
    },
    /// Stop this batch, which runs on `device`: the work is lost, its members wait again, and the
    /// device is free.
    Preempt {
        /// The running batch.
        batch: BatchId,
        /// The device that runs the batch.
        device: DeviceId,
    },
}

impl From<Output> for Decision {
    fn from(output: Output) -> Self {
        match output {
            Output::Dispatch { batch, device, model, members, size, start, expected, reason: _ } => {
                Decision::Dispatch { batch, device, model, members, size, start, expected }
            }
            Output::Drop { request, model, reason, detail: _ } => Decision::Drop { request, model, reason },
        }
    }
}

impl ClusterScheduler for Scheduler {
    fn set_dispatch(&mut self, now: Time, model: ModelId, dispatch: DispatchPolicy) {
        Scheduler::set_dispatch(self, now, model, dispatch);
    }

    fn set_behaviour(&mut self, now: Time, model: ModelId, behaviour: Behaviour) {
        Scheduler::set_behaviour(self, now, model, Some(behaviour));
    }

    fn set_network(&mut self, now: Time, network: NetworkBudget) {
        Scheduler::set_network(self, now, network);
    }

    fn add_model(&mut self, now: Time, options: ModelOptions, _slo: Duration, _rate: f64) -> ModelId {
        Scheduler::add_model(self, now, options)
    }

    fn add_device(&mut self, now: Time, kind: DeviceKind) -> DeviceId {
        Scheduler::add_device(self, now, kind)
    }

    fn handle_request(&mut self, now: Time, request: Request) -> Result<(), Reject> {
        Scheduler::handle_request(self, now, request).map(drop)
    }

    fn handle_completion(&mut self, now: Time, device: DeviceId, batch: BatchId) {
        Scheduler::handle_completion(self, now, device, batch);
    }

    fn handle_timeout(&mut self, now: Time) {
        Scheduler::handle_timeout(self, now);
    }

    fn poll_decision(&mut self) -> Option<Decision> {
        self.poll_output().map(Decision::from)
    }

    fn poll_timeout(&self) -> Option<Time> {
        Scheduler::poll_timeout(self).map(|(at, _)| at)
    }

    fn recycle(&mut self, members: Vec<RequestId>) {
        Scheduler::recycle(self, members);
    }
}
