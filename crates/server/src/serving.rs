//! The models in service, and the way of a request from a frontend to the driver and back.

mod preparing;
mod served_model;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use downbeat_core::profile::ProfileError;
use downbeat_core::tensor::DataType;
use downbeat_core::{Duration, LatencyProfile, Time};
use downbeat_protocol::inference as pb;
use downbeat_protocol::{InferRequest, InferResponse, InferTensor, Parameter};
use downbeat_repository::{ModelDefinition, TensorBinding};
use parking_lot::RwLock;

use crate::batch_codec::{Admitted, OutputPart, Outputs, ShapeKey};
use crate::budget::ByteBudget;
use crate::call::Call;
use crate::driver::{Driver, QueuedCall};
use crate::error::ServiceError;
use crate::host::run_own;
use crate::loaded_version::LoadedVersion;
use crate::offload;
use crate::options::ServerOptions;
use crate::queue::Queue;
use crate::reply::Reply;
use crate::ticket::{Decider, Ticket};
use crate::unanswered::Unanswered;
use crate::watchdog::Watchdog;
use served_model::InputBytes;
pub use served_model::{InFlight, ServedModel};

/// When to try again where a model's share of the budget of bytes is used up.
const RETRY_AFTER: Duration = Duration::from_millis(1_000);
/// Shapes of one model that have a queue of their own at a time.
const MOST_SHAPES: usize = 1024;
/// How long a model that is unloaded waits for runs that were told to end.
const RUNS_END_WITHIN: Duration = Duration::from_millis(8_000);
/// A shape that was not seen for so long gives its queue up to a new one.
const SHAPE_FORGOTTEN_AFTER: Duration = Duration::from_millis(60_000);

/// Answers inference requests with whatever models are in service.
pub struct Serving {
    options: Arc<ServerOptions>,
    driver: Arc<Driver>,
    budget: Arc<ByteBudget>,
    models: RwLock<BTreeMap<String, Arc<ServedModel>>>,
    watchdog: Arc<Watchdog>,
    draining: AtomicBool,
}

impl Serving {
    pub fn new(
        options: Arc<ServerOptions>,
        driver: Arc<Driver>,
        budget: Arc<ByteBudget>,
        watchdog: Arc<Watchdog>,
    ) -> Self {
        let (models, draining) = (RwLock::default(), AtomicBool::new(false));
        Serving { options, driver, budget, models, watchdog, draining }
    }

    pub fn get(&self, name: &str) -> Option<Arc<ServedModel>> {
        self.models.read().get(name).cloned()
    }

    /// The model, if it is in service, for a request: it does not leave before the request is done.
    pub fn enter(&self, name: &str) -> Option<InFlight> {
        // Counted under the lock: whoever takes the model out of service afterwards sees the count.
        let models = self.models.read();
        let served = models.get(name)?.clone();
        served.in_flight.fetch_add(1, Ordering::AcqRel);
        Some(InFlight(served))
    }

    pub fn all(&self) -> Vec<Arc<ServedModel>> {
        self.models.read().values().cloned().collect()
    }

    pub fn is_empty(&self) -> bool {
        self.models.read().is_empty()
    }

    /// Takes a model into service, in the place of what was served under its name; gives that back.
    pub fn replace(&self, name: &str, served: Option<Arc<ServedModel>>) -> Option<Arc<ServedModel>> {
        let mut models = self.models.write();
        match served {
            Some(served) => models.insert(name.to_owned(), served),
            None => models.remove(name),
        }
    }

    /// Waits until a model that is out of service has answered its requests, then gives up its queues and ends its runs, for which nobody waits any more. Says whether
    /// they have ended.
    pub async fn retire(&self, served: &ServedModel) -> bool {
        served.wait_idle().await;
        self.forget_queues(served.versions.values());
        let until = self.driver.clock().now() + RUNS_END_WITHIN;
        while served.running() > 0 {
            if self.driver.clock().now() >= until || served.left_behind() == served.running() {
                return false;
            }
            served.versions.values().for_each(|version| self.watchdog.end_runs(&version.health));
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        true
    }

    /// Gives up the queues of versions that answer no request (any more).
    pub fn forget_queues<'a>(&self, versions: impl Iterator<Item = &'a Arc<LoadedVersion>>) {
        for (_, queue) in versions.flat_map(|loaded| loaded.queues()) {
            self.driver.remove_queue(queue.place);
        }
    }

    /// From now on the server and its models are not ready. Requests that still come are answered: who sent them had not
    /// heard of it yet, and it is the frontends that end connections.
    pub fn start_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether the server is on its way out.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    pub fn is_idle(&self) -> bool {
        self.models.read().values().all(|served| served.in_flight.load(Ordering::Acquire) == 0)
    }

    /// The version that a request is for, if it is taken now.
    ///
    /// # Errors
    /// `Unavailable` if the server drains, the version's devices are lost, its process is started again or a run of it does not end; those of [`ServedModel::version`].
    pub fn check<'a>(&self, served: &'a ServedModel, version: &str) -> Result<&'a Arc<LoadedVersion>, ServiceError> {
        let loaded = served.version(version)?;
        match loaded.out_of_service() {
            Some(reason) => Err(ServiceError::Unavailable(format!("model '{}': {reason}", loaded.name))),
            None => Ok(loaded),
        }
    }

    /// Runs an inference. Dropping the future cancels the request.
    ///
    /// # Errors
    /// Any [`ServiceError`].
    pub async fn infer(&self, served: &ServedModel, mut request: InferRequest) -> Result<InferResponse, ServiceError> {
        let arrival = self.driver.clock().now();
        let loaded = self.check(served, &request.model_version)?;
        let wanted = wanted_outputs(loaded, &request)?;
        let limits = self.limits(served, &request, arrival)?;
        let prepared = match loaded.preprocess_of(&request) {
            // Boxed, as other requests would move what it keeps for nothing.
            Some(steps) => Some(Box::pin(self.prepare(served, loaded, steps, &mut request, &limits, arrival)).await?),
            None => None,
        };
        let (place, _held) = prepared.map(|prepared| (prepared.place, prepared.held)).unzip();
        // The elements of BYTES are counted one by one.
        let strings = request.inputs.iter().filter(|input| input.datatype == DataType::Bytes);
        let heavy = strings.map(|input| input.data.len()).sum::<usize>() >= offload::PARSE_FROM;
        let (admitted, request) = if heavy {
            let loaded = Arc::clone(loaded);
            offload::run(move || loaded.codec.admit(&mut request).map(|admitted| (admitted, request))).await??
        } else {
            (loaded.codec.admit(&mut request)?, request)
        };
        let _input_bytes = self.hold_inputs(served, loaded, admitted.bytes())?;
        loaded.check_memory(&admitted)?;
        if let Some(auto) = &loaded.auto {
            auto.came(arrival, limits.deadline, admitted.rows, limits.level);
        }
        let (reply, answer) = Reply::channel();
        let call = |admitted| Call {
            admitted,
            loaded: loaded.clone(),
            arrival,
            deadline: limits.deadline,
            deadline_is_slo: limits.deadline_is_slo,
            is_probe: false,
            reply,
        };
        let hosts = &loaded.hosts;
        // One of several would hold up others of its thread, and have them wait for batches of their own.
        let is_alone = served.in_flight.load(Ordering::Relaxed) == 1;
        let id = self.driver.next_request();
        let decider = if hosts.is_routed {
            let length = hosts.length(&loaded.codec, &admitted)?;
            let (host, model) = hosts.soonest();
            if let Some(place) = place {
                place.pass_on(false);
            }
            run_own(is_alone, || host.submit(model, id, call(admitted), length));
            Decider::Device(host.clone(), model.clone())
        } else {
            let queue = self.queue(&served.definition, loaded, &admitted, arrival)?;
            let Limits { queue_expiry, level, .. } = limits;
            let (handle, has_place) = (queue.place, place.is_some());
            if let Some(place) = place {
                place.pass_on(true);
            }
            let queued = QueuedCall { call: call(admitted), queue, queue_expiry, level, has_place };
            run_own(is_alone, || self.driver.submit(id, queued));
            Decider::Scheduler(self.driver.clone(), handle)
        };
        let ticket = Ticket::new(decider, loaded.clone(), id, arrival);
        let outputs = match limits.timeout {
            None => answer.await,
            // The scheduler drops what cannot make it; this ends the rare request that was started and overran.
            Some(timeout) => match tokio::time::timeout(self.left_of(timeout, arrival).into(), answer).await {
                Ok(answer) => answer,
                Err(_) => {
                    ticket.time_out();
                    return Err(timed_out(&request.model_name, timeout));
                }
            },
        };
        ticket.close();
        let outputs =
            outputs.map_err(|_| ServiceError::Internal("the request was lost: this is a defect".to_owned()))??;
        Ok(response(request, loaded, wanted.as_deref(), outputs))
    }

    /// What is left of a client's own time for a request that came at `arrival`.
    fn left_of(&self, timeout: Duration, arrival: Time) -> Duration {
        timeout.saturating_sub(self.driver.clock().now().since(arrival))
    }

    /// Bounds the queue of a model by bytes: its requests in flight hold at most half of the budget, so that the other
    /// models have room whatever waits for this one. One request may always be there.
    fn hold_inputs<'a>(
        &self,
        served: &'a ServedModel,
        loaded: &LoadedVersion,
        bytes: u64,
    ) -> Result<InputBytes<'a>, ServiceError> {
        let share = self.budget.limit() / 2;
        let held = served.input_bytes.fetch_add(bytes, Ordering::Relaxed);
        let inputs = InputBytes(served, bytes);
        if held == 0 || held.saturating_add(bytes) <= share {
            return Ok(inputs);
        }
        loaded.record_not_answered(Unanswered::QueueFull, Duration::ZERO);
        Err(ServiceError::QueueFull {
            message: format!(
                "Exceeds maximum queue size: the inputs of the requests of model '{}' in flight are {held} bytes, and it may \
                 have {share}, half of --max-in-flight-bytes; try again later",
                loaded.name
            ),
            retry_after: RETRY_AFTER,
        })
    }

    /// Deadline, queue timeout and priority of a request (all in one place: what the client asked for, what the
    /// model's queue policy and SLO say).
    fn limits(&self, served: &ServedModel, request: &InferRequest, arrival: Time) -> Result<Limits, ServiceError> {
        let batching = &served.definition.batching;
        let level = batching.level_of(unsigned(request, "priority")?.unwrap_or(0));
        let timeout = unsigned(request, "timeout")?.filter(|us| *us > 0).map(Duration::from_micros);
        let mut queue_timeout = Duration::ZERO;
        if let Some(policy) = batching.levels.get(level) {
            // Where the policy has no timeout, a request's own is its deadline and nothing else.
            queue_timeout = policy.default_timeout;
            if policy.allow_timeout_override
                && queue_timeout > Duration::ZERO
                && let Some(timeout) = timeout
            {
                queue_timeout = queue_timeout.min(timeout);
            }
        }
        let queue_expiry = if queue_timeout == Duration::ZERO { Time::MAX } else { arrival + queue_timeout };
        let slo = self.options.slo(&served.definition.name, served.definition.slo);
        let slo_deadline = slo.map_or(Time::MAX, |slo| arrival + slo);
        let timeout_deadline = timeout.map_or(Time::MAX, |timeout| arrival + timeout);
        Ok(Limits {
            deadline: slo_deadline.min(timeout_deadline),
            deadline_is_slo: slo_deadline <= timeout_deadline,
            timeout,
            queue_expiry,
            level: u32::try_from(level).unwrap_or(0),
        })
    }

    /// The queue for a request's shape. A shape that is new gets one, with the profile of the most similar shape
    /// there is, scaled by the number of elements.
    fn queue(
        &self,
        definition: &ModelDefinition,
        loaded: &LoadedVersion,
        admitted: &Admitted,
        now: Time,
    ) -> Result<Arc<Queue>, ServiceError> {
        let key = if loaded.codec.has_varying_shapes() { loaded.codec.shape_key(admitted) } else { ShapeKey::new() };
        if let Some(queue) = loaded.queue(&key) {
            queue.last_used_ns.store(now.as_nanos(), Ordering::Relaxed);
            return Ok(queue);
        }
        let known = loaded.queues();
        if known.len() >= MOST_SHAPES {
            let mut oldest: Vec<_> =
                known.iter().map(|(key, queue)| (queue.last_used_ns.load(Ordering::Relaxed), key, queue)).collect();
            oldest.sort_unstable_by_key(|(used, key, _)| (*used, (*key).clone()));
            // Out of the map first, so that no new request finds it; unused for a minute, so that none is on its way to it.
            let forgotten = oldest.into_iter().any(|(used, key, queue)| {
                now.since(Time::from_nanos(used)) >= SHAPE_FORGOTTEN_AFTER
                    && loaded.remove_queue(key, queue)
                    && (self.driver.remove_empty_queue(queue.place)
                        || loaded.insert_queue(key.clone(), queue.clone()).is_err())
            });
            if !forgotten {
                return Err(ServiceError::Unavailable(format!(
                    "model '{}' has had requests of {MOST_SHAPES} different shapes within {SHAPE_FORGOTTEN_AFTER}, the \
                     most that are kept apart; pad requests to fewer shapes",
                    loaded.name
                )));
            }
        }
        let slo = self.options.slo(&definition.name, definition.slo);
        let Some((_, first)) = known.first() else {
            return Err(ServiceError::Internal(format!("model '{}' has no queue", loaded.name)));
        };
        let profile = guessed_profile(&known, &key, slo)
            .map_err(|error| ServiceError::Internal(format!("no latency profile for this shape: {error}")))?;
        let queue = self.driver.add_queue(&definition.name, first.options_beside(&profile), &first.placed, profile);
        match loaded.insert_queue(key, queue.clone()) {
            Ok(()) => Ok(queue),
            Err(there) => {
                self.driver.remove_queue(queue.place);
                Ok(there)
            }
        }
    }
}

/// When a request has to be answered.
struct Limits {
    deadline: Time,
    deadline_is_slo: bool,
    timeout: Option<Duration>,
    queue_expiry: Time,
    level: u32,
}

/// "There is no such model", with the name that was probably meant.
pub fn unknown_model(name: &str, known: &[String]) -> String {
    let hint = downbeat_repository::did_you_mean(name, known.iter().map(String::as_str));
    let shown: String = name.chars().take(128).collect();
    format!("Request for unknown model: '{shown}' is not found{hint} (the repository index lists the models)")
}

/// A guess at the profiles of a shape, by hardware, from the most similar shape that is known.
fn guessed_profile(
    known: &[(ShapeKey, Arc<Queue>)],
    key: &ShapeKey,
    slo: Option<Duration>,
) -> Result<Vec<LatencyProfile>, ProfileError> {
    let elements = |key: &ShapeKey| key.iter().map(|d| (*d).max(1) as f64).product::<f64>();
    let distance = |other: &ShapeKey| (elements(other) / elements(key)).ln().abs();
    let nearest = known.iter().min_by(|(a, _), (b, _)| distance(a).total_cmp(&distance(b)));
    let Some((nearest, queue)) = nearest else {
        return Err(ProfileError::Empty);
    };
    let scaled = |profile: LatencyProfile| {
        let mut scale = elements(key) / elements(nearest);
        // A guess must not keep a shape from ever being tried.
        if let Some(slo) = slo {
            scale = scale.min(0.5 * slo.as_secs_f64() / profile.latency(1).as_secs_f64());
        }
        LatencyProfile::from_table(
            (1..=profile.max_batch())
                .map(|b| Duration::from_nanos(((profile.latency(b).as_nanos() as f64 * scale) as u64).max(1)))
                .collect(),
        )
    };
    queue.profiles().into_iter().map(scaled).collect()
}

/// Positions of the outputs that a request asks for, in its order; `None`: all.
fn wanted_outputs(loaded: &LoadedVersion, request: &InferRequest) -> Result<Option<Vec<usize>>, ServiceError> {
    if request.outputs.is_empty() {
        return Ok(None);
    }
    let outputs = &loaded.codec.outputs;
    let mut wanted = Vec::with_capacity(request.outputs.len());
    for output in &request.outputs {
        let Some(position) = outputs.iter().position(|o| o.client.name == output.name) else {
            let names: Vec<&str> = outputs.iter().map(|o| o.client.name.as_str()).collect();
            return Err(ServiceError::InvalidArgument(format!(
                "unexpected inference output '{}' for model '{}'; its outputs are {names:?}",
                output.name.chars().take(128).collect::<String>(),
                request.model_name
            )));
        };
        if wanted.contains(&position) {
            return Err(ServiceError::InvalidArgument(format!(
                "Duplicate output name '{}' is not allowed in a request",
                output.name
            )));
        }
        wanted.push(position);
    }
    Ok(Some(wanted))
}

/// The client's own time for a request is over.
fn timed_out(model: &str, timeout: Duration) -> ServiceError {
    ServiceError::DeadlineExceeded(format!("model '{model}' did not finish within the request's timeout of {timeout}"))
}

/// An unsigned number among the request's parameters.
fn unsigned(request: &InferRequest, name: &str) -> Result<Option<u64>, ServiceError> {
    let value = match request.parameters.get(name) {
        None => return Ok(None),
        Some(Parameter::Uint64(value)) => Some(*value),
        Some(Parameter::Int64(value)) => u64::try_from(*value).ok(),
        // kserve's clients send every parameter as text.
        Some(Parameter::String(text)) => text.parse().ok(),
        Some(_) => None,
    };
    match value {
        Some(value) => Ok(Some(value)),
        None => Err(ServiceError::InvalidArgument(format!(
            "parameter '{name}' must be a whole number of at least 0{}",
            if name == "timeout" { " (microseconds)" } else { "" }
        ))),
    }
}

fn response(
    request: InferRequest,
    loaded: &LoadedVersion,
    wanted: Option<&[usize]>,
    outputs: Outputs,
) -> InferResponse {
    let plans = &loaded.codec.outputs;
    let output = |(part, plan): (OutputPart, &TensorBinding)| InferTensor {
        name: plan.client.name.clone(),
        datatype: plan.datatype(),
        shape: part.shape,
        parameters: Default::default(),
        data: part.data,
    };
    let mut outputs: Vec<Option<InferTensor>> = outputs.into_iter().zip(plans).map(output).map(Some).collect();
    let outputs = match wanted {
        None => outputs.into_iter().flatten().collect(),
        Some(wanted) => wanted.iter().filter_map(|position| outputs.get_mut(*position)?.take()).collect(),
    };
    InferResponse {
        model_name: request.model_name,
        model_version: loaded.version.clone(),
        id: request.id,
        parameters: Default::default(),
        outputs,
    }
}

/// The protocol's statistics of some versions.
pub fn statistics<'a>(versions: impl Iterator<Item = &'a Arc<LoadedVersion>>) -> Vec<pb::ModelStatistics> {
    versions.map(|e| e.statistics.lock().to_proto(&e.name, &e.version)).collect()
}
