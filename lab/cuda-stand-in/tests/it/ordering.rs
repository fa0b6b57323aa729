//! Unordered work is found even if it goes well.

use cuda_stand_in::StandIn;
use cudarc::driver::sys::CUstream;

use crate::program::{Program, allocate, cuda, event, free_pinned, kernel, pinned, stream, upload};

/// Enqueues a kernel that reads or writes these bytes.
fn kernel_on(stream: CUstream, address: u64, len: u64, writes: bool) {
    StandIn::touch(stream as u64, address, len, writes).unwrap();
    kernel(stream, || ());
}

/// Returns the number of mistakes since the last call, each of them one of ordering.
fn unordered(program: &Program) -> usize {
    let mistakes = program.stand_in.mistakes();
    assert!(mistakes.iter().all(|mistake| mistake.contains("nothing orders")), "{mistakes:?}");
    program.stand_in.forget();
    mistakes.len()
}

/// A lane's slot is written again after its read. The variants are the ways to keep the write from
/// coming too early.
#[derive(Clone, Copy)]
enum Guard {
    None,
    Event,
    HostWaitsForEvent,
    HostAsksEvent,
    HostWaitsForStream,
}

#[test]
fn a_slot_is_written_again_only_behind_its_reader() {
    let program = Program::start();
    program.stand_in.set_patience(1);
    let (ring, lane, uploaded, read) = (stream(), stream(), event(), event());
    let (slot, host) = (allocate(8).unwrap(), pinned(&[1; 8]));
    let run = |guard: Guard| {
        upload(slot, host, ring).unwrap();
        cuda!(cuEventRecord(uploaded, ring)).unwrap();
        cuda!(cuStreamWaitEvent(lane, uploaded, 0)).unwrap();
        kernel_on(lane, slot, 8, false);
        cuda!(cuEventRecord(read, lane)).unwrap();
        match guard {
            Guard::None => {}
            Guard::Event => cuda!(cuStreamWaitEvent(ring, read, 0)).unwrap(),
            Guard::HostWaitsForEvent => cuda!(cuEventSynchronize(read)).unwrap(),
            Guard::HostAsksEvent => cuda!(cuEventQuery(read)).unwrap(),
            Guard::HostWaitsForStream => cuda!(cuStreamSynchronize(lane)).unwrap(),
        }
        upload(slot, host, ring).unwrap();
        // Here the reader runs first all the same.
        cuda!(cuStreamSynchronize(lane)).unwrap();
        cuda!(cuStreamSynchronize(ring)).unwrap();
        unordered(&program)
    };
    assert_eq!(run(Guard::None), 1);
    for guard in [Guard::Event, Guard::HostWaitsForEvent, Guard::HostAsksEvent, Guard::HostWaitsForStream] {
        assert_eq!(run(guard), 0);
    }
    cuda!(cuMemFree_v2(slot)).unwrap();
    free_pinned(host);
    for event in [uploaded, read] {
        cuda!(cuEventDestroy_v2(event)).unwrap();
    }
    for stream in [ring, lane] {
        cuda!(cuStreamDestroy_v2(stream)).unwrap();
    }
    program.finish();
}

#[test]
fn only_a_write_to_the_same_bytes_needs_an_order() {
    let program = Program::start();
    let (a, b) = (stream(), stream());
    let memory = allocate(16).unwrap();
    let pair = |first: (u64, bool), second: (u64, bool)| {
        kernel_on(a, memory + first.0, 8, first.1);
        kernel_on(b, memory + second.0, 8, second.1);
        cuda!(cuCtxSynchronize()).unwrap();
        unordered(&program)
    };
    assert_eq!(pair((0, false), (0, false)), 0);
    assert_eq!(pair((0, true), (8, true)), 0);
    assert_eq!(pair((0, true), (7, false)), 1);
    assert_eq!(pair((0, false), (7, true)), 1);
    cuda!(cuMemFree_v2(memory)).unwrap();
    for stream in [a, b] {
        cuda!(cuStreamDestroy_v2(stream)).unwrap();
    }
    program.finish();
}

#[test]
fn memory_is_freed_in_the_order_of_a_stream_only_behind_its_users() {
    let program = Program::start();
    let (maker, user, made) = (stream(), stream(), event());
    let run = |waits: bool| {
        let mut memory = 0;
        cuda!(cuMemAllocAsync(&mut memory, 8, maker)).unwrap();
        cuda!(cuEventRecord(made, maker)).unwrap();
        cuda!(cuStreamWaitEvent(user, made, 0)).unwrap();
        kernel_on(user, memory, 8, true);
        cuda!(cuEventRecord(made, user)).unwrap();
        if waits {
            cuda!(cuStreamWaitEvent(maker, made, 0)).unwrap();
        }
        cuda!(cuMemFreeAsync(memory, maker)).unwrap();
        cuda!(cuStreamSynchronize(user)).unwrap();
        cuda!(cuStreamSynchronize(maker)).unwrap();
        unordered(&program)
    };
    assert_eq!(run(true), 0);
    assert_eq!(run(false), 1);
    cuda!(cuEventDestroy_v2(made)).unwrap();
    for stream in [maker, user] {
        cuda!(cuStreamDestroy_v2(stream)).unwrap();
    }
    program.finish();
}
