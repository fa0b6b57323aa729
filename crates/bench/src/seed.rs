//! Random number generators: one independent stream for each purpose, all from the run's one seed.

use rand_pcg::Pcg64;

/// What random numbers are for. Drawing more for one purpose changes no other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stream {
    /// Arrival times.
    Arrivals,
    /// Which model and which of its prepared requests.
    Mix,
    /// The data of the prepared requests of the n-th model.
    Data(u32),
}

impl Stream {
    /// The generator of this purpose. The same seed gives the same numbers on every machine.
    pub fn random(self, seed: u64) -> Pcg64 {
        let stream = match self {
            Stream::Arrivals => 1,
            Stream::Mix => 2,
            Stream::Data(model) => 3 + u64::from(model),
        };
        downbeat_sim::random(seed, stream)
    }
}
