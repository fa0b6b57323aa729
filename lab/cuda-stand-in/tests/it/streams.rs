//! Streams are lazy, and waits order them.

use std::sync::mpsc;

use cuda_stand_in::{Count, FRESH, Kind, Order, StandIn};
use cudarc::driver::sys::CUresult;

use crate::program::{Program, allocate, bytes, cuda, download, event, free_pinned, kernel, pinned, stream, upload};

/// Uploads on one stream and reads on another; with or without the wait between them.
fn upload_then_read(program: &Program, waits: bool) -> u8 {
    let (ring, lane, uploaded) = (stream(), stream(), event());
    let (input, output) = (pinned(&[7; 64]), pinned(&[0; 64]));
    let memory = allocate(64).unwrap();
    upload(memory, input, ring).unwrap();
    cuda!(cuEventRecord(uploaded, ring)).unwrap();
    if waits {
        cuda!(cuStreamWaitEvent(lane, uploaded, 0)).unwrap();
    }
    download(output, memory, lane).unwrap();
    assert_eq!(output[0], 0, "nothing runs before somebody waits");
    cuda!(cuStreamSynchronize(lane)).unwrap();
    let seen = output[0];
    assert_eq!(program.stand_in.count(Count::Waiting), if waits { 0 } else { 2 });
    cuda!(cuStreamSynchronize(ring)).unwrap();
    cuda!(cuMemFree_v2(memory)).unwrap();
    cuda!(cuEventDestroy_v2(uploaded)).unwrap();
    cuda!(cuStreamDestroy_v2(lane)).unwrap();
    cuda!(cuStreamDestroy_v2(ring)).unwrap();
    free_pinned(input);
    free_pinned(output);
    seen
}

#[test]
fn a_forgotten_wait_gives_wrong_data_every_time() {
    let program = Program::start();
    assert_eq!(upload_then_read(&program, true), 7);
    assert_eq!(program.stand_in.mistakes(), Vec::<String>::new());
    assert_eq!(upload_then_read(&program, false), FRESH);
    let mistakes = program.stand_in.mistakes();
    assert_eq!(mistakes.len(), 2, "{mistakes:?}");
    assert!(mistakes[0].contains("nothing orders a download"), "{mistakes:?}");
    assert!(mistakes[1].contains("nobody has written"), "{mistakes:?}");
    program.stand_in.forget();
    program.finish();
}

#[test]
fn only_what_is_waited_for_runs() {
    let program = Program::start();
    let (a, b, middle) = (stream(), stream(), event());
    let (said, heard) = mpsc::channel();
    let say = |stream, what: &'static str| {
        let said = said.clone();
        kernel(stream, move || said.send(what).unwrap());
    };
    say(a, "a1");
    cuda!(cuEventRecord(middle, a)).unwrap();
    say(a, "a2");
    say(b, "b1");
    cuda!(cuStreamWaitEvent(b, middle, 0)).unwrap();
    say(b, "b2");
    // The event is recorded again: the wait above still stands for the earlier record.
    cuda!(cuEventRecord(middle, a)).unwrap();
    cuda!(cuStreamSynchronize(b)).unwrap();
    assert_eq!(heard.try_iter().collect::<Vec<_>>(), ["b1", "a1", "b2"]);
    cuda!(cuEventSynchronize(middle)).unwrap();
    assert_eq!(heard.try_iter().collect::<Vec<_>>(), ["a2"]);
    for stream in [a, b] {
        cuda!(cuStreamDestroy_v2(stream)).unwrap();
    }
    cuda!(cuEventDestroy_v2(middle)).unwrap();
    program.finish();
}

#[test]
fn who_asks_often_enough_is_answered() {
    let program = Program::start();
    program.stand_in.set_patience(3);
    let (stream, done) = (stream(), event());
    assert_eq!(cuda!(cuEventQuery(done)), Ok(()), "as documented, of an event that was never recorded");
    kernel(stream, || ());
    cuda!(cuEventRecord(done, stream)).unwrap();
    assert_eq!(cuda!(cuEventQuery(done)), Err(CUresult::CUDA_ERROR_NOT_READY));
    assert_eq!(cuda!(cuEventQuery(done)), Err(CUresult::CUDA_ERROR_NOT_READY));
    assert_eq!(cuda!(cuEventQuery(done)), Ok(()));
    assert_eq!(program.stand_in.count(Count::Waiting), 0);
    cuda!(cuStreamDestroy_v2(stream)).unwrap();
    cuda!(cuEventDestroy_v2(done)).unwrap();
    program.finish();
}

#[test]
fn the_null_stream_and_blocking_streams_wait_for_each_other() {
    let program = Program::start();
    let mut blocking = std::ptr::null_mut();
    cuda!(cuStreamCreate(&mut blocking, 0)).unwrap();
    let free = stream();
    let memory = allocate(3).unwrap();
    for (index, stream) in [blocking, free].into_iter().enumerate() {
        kernel(stream, move || bytes(memory, 3)[index] = index as u8);
    }
    kernel(std::ptr::null_mut(), move || bytes(memory, 3)[2] = 2);
    let mut seen = [9; 3];
    cuda!(cuMemcpyDtoH_v2(seen.as_mut_ptr().cast(), memory, 3)).unwrap();
    assert_eq!(seen, [0, FRESH, 2]);
    cuda!(cuCtxSynchronize()).unwrap();
    assert_eq!(program.stand_in.calls("cuCtxSynchronize"), 1);
    assert_eq!(program.stand_in.count(Count::Waiting), 0);
    cuda!(cuMemFree_v2(memory)).unwrap();
    for stream in [blocking, free] {
        cuda!(cuStreamDestroy_v2(stream)).unwrap();
    }
    program.finish();
}

#[test]
fn the_trace_shows_what_nothing_orders() {
    let program = Program::start();
    let (ring, lane, uploaded) = (stream(), stream(), event());
    let input = pinned(&[1; 50_000]);
    let memory = allocate(input.len()).unwrap();
    let run = |waits: bool| {
        program.stand_in.forget();
        upload(memory, input, ring).unwrap();
        cuda!(cuEventRecord(uploaded, ring)).unwrap();
        if waits {
            cuda!(cuStreamWaitEvent(lane, uploaded, 0)).unwrap();
        }
        kernel(lane, || StandIn::spend(5_000));
        cuda!(cuCtxSynchronize()).unwrap();
        program.stand_in.trace()
    };
    let beside = run(false);
    assert!(beside[0].overlaps(&beside[1]), "{beside:?}");
    let after = run(true);
    assert!(!after[0].overlaps(&after[1]), "{after:?}");
    assert_eq!([after[0].kind, after[1].kind], [Kind::Upload, Kind::Kernel]);
    assert_eq!((after[0].stream, after[0].to, after[0].len), (ring as u64, memory, 50_000));
    assert_eq!([after[0].end - after[0].start, after[1].end - after[1].start], [3_000, 5_000]);
    let start = event();
    cuda!(cuEventRecord(start, lane)).unwrap();
    kernel(lane, || StandIn::spend(2_000_000));
    cuda!(cuEventRecord(uploaded, lane)).unwrap();
    let mut took = 0.0;
    assert_eq!(cuda!(cuEventElapsedTime_v2(&mut took, start, uploaded)), Err(CUresult::CUDA_ERROR_NOT_READY));
    cuda!(cuEventSynchronize(uploaded)).unwrap();
    cuda!(cuEventElapsedTime_v2(&mut took, start, uploaded)).unwrap();
    assert_eq!(took, 2.0);
    cuda!(cuMemFree_v2(memory)).unwrap();
    free_pinned(input);
    for event in [uploaded, start] {
        cuda!(cuEventDestroy_v2(event)).unwrap();
    }
    for stream in [ring, lane] {
        cuda!(cuStreamDestroy_v2(stream)).unwrap();
    }
    program.finish();
}

/// A chain of kernels over two streams: each kernel adds its number to the result of the one
/// before.
fn chain(waits: bool) -> u64 {
    let (streams, handover) = ([stream(), stream()], event());
    let memory = allocate(8).unwrap();
    cuda!(cuMemsetD8Async(memory, 0, 8, streams[0])).unwrap();
    for step in 1..=20_u64 {
        let (from, to) = (streams[(step as usize + 1) % 2], streams[step as usize % 2]);
        cuda!(cuEventRecord(handover, from)).unwrap();
        if waits {
            cuda!(cuStreamWaitEvent(to, handover, 0)).unwrap();
        }
        kernel(to, move || {
            let memory = bytes(memory, 8);
            let value = u64::from_ne_bytes((&*memory).try_into().unwrap());
            memory.copy_from_slice(&value.wrapping_mul(3).wrapping_add(step).to_ne_bytes());
        });
    }
    cuda!(cuCtxSynchronize()).unwrap();
    let mut seen = [0; 8];
    cuda!(cuMemcpyDtoH_v2(seen.as_mut_ptr().cast(), memory, 8)).unwrap();
    cuda!(cuMemFree_v2(memory)).unwrap();
    cuda!(cuEventDestroy_v2(handover)).unwrap();
    for stream in streams {
        cuda!(cuStreamDestroy_v2(stream)).unwrap();
    }
    u64::from_ne_bytes(seen)
}

#[test]
fn a_random_order_keeps_what_waits_order_and_nothing_else() {
    let expected = (1..=20).fold(0_u64, |value, step| value.wrapping_mul(3).wrapping_add(step));
    let program = Program::start();
    let mut wrong = 0;
    for seed in 1..=20 {
        program.stand_in.set_order(Order::Random(seed));
        assert_eq!(chain(true), expected, "seed {seed}");
        wrong += usize::from(chain(false) != expected);
    }
    assert!(wrong > 0, "without waits, some order must give another result");
    program.stand_in.set_order(Order::Lazy);
    assert_eq!(chain(true), expected);
    program.finish();
}

#[test]
fn a_kernel_may_wait_for_another_thread_that_waits_for_its_own_stream() {
    let program = Program::start();
    let (a, b) = (stream() as usize, stream() as usize);
    let (go, wait) = mpsc::channel::<()>();
    kernel(a as _, move || wait.recv().unwrap());
    kernel(b as _, move || go.send(()).unwrap());
    let context = program.context as usize;
    std::thread::scope(|scope| {
        for stream in [a, b] {
            scope.spawn(move || {
                cuda!(cuCtxSetCurrent(context as _)).unwrap();
                cuda!(cuStreamSynchronize(stream as _)).unwrap();
            });
        }
    });
    for stream in [a, b] {
        cuda!(cuStreamDestroy_v2(stream as _)).unwrap();
    }
    program.finish();
}
