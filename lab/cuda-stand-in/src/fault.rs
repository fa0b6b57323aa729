//! Faults that a test has asked for.

use crate::result::{CUresult, Outcome};

/// The faults to come.
#[derive(Debug, Default)]
pub struct Faults {
    /// `cuInit` fails with this.
    pub init: Option<CUresult>,
    /// The allocation that fails, counted down from the next one, which is 1; 0: none.
    pub allocation: u64,
    /// Allocations above this many bytes fail.
    pub above: Option<u64>,
    /// The calls that fail: the name of the entry point, the number of its calls until the failure,
    /// and the error.
    pub calls: Vec<(String, u64, CUresult)>,
    /// The work that fails: its stream (0: any), the number of the stream's operations until the
    /// failure, and the error.
    pub work: Vec<(u64, u64, CUresult)>,
}

impl Faults {
    /// Returns an error if this allocation must fail.
    pub fn allocation(&mut self, len: u64) -> Outcome {
        let out_of_memory = Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        if self.allocation > 0 {
            self.allocation -= 1;
            if self.allocation == 0 {
                return out_of_memory;
            }
        }
        if self.above.is_some_and(|above| len > above) { out_of_memory } else { Ok(()) }
    }

    /// Returns an error if this call of an entry point must fail.
    pub fn call(&mut self, name: &str) -> Outcome {
        due(&mut self.calls, |wanted| wanted == name)
    }

    /// Returns an error if this operation of a stream must fail.
    pub fn work(&mut self, stream: u64) -> Outcome {
        due(&mut self.work, |wanted| *wanted == 0 || *wanted == stream)
    }
}

/// Counts down the entries that match, and takes the first that is due.
fn due<K>(faults: &mut Vec<(K, u64, CUresult)>, matches: impl Fn(&K) -> bool) -> Outcome {
    let mut found = None;
    for (index, (key, left, code)) in faults.iter_mut().enumerate() {
        if matches(key) {
            *left = left.saturating_sub(1);
            if *left == 0 && found.is_none() {
                found = Some((index, *code));
            }
        }
    }
    match found {
        Some((index, code)) => {
            faults.remove(index);
            Err(code)
        }
        None => Ok(()),
    }
}
