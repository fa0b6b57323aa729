//! Bounded numbers in the files of worlds and networks.

use downbeat_core::Duration;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

/// A number from `LEAST` to `MOST`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Number<const LEAST: u32, const MOST: u32, const DEFAULT: u32 = LEAST>(pub u32);

impl<const LEAST: u32, const MOST: u32, const DEFAULT: u32> Default for Number<LEAST, MOST, DEFAULT> {
    fn default() -> Self {
        Number(DEFAULT)
    }
}

impl<'de, const LEAST: u32, const MOST: u32, const DEFAULT: u32> Deserialize<'de> for Number<LEAST, MOST, DEFAULT> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let found = i64::deserialize(deserializer)?;
        let number = u32::try_from(found).ok().filter(|number| (LEAST..=MOST).contains(number));
        number.map(Number).ok_or_else(|| D::Error::custom(format!("{found} is not a number from {LEAST} to {MOST}")))
    }
}

/// A share from 0 to 1.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Share(pub f64);

impl<'de> Deserialize<'de> for Share {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let share = f64::deserialize(deserializer)?;
        match (0.0..=1.0).contains(&share) {
            true => Ok(Share(share)),
            false => Err(D::Error::custom(format!("{share} is no share: it must be from 0 to 1"))),
        }
    }
}

/// The longest time: a day.
const MOST_MS: f64 = 86_400_000.0;

pub(crate) fn millis<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let ms = f64::deserialize(deserializer)?;
    match (0.0..=MOST_MS).contains(&ms) {
        true => Ok(Duration::from_millis_f64(ms)),
        false => Err(D::Error::custom(format!("{ms} ms: it must be from 0 to {MOST_MS} (a day)"))),
    }
}

pub(crate) fn some_millis<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    millis(deserializer).map(Some)
}

pub(crate) fn spoken<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    String::deserialize(deserializer)?.parse().map(Some).map_err(D::Error::custom)
}

pub(crate) fn yes() -> bool {
    true
}
