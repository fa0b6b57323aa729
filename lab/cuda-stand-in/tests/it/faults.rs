//! Faults, and their effects on a program.

use cuda_stand_in::StandIn;
use cudarc::driver::sys::CUresult;

use crate::program::{Program, allocate, cuda, download, event, kernel, pinned, stream, upload};

const ILLEGAL_ADDRESS: u32 = 700;
const ECC: u32 = 214;

#[test]
fn a_failed_kernel_fails_everything_after_it_until_its_context_goes() {
    let program = Program::start();
    let (lane, other, done) = (stream(), stream(), event());
    let memory = allocate(1).unwrap();
    program.stand_in.fail_work(Some(lane as u64), 2, ILLEGAL_ADDRESS);
    kernel(other, || ());
    StandIn::touch(lane as u64, memory, 1, false).unwrap();
    kernel(lane, || ());
    kernel(lane, || panic!("it fails instead"));
    kernel(lane, || panic!("nothing runs after it"));
    cuda!(cuEventRecord(done, lane)).unwrap();
    cuda!(cuStreamSynchronize(other)).unwrap();
    StandIn::touch(other as u64, memory, 1, false).unwrap();
    assert_eq!(cuda!(cuEventSynchronize(done)), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    assert_eq!(allocate(1), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    assert_eq!(cuda!(cuStreamSynchronize(other)), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    // A free also returns the error, and still frees.
    assert_eq!(cuda!(cuMemFree_v2(memory)), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    assert_eq!(cuda!(cuEventDestroy_v2(done)), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    for stream in [lane, other] {
        assert_eq!(cuda!(cuStreamDestroy_v2(stream)), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    }
    assert_eq!(program.stand_in.leaks().len(), 1, "the context");
    cuda!(cuDevicePrimaryCtxRelease_v2(0)).unwrap();
    program.stand_in.assert_clean();
    let mut context = std::ptr::null_mut();
    cuda!(cuDevicePrimaryCtxRetain(&mut context, 0)).unwrap();
    cuda!(cuCtxSetCurrent(context)).unwrap();
    let memory = allocate(1).unwrap();
    cuda!(cuMemFree_v2(memory)).unwrap();
    program.finish();
}

#[test]
fn a_lost_device_stays_lost() {
    let program = Program::start();
    program.stand_in.lose_device(0, ECC);
    assert_eq!(allocate(1), Err(CUresult::CUDA_ERROR_ECC_UNCORRECTABLE));
    cuda!(cuDevicePrimaryCtxRelease_v2(0)).unwrap();
    let mut context = std::ptr::null_mut();
    assert_eq!(cuda!(cuDevicePrimaryCtxRetain(&mut context, 0)), Err(CUresult::CUDA_ERROR_ECC_UNCORRECTABLE));
    program.stand_in.revive_device(0);
    cuda!(cuDevicePrimaryCtxRetain(&mut context, 0)).unwrap();
    program.finish();
}

#[test]
fn memory_freed_under_a_copy_is_an_illegal_address() {
    let program = Program::start();
    let stream = stream();
    let (memory, host) = (allocate(1).unwrap(), pinned(&[1]));
    upload(memory, host, stream).unwrap();
    cuda!(cuMemFree_v2(memory)).unwrap();
    assert_eq!(cuda!(cuStreamSynchronize(stream)), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    let mistakes = program.stand_in.mistakes();
    assert!(mistakes[0].contains("cuMemFree of"), "{mistakes:?}");
    assert!(mistakes[1].contains("no longer memory"), "{mistakes:?}");
}

#[test]
fn host_memory_unpinned_under_a_copy_is_an_illegal_address() {
    let program = Program::start();
    let stream = stream();
    let (memory, mut host) = (allocate(1).unwrap(), vec![1_u8]);
    cuda!(cuMemHostRegister_v2(host.as_mut_ptr().cast(), 1, 0)).unwrap();
    upload(memory, &host, stream).unwrap();
    cuda!(cuMemHostUnregister(host.as_mut_ptr().cast())).unwrap();
    assert_eq!(cuda!(cuStreamSynchronize(stream)), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    let mistakes = program.stand_in.mistakes();
    assert!(mistakes[0].contains("cuMemHostUnregister of"), "{mistakes:?}");
    assert!(mistakes[1].contains("no longer pinned"), "{mistakes:?}");
}

#[test]
fn what_is_destroyed_cannot_be_used() {
    let program = Program::start();
    let (stream, done) = (stream(), event());
    cuda!(cuStreamDestroy_v2(stream)).unwrap();
    cuda!(cuEventDestroy_v2(done)).unwrap();
    assert_eq!(cuda!(cuStreamSynchronize(stream)), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    assert_eq!(cuda!(cuStreamDestroy_v2(stream)), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    assert_eq!(cuda!(cuEventSynchronize(done)), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    let mistakes = program.stand_in.mistakes();
    assert_eq!(mistakes.len(), 3, "{mistakes:?}");
    assert!(mistakes[2].contains("destroyed event"), "{mistakes:?}");
    program.stand_in.forget();
    program.finish();
}

#[test]
fn addresses_that_are_none_are_refused() {
    let program = Program::start();
    let memory = allocate(8).unwrap();
    let mut host = [0; 9];
    assert_eq!(download(&mut host, memory, std::ptr::null_mut()), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    // A device address where a host address belongs.
    let wrong = cuda!(cuMemcpyHtoDAsync_v2(memory, memory as *const _, 8, std::ptr::null_mut()));
    assert_eq!(wrong, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    cuda!(cuMemFree_v2(memory)).unwrap();
    assert_eq!(cuda!(cuMemFree_v2(memory)), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(program.stand_in.mistakes().len(), 3);
    program.stand_in.forget();
    program.finish();
}

#[test]
fn a_thread_without_a_context_is_told_so() {
    let program = Program::start();
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(allocate(1), Err(CUresult::CUDA_ERROR_INVALID_CONTEXT)));
    });
    assert_eq!(program.stand_in.mistakes().len(), 1);
    program.stand_in.forget();
    program.finish();
}

#[test]
fn a_kernel_may_not_call_the_driver() {
    let program = Program::start();
    let stream = stream();
    kernel(stream, || assert_eq!(allocate(1), Err(CUresult::CUDA_ERROR_NOT_PERMITTED)));
    cuda!(cuStreamSynchronize(stream)).unwrap();
    assert_eq!(program.stand_in.mistakes().len(), 1);
}

#[test]
fn a_kernel_that_panics_is_a_mistake() {
    let program = Program::start();
    kernel(std::ptr::null_mut(), || panic!("as a test wants"));
    cuda!(cuCtxSynchronize()).unwrap();
    assert_eq!(program.stand_in.mistakes(), ["a kernel panicked: as a test wants"]);
    assert_eq!(StandIn::kernel(0x30, || ()), Err(CUresult::CUDA_ERROR_INVALID_HANDLE as u32));
}

#[test]
fn a_call_fails_when_a_test_says_so() {
    let program = Program::start();
    program.stand_in.fail_call("cuMemAlloc_v2", 2, 999);
    let memory = allocate(1).unwrap();
    assert_eq!(allocate(1), Err(CUresult::CUDA_ERROR_UNKNOWN));
    cuda!(cuMemFree_v2(memory)).unwrap();
    assert_eq!(program.stand_in.calls("cuMemAlloc_v2"), 2);
    program.finish();
}
