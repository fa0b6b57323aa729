//! Stream capture and graphs.

use std::ffi::c_void;
use std::ptr;

use cuda_stand_in::{Count, StandIn};
use cudarc::driver::sys::{CUgraph, CUgraphExec, CUresult, CUstream, CUstreamCaptureMode};

use crate::program::{Program, allocate, bytes, cuda, download, event, free_pinned, kernel, pinned, stream, upload};

const GLOBAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
pub const THREAD_LOCAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
const MODES: [CUstreamCaptureMode; 3] = [GLOBAL, THREAD_LOCAL, RELAXED];

pub fn begin(stream: CUstream, mode: CUstreamCaptureMode) {
    cuda!(cuStreamBeginCapture_v2(stream, mode)).unwrap();
}

pub fn end(stream: CUstream) -> Result<CUgraph, CUresult> {
    let mut graph = ptr::dangling_mut();
    let ended = cuda!(cuStreamEndCapture(stream, &mut graph));
    assert_eq!(graph.is_null(), ended.is_err());
    ended.map(|()| graph)
}

/// Makes an executable graph, and destroys the recorded graph.
fn ready(graph: CUgraph) -> CUgraphExec {
    let mut executable = ptr::null_mut();
    cuda!(cuGraphInstantiateWithFlags(&mut executable, graph, 0)).unwrap();
    cuda!(cuGraphDestroy(graph)).unwrap();
    executable
}

pub fn destroy(streams: &[CUstream]) {
    for stream in streams {
        cuda!(cuStreamDestroy_v2(*stream)).unwrap();
    }
}

/// Plays a kernel that may run again and again: doubles the byte at an address.
unsafe extern "C" fn double(address: *mut c_void) {
    let byte = &mut bytes(address as u64, 1)[0];
    *byte = byte.wrapping_mul(2);
}

pub fn allocate_in(stream: CUstream, len: usize) -> Result<u64, CUresult> {
    let mut address = 0;
    cuda!(cuMemAllocAsync(&mut address, len, stream)).map(|()| address)
}

pub fn enqueue_double(stream: CUstream, address: u64) -> Result<(), CUresult> {
    cuda!(cuLaunchHostFunc(stream, Some(double), address as *mut c_void))
}

#[test]
fn each_launch_runs_what_was_recorded() {
    for mode in MODES {
        let program = Program::start();
        let (lane, other) = (stream(), stream());
        let (input, output) = (pinned(&[3]), pinned(&[0]));
        let memory = allocate(1).unwrap();
        let before = program.stand_in.count(Count::Waiting);
        begin(lane, mode);
        let mut status = cudarc::driver::sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        cuda!(cuStreamIsCapturing(lane, &mut status)).unwrap();
        assert_eq!(status as u32, 1);
        upload(memory, input, lane).unwrap();
        enqueue_double(lane, memory).unwrap();
        download(output, memory, lane).unwrap();
        // Work on other streams runs meanwhile.
        kernel(other, || ());
        cuda!(cuStreamSynchronize(other)).unwrap();
        let executable = ready(end(lane).unwrap());
        cuda!(cuStreamSynchronize(lane)).unwrap();
        assert_eq!(
            (output[0], program.stand_in.count(Count::Waiting)),
            (0, before),
            "nothing runs while it is recorded"
        );
        program.stand_in.forget();
        for (number, value) in [(1, 3), (2, 50)] {
            input[0] = value;
            cuda!(cuGraphLaunch(executable, lane)).unwrap();
            assert_ne!(output[0], 2 * value, "{mode:?}: it runs when waited for");
            cuda!(cuStreamSynchronize(lane)).unwrap();
            assert_eq!((output[0], program.stand_in.trace().len()), (2 * value, 3 * number), "{mode:?}");
        }
        // A launch under way goes on.
        input[0] = 7;
        cuda!(cuGraphLaunch(executable, lane)).unwrap();
        cuda!(cuGraphExecDestroy(executable)).unwrap();
        cuda!(cuStreamSynchronize(lane)).unwrap();
        assert_eq!((output[0], program.stand_in.calls("cuGraphLaunch")), (14, 3));
        cuda!(cuMemFree_v2(memory)).unwrap();
        free_pinned(input);
        free_pinned(output);
        destroy(&[lane, other]);
        program.finish();
    }
}

/// A call that is made while a stream captures.
type Call<'a> = &'a dyn Fn() -> Result<(), CUresult>;

#[test]
fn what_disturbs_a_capture_fails_and_spoils_it() {
    use CUresult::*;
    let program = Program::start();
    let (lane, other, marked) = (stream(), stream(), event());
    let memory = allocate(8).unwrap();
    let pageable = [0; 8];
    // A call, the code that it fails with in the strictest mode, and its result in the most relaxed
    // mode.
    let forbidden: [(&str, CUresult, Result<(), CUresult>, Call<'_>); 10] = [
        (
            "waits for the stream",
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
            &|| cuda!(cuStreamSynchronize(lane)),
        ),
        (
            "waits for the device",
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
            &|| cuda!(cuCtxSynchronize()),
        ),
        ("waits for its event", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, Err(CUDA_ERROR_CAPTURED_EVENT), &|| {
            cuda!(cuEventRecord(marked, lane)).unwrap();
            cuda!(cuEventSynchronize(marked))
        }),
        ("asks its event", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, Err(CUDA_ERROR_CAPTURED_EVENT), &|| {
            cuda!(cuEventRecord(marked, lane)).unwrap();
            cuda!(cuEventQuery(marked))
        }),
        ("takes memory", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, Ok(()), &|| cuda!(cuMemFree_v2(allocate(8)?))),
        ("pins memory", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, Ok(()), &|| {
            let mut start = ptr::null_mut();
            cuda!(cuMemHostAlloc(&mut start, 8, 0))?;
            cuda!(cuMemFreeHost(start))
        }),
        ("frees memory that is not the graph's", CUDA_ERROR_INVALID_VALUE, Err(CUDA_ERROR_INVALID_VALUE), &|| {
            cuda!(cuMemFreeAsync(memory, lane))
        }),
        ("frees memory of the graph twice", CUDA_ERROR_INVALID_VALUE, Err(CUDA_ERROR_INVALID_VALUE), &|| {
            let address = allocate_in(lane, 8)?;
            cuda!(cuMemFreeAsync(address, lane))?;
            cuda!(cuMemFreeAsync(address, lane))
        }),
        (
            "reads pageable memory",
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
            &|| upload(memory, &pageable, lane),
        ),
        (
            "waits for what is not captured",
            CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
            Err(CUDA_ERROR_STREAM_CAPTURE_ISOLATION),
            &|| {
                cuda!(cuEventRecord(marked, other)).unwrap();
                cuda!(cuStreamWaitEvent(lane, marked, 0))
            },
        ),
    ];
    for (what, strict, relaxed, call) in forbidden {
        for mode in MODES {
            begin(lane, mode);
            let expected = if mode == RELAXED { relaxed } else { Err(strict) };
            assert_eq!(call(), expected, "{what}, {mode:?}");
            let ended = end(lane);
            match expected {
                Ok(()) => cuda!(cuGraphDestroy(ended.unwrap())).unwrap(),
                Err(_) => assert_eq!(ended, Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED), "{what}, {mode:?}"),
            }
            // The stream and the event are as before.
            cuda!(cuEventRecord(marked, lane)).unwrap();
            cuda!(cuEventSynchronize(marked)).unwrap();
        }
    }
    cuda!(cuMemFree_v2(memory)).unwrap();
    cuda!(cuEventDestroy_v2(marked)).unwrap();
    destroy(&[lane, other]);
    program.finish();
}

#[test]
fn the_mode_says_whose_calls_disturb() {
    use CUresult::*;
    let program = Program::start();
    let lane = stream();
    let context = program.context as usize;
    let beside = move || {
        cuda!(cuCtxSetCurrent(context as _)).unwrap();
        cuda!(cuMemFree_v2(allocate(8)?))
    };
    for (mode, allowed) in [(GLOBAL, false), (THREAD_LOCAL, true), (RELAXED, true)] {
        begin(lane, mode);
        assert_eq!(std::thread::spawn(beside).join().unwrap().is_ok(), allowed, "{mode:?}");
        assert_eq!(end(lane).map(|graph| cuda!(cuGraphDestroy(graph)).unwrap()).is_ok(), allowed);
    }
    // Another thread may end only a relaxed capture.
    for (mode, ended) in [(GLOBAL, Err(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)), (RELAXED, Ok(()))] {
        begin(lane, mode);
        let at = lane as usize;
        let run = move || {
            cuda!(cuCtxSetCurrent(context as _)).unwrap();
            end(at as CUstream).map(|graph| cuda!(cuGraphDestroy(graph)).unwrap())
        };
        assert_eq!(std::thread::spawn(run).join().unwrap(), ended);
        assert!(end(lane).is_err(), "spoilt, or ended before");
    }
    destroy(&[lane]);
    program.finish();
}

#[test]
fn captures_begin_and_end_once_and_not_in_the_null_stream() {
    use CUresult::*;
    let program = Program::start();
    let lane = stream();
    let mut blocking = ptr::null_mut();
    cuda!(cuStreamCreate(&mut blocking, 0)).unwrap();
    let null = ptr::null_mut();
    assert_eq!(cuda!(cuStreamBeginCapture_v2(null, RELAXED)), Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
    assert_eq!(end(lane), Err(CUDA_ERROR_ILLEGAL_STATE));
    begin(lane, RELAXED);
    assert_eq!(cuda!(cuStreamBeginCapture_v2(lane, RELAXED)), Err(CUDA_ERROR_ILLEGAL_STATE));
    assert_eq!(end(lane), Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    // The null stream waits only for blocking streams.
    let memory = allocate(1).unwrap();
    for (stream, on_null) in [(lane, Ok(())), (blocking, Err(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT))] {
        begin(stream, RELAXED);
        assert_eq!(enqueue_double(null, memory), on_null);
        assert_eq!(end(stream).map(|graph| cuda!(cuGraphDestroy(graph)).unwrap()).is_ok(), on_null.is_ok());
    }
    cuda!(cuStreamSynchronize(null)).unwrap();
    cuda!(cuMemFree_v2(memory)).unwrap();
    destroy(&[lane, blocking]);
    program.finish();
}

#[test]
fn streams_join_a_capture_and_have_to_be_joined() {
    use CUresult::*;
    let program = Program::start();
    let (lane, side, third) = (stream(), stream(), stream());
    let (fork, join) = (event(), event());
    let memory = allocate(1).unwrap();
    let branch = |joins: bool| {
        begin(lane, THREAD_LOCAL);
        cuda!(cuMemsetD8Async(memory, 1, 1, lane)).unwrap();
        cuda!(cuEventRecord(fork, lane)).unwrap();
        cuda!(cuStreamWaitEvent(side, fork, 0)).unwrap();
        enqueue_double(side, memory).unwrap();
        cuda!(cuEventRecord(join, side)).unwrap();
        if joins {
            cuda!(cuStreamWaitEvent(lane, join, 0)).unwrap();
        }
        enqueue_double(lane, memory).unwrap();
        end(lane)
    };
    assert_eq!(branch(false), Err(CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
    let executable = ready(branch(true).unwrap());
    cuda!(cuGraphLaunch(executable, third)).unwrap();
    cuda!(cuStreamSynchronize(third)).unwrap();
    assert_eq!(bytes(memory, 1)[0], 4);
    cuda!(cuGraphExecDestroy(executable)).unwrap();
    // The events belong to a capture that is over.
    assert_eq!(cuda!(cuEventQuery(join)), Err(CUDA_ERROR_CAPTURED_EVENT));
    assert_eq!(cuda!(cuStreamWaitEvent(third, join, 0)), Err(CUDA_ERROR_CAPTURED_EVENT));
    // The capture ends in a stream that only joined; two captures do not become one.
    begin(lane, THREAD_LOCAL);
    cuda!(cuEventRecord(fork, lane)).unwrap();
    cuda!(cuStreamWaitEvent(side, fork, 0)).unwrap();
    begin(third, THREAD_LOCAL);
    assert_eq!(cuda!(cuStreamWaitEvent(third, fork, 0)), Err(CUDA_ERROR_STREAM_CAPTURE_MERGE));
    assert_eq!(end(third), Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    assert_eq!(enqueue_double(side, memory), Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    assert_eq!(end(side), Err(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED));
    assert_eq!(end(lane), Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    cuda!(cuMemFree_v2(memory)).unwrap();
    for event in [fork, join] {
        cuda!(cuEventDestroy_v2(event)).unwrap();
    }
    destroy(&[lane, side, third]);
    program.finish();
}

/// A graph of one kernel that writes a byte.
fn writer(lane: CUstream, memory: u64) -> CUgraphExec {
    begin(lane, THREAD_LOCAL);
    StandIn::touch(lane as u64, memory, 1, true).unwrap();
    enqueue_double(lane, memory).unwrap();
    ready(end(lane).unwrap())
}

#[test]
fn each_launch_is_checked_for_its_order() {
    let program = Program::start();
    let (lane, other) = (stream(), stream());
    let memory = allocate(1).unwrap();
    cuda!(cuMemsetD8Async(memory, 1, 1, lane)).unwrap();
    let (first, second) = (writer(lane, memory), writer(lane, memory));
    // Launches of one graph are in order, on any streams.
    for stream in [lane, other, lane] {
        cuda!(cuGraphLaunch(first, stream)).unwrap();
    }
    assert_eq!(program.stand_in.mistakes(), Vec::<String>::new());
    for round in 1..=2 {
        cuda!(cuGraphLaunch(second, other)).unwrap();
        assert_eq!(program.stand_in.mistakes().len(), round, "{:?}", program.stand_in.mistakes());
        cuda!(cuCtxSynchronize()).unwrap();
        cuda!(cuGraphLaunch(first, lane)).unwrap();
    }
    program.stand_in.forget();
    cuda!(cuCtxSynchronize()).unwrap();
    assert_eq!(bytes(memory, 1)[0], 128);
    for executable in [first, second] {
        cuda!(cuGraphExecDestroy(executable)).unwrap();
    }
    cuda!(cuMemFree_v2(memory)).unwrap();
    destroy(&[lane, other]);
    program.finish();
}

#[test]
fn graphs_are_destroyed_once_and_not_used_afterwards() {
    use CUresult::*;
    let program = Program::start();
    let lane = stream();
    let memory = allocate(1).unwrap();
    begin(lane, THREAD_LOCAL);
    let graph = end(lane).unwrap();
    let executable = writer(lane, memory);
    let leaks = program.stand_in.leaks().join(", ");
    assert!(leaks.contains("executable graph 0x") && leaks.contains(", graph 0x"), "{leaks}");
    cuda!(cuGraphDestroy(graph)).unwrap();
    cuda!(cuGraphExecDestroy(executable)).unwrap();
    assert_eq!(cuda!(cuGraphDestroy(graph)), Err(CUDA_ERROR_INVALID_VALUE));
    assert_eq!(cuda!(cuGraphInstantiateWithFlags(&mut ptr::null_mut(), graph, 0)), Err(CUDA_ERROR_INVALID_VALUE));
    assert_eq!(cuda!(cuGraphLaunch(executable, lane)), Err(CUDA_ERROR_INVALID_VALUE));
    assert_eq!(cuda!(cuGraphExecDestroy(executable)), Err(CUDA_ERROR_INVALID_VALUE));
    let mistakes = program.stand_in.mistakes();
    assert!(mistakes.len() == 4 && mistakes.iter().all(|mistake| mistake.contains("destroyed")), "{mistakes:?}");
    program.stand_in.forget();
    cuda!(cuMemFree_v2(memory)).unwrap();
    destroy(&[lane]);
    program.finish();
}

#[test]
fn memory_of_a_graph_has_to_be_there_at_its_launch() {
    let program = Program::start();
    let lane = stream();
    let memory = allocate(1).unwrap();
    let executable = writer(lane, memory);
    cuda!(cuMemFree_v2(memory)).unwrap();
    cuda!(cuGraphLaunch(executable, lane)).unwrap();
    assert_eq!(cuda!(cuStreamSynchronize(lane)), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    let mistakes = program.stand_in.mistakes();
    assert!(mistakes.len() == 1 && mistakes[0].contains("no longer memory"), "{mistakes:?}");
}

#[test]
fn kernels_of_a_graph_begin_without_the_host() {
    let program = Program::start();
    program.stand_in.set_launch_time(5_000);
    let (lane, before, after) = (stream(), event(), event());
    let memory = allocate(1).unwrap();
    let executable = writer(lane, memory);
    let time = |enqueue: Call<'_>| {
        cuda!(cuEventRecord(before, lane)).unwrap();
        enqueue().unwrap();
        cuda!(cuEventRecord(after, lane)).unwrap();
        cuda!(cuEventSynchronize(after)).unwrap();
        let mut milliseconds = 0.0;
        cuda!(cuEventElapsedTime_v2(&mut milliseconds, before, after)).unwrap();
        milliseconds
    };
    cuda!(cuMemsetD8Async(memory, 1, 1, lane)).unwrap();
    assert_eq!(time(&|| enqueue_double(lane, memory)), 0.015);
    assert_eq!(time(&|| cuda!(cuGraphLaunch(executable, lane))), 0.01);
    cuda!(cuGraphExecDestroy(executable)).unwrap();
    for event in [before, after] {
        cuda!(cuEventDestroy_v2(event)).unwrap();
    }
    cuda!(cuMemFree_v2(memory)).unwrap();
    destroy(&[lane]);
    program.finish();
}

/// Memory that is allocated and freed during a capture belongs to the graph. It has one address,
/// and exists from its allocation to its free in each launch.
#[test]
fn a_graph_may_have_memory_of_its_own() {
    let program = Program::start();
    let lane = stream();
    let output = pinned(&[0]);
    let before = program.stand_in.count(Count::Bytes);
    begin(lane, THREAD_LOCAL);
    let memory = allocate_in(lane, 4096).unwrap();
    cuda!(cuMemsetD8Async(memory, 3, 4096, lane)).unwrap();
    enqueue_double(lane, memory).unwrap();
    download(output, memory, lane).unwrap();
    cuda!(cuMemFreeAsync(memory, lane)).unwrap();
    let graph = end(lane).unwrap();
    let mut executables = [ptr::null_mut(); 2];
    cuda!(cuGraphInstantiateWithFlags(&mut executables[0], graph, 0)).unwrap();
    assert!(cuda!(cuGraphInstantiateWithFlags(&mut executables[1], graph, 0)).is_err(), "there may be one at a time");
    cuda!(cuGraphDestroy(graph)).unwrap();
    assert!(program.stand_in.count(Count::Bytes) > before);
    program.stand_in.forget();
    for _ in 0..3 {
        output[0] = 0;
        cuda!(cuGraphLaunch(executables[0], lane)).unwrap();
        cuda!(cuStreamSynchronize(lane)).unwrap();
        assert_eq!(output[0], 6);
    }
    // Two launches are under way when the graph is destroyed.
    output[0] = 0;
    cuda!(cuGraphLaunch(executables[0], lane)).unwrap();
    cuda!(cuGraphLaunch(executables[0], lane)).unwrap();
    cuda!(cuGraphExecDestroy(executables[0])).unwrap();
    cuda!(cuStreamSynchronize(lane)).unwrap();
    assert_eq!((output[0], program.stand_in.count(Count::Bytes)), (6, before));
    assert_eq!(program.stand_in.mistakes(), Vec::<String>::new());
    free_pinned(output);
    destroy(&[lane]);
    program.finish();
}

#[test]
fn memory_of_a_graph_is_not_there_between_its_launches() {
    let program = Program::start();
    let lane = stream();
    begin(lane, THREAD_LOCAL);
    let memory = allocate_in(lane, 64).unwrap();
    cuda!(cuMemFreeAsync(memory, lane)).unwrap();
    let executable = ready(end(lane).unwrap());
    cuda!(cuGraphLaunch(executable, lane)).unwrap();
    cuda!(cuMemsetD8Async(memory, 1, 1, lane)).unwrap();
    assert_eq!(cuda!(cuStreamSynchronize(lane)), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    let mistakes = program.stand_in.mistakes();
    assert!(mistakes.len() == 1 && mistakes[0].contains("not ordered after its cuMemAllocAsync"), "{mistakes:?}");
}

#[test]
fn memory_that_a_graph_leaves_is_freed_before_its_next_launch() {
    let program = Program::start();
    let lane = stream();
    let before = program.stand_in.count(Count::Bytes);
    begin(lane, THREAD_LOCAL);
    let memory = allocate_in(lane, 64).unwrap();
    cuda!(cuMemsetD8Async(memory, 1, 64, lane)).unwrap();
    let executable = ready(end(lane).unwrap());
    for _ in 0..2 {
        cuda!(cuGraphLaunch(executable, lane)).unwrap();
        assert_eq!(cuda!(cuGraphLaunch(executable, lane)), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
        cuda!(cuMemFreeAsync(memory, lane)).unwrap();
    }
    let mistakes = program.stand_in.mistakes();
    assert!(mistakes.len() == 2 && mistakes.iter().all(|what| what.contains("was not freed")), "{mistakes:?}");
    program.stand_in.forget();
    // Memory that the last launch has left stays when the graph goes.
    cuda!(cuGraphLaunch(executable, lane)).unwrap();
    cuda!(cuGraphExecDestroy(executable)).unwrap();
    cuda!(cuStreamSynchronize(lane)).unwrap();
    assert!(program.stand_in.count(Count::Bytes) > before);
    cuda!(cuMemFree_v2(memory)).unwrap();
    assert_eq!(program.stand_in.count(Count::Bytes), before);
    destroy(&[lane]);
    program.finish();
}
