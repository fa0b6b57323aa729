//! Loading, devices, contexts and their shares.

use std::ffi::CStr;

use cuda_stand_in::{Count, StandIn};
use cudarc::driver::sys::{self, CUdevResource, CUresult};

use crate::program::{Program, cuda};

#[test]
fn cudarc_finds_the_library_by_the_drivers_name() {
    let _stand_in = StandIn::lock();
    // SAFETY: looks for a driver, which the stand-in has loaded itself as.
    assert!(unsafe { sys::is_culib_present() });
    let mut version = 0;
    cuda!(cuDriverGetVersion(&mut version)).unwrap();
    assert_eq!(version, 13_000);
    assert_eq!(cuda!(cuDeviceGetCount(&mut version)), Err(CUresult::CUDA_ERROR_NOT_INITIALIZED));
    let folder = cuda_stand_in::folder().unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        assert!(folder.join(name).is_file(), "{name}");
    }
}

#[test]
fn devices_are_as_a_test_sets_them() {
    let stand_in = StandIn::lock();
    stand_in.set_devices_of(0, 0, 0, (0, 0), "");
    assert_eq!(cuda!(cuInit(0)), Err(CUresult::CUDA_ERROR_NO_DEVICE));
    stand_in.set_devices_of(2, 114, 1 << 30, (8, 9), "a card");
    cuda!(cuInit(0)).unwrap();
    let (mut count, mut value, mut memory) = (0, 0, 0);
    cuda!(cuDeviceGetCount(&mut count)).unwrap();
    let major = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
    cuda!(cuDeviceGetAttribute(&mut value, major, 1)).unwrap();
    cuda!(cuDeviceTotalMem_v2(&mut memory, 1)).unwrap();
    assert_eq!((count, value, memory), (2, 8, 1 << 30));
    let mut name = [0; 5];
    cuda!(cuDeviceGetName(name.as_mut_ptr(), 5, 1)).unwrap();
    // SAFETY: the driver ends the text within the buffer.
    assert_eq!(unsafe { CStr::from_ptr(name.as_ptr()) }, c"a ca");
    let mut device = 0;
    assert_eq!(cuda!(cuDeviceGet(&mut device, 2)), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
}

#[test]
fn another_process_finds_it_by_its_folder_and_its_environment() {
    const NAME: &str = "device::another_process_finds_it_by_its_folder_and_its_environment";
    let folder = cuda_stand_in::folder().unwrap();
    if std::env::var_os("LD_LIBRARY_PATH").is_some_and(|path| path == folder.as_os_str()) {
        cuda!(cuInit(0)).unwrap();
        let mut count = 0;
        cuda!(cuDeviceGetCount(&mut count)).unwrap();
        assert_eq!(count, 3);
        return;
    }
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME])
        .env("LD_LIBRARY_PATH", folder)
        .env("CUDA_STAND_IN_DEVICES", "3")
        .env("CUDA_STAND_IN_SEED", "1")
        .status();
    assert!(status.unwrap().success());
}

/// Splits the device of 132 multiprocessors. Returns the size of a group, the number of groups, and
/// the number of remaining multiprocessors.
fn split(input: &CUdevResource, wanted: u32, least: u32) -> Result<(u32, u32, u32), CUresult> {
    // SAFETY: zero is a value of each of its fields.
    let mut parts: [CUdevResource; 80] = unsafe { std::mem::zeroed() };
    let (mut groups, mut rest) = (wanted, parts[0]);
    cuda!(cuDevSmResourceSplitByCount(parts.as_mut_ptr(), &mut groups, input, &mut rest, 0, least))?;
    // SAFETY: both are resources of multiprocessors.
    let (size, left) = unsafe { (parts[0].__bindgen_anon_1.sm.smCount, rest.__bindgen_anon_1.sm.smCount) };
    Ok((size, groups, left))
}

#[test]
fn multiprocessors_are_shared_out_in_grains() {
    let program = Program::start();
    // SAFETY: zero is a value of each of its fields.
    let mut whole: CUdevResource = unsafe { std::mem::zeroed() };
    cuda!(cuDeviceGetDevResource(0, &mut whole, sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM)).unwrap();
    assert_eq!(split(&whole, 1, 1), Ok((8, 1, 124)));
    assert_eq!(split(&whole, 2, 40), Ok((40, 2, 52)));
    assert_eq!(split(&whole, 80, 8), Ok((8, 15, 12)), "one of the clusters has room for one group only");
    assert_eq!(split(&whole, 1, 133), Err(CUresult::CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION));
    program.finish();
}

/// cuda.h, at `cuDevSmResourceSplitByCount` and `cuDevResourceGenerateDesc`.
#[test]
fn what_comes_out_of_a_split_is_put_together_but_not_split_again() {
    let stand_in = StandIn::lock();
    stand_in.set_devices(2, 132, 1 << 30);
    let program = Program::start_on(stand_in);
    // SAFETY: zero is a value of each of its fields.
    let none: CUdevResource = unsafe { std::mem::zeroed() };
    let groups_of = |device: i32| {
        let (mut whole, mut rest, mut groups, mut count) = (none, none, [none; 20], 20);
        let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        cuda!(cuDeviceGetDevResource(device, &mut whole, kind)).unwrap();
        cuda!(cuDevSmResourceSplitByCount(groups.as_mut_ptr(), &mut count, &whole, &mut rest, 0, 8)).unwrap();
        assert_eq!(count, 15);
        (groups, rest)
    };
    let (groups, rest) = groups_of(0);
    let refused = Err(CUresult::CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    for part in [&groups[0], &rest] {
        assert_eq!(split(part, 1, 8).map(drop), refused);
    }
    let describe = |mut parts: Vec<CUdevResource>| {
        let mut description = std::ptr::null_mut();
        cuda!(cuDevResourceGenerateDesc(&mut description, parts.as_mut_ptr(), parts.len() as u32)).map(|()| description)
    };
    assert_eq!(describe(vec![groups[0], groups_of(0).0[1]]).map(drop), refused, "of two splits");
    assert_eq!(describe(vec![groups[0], groups_of(1).0[1]]).map(drop), refused, "of two devices");
    assert_eq!(describe(vec![groups[0], groups[0]]).map(drop), refused, "twice");
    program.stand_in.forget();
    let mut green = std::ptr::null_mut();
    cuda!(cuGreenCtxCreate(&mut green, describe(vec![groups[3], groups[0], rest]).unwrap(), 0, 1)).unwrap();
    let partitions = program.stand_in.partitions();
    let (handle, numbers) = &partitions[0];
    assert_eq!((*handle, numbers.len()), (green as u64, 28));
    assert!(numbers.starts_with(&[0, 1, 2, 3, 4, 5, 6, 7]) && numbers[8..].windows(2).all(|pair| pair[0] < pair[1]));
    cuda!(cuGreenCtxDestroy(green)).unwrap();
    program.finish();
}

#[test]
fn a_green_context_has_its_share_and_its_streams() {
    let program = Program::start();
    // SAFETY: zero is a value of each of its fields.
    let (mut whole, mut part): (CUdevResource, CUdevResource) = unsafe { std::mem::zeroed() };
    let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
    cuda!(cuDeviceGetDevResource(0, &mut whole, kind)).unwrap();
    let mut groups = 1;
    cuda!(cuDevSmResourceSplitByCount(&mut part, &mut groups, &whole, std::ptr::null_mut(), 0, 32)).unwrap();
    let (mut description, mut green) = (std::ptr::null_mut(), std::ptr::null_mut());
    cuda!(cuDevResourceGenerateDesc(&mut description, &mut part, 1)).unwrap();
    cuda!(cuGreenCtxCreate(&mut green, description, 0, 1)).unwrap();
    assert_eq!(program.stand_in.partitions()[0].1.len(), 32);
    let (mut of_stream, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
    assert_eq!(cuda!(cuGreenCtxStreamCreate(&mut stream, green, 0, 0)), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    program.stand_in.forget();
    cuda!(cuGreenCtxStreamCreate(&mut stream, green, 1, -1)).unwrap();
    cuda!(cuStreamGetCtx(stream, &mut of_stream)).unwrap();
    assert_eq!(of_stream as u64, green as u64);
    assert_eq!(program.stand_in.count(Count::GreenContexts), 1);
    cuda!(cuStreamDestroy_v2(stream)).unwrap();
    cuda!(cuGreenCtxDestroy(green)).unwrap();
    assert_eq!(cuda!(cuCtxSetCurrent(of_stream)), Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
    program.stand_in.forget();
    program.finish();
}

#[test]
fn a_context_that_goes_says_what_was_left() {
    let program = Program::start();
    crate::program::stream();
    cuda!(cuDevicePrimaryCtxRelease_v2(0)).unwrap();
    assert_eq!(program.stand_in.leaks(), Vec::<String>::new());
    assert!(program.stand_in.mistakes()[0].contains("1 streams"), "{:?}", program.stand_in.mistakes());
}
