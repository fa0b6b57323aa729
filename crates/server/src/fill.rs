//! What requests of our own making hold: those that a model is tried and warmed up with.

use downbeat_core::tensor::DataType;
use downbeat_engine::Buffer;

/// What the elements of a request of our own making are. Every kind refuses some models: an index or a length may not be 0, a mask may not be random.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fill {
    /// Zeros; `BYTES`: empty strings.
    Zeros,
    /// Ones, such as ids and a mask; numbers with a fraction vary a little; `BYTES`: "1".
    Ones,
    /// Numbers with a fraction between -2 and 2, integers from 1 to `most`, `true`; `BYTES`: "1".
    Random {
        /// The largest integer.
        most: u8,
        /// Equal seeds give equal numbers.
        seed: u64,
    },
}

impl Fill {
    /// What is tried, the likeliest to suit a model first.
    pub const ALL: [Fill; 4] =
        [Fill::Zeros, Fill::Ones, Fill::Random { most: 99, seed: 1 }, Fill::Random { most: 1, seed: 1 }];

    /// Writes `count` elements of an input. A mask, which its name tells, is ones where others are random.
    pub fn write(self, name: &str, datatype: DataType, count: usize, to: &mut Buffer) {
        let fill = match self {
            Fill::Random { .. } if name.to_ascii_lowercase().contains("mask") => Fill::Ones,
            fill => fill,
        };
        match fill {
            Fill::Zeros => to.resize(to.len() + count * datatype.size().unwrap_or(4), 0),
            Fill::Ones => (0..count).for_each(|at| element(datatype, 1, 1.0 + (at % 7) as f64 / 8.0, to)),
            Fill::Random { most, seed } => {
                let mut random = Random(seed);
                for _ in 0..count {
                    let bits = random.next();
                    let integer = 1 + (bits % u64::from(most.max(1))) as u8;
                    element(datatype, integer, (bits >> 11) as f64 / (1u64 << 51) as f64 - 2.0, to);
                }
            }
        }
    }

    /// Bytes of an element that it writes.
    pub fn size(self, datatype: DataType) -> usize {
        match (datatype.size(), self) {
            (Some(size), _) => size,
            (None, Fill::Zeros) => 4,
            (None, _) => 5,
        }
    }
}

fn element(datatype: DataType, integer: u8, fraction: f64, to: &mut Buffer) {
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
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
