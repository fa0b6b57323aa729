//! A model to measure, with its inputs.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use downbeat_core::device::RingRun;
use downbeat_core::tensor::{DataType, TensorSpec};
use downbeat_engine::ring_memory::{self, RingMemory};
use downbeat_engine::{Buffer, Cut, Engine, Lane, LoadOptions, Model, Place, Share, State, Tensor};

use crate::Outcome;

/// Tokens of a request.
pub const LENGTH: usize = 128;

pub struct Subject {
    pub model: Arc<dyn Model>,
    inputs: Vec<Input>,
}

/// An input for the largest batch: on the host, and in the slots of a ring on the device.
struct Input {
    spec: TensorSpec,
    item_bytes: usize,
    on_host: Bytes,
    ring: Arc<RingMemory>,
}

/// Where the inputs are before a run.
#[derive(Clone, Copy, PartialEq)]
pub enum From {
    Host,
    Ring,
}

impl Subject {
    pub fn load(engine: &dyn Engine, path: &Path, cut: Cut, largest: usize) -> Outcome<Subject> {
        let model = engine.load(&LoadOptions::new(path, 1).with_cut(cut))?;
        let inputs = model.signature().inputs.iter().map(|spec| {
            let item: usize = item_shape(spec).iter().product();
            let on_host = random(spec, item * largest)?;
            let item_bytes = on_host.len() / largest;
            let slots = ring_memory::slots(largest as u32, &[item_bytes])?;
            let ring = model.ring_memory(0, slots, item_bytes, largest as u32)?;
            for slot in 0..largest {
                let mut writer = ring.write(RingRun { first: slot as u32, count: 1 }).ok_or("a slot is in use")?;
                writer.copy_from_slice(&on_host[slot * item_bytes..(slot + 1) * item_bytes]);
                writer.finish()?;
            }
            Ok(Input { spec: spec.clone(), item_bytes, on_host, ring })
        });
        let inputs = inputs.collect::<Outcome<_>>()?;
        Ok(Subject { model, inputs })
    }

    /// Bytes of an item of the model's largest input.
    pub fn largest_item(&self) -> usize {
        self.inputs.iter().map(|input| input.item_bytes).max().unwrap_or(1)
    }

    pub fn lane(&self, share: Share) -> Outcome<Box<dyn Lane>> {
        Ok(self.model.lane_at(Place { device: 0, share })?)
    }

    /// A batch that is made without a copy.
    pub fn batch(&self, rows: usize, from: From) -> Outcome<State> {
        let tensors = self.inputs.iter().map(|input| {
            let data = match from {
                From::Host => Buffer::from_bytes(input.on_host.slice(..rows * input.item_bytes)),
                From::Ring => {
                    let run = RingRun { first: 0, count: rows as u32 };
                    input.ring.read(run).ok_or("a slot of the ring is in use")?
                }
            };
            let shape = std::iter::once(rows).chain(item_shape(&input.spec)).collect();
            Ok(Tensor { datatype: input.spec.datatype, shape, data })
        });
        Ok(State { tensors: tensors.collect::<Outcome<_>>()? })
    }

    /// Runs all segments in one launch; milliseconds by the host's clock.
    pub fn run(&self, lane: &mut dyn Lane, rows: usize, from: From) -> Outcome<f64> {
        let mut batch = self.batch(rows, from)?;
        let begin = Instant::now();
        lane.run(0..self.model.segments(), &mut batch)?;
        Ok(begin.elapsed().as_secs_f64() * 1e3)
    }
}

/// Milliseconds of the last run by the device's clock.
pub fn span(lane: &dyn Lane) -> f64 {
    lane.last_run().and_then(|span| span.took()).map_or(f64::NAN, |took| took.as_nanos() as f64 / 1e6)
}

/// An item's sizes, with [`LENGTH`] for each size that varies.
pub fn item_shape(spec: &TensorSpec) -> Vec<usize> {
    spec.dims.iter().skip(1).map(|d| usize::try_from(*d).unwrap_or(LENGTH)).collect()
}

/// Random elements without zeros, for which some GPUs are faster.
pub fn random(spec: &TensorSpec, elements: usize) -> Outcome<Bytes> {
    let mut state = 7_u64;
    let mut next = || random_bits(&mut state) >> 40;
    let mut data = Vec::with_capacity(elements * 8);
    for _ in 0..elements {
        let bits = next();
        match spec.datatype {
            DataType::Fp32 => data.extend_from_slice(&(bits as f32 / (1 << 23) as f32 - 1.0).to_le_bytes()),
            DataType::Int64 if spec.name.contains("mask") => data.extend_from_slice(&1_i64.to_le_bytes()),
            DataType::Int64 => data.extend_from_slice(&((bits % 1000) as i64).to_le_bytes()),
            other => return Err(format!("input '{}': no random {other}", spec.name).into()),
        }
    }
    Ok(data.into())
}

/// The next bits of a sequence (SplitMix64).
pub fn random_bits(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
