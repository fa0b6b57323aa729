//! libFuzzer on [`downbeat_fuzz::calibration`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::calibration(data));
