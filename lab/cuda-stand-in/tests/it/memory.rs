//! Device and host memory.

use cuda_stand_in::{Count, FRESH};
use cudarc::driver::sys::{self, CUresult};

use crate::program::{Program, allocate, cuda, download, event, free_pinned, pinned, stream, upload};

#[test]
fn pinned_memory_is_read_by_the_copy_and_pageable_at_the_call() {
    let program = Program::start();
    let stream = stream();
    let memory = allocate(2).unwrap();
    let (fixed, mut loose) = (pinned(&[1]), vec![1_u8]);
    upload(memory, fixed, stream).unwrap();
    upload(memory + 1, &loose, stream).unwrap();
    fixed[0] = 2;
    loose[0] = 2;
    let mut seen = [0; 2];
    download(&mut seen, memory, stream).unwrap();
    assert_eq!(seen, [2, 1], "a download to pageable memory returns when it is done");
    assert_eq!(program.stand_in.calls("pageable upload"), 1);
    assert_eq!(program.stand_in.calls("pageable download"), 1);

    cuda!(cuMemHostRegister_v2(loose.as_mut_ptr().cast(), 1, 0)).unwrap();
    upload(memory + 1, &loose, stream).unwrap();
    loose[0] = 3;
    download(&mut seen, memory, stream).unwrap();
    assert_eq!(seen, [2, 3]);
    assert_eq!(
        cuda!(cuMemHostRegister_v2(loose.as_mut_ptr().cast(), 1, 0)),
        Err(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
    );
    cuda!(cuMemHostUnregister(loose.as_mut_ptr().cast())).unwrap();
    cuda!(cuMemFree_v2(memory)).unwrap();
    cuda!(cuStreamDestroy_v2(stream)).unwrap();
    free_pinned(fixed);
    program.finish();
}

#[test]
fn memory_is_counted_and_runs_out() {
    let stand_in = cuda_stand_in::StandIn::lock();
    stand_in.set_devices(1, 132, 1 << 20);
    let program = Program::start_on(stand_in);
    let first = allocate(1 << 19).unwrap();
    let (mut free, mut total) = (0, 0);
    cuda!(cuMemGetInfo_v2(&mut free, &mut total)).unwrap();
    assert_eq!((free, total), (1 << 19, 1 << 20));
    assert_eq!(allocate((1 << 19) + 1), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    program.stand_in.fail_allocation(2);
    let second = allocate(8).unwrap();
    assert_eq!(allocate(8), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    program.stand_in.fail_allocations_above(100);
    let third = allocate(100).unwrap();
    assert_eq!(allocate(101), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    assert_eq!(program.stand_in.count(Count::Allocations), 3);
    assert_eq!(program.stand_in.leaks().len(), 4, "three allocations and the context");
    for address in [first, second, third] {
        cuda!(cuMemFree_v2(address)).unwrap();
    }
    program.finish();
}

#[test]
fn memory_freed_in_the_order_of_a_stream_is_gone_behind_that_place() {
    let program = Program::start();
    let stream = stream();
    let mut address = 0;
    cuda!(cuMemAllocAsync(&mut address, 1, stream)).unwrap();
    let host = pinned(&[5]);
    upload(address, host, stream).unwrap();
    cuda!(cuMemFreeAsync(address, stream)).unwrap();
    assert_eq!(cuda!(cuMemFree_v2(address)), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(program.stand_in.mistakes().len(), 1, "freed twice");
    cuda!(cuStreamSynchronize(stream)).unwrap();
    assert_eq!(program.stand_in.count(Count::Bytes), 0);
    assert_eq!(upload(address, host, stream), Err(CUresult::CUDA_ERROR_INVALID_VALUE), "no longer memory");
    program.stand_in.forget();
    free_pinned(host);
    cuda!(cuStreamDestroy_v2(stream)).unwrap();
    program.finish();
}

#[test]
fn memory_made_in_the_order_of_a_stream_is_not_there_before_that_place() {
    let program = Program::start();
    let (maker, user, made) = (stream(), stream(), event());
    let mut address = 0;
    cuda!(cuMemAllocAsync(&mut address, 1, maker)).unwrap();
    cuda!(cuEventRecord(made, maker)).unwrap();
    let host = pinned(&[5]);
    cuda!(cuStreamWaitEvent(user, made, 0)).unwrap();
    upload(address, host, user).unwrap();
    cuda!(cuStreamSynchronize(user)).unwrap();
    cuda!(cuMemAllocAsync(&mut address, 1, maker)).unwrap();
    upload(address, host, user).unwrap();
    assert_eq!(cuda!(cuStreamSynchronize(user)), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    assert!(program.stand_in.mistakes()[1].contains("not ordered after"), "{:?}", program.stand_in.mistakes());
}

#[test]
fn addresses_say_what_they_are() {
    let program = Program::start();
    let (memory, host) = (allocate(100).unwrap(), pinned(&[0; 10]));
    let kind = |address: u64| {
        let mut kind = 0_u32;
        let memory_type = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        cuda!(cuPointerGetAttribute((&raw mut kind).cast(), memory_type, address)).map(|()| kind)
    };
    assert_eq!(kind(memory + 99), Ok(2));
    assert_eq!(kind(memory + 100), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(kind(host.as_ptr() as u64), Ok(1));
    let local = 0_u8;
    assert_eq!(kind(&raw const local as u64), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    cuda!(cuMemFree_v2(memory)).unwrap();
    free_pinned(host);
    program.finish();
}

#[test]
fn the_host_reads_device_memory_only_where_a_test_allows_it() {
    let program = Program::start();
    program.stand_in.set_readable(true);
    let memory = allocate(4).unwrap();
    // SAFETY: four bytes of memory that the stand-in has mapped readable at its own address.
    assert_eq!(unsafe { (memory as *const [u8; 4]).read() }, [FRESH; 4]);
    assert_ne!(memory, cuda_stand_in::StandIn::view(memory) as u64);
    cuda!(cuMemFree_v2(memory)).unwrap();
    program.finish();
}
