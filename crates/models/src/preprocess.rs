//! A model's steps from pictures or texts to its inputs, in service.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use downbeat_core::tensor::DataType;
use downbeat_core::{Duration, Time};
use downbeat_host::request::batch_codec::BatchCodec;
use downbeat_preprocess::{Pipeline, PreprocessError, Recipe, Work};
use downbeat_protocol::inference::{ModelConfig, ModelParameter};
use downbeat_protocol::{InferRequest, InferTensor};
use downbeat_service::budget::Reservation;
use downbeat_service::client::Client;
use downbeat_service::clock::Clock;
use downbeat_service::error::ServiceError;
use downbeat_service::options::ServerOptions;
use downbeat_service::unanswered::Unanswered;
use downbeat_service::work::offload;
use downbeat_service::work::work_line::path_by_model;
use downbeat_service::work::work_pool::{Place, WorkPool};

use crate::serving::Limits;

/// The parameters of a model's configuration about its input besides tensors: the input's name, of
/// datatype BYTES and shape `[n]` or `[n, 1]`.
pub const INPUT_PARAMETER: &str = "preprocess_input";
/// The media types of its items.
pub const MEDIA_PARAMETER: &str = "preprocess_media";
/// The inputs that are filled from it, divided by commas.
pub const FILLS_PARAMETER: &str = "preprocess_fills";

/// The weight of a new measurement of the pace: one part in this many.
const LEARNS: f64 = 8.0;

/// A model's steps from pictures or texts to its inputs, with the threads that take them and how
/// long they took so far.
#[derive(Debug)]
pub struct Preprocess {
    pipeline: Pipeline,
    pool: Arc<WorkPool>,
    /// The number of these steps in the line of the pool.
    number: u64,
    clock: Clock,
    /// Nanoseconds for a unit of work, as an `f64`; 0: not known yet.
    pace: AtomicU64,
}

/// Limits and threads that the steps of all models share. The first model starts the threads.
#[derive(Debug)]
pub struct Preprocessing {
    threads: usize,
    most_pixels: u64,
    clock: Clock,
    pool: OnceLock<Arc<WorkPool>>,
    steps: AtomicU64,
}

impl Preprocessing {
    /// Reads the options; starts no thread yet.
    pub fn new(options: &ServerOptions, clock: Clock) -> Self {
        let most_pixels = u64::from(options.max_megapixels) * 1_000_000;
        Preprocessing {
            threads: options.preprocess_threads,
            most_pixels,
            clock,
            pool: OnceLock::new(),
            steps: AtomicU64::new(0),
        }
    }

    /// The threads: one fewer than there are cores, unless the options set the number.
    fn pool(&self) -> Arc<WorkPool> {
        let threads = || match self.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from) - 1,
            threads => threads,
        };
        self.pool.get_or_init(|| Arc::new(WorkPool::new("preprocess", threads()))).clone()
    }

    /// Has `work` done before that of any request.
    pub fn spawn(&self, work: impl FnOnce() + Send + 'static) {
        let path = path_by_model(Client::HERE, self.steps.fetch_add(1, Relaxed));
        self.pool().spawn(Place { path, deadline: Time::ZERO, takes: Duration::ZERO }, work);
    }

    /// The steps of a model whose requests are like `codec`'s.
    ///
    /// # Errors
    /// A text with the wrong step, or why the steps' tensors do not fit the model.
    pub fn steps(&self, recipe: &Recipe, codec: &BatchCodec) -> Result<Arc<Preprocess>, String> {
        let pipeline = Pipeline::new(recipe, &codec.signature().inputs, codec.batched, self.most_pixels)?;
        let number = self.steps.fetch_add(1, Relaxed);
        Ok(Arc::new(Preprocess { pipeline, pool: self.pool(), number, clock: self.clock, pace: AtomicU64::new(0) }))
    }
}

/// The result for the items of a request.
enum Made {
    /// The inputs that the items fill.
    Tensors(Vec<InferTensor>),
    /// The items failed, for this reason.
    Failed(PreprocessError),
    /// The turn came too late: no item was processed.
    Late,
}

impl Preprocess {
    /// Whether a request has the input that its steps begin with.
    pub fn is_for(&self, request: &InferRequest) -> bool {
        request.inputs.iter().any(|input| self.is_input(input))
    }

    fn is_input(&self, input: &InferTensor) -> bool {
        // A tensor of the model itself may be called so; then the datatype tells them apart.
        input.datatype == DataType::Bytes && input.name == self.pipeline.input()
    }

    /// Adds the input besides tensors to a model's configuration.
    pub fn describe(&self, config: &mut ModelConfig) {
        let fills = self.pipeline.fills().collect::<Vec<_>>().join(",");
        let said = [
            (INPUT_PARAMETER, self.pipeline.input().to_owned()),
            (MEDIA_PARAMETER, self.pipeline.media().types().to_owned()),
            (FILLS_PARAMETER, fills),
        ];
        let parameters = said.map(|(name, string_value)| (name.to_owned(), ModelParameter { string_value }));
        config.parameters.extend(parameters);
    }

    /// Checks a request [for](Preprocess::is_for) these steps as far as possible without its data,
    /// which may still be elsewhere. Returns the number of items that it claims.
    ///
    /// # Errors
    /// `InvalidArgument`, with the tensor, the expected value and the actual one.
    pub fn check(&self, request: &InferRequest, codec: &BatchCodec) -> Result<u32, ServiceError> {
        let (model, name) = (&request.model_name, self.pipeline.input());
        let wrong = |what: String| Err(ServiceError::InvalidArgument(what));
        let Some(input) = request.inputs.iter().find(|input| self.is_input(input)) else {
            return wrong(format!("model '{model}': the request has no input '{name}' of datatype BYTES"));
        };
        let (items @ 1.., [] | [1]) = input.shape.split_first().map_or((0, &[][..]), |(items, rest)| (*items, rest))
        else {
            return wrong(format!(
                "unexpected shape for input '{name}' for model '{model}'. Expected [n] or [n,1], n at least 1, got {:?}",
                input.shape
            ));
        };
        let most = codec.max_batch;
        let Some(items) = u32::try_from(items).ok().filter(|items| *items <= most) else {
            return wrong(format!(
                "inference request batch-size must be <= {most} for '{model}': the request has {items}; send several requests"
            ));
        };
        let is_other = |input: &&InferTensor| !self.is_input(input);
        if let Some(twice) =
            self.pipeline.fills().find(|fills| request.inputs.iter().filter(is_other).any(|input| input.name == *fills))
        {
            return wrong(format!(
                "the server makes input '{twice}' of model '{model}' from '{name}'; send one of the two"
            ));
        }
        let others = request.inputs.iter().filter(is_other).cloned().collect();
        let others = InferRequest { model_name: model.clone(), inputs: others, ..InferRequest::default() };
        codec.check_inputs(&others)?;
        Ok(items)
    }

    /// Takes the items out of a request.
    ///
    /// # Errors
    /// The errors of [`Preprocess::check`], or `InvalidArgument` if the number of items differs
    /// from the claim.
    pub fn take(&self, request: &mut InferRequest, codec: &BatchCodec) -> Result<Vec<Bytes>, ServiceError> {
        let count = self.check(request, codec)? as usize;
        let place = request.inputs.iter().position(|input| self.is_input(input)).unwrap_or(0);
        let data = request.inputs.remove(place).data;
        let items = elements(&data, count);
        items.ok_or_else(|| {
            ServiceError::InvalidArgument(format!(
                "expected {count} elements for inference input '{}' for model '{}', each its length as a little-endian 32-bit number, \
                 then its bytes",
                self.pipeline.input(),
                request.model_name
            ))
        })
    }

    /// The work that items need, from their headers.
    ///
    /// # Errors
    /// `InvalidArgument`, with the item, its defect, and the limit that it exceeds.
    pub fn look(&self, items: &[Bytes]) -> Result<Work, ServiceError> {
        self.pipeline.look(items).map_err(|error| ServiceError::InvalidArgument(error.to_string()))
    }

    /// The time that such work takes, by the measured pace.
    fn estimate(&self, work: Work) -> Duration {
        Duration::from_nanos((f64::from_bits(self.pace.load(Relaxed)) * work.units as f64) as u64)
    }

    /// When work with this `deadline` would begin if it came now. If a thread is idle the work
    /// begins now, under any estimate of the pace: its result then corrects a wrong pace.
    pub fn begins(&self, now: Time, deadline: Time) -> Time {
        now + self.pool.wait(deadline)
    }

    /// When the tensors of such work would be ready if it came now. `None`: no work was measured yet.
    pub fn ready_at(&self, now: Time, deadline: Time, work: Work) -> Option<Time> {
        let takes = self.estimate(work);
        (takes > Duration::ZERO).then(|| self.begins(now, deadline) + takes)
    }

    /// Turns the items of a request that came at `arrival` into tensors in the request, unless they
    /// begin later than `latest`. `held` shrinks to the bytes of the tensors. Dropping the future
    /// cancels the work.
    ///
    /// # Errors
    /// The error that answers the request, and the count that it belongs to; `None`: no count.
    pub async fn make(
        self: &Arc<Self>,
        request: &mut InferRequest,
        (items, work): (Vec<Bytes>, Work),
        held: &mut Reservation,
        limits: &Limits,
        latest: Time,
        arrival: Time,
    ) -> Result<(), (Option<Unanswered>, ServiceError)> {
        let model = &request.model_name;
        let making = self.run(items, work, limits.deadline, latest);
        let made = match limits.timeout {
            None => making.await,
            Some(timeout) => tokio::time::timeout(timeout.into(), making)
                .await
                .map_err(|_| (Some(Unanswered::Timeout), limits.overrun(model)))?,
        };
        match made {
            Ok(Made::Tensors(tensors)) => {
                held.shrink_to(tensors.iter().map(|tensor| tensor.data.len() as u64).sum());
                request.inputs.extend(tensors);
                Ok(())
            }
            Ok(Made::Failed(error)) => Err((None, ServiceError::InvalidArgument(format!("model '{model}': {error}")))),
            Ok(Made::Late) => {
                let waited = self.clock.now().since(arrival);
                let message = format!(
                    "dropped after {waited} in the queue of model '{model}', before the server decoded it: the \
                     request could no longer finish by its deadline"
                );
                Err((Some(Unanswered::Hopeless), ServiceError::DeadlineExceeded(message)))
            }
            Err(error) => Err((None, error)),
        }
    }

    /// Has items made into tensors, in the order of deadlines. Work whose turn comes after `latest`
    /// is not done. Dropping the future cancels it.
    async fn run(
        self: &Arc<Self>,
        items: Vec<Bytes>,
        work: Work,
        deadline: Time,
        latest: Time,
    ) -> Result<Made, ServiceError> {
        let this = self.clone();
        let make = move || {
            let begin = this.clock.now();
            if begin > latest {
                return Made::Late;
            }
            match this.pipeline.run(&items) {
                Ok(tensors) => {
                    this.learn(work, this.clock.now().since(begin));
                    Made::Tensors(tensors)
                }
                Err(error) => Made::Failed(error),
            }
        };
        let path = path_by_model(offload::sender(), self.number);
        self.pool.run(Place { path, deadline, takes: self.estimate(work) }, make).await
    }

    fn learn(&self, work: Work, took: Duration) {
        let seen = took.as_nanos() as f64 / work.units.max(1) as f64;
        let known = f64::from_bits(self.pace.load(Relaxed));
        let learned = if known > 0.0 { known + (seen - known) / LEARNS } else { seen };
        self.pace.store(learned.to_bits(), Relaxed);
    }
}

/// The elements of BYTES, which are `count`.
fn elements(data: &Bytes, count: usize) -> Option<Vec<Bytes>> {
    let (mut items, mut at) = (Vec::with_capacity(count), 0_usize);
    for _ in 0..count {
        let length = u32::from_le_bytes(*data.get(at..)?.first_chunk::<4>()?) as usize;
        let begin = at + 4;
        at = begin.checked_add(length).filter(|end| *end <= data.len())?;
        items.push(data.slice(begin..at));
    }
    (at == data.len()).then_some(items)
}

/// Whether a request has the input that a model with this configuration makes tensors of.
pub fn asks_for_steps(config: &ModelConfig, request: &InferRequest) -> bool {
    let input = config.parameters.get(INPUT_PARAMETER).map(|parameter| &parameter.string_value);
    request.inputs.iter().any(|tensor| tensor.datatype == DataType::Bytes && Some(&tensor.name) == input)
}

/// The input of a model with this configuration that takes the media type `media`, if there is one.
pub fn input_for<'a>(config: &'a ModelConfig, media: &str) -> Option<&'a str> {
    let said = |name| config.parameters.get(name).map(|parameter| parameter.string_value.as_str());
    said(INPUT_PARAMETER).filter(|_| said(MEDIA_PARAMETER).is_some_and(|all| all.split(", ").any(|one| one == media)))
}
