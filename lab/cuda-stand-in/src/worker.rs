//! The random order of work. A thread runs each operation as soon as it can run. If several streams
//! can go on, the seed decides which one does.

use crate::machine::CHANGED;
use crate::session::{Session, lock};

/// Starts the thread; it goes when the order changes again.
pub fn start(session: &mut Session, seed: u64) {
    session.order += 1;
    session.random = Some(seed);
    let order = session.order;
    let spawned = std::thread::Builder::new().name("cuda-stand-in".into()).spawn(move || run(seed, order));
    if spawned.is_err() {
        session.random = None;
        session.mistake("no thread could be started for the random order; streams stay lazy");
    }
    CHANGED.notify_all();
}

fn run(seed: u64, order: u64) {
    let mut state = seed | 1;
    let mut draw = move |below: usize| {
        // xorshift64*: Marsaglia, "Xorshift RNGs", with Vigna's multiplier.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % below
    };
    let mut session = lock();
    while session.order == order {
        let ready: Vec<u64> = session
            .streams
            .iter()
            .filter(|(handle, stream)| !stream.busy && !stream.queue.is_empty() && session.blocker(**handle).is_none())
            .map(|(handle, _)| *handle)
            .collect();
        if ready.is_empty() {
            session.wait();
            continue;
        }
        session.step(ready[draw(ready.len())]);
        // Others enqueue and ask between two operations.
        drop(session);
        for _ in 0..draw(4) {
            std::thread::yield_now();
        }
        session = lock();
    }
}
