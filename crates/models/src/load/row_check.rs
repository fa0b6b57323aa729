//! Whether a request gets the same answer alone and beside others: tried at load, if the graph does
//! not tell.
//!
//! Example: requests `a` and `b` run alone, then as the batches `[a, b]`, `[b, a]`, `[a, 0]` and
//! `[a, b, c, 0]`. The values of `b` are thirty times as large as the values of `a`. A scale that
//! the model computes over the whole batch then changes the answer to `a`. These random trials
//! prove nothing. So the server goes on checking answers in service (`host/answer_watch.rs`).

use downbeat_core::tensor::DataType;
use downbeat_engine::{Fill, State};
use downbeat_host::request::batch_codec::{Admitted, BatchCodec, Outputs, PROFILED_LENGTH};
use downbeat_host::run::difference::difference;
use downbeat_repository::{RowDependence, RowVerdict, VerdictSource};
use half::{bf16, f16};

use crate::load::warm_up::LENGTHS;

/// A model must pass the first number of draws. The check goes on to the second number while there
/// is time.
const DRAWS: [u64; 2] = [2, 4];
/// The factor between the values of a request and of its neighbour.
const SCALE: f64 = 30.0;
/// The largest batch that is tried, items.
const LARGEST: u32 = 8;
/// Integers of a wide range, for models that take them.
const WIDE: Fill = Fill::Random { least: 1, most: 99, seed: 1 };

/// The reason of a check without a verdict, for lack of time.
pub const NO_TIME: &str =
    "the check takes longer than --profiling-budget; the server makes the check when the machine is idle";

/// Runs a model to see whether requests may share a batch.
pub struct RowCheck<'a> {
    /// How its batches are made.
    pub codec: &'a BatchCodec,
    /// The contents of made-up requests that the model answers.
    pub fill: Fill,
    /// The requests of its `model_warmup`; none: made-up requests are tried.
    pub samples: Vec<Admitted>,
    /// Runs a batch.
    pub run: &'a mut dyn FnMut(State) -> Result<State, String>,
    /// Whether there is time for another draw.
    pub is_time: &'a dyn Fn() -> bool,
    /// Whether the check must end: then nothing is known.
    pub is_over: &'a dyn Fn() -> bool,
    /// Batches whose answers were compared with the answers of lone requests; 0 at first.
    pub compared: u32,
}

/// Requests of one draw: their answers must not depend on each other.
struct Draw {
    first: Admitted,
    second: Admitted,
    third: Admitted,
    zeros: Option<Admitted>,
}

/// Why a check ends before all draws are done.
enum Stop {
    /// The model answers otherwise in a batch.
    Mixed(String),
    /// The model cannot be tried.
    Unknown(String),
}

impl RowCheck<'_> {
    /// The verdict on the model.
    pub fn verdict(mut self) -> RowVerdict {
        let (rows, reason) = match self.check() {
            Ok(draws) => {
                let reason = format!("the model answered {draws} draws of requests alike, alone and together");
                (RowDependence::Independent, reason)
            }
            Err(Stop::Mixed(reason)) => (RowDependence::Mixed, reason),
            Err(Stop::Unknown(reason)) => (RowDependence::Unknown, reason),
        };
        RowVerdict { rows, source: VerdictSource::Check, reason }
    }

    /// How many draws were answered alike.
    fn check(&mut self) -> Result<u64, Stop> {
        let (fill, length) = self.answered()?;
        let mut done = 0;
        while done < DRAWS[0] || (done < DRAWS[1] && (self.is_time)()) {
            let draw = self.draw(fill, length, done)?;
            if done == 0 {
                self.check_repeats(&draw)?;
            }
            for shape in Shape::ALL {
                let Some(differs) = self.differs(&draw, shape)? else { continue };
                // A difference that a second draw does not repeat is a chance of rounding.
                let again = self.draw(fill, length, done + DRAWS[1])?;
                if self.differs(&again, shape)?.is_some() {
                    return Err(Stop::Mixed(differs));
                }
            }
            done += 1;
        }
        if self.compared == 0 {
            let reason = "no two requests that the model answers fit into one batch".to_owned();
            return Err(Stop::Unknown(reason));
        }
        Ok(done)
    }

    /// The fill and the length of varying dimensions that the model answers.
    fn answered(&mut self) -> Result<(Fill, i64), Stop> {
        if !self.samples.is_empty() {
            return Ok((self.fill, PROFILED_LENGTH));
        }
        let lengths = if self.codec.has_varying_shapes() { &LENGTHS[..] } else { &LENGTHS[..1] };
        let mut first = None;
        for length in lengths {
            for fill in [WIDE, self.fill] {
                let request = self.codec.sample(fill, *length).map_err(Stop::Unknown)?;
                match self.answers(&[&request]) {
                    Ok(_) => return Ok((fill, *length)),
                    Err(reason) => drop(first.get_or_insert(reason)),
                }
            }
        }
        let reason = first.unwrap_or_default();
        Err(Stop::Unknown(format!("the model answers no made-up request ({reason})")))
    }

    /// The requests of a draw, by its number.
    fn draw(&self, fill: Fill, length: i64, number: u64) -> Result<Draw, Stop> {
        let request = |nth: u64| {
            if let Some(sample) = self.samples.get(nth as usize % self.samples.len().max(1)) {
                return Ok(sample.clone());
            }
            self.codec.sample(seeded(fill, 3 * number + nth + 1), length).map_err(Stop::Unknown)
        };
        let (first, second, third) = (request(0)?, request(1)?, request(2)?);
        let (first, second) = match number % 2 {
            0 => (first, self.scaled(second)),
            _ => (self.scaled(first), second),
        };
        let zeros = self.codec.sample(Fill::Zeros, length).ok().filter(|_| self.samples.is_empty());
        if (0..self.codec.inputs.len()).all(|index| first.input(index) == second.input(index)) {
            let reason = "the model takes only equal requests, whose answers cannot be told apart".to_owned();
            return Err(Stop::Unknown(reason));
        }
        Ok(Draw { first, second, third, zeros })
    }

    /// A model that answers one request in two ways cannot be compared.
    fn check_repeats(&mut self, draw: &Draw) -> Result<(), Stop> {
        let mut alone = || self.answers(&[&draw.first]).map_err(Stop::Unknown);
        let (first, second) = (alone()?, alone()?);
        match difference(self.codec, &first[0], &second[0]) {
            None => Ok(()),
            Some((output, ..)) => {
                let reason = format!("output '{output}' differs from run to run for the same request");
                Err(Stop::Unknown(reason))
            }
        }
    }

    /// The difference between an answer in a batch of this shape and the answer alone; `None`: they
    /// are equal.
    fn differs(&mut self, draw: &Draw, shape: Shape) -> Result<Option<String>, Stop> {
        if (self.is_over)() {
            return Err(Stop::Unknown(NO_TIME.to_owned()));
        }
        let members = shape.members(draw);
        let rows: u32 = members.iter().map(|member| member.rows).sum();
        let key = self.codec.shape_key(&draw.first);
        // The server never joins requests of different shapes.
        if members.iter().any(|member| self.codec.shape_key(member) != key) {
            return Ok(None);
        }
        if members.len() < 2 || rows > self.codec.max_batch.min(LARGEST.max(2)) {
            return Ok(None);
        }
        // If the model cannot answer a request alone, its batches prove nothing.
        let Ok(alone) = members.iter().map(|member| self.answers(&[member])).collect::<Result<Vec<_>, _>>() else {
            return Ok(None);
        };
        self.compared += 1;
        let together = match self.answers(&members) {
            Ok(together) => together,
            Err(reason) => {
                return Ok(Some(format!("the model runs {rows} requests alone, but not as a batch: {reason}")));
            }
        };
        let pairs = alone.iter().filter_map(|alone| alone.first()).zip(&together);
        let differs = pairs.filter_map(|(alone, beside)| difference(self.codec, alone, beside)).next();
        Ok(differs.map(|(output, alone, beside)| {
            format!(
                "output '{output}' has {alone} for a request alone, but {beside} for the same request in a batch of \
                 {rows}"
            )
        }))
    }

    /// The answers of a batch, one for each member.
    fn answers(&mut self, members: &[&Admitted]) -> Result<Vec<Outputs>, String> {
        let rows: Vec<u32> = members.iter().map(|member| member.rows).collect();
        let state = self.codec.assemble(members.iter().copied())?;
        let answers = self.codec.separate((self.run)(state)?, &rows)?;
        if answers.len() == members.len() { Ok(answers) } else { Err("answers are missing".to_owned()) }
    }

    /// The request with its floating-point values times [`SCALE`].
    fn scaled(&self, request: Admitted) -> Admitted {
        let datatypes = self.codec.inputs.iter().map(|input| input.datatype());
        request.map_inputs(datatypes.map(|datatype| move |data: &[u8]| scale(datatype, data)))
    }
}

/// Which requests of a draw share a batch.
#[derive(Clone, Copy)]
enum Shape {
    FirstBeforeSecond,
    SecondBeforeFirst,
    Padded,
    Four,
}

impl Shape {
    const ALL: [Shape; 4] = [Shape::FirstBeforeSecond, Shape::SecondBeforeFirst, Shape::Padded, Shape::Four];

    fn members(self, draw: &Draw) -> Vec<&Admitted> {
        let Draw { first, second, third, zeros } = draw;
        match self {
            Shape::FirstBeforeSecond => vec![first, second],
            Shape::SecondBeforeFirst => vec![second, first],
            Shape::Padded => [first].into_iter().chain(zeros).collect(),
            Shape::Four => [first, second, third].into_iter().chain(zeros).collect(),
        }
    }
}

/// The fill with another seed, if it is random.
fn seeded(fill: Fill, seed: u64) -> Fill {
    match fill {
        Fill::Random { least, most, .. } => Fill::Random { least, most, seed },
        fill => fill,
    }
}

/// The elements times [`SCALE`]; `None` for integers and strings, which stay.
fn scale(datatype: DataType, data: &[u8]) -> Option<Vec<u8>> {
    fn each<const N: usize>(data: &[u8], scaled: impl Fn([u8; N]) -> [u8; N]) -> Option<Vec<u8>> {
        Some(data.as_chunks::<N>().0.iter().flat_map(|bytes| scaled(*bytes)).collect())
    }
    match datatype {
        DataType::Fp16 => each(data, |b| f16::from_f64(f16::from_le_bytes(b).to_f64() * SCALE).to_le_bytes()),
        DataType::Bf16 => each(data, |b| bf16::from_f64(bf16::from_le_bytes(b).to_f64() * SCALE).to_le_bytes()),
        DataType::Fp32 => each(data, |b| (f32::from_le_bytes(b) * SCALE as f32).to_le_bytes()),
        DataType::Fp64 => each(data, |b| (f64::from_le_bytes(b) * SCALE).to_le_bytes()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
