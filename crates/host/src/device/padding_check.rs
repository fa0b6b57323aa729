//! Whether a model's answers stay the same when its inputs are padded: tried at load.
//!
//! No number of trials proves it for all requests. A model may change its behaviour from some
//! length on, or for rare values. So the check tries requests of lengths on both sides of every
//! power of two, of ones and of random numbers. [`super::answer_watch`] finds the rest in service.

use downbeat_engine::{Fill, State};

use super::padding::{LARGEST_LENGTH, Padding};
use crate::request::batch_codec::{Admitted, BatchCodec, Outputs};
use crate::run::difference::difference;

/// The first lengths that are tried: a model that cannot run these cannot be tried at all.
const FIRST: (u32, u32) = (5, 12);
/// Random numbers that a model is tried with, the widest range that it takes.
const RANDOM: [Fill; 2] = [Fill::Random { least: 1, most: 99, seed: 7 }, Fill::Random { least: 1, most: 1, seed: 7 }];

/// Runs requests alone, and padded beside longer ones, and compares their answers, for as long as
/// there `is_time`.
///
/// # Errors
/// If they differ, or the model cannot run the first.
pub fn check(
    codec: &BatchCodec,
    padding: &Padding,
    is_time: &dyn Fn() -> bool,
    run: &mut dyn FnMut(State) -> Result<State, String>,
) -> Result<(), String> {
    let mut trial = Trial { codec, padding, run };
    let longest = padding.max_length.unwrap_or(LARGEST_LENGTH);
    let (length, padded) = (FIRST.0.min(longest), FIRST.1.min(longest));
    let alone = trial.alone(Fill::Ones, length).map_err(|reason| {
        format!(
            "the model cannot run the trial request (all ones) that tells whether padding changes answers: {reason}"
        )
    })?;
    let beside = trial.beside(Fill::Ones, length, padded).map_err(|reason| {
        format!(
            "the model cannot run the trial request (all ones) that tells whether padding changes answers: {reason}"
        )
    })?;
    compare(codec, (length, &alone), (padded, &beside))?;
    let random = RANDOM.into_iter().find(|fill| trial.alone(*fill, length).is_ok());
    let fills: Vec<Fill> = random.into_iter().chain([Fill::Ones]).collect();
    let lengths = lengths(longest);
    // Pairs each length with the next one, to find a change at any length; also the shortest with
    // the longest, if the longest is known.
    let next = lengths.iter().copied().zip(lengths.iter().skip(1).copied());
    let farthest = padding.max_length.map(|longest| (1, longest));
    for (length, padded) in farthest.into_iter().chain(next).filter(|(length, padded)| length < padded) {
        for fill in &fills {
            if !is_time() {
                tracing::info!(
                    length,
                    "there was no time to try longer requests padded; a difference shows in service"
                );
                return Ok(());
            }
            // The length is more than the model takes: it rejects such requests alone too.
            let Ok(alone) = trial.alone(*fill, length) else { return Ok(()) };
            let Ok(beside) = trial.beside(*fill, length, padded) else { continue };
            compare(codec, (length, &alone), (padded, &beside))?;
        }
    }
    Ok(())
}

/// Lengths on both sides of every power of two up to `longest`, and that, ascending.
fn lengths(longest: u32) -> Vec<u32> {
    let powers = (0..32).map(|exponent| 1u32 << exponent).take_while(|power| *power <= longest);
    let mut lengths: Vec<u32> = powers.flat_map(|power| [power - 1, power, power.saturating_add(1)]).collect();
    lengths.extend([longest - 1, longest]);
    lengths.retain(|length| (1..=longest).contains(length));
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// Fails if the answers differ.
fn compare(
    codec: &BatchCodec,
    (length, alone): (u32, &Outputs),
    (padded, beside): (u32, &Outputs),
) -> Result<(), String> {
    match difference(codec, alone, beside) {
        None => Ok(()),
        Some((output, alone, beside)) => Err(format!(
            "its answers change when its inputs are padded: output '{output}' has {alone} for a request of length {length} alone, and {beside} for the \
             same request padded with zeros to {padded}. The model needs an input that masks the padding; leave `pad` out and use the policy exclusive"
        )),
    }
}

struct Trial<'a> {
    codec: &'a BatchCodec,
    padding: &'a Padding,
    run: &'a mut dyn FnMut(State) -> Result<State, String>,
}

impl Trial<'_> {
    /// The answer to a request of this length that runs alone.
    fn alone(&mut self, fill: Fill, length: u32) -> Result<Outputs, String> {
        let request = self.codec.sample(fill, length.into())?;
        self.first(&[&request], length, length)
    }

    /// The answer to a request that is padded to another length, beside a request of that length.
    fn beside(&mut self, fill: Fill, length: u32, padded: u32) -> Result<Outputs, String> {
        let (request, longer) = (self.codec.sample(fill, length.into())?, self.codec.sample(fill, padded.into())?);
        // If the model takes no batch of two, the request runs alone, padded.
        let both: &[&Admitted] = if self.codec.max_batch > 1 { &[&request, &longer] } else { &[&request] };
        self.first(both, length, padded)
    }

    /// The first answer of a batch of requests padded to `padded`, cut back to `length`. The cut
    /// fails if an output's varying dimension is not the length.
    fn first(&mut self, requests: &[&Admitted], length: u32, padded: u32) -> Result<Outputs, String> {
        let state = self.padding.assemble(self.codec, requests.iter().copied(), padded, 0)?;
        let answers = self.codec.separate((self.run)(state)?, &vec![1; requests.len()])?;
        self.padding.cut(self.codec, answers.into_iter().next().unwrap_or_default(), length, padded)
    }
}
