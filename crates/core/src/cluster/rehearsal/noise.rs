//! How long executions take, in proportion to their profiles.

use crate::time::Duration;

/// Most executions that are remembered. Example: of 4,000 executions a second one takes 100 ms.
/// Among only the last 128 it would stand for one of 128, and a replay would meet 30 such stalls a
/// second.
const MOST: usize = 1_024;
/// The largest margin, percent. A machine that stalls now and then cannot be planned for, so no
/// larger share is ever kept free.
const MOST_MARGIN: f64 = 50.0;

/// The last `MOST` numbers of some kind.
#[derive(Clone, Debug, Default)]
pub(super) struct Ring<const MOST: usize> {
    numbers: Vec<f32>,
    /// Place of the oldest number, once the ring is full.
    oldest: usize,
}

impl<const MOST: usize> Ring<MOST> {
    pub fn add(&mut self, number: f64) {
        let number = number as f32;
        if self.numbers.len() < MOST {
            self.numbers.push(number);
        } else {
            self.numbers[self.oldest] = number;
            self.oldest = (self.oldest + 1) % MOST;
        }
    }

    /// A random one of the numbers; `None` if the ring is empty.
    pub fn draw(&self, random: &mut Random) -> Option<f64> {
        let index = (random.even() * self.numbers.len() as f64) as usize;
        self.numbers.get(index).map(|number| f64::from(*number))
    }

    /// The mean of the numbers; zero if the ring is empty.
    pub fn mean(&self) -> f64 {
        self.numbers.iter().map(|number| f64::from(*number)).sum::<f64>() / (self.numbers.len() as f64).max(1.0)
    }
}

/// The times of a model's last executions, as shares of its profile's time. Few machines vary as a
/// normal distribution does. If other programs use the cores too, a run of 0.1 ms takes 5 ms now
/// and then. A replay thus draws from the measured shares.
#[derive(Clone, Debug, Default)]
pub struct ExecutionNoise(Ring<MOST>);

impl ExecutionNoise {
    /// Notes that an execution took this share of its profile's time. Negative and infinite shares
    /// and NaN are ignored.
    pub fn add(&mut self, share: f64) {
        if share.is_finite() && share >= 0.0 {
            // Rounding to nanoseconds is no noise.
            self.0.add(if (share - 1.0).abs() < 1e-5 { 1.0 } else { share });
        }
    }

    /// The margin in percent with which the share `kept` (percent) of the executions takes no
    /// longer than planned.
    pub fn margin(&self, kept: u8) -> u8 {
        let mut shares = self.0.numbers.clone();
        shares.sort_unstable_by(f32::total_cmp);
        let index = (shares.len() * usize::from(kept) / 100).min(shares.len().saturating_sub(1));
        let above = shares.get(index).map_or(0.0, |share| f64::from(*share) - 1.0);
        (100.0 * above).round().clamp(0.0, MOST_MARGIN) as u8
    }

    /// A random execution time by the measured shares; the profile's time if no execution was
    /// measured.
    pub fn took(&self, random: &mut Random, expected: Duration) -> Duration {
        match self.0.draw(random) {
            None | Some(1.0) => expected,
            Some(share) => Duration::from_secs_f64(expected.as_secs_f64() * share),
        }
    }
}

/// SplitMix64: a pseudo-random sequence that follows from the seed.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number, evenly distributed in 0..1.
    pub(crate) fn even(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_drawn_was_measured_lately() {
        let (mut noise, mut random) = (ExecutionNoise::default(), Random(1));
        let second = Duration::from_millis(1_000);
        assert_eq!(noise.took(&mut random, second), second, "nothing was measured");
        (0..3_000).for_each(|share| noise.add(f64::from(share)));
        [f64::NAN, f64::INFINITY, -1.0].into_iter().for_each(|share| noise.add(share));
        let drawn: Vec<u64> = (0..50_000).map(|_| noise.took(&mut random, second).as_nanos() / 1_000_000_000).collect();
        assert!(drawn.iter().all(|share| (1_976..3_000).contains(share)));
        assert!((1_976..3_000).all(|share| drawn.contains(&share)), "each is as likely as another");
    }

    #[test]
    fn margins_keep_so_many_of_the_executions() {
        let mut noise = ExecutionNoise::default();
        assert_eq!(noise.margin(98), 0, "nothing was measured");
        (1..=100).for_each(|percent| noise.add(1.0 + f64::from(percent) / 1_000.0));
        assert_eq!([0, 50, 84, 98, 100].map(|kept| noise.margin(kept)), [0, 5, 9, 10, 10]);
        (0..MOST).for_each(|_| noise.add(0.9));
        assert_eq!(noise.margin(98), 0, "they take less than the profile says");
        (0..MOST).for_each(|_| noise.add(30.0));
        assert_eq!(noise.margin(84), 50);
    }

    #[test]
    fn rounding_is_no_noise() {
        let mut noise = ExecutionNoise::default();
        noise.add(1.0 + 1e-9);
        let hour = Duration::from_millis(3_600_000);
        assert_eq!(noise.took(&mut Random(1), hour), hour);
    }
}
