//! The contents of batches that Downbeat makes itself: to try, time and warm up a model, and to
//! judge its CUDA graphs.
//!
//! The contents avoid zeros if possible. A GPU draws less power on zeros, clocks higher, and is
//! faster than in service.

use downbeat_core::tensor::DataType;

use crate::tensor::Buffer;

/// The elements of an input that Downbeat makes. Every kind fails for some models: an index or a
/// length may not be 0, a mask may not be random.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fill {
    /// Numbers with a fraction between -2 and 2, integers from `least` to `most`, `true`; `BYTES`:
    /// "1", or empty strings where `least` is 0.
    Random {
        /// The smallest integer.
        least: u8,
        /// The largest integer.
        most: u8,
        /// Equal seeds give equal numbers.
        seed: u64,
    },
    /// Ones, such as ids and a mask; numbers with a fraction vary a little; `BYTES`: "1".
    Ones,
    /// Zeros; `BYTES`: empty strings.
    Zeros,
}

impl Default for Fill {
    /// The fill that suits nearly every model.
    fn default() -> Self {
        Fill::ALL[0]
    }
}

impl Fill {
    /// The fills to try, the likeliest to suit a model first. No file tells how large an index may
    /// be, and a GPU kernel may read behind the end of a table. So the first fills use 0 and 1,
    /// which every vocabulary and every kind of token has. Larger numbers come only if the model
    /// takes nothing else.
    pub const ALL: [Fill; 5] = [
        Fill::Random { least: 0, most: 1, seed: 1 },
        Fill::Random { least: 1, most: 1, seed: 1 },
        Fill::Ones,
        Fill::Zeros,
        Fill::Random { least: 1, most: 99, seed: 1 },
    ];

    /// Writes `count` elements of an input. A mask, known by its name, gets ones where other inputs
    /// are random.
    pub fn write(self, name: &str, datatype: DataType, count: usize, to: &mut Buffer) {
        let fill = match self {
            Fill::Random { .. } if name.to_ascii_lowercase().contains("mask") => Fill::Ones,
            fill => fill,
        };
        match fill {
            Fill::Zeros => to.resize(to.len() + count * datatype.size().unwrap_or(4), 0),
            Fill::Random { least: 0, .. } if datatype == DataType::Bytes => to.resize(to.len() + count * 4, 0),
            Fill::Ones => (0..count).for_each(|at| element(datatype, 1, 1.0 + (at % 7) as f64 / 8.0, to)),
            Fill::Random { least, most, seed } => {
                let kinds = u64::from(most.saturating_sub(least)) + 1;
                // Each input gets numbers of its own: models often reject two equal inputs.
                let mut random =
                    Random::new(name.bytes().fold(seed, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into())));
                for _ in 0..count {
                    let bits = random.next();
                    let integer = least + (bits % kinds) as u8;
                    element(datatype, integer, 2.0 * fraction(bits), to);
                }
            }
        }
    }

    /// The most bytes that one element takes.
    pub fn size(self, datatype: DataType) -> usize {
        datatype.size().unwrap_or(5)
    }
}

/// Writes an element in the datatype's form: the integer, or the number with a fraction.
pub fn element(datatype: DataType, integer: u8, fraction: f64, to: &mut Buffer) {
    match datatype {
        DataType::Bool => to.extend_from_slice(&[1]),
        DataType::Uint8 | DataType::Int8 => to.extend_from_slice(&[integer]),
        DataType::Uint16 | DataType::Int16 => to.extend_from_slice(&u16::from(integer).to_le_bytes()),
        DataType::Uint32 | DataType::Int32 => to.extend_from_slice(&u32::from(integer).to_le_bytes()),
        DataType::Uint64 | DataType::Int64 => to.extend_from_slice(&u64::from(integer).to_le_bytes()),
        DataType::Fp16 => to.extend_from_slice(&half::f16::from_f64(fraction).to_le_bytes()),
        DataType::Bf16 => to.extend_from_slice(&half::bf16::from_f64(fraction).to_le_bytes()),
        DataType::Fp32 => to.extend_from_slice(&(fraction as f32).to_le_bytes()),
        DataType::Fp64 => to.extend_from_slice(&fraction.to_le_bytes()),
        DataType::Bytes => to.extend_from_slice(&[1, 0, 0, 0, b'1']),
    }
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
pub struct Random(u64);

/// A number from -1 to below 1.
fn fraction(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

impl Random {
    /// The numbers that follow from `seed`.
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// A number from -1 to below 1.
    pub fn fraction(&mut self) -> f64 {
        fraction(self.next())
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(fill: Fill, name: &str, datatype: DataType, count: usize) -> Vec<u8> {
        let mut to = Buffer::new();
        fill.write(name, datatype, count, &mut to);
        assert!(to.len() <= count * fill.size(datatype));
        to.as_slice().to_vec()
    }

    #[test]
    fn what_is_tried_first_is_random_repeatable_and_in_every_table() {
        let first = Fill::default();
        let floats = written(first, "x", DataType::Fp32, 1000);
        assert_eq!(floats, written(first, "x", DataType::Fp32, 1000));
        let mut values: Vec<f32> =
            floats.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        assert!(values.iter().all(|v| (-2.0..=2.0).contains(v)));
        values.sort_by(f32::total_cmp);
        values.dedup();
        assert!(values.len() > 990, "{} different numbers", values.len());
        let ids = written(first, "ids", DataType::Int64, 1000);
        let ones = ids.chunks_exact(8).filter(|id| id[0] == 1).count();
        assert!((400..600).contains(&ones), "{ones} ones");
        assert!(ids.chunks_exact(8).all(|id| id[0] <= 1 && id[1..].iter().all(|b| *b == 0)));
        // A row that masks everything has no answer.
        assert!(written(first, "attention_mask", DataType::Int64, 8).chunks_exact(8).all(|mask| mask[0] == 1));
        assert_eq!(written(first, "text", DataType::Bytes, 2), [0; 8]);
        assert_eq!(written(first, "flag", DataType::Bool, 3), [1; 3]);
        assert!(
            written(Fill::ALL[4], "n", DataType::Uint8, 1000).iter().max().is_some_and(|most| (90..=99).contains(most))
        );
    }
}
