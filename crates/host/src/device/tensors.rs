//! The tensors of a model's batches on a device: made of requests' inputs, and parted into their
//! answers.

use std::sync::Arc;

use downbeat_core::device::RingRun;
use downbeat_core::{RequestId, Time};
use downbeat_engine::{Fill, Lane, State};

use super::answer_watch::AnswerWatch;
use super::input_rings::InputRings;
use super::padding::Padding;
use crate::request::batch_codec::{Admitted, BatchCodec, Outputs};
use crate::request::step_mark::StepMark;

/// A copy of this many bytes takes some 100 ns.
const QUICK_BYTES: usize = 4 << 10;

/// A request in a launch.
pub struct Member {
    pub request: RequestId,
    pub rows: u32,
    /// The length of its inputs; 0 if the model's shapes are fixed.
    pub length: u32,
    /// Its inputs, if the ring does not have them.
    pub input: Option<Admitted>,
    /// Its slots of the ring, if the ring has its inputs.
    pub slots: Option<RingRun>,
    /// The step of a pipeline that it is.
    pub step: Option<Arc<StepMark>>,
    /// When it must be finished; [`Time::MAX`] if it may take any time.
    pub deadline: Time,
}

/// How the tensors of a model's batches on a device are made of requests' inputs, and parted into
/// their answers.
pub struct BatchTensors {
    pub codec: Arc<BatchCodec>,
    /// The ring that requests enter on arrival.
    pub rings: Option<InputRings>,
    /// How requests of different lengths share a batch.
    pub padding: Option<Arc<Padding>>,
    /// Checks in service whether padding changes their answers.
    pub padding_watch: Option<Arc<AnswerWatch>>,
    /// Checks in service whether the requests beside a request change its answer.
    pub row_watch: Option<Arc<AnswerWatch>>,
}

impl BatchTensors {
    /// Copies a request's inputs into its slots of the ring; `false`: the inputs stay with the
    /// caller.
    pub fn write(&self, input: &Admitted, slots: RingRun) -> bool {
        if self.is_padding_off() {
            return false;
        }
        let written = |rings: &InputRings| rings.write(&self.codec, self.padding.as_deref(), input, slots);
        self.rings.as_ref().is_some_and(written)
    }

    /// Whether the copy into the slots takes no longer than a lock.
    pub fn writes_quickly(&self, slots: RingRun) -> bool {
        self.rings.as_ref().is_some_and(|rings| rings.host_bytes(slots).is_some_and(|bytes| bytes <= QUICK_BYTES))
    }

    /// The length that a request of `length` is padded to before it meets other requests.
    pub fn padded_length(&self, length: u32) -> u32 {
        match (&self.rings, &self.padding) {
            (Some(rings), _) if rings.length > 0 && !self.is_padding_off() => rings.length,
            (_, Some(padding)) if !self.is_padding_off() => padding.filled_length(&self.codec, length),
            _ => length,
        }
    }

    /// Whether an answer was wrong because its request was padded, so that none is any more.
    pub fn is_padding_off(&self) -> bool {
        self.padding_watch.as_ref().is_some_and(|watch| watch.is_off())
    }

    /// Whether an answer was wrong because its request shared a batch, so that each request runs
    /// alone.
    pub fn is_sharing_off(&self) -> bool {
        self.row_watch.as_ref().is_some_and(|watch| watch.is_off())
    }

    /// The length that a member's inputs are padded to when it runs by itself.
    pub fn length_alone(&self, member: &Member) -> u32 {
        match (&self.rings, &member.input) {
            // The ring holds the inputs at its length already.
            (Some(rings), input) if rings.length > 0 && (input.is_none() || !self.is_padding_off()) => rings.length,
            _ => member.length,
        }
    }

    /// Offers a member's answer to the watches whose turn it is. The batch was padded to `padded`;
    /// `others`: the batch had other rows.
    pub fn watch(&self, member: &Member, padded: u32, others: bool, outputs: &Outputs) {
        let is_padded = member.length < padded && self.padding.is_some();
        let padding = self.padding_watch.as_ref().filter(|watch| is_padded && watch.wants_next());
        let rows = self.row_watch.as_ref().filter(|watch| others && watch.wants_next());
        for watch in padding.into_iter().chain(rows) {
            if let Some(state) = self.input_alone(member) {
                watch.offer(state, member.rows, member.length, padded, outputs.clone());
            }
        }
    }

    /// A copy of a member's inputs, not padded; `None` if they are gone, or there is no memory.
    fn input_alone(&self, member: &Member) -> Option<State> {
        match (&member.input, member.slots, &self.padding) {
            (Some(input), ..) => self.assemble(std::iter::once(input), member.length, 0).ok(),
            (None, Some(slots), Some(padding)) => padding.bare(&self.codec, &self.read(slots)?, member.length),
            (None, Some(slots), None) => self.read(slots)?.copy().ok(),
            (None, None, _) => None,
        }
    }

    /// The batch in a run of slots, without a copy.
    pub fn read(&self, run: RingRun) -> Option<State> {
        self.rings.as_ref()?.read(&self.codec, run)
    }

    /// A batch of copies of its members' inputs, padded to `length`, with `fill` rows of zeros
    /// behind them, for `engine` to run.
    pub fn join_inputs(
        &self,
        engine: &mut dyn Lane,
        members: &[Member],
        length: u32,
        fill: u32,
    ) -> Result<State, String> {
        if let Some(inputs) = members.iter().map(|member| member.input.as_ref()).collect::<Option<Vec<_>>>() {
            return self.assemble(inputs.into_iter(), length, fill);
        }
        let mut states = Vec::with_capacity(members.len() + 1);
        for member in members {
            states.push(match (&member.input, member.slots) {
                (Some(input), _) => self.assemble(std::iter::once(input), length, 0)?,
                (None, Some(slots)) => {
                    self.read(slots).ok_or("a slot of the input ring is in use: this is a defect")?
                }
                (None, None) => return Err("a request has no inputs: this is a defect".to_owned()),
            });
        }
        if fill > 0 {
            states.push(self.assemble(std::iter::empty(), length, fill)?);
        }
        engine.join(states).map_err(|error| error.to_string())
    }

    fn assemble<'a>(
        &self,
        inputs: impl ExactSizeIterator<Item = &'a Admitted> + Clone,
        length: u32,
        fill: u32,
    ) -> Result<State, String> {
        match &self.padding {
            Some(padding) => padding.assemble(&self.codec, inputs, length, fill),
            None if fill == 0 => self.codec.assemble(inputs),
            None => {
                let dummy = self.codec.sample(Fill::Zeros, 1)?;
                let dummies = std::iter::repeat_n(&dummy, fill as usize);
                let all: Vec<&Admitted> = inputs.map(|input| input as &Admitted).chain(dummies).collect();
                self.codec.assemble(all.into_iter())
            }
        }
    }

    /// Cuts outputs back to the shape that a request of `length` would have got alone.
    pub fn cut(&self, outputs: Outputs, length: u32, padded: u32) -> Result<Outputs, String> {
        match &self.padding {
            Some(padding) if length < padded => padding.cut(&self.codec, outputs, length, padded),
            _ => Ok(outputs),
        }
    }
}
