//! Static plans of activations.

use downbeat_engine::Activations;
use downbeat_engine::activations::{Lifetime, plan};

use crate::support::Random;

fn lifetime(bytes: u64, from: usize, to: usize) -> Lifetime {
    Lifetime { bytes, from, to }
}

#[test]
fn a_chain_needs_two_buffers() {
    let chain: Vec<Lifetime> = (0..10).map(|i| lifetime(64, i, i + 1)).collect();
    let activations = Activations::of(&chain);
    assert_eq!((activations.separate, activations.planned, activations.alive), (640, 128, 128));
}

/// Tensors that are alive at once never overlap. A plan is at least as large as the tensors alive
/// at once, and at most as large as all together.
#[test]
fn tensors_that_are_alive_at_once_do_not_overlap() {
    let mut random = Random::new("tensors_that_are_alive_at_once");
    for _ in 0..200 {
        let count = random.below(30) as usize;
        let lifetimes: Vec<Lifetime> = (0..count)
            .map(|_| {
                let from = random.below(20) as usize;
                lifetime(random.below(1000), from, from + random.below(8) as usize)
            })
            .collect();
        let offsets = plan(&lifetimes, 64);
        for (i, (a, a_at)) in lifetimes.iter().zip(&offsets).enumerate() {
            assert_eq!(a_at % 64, 0);
            for (b, b_at) in lifetimes.iter().zip(&offsets).skip(i + 1) {
                let at_once = a.from <= b.to && b.from <= a.to;
                let apart = a_at + a.bytes <= *b_at || b_at + b.bytes <= *a_at;
                assert!(!at_once || apart || a.bytes == 0 || b.bytes == 0, "{a:?} at {a_at} and {b:?} at {b_at}");
            }
        }
        let activations = Activations::of(&lifetimes);
        assert!(activations.alive <= activations.planned);
        assert!(activations.planned <= activations.separate + 64 * count as u64);
    }
}
