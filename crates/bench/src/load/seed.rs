//! Random number generators: one independent stream for each purpose, all from the run's seed.

use rand_pcg::Pcg64;

/// The purpose of random numbers. Drawing more for one purpose does not change another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stream {
    /// Arrival times.
    Arrivals,
    /// The choice of a model and of one of its prepared requests.
    Mix,
    /// The data of the prepared requests of the n-th model.
    Data(u32),
}

impl Stream {
    /// The generator for this purpose. The same seed gives the same numbers on every machine.
    pub fn random(self, seed: u64) -> Pcg64 {
        let stream = match self {
            Stream::Arrivals => 1,
            Stream::Mix => 2,
            Stream::Data(model) => 3 + u64::from(model),
        };
        downbeat_sim::random(seed, stream)
    }
}
