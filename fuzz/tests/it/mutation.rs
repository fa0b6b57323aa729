//! Changes to bytes that readers are known to stumble over.

use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

/// The longest file that a change makes.
const MOST_BYTES: usize = 64 << 10;

/// Numbers at the edges of types, as text.
const NUMBERS: [&str; 14] = [
    "-1",
    "0",
    "1",
    "255",
    "65536",
    "2147483647",
    "-2147483648",
    "4294967296",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551615",
    "1e999",
    "-1e-400",
    "nan",
];

/// Numbers at the edges of types, as protobuf's varints and little-endian words.
const WORDS: [&[u8]; 8] = [
    &[0xff; 4],
    &[0xff; 8],
    &[0x7f],
    &[0x80, 0x80, 0x80, 0x80, 0x10],
    &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
    &[0, 0, 0, 0x80],
    &[0, 0, 0, 0, 0, 0, 0, 0x80],
    &[0; 8],
];

/// Makes one file: the same for the same seed.
pub struct Mutator(Pcg64Mcg);

impl Mutator {
    pub fn new(seed: u64) -> Self {
        Mutator(Pcg64Mcg::seed_from_u64(seed))
    }

    /// Returns a random seed file, changed in one place to eight.
    pub fn change(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        let mut data = seeds.choose(&mut self.0).cloned().unwrap_or_default();
        for _ in 0..1 << self.0.random_range(0..4) {
            self.change_once(&mut data, seeds);
            data.truncate(MOST_BYTES);
        }
        data
    }

    fn change_once(&mut self, data: &mut Vec<u8>, seeds: &[Vec<u8>]) {
        let place = self.0.random_range(0..=data.len());
        let end = self.0.random_range(place..=data.len().min(place + 64));
        match self.0.random_range(0..10) {
            0 => data.truncate(place),
            1 => drop(data.drain(place..end)),
            2 => {
                let part = data[place..end].to_vec();
                let times = 1 << self.0.random_range(0..8);
                data.splice(place..place, part.repeat(times));
            }
            3 => {
                // From this place on, the file continues as another file.
                let other = seeds.choose(&mut self.0).map_or(&[][..], |seed| seed);
                let from = self.0.random_range(0..=other.len());
                data.splice(place.., other[from..].iter().copied());
            }
            4 => {
                let word = WORDS.choose(&mut self.0).copied().unwrap_or_default();
                let end = (place + word.len()).min(data.len());
                data.splice(place..end, word.iter().copied());
            }
            5 | 6 => self.change_number(data, place),
            7 => {
                if let Some(byte) = data.get_mut(place) {
                    *byte ^= 1 << self.0.random_range(0..8);
                }
            }
            8 => {
                if let Some(byte) = data.get_mut(place) {
                    *byte = self.0.random();
                }
            }
            _ => {
                let bytes: Vec<u8> = (place..end).map(|_| self.0.random()).collect();
                data.splice(place..place, bytes);
            }
        }
    }

    /// Replaces the next number in digits by a number at the edge of a type.
    fn change_number(&mut self, data: &mut Vec<u8>, place: usize) {
        let Some(first) = data[place..].iter().position(u8::is_ascii_digit).map(|offset| place + offset) else {
            return;
        };
        let length = data[first..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let number = NUMBERS.choose(&mut self.0).copied().unwrap_or_default();
        data.splice(first..first + length, number.bytes());
    }
}
