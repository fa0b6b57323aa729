//! Whether two answers to the same request are alike.

use downbeat_service::classification::numbers;

use crate::request::batch_codec::{BatchCodec, Outputs};

/// How far two numbers may lie apart, absolute or relative to their size. Kernels add up in another
/// order for another batch size.
const TOLERANCE: f64 = 1e-3;

/// Whether two numbers lie no farther apart than `tolerance`, absolute or relative to their size. A NaN
/// is far from every number, and an infinity is near itself.
pub fn is_near(a: f64, b: f64, tolerance: f64) -> bool {
    a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance * (1.0 + a.abs().max(b.abs()))
}

/// The first output with a difference between two answers, and the two numbers.
pub fn difference(codec: &BatchCodec, a: &Outputs, b: &Outputs) -> Option<(String, f64, f64)> {
    for ((a, b), binding) in a.iter().zip(b).zip(&codec.outputs) {
        if a.data == b.data {
            continue;
        }
        let [a, b] = [a, b].map(|part| numbers(binding.datatype(), &part.data));
        let (a, b) = match (a, b) {
            (Some(a), Some(b)) if a.len() == b.len() => {
                let mut each = a.into_iter().zip(b).map(|(a, b)| (a.real(), b.real()));
                let Some(differ) = each.find(|(a, b)| !is_near(*a, *b, TOLERANCE)) else { continue };
                differ
            }
            _ => (f64::NAN, f64::NAN),
        };
        return Some((binding.client.name.clone(), a, b));
    }
    None
}
